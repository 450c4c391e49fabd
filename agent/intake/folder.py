"""Folder intake: the files of one watched folder, each offered exactly once, when it is complete.

Guarantees: an incomplete file is never offered. A file is claimed by one rename before it is offered, so that of
several agents one gets it; its identity (path, inode, size, time of change) survives a crash, and what was claimed but
not settled is offered again, under the same key, at the next start; what an error left claimed and in nobody's hands,
with the next rescan. Nothing is lost when the disk is full or the share is gone: it is tried again. A step costs what
it changes, whatever waits; a rescan looks at every file, and takes at most a tenth of the time.
Structure: `step` does everything, under a clock that is given; the thread around it only waits. Events are hints
that wake it early; a rescan finds what they missed.
"""

from __future__ import annotations

import errno
import logging
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from agent.intake.arrivals import Arrival, IntakeStatistics, Refusal, Settlement
from agent.intake.filing import Filing, Shelves, printable
from agent.intake.inbox import MARKER, Claimed, Inbox
from agent.intake.readiness import CLOSED_SETTLE_S, UNSEEN_SETTLE_S, Candidate, Evidence, Rule, Sighting
from agent.intake.waiting import Waiting
from agent.intake.watch import FolderWatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent.intake.hints import Hint
    from agent.intake.naming import ImageName, Naming
    from agent.line_file.intake import FolderSection
    from experts.expert import Verdict

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 0.5  # between two looks into a file that has settled but is not complete
NO_ROOM_S = 0.25  # between two questions whether the agent has room again
LONGEST_CLAIM_PAUSE_S = 60.0  # of a file that the filesystem does not let us claim
BREATH_S = 0.02  # between two steps, so that the events of one burst are handled together
SCAN_SHARE = 10  # a scan of a huge folder takes at most one tenth of the time


@dataclass(frozen=True, slots=True)
class _ClaimRefused:
    """What the filesystem said when a file was to be claimed, and how long it is left alone the next time."""

    reason: str
    pause_s: float


def _room_always() -> bool:
    return True


def _local_time() -> datetime:
    return datetime.now(UTC).astimezone()


