"""Routes of the HTTP door: method, path, least role, largest body, and the audit of calls that change something.

Guarantees: an answer runs only for a caller whose role allows it, with its whole body. A call that changes something is
audited, refused or done. A refusal is answered in the format of the route's protocol.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.routing import Route

from agent.api.access import Role
from experts.errors import OrderRefused, Refusing

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request
    from starlette.responses import Response

    from agent.api.access import Audit, Caller

CALLER, AUDIT = "coserve.caller", "coserve.audit"  # keys of a scope, set by the door
STATUS = {
    Refusing.QUEUE_FULL: 429,
    Refusing.MESSAGE_TOO_LARGE: 413,
    Refusing.TOO_LARGE: 413,
    Refusing.NOT_FOUND: 404,
    Refusing.INVALID: 400,
    Refusing.KEY_REUSED: 409,
    Refusing.CURSOR_UNKNOWN: 409,
    Refusing.NOT_NOW: 503,
    Refusing.STOPPING: 503,
    Refusing.UNAUTHENTICATED: 401,
    Refusing.FORBIDDEN: 403,
}


@dataclass(slots=True)
class Call:
    """Request of a caller, with its whole body. ``about``: what it changes, set by the answer, for the audit."""

    request: Request
    caller: Caller
    body: bytes
    about: str = ""


@dataclass(frozen=True, slots=True)
class Rule:
    """``least``: role of the caller. ``action``: name in the audit, of a call that changes something; else None.
    ``refused``: answer of a refusal, in the protocol's format."""

    refused: Callable[[OrderRefused], Response]
    least: Role = Role.READ
    action: str | None = None
    body_bytes: int = 0


def route(method: str, path: str, answer: Callable[[Call], Awaitable[Response]], rule: Rule) -> Route:
    assert (rule.action is not None) == (rule.least >= Role.OPERATE), path

    async def endpoint(request: Request) -> Response:
        caller: Caller = request.scope[CALLER]
        call = Call(request, caller, b"")
        outcome = "done"
        try:
            caller.check(rule.least)
            call.body = await body_of(request, rule.body_bytes)
            return await answer(call)
        except OrderRefused as refused:
            outcome = f"{refused.reason}: {refused}"
            return rule.refused(refused)
        except Exception as error:
            outcome = f"failed: {type(error).__name__}"
            raise
        finally:
            audit: Audit = request.scope[AUDIT]
            if rule.action is not None and caller.role >= rule.least:
                audit(caller, rule.action, call.about, outcome)

    endpoint.rule = rule  # type: ignore[attr-defined]  # for tests that try each route, and for the OpenAPI document
    return Route(path, endpoint, methods=[method])


async def body_of(request: Request, most_bytes: int) -> bytes:
    """Raises OrderRefused for a larger body."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > most_bytes:
            raise OrderRefused(
                Refusing.MESSAGE_TOO_LARGE, f"a body of more than {most_bytes} bytes, which are the most"
            )
    return bytes(body)
