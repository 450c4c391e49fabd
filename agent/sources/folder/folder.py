"""Folder intake: offers each file of one watched folder exactly once, when the file is complete.

Guarantees: a file is claimed by one rename before it is offered, so that one of several agents gets it. A file that was
claimed and not settled is offered again under the same key: at the next start, or after an error at the next rescan.
What a full disk or a missing share refuses is retried. A step costs O(log n) a file that it changes; a rescan looks at
every file, and takes at most a tenth of the time.
Structure: `step` does everything, under a clock that is given; the thread around it only waits. Events are hints that
wake the thread; a rescan finds the files that they miss. ``taking`` decides on waiting files, ``custody`` puts away.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agent.sources.folder.custody import Custody, Settlement
from agent.sources.folder.files.inbox import MARKER, Inbox, printable
from agent.sources.folder.files.readiness import CLOSED_SETTLE_S, UNSEEN_SETTLE_S, Evidence, Rule
from agent.sources.folder.files.sidecar import SUFFIX
from agent.sources.folder.taking import Taker
from agent.sources.folder.waiting import WaitingFiles
from agent.sources.folder.watch import FolderWatch, SourceState
from agent.subject import image_key

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent.line_file.intake import FolderSection
    from agent.sources.folder.files.hints import Hint
    from agent.sources.folder.files.naming import Naming
    from agent.sources.folder.taking import ClaimedImage, FolderCallbacks
    from agent.subject import Subject
    from experts.expert import Verdict

log = logging.getLogger(__name__)

NO_ROOM_S = 0.25  # between two questions whether the agent has room again
BREATH_S = 0.02  # between two steps, so that the events of one burst are handled together
SCAN_SHARE = 10  # a scan of a huge folder takes at most one tenth of the time


@dataclass(frozen=True, slots=True)
class IntakeStatistics:
    """A snapshot. ``alarm``: the error that keeps files from being moved, else None."""

    state: SourceState
    is_polled: bool
    waiting: int
    in_flight: int
    offered: int
    refused: int
    filed: int
    unfiled: int
    alarm: str | None


class FolderIntake:
    """One watched folder. A claimed or refused file stays until ``settle``, or ``withdraw`` if another file lies there.

    ``owner`` names the agent (its line) in `.work/`: two agents on one folder need two names.
    """

    def __init__(
        self,
        config: FolderSection,
        naming: Naming,
        callbacks: FolderCallbacks,
        *,
        owner: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._clock = clock
        self._inbox = Inbox(config.path, owner, has_sidecars=config.has_sidecars)
        self._custody = Custody(config, self._inbox, callbacks.wall)
        self._waiting = WaitingFiles(_rule(config))
        self._taker = Taker(config, naming, self._inbox, self._waiting, self._custody, callbacks)
        self._watch = FolderWatch(config.path, self._note)
        self._notes: queue.SimpleQueue[Hint] = queue.SimpleQueue()
        self._was_online = False
        self._ignores_next_scan = config.ignore_existing
        self._next_scan = float("-inf")
        self._rested_at = float("-inf")  # when a scan is a tenth of the time since it began
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._snapshot = self._statistics()

    def start(self) -> None:
        """Watch, in a thread of its own. The folder is made if it is missing; if that fails it is OFFLINE."""
        try:
            self._config.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            log.warning("intake_folder_not_made folder=%s reason=%s", self._config.path, error.strerror)
        self._thread = threading.Thread(target=self._run, name=f"intake-{self._config.path.name}", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Stop taking files, put away what was settled, and return within about ``timeout_s``.

        What is in flight stays claimed and is offered again at the next start.
        """
        self._stopping.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def holds(self, key: str) -> bool:
        """True if the file of this key (an image's or a part's) lies in the folder unchanged. Raises OSError.

        Where files are kept, a file that is not found counts as there while its folder is away, as with a share.
        """
        return self._holds(key) or self._holds(image_key(key))

    def _holds(self, key: str) -> bool:
        relpath = self._inbox.relpath_of(key)
        if relpath is None:
            return False
        found = self._inbox.look(relpath)
        if found is None:
            return self._config.after == "keep" and not self._is_here()
        return self._inbox.key(found.relpath, found.sighting) == key

    def _is_here(self) -> bool:
        """True if the listed folder lies here and is not empty: a bare mount point is."""
        try:
            is_listed = self._watch.is_online and self._inbox.inode() == self._waiting.root
            return is_listed and not self._inbox.is_empty()
        except FileNotFoundError:
            return False

    def name_by(self, naming: Naming) -> None:
        """Read names by this naming from the next file on. Any thread."""
        self._taker.naming = naming

    def settle(self, subject: Subject, verdict: Verdict, reason: str | None = None) -> None:
        """The verdict is stored: put the file away. Any thread; returns at once."""
        self._custody.settle(Settlement(subject.key, verdict, reason))
        self._wake.set()

    def withdraw(self, image: ClaimedImage) -> None:
        """The file is not the one that was seen: no verdict will come. Any thread; returns at once."""
        self._custody.withdraw(image.subject.key)
        self._wake.set()

    def is_sound(self, image: ClaimedImage) -> bool:
        """True if the folder can be read now, as when the file was claimed. Any thread; may block."""
        return self._inbox.is_sound(is_claimed=image.file.is_ours)

    @property
    def held(self) -> int:
        """Files that were claimed or refused and are not put away. Any thread."""
        return self._custody.held

    def statistics(self) -> IntakeStatistics:
        """The snapshot taken at the end of the last step."""
        return self._snapshot

    def step(self, now: float) -> float:
        """Do everything that is due; returns the seconds until the next step."""
        for file in self._custody.work(now):
            self._waiting.reconsider(file.relpath)
            self._scan_early(now)
        self._take_notes(now)
        if now >= self._next_scan:
            self._scan(now)
        if self._watch.is_online:
            self._taker.work(now)
        self._snapshot = self._statistics()
        return max(self._next_step(now) - now, 0.0)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                delay_s = self.step(self._clock())
            except Exception:  # the boundary of the thread: the next rescan finds the file again
                log.exception("intake_step_failed folder=%s", self._config.path)
                delay_s = self._config.poll_s
            self._wake.wait(delay_s)
            self._wake.clear()
            self._stopping.wait(BREATH_S)
        self._watch.stop(SourceState.STOPPED)
        self._custody.close()
        self._inbox.leave()
        self._snapshot = self._statistics()

    def _note(self, hint: Hint) -> None:
        self._notes.put(hint)
        self._wake.set()

    def _take_notes(self, now: float) -> None:
        strongest: dict[str, Evidence] = {}
        while not self._notes.empty():
            hint = self._notes.get()
            if hint.relpath is None:
                self._scan_early(now)
            else:
                strongest[hint.relpath] = max(strongest.get(hint.relpath, Evidence.NONE), hint.evidence)
        for sidecar in [relpath for relpath in strongest if relpath.endswith(SUFFIX)]:
            for relpath in self._waiting.beside(sidecar):
                strongest.setdefault(relpath, Evidence.NONE)
        for relpath, evidence in strongest.items():
            is_marker = relpath.endswith(MARKER)
            try:
                found = self._inbox.look(relpath.removesuffix(MARKER))
            except OSError:  # the folder has gone, which the next scan reports
                continue
            if found is not None:
                self._waiting.see(found, now, Evidence.NONE if is_marker else evidence)
            elif is_marker:  # its name may lack the image's suffix
                self._scan_early(now)

    def _scan_early(self, now: float) -> None:
        self._next_scan = min(self._next_scan, max(now, self._rested_at))

    def _scan(self, now: float) -> None:
        started = self._clock()
        try:
            self._watch.check_mount()
            if self._waiting.turn_to(self._inbox.inode()):
                log.warning("intake_folder_replaced folder=%s: it is another one than before", self._config.path)
                self._watch.stop(SourceState.OFFLINE)
            listed = list(self._inbox.scan())
            if self._watch.go_online(has_thread=self._thread is not None):
                listed = list(self._inbox.scan())  # again, for files that came before the events
        except OSError as error:
            self._watch.go_offline(error)
            self._waiting.clear()
            self._next_scan = now + self._config.poll_s
            return
        if self._ignores_next_scan:
            self._ignores_next_scan = False
            for found in listed:
                self._waiting.pass_over(found.relpath, found.sighting)
        self._recover()
        self._waiting.see_all(listed, now)
        self._taker.forget_all_but({found.relpath for found in listed})
        for relpath in self._waiting.find_stale(now):
            log.warning("intake_stale file=%s: incomplete, or held open by its writer", printable(relpath))
        ended = self._clock()
        self._rested_at = ended + (SCAN_SHARE - 1) * (ended - started)
        self._next_scan = max(now + self._config.poll_s, self._rested_at)

    def _recover(self) -> None:
        """Offer claimed files of an earlier run, or that an error left behind."""
        self._custody.put_back_again()
        found = list(self._inbox.recover(self._custody.places() | self._taker.places()))
        self._taker.recover(found)
        if found or not self._was_online:
            log.info("intake_recovered folder=%s files=%d", self._config.path, len(found))
        self._was_online = True

    def _next_step(self, now: float) -> float:
        times = [self._next_scan]
        if self._custody.next_retry is not None:
            times.append(self._custody.next_retry)
        due = self._waiting.next_due
        if self._taker.unoffered or (due is not None and due <= now):
            due = now + NO_ROOM_S
        if due is not None:
            times.append(due)
        return min(times)

    def _statistics(self) -> IntakeStatistics:
        return IntakeStatistics(
            state=self._watch.state,
            is_polled=self._watch.is_polled,
            waiting=len(self._waiting) + self._taker.unoffered,
            in_flight=self._custody.in_flight,
            offered=self._taker.offered,
            refused=self._taker.refused,
            filed=self._custody.filed,
            unfiled=self._custody.unfiled,
            alarm=self._taker.claim_alarm or self._custody.alarm,
        )


def _rule(config: FolderSection) -> Rule:
    settle_s = None if config.settle_ms is None else config.settle_ms / 1000
    return Rule(
        mode=config.ready,
        closed_settle_s=CLOSED_SETTLE_S if settle_s is None else settle_s,
        unseen_settle_s=UNSEEN_SETTLE_S if settle_s is None else settle_s,
        stale_after_s=config.stale_after_s,
        needs_sidecar=config.has_sidecars,
    )
