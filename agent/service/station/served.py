"""Operations of `/api`: routes and the OpenAPI document follow."""

from __future__ import annotations

from typing import Any

from agent.doors.access import Role
from agent.doors.desk import Explanation, ReloadView
from agent.doors.http.operations import Operation
from agent.doors.http.session import OPERATIONS as OF_SESSION
from agent.records.boards import Rework
from agent.records.station.reviews import Review
from agent.service.station import questions as asked
from agent.service.station import views

PICTURES = ("image/jpeg", "image/png")
LINE_FILE_BYTES = 512 * 1024  # of a line file: hundreds of experts take a quarter
FOUND, OPERATE, ADMIN = (404,), Role.OPERATE, Role.ADMIN
ONE, NUMBERED = "/api/results/{seq}", "/api/boards/{number}"

STATE = Operation("GET", "/api/state", "The line now", views.StateDocument, empty=304)
OPENAPI = Operation("GET", "/api/openapi.json", "This document", dict[str, Any])
RESULTS = Operation("GET", "/api/results", "Stored results", views.ResultsDocument, asked.ResultsAsked)
RESULT = Operation("GET", ONE, "A result", views.ResultDetail, asked.OfResult, failures=FOUND)
BOARDS = Operation("GET", "/api/boards", "Closed boards", views.BoardsDocument, asked.BoardsAsked)
BOARD = Operation("GET", NUMBERED, "A board with its parts", views.BoardDetail, asked.OfNumber, failures=FOUND)
REVIEWS = Operation("GET", "/api/reviews", "Second verdicts", views.ReviewsDocument, asked.ReviewsAsked)
EXPERTS = Operation("GET", "/api/experts", "Experts of the line", views.ExpertsDocument)
EXPERT = Operation("GET", "/api/expert", "An expert", views.ExpertDetail, asked.OfExpert, failures=FOUND)
ENGINE = Operation("GET", "/api/engine", "What ran and was loaded", views.EngineDocument, asked.EngineAsked)
TEXTS = Operation("GET", "/api/texts", "Texts under way", views.TextsDocument)
EXPLAIN = Operation("GET", "/api/explain", "Why", Explanation, asked.ExplainAsked, failures=FOUND)
LINE = Operation("GET", "/api/line", "The line file", views.LineDocument, least=OPERATE)
AUDIT = Operation("GET", "/api/audit", "Who changed what", views.AuditDocument, asked.PageAsked, least=OPERATE)

IMAGE = Operation("GET", f"{ONE}/image", "The part, upright", PICTURES, asked.ImageAsked, failures=FOUND)
THUMBNAIL = Operation("GET", f"{ONE}/thumbnail", "The part, small", PICTURES, asked.OfResult, failures=FOUND)
FRAME = Operation("GET", f"{ONE}/frame", "The image that shows it", PICTURES, asked.ImageAsked, failures=FOUND)
HEAT = Operation("GET", f"{ONE}/maps/{{step}}", "Anomaly map in colours", PICTURES, asked.MapAsked, failures=FOUND)

TRACE = Operation("GET", "/api/trace", "A trace for Perfetto", ("application/json",), asked.EngineAsked)

REVIEW = Operation(
    "POST", "/api/reviews", "Agree, or not", Review, body=asked.ReviewGiven, status=201, failures=(404, 409),
    least=OPERATE, action="review",
)  # fmt: skip
UNDO = Operation(
    "DELETE", "/api/reviews/{number}", "Undo a review", Review, asked.OfReview, failures=(404, 409),
    least=OPERATE, action="undo review",
)  # fmt: skip
REWORK = Operation(
    "POST", "/api/boards/rework", "Let the next image open a new run", Rework, body=asked.ReworkGiven,
    status=201, failures=FOUND, least=OPERATE, action="rework",
)  # fmt: skip
TRIGGER = Operation(
    "POST", "/api/trigger", "Take a camera's frame", views.TriggeredDocument, body=asked.TriggerGiven,
    failures=(404, 409), least=OPERATE, action="trigger",
)  # fmt: skip
CHECK = Operation(
    "POST", "/api/line/check", "Check a line file", views.CheckedDocument, body=asked.LineText,
    body_bytes=LINE_FILE_BYTES, least=OPERATE,
)  # fmt: skip
RELOAD = Operation("POST", "/api/reload", "Serve the line file anew", ReloadView, least=ADMIN, action="reload")
PROMOTE = Operation(
    "POST", "/api/experts/promote", "Serve an expert's shadow", views.PromotedDocument, body=asked.PromoteGiven,
    failures=FOUND, least=ADMIN, action="promote",
)  # fmt: skip

READS = (RESULTS, RESULT, BOARDS, BOARD, REVIEWS, EXPERTS, EXPERT, ENGINE, TEXTS, EXPLAIN, LINE, AUDIT)
SHOWN = (IMAGE, THUMBNAIL, FRAME, HEAT, TRACE)
CHANGES = (REVIEW, UNDO, REWORK, TRIGGER, CHECK, RELOAD, PROMOTE)
OPERATIONS = (STATE, OPENAPI, *READS, *SHOWN, *CHANGES, *OF_SESSION)
