"""The composition root of ``coserve serve``: intake -> loop -> results -> boards -> the file's last place.

Guarantees: a file's verdict is committed before the file is moved, also that of one that is refused; a file whose
verdict was committed before a crash is moved, not judged again; on stop nothing new is taken, what was taken is
finished within ``DRAIN_S``, and what is not finished by then stays in its folder's ``.work`` for the next start. When
the agent crashes, nothing more is taken and everything ends, so that whoever started it can start it again.
"""

from __future__ import annotations

import logging
import os
import signal
import sqlite3
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from agent.assembly import Agent, build_agent
from agent.boards import BoardLedger, BoardManifest
from agent.drift import UsageDrift
from agent.intake.folder import FolderIntake
from agent.intake.naming import naming_of
from agent.listing import results_file
from agent.recording import inspection_of, judged_result, refused_result
from agent.records.database import state_held
from agent.records.results import ResultStore
from agent.runtime.executor import ImageFile
from experts.expert import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from agent.boards import BoardVerdict, LedgerStatistics
    from agent.config import LineConfig
    from agent.core.request import Outcome
    from agent.drift import DriftStatistics
    from agent.intake.folder import Arrival, IntakeStatistics, Refusal
    from agent.records.results import Recorded, Result, StoreStatistics
    from experts.errors import AgentCrashed

log = logging.getLogger(__name__)

ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT)
TOLD = 0  # what is written where no signal is: no signal has this number
DRAIN_S = 25.0  # systemd waits 30 s before it kills
COMMIT_S = 3.0
HOUSEKEEPING_S = 0.5
IN_FLIGHT_LIMIT = 2000  # images taken from folders whose verdict is not stored yet; the rest waits as files
REPLAY_SLACK = timedelta(minutes=1)  # arbitrary: for verdicts that were due when the agent ended, and not yet stored


@dataclass(frozen=True, slots=True)
class Taken:
    """An image under way: where it came from, and who moves its file in the end."""

    arrival: Arrival
    intake: FolderIntake


@dataclass(frozen=True, slots=True)
class LineStatistics:
    """A snapshot of all that surrounds the agent's loop; the loop has its own."""

    requests_in_flight: int
    intakes: tuple[IntakeStatistics, ...]
    store: StoreStatistics
    boards: LedgerStatistics
    drift: DriftStatistics


