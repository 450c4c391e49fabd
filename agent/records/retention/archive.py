"""Archive of images from cameras and the API: files below `images/` in the line's state.

Guarantees: a file appears atomically, once for an image with several parts. No image replaces another. File names are
valid on every filesystem. Keeping an image delays its verdict by KEEP_DEADLINE_S at most: if the disk refuses or hangs,
the verdict is stored without its image, which is logged and counted.

    images/YYYY-MM-DD/NAME~DIGEST.SUFFIX    local day of arrival, readable part of the name, digest of the bytes
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from agent.places.mounts import MountedFolder
from experts.daemon_threads import DaemonThreads
from experts.expert import Verdict
from experts.filesystem import open_folder, remove_empty, sync_folder, unlink_below, whole_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from datetime import datetime
    from pathlib import Path

log = logging.getLogger(__name__)

Keeps: TypeAlias = Literal["none", "ng", "all"]

PART = "#"  # in an image's name, before the ref of a part
STRANGE = re.compile(r"[^\w.-]+")
LONGEST_NAME_BYTES = 100
DIGEST_DIGITS = 32
DAY = re.compile(r"\d{4}-\d{2}-\d{2}")
KEPT = re.compile(rf".+~[0-9a-f]{{{DIGEST_DIGITS}}}\.\w+(\.tmp)?")  # also a temporary file of a killed writer
SUFFIXES = ((b"\x89PNG", ".png"), (b"\xff\xd8", ".jpg"), (b"BM", ".bmp"), (b"II", ".tif"), (b"MM", ".tif"))
OTHER_SUFFIX = ".img"
KEEP_DEADLINE_S = 5.0  # a disk that works takes milliseconds
WAITING_BYTES = 256 * 1024 * 1024  # bytes of images that wait for a slow disk; further images are not kept


class ImageArchive:
    """Files of the archive. For any thread; every method may raise OSError. ``place``: its folder, maybe a mount."""

    def __init__(self, folder: Path, keeps: Keeps) -> None:
        self.folder = folder
        self.place = MountedFolder(folder, folder.parent / "places")
        self._keeps = keeps
        self._lock = threading.Lock()  # serialises ``keep`` and ``discard`` of one file

    def wants(self, verdict: Verdict) -> bool:
        """True if images of this verdict are kept. UNKNOWN is kept with NG."""
        return self._keeps == "all" or (self._keeps == "ng" and verdict is not Verdict.OK)

    def keep(self, content: bytes, name: str, at: datetime) -> str:
        """Write the image if missing; returns its path below the folder. ``at``: arrival."""
        relpath = f"{at.astimezone():%Y-%m-%d}/{file_name(content, name)}"
        target = self.folder / relpath
        with self._lock:
            self.place.make()
            is_new_day = not target.parent.is_dir()
            with open_folder(target.parent, self.folder, makes=True) as day:
                if is_new_day:
                    sync_folder(self.folder)
                try:
                    os.utime(target.name, dir_fd=day, follow_symlinks=False)  # another result needs it
                except FileNotFoundError:
                    with whole_file(target, below=self.folder) as file:
                        file.write(content)
        return relpath

    def discard(self, relpath: str, changed_ns: int) -> bool:
        """Remove a file unless it changed since ``changed_ns``; True if it is gone."""
        target = self.folder / relpath
        with self._lock:
            try:
                if target.lstat().st_mtime_ns != changed_ns:
                    return False
                unlink_below(target, self.folder)
            except FileNotFoundError:
                pass
            remove_empty(target.parent, self.folder)
        return True


@dataclass(frozen=True, slots=True)
class KeeperStatistics:
    """Counts since the start. ``alarm``: why the last image was not kept; None: no alarm."""

    kept: int
    not_kept: int
    alarm: str | None


class ImageKeeper:
    """Keeps images on its thread. For any thread. A verdict waits at most KEEP_DEADLINE_S for its image.

    An image that misses the deadline is not named by its result; its file may stay as an orphan. While the disk hangs,
    further verdicts do not wait.
    """

    def __init__(self, archive: ImageArchive) -> None:
        self.archive = archive
        self._thread = DaemonThreads(1, "images")
        self._watch = DaemonThreads(1, "images_watch")
        self._lock = threading.Lock()  # guards all fields below
        self._submitted = 0
        self._ended = 0
        self._waiting_bytes = 0
        self._hangs = False
        self._kept = 0
        self._not_kept = 0
        self._alarm: str | None = None

    def keep(self, content: bytes, name: str, at: datetime, then: Callable[[str | None], None]) -> None:
        """Keep an image, and call ``then`` with its path below the folder; None if not kept in time. ``then``: once,
        on this or a keeper's thread; never after a ``stop`` that timed out."""
        deadline_s = time.monotonic() + KEEP_DEADLINE_S
        with self._lock:
            refusal = self._refusal(len(content))
            if refusal is None:
                self._waiting_bytes += len(content)
                self._submitted += 1
                kept = self._thread.submit(self._keep, content, name, at, deadline_s)
                self._watch.submit(self._await, kept, self._submitted, deadline_s, name, then)
                return
        self._failed(name, refusal)
        then(None)

    def stop(self, timeout_s: float) -> bool:
        """Keep the waiting images, then stop; False after ``timeout_s``."""
        return self._thread.stop(timeout_s) and self._watch.stop(timeout_s)

    def statistics(self) -> KeeperStatistics:
        with self._lock:
            return KeeperStatistics(self._kept, self._not_kept, self._alarm)

    def _refusal(self, size_bytes: int) -> str | None:
        """Reason not to wait for the disk; None: wait. Call under the lock."""
        if self._hangs:
            return _no_answer()
        if self._waiting_bytes and self._waiting_bytes + size_bytes > WAITING_BYTES:
            return f"the disk is too slow: {WAITING_BYTES} bytes of images wait for it"
        return None

    def _keep(self, content: bytes, name: str, at: datetime, deadline_s: float) -> str:
        """Write an image. Raises TimeoutError if its deadline passed in the queue, OSError from the disk."""
        try:
            if time.monotonic() >= deadline_s:
                raise TimeoutError
            return self.archive.keep(content, name, at)
        finally:
            with self._lock:
                self._waiting_bytes -= len(content)
                self._ended += 1
                self._hangs = False  # the thread is free again

    def _await(
        self, kept: Future[str], number: int, deadline_s: float, name: str, then: Callable[[str | None], None]
    ) -> None:
        """Release the verdict, at the latest at the deadline."""
        relpath = None
        try:
            relpath = kept.result(max(deadline_s - time.monotonic(), 0.0))
        except TimeoutError:
            with self._lock:
                self._hangs = self._ended < number
            self._failed(name, _no_answer())
        except OSError as error:
            self._failed(name, error.strerror or str(error))
        else:
            self._succeeded()
        try:
            then(relpath)
        except Exception:  # boundary of the keeper's threads
            log.exception("image_callback_failed image=%s", name)

    def _succeeded(self) -> None:
        with self._lock:
            self._kept += 1
            was_bad, self._alarm = self._alarm, None
        if was_bad:
            log.warning("images_kept_again folder=%s", self.archive.folder)

    def _failed(self, name: str, reason: str) -> None:
        with self._lock:
            self._not_kept += 1
            is_news, self._alarm = self._alarm != reason, reason
        if is_news:
            log.error("image_not_kept image=%s folder=%s reason=%s", name, self.archive.folder, reason)


def _no_answer() -> str:
    return f"the disk does not answer within {KEEP_DEADLINE_S:g} s: verdicts go on without their images"


def file_name(content: bytes, name: str) -> str:
    """File name of an image: equal for all its parts, unique for its bytes."""
    readable = STRANGE.sub("_", name.partition(PART)[0].rpartition("/")[2]).lstrip(".") or "image"
    readable = readable.encode()[:LONGEST_NAME_BYTES].decode("utf-8", "ignore")
    return f"{readable}~{hashlib.sha256(content).hexdigest()[:DIGEST_DIGITS]}{_suffix(content)}"


def _suffix(content: bytes) -> str:
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return ".webp"
    return next((suffix for start, suffix in SUFFIXES if content.startswith(start)), OTHER_SUFFIX)
