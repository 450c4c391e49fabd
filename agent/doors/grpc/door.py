"""Interceptor of every call: admission, receiving of messages, error messages.

Guarantees: a refused call gets a status, a reason and our own message, never an exception's text. Bytes of another
message type are INVALID_ARGUMENT. Messages in receipt, or not yet counted by the desk, take at most about
``limits.memory``: each call reserves the bytes of the largest message before it reads, a stream while it is open. Calls
beyond the limit are refused before any of their bytes is received.

Calls at once are bounded by their kind, and each bound is shared (``agent.doors.shares``): a lone caller may hold
all, and is ended with QUEUE_FULL where it is silent longest when others come.

Unary calls are served as streams of one message, which is equal on the wire: so a message is read only into reserved
room.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from agent.doors.access import CALLING, Role, audited, ended, logged
from agent.doors.budget import Budget, Room
from agent.doors.grpc.refusals import REASON, refuse
from agent.doors.refusals import INTERNAL, MISTAKE, OTHERS_CAME
from agent.doors.shares import Shares, peer_of
from agent.faults.errors import OrderRefused, Reason

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from agent.doors.access import Audit
    from agent.line_file.api import ApiLimitsSection

log = logging.getLogger(__name__)

RECEIVE_S = 20.0  # a slower caller would delay others' messages
QUESTIONS = 1000  # concurrent calls without images
CHECKS = 1000  # concurrent health checks: a watch may last forever
QUESTION_RECEIVE_S = 5.0  # for a message without an image
SILENT_S = 5.0  # a message or stream without a word for so long yields to anyone; a watcher has nothing to say
STALL_S = 30.0  # a caller that reads nothing of a stream for so long is cut off
STREAMS = 64  # concurrent streams of images, if memory has room for a message of each
WATCHERS = 64  # concurrent watchers, counted apart from streams
FULL_RETRY_S = 0.1  # retry hint without a better estimate
RECEIVED_AT_LEAST = 5  # messages with guaranteed room; more if `memory` is larger
FIELDS = 1000  # of a message, which has a field per image, output and parameter
QUESTION_BYTES = 2**20  # a parsed message takes many times these bytes; names and numbers need few
FEWER_BYTES = "a smaller limits.message, or a larger limits.memory, has room for more"
ALWAYS_OPEN = ("/grpc.health.", "/grpc.reflection.")
WITH_IMAGES = ("/Inspect", "/ModelInfer")
WATCHING = "/WatchResults"

VARINT, FIXED_64, LENGTH, FIXED_32 = 0, 1, 2, 5  # protobuf's encoding, "Message Structure"
FIXED_BYTES = {FIXED_64: 8, FIXED_32: 4}
VARINT_BYTES = 10  # the longest

Call = Any  # gRPC has no types: a servicer's method, its context and its handlers


@dataclass(frozen=True, slots=True)
class Action:
    """Method that changes something. ``subject``: field of its message, for the audit."""

    name: str
    least: Role
    subject: str = ""


ACTIONS = {
    "Trigger": Action("trigger", Role.OPERATE, "camera"),
    "Reload": Action("reload", Role.ADMIN),
    "RepositoryModelLoad": Action("load model", Role.ADMIN, "model_name"),
    "RepositoryModelUnload": Action("unload model", Role.ADMIN, "model_name"),
}


class _Kind(StrEnum):
    """Kinds of calls, by cost."""

    IMAGE = "image"
    STREAM = "stream"
    WATCHER = "watcher"
    QUESTION = "question"
    CHECK = "health check"  # and reflection; answered also while the agent stops


def received_at_most_bytes(message_bytes: int) -> int:
    """Limit for gRPC, which refuses without a reason; our smaller limit refuses with one."""
    return message_bytes + message_bytes // 16


class Door(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # gRPC has no types
    """Admission of calls, shared by all addresses. For the loop's thread only."""

    def __init__(self, limits: ApiLimitsSection, audit: Audit = logged) -> None:
        self.audit = audit
        self.calls = 0  # calls that must end before the server; without health and reflection
        self.stopping = asyncio.Event()
        self._most_bytes = limits.message
        self._message_bytes = received_at_most_bytes(limits.message)
        messages = max(limits.memory // self._message_bytes, RECEIVED_AT_LEAST)
        self._budget = Budget(messages * self._message_bytes)
        at_most = {
            _Kind.IMAGE: limits.requests,
            _Kind.STREAM: min(messages - 2, STREAMS),  # spares a call's message, and a message without an image
            _Kind.WATCHER: WATCHERS,
            _Kind.QUESTION: QUESTIONS,
            _Kind.CHECK: CHECKS,
        }
        self._shares = {
            kind: Shares(most, math.inf if kind in (_Kind.WATCHER, _Kind.CHECK) else SILENT_S)
            for kind, most in at_most.items()
        }
        self._open: Counter[_Kind] = Counter()
        self._idle = asyncio.Event()
        self._idle.set()

    async def intercept_service(self, continuation: Callable[[Call], Awaitable[Call]], details: Call) -> Call:
        """The guarded method; None for an unknown method, which is UNIMPLEMENTED."""
        handler = await continuation(details)
        if handler is None:
            return None
        guarded = _Guarded(self, handler, details.method)
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(guarded.stream, None, handler.response_serializer)
        return grpc.stream_unary_rpc_method_handler(guarded.unary, None, handler.response_serializer)

    async def wait_until_idle(self, timeout_s: float) -> bool:
        """Wait until no call is under way; False after ``timeout_s``."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        return self._idle.is_set()

    @asynccontextmanager
    async def entered(self, kind: _Kind, peer: str) -> AsyncIterator[Room]:
        """Context that counts a call, and gives the ``Room`` of its messages. Raises OrderRefused beyond the limit, and
        for a call that yields. Calls without an image have bytes that images cannot take."""
        if self.stopping.is_set() and kind is not _Kind.CHECK:
            raise OrderRefused(Reason.STOPPING, "the agent is stopping - try again after its restart")
        yielding = asyncio.timeout(None)

        def end() -> None:
            if not yielding.expired():
                yielding.reschedule(0.0)

        shares, has_image = self._shares[kind], kind in (_Kind.IMAGE, _Kind.STREAM)
        room = Room(self._budget, self._message_bytes, self._message_bytes if has_image else 0, peer, end)
        try:
            async with yielding:
                room.call = shares.take(peer, end)
                if room.call is None:
                    advice = FEWER_BYTES if kind is _Kind.STREAM else "try again later"
                    raise OrderRefused(Reason.QUEUE_FULL, f"{shares.size} {kind}s are open - {advice}", FULL_RETRY_S)
                self._count(kind, 1)
                try:
                    yield room
                finally:
                    room.leave()
                    room.call.leave()
                    self._count(kind, -1)
        except TimeoutError:
            if not yielding.expired():
                raise
            raise OrderRefused(Reason.QUEUE_FULL, OTHERS_CAME, FULL_RETRY_S) from None

    def check_size(self, size_bytes: int) -> None:
        """Raises OrderRefused for a message above the limit."""
        if size_bytes > self._most_bytes:
            raise _too_large(size_bytes, f"{self._most_bytes} are the most (limits.message)")

    def _count(self, kind: _Kind, calls: int) -> None:
        self._open[kind] += calls
        self.calls = self._open.total() - self._open[_Kind.CHECK]
        if self.calls:
            self._idle.clear()
        else:
            self._idle.set()


class _Guarded:
    """Method of one call, behind the door."""

    def __init__(self, door: Door, handler: Call, method: str) -> None:
        self._door = door
        self._method = method
        self._kind = _kind_of(method, handler.request_streaming or handler.response_streaming)
        self._parse = handler.request_deserializer
        self._takes_stream = handler.request_streaming
        self._call = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream

    async def unary(self, _: AsyncIterator[bytes], context: Call) -> Call:
        """The answer; None for a refused call."""
        answer = None
        async with _refusing(context, self._method), self._door.entered(self._kind, _peer(context)) as room:
            action = ACTIONS.get(self._method.rpartition("/")[2])
            if action is None:  # no reference to the message stays here: a waiting image has one copy in memory
                answer = await self._call(await self._given(context, room), room)
            else:
                request = await self._given(context, room)
                subject = getattr(request, action.subject, "")
                with audited(self._door.audit, action.name, lambda: subject, lambda: ended(answer)):
                    answer = await self._call(request, room)
        return answer  # a refused call has none

    async def stream(self, _: AsyncIterator[bytes], context: Call) -> None:
        async with (
            _refusing(context, self._method),
            self._door.entered(self._kind, _peer(context)) as room,
            aclosing(self._call(await self._given(context, room), room)) as answers,
        ):
            async for answer in answers:
                try:
                    async with asyncio.timeout(STALL_S):
                        await context.write(answer)
                        room.touch()
                except TimeoutError:
                    raise OrderRefused(Reason.NOT_NOW, f"nothing was read for {STALL_S:g} s: try again") from None

    async def _given(self, context: Call, room: Room) -> Any:  # noqa: ANN401  # gRPC has no types
        """Argument of a method: its message or messages, without another reference. Raises OrderRefused. A method
        that passes images to the desk leaves the room once they are counted there."""
        is_check, has_image = self._kind is _Kind.CHECK, self._kind is _Kind.IMAGE
        if not (self._takes_stream and is_check):
            await room.enter()
        if self._takes_stream:
            return _Messages(context, self._parse, room, is_check=is_check)
        raw = await _read_within(RECEIVE_S if has_image else QUESTION_RECEIVE_S, context)
        if raw is grpc.aio.EOF:
            raise OrderRefused(Reason.INVALID, "the call ended without a message")
        room.keep(len(raw))
        if room.call is not None and self._kind is not _Kind.WATCHER:
            room.call.keep()  # its message is here: it yields no longer
        if has_image:
            self._door.check_size(len(raw))
        elif len(raw) > QUESTION_BYTES:
            raise _too_large(len(raw), f"{QUESTION_BYTES} are the most of a call without an image")
        message = _parsed(raw, self._parse)
        if not has_image:
            room.leave()
        return message


class _Messages:
    """Messages of a stream. gRPC's iterator, or a generator, would hold the last message until the next one arrives.
    ``room``: for one message at a time of a check; a stream of images has entered it."""

    def __init__(self, context: Call, parse: Callable[[bytes], Any], room: Room, *, is_check: bool) -> None:
        self._context = context
        self._parse = parse
        self._room = room
        self._is_check = is_check

    def __aiter__(self) -> _Messages:
        return self

    async def __anext__(self) -> Any:  # noqa: ANN401  # gRPC has no types
        """Raises OrderRefused."""
        if not self._is_check:
            raw = await self._context.read()
        else:
            await self._room.enter()
            raw = await _read_within(QUESTION_RECEIVE_S, self._context)
            self._room.leave()
        self._room.touch()
        if raw is grpc.aio.EOF:
            raise StopAsyncIteration
        return _parsed(raw, self._parse)


def _peer(context: Call) -> str:
    return peer_of(CALLING.get().name, context.peer())


def _kind_of(method: str, is_stream: bool) -> _Kind:
    if method.startswith(ALWAYS_OPEN):
        return _Kind.CHECK
    if method.endswith(WATCHING):
        return _Kind.WATCHER
    return _Kind.STREAM if is_stream else _Kind.IMAGE if method.endswith(WITH_IMAGES) else _Kind.QUESTION


async def _read_within(timeout_s: float, context: Call) -> Any:  # noqa: ANN401  # gRPC has no types
    """The next message's bytes, or EOF. Raises OrderRefused after the timeout."""
    try:
        async with asyncio.timeout(timeout_s):
            return await context.read()
    except TimeoutError:
        raise OrderRefused(Reason.INVALID, f"the message has not come within {timeout_s:g} s") from None


def _parsed(raw: bytes, parse: Callable[[bytes], Any]) -> Any:  # noqa: ANN401  # gRPC has no types
    """Parse a message. Raises OrderRefused for bytes of another type, and for too many fields."""
    if has_more_fields(raw, FIELDS):
        raise OrderRefused(Reason.INVALID, f"a message of more than {FIELDS} fields: send several")
    try:
        return parse(raw)
    except DecodeError:
        raise OrderRefused(Reason.INVALID, "the bytes are no message of this method's type") from None


def has_more_fields(message: bytes, most: int) -> bool:
    """True for more fields than the limit; an embedded message counts as one, and contents are not read.

    Parsing makes an object of each embedded message, fifty times the two bytes of an empty one on the wire: a message
    within the limit of bytes could take gigabytes. The parser refuses cut or otherwise invalid messages.
    """
    position = 0
    for _ in range(most):
        if position >= len(message):
            return False
        tag, position = _varint(message, position)
        kind = tag & 7
        if kind == VARINT:
            _, position = _varint(message, position)
        elif kind == LENGTH:
            size_bytes, position = _varint(message, position)
            position += size_bytes
        else:
            position += FIXED_BYTES.get(kind, 0)
    return position < len(message)


def _varint(message: bytes, position: int) -> tuple[int, int]:
    """Number at a position, and its end; the end of the message for a cut or endless number."""
    number = 0
    for place, byte in enumerate(message[position : position + VARINT_BYTES]):
        number |= (byte & 0x7F) << 7 * place
        position += 1
        if byte < 0x80:
            break
    return number, position


def _too_large(size_bytes: int, most: str) -> OrderRefused:
    return OrderRefused(Reason.MESSAGE_TOO_LARGE, f"a message of {size_bytes} bytes, where {most}")


@asynccontextmanager
async def _refusing(context: Call, method: str) -> AsyncIterator[None]:
    """End the call with our own message after any error.

    ``context.abort`` would not do: gRPC keeps its exception with the call. The exception holds the call's frames and
    images in a cycle that only the garbage collector frees, long after memory has run out.
    """
    try:
        yield
    except OrderRefused as refused:
        refuse(context, refused)
    except Exception:
        log.exception("api_failed method=%s", method)
        context.set_trailing_metadata(((REASON, INTERNAL),))
        context.set_code(grpc.StatusCode.INTERNAL)
        context.set_details(MISTAKE)
