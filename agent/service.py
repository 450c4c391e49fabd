"""The composition root of ``coserve serve``: intake -> loop -> results -> boards -> the file's last place.

Guarantees: an image's verdict is committed before its file is moved; a file whose verdict was committed before a crash
is moved, not judged again; on stop nothing new is taken, what was taken is finished within ``DRAIN_S``, and what is
not finished by then stays in its folder's ``.work`` for the next start.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from agent.assembly import Agent, build_agent
from agent.boards import BoardLedger, BoardManifest, Inspection
from agent.inspection import box_json
from agent.intake.folder import FolderIntake
from agent.intake.naming import naming_of
from agent.listing import results_file
from agent.records.database import StateLock
from agent.records.results import Result, ResultStore
from experts.expert import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from agent.boards import BoardVerdict
    from agent.config import LineConfig
    from agent.core.request import Outcome
    from agent.intake.folder import Arrival, Refusal
    from agent.records.results import Recorded, ResultRow

log = logging.getLogger(__name__)

DRAIN_S = 25.0  # systemd waits 30 s before it kills
COMMIT_S = 3.0
HOUSEKEEPING_S = 0.5
IN_FLIGHT_LIMIT = 2000  # images taken from folders and not judged yet; the rest waits as files
REPLAYED_DAYS = 8  # boards wait a day at most by default; a week of results rebuilds every open one


@dataclass(frozen=True, slots=True)
class Taken:
    """An image under way: where it came from, and who moves its file in the end."""

    arrival: Arrival
    intake: FolderIntake


class LineService:
    """One line, served. ``start`` it once, ``stop`` it once; in between it needs no thread of the caller's."""

    def __init__(self, config: LineConfig, progress: Callable[[str, int, int], None]) -> None:
        self._config = config
        self._taken: dict[int, Taken] = {}
        self._guard = threading.Lock()  # over _taken: a request may end before its number is known here
        self._counts = dict.fromkeys(Verdict, 0)
        self._stored = 0
        self._ledger_guard = threading.Lock()
        self._sha256 = config.catalog.sha256
        self._agent: Agent = build_agent(config, self._judged, progress)
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
        return self._stored

    @property
    def agent(self) -> Agent:
        """The agent behind it, for its statistics."""
        return self._agent

    def start(self) -> None:
        """Take up boards that were open, start the agent, then watch the folders."""
        self._replay_boards()
        self._agent.start()
        for folder in self._config.intake.folders:
            intake = FolderIntake(
                folder,
                naming_of(folder, self._config),
                self._arrived_at(len(self._intakes)),
                self._refused,
                owner=self._config.line,
                has_room=self._has_room,
            )
            self._intakes.append(intake)
        for intake in self._intakes:
            intake.start()
        self._housekeeper.start()
        for expert, reason in self._agent.broken.items():
            log.error("expert_quarantined expert=%s reason=%s", expert, reason)
        folders = ", ".join(str(folder.path) for folder in self._config.intake.folders)
        log.info("ready line=%s experts=%d watching=%s", self._config.line, len(self._config.catalog.experts), folders)

    def stop(self) -> dict[str, Any]:
        """Finish what was taken, store it, end; what was done, for the closing line."""
        self._stopping.set()  # from here on no folder has room
        if not self._agent.loop.wait_until_idle(DRAIN_S):
            log.warning("not_drained images=%d they wait in .work for the next start", len(self._taken))
        statistics = self._agent.loop.statistics()
        self._agent.stop()
        self._housekeeper.join()
        self._wait_for_commits()
        for intake in self._intakes:
            intake.stop()  # moves the files whose verdicts were just stored
        if not self._store.close():
            log.error("results_not_stored: their images wait in .work for the next start")
        counts = {str(verdict).lower(): count for verdict, count in self._counts.items()}
        return {
            "requests": sum(counts.values()),
            **counts,
            "switches": statistics.engine.switches,
            "loads": statistics.engine.loads,
            "evictions": statistics.engine.evictions,
            "bytes_read": statistics.engine.bytes_read,
        }

    # -- in: on a folder's thread --

    def _arrived_at(self, index: int) -> Callable[[Arrival], None]:
        return lambda arrival: self._arrived(arrival, self._intakes[index])

    def _arrived(self, arrival: Arrival, intake: FolderIntake) -> None:
        known = self._store.find(arrival.key)
        if known is not None:
            intake.settle(arrival, known.result.verdict, known.result.reason)
            return
        with self._guard:
            number = self._agent.loop.submit(arrival.path, component=arrival.component)
            self._taken[number] = Taken(arrival, intake)

    def _refused(self, refusal: Refusal) -> None:
        """A file that no request can be made of: UNKNOWN, with the reason in its row."""
        self._counts[Verdict.UNKNOWN] += 1
        self._store.record(
            Result(
                key=f"refused:{refusal.relpath}:{refusal.at.isoformat()}",
                line=self._config.line,
                component="",
                image=refusal.relpath,
                verdict=Verdict.UNKNOWN,
                arrived_at=refusal.at,
                finished_at=refusal.at,
                seconds=0.0,
                config_sha256=self._sha256,
                reason=refusal.reason,
            ),
            lambda _: self._count_stored(),
        )

    def _has_room(self) -> bool:
        return not self._stopping.is_set() and self._agent.loop.requests_in_flight < IN_FLIGHT_LIMIT

    def _wait_for_commits(self) -> None:
        deadline = time.monotonic() + COMMIT_S
        while self._store.statistics().pending and time.monotonic() < deadline:
            time.sleep(0.01)

    # -- out: on the loop's thread, then on the store's --

    def _judged(self, number: int, outcome: Outcome) -> None:
        with self._guard:
            taken = self._taken.pop(number)
        result = self._result(taken, outcome)
        self._counts[outcome.verdict] += 1
        self._store.record(result, lambda recorded: self._committed(taken, result, recorded))

    def _result(self, taken: Taken, outcome: Outcome) -> Result:
        arrival, now = taken.arrival, datetime.now(UTC).astimezone()
        steps = [
            {
                "expert": step.expert,
                "label": step.prediction.label,
                "score": step.prediction.score,
                "boxes": [box_json(box) for box in step.prediction.boxes],
            }
            for step in outcome.steps
        ]
        return Result(
            key=arrival.key,
            line=self._config.line,
            component=arrival.component,
            image=arrival.relpath,
            verdict=outcome.verdict,
            arrived_at=arrival.arrived_at,
            finished_at=now,
            seconds=(now - arrival.arrived_at).total_seconds(),
            config_sha256=self._sha256,
            board=arrival.board,
            board_type=arrival.board_type,
            ref=arrival.ref,
            label=outcome.label,
            score=outcome.score,
            # whoever reads it knows the file by the name it came with, not by the one it has while claimed
            reason=outcome.reason and outcome.reason.replace(arrival.path.name, arrival.relpath),
            experts=tuple(step.expert for step in outcome.steps),
            detail={"steps": steps},
        )

    def _count_stored(self) -> None:
        self._stored += 1  # on the store's thread only

    def _committed(self, taken: Taken, result: Result, _: Recorded) -> None:
        self._count_stored()
        taken.intake.settle(taken.arrival, result.verdict, result.reason)
        with self._ledger_guard:
            verdict = self._count_on_board(result)
        if verdict is not None:
            self._record_board(verdict)

    # -- boards --

    def _count_on_board(self, result: Result) -> BoardVerdict | None:
        inspection = _inspection(result)
        if inspection is None or inspection.board_type not in self._config.boards:
            return None
        return self._ledger.add(inspection)

    def _record_board(self, verdict: BoardVerdict) -> None:
        log.info("board_judged board=%s verdict=%s missing=%s", verdict.serial, verdict.verdict, dict(verdict.missing))
        self._store.record_board(verdict)

    def _replay_boards(self) -> None:
        """Rebuild the boards that were open when the agent last ended."""
        since = datetime.now(UTC) - timedelta(days=REPLAYED_DAYS)
        recorded = [
            (row.board.serial, row.board.board_type, row.board.opened_at, row.board.verdict)
            for row in self._store.boards(since)
        ]
        for verdict in self._ledger.replay(_inspections(self._store.query(since=since)), recorded):
            self._record_board(verdict)

    def _keep_house(self) -> None:
        while not self._stopping.wait(HOUSEKEEPING_S):
            with self._ledger_guard:
                expired = self._ledger.expire(datetime.now(UTC))
            for verdict in expired:
                self._record_board(verdict)


def serve_line(config: LineConfig, progress: Callable[[str, int, int], None]) -> Mapping[str, Any]:
    """Serve until SIGTERM or SIGINT; what was done. Raises ConfigError before anything starts, AlreadyRunning."""
    with StateLock(config.state):
        service = LineService(config, progress)
        wanted = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: wanted.set())
        service.start()
        wanted.wait()
        log.info("stopping line=%s", config.line)
        closing = service.stop()
        log.info("stopped line=%s %s", config.line, " ".join(f"{key}={value}" for key, value in closing.items()))
        return closing


def _inspection(result: Result) -> Inspection | None:
    """A result as its board sees it; None for one that belongs to no board."""
    if result.board is None or result.board_type is None or result.ref is None:
        return None
    return Inspection(result.board, result.board_type, result.component, result.ref, result.verdict, result.finished_at)


def _inspections(rows: Iterator[ResultRow]) -> Iterator[Inspection]:
    for row in rows:
        inspection = _inspection(row.result)
        if inspection is not None:
            yield inspection