class FolderIntake:
    """One watched folder. ``submit`` and ``refuse`` are called by the intake's thread; they neither block nor raise.

    Each of the two is answered with ``settle`` once its verdict is stored; until then the file stays. An arrival whose
    file turns out to be another one by now is answered with ``withdraw`` instead: it is looked at anew.

    ``has_room`` is asked before each claim: while it says no, files wait where they are. ``owner`` names the agent
    (its line) in `.work/`: two agents on one folder need two names.
    """

    def __init__(
        self,
        config: FolderSection,
        naming: Naming,
        submit: Callable[[Arrival], None],
        refuse: Callable[[Refusal], None],
        *,
        owner: str,
        has_room: Callable[[], bool] = _room_always,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], datetime] = _local_time,
    ) -> None:
        self._config = config
        self._naming = naming
        self._submit = submit
        self._refuse_callback = refuse
        self._has_room = has_room
        self._clock = clock
        self._wall = wall
        self._rule = _rule(config)
        self._inbox = Inbox(config.path, owner)
        self._shelves = Shelves(self._inbox, config.after == "delete", wall)
        self._watch = FolderWatch(config.path, self._note)
        self._notes: queue.SimpleQueue[Hint] = queue.SimpleQueue()
        self._settled: queue.SimpleQueue[Settlement] = queue.SimpleQueue()
        self._withdrawn: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._waiting = Waiting(self._rule)
        self._recovered: deque[Claimed] = deque()
        self._in_flight: dict[str, Claimed] = {}
        self._unreturned: list[Claimed] = []  # withdrawn, and the filesystem does not let them go back
        self._refusals: dict[str, _ClaimRefused] = {}
        self._claim_alarm: str | None = None
        self._is_held_up = False
        self._was_online = False
        self._ignores_next_scan = config.ignore_existing
        self._next_scan = float("-inf")
        self._rested_at = float("-inf")  # when a scan is a tenth of the time since it began
        self._offered = 0
        self._refused = 0
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._snapshot = self._statistics()

    def start(self) -> None:
        """Watch, in a thread of its own. The folder is made if it is not there; one that cannot be made is OFFLINE."""
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
        """Whether the file of this key lies in the folder, as it was. Any thread. Raises OSError."""
        relpath = self._inbox.relpath_of(key)
        found = None if relpath is None else self._inbox.look(relpath)
        return found is not None and self._inbox.key(found.relpath, found.sighting) == key

    def name_by(self, naming: Naming) -> None:
        """Read names so from the next file on. Any thread."""
        self._naming = naming

    def settle(self, judged: Arrival | Refusal, verdict: Verdict, reason: str | None = None) -> None:
        """Its verdict is stored: put its file away. Any thread; returns at once."""
        self._settled.put(Settlement(judged.key, verdict, reason))
        self._wake.set()

    def withdraw(self, arrival: Arrival) -> None:
        """No verdict will come: its file is not the one that was seen. Any thread; returns at once."""
        self._withdrawn.put(arrival.key)
        self._wake.set()

    def is_sound(self, arrival: Arrival) -> bool:
        """Whether the folder can be read at this moment, as it was when the file was taken. Any thread; may block."""
        return self._inbox.is_sound(is_claimed=arrival.is_ours)

    @property
    def held(self) -> int:
        """Files that were taken or refused and are not put away yet, whatever keeps them. Any thread."""
        return len(self._in_flight) + len(self._unreturned) + self._shelves.pending

    def statistics(self) -> IntakeStatistics:
        """The snapshot taken at the end of the last step."""
        return self._snapshot

    def step(self, now: float) -> float:
        """Do everything that is due; how many seconds the next step may wait. For the thread, and for tests."""
        self._take_settled()
        self._take_withdrawn(now)
        self._shelves.work(now)
        self._take_notes(now)
        if now >= self._next_scan:
            self._scan(now)
        if self._watch.is_online:
            self._offer_recovered()
            self._consider(now)
        self._snapshot = self._statistics()
        return max(self._next_step(now) - now, 0.0)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                delay_s = self.step(self._clock())
            except Exception:  # the boundary of the intake's thread: the folder is looked at again, and nothing is lost
                log.exception("intake_step_failed folder=%s", self._config.path)
                delay_s = self._config.poll_s
            self._wake.wait(delay_s)
            self._wake.clear()
            self._stopping.wait(BREATH_S)
        self._watch.stop()
        self._take_settled()
        self._shelves.work(float("inf"))
        self._inbox.leave()
        self._snapshot = self._statistics()

    def _note(self, hint: Hint) -> None:
        self._notes.put(hint)
        self._wake.set()

    def _take_settled(self) -> None:
        while not self._settled.empty():
            settled = self._settled.get()
            file = self._in_flight.pop(settled.key, None)
            if file is None:
                log.warning("intake_settled_twice file=%s", settled.key)
            elif file.is_ours or self._config.after != "keep":  # files that are kept were claimed by an earlier run
                self._shelves.add(Filing(file, settled.key, settled.verdict, settled.reason))

    def _take_withdrawn(self, now: float) -> None:
        while not self._withdrawn.empty():
            file = self._in_flight.pop(self._withdrawn.get(), None)
            if file is None:
                continue
            log.warning("intake_changed file=%s: written to after it was seen; looked at anew", printable(file.relpath))
            self._waiting.reconsider(file.relpath)
            self._scan_early(now)
            if file.is_ours and not self._put_back(file):
                self._unreturned.append(file)

    def _put_back(self, file: Claimed) -> bool:
        """Whether it lies where it came from again, or is gone; if not, that is tried again with each rescan."""
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

    def _take_notes(self, now: float) -> None:
        strongest: dict[str, Evidence] = {}
        while not self._notes.empty():
            hint = self._notes.get()
            if hint.relpath is None:
                self._scan_early(now)
            else:
                strongest[hint.relpath] = max(strongest.get(hint.relpath, Evidence.NONE), hint.evidence)
        for relpath, evidence in strongest.items():
            is_marker = relpath.endswith(MARKER)
            try:
                found = self._inbox.look(relpath.removesuffix(MARKER))
            except OSError:  # the folder went away under us: the next scan will say so
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
            if self._waiting.turn_to(self._inbox.inode()):
                log.warning("intake_folder_replaced folder=%s: it is another one than before", self._config.path)
                self._watch.turn_away()
            listed = list(self._inbox.scan())
            if self._watch.go_online(has_thread=self._thread is not None):
                listed = list(self._inbox.scan())  # what came before events began to be told
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
        self._refusals = {name: refused for name, refused in self._refusals.items() if name in self._waiting}
        for relpath in self._waiting.find_stale(now):
            log.warning("intake_stale file=%s: incomplete, or held open by its writer", printable(relpath))
        ended = self._clock()
        self._rested_at = ended + (SCAN_SHARE - 1) * (ended - started)
        self._next_scan = max(now + self._config.poll_s, self._rested_at)

    def _recover(self) -> None:
        """Take up what is claimed and in nobody's hands: an earlier run's, or what an error left behind a rename."""
        self._unreturned = [file for file in self._unreturned if not self._put_back(file)]
        ours = (*self._in_flight.values(), *self._recovered, *self._unreturned, *self._shelves.files)
        held = {str(file.path) for file in ours}
        found = list(self._inbox.recover(held))
        self._recovered.extend(found)
        if found or not self._was_online:
            log.info("intake_recovered folder=%s files=%d", self._config.path, len(found))
        self._was_online = True

    def _offer_recovered(self) -> None:
        while self._recovered and self._has_room():
            claimed = self._recovered.popleft()
            try:
                name = self._naming.read(claimed.relpath)
            except ValueError as error:
                self._refuse(claimed, str(error))
            else:
                self._offer(claimed, name)

    def _consider(self, now: float) -> None:
        while (candidate := self._waiting.first_due(now)) is not None:
            if not self._may_take():
                return
            try:
                self._try_to_take(candidate.relpath, now)
            except FileNotFoundError:  # its owner, or another agent, was faster
                self._waiting.forget(candidate.relpath)
            except OSError as error:
                self._hold(candidate, now, error)
            finally:
                self._waiting.end_turn(candidate, now + LOOK_AGAIN_S)

    def _may_take(self) -> bool:
        """Whether the agent has room; that most of it holds files which cannot be put away is told once."""
        has_room, unfiled = self._has_room(), self._shelves.pending
        if not has_room and unfiled > len(self._in_flight) and not self._is_held_up:
            self._is_held_up = True
            reason = "no more are taken until these can be put away"
            log.error("intake_held_up folder=%s unfiled=%d: %s", self._config.path, unfiled, reason)
        self._is_held_up = self._is_held_up and unfiled > 0
        return has_room

    def _try_to_take(self, relpath: str, now: float) -> None:
        found = self._inbox.look(relpath)
        if found is None:
            self._waiting.forget(relpath)
            return
        self._waiting.see(found, now)
        candidate = self._waiting[relpath]
        if not self._rule.is_due(candidate, now):
            return
        if found.objection is not None:
            self._refuse_unclaimed(relpath, found.sighting, found.objection)
            return
        try:
            probe = self._inbox.probe(relpath)
        except PermissionError:  # who copies a file may set its permissions last
            if self._rule.is_abandoned(candidate, now):
                self._refuse_unclaimed(relpath, found.sighting, "not permitted to read it")
            else:
                self._waiting.postpone(relpath, now + LOOK_AGAIN_S)
            return
        if self._rule.is_ready(candidate, now, probe.lease, probe.completeness):
            self._take(candidate)
        elif found.sighting.size_bytes == 0 and self._rule.is_abandoned(candidate, now):
            self._refuse_unclaimed(relpath, found.sighting, "the file is empty")
        elif self._rule.is_truncated(candidate, now, probe.lease, probe.completeness):
            self._refuse_unclaimed(relpath, found.sighting, "truncated: the end of the image is missing")
        else:
            self._waiting.postpone(relpath, now + LOOK_AGAIN_S)

    def _take(self, candidate: Candidate) -> None:
        relpath, sighting = candidate.relpath, candidate.sighting
        try:
            name = self._naming.read(relpath)
        except ValueError as error:
            self._refuse_unclaimed(relpath, sighting, str(error))
            return
        if self._config.after == "keep":
            self._waiting.pass_over(relpath, sighting)
            claimed = self._inbox.unclaimed(relpath, sighting)
        else:
            claimed = self._inbox.claim(relpath, sighting)
            if self._inbox.sighting(claimed) != sighting:  # its writer was not done after all
                self._inbox.unclaim(claimed)
                self._waiting.forget(relpath)
                return
            self._waiting.forget(relpath)
            self._inbox.drop_marker(relpath)
        self._claim_alarm = None
        self._offer(claimed, name)

    def _offer(self, claimed: Claimed, name: ImageName) -> None:
        key = self._inbox.key(claimed.relpath, claimed.sighting)
        self._in_flight[key] = claimed
        self._offered += 1
        self._submit(
            Arrival(
                key=key,
                path=claimed.path,
                is_ours=claimed.is_ours,
                sighting=claimed.sighting,
                relpath=claimed.relpath,
                board=name.board,
                component=name.component,
                ref=name.ref,
                board_type=name.board_type,
                arrived_at=self._wall(),
                max_pixels=self._config.max_pixels,
            )
        )

    def _refuse_unclaimed(self, relpath: str, sighting: Sighting, reason: str) -> None:
        self._waiting.pass_over(relpath, sighting)  # until it has moved, and for good where files are kept
        self._refuse(self._inbox.unclaimed(relpath, sighting), reason)

    def _refuse(self, file: Claimed, reason: str) -> None:
        key = printable(self._inbox.key(file.relpath, file.sighting))
        self._in_flight[key] = file
        self._refused += 1
        log.warning("intake_refused file=%s reason=%s", printable(file.relpath), reason)
        name = self._name_of(file.relpath)
        self._refuse_callback(Refusal(key, printable(file.relpath), reason, name, self._wall()))

    def _name_of(self, relpath: str) -> ImageName | None:
        """What the name of a refused file tells, if it tells anything that a row can hold."""
        try:
            relpath.encode()
            return self._naming.read(relpath)
        except ValueError:
            return None

    def _hold(self, candidate: Candidate, now: float, error: OSError) -> None:
        """The filesystem refuses (full, read-only, an I/O error): the file waits where it is."""
        if error.errno == errno.ENAMETOOLONG:
            self._refuse_unclaimed(candidate.relpath, candidate.sighting, "the name is too long")
            return
        reason, relpath = error.strerror or str(error), candidate.relpath
        refused = self._refusals.get(relpath) or _ClaimRefused("", self._config.poll_s)
        if refused.reason != reason:
            log.error("intake_not_claimed file=%s reason=%s: left and retried", printable(relpath), reason)
        self._claim_alarm = reason
        longer_s = max(min(2 * refused.pause_s, LONGEST_CLAIM_PAUSE_S), self._config.poll_s)
        self._refusals[relpath] = _ClaimRefused(reason, longer_s)
        self._waiting.postpone(relpath, now + refused.pause_s)

    def _next_step(self, now: float) -> float:
        times = [self._next_scan]
        if self._shelves.next_retry is not None:
            times.append(self._shelves.next_retry)
        due = self._waiting.next_due
        if self._recovered or (due is not None and due <= now):
            due = now + NO_ROOM_S
        if due is not None:
            times.append(due)
        return min(times)

    def _statistics(self) -> IntakeStatistics:
        return IntakeStatistics(
            state=self._watch.state,
            is_polled=self._watch.is_polled,
            waiting=len(self._waiting) + len(self._recovered),
            stale=self._waiting.stale,
            in_flight=len(self._in_flight),
            offered=self._offered,
            refused=self._refused,
            filed=self._shelves.filed,
            unfiled=self._shelves.pending,
            alarm=self._claim_alarm or self._shelves.alarm,
        )


def _rule(config: FolderSection) -> Rule:
    settle_s = None if config.settle_ms is None else config.settle_ms / 1000
    return Rule(
        mode=config.ready,
        closed_settle_s=CLOSED_SETTLE_S if settle_s is None else settle_s,
        unseen_settle_s=UNSEEN_SETTLE_S if settle_s is None else settle_s,
        stale_after_s=config.stale_after_s,
    )
