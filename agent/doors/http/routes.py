"""Routes of the HTTP door: method, path, least role, largest body, and the audit of calls that change something.

Guarantees: an answer runs only for a caller whose role allows it, with its whole body, which came within BODY_S. Bodies
of all callers together are bounded. A call that changes something is audited, refused or done, and runs to its end; any
other answer is cancelled once its caller has left. A refusal is answered in the format of the route's protocol.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agent.doors.access import CALLING, Role, audited
from agent.doors.budget import Room
from agent.doors.refusals import INTERNAL, OTHERS_CAME, STATUSES
from agent.faults.errors import OrderRefused, Reason

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence

    from starlette.datastructures import Headers
    from starlette.types import Receive, Scope, Send

    from agent.doors.access import Caller

AUDIT, BODIES, PLACE = "coserve.audit", "coserve.bodies", "coserve.place"  # keys of a scope, set by the door
HEARD_BYTES = 4096  # of a body; who sends fewer is silent for longer
BODY_S = 20.0  # as for a message over gRPC
SMALL_BYTES = 64 * 1024
SPARED_BYTES = 2**20  # of the room for bodies, which larger ones leave to small ones
JSON, JSON_WANTED = "application/json", "the body is wanted as JSON - send content-type: application/json"
NO_ROOM = "bodies of other callers take all room - try again later"
STATUS = {reason: status for reason, (status, _) in STATUSES.items()}


@dataclass(slots=True)
class Call:
    """Request of a caller, with its whole body. ``about``, ``outcome``: for the audit, what it changes and how it
    ended, set by the answer.
    ``room``: holds the body's bytes; an answer that waits leaves it once the body is counted elsewhere."""

    request: Request
    caller: Caller
    body: bytes
    room: Room
    about: str = ""
    outcome: str = "done"


@dataclass(frozen=True, slots=True)
class RouteRule:
    """``least``: role of the caller. ``action``: name in the audit, of a call that changes something; else None.
    ``refused``: answer of a refusal, in the protocol's format. ``is_open``: answered without a token everywhere."""

    refused: Callable[[OrderRefused], Response]
    least: Role = Role.READ
    action: str | None = None
    body_bytes: int = 0  # no body is read
    is_open: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Endpoint:
    """ASGI application of a route; ``rule`` is there for the door, for tests and for the OpenAPI document."""

    answer: Callable[[Call], Awaitable[Response]]
    rule: RouteRule

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        rule, request = self.rule, Request(scope, receive)
        size_bytes = _expected_bytes(request, rule.body_bytes)
        room = Room(scope[BODIES], size_bytes, SPARED_BYTES if size_bytes > SMALL_BYTES else 0, scope[PLACE].peer)
        room.call = scope[PLACE]
        call = Call(request, CALLING.get(), b"", room)
        try:
            call.caller.check(rule.least)
            if rule.action is not None:
                with audited(scope[AUDIT], rule.action, lambda: call.about, lambda: call.outcome):
                    call.body = await body_of(request, rule.body_bytes, room)
                    response = await self.answer(call)
                await response(scope, receive, send)
            else:
                call.body = await body_of(request, rule.body_bytes, room)
                await _while_there(receive, self._sent(call, send))
        except OrderRefused as refused:
            await rule.refused(refused)(scope, receive, send)
        finally:
            room.leave()

    async def _sent(self, call: Call, send: Send) -> None:
        response = await self.answer(call)
        await response(call.request.scope, call.request.receive, send)


