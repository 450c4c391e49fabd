"""Parameters and bodies of requests to `/api`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from agent.doors.http.operations import WHOLE, Asked, Limit, Moment, Seq, Short, Yes

Machine = Literal["OK", "NG", "UNKNOWN"]
Found = Literal["agree", "false_call", "missed_defect", "decided"]


class PageAsked(Asked):
    """``before``: number of the last row of the page before."""

    before: Seq | None = None
    limit: Limit = 50


class Period(PageAsked):
    """From ``since``, before ``until``."""

    since: Moment | None = None
    until: Moment | None = None


class ResultsAsked(Period):
    """Filters of stored results."""

    verdict: Machine | None = None
    component: Short | None = None
    expert: Short | None = None
    label: Short | None = None
    board: Short | None = None
    source: Short | None = Field(None, description="camera, api, or the path of a folder")
    reviewed: Yes | None = None
    finding: Found | None = None


class OfResult(Asked):
    seq: Seq


class ImageAsked(OfResult):
    width: Annotated[int, Field(ge=16, le=8192), WHOLE] | None = Field(None, description="pixels, at most")


class MapAsked(OfResult):
    step: Annotated[int, Field(ge=0, le=1000), WHOLE] = Field(description="step of the route, from 0")


class BoardsAsked(Period):
    serial: Short | None = None
    verdict: Machine | None = None
    board_type: Short | None = None


class OfNumber(Asked):
    number: Seq


class ReworkGiven(Asked):
    """The run of a board is over: its next image opens a new one."""

    serial: Short
    board_type: Short
    reason: Annotated[str, Field(max_length=2000)] | None = None


class ReviewsAsked(Period):
    who: Short | None = None
    expert: Short | None = None


class OfReview(OfNumber):
    file: Short | None = Field(None, description="of the result; required once the line's results file was replaced")


class ReviewGiven(Asked):
    """A person's verdict on a result. ``file``: the result's, as numbers begin again in another results file; required
    once the line's file was replaced."""

    result: Annotated[int, Field(ge=1, le=10**18 - 1)]
    verdict: Literal["OK", "NG"]
    file: Short | None = None
    label: Short | None = None
    reason: Annotated[str, Field(max_length=2000)] | None = None


class OfExpert(Asked):
    id: Short


class PromoteGiven(Asked):
    expert: Short
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] = Field(
        description="of the weights that shall serve, as in /api/experts: the expert's or its shadow's"
    )


class EngineAsked(Asked):
    last: Annotated[int, Field(ge=1, le=600), WHOLE] = Field(60, description="seconds")


class ExplainAsked(Asked):
    subject: Annotated[str, Field(min_length=1, max_length=1000)] = Field(
        description="key or number of a result, expert or component"
    )


class LineText(Asked):
    text: str


class TriggerGiven(Asked):
    camera: Short
    board: Short | None = None
    board_type: Short | None = None
    key: Short | None = None
