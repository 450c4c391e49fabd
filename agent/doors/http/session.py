"""Session of a browser at `/api/session`: a cookie in place of a token, which scripts cannot read.

Guarantees: the cookie is derived from the token, so that a session survives restarts and ends with its token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import Field
from starlette.responses import JSONResponse, Response

from agent.doors.http.operations import NO_STORE, Asked, Operation, body_of_json, route_of
from agent.faults.errors import OrderRefused, Reason

if TYPE_CHECKING:
    from starlette.routing import Route

    from agent.doors.access import Caller, Tokens
    from agent.doors.http.routes import Call

COOKIE, PATH = "coserve", "/api/session"


class SessionGiven(Asked):
    token: Annotated[str, Field(min_length=1)]


@dataclass(frozen=True, slots=True)
class SessionDocument:
    name: str
    role: str


WHO = Operation("GET", PATH, "Who calls", SessionDocument)
OPENED = Operation("POST", PATH, "Sign in", SessionDocument, body=SessionGiven, body_bytes=4096)
CLOSED = Operation("DELETE", PATH, "Sign out", (), status=204)
OPERATIONS = (WHO, OPENED, CLOSED)


def session_routes(tokens: Tokens) -> list[Route]:
    async def opened(call: Call) -> Response:
        caller = tokens.of_secret(body_of_json(SessionGiven, call.request, call.body).token)
        if caller is None:
            raise OrderRefused(Reason.UNAUTHENTICATED, "this is no token of the line file", field="token")
        response = _caller_document(caller)
        is_secure = call.request.url.scheme == "https"
        response.set_cookie(COOKIE, tokens.session(caller), httponly=True, secure=is_secure, samesite="strict")
        return response

    async def who(call: Call) -> Response:
        return _caller_document(call.caller)

    async def closed(call: Call) -> Response:
        response = Response(status_code=204)
        response.delete_cookie(COOKIE, httponly=True, samesite="strict")
        return response

    return [route_of(WHO, who), route_of(OPENED, opened, is_open=True), route_of(CLOSED, closed, is_open=True)]


def _caller_document(caller: Caller) -> Response:
    return JSONResponse({"name": caller.name, "role": caller.role.name.lower()}, headers=NO_STORE)
