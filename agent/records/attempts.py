"""How often an image was being judged when the agent was ended: a durable count, so that no image ends it for ever.

Guarantees: a key that was begun, and not ended, when the process went away counts one more when the log is opened the
next time; a key is forgotten once it is settled. What is written survives the process however it ends; not synced, it
may be lost with the machine's power, and then nothing is counted, which blames nobody. A line that was cut by the end
is passed over. A disk that refuses costs the counts of this run, is told, and stops nothing.

The file holds one JSON object a line: {"begun": [key, ...]}, {"ended": [key, ...]}, {"settled": key}, and, where a run
began, {"counts": {key: attempts}}. It is written anew at each opening, and when it has grown to COMPACT_BYTES.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

log = logging.getLogger(__name__)

COMPACT_BYTES = 4 * 1024 * 1024


class AttemptLog:
    """The counts of one line, for any thread; opening it counts what the run before left begun."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._begun: Counter[str] = Counter()  # batches under way, of this run
        self._counts = _counts_in(path)
        self._descriptor: int | None = None
        self._size_bytes = 0
        self._rewrite()

    def attempts(self, key: str) -> int:
        """How many runs ended while this key was being judged."""
        return self._counts.get(key, 0)

    def begun(self, keys: Sequence[str]) -> None:
        """These are being judged from now on."""
        with self._lock:
            self._begun.update(keys)
            self._write({"begun": list(keys)})

    def ended(self, keys: Sequence[str]) -> None:
        """The process has survived these; they are not settled yet."""
        with self._lock:
            self._begun.subtract(keys)
            self._begun = +self._begun
            self._write({"ended": list(keys)})

    def forgive(self) -> None:
        """Whatever is begun has nothing to do with what ends this run, such as a device that is lost."""
        with self._lock:
            begun, self._begun = self._begun, Counter()
            self._write({"ended": list(begun.elements())})

    def settled(self, key: str) -> None:
        """This key has its verdict: nothing is counted of it any more."""
        with self._lock:
            if self._counts.pop(key, None) is not None:
                self._write({"settled": key})

    def close(self) -> None:
        """Nothing more is written. What is begun now counts at the next opening."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _write(self, entry: Mapping[str, object]) -> None:
        if self._descriptor is None:
            return
        line = (json.dumps(entry) + "\n").encode()
        try:
            if os.write(self._descriptor, line) != len(line):
                raise OSError("the disk took a part of a line only")
        except OSError as error:
            self._give_up(error)
            return
        self._size_bytes += len(line)
        if self._size_bytes > COMPACT_BYTES:
            self._rewrite()

    def _rewrite(self) -> None:
        """The file with nothing but what still counts; whole or not at all."""
        self._close()
        draft = self.path.with_name(f"{self.path.name}.new")
        lines = [{"counts": self._counts}, {"begun": list(self._begun.elements())}]
        content = "".join(json.dumps(line) + "\n" for line in lines).encode()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            draft.write_bytes(content)
            draft.replace(self.path)
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        except OSError as error:
            self._give_up(error)
        self._size_bytes = len(content)

    def _give_up(self, error: OSError) -> None:
        """Half a line may stand at the end: more behind it would be read with it."""
        log.error(
            "attempts_not_written file=%s reason=%s: until the next start no image is found out that ends the agent",
            self.path, error.strerror or error,
        )  # fmt: skip
        self._close()


def _counts_in(path: Path) -> dict[str, int]:
    """The counts of a file after the run that wrote it has ended."""
    counts: Counter[str] = Counter()
    begun: Counter[str] = Counter()
    for entry in _entries(path):
        for key in _keys(entry.get("begun")):
            begun[key] += 1
        for key in _keys(entry.get("ended")):
            begun[key] -= 1
        if isinstance(entry.get("settled"), str):
            counts.pop(entry["settled"], None)
        if isinstance(entry.get("counts"), dict):
            counts.update({key: number for key, number in entry["counts"].items() if isinstance(number, int)})
    counts.update({key: 1 for key, number in begun.items() if number > 0})
    return dict(counts)


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
        except ValueError:  # cut, or damaged: what it said is not known
            continue
        if isinstance(entry, dict):
            yield entry


def _keys(listed: object) -> list[str]:
    return [key for key in listed if isinstance(key, str)] if isinstance(listed, list) else []
