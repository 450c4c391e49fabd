"""Door of HTTP: who calls, from where, and which section answers.

Guarantees: a section sees a request only from a caller with a role (``agent.doors.access``). Beyond this machine each
caller sends a token, except to routes that are open. A page of another site reads, changes and costs nothing: its
Origin and its Sec-Fetch-Site are refused, and so is a name of the host that is not this machine's, of a caller without
a token. Requests under way are bounded for each address and section. An error of an answer is 500 and in the log, and
costs no other request.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, cookie_parser
from starlette.routing import Match

from agent.doors.access import CALLING, NOBODY, Where
from agent.doors.budget import Budget
from agent.doors.http.protocol import CONNECTION
from agent.doors.http.proxies import Proxies
from agent.doors.http.routes import AUDIT, BODIES, PLACE, SPARED_BYTES, Endpoint, json_refusal
from agent.doors.http.session import COOKIE, session_routes
from agent.doors.refusals import MISTAKE
from agent.doors.shares import Shares, peer_of
from agent.faults.errors import OrderRefused
from agent.line_file.api import is_loopback_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from starlette.responses import Response
    from starlette.routing import Route
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from agent.doors.access import Audit, Caller, Tokens
    from agent.doors.http.protocol import BoundedProtocol
    from agent.line_file.api import ApiSection

log = logging.getLogger(__name__)

PEER = "coserve.peer"  # key of a scope
SILENT_S = 2.0  # a request whose caller is waited for so long yields to anyone
PIECE_BYTES = 64 * 1024  # of an answer
BODIES_SHARE = 4  # bodies in receipt have a quarter of the bytes that received images may have, ``limits.memory``
LARGEST_BODIES = 4  # bodies of the largest size that any route takes: they have room in any case
SAFE = ("GET", "HEAD")
OWN_PAGES = "use the pages of this address, or open it by itself; behind a proxy, see api.public_origin"
SERVED = (
    "images are judged by POST /v2/models/NAME/infer, POST /v2/repository/index lists their models, texts are at /v1, "
    "pages at /, and /api/openapi.json tells what else programs may ask"
)
KSERVE_V1 = (":predict", ":explain")  # behind paths of models, which /v1 has for texts
TOO_MANY = "requests are under way - try again later"


@dataclass(frozen=True, slots=True, eq=False)
class DoorSection:
    """Routes below some paths, ``roots``. ``refusal``: answer with status and reason to a request that no route sees.
    ``requests``: bound of those under way at each address, shared by its callers. ``stall_s``: wait for a caller that
    takes nothing of its answer; None: the protocol's STALL_S. ``stop``: called when the door stops."""

    roots: tuple[str, ...]
    routes: Sequence[Route]
    refusal: Callable[[int, str], Response] = json_refusal
    requests: int = 32
    stall_s: float | None = None
    stop: Callable[[], None] = lambda: None


