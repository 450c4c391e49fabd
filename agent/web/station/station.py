"""What a line's station can be asked and told (implemented by `agent.service.station`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from agent.web.station import questions as asked
    from agent.web.station import views


class Station(Protocol):
    """Calls from any thread. A call may take long, or never return. Refusals raise OrderRefused."""

    def state(self) -> views.StateView:
        """One call at a time."""

    def uptime_s(self) -> float: ...

    def results(self, query: asked.ResultsAsked) -> views.ResultsDocument: ...

    def result(self, query: asked.OfResult) -> views.ResultDetail: ...

    def image(self, query: asked.ImageAsked) -> views.Picture:
        """The part that was judged, upright."""

    def thumbnail(self, query: asked.OfResult) -> views.Picture: ...

    def frame(self, query: asked.ImageAsked) -> views.Picture:
        """The whole image that the part was cut from."""

    def heat(self, query: asked.MapAsked) -> views.Picture:
        """Anomaly map in heat colours, to be stretched over the image."""

    def boards(self, query: asked.BoardsAsked) -> views.BoardsDocument: ...

    def board(self, query: asked.OfNumber) -> views.BoardDetail: ...

    def rework(self, who: str, given: asked.ReworkGiven) -> views.ReworkView: ...

    def reviews(self, query: asked.ReviewsAsked) -> views.ReviewsDocument: ...

    def review(self, who: str, given: asked.ReviewGiven) -> views.ReviewView: ...

    def undo_review(self, who: str, query: asked.OfNumber) -> views.ReviewView: ...

    def experts(self) -> views.ExpertsDocument: ...

    def expert(self, query: asked.OfExpert) -> views.ExpertDetail: ...

    def promote(self, given: asked.PromoteGiven) -> views.PromotedDocument: ...

    def engine(self, query: asked.EngineAsked) -> views.EngineDocument: ...

    def texts(self) -> views.TextsDocument: ...

    def explain(self, query: asked.ExplainAsked) -> views.ExplainDocument: ...

    def line_text(self) -> views.LineDocument: ...

    def check_line(self, given: asked.LineText) -> views.CheckedDocument: ...

    def reload(self) -> views.ReloadedDocument: ...

    def trigger(self, given: asked.TriggerGiven) -> views.TriggeredDocument: ...

    def audit(self, query: asked.PageAsked) -> views.AuditDocument: ...

    def stop(self) -> None:
        """No call follows; a call that hangs is abandoned."""
