"""Operations of the HTTP door: what a route is asked and answers, checked by one model, told to the OpenAPI document.

Guarantees: parameters and bodies are checked whole and strictly before anything is done: an unknown or repeated one, or
one of another type, is refused by name. A refusal says reason, message and field.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema
from starlette.responses import Response

from agent.doors.access import Role
from agent.doors.http.routes import JSON, JSON_WANTED, RouteRule, json_refused, media_type, route
from agent.faults.errors import OrderRefused, Reason

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from starlette.requests import Request
    from starlette.routing import Route

    from agent.doors.http.routes import Call

WHOLE_NUMBER = re.compile(r"-?[0-9]{1,18}")
MOMENT = r"^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}(\.\d{1,6})?(Z|[+-]\d{2}:\d{2})$"
PAGE = 200  # the longest
NO_STORE = {"cache-control": "no-store"}


class Asked(BaseModel):
    """Parameters of a path and a query, or a body of JSON; here none."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def _number(given: object) -> object:
    """Accept ASCII digits only: Python's ``int`` takes underlines, spaces and digits of any script."""
    if isinstance(given, str):
        if WHOLE_NUMBER.fullmatch(given) is None:
            raise ValueError("is no whole number")
        return int(given)
    return given


def _page(given: object) -> object:
    number = _number(given)
    if isinstance(number, int) and number > PAGE:
        raise ValueError(f"a page has {PAGE} at most - ask for the next one with before=, which is the answer's `next`")
    return number


def _moment(given: object) -> object:
    if isinstance(given, str):
        if re.fullmatch(MOMENT, given) is None:
            is_plus = re.fullmatch(MOMENT, given.replace(" ", "+")) is not None
            why = "has its + as a space: write %2B" if is_plus else "is no time with its offset"
            raise ValueError(f"{given[:40]!r} {why}, as 2026-05-01T06:00:00%2B02:00, or 2026-05-01T04:00:00Z")
        try:
            return datetime.fromisoformat(given).astimezone(UTC)
        except OverflowError:
            raise ValueError("is outside of the calendar") from None
    return given


def _yes(given: object) -> object:
    return {"true": True, "false": False}.get(given, given) if isinstance(given, str) else given


WHOLE = BeforeValidator(_number)
Moment = Annotated[
    datetime, BeforeValidator(_moment), WithJsonSchema({"type": "string", "format": "date-time", "pattern": MOMENT})
]
Yes = Annotated[bool, BeforeValidator(_yes)]
Short = Annotated[str, Field(min_length=1, max_length=200)]
Seq = Annotated[int, Field(ge=1, le=10**18 - 1), WHOLE]
Limit = Annotated[int, Field(ge=1, le=PAGE), BeforeValidator(_page)]

Kind = TypeVar("Kind", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Operation:
    """``answer``: type of its JSON, or the media types of something else. ``asked``: path and query; ``body``: JSON.
    ``body_bytes``, ``least``, ``action``: as in RouteRule; ``failures``: beside those that every call may get.
    ``empty``: a status without a body. ``error``: type of a refusal's JSON, if it is not an ErrorDocument. ``media``:
    other media types that it may answer with."""

    method: str
    path: str
    summary: str
    answer: Any
    asked: type[Asked] = Asked
    body: type[BaseModel] | None = None
    body_bytes: int = 64 * 1024
    status: int = 200
    failures: tuple[int, ...] = ()
    least: Role = Role.READ
    action: str | None = None
    empty: int | None = None
    error: Any = None
    media: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Refusal:
    reason: str
    message: str
    field: str | None


@dataclass(frozen=True, slots=True)
class ErrorDocument:
    error: Refusal


def route_of(operation: Operation, answer: Callable[[Call], Awaitable[Response]], *, is_open: bool = False) -> Route:
    largest = 0 if operation.body is None else operation.body_bytes
    rule = RouteRule(json_refused, operation.least, operation.action, largest, is_open)
    return route(operation.method, operation.path, answer, rule)


def json_answer(content: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(content, status, NO_STORE if headers is None else headers, JSON)


def asked_of(model: type[Kind], request: Request) -> Kind:
    """Parameters of a request. Raises OrderRefused, with the field."""
    pairs = request.query_params.multi_items()
    repeated = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if repeated:
        raise OrderRefused(Reason.INVALID, f"{repeated[0]} is given more than once", field=repeated[0])
    try:
        return model.model_validate({**request.path_params, **dict(pairs)})
    except ValidationError as error:
        raise _invalid(error, model) from None


def body_of_json(model: type[Kind], request: Request, body: bytes) -> Kind:
    """Body of a request. Raises OrderRefused. A form of another site cannot send this content type."""
    if media_type(request.headers) != JSON:
        raise OrderRefused(Reason.INVALID, JSON_WANTED, field="content-type")
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise _invalid(error, model) from None


def _invalid(error: ValidationError, model: type[BaseModel]) -> OrderRefused:
    first = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in first["loc"]) or "body"
    if first["type"] == "extra_forbidden":
        message = f"{field} is not known here - there are {_names(tuple(model.model_fields))}"
    elif first["type"] == "missing":
        message = f"{field} is missing"
    else:
        message = f"{field}: {first['msg'].removeprefix('Value error, ')}"
    return OrderRefused(Reason.INVALID, message, field=field)


def _names(names: Sequence[str]) -> str:
    return ", ".join(names) if names else "no parameters"
