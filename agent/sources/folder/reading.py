"""Thread of one folder that reads the bytes of claimed images.

Guarantees: the bytes are those of the file seen complete; a changed file is put back. A read that the filesystem
refuses is retried with backoff. A file is unreadable if it is too large, or if every try failed for
PATIENCE_S while its folder could be read; while the folder cannot be read, its files wait. Bytes read and not
released exceed the budget by at most one image. A hanging filesystem delays only its own folder.
Structure: `step` does all work, with time as a parameter; its thread only waits.
"""

from __future__ import annotations

import errno
import heapq
import logging
import os
import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import count
from queue import SimpleQueue
from stat import S_ISREG
from typing import TYPE_CHECKING

from agent.faults.backoff import Backoff
from agent.faults.errors import FileChanged
from agent.sources.folder.files.identity import printable, sighting_in
from experts.errors import ImageTooLarge
from experts.images import DEFAULT_MAX_PIXELS, largest_file_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from agent.sources.folder.claiming import ClaimedImage
    from agent.sources.folder.files.identity import Claimed

log = logging.getLogger(__name__)

BACKOFF = Backoff(0.25, 15.0)
PATIENCE_S = 60.0  # longer than the usual absence of a share, shorter than a board waits
IDLE_S = 60.0  # between two steps when nothing is due
LARGE_BYTES = 64 * 1024 * 1024
STUCK_S = 30.0  # a longer read is logged: the filesystem hangs
READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class ReaderCallbacks:
    """Called on the reader's thread. Each image ends with one call of ``read``, ``changed`` or ``unreadable``.

    ``changed``: the file was replaced since its sighting. ``unreadable``: why the file can never be judged.
    ``is_sound``: True while the folder itself can be read. ``during_large`` is entered for files of more than
    LARGE_BYTES, which may end a process with little memory.
    """

    read: Callable[[ClaimedImage, bytes], None]
    changed: Callable[[ClaimedImage], None]
    unreadable: Callable[[ClaimedImage, str], None]
    is_sound: Callable[[ClaimedImage], bool] = lambda _: True
    during_large: Callable[[ClaimedImage], AbstractContextManager[object]] = nullcontext


def read_as_seen(image: ClaimedImage, max_pixels: int) -> bytes:
    """Bytes of the file. Raises FileChanged, ImageTooLarge, or OSError for transient errors."""
    try:
        descriptor = os.open(image.file.path, READ_FLAGS)
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENXIO}:  # replaced by a link or a socket
            raise FileChanged(image.file.relpath) from error
        raise
    with open(descriptor, "rb") as file:
        before = os.fstat(descriptor)
        if not (S_ISREG(before.st_mode) and _is_as_seen(before, image.file)):
            raise FileChanged(image.file.relpath)
        limit_bytes = largest_file_bytes(max_pixels)
        if before.st_size > limit_bytes:
            raise ImageTooLarge(
                printable(image.file.relpath),
                f"{before.st_size} bytes are more than any image of {max_pixels} pixels has",
            )
        content = file.read(before.st_size + 1)  # one byte more, to detect growth
        if len(content) != before.st_size or _stamp(os.fstat(descriptor)) != _stamp(before):
            raise FileChanged(image.file.relpath)
    return content


