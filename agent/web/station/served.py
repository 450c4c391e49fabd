"""Operations of `/api`, each with its answer by a line's station: routes and the OpenAPI document are made of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from agent.api.access import Role
from agent.web.operations import Asked, Operation
from agent.web.station import questions as asked
from agent.web.station import views

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent.web.station.station import Station

PICTURES = ("image/jpeg", "image/png")
Answer: TypeAlias = "Callable[[Station, Any], object]"
Change: TypeAlias = "Callable[[Station, str, Any], object]"  # by whom, what is asked: a body, or parameters


@dataclass(frozen=True, slots=True)
class Read:
    operation: Operation
    answer: Answer


@dataclass(frozen=True, slots=True)
class Changing:
    """``about``: what is changed, for the audit."""

    operation: Operation
    change: Change
    about: Callable[[Any], str]


def _get(
    path: str,
    summary: str,
    kind: Any,  # noqa: ANN401  # a type
    model: type[Asked],
    answer: Answer,
    least: Role = Role.READ,
) -> Read:
    failures = (404,) if "{" in path or model in (asked.OfExpert, asked.ExplainAsked) else ()
    return Read(Operation("GET", path, summary, kind, model, failures=failures, least=least), answer)


STATE = Operation("GET", "/api/state", "The line now", views.StateDocument, asked.Nothing, empty=304)
OPENAPI = Operation("GET", "/api/openapi.json", "This document", dict[str, Any], asked.Nothing)
READS = (
    _get("/api/results", "Stored results", views.ResultsDocument, asked.ResultsAsked, lambda it, of: it.results(of)),
    _get("/api/results/{seq}", "A result", views.ResultDetail, asked.OfResult, lambda it, of: it.result(of)),
    _get("/api/boards", "Boards", views.BoardsDocument, asked.BoardsAsked, lambda it, of: it.boards(of)),
    _get("/api/boards/{number}", "A board, its parts", views.BoardDetail, asked.OfNumber, lambda it, of: it.board(of)),
    _get("/api/reviews", "Second verdicts", views.ReviewsDocument, asked.ReviewsAsked, lambda it, of: it.reviews(of)),
    _get("/api/experts", "All experts", views.ExpertsDocument, asked.Nothing, lambda it, _: it.experts()),
    _get("/api/expert", "An expert", views.ExpertDetail, asked.OfExpert, lambda it, of: it.expert(of)),
    _get("/api/engine", "What ran and loaded", views.EngineDocument, asked.EngineAsked, lambda it, of: it.engine(of)),
    _get("/api/texts", "Texts under way", views.TextsDocument, asked.Nothing, lambda it, _: it.texts()),
    _get("/api/explain", "Why", views.ExplainDocument, asked.ExplainAsked, lambda it, of: it.explain(of)),
    _get(
        "/api/line", "The line file", views.LineDocument, asked.Nothing, lambda it, _: it.line_text(), Role.OPERATE
    ),
    _get(
        "/api/audit", "Who changed what", views.AuditDocument, asked.PageAsked, lambda it, of: it.audit(of),
        Role.OPERATE,
    ),
)  # fmt: skip
SHOWN = (
    _get("/api/results/{seq}/image", "The part, upright", PICTURES, asked.ImageAsked, lambda it, of: it.image(of)),
    _get("/api/results/{seq}/thumbnail", "The part, small", PICTURES, asked.OfResult, lambda it, of: it.thumbnail(of)),
    _get("/api/results/{seq}/frame", "The whole image", PICTURES, asked.ImageAsked, lambda it, of: it.frame(of)),
    _get("/api/results/{seq}/maps/{step}", "Anomaly map", PICTURES, asked.MapAsked, lambda it, of: it.heat(of)),
)
CHANGES = (
    Changing(
        Operation(
            "POST", "/api/reviews", "Agree, or not", views.ReviewView, asked.Nothing, asked.ReviewGiven, 201, (404,),
            Role.OPERATE, "review",
        ),
        lambda it, who, given: it.review(who, given), lambda given: f"result {given.result}: {given.verdict}",
    ),
    Changing(
        Operation(
            "DELETE", "/api/reviews/{number}", "Undo a review", views.ReviewView, asked.OfNumber, None, 200, (404,),
            Role.OPERATE, "undo review",
        ),
        lambda it, who, of: it.undo_review(who, of), lambda of: f"review {of.number}",
    ),
    Changing(
        Operation(
            "POST", "/api/boards/rework", "Open a new run", views.ReworkView, asked.Nothing, asked.ReworkGiven, 201,
            (404,), Role.OPERATE, "rework",
        ),
        lambda it, who, given: it.rework(who, given), lambda given: f"{given.board_type} {given.serial}",
    ),
    Changing(
        Operation(
            "POST", "/api/trigger", "Take a frame", views.TriggeredDocument, asked.Nothing, asked.TriggerGiven, 200,
            (404, 409), Role.OPERATE, "trigger",
        ),
        lambda it, _, given: it.trigger(given), lambda given: f"camera {given.camera}",
    ),
    Changing(
        Operation(
            "POST", "/api/line/check", "Check a line file", views.CheckedDocument, asked.Nothing, asked.LineText,
            least=Role.OPERATE,
        ),
        lambda it, _, given: it.check_line(given), lambda _: "",
    ),
    Changing(
        Operation(
            "POST", "/api/reload", "Serve the line file", views.ReloadedDocument, asked.Nothing, least=Role.ADMIN,
            action="reload",
        ),
        lambda it, *_: it.reload(), lambda _: "line file",
    ),
    Changing(
        Operation(
            "POST", "/api/experts/promote", "Serve a shadow", views.PromotedDocument, asked.Nothing, asked.PromoteGiven,
            200, (404,), Role.ADMIN, "promote",
        ),
        lambda it, _, given: it.promote(given), lambda given: str(given.expert),
    ),
)  # fmt: skip
OPERATIONS = (STATE, OPENAPI, *(each.operation for each in (*READS, *SHOWN, *CHANGES)))
