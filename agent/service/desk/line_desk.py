"""The desk of a line: orders and queries while it runs (``agent.doors.desk``).

Guarantees: answers about the agent come from one snapshot; answers about results are stored.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import TYPE_CHECKING

from agent.deployment.line_change import line_name, with_line_names
from agent.deployment.profile_in_use import advice_without_profile
from agent.doors.desk import (
    Explanation,
    ModelView,
    PoolView,
    QueueView,
    ResultsCursor,
    StatusView,
    StoredView,
    TextsView,
)
from agent.service.desk.explaining import (
    explained_component,
    explained_course,
    explained_expert,
    explained_result,
)
from agent.service.desk.orders import OrderTaker
from agent.service.desk.views import board_view, measures_anomalies, run_view, verdict_view
from agent.service.inspections.courses import with_line_experts
from agent.subject import CALLER_PREFIX
from experts.errors import OrderRefused, Refusing
from experts.expert import Task

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from agent.core.pool import PoolStatistics
    from agent.core.state import EngineStatistics, QueueStatistics
    from agent.deployment.build import Agent
    from agent.doors.desk import (
        BoardView,
        CallerTicket,
        ImageOrder,
        Listener,
        ReloadView,
        TextListener,
        TextModelView,
        TextOrder,
        TextTicket,
    )
    from agent.records.result_writer import ResultStore
    from agent.records.results import AlarmRow
    from agent.records.station.alarms import Alarm
    from agent.runtime.executor import ExecutorStatistics
    from agent.service.inspections.admission import Admission
    from agent.service.inspections.inspector import Inspector
    from agent.service.inspections.journaled import JournaledImages
    from agent.service.inspections.line_boards import LineBoards
    from agent.service.inspections.tally import Tally
    from agent.service.inspections.verdicts import Verdicts
    from agent.service.texts.text_door import TextDoor, TextStatistics
    from agent.subject import SourceStatus
    from experts.catalog import Catalog

EXPERT_PREFIX = "expert:"
DIGITS = 18  # of a result's number: more are no number of SQLite


@dataclass(frozen=True, slots=True, eq=False)
class LineParts:
    """Parts of a served line that its desk and metrics read. ``phase``: intended reason to take no work, or None.
    ``alarms``: there now; ``open_alarms``: raised and not cleared."""

    inspector: Inspector
    admission: Admission
    journaled: JournaledImages
    verdicts: Verdicts
    boards: LineBoards
    store: ResultStore
    texts: TextDoor
    tally: Tally
    sources: Callable[[], Sequence[SourceStatus]]
    trigger: Callable[[str, str | None, str | None, str | None], str]
    reload: Callable[[], ReloadView]
    promote: Callable[[str, str, str], ReloadView]
    alarms: Callable[[], Sequence[Alarm]]
    phase: Callable[[], str | None]
    open_alarms: Callable[[], Sequence[AlarmRow]]


def unready(line: LineParts) -> str | None:
    """Why no work is taken now. Returning proves that the scheduler makes progress."""
    line.inspector.agent.loop.statistics()
    alarm = line.store.statistics().alarm
    return line.phase() or (None if alarm is None else f"results are not stored: {alarm}")


class LineDesk:
    """Implements ``agent.doors.desk.Desk``. For any thread."""

    def __init__(self, parts: LineParts) -> None:
        self._line = parts
        self._orders = OrderTaker(parts.inspector, parts.journaled, parts.admission)
        self._started_s = time.monotonic()

    def order(self, order: ImageOrder, listener: Listener) -> CallerTicket:
        with self._line.tally.ordering():
            return self._orders.order(order, listener)

    def generate(self, order: TextOrder, listener: TextListener) -> TextTicket:
        with self._line.tally.ordering():
            return self._line.texts.generate(order, listener)

    def unready(self) -> str | None:
        return unready(self._line)

    def text_models(self) -> Sequence[TextModelView]:
        return self._line.texts.models()

    def models(self) -> Sequence[ModelView]:
        agent = self._line.inspector.agent
        standing = standing_of(agent, agent.loop.statistics().engine)
        catalog = agent.config.catalog
        routes = {name: tuple(step.expert for step in steps) for name, steps in catalog.components.items()}
        singles = {
            f"{EXPERT_PREFIX}{name}": (name,) for name, expert in catalog.experts.items() if not expert.takes_texts
        }
        return [_model(name, asked, agent, standing) for name, asked in (routes | singles).items()]

    def load(self, model: str) -> None:
        agent = self._line.inspector.agent
        for expert in _experts_of(model, agent.config.catalog):
            agent.loop.want(agent.expert(expert))

    def unload(self, model: str) -> None:
        agent = self._line.inspector.agent
        for expert in _experts_of(model, agent.config.catalog):
            agent.loop.unwant(agent.expert(expert))

    def boards(self, serial: str, board_type: str | None = None) -> Sequence[BoardView]:
        runs = [run for run in self._line.boards.runs(serial) if board_type in (None, run.board_type)]
        views = {run.board_type: self._with_parts(run_view(run)) for run in runs}
        for row in self._line.store.latest_runs(serial):
            if row.board.board_type not in views and board_type in (None, row.board.board_type):
                views[row.board.board_type] = self._with_parts(board_view(row.board))
        return list(views.values())

    def _with_parts(self, view: BoardView) -> BoardView:
        rows = self._line.store.of_run(view.serial, view.board_type, view.opened_at)
        parts = tuple(verdict_view(row.result, row.seq) for row in rows)
        return replace(view, parts=parts)

    def stored_after(self, seq: int, board: int, limit: int, *, with_maps: bool = False) -> StoredView:
        page = self._line.store.after(seq, board, limit)
        parts = []
        for row in page.results:
            has_maps = with_maps and measures_anomalies(row.result)
            parts.append(verdict_view(row.result, row.seq, maps=self._line.store.maps(row.seq) if has_maps else ()))
        boards = [(number, board_view(row.board)) for number, row in page.boards]
        return StoredView(ResultsCursor(page.file, page.last_seq, page.last_board), tuple(parts), tuple(boards))

    def subscribe(self, notify: Callable[[], None]) -> Callable[[], None]:
        return self._line.verdicts.subscribe(lambda *_: notify())

    def trigger(
        self, camera: str, board: str | None = None, board_type: str | None = None, key: str | None = None
    ) -> str:
        return self._line.trigger(camera, board, board_type, key)

    def reload(self) -> ReloadView:
        return self._line.reload()

    def status(self) -> StatusView:
        agent = self._line.inspector.agent
        statistics = agent.loop.statistics()
        engine = statistics.engine
        executors = {each.executor: each for each in statistics.executors}
        return StatusView(
            line=agent.config.line,
            version=version("coserve"),
            uptime_s=time.monotonic() - self._started_s,
            is_draining=engine.is_draining,
            requests_in_flight=statistics.requests_in_flight,
            verdicts=dict(self._line.tally.verdicts),
            boards_open=self._line.boards.statistics().open,
            switches=engine.switches,
            loads=sum(engine.loads.values()),
            evictions=engine.evictions,
            bytes_read=engine.bytes_read,
            queues=tuple(_queue_view(queue, executors.get(queue.executor)) for queue in engine.queues),
            pools=tuple(_pool_view(pool) for pool in engine.pools),
            sources=tuple(self._line.sources()),
            standing=standing_of(agent, engine),
            alarms=tuple(alarm.message for alarm in self._line.alarms()),
            texts=_texts_view(self._line.texts.statistics(), statistics.executors),
            shadows=self._line.inspector.shadow_counts(),
            advice=() if agent.stored else advice_without_profile(agent.config, agent.box),
            unproven={name: lack.why for name, lack in self._line.inspector.trust.lacks.items()},
        )

    def explanation(self, subject: str) -> Explanation:
        agent = self._line.inspector.agent
        catalog = agent.config.catalog
        if subject in catalog.experts:
            return Explanation(subject, explained_expert(subject, agent, agent.loop.statistics().engine))
        if subject in catalog.components:
            engine = agent.loop.statistics().engine
            return Explanation(subject, explained_component(subject, catalog, agent, engine))
        store, record = self._line.store, agent.loop.record
        row = store.find(CALLER_PREFIX + subject) or store.find(subject)
        if row is None and subject.isdecimal() and len(subject) <= DIGITS:
            row = store.numbered(int(subject))
        found = record.find(CALLER_PREFIX + subject if row is None else row.result.subject.key) or record.find(subject)
        course = None if found is None else with_line_experts(found[0])
        if row is not None:
            course = row.result.detail.get("course") or course
            return Explanation(subject, explained_result(row, catalog.graph, course), course)
        if found is None or course is None:
            known = "expert, no component, and no key or number of a result or of a request under way"
            raise OrderRefused(Refusing.NOT_FOUND, f"{subject!r} is no {known}")
        when = "has been judged" if found[1] else "is under way"
        sentences = [f"{subject} {when}, {course['total_s']:.3f} s after its arrival.", *explained_course(course)]
        return Explanation(subject, sentences, course)


def _model(name: str, experts: tuple[str, ...], agent: Agent, standing: Mapping[str, str]) -> ModelView:
    listed = agent.config.catalog.experts
    first = listed[experts[0]]
    columns = agent.setup.matrix.experts.values()
    rows = [row for column in columns if (row := column.get(agent.expert(first.id))) is not None]
    labels = dict.fromkeys(label for expert in experts for label in listed[expert].answers)
    reason = next((f"{expert}: {standing[expert]}" for expert in experts if expert in standing), None)
    return ModelView(
        name,
        experts,
        tuple(labels),
        (first.pixels.height, first.pixels.width),
        max((row.performance.max_batch for row in rows), default=1),
        is_ready=reason is None,
        reason=reason,
        measures_anomalies=any(listed[expert].task is Task.ANOMALY for expert in experts),
    )


def _experts_of(model: str, catalog: Catalog) -> tuple[str, ...]:
    if model.startswith(EXPERT_PREFIX) and model.removeprefix(EXPERT_PREFIX) in catalog.experts:
        return (model.removeprefix(EXPERT_PREFIX),)
    if model not in catalog.components:
        raise OrderRefused(Refusing.NOT_FOUND, f"no model {model!r} - components, and {EXPERT_PREFIX}ID")
    return tuple(step.expert for step in catalog.components[model])


def standing_of(agent: Agent, engine: EngineStatistics) -> dict[str, str]:
    """Reasons of experts on probation or in quarantine, by name in the line file."""
    reasons = engine.on_probation | engine.quarantined
    served = {name: agent.expert(name) for name in agent.config.catalog.experts}
    return {name: with_line_names(reasons[now]) for name, now in served.items() if now in reasons}


def _pool_view(pool: PoolStatistics) -> PoolView:
    return PoolView(
        pool.name, pool.used_bytes, pool.expert_bytes, pool.resident, pool.lease_used_bytes, pool.lease_bytes
    )


def _texts_view(texts: TextStatistics, executors: Sequence[ExecutorStatistics]) -> TextsView:
    shown = texts.first_token_s
    return TextsView(
        under_way=texts.under_way,
        ended=sum(texts.ended.values()),
        read_tokens=sum(each.read_tokens for each in executors),
        written_tokens=sum(each.written_tokens for each in executors),
        shown=shown.counts[math.inf],
        first_token_s=shown.sum_s,
    )


def _queue_view(queue: QueueStatistics, executor: ExecutorStatistics | None) -> QueueView:
    running = None if queue.expert is None else line_name(queue.expert)
    view = QueueView(queue.executor, queue.processor, queue.requests, running)
    return view if executor is None else replace(view, busy_s=executor.busy_s, waited_s=executor.waited_s)
