"""Claimed or refused files, until they are put away or put back.

Guarantees: each file leaves once, even with repeated verdicts. A file that the filesystem refuses to move is retried
with backoff, and logged once. A claimed file missing here is an earlier run's, or was abandoned by an error.
"""

from __future__ import annotations

import logging
import queue
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agent.faults.backoff import Backoff
from agent.sources.folder.files.identity import printable
from agent.sources.folder.files.inbox import DONE, FAILED, NG
from experts.expert import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from datetime import datetime
    from pathlib import Path

    from agent.line_file.intake import FolderSection
    from agent.sources.folder.files.identity import Claimed
    from agent.sources.folder.files.inbox import Inbox

log = logging.getLogger(__name__)

BACKOFF = Backoff(0.5, 30.0)
SHELF_OF = {Verdict.OK: DONE, Verdict.NG: NG, Verdict.UNKNOWN: FAILED}


@dataclass(slots=True)
class _Filing:
    """Judged file to put away. ``placed``: its new path, while its explanation may be missing."""

    file: Claimed
    key: str
    verdict: Verdict
    reason: str | None
    placed: Path | None = None


class Custody:
    """Claimed and refused files of one folder; all but ``settle`` and ``withdraw`` are for the folder's thread.

    Judged files go to `done/`, `ng/` and `failed/`, or are deleted unless they are UNKNOWN. Where files are kept, only
    claims of an earlier run are put away. ``placed``: told each file's path below the folder, once it is there.
    """

    def __init__(
        self,
        section: FolderSection,
        inbox: Inbox,
        wall: Callable[[], datetime],
        placed: Callable[[str, str], None] = lambda key, place: None,
    ) -> None:
        self._after = section.after
        self._inbox = inbox
        self._wall = wall
        self._placed = placed
        self._settled: queue.SimpleQueue[tuple[str, Verdict, str | None]] = queue.SimpleQueue()
        self._withdrawn: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._in_flight: dict[str, Claimed] = {}
        self._unreturned: list[Claimed] = []  # withdrawn, and the filesystem refuses to put them back
        self._unfiled: list[_Filing] = []  # the filesystem refuses to move them
        self._failures = 0
        self.next_retry: float | None = None
        self.alarm: str | None = None

    def settle(self, key: str, verdict: Verdict, reason: str | None) -> None:
        """Mark a file for filing: its verdict is stored."""
        self._settled.put((key, verdict, reason))

    def withdraw(self, key: str) -> None:
        self._withdrawn.put(key)

    @property
    def held(self) -> int:
        return len(self._in_flight) + len(self._unreturned) + len(self._unfiled)

    def places(self) -> set[str]:
        unfiled = (filing.file for filing in self._unfiled)
        return {str(file.path) for file in (*self._in_flight.values(), *self._unreturned, *unfiled)}

    def add(self, key: str, file: Claimed) -> None:
        self._in_flight[key] = file

    def work(self, now: float) -> list[Claimed]:
        """Put away due settled files, put withdrawn files back; returns the withdrawn."""
        self._put_away_due(now)
        return self._put_back_withdrawn()

    def put_back_again(self) -> None:
        self._unreturned = [file for file in self._unreturned if not self._put_back(file)]

    def close(self) -> None:
        """Put away settled files now, without backoff."""
        self._put_away_due(float("inf"))

    def _newly_settled(self) -> Iterable[_Filing]:
        while not self._settled.empty():
            key, verdict, reason = self._settled.get()
            file = self._in_flight.pop(key, None)
            if file is None:
                log.warning("intake_settled_twice file=%s", key)
            elif file.is_ours or self._after != "keep":
                yield _Filing(file, key, verdict, reason)

    def _put_back_withdrawn(self) -> list[Claimed]:
        withdrawn = []
        while not self._withdrawn.empty():
            file = self._in_flight.pop(self._withdrawn.get(), None)
            if file is None:
                continue
            log.warning("intake_changed file=%s: written to after it was seen; checked again", printable(file.relpath))
            withdrawn.append(file)
            if file.is_ours and not self._put_back(file):
                self._unreturned.append(file)
        return withdrawn

    def _put_back(self, file: Claimed) -> bool:
        """Put a file back. True if it is back in its place, or gone; otherwise each rescan retries."""
        try:
            self._inbox.unclaim(file)
        except FileNotFoundError:
            return self._inbox.is_sound(is_claimed=True) and not file.path.exists()
        except OSError as error:
            if file not in self._unreturned:
                log.error(
                    "intake_not_put_back file=%s reason=%s: it is at %s, and is tried again",
                    printable(file.relpath), error.strerror, printable(str(file.path)),
                )  # fmt: skip
            return False
        return True

    def _put_away_due(self, now: float) -> None:
        due, is_time = list(self._newly_settled()), self.next_retry is None or now >= self.next_retry
        if is_time:
            due, self._unfiled = self._unfiled + due, []
        refused = [filing for filing in due if not self._try_to_put_away(filing)]
        self._unfiled += refused
        if refused and is_time:
            self._failures += 1
            self.next_retry = now + BACKOFF.pause_s(self._failures)
        elif not self._unfiled and self.alarm is not None:
            log.warning("intake_filing_again folder=%s", self._inbox.root)
            self.alarm, self.next_retry, self._failures = None, None, 0

    def _try_to_put_away(self, filing: _Filing) -> bool:
        """Put a file away; False, with an alarm, if the filesystem refuses the move."""
        relpath = printable(filing.file.relpath)
        try:
            self._put_away(filing)
            return True
        except FileNotFoundError:
            if self._inbox.root.is_dir():  # removed by a user; while the whole folder is gone, it may return
                log.warning("intake_file_vanished file=%s", relpath)
                return True
            reason = "the folder is gone"
        except OSError as error:
            reason = error.strerror or str(error)
        if self.alarm != reason:
            log.error("intake_not_filed file=%s reason=%s: kept and retried", relpath, reason)
        self.alarm = reason
        return False

    def _put_away(self, filing: _Filing) -> None:
        file, key, verdict = filing.file, filing.key, filing.verdict
        if filing.placed is None and not file.is_ours and self._inbox.sighting(file) != file.sighting:
            return  # another file has this name by now, and is handled separately
        if self._after == "delete" and verdict is not Verdict.UNKNOWN:
            self._inbox.delete(file)
            return
        shelf = SHELF_OF[verdict]
        if verdict is not Verdict.UNKNOWN:
            shelf = f"{shelf}/{self._wall():%Y-%m-%d}"
        if filing.placed is None:
            filing.placed = self._inbox.put_away(file, shelf, key.rpartition("@")[2])
            self._placed(key, filing.placed.relative_to(self._inbox.root).as_posix())
        if verdict is Verdict.UNKNOWN:
            explanation: dict[str, object] = {
                "file": printable(file.relpath),
                "key": key,
                "reason": filing.reason or "could not be judged",
                "at": self._wall().isoformat(timespec="milliseconds"),
            }
            self._inbox.explain(filing.placed, explanation)
