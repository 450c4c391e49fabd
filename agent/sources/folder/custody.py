"""Files that were taken or refused, until they are put away or are back where they came from.

Guarantees: each file leaves once, however often its verdict is told. What the filesystem refuses is retried with
backoff, and logged once. A claimed file that is not here is an earlier run's, or was left behind by an error.
"""

from __future__ import annotations

import logging
import queue
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING

from agent.sources.folder.files.inbox import DONE, FAILED, NG, printable
from experts.backoff import Backoff
from experts.expert import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime
    from pathlib import Path

    from agent.line_file.intake import FolderSection
    from agent.sources.folder.files.inbox import Claimed, Inbox

log = logging.getLogger(__name__)

BACKOFF = Backoff(0.5, 30.0)
SHELF_OF = {Verdict.OK: DONE, Verdict.NG: NG, Verdict.UNKNOWN: FAILED}


@dataclass(frozen=True, slots=True)
class Settlement:
    """A stored verdict: its file may go."""

    key: str
    verdict: Verdict
    reason: str | None


@dataclass(slots=True)
class Filing:
    """File to put away. ``placed``: where it lies once moved; its explanation may be missing then."""

    file: Claimed
    settled: Settlement
    placed: Path | None = None
    failures: int = 0


class Custody:
    """Claimed and refused files of one folder; all but ``settle`` and ``withdraw`` are for the folder's thread.

    Judged files go to `done/`, `ng/` and `failed/`, or are deleted unless they are UNKNOWN. Where files are kept, only
    what an earlier run had claimed is put away.
    """

    def __init__(self, config: FolderSection, inbox: Inbox, wall: Callable[[], datetime]) -> None:
        self._after = config.after
        self._inbox = inbox
        self._wall = wall
        self._settled: queue.SimpleQueue[Settlement] = queue.SimpleQueue()
        self._withdrawn: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._in_flight: dict[str, Claimed] = {}
        self._unreturned: list[Claimed] = []  # withdrawn, and the filesystem refuses to put them back
        self._unfiled: list[tuple[float, int, Filing]] = []  # a heap, by the time of the next try
        self._numbers = count()
        self.filed = 0
        self.alarm: str | None = None

    def settle(self, settled: Settlement) -> None:
        self._settled.put(settled)

    def withdraw(self, key: str) -> None:
        self._withdrawn.put(key)

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def unfiled(self) -> int:
        return len(self._unfiled)

    @property
    def held(self) -> int:
        return len(self._in_flight) + len(self._unreturned) + len(self._unfiled)

    @property
    def next_retry(self) -> float | None:
        return self._unfiled[0][0] if self._unfiled else None

    def places(self) -> set[str]:
        unfiled = (filing.file for _, _, filing in self._unfiled)
        return {str(file.path) for file in (*self._in_flight.values(), *self._unreturned, *unfiled)}

    def add(self, key: str, file: Claimed) -> None:
        self._in_flight[key] = file

    def work(self, now: float) -> list[Claimed]:
        """Put away settled files that are due, put withdrawn files back; returns the withdrawn."""
        self._take_settled(now)
        withdrawn = self._take_withdrawn()
        self._put_away_due(now)
        return withdrawn

    def put_back_again(self) -> None:
        self._unreturned = [file for file in self._unreturned if not self._put_back(file)]

    def close(self) -> None:
        """Put away settled files now, without backoff."""
        self._take_settled(now=0.0)
        self._put_away_due(now=float("inf"))

    def _take_settled(self, now: float) -> None:
        while not self._settled.empty():
            settled = self._settled.get()
            file = self._in_flight.pop(settled.key, None)
            if file is None:
                log.warning("intake_settled_twice file=%s", settled.key)
            elif file.is_ours or self._after != "keep":
                heappush(self._unfiled, (now, next(self._numbers), Filing(file, settled)))

    def _take_withdrawn(self) -> list[Claimed]:
        withdrawn = []
        while not self._withdrawn.empty():
            file = self._in_flight.pop(self._withdrawn.get(), None)
            if file is None:
                continue
            log.warning("intake_changed file=%s: written to after it was seen; looked at anew", printable(file.relpath))
            withdrawn.append(file)
            if file.is_ours and not self._put_back(file):
                self._unreturned.append(file)
        return withdrawn

    def _put_back(self, file: Claimed) -> bool:
        """True if the file is back in its place, or gone; otherwise each rescan retries."""
        try:
            self._inbox.unclaim(file)
        except FileNotFoundError:
            return self._inbox.is_sound(is_claimed=True) and not file.path.exists()
        except OSError as error:
            if file not in self._unreturned:
                log.error(
                    "intake_not_put_back file=%s reason=%s: it lies at %s, and is tried again",
                    printable(file.relpath), error.strerror, printable(str(file.path)),
                )  # fmt: skip
            return False
        return True

    def _put_away_due(self, now: float) -> None:
        for _ in range(len(self._unfiled)):  # each once, also at the end of time
            if self._unfiled[0][0] > now:
                break
            filing = heappop(self._unfiled)[2]
            try:
                self._put_away(filing)
                self.filed += 1
            except FileNotFoundError:
                if self._inbox.root.is_dir():  # removed by hand; while the whole folder is gone, it may come back
                    log.warning("intake_file_vanished file=%s", printable(filing.file.relpath))
                else:
                    self._postpone(filing, now, "the folder is gone")
            except OSError as error:
                self._postpone(filing, now, error.strerror or str(error))
        if not self._unfiled and self.alarm is not None:
            log.warning("intake_filing_again folder=%s", self._inbox.root)
            self.alarm = None

    def _put_away(self, filing: Filing) -> None:
        file, key, verdict = filing.file, filing.settled.key, filing.settled.verdict
        if filing.placed is None and not file.is_ours and self._inbox.sighting(file) != file.sighting:
            return  # another file has its name by now, and is looked at for itself
        if self._after == "delete" and verdict is not Verdict.UNKNOWN:
            self._inbox.delete(file)
            return
        shelf = SHELF_OF[verdict]
        if verdict is not Verdict.UNKNOWN:
            shelf = f"{shelf}/{self._wall():%Y-%m-%d}"
        if filing.placed is None:
            filing.placed = self._inbox.put_away(file, shelf, key.rpartition("@")[2])
        if verdict is Verdict.UNKNOWN:
            explanation: dict[str, object] = {
                "file": printable(file.relpath),
                "key": key,
                "reason": filing.settled.reason or "could not be judged",
                "at": self._wall().isoformat(timespec="milliseconds"),
            }
            self._inbox.explain(filing.placed, explanation)

    def _postpone(self, filing: Filing, now: float, reason: str) -> None:
        if self.alarm != reason:
            log.error("intake_not_filed file=%s reason=%s: kept and retried", printable(filing.file.relpath), reason)
        self.alarm = reason
        filing.failures += 1
        heappush(self._unfiled, (now + BACKOFF.pause_s(filing.failures), next(self._numbers), filing))
