"""The composition root of ``coserve serve``: intake -> reader -> loop -> results -> boards -> the file's last place.

Guarantees: a file's verdict is committed before the file is moved, also that of one that is refused; a file whose
verdict was committed before a crash is moved, not judged again; on stop nothing new is taken, what was taken is
finished within ``DRAIN_S``, and what is not finished by then stays in its folder's ``.work`` for the next start. When
the agent crashes, nothing more is taken and everything ends, so that whoever started it can start it again. An image
that was being judged when the agent was ended is judged alone at the next start, and at the second time it is UNKNOWN.
A file's bytes are read before a request is made of them, so that nothing but a file's own folder waits for its disk.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agent.core.request import Outcome
from agent.deployment.build import Agent, build_agent
from agent.intake.filing import printable
from agent.intake.folder import FolderIntake
from agent.intake.naming import naming_of
from agent.intake.reading import Answers, ArrivalReader
from agent.intake.room import has_room
from agent.records.attempts import AttemptLog
from agent.records.result_writer import ResultStore
from agent.runtime.executor import EncodedImage
from agent.runtime.loop import BatchWatch
from agent.service.drift import DriftAlarm, UsageDrift
from agent.service.housekeeping import Housekeeper
from agent.service.line_boards import LineBoards, wall_clock
from agent.service.recording import judged_result, refused_result
from agent.service.suspects import Gate
from experts.errors import DeviceLost, WorkOverdue
from experts.expert import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from datetime import datetime

    from agent.config import LineConfig
    from agent.intake.arrivals import Arrival, IntakeStatistics, Refusal
    from agent.intake.reading import ReadingStatistics
    from agent.line_file.intake import FolderSection
    from agent.records.boards import LedgerStatistics
    from agent.records.results import Recorded, Result, StoreStatistics
    from agent.service.drift import DriftStatistics
    from agent.service.housekeeping import HousekeepingStatistics
    from experts.errors import AgentCrashed

log = logging.getLogger(__name__)

DRAIN_S = 15.0  # with the agent's own 5 s for what hangs, and all below, it ends within the 30 s that systemd waits
COMMIT_S = 2.0
FILING_S = 2.0  # of all folders together
STORE_CLOSE_S = 1.5  # and as long again for a commit that is under way
IN_FLIGHT_LIMIT = 2000  # files that folders took or refused, and could not put away yet; the rest waits where it is
READ_BYTES = 256 * 1024 * 1024  # of images read and not judged yet, all folders together; 2 000 crops take a tenth
READER_STOP_S = 1.0  # of all together
ATTEMPTS_MAXIMUM = 2  # an image that was being judged each time when the agent was ended so often ends it no more


@dataclass(frozen=True, slots=True)
class Watched:
    """A folder: who claims its files and moves them in the end, and who reads them."""

    intake: FolderIntake
    reader: ArrivalReader


@dataclass(frozen=True, slots=True)
class Taken:
    """An image under way: where it came from, and how many bytes of it were read."""

    arrival: Arrival
    folder: Watched
    size_bytes: int


@dataclass(frozen=True, slots=True)
class LineStatistics:
    """A snapshot of all that surrounds the agent's loop; the loop has its own."""

    requests_in_flight: int
    intakes: tuple[IntakeStatistics, ...]
    readers: tuple[ReadingStatistics, ...]
    store: StoreStatistics
    boards: LedgerStatistics
    drift: DriftStatistics
    housekeeping: HousekeepingStatistics


