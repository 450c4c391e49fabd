"""Station of a running line (``agent.service.station.served``): what it answers to each operation of `/api`.

Guarantees: answers about results are stored. A refusal leaves no trace but in the audit.
"""

from __future__ import annotations

import sqlite3
import time
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from agent.doors.http.station import Shown
from agent.faults.errors import OrderRefused, Reason
from agent.lines.promotion import differing_keys
from agent.records.station.audit import audit_page
from agent.records.station.reviews import Review, Reviews
from agent.records.station.shifts import Shifts
from agent.service.desk.tracing import trace_of
from agent.service.inspections.courses import with_line_experts
from agent.service.station import served, views
from agent.service.station.line_texts import check_text, line_document
from agent.service.station.live import Live
from agent.service.station.machine import Machine
from agent.service.station.pictures import Pictures
from agent.service.station.state import StationState
from agent.service.station.stored import StoredRows
from experts.expert import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from agent.config import LineConfig
    from agent.doors.desk import Desk
    from agent.doors.http.operations import Operation
    from agent.records.boards import Rework
    from agent.service.desk.line_state import LineParts
    from agent.service.station import questions as asked


class LineStation:
    """Implements ``agent.doors.http.station.Station``."""

    def __init__(self, parts: LineParts, desk: Desk) -> None:
        self._line = parts
        self._desk = desk
        self._pictures = Pictures(self._config)
        stored = StoredRows(parts.store, self._pictures, self._course_of, self._config, parts.boards.runs)
        self._live = Live(parts.store, stored.reviews_read, time.monotonic)
        parts.verdicts.subscribe(self._live.stored)
        self._state = StationState(parts, self._live)
        self._machine = machine = Machine(parts, stored.reviews_read)
        self._state_json = TypeAdapter(views.StateView)
        self.reads = _read_by({
            served.RESULTS: stored.results, served.RESULT: stored.result, served.BOARDS: stored.boards,
            served.BOARD: stored.board, served.REVIEWS: stored.reviews, served.EXPERTS: machine.experts,
            served.EXPERT: machine.expert, served.ENGINE: machine.engine, served.TEXTS: machine.texts,
            served.EXPLAIN: lambda query: desk.explanation(query.subject), served.AUDIT: self._audit,
            served.LINE: lambda _: line_document(self._config()),
        })  # fmt: skip
        self.shown = _read_by({
            served.IMAGE: stored.image, served.THUMBNAIL: stored.thumbnail, served.FRAME: stored.frame,
            served.HEAT: stored.heat, served.TRACE: self._trace,
        })  # fmt: skip
        self.changes: dict[Operation, Callable[[str, Any], object]] = {
            served.REVIEW: self._review, served.UNDO: self._undo, served.REWORK: self._rework,
            served.TRIGGER: self._trigger, served.RELOAD: lambda *_: desk.reload(), served.PROMOTE: self._promote,
            served.CHECK: lambda _, given: check_text(self._config(), given.text),
        }  # fmt: skip

    def state(self) -> bytes:
        return self._state_json.dump_json(self._state.view())

    def uptime_s(self) -> float:
        return time.monotonic() - self._line.started_s

    def stop(self) -> None:
        self._pictures.stop()

    def _config(self) -> LineConfig:
        return self._line.inspector.agent.config

    def _course_of(self, key: str) -> dict[str, Any] | None:
        found = self._line.inspector.agent.loop.record.find(key)
        return None if found is None else with_line_experts(found[0])

    def _trace(self, query: asked.EngineAsked) -> Shown:
        agent = self._line.inspector.agent
        return Shown(trace_of(agent.loop, agent.config.line, query.last), "application/json")

    def _audit(self, query: asked.PageAsked) -> views.AuditDocument:
        found = audit_page(self._line.store.path, query.before, query.limit)
        return views.AuditDocument(found, found[-1].number if len(found) == query.limit else None)

    # -- what a person changes --

    def _review(self, who: str, given: asked.ReviewGiven) -> Review:
        made = self._reviews().add(given.result, Verdict(given.verdict), who, given.label, given.reason, given.file)
        self._counts_changed()
        return made

    def _undo(self, who: str, query: asked.OfReview) -> Review:
        undone = self._reviews().undo(query.number, who, query.file)
        self._counts_changed()
        return undone

    def _counts_changed(self) -> None:
        self._live.reviewed()
        self._machine.reviewed()

    def _reviews(self) -> Reviews:
        """Reviews by the shifts of the line file in service."""
        return Reviews(self._line.store, Shifts(self._config().records.shifts), lambda: datetime.now(UTC))

    def _rework(self, who: str, given: asked.ReworkGiven) -> Rework:
        return self._line.boards.rework(given.serial, given.board_type, who, given.reason)

    def _trigger(self, _: str, given: asked.TriggerGiven) -> views.TriggeredDocument:
        return views.TriggeredDocument(self._desk.trigger(given.camera, given.board, given.board_type, given.key))

    def _promote(self, who: str, given: asked.PromoteGiven) -> views.PromotedDocument:
        before = self._config()
        done = self._line.promote(who, given.expert, given.sha256)
        shadow = before.catalog.graph.shadows[given.expert]
        keys = differing_keys(before.document.values["experts"], given.expert, shadow) if done.replaced else ()
        return views.PromotedDocument(given.expert, shadow, keys, done)


def _read_by(answers: Mapping[Operation, Callable[[Any], Any]]) -> dict[Operation, Callable[[Any], Any]]:
    """Answers of operations; a results file that cannot be read is a refusal, as its writer has an alarm of its own."""

    def read(answer: Callable[[Any], Any], query: Any) -> Any:  # noqa: ANN401  # as ``answer``
        try:
            return answer(query)
        except (sqlite3.Error, FileNotFoundError) as error:
            raise OrderRefused(Reason.NOT_NOW, f"results cannot be read: {error}", 5.0) from error

    return {operation: partial(read, answer) for operation, answer in answers.items()}
