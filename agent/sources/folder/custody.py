"""The files that were taken or refused, from then until they are put away, or back where they came from.

Guarantees: each leaves once, however often it is settled; none is in two hands, so that what lies claimed and is not
here is an earlier run's, or what an error left behind. What the filesystem refuses is tried again.
"""

from __future__ import annotations

import logging
import queue
from typing import TYPE_CHECKING

from agent.sources.folder.arrivals import Settlement
from agent.sources.folder.files.filing import Filing, Shelves, printable

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from agent.line_file.intake import FolderSection
    from agent.sources.folder.files.inbox import Claimed, Inbox
    from experts.expert import Verdict

log = logging.getLogger(__name__)


class Custody:
    """Claimed files of one folder. ``settle`` and ``withdraw`` are for any thread, the rest for the folder's.

    Where files are kept, only what an earlier run had claimed is put away.
    """

    def __init__(self, config: FolderSection, inbox: Inbox, wall: Callable[[], datetime]) -> None:
        self._keeps = config.after == "keep"
        self._inbox = inbox
        self._shelves = Shelves(inbox, config.after == "delete", wall)
        self._settled: queue.SimpleQueue[Settlement] = queue.SimpleQueue()
        self._withdrawn: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._in_flight: dict[str, Claimed] = {}
        self._unreturned: list[Claimed] = []  # withdrawn, and the filesystem does not let them go back

    def settle(self, key: str, verdict: Verdict, reason: str | None) -> None:
        self._settled.put(Settlement(key, verdict, reason))

    def withdraw(self, key: str) -> None:
        self._withdrawn.put(key)

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def unfiled(self) -> int:
        return self._shelves.pending

    @property
    def filed(self) -> int:
        return self._shelves.filed

    @property
    def held(self) -> int:
        return len(self._in_flight) + len(self._unreturned) + self._shelves.pending

    @property
    def alarm(self) -> str | None:
        return self._shelves.alarm

    @property
    def next_retry(self) -> float | None:
        return self._shelves.next_retry

    def places(self) -> set[str]:
        return {str(file.path) for file in (*self._in_flight.values(), *self._unreturned, *self._shelves.files)}

    def add(self, key: str, file: Claimed) -> None:
        self._in_flight[key] = file

    def work(self, now: float) -> list[Claimed]:
        """Put away what is settled and due, put back what is withdrawn; which were: they are to be looked at anew."""
        self._take_settled()
        withdrawn = self._take_withdrawn()
        self._shelves.work(now)
        return withdrawn

    def put_back_again(self) -> None:
        self._unreturned = [file for file in self._unreturned if not self._put_back(file)]

    def close(self) -> None:
        """Put away settled files now, without backoff."""
        self._take_settled()
        self._shelves.work(float("inf"))

    def _take_settled(self) -> None:
        while not self._settled.empty():
            settled = self._settled.get()
            file = self._in_flight.pop(settled.key, None)
            if file is None:
                log.warning("intake_settled_twice file=%s", settled.key)
            elif file.is_ours or not self._keeps:
                self._shelves.add(Filing(file, settled.key, settled.verdict, settled.reason))

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