class WebDoor:
    """ASGI application, for the server's loop. The first section with a root of the path answers, else the last one."""

    def __init__(self, sections: Sequence[DoorSection], tokens: Tokens, audit: Audit, api: ApiSection) -> None:
        self._sections = (DoorSection(("/api/session",), session_routes(tokens)), *sections)
        self._tokens = tokens
        self._audit = audit
        self._proxies = Proxies(api)
        largest_bytes = max((_endpoint(each).rule.body_bytes for each in self.routes()), default=0)
        size_bytes = max(api.limits.memory // BODIES_SHARE, LARGEST_BODIES * largest_bytes + SPARED_BYTES)
        self._bodies = Budget(size_bytes, SILENT_S)
        self._under_way: dict[tuple[str, DoorSection], Shares] = {}

    def routes(self) -> Iterator[Route]:
        return (route for section in self._sections for route in section.routes)

    def stop(self) -> None:
        for section in self._sections:
            section.stop()

    def section_of(self, path: str) -> DoorSection:
        return next((section for section in self._sections if path.startswith(section.roots)), self._sections[-1])

    def refusal(self, path: str, status: int, reason: str) -> Response:
        """Implements ``agent.doors.http.protocol.RefusingApp``."""
        return self.section_of(path).refusal(status, reason)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection: BoundedProtocol = scope["state"][CONNECTION]
        path: str = scope["path"]
        section = self.section_of(path)
        if section.stall_s is not None:
            connection.stall_s = section.stall_s
        scope.update({AUDIT: self._audit, BODIES: self._bodies})
        place = None
        try:
            answer = self._answering(section, scope, connection)
            if isinstance(answer, Endpoint):
                bound = Shares(section.requests, SILENT_S)
                shares = self._under_way.setdefault((connection.listener.address, section), bound)
                place = scope[PLACE] = connection.place = shares.take(scope[PEER])
                if place is None:
                    answer = section.refusal(503, f"{section.requests} {TOO_MANY}")
            await answer(scope, receive, partial(_in_pieces, send))
            await connection.flow.drain()  # its bytes are held until they are sent
        except ClientDisconnect:
            pass
        except asyncio.CancelledError:
            if not connection.transport.is_closing():  # else the server stops
                raise
        except Exception:  # the boundary of one request
            log.exception("web_failed path=%s", path)
            if not connection.cycle.response_started:
                await section.refusal(500, MISTAKE)(scope, receive, send)
            else:
                connection.transport.abort()
        finally:
            connection.place = None
            if place is not None:
                place.leave()

    def _answering(self, section: DoorSection, scope: Scope, connection: BoundedProtocol) -> ASGIApp:
        headers = Headers(scope=scope)
        seen = self._proxies.seen(connection, headers)
        scope["scheme"], host = seen.scheme, headers.get("host")
        endpoint, allowed = _found(section.routes, scope)
        is_open = endpoint is not None and endpoint.rule.is_open
        if not (is_open and scope["method"] in SAFE) and (site := _another_site(headers, seen.origins)):
            return section.refusal(403, f"{site} must not do this - {OWN_PAGES}")
        try:
            caller = self._caller(headers, seen.where)
        except OrderRefused as refused:
            if not is_open:
                return section.refusal(401, str(refused))
            caller = NOBODY
        if seen.where is Where.LOOPBACK and caller is NOBODY and not (host is None or _is_own_name(host)):
            reason = f"{host[:100]!r} is not a name of this machine - use localhost or a loopback address"
            return section.refusal(421, f"{reason}; of a proxy, see api.trusted_proxy")  # a page whose name leads here
        if endpoint is not None:
            CALLING.set(caller)
            scope[PEER] = peer_of(caller.name, seen.machine)
            return endpoint
        if not allowed or scope["path"].endswith(KSERVE_V1):
            return section.refusal(404, f"nothing is served at {scope['path'][:200]!r} - {SERVED}")
        refusal = section.refusal(405, f"{scope['method'][:20]} is not answered here - send {allowed}")
        refusal.headers["allow"] = allowed
        return refusal

    def _caller(self, headers: Headers, where: Where) -> Caller:
        """Raises OrderRefused for a missing or unknown token."""
        authorization = headers.get("authorization", "")
        if not authorization and where is not Where.OWNER:
            session = cookie_parser(headers.get("cookie", "")).get(COOKIE, "")
            if caller := self._tokens.of_session(session):
                return caller
        return self._tokens.caller(authorization, where, is_required=where is Where.FAR)


async def _in_pieces(send: Send, message: Message) -> None:
    """Send a large body piece by piece: TLS takes a whole body at once, and does not tell that the caller is slow."""
    body = message.get("body", b"")
    while len(body) > PIECE_BYTES:
        await send({"type": message["type"], "body": body[:PIECE_BYTES], "more_body": True})
        body = memoryview(body)[PIECE_BYTES:]
    await send({**message, "body": body} if body else message)


def _another_site(headers: Headers, origins: Sequence[str]) -> str | None:
    """The page of another site that a browser asks for, also for its pictures and links; programs send none of these
    headers."""
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    if origin is not None and origin not in origins:
        return f"a page of {origin[:100]!r}"
    return None if site in (None, "none", "same-origin") else f"a page of another address ({site[:20]})"


def _found(routes: Sequence[Route], scope: Scope) -> tuple[Endpoint | None, str]:
    """The route's endpoint; or the methods that the path has."""
    allowed = set[str]()
    for route in routes:
        match, more = route.matches(scope)
        if match is Match.FULL:
            scope.update(more)
            return _endpoint(route), ""
        if match is Match.PARTIAL:
            allowed |= route.methods or set()
    return None, ", ".join(sorted(allowed))


def _endpoint(route: Route) -> Endpoint:
    return cast("Endpoint", route.endpoint)


def _is_own_name(host: str) -> bool:
    name, _, port = host.rpartition(":")
    return is_loopback_name((name if port.isdigit() else host).lower())
