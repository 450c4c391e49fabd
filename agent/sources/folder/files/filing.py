"""Judged and refused files on their way to their shelves; what fails is tried again, and told once."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING

from agent.sources.folder.files.inbox import DONE, FAILED, NG
from experts.backoff import Backoff
from experts.expert import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import datetime
    from pathlib import Path

    from agent.sources.folder.files.inbox import Claimed, Inbox

log = logging.getLogger(__name__)

BACKOFF = Backoff(0.5, 30.0)
SHELF_OF = {Verdict.OK: DONE, Verdict.NG: NG, Verdict.UNKNOWN: FAILED}


@dataclass(slots=True)
class Filing:
    """File to put away. ``placed``: where it lies once moved; its explanation may be missing then."""

    file: Claimed
    key: str  # printable
    verdict: Verdict
    reason: str | None
    placed: Path | None = None
    retry_at: float = 0.0
    failures: int = 0


class Shelves:
    """Puts files away in `done/`, `ng/` and `failed/`, or deletes what was judged OK or NG. One thread at a time."""

    def __init__(self, inbox: Inbox, deletes: bool, wall: Callable[[], datetime]) -> None:
        self._inbox = inbox
        self._deletes = deletes
        self._wall = wall
        self._pending: list[tuple[float, int, Filing]] = []  # a heap: by when they are tried, then as they came
        self._numbers = count()
        self.filed = 0
        self.alarm: str | None = None

    def add(self, filing: Filing) -> None:
        heappush(self._pending, (filing.retry_at, next(self._numbers), filing))

    @property
    def pending(self) -> int:
        return len(self._pending)

    @property
    def files(self) -> Iterator[Claimed]:
        return (filing.file for _, _, filing in self._pending)

    @property
    def next_retry(self) -> float | None:
        return self._pending[0][0] if self._pending else None

    def work(self, now: float) -> None:
        """Put away what is due. Never raises for what the filesystem refuses: that is tried again."""
        for _ in range(len(self._pending)):  # each once, also where `now` is the end of all waiting
            if self._pending[0][0] > now:
                break
            filing = heappop(self._pending)[2]
            if not self._put_away(filing, now):
                self.add(filing)
        if not self._pending and self.alarm is not None:
            log.warning("intake_filing_again folder=%s", self._inbox.root)
            self.alarm = None

    def _put_away(self, filing: Filing, now: float) -> bool:
        try:
            self._move(filing)
        except FileNotFoundError:
            if self._inbox.root.is_dir():  # removed by hand; while the whole folder is gone, it may come back
                log.warning("intake_file_vanished file=%s", printable(filing.file.relpath))
                return True
            self._postpone(filing, now, "the folder is gone")
            return False
        except OSError as error:
            self._postpone(filing, now, error.strerror or str(error))
            return False
        self.filed += 1
        return True

    def _move(self, filing: Filing) -> None:
        file = filing.file
        if filing.placed is None and not file.is_ours and self._inbox.sighting(file) != file.sighting:
            return  # another file has its name by now, which is looked at for itself
        if self._deletes and filing.verdict is not Verdict.UNKNOWN:
            self._inbox.delete(file)
            return
        shelf = SHELF_OF[filing.verdict]
        if filing.verdict is not Verdict.UNKNOWN:
            shelf = f"{shelf}/{self._wall():%Y-%m-%d}"
        if filing.placed is None:
            filing.placed = self._inbox.put_away(file, shelf, filing.key.rpartition("@")[2])
        if filing.verdict is Verdict.UNKNOWN:
            explanation: dict[str, object] = {
                "file": printable(file.relpath),
                "key": filing.key,
                "reason": filing.reason or "could not be judged",
                "at": self._wall().isoformat(timespec="milliseconds"),
            }
            self._inbox.explain(filing.placed, explanation)

    def _postpone(self, filing: Filing, now: float, reason: str) -> None:
        if self.alarm != reason:
            log.error("intake_not_filed file=%s reason=%s: kept and retried", printable(filing.file.relpath), reason)
        self.alarm = reason
        filing.failures += 1
        filing.retry_at = now + BACKOFF.pause_s(filing.failures)


def printable(text: str) -> str:
    """The text with bytes that are not UTF-8 written as escapes: for logs, JSON and people."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