class LineService:
    """One line, served. ``start`` it once, ``stop`` it once; in between it needs no thread of the caller's.

    ``on_crash`` is called, from any thread, when the agent has crashed: then ``stop`` it. ``clock``: monotonic seconds,
    by which repeated warnings are spaced.
    """

    def __init__(
        self,
        config: LineConfig,
        progress: Callable[[str, int, int], None],
        *,
        on_crash: Callable[[], None] = lambda: None,
        in_flight_limit: int = IN_FLIGHT_LIMIT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._clock = clock
        self._in_flight_limit = in_flight_limit
        self._taken: dict[int, Taken] = {}
        self._guard = threading.Lock()  # over _taken: a request may end before its number is known here
        self._counts = dict.fromkeys(Verdict, 0)  # of rows that were stored; written on the store's thread only
        self._ledger_guard = threading.Lock()
        self._agent: Agent = build_agent(config, self._judged, progress)
        self._agent.loop.when_crashed(lambda _: on_crash())
        self._drift_guard = threading.Lock()
        self._drift = UsageDrift(self._agent.profile.usage)
        self._store = ResultStore(results_file(config))
        self._ledger = BoardLedger(
            {
                name: BoardManifest(board.components, timedelta(seconds=board.patience_s))
                for name, board in config.boards.items()
            }
        )
        self._intakes: list[FolderIntake] = []
        self._stopping = threading.Event()
        self._housekeeper = threading.Thread(target=self._keep_house, name="housekeeper", daemon=True)

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
        with self._ledger_guard:
            boards = self._ledger.statistics()
        with self._drift_guard:
            drift = self._drift.statistics()
        intakes = tuple(intake.statistics() for intake in self._intakes)
        return LineStatistics(self._agent.loop.requests_in_flight, intakes, self._store.statistics(), boards, drift)

    def start(self) -> None:
        """Take up boards that were open, start the agent, then watch the folders."""
        self._replay_boards()
        self._agent.start()
        for folder in self._config.intake.folders:
            intake = FolderIntake(
                folder,
                naming_of(folder, self._config),
                self._arrived_at(len(self._intakes)),
                self._refused_at(len(self._intakes)),
                owner=self._config.line,
                has_room=self._has_room,
            )
            self._intakes.append(intake)
        for intake in self._intakes:
            intake.start()
        self._housekeeper.start()
        folders = ", ".join(str(folder.path) for folder in self._config.intake.folders)
        log.info("ready line=%s experts=%d watching=%s", self._config.line, len(self._config.catalog.experts), folders)

    def stop(self) -> dict[str, Any]:
        """Finish what was taken, store it, end; what was done, for the closing line.

        Raises AgentCrashed if it had crashed, after everything has ended.
        """
        with self._guard:
            self._stopping.set()  # from here on no folder has room, and what is under way to us stays in `.work`
        with ExitStack() as ending:  # in the order from below
            ending.callback(self._close_store)
            ending.callback(self._stop_intakes)
            ending.callback(self._wait_for_commits)
            ending.callback(self._stop_housekeeper)
            ending.callback(self._agent.stop)
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
        }

    def _drain(self) -> None:
        self._agent.loop.drain()
        if not self._agent.loop.wait_until_drained(DRAIN_S):
            log.warning("not_drained images=%d they wait in .work for the next start", len(self._taken))

    def _stop_housekeeper(self) -> None:
        if self._housekeeper.is_alive():
            self._housekeeper.join()

    def _wait_for_commits(self) -> None:
        deadline = time.monotonic() + COMMIT_S
        while self._store.statistics().pending and time.monotonic() < deadline:
            time.sleep(0.01)

    def _stop_intakes(self) -> None:
        for intake in self._intakes:
            intake.stop()  # moves the files whose verdicts were just stored

    def _close_store(self) -> None:
        if not self._store.close(COMMIT_S):
            log.error("results_not_stored: their images wait in .work for the next start")

    # -- in: on a folder's thread --

    def _arrived_at(self, index: int) -> Callable[[Arrival], None]:
        return lambda arrival: self._arrived(arrival, self._intakes[index])

    def _refused_at(self, index: int) -> Callable[[Refusal], None]:
        return lambda refusal: self._refused(refusal, self._intakes[index])

    def _arrived(self, arrival: Arrival, intake: FolderIntake) -> None:
        if self._is_known(arrival, intake):
            return
        with self._guard:
            if self._stopping.is_set() or self._agent.loop.crash is not None:
                return  # it was claimed while we ended: the next start offers it again
            image = ImageFile(arrival.path, arrival.max_pixels)
            number = self._agent.loop.submit(image, component=arrival.component)
            self._taken[number] = Taken(arrival, intake)

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
        if known is None:
            return False
        intake.settle(judged, known.result.verdict, known.result.reason)
        return True

    def _has_room(self) -> bool:
        if self._stopping.is_set() or self._agent.loop.crash is not None:
            return False
        waiting = self._agent.loop.requests_in_flight + self._store.statistics().pending
        return waiting < self._in_flight_limit

    # -- out: on the loop's thread, then on the store's --

    def _judged(self, number: int, outcome: Outcome) -> None:
        with self._drift_guard:
            self._drift.count(step.expert for step in outcome.steps)
        with self._guard:
            taken = self._taken.pop(number)
        self._record(judged_result(self._config, taken.arrival, outcome), taken.arrival, taken.intake)

    def _record(self, result: Result, judged: Arrival | Refusal, intake: FolderIntake) -> None:
        self._store.record(result, lambda recorded: self._committed(result, judged, intake, recorded))

    def _committed(self, result: Result, judged: Arrival | Refusal, intake: FolderIntake, recorded: Recorded) -> None:
        if not recorded.is_new:  # a row that could not be read when its file came: it decides
            if not self._is_known(judged, intake):
                intake.settle(judged, result.verdict, result.reason)
            return
        self._counts[result.verdict] += 1
        intake.settle(judged, result.verdict, result.reason)
        with self._ledger_guard:
            verdict = self._count_on_board(result)
        if verdict is not None:
            self._record_board(verdict)

    # -- boards --

    def _count_on_board(self, result: Result) -> BoardVerdict | None:
        inspection = inspection_of(result)
        if inspection is None or inspection.board_type not in self._config.boards:
            return None
        return self._ledger.add(inspection)

    def _record_board(self, verdict: BoardVerdict) -> None:
        log.info("board_judged board=%s verdict=%s missing=%s", verdict.serial, verdict.verdict, dict(verdict.missing))
        self._store.record_board(verdict)

    def _replay_boards(self) -> None:
        """Take up the boards that were open when the agent last ended; closed ones stay as they are stored.

        Every board that was open then, and every late image, came within two timeouts before the latest result.
        """
        latest = self._store.latest_at()
        if latest is None:
            return
        timeout = self._ledger.longest_timeout
        since = min(latest, datetime.now(UTC)) - 2 * timeout - REPLAY_SLACK
        recorded = [row.board for row in self._store.boards(since - timeout)]
        for verdict in self._ledger.replay(self._store.inspections(since), recorded, since):
            self._record_board(verdict)

    def _keep_house(self) -> None:
        while not self._stopping.wait(HOUSEKEEPING_S):
            with self._ledger_guard:
                expired = self._ledger.expire(datetime.now(UTC))
            for verdict in expired:
                self._record_board(verdict)
            self._warn_of_drift()

    def _warn_of_drift(self) -> None:
        with self._drift_guard:
            found = self._drift.due_warning(self._clock())
        if found is not None:
            log.warning(
                "usage_drift distance=%.2f chance=%.2f steps=%d experts=%s: experts are asked otherwise than expected; "
                "learn how: coserve profile %s --usage-from %s%s",
                found.distance, found.chance, found.steps, ",".join(moved.expert for moved in found.experts),
                self._config.document.file, results_file(self._config),
                " --simulate" if self._agent.stored is None else "",
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _End:
    """A pipe that says when to end: by a signal's number, or TOLD."""

    reader: int
    writer: int

    def tell(self) -> None:
        """From any thread, at any moment."""
        with suppress(OSError):  # it is full of what says the same, or nobody waits any more
            os.write(self.writer, bytes([TOLD]))

    def wait(self) -> None:
        """Until somebody has told, or a signal has come; it may have come before."""
        while os.read(self.reader, 1)[0] not in (TOLD, *ENDING_SIGNALS):
            continue


@contextmanager
def _awaited_end() -> Iterator[_End]:
    """While it is open every signal that Python handles writes to its pipe.

    Not an Event or a queue that a handler sets. Handlers run on the main thread alone, and only between two of its
    instructions: a signal that another thread receives, or that comes after the last such look and before the main
    thread waits for the lock, leaves it waiting for good. The pipe is written to where the signal arrives.
    """
    reader, writer = os.pipe()
    try:
        os.set_blocking(writer, False)
        before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        try:
            yield _End(reader, writer)
        finally:
            signal.set_wakeup_fd(before)
    finally:
        os.close(reader)
        os.close(writer)


def serve_line(config: LineConfig, progress: Callable[[str, int, int], None]) -> Mapping[str, Any]:
    """Serve until SIGTERM or SIGINT; what was done.

    Raises ConfigError before anything starts, AlreadyRunning, and AgentCrashed.
    """
    with state_held(config.state), _awaited_end() as end:
        service = LineService(config, progress, on_crash=end.tell)
        for number in ENDING_SIGNALS:
            signal.signal(number, lambda *_: None)  # the interpreter writes to the pipe before it comes to this
        service.start()
        end.wait()
        log.info("stopping line=%s", config.line)
        closing = service.stop()
        log.info("stopped line=%s %s", config.line, " ".join(f"{key}={value}" for key, value in closing.items()))
        return closing
