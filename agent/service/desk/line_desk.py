"""The desk of a line: orders and queries while it runs (``agent.doors.desk``).

Guarantees: answers about the agent come from one snapshot; answers about results are stored.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from agent.doors.desk import (
    Explanation,
    ModelView,
    ResultsCursor,
    StatusView,
    StoredView,
)
from agent.faults.errors import OrderRefused, Reason
from agent.service.desk.explaining import (
    explained_component,
    explained_course,
    explained_expert,
    explained_result,
)
from agent.service.desk.line_state import standing_of, state_of
from agent.service.desk.orders import OrderTaker
from agent.service.desk.views import board_view, measures_anomalies, run_view, status_view, verdict_view
from agent.service.inspections.courses import with_line_experts
from agent.subject import CALLER_PREFIX
from experts.expert import Task

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from agent.deployment.build import Agent
    from agent.doors.desk import (
        BoardView,
        CallerTicket,
        ImageOrder,
        Listener,
        PromptView,
        ReloadView,
        TextListener,
        TextModelView,
        TextOrder,
        TextTicket,
    )
    from agent.service.desk.line_state import LineParts
    from experts.catalog import Catalog

EXPERT_PREFIX = "expert:"
DIGITS = 18  # of a result's number: more are no number of SQLite


class LineDesk:
    """Implements ``agent.doors.desk.Desk``. For any thread."""

    def __init__(self, parts: LineParts) -> None:
        self._line = parts
        self._orders = OrderTaker(parts.inspector, parts.journaled, parts.admission)

    def order(self, order: ImageOrder, listener: Listener) -> CallerTicket:
        with self._line.tally.ordering():
            return self._orders.order(order, listener)

    def generate(self, order: TextOrder, listener: TextListener) -> TextTicket:
        with self._line.tally.ordering():
            return self._line.texts.generate(order, listener)

    def unready(self) -> str | None:
        return state_of(self._line).unready

    def text_models(self) -> Sequence[TextModelView]:
        return self._line.texts.models()

    def tokenised(self, order: TextOrder) -> PromptView:
        return self._line.texts.tokenised(order)

    def detokenised(self, model: str, tokens: tuple[int, ...]) -> str:
        return self._line.texts.detokenised(model, tokens)

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
            if row.board_type not in views and board_type in (None, row.board_type):
                views[row.board_type] = self._with_parts(board_view(row))
        return list(views.values())

    def _with_parts(self, view: BoardView) -> BoardView:
        rows = self._line.store.of_run(view.serial, view.board_type, view.opened_at)
        parts = tuple(verdict_view(row) for row in rows)
        return replace(view, parts=parts)

    def stored_after(self, seq: int, board: int, limit: int, *, with_maps: bool = False) -> StoredView:
        page = self._line.store.after(seq, board, limit)
        parts = []
        for row in page.results:
            has_maps = with_maps and measures_anomalies(row)
            parts.append(verdict_view(row, maps=self._line.store.maps(row.seq) if has_maps else ()))
        boards = [(number, board_view(row)) for number, row in page.boards]
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
        return status_view(state_of(self._line))

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
        found = record.find(CALLER_PREFIX + subject if row is None else row.subject.key) or record.find(subject)
        course = None if found is None else with_line_experts(found[0])
        if row is not None:
            course = dict(row.course) if row.course else course
            return Explanation(subject, explained_result(row, catalog.graph, course), course)
        if found is None or course is None:
            known = "expert, no component, and no key or number of a result or of a request under way"
            raise OrderRefused(Reason.NOT_FOUND, f"{subject!r} is no {known}")
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
        raise OrderRefused(Reason.NOT_FOUND, f"no model {model!r} - components, and {EXPERT_PREFIX}ID")
    return tuple(step.expert for step in catalog.components[model])
