"""TIFF files as their writers leave them, and as somebody made them up: the end is found at a bounded cost."""

import io
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experts.image_files.completeness import Completeness, completeness
from experts.image_files.tiff import LARGEST_DIRECTORY, LARGEST_TABLE
from tests.pictures import encoded

PIXELS = np.random.default_rng(7).integers(1, 255, (64, 64, 3), dtype=np.uint8)
LONG, SHORT, BYTE = 4, 3, 1
READ_BYTES = 20 * LARGEST_DIRECTORY + 4 * 8 * LARGEST_TABLE + 64 * 1024  # what the module says, and small reads
STRIPS, SIZES = 273, 279
WAYS = ({}, {"compression": "tiff_lzw"}, {"big_tiff": True})


class CountingFile(io.BytesIO):
    """Counts what is read, and may claim to be longer than it is: zeros follow."""

    def __init__(self, content, size=None):
        super().__init__(content)
        self.size = len(content) if size is None else size
        self.bytes_read = 0
        self.place = 0

    def seek(self, offset, whence=io.SEEK_SET):
        self.place = self.size + offset if whence == io.SEEK_END else offset
        return self.place

    def read(self, length=-1):
        length = self.size - self.place if length is None or length < 0 else min(length, max(self.size - self.place, 0))
        self.bytes_read += length
        content = self.getvalue()[self.place : self.place + length].ljust(length, b"\0")
        self.place += length
        return content


def directory(*entries, order="<", is_big=False):
    """A TIFF file of nothing but a directory: (tag, type, count, value or offset)."""
    start = b"II" if order == "<" else b"MM"
    if is_big:
        head = start + struct.pack(order + "HHHQ", 43, 8, 0, 16) + struct.pack(order + "Q", len(entries))
        return head + b"".join(struct.pack(order + "HHQQ", *entry) for entry in entries) + bytes(8)
    head = start + struct.pack(order + "HI", 42, 8) + struct.pack(order + "H", len(entries))
    return head + b"".join(struct.pack(order + "HHII", *entry) for entry in entries) + bytes(4)


def judged(content, size=None):
    file = CountingFile(content, size)
    found = completeness(file)
    assert file.bytes_read <= READ_BYTES
    return found


@pytest.mark.parametrize(
    "options", [{}, {"compression": "tiff_lzw"}, {"big_tiff": True}, {"tiffinfo": {270: "x" * 999}}]
)
def test_written_tiff_is_whole_and_every_cut_of_it_is_recognised(options):
    content = encoded(PIXELS, "TIFF", **options)
    assert judged(content) is Completeness.WHOLE
    assert all(judged(content[:kept]) is Completeness.CUT for kept in range(4, len(content) - 1, 97))


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("is_big", [False, True])
@pytest.mark.parametrize(("end", "expected"), [(50, Completeness.WHOLE), (51, Completeness.CUT)])
def test_pixels_of_a_tiff_end_at_the_size_of_its_directory(order, is_big, end, expected):
    content = directory((STRIPS, LONG, 1, 0), (SIZES, LONG, 1, 0), order=order, is_big=is_big)
    count = end + len(content) - 50
    letters = "HHQQ" if is_big else "HHII"
    value = count << 32 if is_big and order == ">" else count  # it lies at the start of its place
    changed = content.replace(
        struct.pack(order + letters, SIZES, LONG, 1, 0), struct.pack(order + letters, SIZES, LONG, 1, value)
    )
    assert judged(changed[:-4] + b"last") is expected


@pytest.mark.parametrize("is_big", [False, True])
def test_tiff_table_of_four_gibibytes_is_not_read(is_big):
    """The file has that size, too: sparse, it costs its sender nothing."""
    table = (1 << 30) - 1
    content = directory((STRIPS, LONG, table, 512), (SIZES, LONG, table, 512), is_big=is_big)
    tracemalloc.start()
    try:
        assert judged(content, size=9 << 30) is Completeness.UNKNOWN
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert judged(content) is Completeness.CUT


def test_largest_examined_tiff_table_is_read_to_its_end():
    place = 512
    strips = np.zeros(LARGEST_TABLE, "<u4")
    content = directory((STRIPS, LONG, strips.size, place), (SIZES, LONG, strips.size, place + strips.nbytes))
    sizes = strips.copy()
    body = content.ljust(place, b"\0") + strips.tobytes()
    size = len(body) + sizes.nbytes
    sizes[-1] = size
    assert judged(body + sizes.tobytes()) is Completeness.WHOLE
    sizes[-1] = size + 1
    assert judged(body + sizes.tobytes()) is Completeness.CUT


def test_tiff_with_impossible_claims_counts_as_cut():
    """Offsets that overflow with their counts, a directory too long, and tags that claim the whole file each."""
    assert judged(directory((STRIPS, 16, 1, 2**64 - 8), (SIZES, 16, 1, 16), is_big=True)) is Completeness.CUT
    strip = [(STRIPS, LONG, 1, 0), (SIZES, LONG, 1, 8)]
    assert judged(directory(*strip * 2)) is not Completeness.CUT
    for length in (LARGEST_DIRECTORY + 1, 0xFFFF):
        assert judged(directory(*strip * (length // 2), strip[0])) is Completeness.CUT
    claims = [(1000 + number, BYTE, 40_000, 8) for number in range(3000)]
    assert judged(directory(*strip, *claims).ljust(50_000, b"x")) is Completeness.CUT


def test_makers_tag_that_points_nowhere_harms_no_image():
    maker = struct.pack("<HHII", 65000, BYTE, 100, 1 << 30)
    content = encoded(PIXELS, "TIFF")
    place = struct.unpack_from("<I", content, 4)[0]
    length = struct.unpack_from("<H", content, place)[0]
    entries = content[place + 2 : place + 2 + 12 * length]
    moved = content[:4] + struct.pack("<I", len(content)) + content[8:]
    changed = moved + struct.pack("<H", length + 1) + entries + maker + b"\0\0\0\0" + b"end."
    assert judged(changed) is Completeness.WHOLE


@given(
    st.lists(
        st.tuples(
            st.sampled_from([STRIPS, SIZES, 324, 325, 259, 256, 1000]), st.integers(0, 20),
            st.integers(0, 2**32 - 1) | st.integers(0, 8), st.integers(0, 2**32 - 1) | st.integers(0, 400),
        ),
        max_size=12,
    ),
    st.sampled_from("<>"),
    st.booleans(),
    st.binary(max_size=64),
    st.sampled_from([None, 1 << 20, 1 << 34]),
)  # fmt: skip
def test_any_tiff_directory_is_judged_at_a_bounded_cost(entries, order, is_big, tail, size):
    content = directory(*entries, order=order, is_big=is_big) + tail
    assert judged(content, None if size is None else size + len(content)) in set(Completeness)


@given(st.sampled_from([encoded(PIXELS, "TIFF", **each) for each in WAYS]), st.data())
def test_changed_bytes_of_a_tiff_are_judged_at_a_bounded_cost(content, data):
    changed = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, 15) | st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    assert judged(bytes(changed)) in set(Completeness)
