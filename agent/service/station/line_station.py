"""Station of a running line (`agent.web.station.station`): its state, stored rows, pictures, and what a person changes.

Guarantees: answers about results are stored. A refusal leaves no trace but in the audit.
"""

from __future__ import annotations

import sqlite3
import time
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from agent.records.station.audit import audit_page
from agent.records.station.reviews import Reviews, SecondVerdict
from agent.records.station.shifts import Shifts
from agent.service.station.line_texts import check_text, line_document, reloaded_document, swapped
from agent.service.station.live import Live
from agent.service.station.machine import Machine
from agent.service.station.pictures import Pictures
from agent.service.station.shown import review_view
from agent.service.station.state import LineState
from agent.service.station.stored import MACHINE, Stored
from agent.web.station import views
from experts.errors import OrderRefused, Refusing
from experts.thresholds.map_pictures import heat_png

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agent.api.calls.desk import Desk
    from agent.config import LineConfig
    from agent.service.desk.line_desk import LineParts
    from agent.service.station.state import Receivers
    from agent.web.station import questions as asked


class LineStation:
    """Implements ``Station``. Call ``stop`` at the end."""

    def __init__(self, parts: LineParts, desk: Desk, receivers: Receivers) -> None:
        self._line = parts
        self._desk = desk
        self._started_s = time.monotonic()
        self._pictures = Pictures(self._config)
        self._stored = Stored(parts, self._pictures, self._config)
        self._live = Live(parts.store, self._stored.reviews_read, time.monotonic)
        parts.verdicts.subscribe(self._live.stored)
        self._state = LineState(parts, receivers, self._live)
        self._machine = Machine(parts, self._stored.reviews_read)

    def stop(self) -> None:
        self._pictures.stop()

    def _config(self) -> LineConfig:
        return self._line.inspector.agent.config

    def state(self) -> views.StateView:
        with _reading():
            return self._state.view()

    def uptime_s(self) -> float:
        return time.monotonic() - self._started_s

    def results(self, query: asked.ResultsAsked) -> views.ResultsDocument:
        with _reading():
            return self._stored.results(query)

    def result(self, query: asked.OfResult) -> views.ResultDetail:
        with _reading():
            return self._stored.result(query.seq)

    def image(self, query: asked.ImageAsked) -> views.Picture:
        with _reading():
            return self._pictures.part(self._stored.listed(query.seq).row, query.width)

    def thumbnail(self, query: asked.OfResult) -> views.Picture:
        with _reading():
            return self._pictures.thumbnail(self._stored.listed(query.seq).row)

    def frame(self, query: asked.ImageAsked) -> views.Picture:
        with _reading():
            return self._pictures.frame(self._stored.listed(query.seq).row, query.width)

    def heat(self, query: asked.MapAsked) -> views.Picture:
        with _reading():
            stored = self._stored.map_of(query.seq, query.step)
        try:
            return views.Picture(heat_png(stored), "image/png")
        except ValueError as error:
            raise OrderRefused(Refusing.NOT_FOUND, f"the map cannot be shown: {error}", field="step") from error

    def boards(self, query: asked.BoardsAsked) -> views.BoardsDocument:
        with _reading():
            return self._stored.boards(query)

    def board(self, query: asked.OfNumber) -> views.BoardDetail:
        with _reading():
            return self._stored.board(query.number)

    def rework(self, who: str, given: asked.ReworkGiven) -> views.ReworkView:
        made = self._line.boards.rework(given.serial, given.board_type, who, given.reason)
        return views.ReworkView(made.who, made.reason, made.at)

    def reviews(self, query: asked.ReviewsAsked) -> views.ReviewsDocument:
        with _reading():
            return self._stored.reviews(query)

    def review(self, who: str, given: asked.ReviewGiven) -> views.ReviewView:
        said = SecondVerdict(given.result, MACHINE[given.verdict], who, given.label, given.reason)
        made = self._reviews().add(said)
        self._live.reviewed()
        return review_view(made)

    def undo_review(self, who: str, query: asked.OfNumber) -> views.ReviewView:
        undone = self._reviews().undo(query.number, who)
        self._live.reviewed()
        return review_view(undone)

    def _reviews(self) -> Reviews:
        """By the shifts that are served now."""
        return Reviews(self._line.store, Shifts(self._config().records.shifts), lambda: datetime.now(UTC))

    def experts(self) -> views.ExpertsDocument:
        with _reading():
            return self._machine.experts()

    def expert(self, query: asked.OfExpert) -> views.ExpertDetail:
        with _reading():
            return self._machine.expert(query.id)

    def promote(self, given: asked.PromoteGiven) -> views.PromotedDocument:
        shadow, keys = swapped(self._config(), given.expert)
        return views.PromotedDocument(given.expert, shadow, keys, self.reload())

    def engine(self, query: asked.EngineAsked) -> views.EngineDocument:
        return self._machine.engine(query.last)

    def texts(self) -> views.TextsDocument:
        return self._machine.texts()

    def explain(self, query: asked.ExplainAsked) -> views.ExplainDocument:
        with _reading():
            found = self._desk.explanation(query.subject)
        return views.ExplainDocument(found.subject, tuple(found.sentences), found.course)

    def line_text(self) -> views.LineDocument:
        return line_document(self._config())

    def check_line(self, given: asked.LineText) -> views.CheckedDocument:
        return check_text(self._config(), given.text)

    def reload(self) -> views.ReloadedDocument:
        return reloaded_document(self._desk.reload())

    def trigger(self, given: asked.TriggerGiven) -> views.TriggeredDocument:
        return views.TriggeredDocument(self._desk.trigger(given.camera, given.board, given.board_type, given.key))

    def audit(self, query: asked.PageAsked) -> views.AuditDocument:
        with _reading():
            found = audit_page(self._line.store.path, query.before, query.limit)
        rows = tuple(
            views.AuditRow(
                each.number, each.at, each.deed.who, each.deed.role, each.deed.action, each.deed.subject,
                each.deed.outcome, each.deed.config_sha256,
            )
            for each in found
        )  # fmt: skip
        return views.AuditDocument(rows, rows[-1].number if len(rows) == query.limit else None)


@contextmanager
def _reading() -> Iterator[None]:
    """Context: a results file that cannot be read is a refusal, as its writer has an alarm of its own."""
    try:
        yield
    except (sqlite3.Error, FileNotFoundError) as error:
        raise OrderRefused(Refusing.NOT_NOW, f"results cannot be read: {error}", 5.0) from error
