"""Durable count of process ends while an image was judged, so that no image ends the agent repeatedly.

Guarantees: a key begun but not ended at the end of the process counts one more at the next opening, until it is
settled. Lines survive any end of the process; they are not synced, so a power cut may lose lines and counts. A cut
line is skipped. A disk that refuses or hangs ends the counting of this run, which is logged.

One JSON object per line: {"begun": [key, ...]}, {"ended": [key, ...]}, {"settled": key}, and, at the start of a run,
{"counts": {key: attempts}}. The file is compacted at each opening, and beyond COMPACT_BYTES.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import Counter
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from experts.daemon_threads import DaemonThreads
from experts.filesystem import whole_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from concurrent.futures import Future
    from pathlib import Path

log = logging.getLogger(__name__)

COMPACT_BYTES = 4 * 1024 * 1024
WAIT_S = 1.0  # limit for writing a line, which takes microseconds


class _Tally:
    """Sum of a file's lines. Malformed values are skipped."""

    def __init__(self, counts: Mapping[str, int]) -> None:
        self.counts = Counter(counts)
        self.begun: Counter[str] = Counter()

    def apply(self, entry: Mapping[str, object]) -> None:
        self.begun.update(_keys(entry.get("begun")))
        self.begun.subtract(_keys(entry.get("ended")))
        self.begun = +self.begun
        settled, counts = entry.get("settled"), entry.get("counts")
        if isinstance(settled, str):
            self.counts.pop(settled, None)
        if isinstance(counts, dict):
            self.counts.update({key: number for key, number in counts.items() if isinstance(number, int)})


class AttemptLog:
    """Counts of one installation, for any thread; opening counts keys that the earlier run left begun.

    A separate thread writes. ``begun`` waits at most WAIT_S for its line: a hanging disk must not stop the agent.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._begun: Counter[str] = Counter()  # keys of batches under way, in this run
        self._written = _Tally(_counts_in(path))  # the writer thread's
        self._counts = dict(self._written.counts)
        self._writer = DaemonThreads(1, "attempts")
        self._is_closed = False
        self._given_up = threading.Event()
        self._descriptor = -1
        self._opened = ExitStack()
        self._size_bytes = 0
        self._rewrite()

    def attempts(self, key: str) -> int:
        """Number of runs that ended while this key was being judged."""
        return self._counts.get(key, 0)

    def begun(self, keys: Sequence[str]) -> None:
        """Count batches of these keys as under way; returns after the write, unless the disk refuses or hangs."""
        with self._lock:
            self._begun.update(keys)
            line = self._write({"begun": list(keys)})
        if line is not None:
            try:
                line.result(WAIT_S)
            except TimeoutError:
                self._give_up("the disk does not answer")

    def ended(self, keys: Sequence[str]) -> None:
        """Record that the process survived these keys' batches; the keys are not settled yet."""
        with self._lock:
            self._begun.subtract(keys)
            self._begun = +self._begun
            self._write({"ended": list(keys)})

    def forgive(self) -> None:
        """Count no key for this end of the process, which was requested or has another cause."""
        with self._lock:
            begun, self._begun = self._begun, Counter()
            self._write({"ended": list(begun.elements())})

    def settled(self, key: str) -> None:
        with self._lock:
            if self._counts.pop(key, None) is not None:
                self._write({"settled": key})

    def close(self) -> None:
        """Stop writing. Keys that are begun now count at the next opening."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._writer.submit(self._opened.close)
        self._writer.stop(WAIT_S)

    def _write(self, entry: Mapping[str, object]) -> Future[None] | None:
        """Queue a line; None after giving up, or after the close."""
        if self._given_up.is_set() or self._is_closed:
            return None
        return self._writer.submit(self._append, entry)

    def _append(self, entry: Mapping[str, object]) -> None:
        if self._given_up.is_set():
            return
        content = (json.dumps(entry) + "\n").encode()
        try:
            if os.write(self._descriptor, content) != len(content):
                raise OSError("the disk took a part of a line only")
        except OSError as error:
            self._give_up(error.strerror or str(error))
            return
        self._written.apply(entry)
        self._size_bytes += len(content)
        if self._size_bytes > COMPACT_BYTES:
            self._rewrite()

    def _rewrite(self) -> None:
        """Replace the file by the sum of its lines, atomically."""
        self._opened.close()
        entries = {"counts": self._written.counts}, {"begun": list(self._written.begun.elements())}
        content = "".join(json.dumps(entry) + "\n" for entry in entries).encode()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(self.path) as file:
                file.write(content)
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            self._opened.callback(os.close, self._descriptor)
        except OSError as error:
            self._give_up(error.strerror or str(error))
        self._size_bytes = len(content)

    def _give_up(self, reason: str) -> None:
        """Stop writing in this run: the file may end in half a line, which would spoil the next one."""
        if self._given_up.is_set():
            return
        self._given_up.set()
        log.error(
            "attempts_not_written file=%s reason=%s: until the next start no image is found out that ends the agent",
            self.path, reason,
        )  # fmt: skip


def _counts_in(path: Path) -> Mapping[str, int]:
    tally = _Tally({})
    for entry in _entries(path):
        tally.apply(entry)
    return tally.counts + Counter(dict.fromkeys(tally.begun, 1))


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return
    except OSError as error:
        log.error("attempts_not_read file=%s reason=%s: nothing is counted of the run before", path, error.strerror)
        return
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:  # cut, or damaged
            continue
        if isinstance(entry, dict):
            yield entry


def _keys(listed: object) -> list[str]:
    return [key for key in listed if isinstance(key, str)] if isinstance(listed, list) else []
