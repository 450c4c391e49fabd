"""Pages of libraries, as Linux counts those of a mapping. A file stands for a library."""

import ctypes
import mmap
import re
import sys
from pathlib import Path

import pytest

from agent.runtime.machine.libraries import release_loaded_pages

PAGES = 256
SIZE = PAGES * mmap.PAGESIZE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="mappings are listed as on Linux")


class Library:
    """A file that is mapped as a linker maps one: private, and read-only once ``own`` pages are written."""

    def __init__(self, path, own=0):
        path.write_bytes(bytes(range(256)) * (SIZE // 256))
        with path.open("rb") as file:
            self._mapped = mmap.mmap(file.fileno(), SIZE, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        self._path = str(path)
        for page in range(own):
            self._mapped[page * mmap.PAGESIZE] = 255
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapped))
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(SIZE), mmap.PROT_READ) == 0

    def read(self):
        return bytes(self._mapped)

    def resident_bytes(self):
        listed = Path("/proc/self/smaps").read_text()
        return 1024 * int(
            re.search(rf" {re.escape(self._path)}\n.*?^Rss: +(\d+) kB$", listed, re.DOTALL | re.MULTILINE)[1]
        )


def test_pages_equal_to_their_file_are_released_and_read_again(tmp_path):
    library = Library(tmp_path / "lib.so.12")
    before = library.read()
    assert library.resident_bytes() == SIZE
    release_loaded_pages(lambda: False)
    assert library.resident_bytes() == 0
    assert library.read() == before


def test_mapping_with_a_page_written_by_the_linker_is_kept(tmp_path):
    library = Library(tmp_path / "lib.so", own=1)
    before = library.read()
    release_loaded_pages(lambda: False)
    assert library.resident_bytes() == SIZE
    assert library.read() == before
    assert before[0] == 255


def test_no_page_is_released_on_a_box_with_a_gpu(tmp_path):
    library = Library(tmp_path / "lib.so")
    library.read()
    release_loaded_pages(lambda: True)
    assert library.resident_bytes() == SIZE