class Pieces(Response):
    """Answer in pieces, each sent before the next is asked for. ``leaving`` ends with the answer, begun or not."""

    def __init__(
        self, pieces: AsyncGenerator[bytes, None], headers: Mapping[str, str], leaving: AsyncExitStack
    ) -> None:
        self._pieces = pieces
        self._leaving = leaving
        self.status_code, self.background = 200, None
        self.init_headers(headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._leaving, aclosing(self._pieces) as pieces:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for piece in pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                await asyncio.sleep(0)  # uvicorn sends nothing to a caller that left, and does not say so: be cancelled
            await send({"type": "http.response.body", "body": b""})


def route(method: str, path: str, answer: Callable[[Call], Awaitable[Response]], rule: RouteRule) -> Route:
    assert rule.action is None or rule.least >= Role.OPERATE, path
    return Route(path, Endpoint(answer, rule), methods=[method])


async def body_of(request: Request, most_bytes: int, room: Room) -> bytes:
    """The whole body, in its room. Raises OrderRefused for one that is too large, comes too slowly, or yields."""
    if not most_bytes:
        return b""
    if _announced_bytes(request) > most_bytes:
        raise _too_large(most_bytes)
    late, refused = asyncio.timeout(BODY_S), OrderRefused(Reason.QUEUE_FULL, NO_ROOM, 1.0)
    slow = OrderRefused(Reason.INVALID, f"the body has not come within {BODY_S:g} s")
    yielded = OrderRefused(Reason.QUEUE_FULL, OTHERS_CAME, 1.0)

    def end() -> None:
        nonlocal refused
        refused = yielded
        if not late.expired():
            late.reschedule(0.0)

    room.end, body = end, bytearray()
    try:
        async with late:
            if room.call is not None:
                room.call.offer(end)
            await room.enter()
            if refused is not yielded:
                refused = slow
                late.reschedule(asyncio.get_running_loop().time() + BODY_S)
            body = await _whole(request, most_bytes, room)
    except TimeoutError:
        raise refused from None
    finally:
        room.keep(len(body))
        if room.call is not None:
            room.call.keep()
    return bytes(body)


async def _whole(request: Request, most_bytes: int, room: Room) -> bytearray:
    body, heard_bytes = bytearray(), 0
    async for piece in request.stream():
        body += piece
        if len(body) > most_bytes:
            raise _too_large(most_bytes)
        if len(body) - heard_bytes >= HEARD_BYTES:
            heard_bytes = len(body)
            room.touch()
    return body


def retry_after(refused: OrderRefused) -> dict[str, str]:
    return {} if refused.retry_s is None else {"retry-after": str(max(math.ceil(refused.retry_s), 1))}


def media_type(headers: Headers) -> str:
    """Content type of a body, without its parameters."""
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def json_refused(refused: OrderRefused) -> Response:
    error = {"reason": str(refused.reason), "message": str(refused), "field": refused.field}
    return JSONResponse({"error": error}, STATUS[refused.reason], retry_after(refused))


def json_refusal(status: int, message: str) -> Response:
    """Answer to a request that no route has seen; its reason is the nearest of ``Reason``."""
    reason = next((reason for reason, known in STATUS.items() if known == status), None)
    error = {"reason": INTERNAL if status == 500 else str(reason or "INVALID"), "message": message, "field": None}
    return JSONResponse({"error": error}, status)


async def _while_there(receive: Receive, answer: Coroutine[None, None, None]) -> None:
    """Answer, unless the caller leaves before the end; then the answer is cancelled."""
    answering = asyncio.create_task(answer)
    leaving = asyncio.create_task(_left(receive))
    ended: Sequence[BaseException | None] = ()
    try:
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (answering, leaving):
                task.cancel()
            ended = await asyncio.gather(answering, leaving, return_exceptions=True)
        if isinstance(ended[0], Exception):
            raise ended[0]
    finally:
        del answering, leaving, ended  # else an error would hold the body in a cycle with its frames


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


def _announced_bytes(request: Request) -> int:
    return int(request.headers.get("content-length", 0))


def _expected_bytes(request: Request, most_bytes: int) -> int:
    return most_bytes if "transfer-encoding" in request.headers else min(_announced_bytes(request), most_bytes)


def _too_large(most_bytes: int) -> OrderRefused:
    return OrderRefused(Reason.MESSAGE_TOO_LARGE, f"a body of more than {most_bytes} bytes, which are the most")