class ImageReader:
    """``held_bytes``: read and not released; ``alarm``: error of the filesystem at the last try."""

    def __init__(
        self,
        folder: str,
        callbacks: ReaderCallbacks,
        *,
        budget_bytes: int,
        max_pixels: int = DEFAULT_MAX_PIXELS,
    ) -> None:
        self._folder = folder
        self._callbacks = callbacks
        self._budget_bytes = budget_bytes
        self._max_pixels = max_pixels
        self._came: SimpleQueue[ClaimedImage] = SimpleQueue()
        self._tries: list[tuple[float, int, ClaimedImage]] = []  # a heap: time of the next try, and its number
        self._numbers = count()
        self.alarm: str | None = None
        self._logged: set[str] = set()  # reasons logged since the last successful read
        self.held_bytes = 0
        self._guard = threading.Lock()  # guards the field above
        self._reading_since: float | None = None
        self._reported_since: float | None = None
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"reader-{folder}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Stop reading. A hanging read ends with the process."""
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def read_image(self, image: ClaimedImage) -> None:
        """Queue the image. For any thread; returns at once."""
        self._came.put(image)
        self._wake.set()

    def add_bytes(self, size_bytes: int) -> None:
        with self._guard:
            self.held_bytes += size_bytes

    def release_bytes(self, size_bytes: int) -> None:
        self.add_bytes(-size_bytes)
        self._wake.set()

    @property
    def waiting(self) -> int:
        return len(self._tries) + self._came.qsize()

    def report_hang(self) -> None:
        """Log each read that takes longer than STUCK_S, once. For another thread than the reader's."""
        since = self._reading_since
        if since is not None and since != self._reported_since and time.monotonic() - since > STUCK_S:
            self._reported_since = since
            log.error(
                "intake_read_hangs folder=%s seconds=%.0f: its filesystem does not answer; other folders go on",
                self._folder, time.monotonic() - since,
            )  # fmt: skip

    def step(self, now: float) -> float:
        """Read due images while there is room; returns the seconds until the next step."""
        while not self._came.empty():
            self._try_at(now, self._came.get())
        while self._tries and self._tries[0][0] <= now and self._has_room() and not self._stopping.is_set():
            self._attempt(heapq.heappop(self._tries)[-1], now)
        if not self._tries or not self._has_room():
            return IDLE_S
        return max(self._tries[0][0] - now, 0.0)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                delay_s = self.step(time.monotonic())
            except Exception:  # boundary of the thread: after a failed callback the next file is read
                log.exception("intake_reader_step_failed folder=%s", self._folder)
                delay_s = BACKOFF.first_s
            self._wake.wait(delay_s)
            self._wake.clear()

    def _has_room(self) -> bool:
        return self.held_bytes < self._budget_bytes

    def _try_at(self, at: float, image: ClaimedImage) -> None:
        heapq.heappush(self._tries, (at, next(self._numbers), image))

    def _attempt(self, image: ClaimedImage, now: float) -> None:
        self._reading_since = time.monotonic()
        try:
            is_large = image.file.sighting.size_bytes > LARGE_BYTES
            with self._callbacks.during_large(image) if is_large else nullcontext():
                content = read_as_seen(image, self._max_pixels)
        except FileChanged:
            self._callbacks.changed(image)
        except ImageTooLarge as error:
            self._callbacks.unreadable(image, str(error))
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not image.file.is_ours:  # its owner may remove a kept file
                self._callbacks.changed(image)
            else:
                self._failed(image, now, error)
        except Exception as error:  # boundary of the thread: this file waits, others are read
            log.exception("intake_read_broke file=%s", printable(image.file.relpath))
            self._failed(image, now, OSError(errno.EIO, f"{type(error).__name__}: {error}"))
        else:
            self.add_bytes(len(content))
            if self.alarm is not None:
                log.warning("intake_read_again folder=%s", self._folder)
                self.alarm = None
                self._logged.clear()
            self._callbacks.read(image, content)
        finally:
            self._reading_since = None

    def _failed(self, image: ClaimedImage, now: float, error: OSError) -> None:
        """Retry later; give the file up if only this file has failed for PATIENCE_S."""
        reason, relpath = error.strerror or str(error), printable(image.file.relpath)
        is_sound = self._callbacks.is_sound(image)
        since = now if image.failing_since is None or not is_sound else image.failing_since
        if now - since >= PATIENCE_S and is_sound:
            tried = f"cannot be read ({reason}), tried for {now - since:.0f} s"
            self._callbacks.unreadable(image, f"{relpath}: {tried}")
            return
        if reason not in self._logged:
            self._logged.add(reason)
            log.error("intake_not_read file=%s reason=%s: kept and tried again", relpath, reason)
        self.alarm = reason
        failures = image.failures + 1
        self._try_at(now + BACKOFF.pause_s(failures), replace(image, failures=failures, failing_since=since))


def _is_as_seen(status: os.stat_result, file: Claimed) -> bool:
    """True if the file is the one seen. After our rename the inode may differ: some filesystems invent inodes."""
    found, seen = sighting_in(status), file.sighting
    if file.is_ours:
        return (found.size_bytes, found.mtime_ns) == (seen.size_bytes, seen.mtime_ns)
    return found == seen


def _stamp(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