class LineService:
    """One line, served. ``start`` it once, ``stop`` it once; in between it needs no thread of the caller's.

    ``on_crash`` is called, from any thread, when the agent has crashed: then ``stop`` it. ``clock``: monotonic seconds,
    by which boards age and repeated warnings are spaced; ``wall``: what is stored and shown of boards that expire.
    """

    def __init__(
        self,
        config: LineConfig,
        progress: Callable[[str, int, int], None],
        *,
        on_crash: Callable[[], None] = lambda: None,
        in_flight_limit: int = IN_FLIGHT_LIMIT,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], datetime] = wall_clock,
    ) -> None:
        self._config = config
        self._clock = clock
        self._in_flight_limit = in_flight_limit
        self._taken: dict[int, Taken] = {}
        self._guard = threading.Lock()  # over _taken: a request may end before its number is known here
        self._counts = dict.fromkeys(Verdict, 0)  # of rows that were stored; written on the store's thread only
        self._agent: Agent = build_agent(config, self._judged, progress)
        self._drift_guard = threading.Lock()  # the loop's thread takes it: nothing is computed under it
        self._drift = UsageDrift(self._agent.setup.matrix.usage)
        self._drift_alarm = DriftAlarm()
        self._store = ResultStore(config.results_file)
        self._boards = LineBoards(config.boards, self._store, clock=clock, wall=wall)
        self._attempts = AttemptLog(config.state / "attempts.log")
        self._agent.loop.watch_batches(BatchWatch(self._batch_begun, self._batch_ended))
        self._agent.loop.when_crashed(lambda crash: self._crashed(crash, on_crash))
        self._gate: Gate[tuple[Taken, bytes]] = Gate(lambda each: self._let_in(*each))
        self._folders: list[Watched] = []
        self._stopping = threading.Event()
        self._housekeeper = Housekeeper(
            {"boards": self._boards.expire, "drift": self._warn_of_drift, "readers": self._tell_stuck_readers}
        )

    @property
    def judged(self) -> int:
        """Images whose verdict is stored, refused files included, since the start."""
        return sum(self._counts.values())

    @property
    def crash(self) -> AgentCrashed | None:
        """What ended the agent, if anything did."""
        return self._agent.loop.crash

    @property
    def agent(self) -> Agent:
        """The agent behind it, for its statistics."""
        return self._agent

    def statistics(self) -> LineStatistics:
        """A frozen snapshot."""
        with self._drift_guard:
            sample = self._drift.sample()
        return LineStatistics(
            requests_in_flight=self._agent.loop.requests_in_flight,
            intakes=tuple(folder.intake.statistics() for folder in self._folders),
            readers=tuple(folder.reader.statistics() for folder in self._folders),
            store=self._store.statistics(),
            boards=self._boards.statistics(),
            drift=sample.statistics(),
            housekeeping=self._housekeeper.statistics(),
        )

    def start(self) -> None:
        """Take up boards that were open, start the agent, then watch the folders."""
        self._boards.take_up()
        self._agent.start()
        self._folders = [self._watched(number, folder) for number, folder in enumerate(self._config.intake.folders)]
        for watched in self._folders:
            watched.reader.start()
            watched.intake.start()
        self._housekeeper.start()
        folders = ", ".join(str(folder.path) for folder in self._config.intake.folders)
        log.info("ready line=%s experts=%d watching=%s", self._config.line, len(self._config.catalog.experts), folders)

    def _watched(self, number: int, folder: FolderSection) -> Watched:
        intake = FolderIntake(
            folder,
            naming_of(folder, self._config),
            lambda arrival: self._arrived(arrival, self._folders[number]),
            lambda refusal: self._refused(refusal, intake),
            owner=self._config.line,
            has_room=lambda: self._has_room(intake),
        )
        reader = ArrivalReader(
            folder.path.name,
            Answers(
                read=lambda arrival, content: self._read(arrival, content, self._folders[number]),
                changed=lambda arrival: self._changed(arrival, intake),
                unreadable=lambda arrival, reason: self._end_unjudged(arrival, intake, reason),
            ),
            intake.is_sound,
            budget_bytes=READ_BYTES // len(self._config.intake.folders),
            during_large=self._counted_read,
        )
        return Watched(intake, reader)

    def stop(self) -> dict[str, Any]:
        """Finish what was taken, store it, end; what was done, for the closing line.

        Raises AgentCrashed if it had crashed, after everything has ended.
        """
        with self._guard:
            self._stopping.set()  # from here on no folder has room, and what is under way to us stays in `.work`
        with ExitStack() as ending:  # in the order from below
            ending.callback(self._attempts.close)
            ending.callback(self._close_store)
            ending.callback(self._stop_intakes)
            ending.callback(self._wait_for_commits)
            ending.callback(self._housekeeper.stop)
            ending.callback(self._forgive)
            ending.callback(self._agent.stop)
            ending.callback(self._stop_readers)
            self._drain()
            engine = self._agent.loop.statistics().engine
        counts = {str(verdict).lower(): count for verdict, count in self._counts.items()}
        return {
            "requests": sum(counts.values()),
            **counts,
            "switches": engine.switches,
            "loads": engine.loads,
            "evictions": engine.evictions,
            "bytes_read": engine.bytes_read,
            "threads_left_behind": self._agent.loop.leaves_threads,
        }

    def _forgive(self) -> None:
        """What was still being judged has not ended the agent, where the agent was told to end."""
        if self._agent.loop.crash is None:
            self._attempts.forgive()

    def _drain(self) -> None:
        self._agent.loop.drain()
        if not self._agent.loop.wait_until_drained(DRAIN_S):
            log.warning("not_drained images=%d they wait in .work for the next start", len(self._taken))

    def _wait_for_commits(self) -> None:
        deadline = time.monotonic() + COMMIT_S
        while self._store.statistics().pending and time.monotonic() < deadline:
            time.sleep(0.01)

    def _stop_readers(self) -> None:
        _stop_all([folder.reader.stop for folder in self._folders], READER_STOP_S)

    def _stop_intakes(self) -> None:
        """They move the files whose verdicts were just stored."""
        _stop_all([folder.intake.stop for folder in self._folders], FILING_S)

    def _close_store(self) -> None:
        if not self._store.close(STORE_CLOSE_S):
            log.error("results_not_stored: their images wait in .work for the next start")

    # -- in: on the threads of a folder and its reader --

    def _arrived(self, arrival: Arrival, folder: Watched) -> None:
        if self._is_known(arrival, folder.intake):
            self._attempts.settled(arrival.key)
            return
        attempts = self._attempts.attempts(arrival.key)
        if attempts >= ATTEMPTS_MAXIMUM:
            reason = f"ended the agent: it was being judged each of the {attempts} times that the agent was ended"
            self._end_unjudged(arrival, folder.intake, f"{printable(arrival.relpath)}: {reason}")
        else:
            folder.reader.take(arrival)

    def _read(self, arrival: Arrival, content: bytes, folder: Watched) -> None:
        is_suspect = self._attempts.attempts(arrival.key) > 0
        if is_suspect:
            log.warning(
                "image_judged_alone file=%s: the agent was ended while it judged it", printable(arrival.relpath)
            )
        self._gate.enter((Taken(arrival, folder, len(content)), content), is_suspect=is_suspect)

    def _let_in(self, taken: Taken, content: bytes) -> None:
        image = EncodedImage(content, printable(taken.arrival.relpath), taken.arrival.max_pixels)
        with self._guard:
            if self._stopping.is_set() or self._agent.loop.crash is not None:
                return  # it was claimed while we ended: the next start offers it again
            number = self._agent.loop.submit(image, component=taken.arrival.component)
            self._taken[number] = taken

    @contextmanager
    def _counted_read(self, arrival: Arrival) -> Iterator[None]:
        """A large file may be what the box has no memory for."""
        self._attempts.begun([arrival.key])
        try:
            yield
        finally:
            self._attempts.ended([arrival.key])

    def _changed(self, arrival: Arrival, intake: FolderIntake) -> None:
        intake.withdraw(arrival)

    def _end_unjudged(self, arrival: Arrival, intake: FolderIntake, reason: str) -> None:
        outcome = Outcome(Verdict.UNKNOWN, None, None, (), reason)
        self._record(judged_result(self._config, arrival, outcome), arrival, intake)

    def _refused(self, refusal: Refusal, intake: FolderIntake) -> None:
        """A file that no request can be made of: UNKNOWN, with the reason in its row."""
        if not self._is_known(refusal, intake):
            self._record(refused_result(self._config, refusal), refusal, intake)

    def _is_known(self, judged: Arrival | Refusal, intake: FolderIntake) -> bool:
        """Whether its verdict was stored before a restart; then its file goes where that says."""
        try:
            known = self._store.find(judged.key)
        except sqlite3.Error as error:  # then it is judged again, and the row that is there stays
            log.warning("results_not_read key=%s reason=%s", judged.key, error)
            return False
        except OSError as error:  # the file was moved or deleted meanwhile: the same, and the store begins a new one
            log.error("results_not_read key=%s reason=%s: judged again", judged.key, error)
            return False
        if known is None:
            return False
        if known.result.verdict is Verdict.UNKNOWN:
            log.info(
                "image_known file=%s: this very file was UNKNOWN before; a copy of it, or a touch, has it judged again",
                judged.relpath,
            )
        intake.settle(judged, known.result.verdict, known.result.reason)
        return True

    def _has_room(self, intake: FolderIntake) -> bool:
        if self._stopping.is_set() or self._agent.loop.crash is not None:
            return False
        return has_room(intake.held, [folder.intake.held for folder in self._folders], self._in_flight_limit)

    # -- out: on the loop's thread, then on the store's --

    def _judged(self, number: int, outcome: Outcome) -> None:
        with self._drift_guard:
            self._drift.count(step.expert for step in outcome.steps)
        with self._guard:
            taken = self._taken.pop(number)
        taken.folder.reader.release(taken.size_bytes)
        self._gate.leave()
        self._record(judged_result(self._config, taken.arrival, outcome), taken.arrival, taken.folder.intake)

    def _batch_begun(self, requests: Sequence[int]) -> None:
        self._attempts.begun(self._keys_of(requests))

    def _batch_ended(self, requests: Sequence[int]) -> None:
        self._attempts.ended(self._keys_of(requests))

    def _crashed(self, crash: AgentCrashed, tell: Callable[[], None]) -> None:
        if isinstance(crash.error, DeviceLost) or (isinstance(crash.error, WorkOverdue) and not crash.error.is_batch):
            self._attempts.forgive()
        tell()

    def _keys_of(self, requests: Sequence[int]) -> list[str]:
        with self._guard:
            return [self._taken[number].arrival.key for number in requests]

    def _record(self, result: Result, judged: Arrival | Refusal, intake: FolderIntake) -> None:
        self._store.record(result, lambda recorded: self._committed(result, judged, intake, recorded))

    def _committed(self, result: Result, judged: Arrival | Refusal, intake: FolderIntake, recorded: Recorded) -> None:
        self._attempts.settled(judged.key)
        if not recorded.is_new:  # a row that could not be read when its file came: it decides
            if not self._is_known(judged, intake):
                intake.settle(judged, result.verdict, result.reason)
            return
        self._counts[result.verdict] += 1
        intake.settle(judged, result.verdict, result.reason)
        self._boards.count(result)

    # -- by time: on the housekeeper's thread --

    def _tell_stuck_readers(self) -> None:
        for folder in self._folders:
            folder.reader.tell_stuck()

    def _warn_of_drift(self) -> None:
        now_s = self._clock()
        if not self._drift_alarm.can_warn(now_s):
            return
        with self._drift_guard:
            sample = self._drift.sample()
        found = self._drift_alarm.due_warning(sample.statistics(), now_s)
        if found is not None:
            log.warning(
                "usage_drift distance=%.2f chance=%.2f steps=%d experts=%s: experts are asked otherwise than expected; "
                "learn how: coserve profile %s --usage-from %s%s",
                found.distance, found.chance, found.steps, ",".join(moved.expert for moved in found.experts),
                self._config.document.file, self._config.results_file,
                " --simulate" if self._agent.stored is None else "",
            )  # fmt: skip


def _stop_all(stops: Sequence[Callable[[float], None]], timeout_s: float) -> None:
    """Each is told to stop before any is waited for, so that those that hang take the time of one."""
    deadline_s = time.monotonic() + timeout_s
    for stop in stops:
        stop(0.0)
    for stop in stops:
        stop(max(deadline_s - time.monotonic(), 0.0))
