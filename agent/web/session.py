"""Session of a browser at `/api/session`: a cookie in place of a token, which scripts cannot read.

Guarantees: the cookie is derived from the token, so that a session survives restarts and ends with its token.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from starlette.responses import JSONResponse, Response

from agent.web.routes import Call, Rule, json_refused, route
from experts.errors import OrderRefused, Refusing

if TYPE_CHECKING:
    from starlette.routing import Route

    from agent.api.access import Caller, Tokens

COOKIE, PATH = "coserve", "/api/session"
BODY_BYTES = 4096


def session_routes(tokens: Tokens) -> list[Route]:
    async def opened(call: Call) -> Response:
        caller = tokens.of_secret(_token(call.body))
        if caller is None:
            raise OrderRefused(Refusing.UNAUTHENTICATED, "this is no token of the line file", field="token")
        response = _told(caller)
        is_secure = call.request.url.scheme == "https"
        response.set_cookie(COOKIE, tokens.session(caller), httponly=True, secure=is_secure, samesite="strict")
        return response

    async def told(call: Call) -> Response:
        return _told(call.caller)

    async def closed(call: Call) -> Response:
        response = Response(status_code=204)
        response.delete_cookie(COOKIE, httponly=True, samesite="strict")
        return response

    return [
        route("GET", PATH, told, Rule(json_refused)),
        route("POST", PATH, opened, Rule(json_refused, body_bytes=BODY_BYTES, is_open=True)),
        route("DELETE", PATH, closed, Rule(json_refused, is_open=True)),
    ]


def _told(caller: Caller) -> Response:
    return JSONResponse({"name": caller.name, "role": caller.role.name.lower()}, headers={"cache-control": "no-store"})


def _token(body: bytes) -> str:
    try:
        sent = json.loads(body)
    except (ValueError, RecursionError):
        sent = None
    token = sent.get("token") if isinstance(sent, dict) else None
    if not isinstance(token, str) or not token:
        raise OrderRefused(Refusing.INVALID, 'token: send JSON, {"token": "..."}', field="token")
    return token
