"""What every call passes on its way in and out: admission, the receiving of its message, and the words of its failure.

Guarantees: a call that is refused is told so with a status, a reason and words of ours, never with an exception's text;
a message that is none of its type is INVALID_ARGUMENT; images of calls that are being received, or wait for the desk to
count them, take about as many bytes as images that are under way may, since no more calls are read from at a time (the
others wait in the network's buffers), and each stream has one message more at most; calls beyond the limit are refused
before anything of them is received.

Unary calls are served as streams of one message, for on the wire they are the same: so a message is read when there is
room for it, and not by gRPC before anybody was asked.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from contextlib import aclosing, asynccontextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from agent.api.calls.fields import has_more_fields
from agent.api.calls.refusals import INTERNAL, MISTAKE, REASON, refuse
from experts.errors import OrderRefused, Refusing

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from agent.line_file.api import ApiLimitsSection

log = logging.getLogger(__name__)

RECEIVE_S = 20.0  # a caller that takes longer over one message keeps others from being heard
QUESTIONS = 1000  # calls without images that may be open at a time
CHECKS = 1000  # of health that may be open at a time, for they may be watched without end
STALL_S = 30.0  # a caller that takes nothing of a text for so long holds its place for nobody
STREAMS = 64  # open at a time; each holds one message at most that is not counted yet
FULL_RETRY_S = 0.1  # when to try again, where nothing better is known
# gRPC refuses larger messages by itself, without a reason; what lies between is refused here, with one.
RECEIVED_AT_MOST = 2  # x the limit
IMAGES_RECEIVED = 4  # at a time, and more where `memory` is more than so many messages
QUESTIONS_RECEIVED = 16  # at a time: they are small, and do not wait behind images
FIELDS = 1000  # of a message: one has a field for each of its images, outputs and parameters
QUESTION_BYTES = 2**20  # a message takes many times its bytes once it is parsed; names and numbers need few
ALWAYS_OPEN = ("/grpc.health.", "/grpc.reflection.")
WITH_IMAGES = ("/Inspect", "/ModelInfer")
TEXTS = "/coserve.v1.Texts/"

Call = Any  # gRPC has no types: a servicer's method, its context and its handlers


class _Kind(StrEnum):
    """Calls by what they cost."""

    IMAGE = "image"
    TEXT = "text"
    STREAM = "stream"
    QUESTION = "question"
    CHECK = "health check"  # and reflection: also while the agent stops


OPEN_AT_MOST = {_Kind.STREAM: STREAMS, _Kind.QUESTION: QUESTIONS, _Kind.CHECK: CHECKS}


class Room:
    """One of the few places for messages that are being received, or are not counted by the desk yet."""

    def __init__(self, places: asyncio.Semaphore) -> None:
        self._places = places
        self._is_held = False

    async def enter(self) -> None:
        """Once there is one."""
        await self._places.acquire()
        self._is_held = True

    def leave(self) -> None:
        """The next one may have it; more than once is as good."""
        if self._is_held:
            self._is_held = False
            self._places.release()


class Door(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # gRPC has no types
    """One for all addresses. Of the loop's thread alone."""

    def __init__(self, limits: ApiLimitsSection, stall_s: float = STALL_S) -> None:
        self.stall_s = stall_s
        self.calls = 0  # that must end before the server may; health and reflection not counted
        self.stopping = asyncio.Event()
        self._limits = limits
        self._image_places = asyncio.Semaphore(max(limits.memory // limits.message, IMAGES_RECEIVED))
        self._question_places = asyncio.Semaphore(QUESTIONS_RECEIVED)
        self._open: Counter[_Kind] = Counter()
        self._idle = asyncio.Event()
        self._idle.set()

    async def intercept_service(self, continuation: Callable[[Call], Awaitable[Call]], details: Call) -> Call:
        """The method that was asked for, guarded; None, which is UNIMPLEMENTED, if there is none."""
        handler = await continuation(details)
        if handler is None:
            return None
        guarded = _Guarded(self, handler, details.method)
        make = grpc.stream_stream_rpc_method_handler if handler.response_streaming else _unary_answer
        call = guarded.stream if handler.response_streaming else guarded.unary
        return make(call, request_deserializer=None, response_serializer=handler.response_serializer)

    async def wait_until_idle(self, timeout_s: float) -> bool:
        """Until no call is under way; False if that took longer."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    @asynccontextmanager
    async def entered(self, method: str, is_stream: bool) -> AsyncIterator[None]:
        """While a call is under way. Raises OrderRefused for one too many."""
        kind = _kind_of(method, is_stream)
        if self.stopping.is_set() and kind is not _Kind.CHECK:
            raise OrderRefused(Refusing.STOPPING, "the agent is stopping - ask again once it has been started anew")
        most = OPEN_AT_MOST.get(kind, self._limits.requests)
        if self._open[kind] >= most:
            raise OrderRefused(Refusing.QUEUE_FULL, f"{most} {kind}s are open - ask again in a while", FULL_RETRY_S)
        self._count(kind, 1)
        try:
            yield
        finally:
            self._count(kind, -1)

    def _count(self, kind: _Kind, calls: int) -> None:
        self._open[kind] += calls
        self.calls = self._open.total() - self._open[_Kind.CHECK]
        if self.calls:
            self._idle.clear()
        else:
            self._idle.set()

    def room(self, method: str) -> Room:
        """Where a call's message is received."""
        return Room(self._image_places if method.endswith(WITH_IMAGES) else self._question_places)

    async def received(self, context: Call, parse: Callable[[bytes], Any], *, has_image: bool) -> Any:  # noqa: ANN401
        """The one message of a unary call. Raises OrderRefused."""
        try:
            async with asyncio.timeout(RECEIVE_S):
                raw = await context.read()
        except TimeoutError:
            raise OrderRefused(Refusing.INVALID, f"the message has not come within {RECEIVE_S:.0f} s") from None
        if raw is grpc.aio.EOF:
            raise OrderRefused(Refusing.INVALID, "the call ended without a message")
        if has_image:
            self.check_size(len(raw))
        elif len(raw) > QUESTION_BYTES:
            raise _too_large(len(raw), f"{QUESTION_BYTES} are the most of a call without an image")
        return parsed(raw, parse)

    def check_size(self, size_bytes: int) -> None:
        """Raises OrderRefused for a message above the limit."""
        if size_bytes > self._limits.message:
            raise _too_large(size_bytes, f"{self._limits.message} are the most (limits.message)")


def _too_large(size_bytes: int, most: str) -> OrderRefused:
    return OrderRefused(Refusing.MESSAGE_TOO_LARGE, f"a message of {size_bytes} bytes, where {most}")


def parsed(raw: bytes, parse: Callable[[bytes], Any]) -> Any:  # noqa: ANN401  # gRPC has no types
    """A message of its type. Raises OrderRefused for other bytes, and for more fields than any caller needs."""
    if has_more_fields(raw, FIELDS):
        raise OrderRefused(Refusing.INVALID, f"a message of more than {FIELDS} fields: send several")
    try:
        return parse(raw)
    except DecodeError:
        raise OrderRefused(Refusing.INVALID, "the bytes are no message of this method's type") from None


def _kind_of(method: str, is_stream: bool) -> _Kind:
    if method.startswith(ALWAYS_OPEN):
        return _Kind.CHECK
    if method.startswith(TEXTS):
        return _Kind.TEXT
    return _Kind.STREAM if is_stream else _Kind.IMAGE if method.endswith(WITH_IMAGES) else _Kind.QUESTION


class _Guarded:
    """One call's method behind the door."""

    def __init__(self, door: Door, handler: Call, method: str) -> None:
        self._door = door
        self._method = method
        self._parse = handler.request_deserializer
        self._is_stream = handler.request_streaming or handler.response_streaming
        self._takes_stream = handler.request_streaming
        self._stall_s = door.stall_s if method.startswith(TEXTS) else None
        self._call = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream

    async def unary(self, _: AsyncIterator[bytes], context: Call) -> Call:
        """One answer; None where it is refused."""
        answer = None
        async with _told(context, self._method), self._entered() as room:
            answer = await self._call(await self._given(context, room), room)
        return answer  # noqa: RET504  # where it is refused there is none

    async def stream(self, _: AsyncIterator[bytes], context: Call) -> None:
        """Many answers."""
        async with (
            _told(context, self._method),
            self._entered() as room,
            aclosing(self._call(await self._given(context, room), room)) as answers,
        ):
            async for answer in answers:
                await self._written(answer, context)

    async def _written(self, answer: Call, context: Call) -> None:
        """Once the caller's side has it. Raises OrderRefused where a text's does not take it."""
        try:
            async with asyncio.timeout(self._stall_s):
                await context.write(answer)
        except TimeoutError:
            raise OrderRefused(Refusing.NOT_NOW, f"nothing was read for {self._stall_s:g} s: ask again") from None

    @asynccontextmanager
    async def _entered(self) -> AsyncIterator[Room]:
        """With the room that the call's message takes. Raises OrderRefused."""
        async with self._door.entered(self._method, self._is_stream):
            room = self._door.room(self._method)
            try:
                yield room
            finally:
                room.leave()

    async def _given(self, context: Call, room: Room) -> Any:  # noqa: ANN401  # gRPC has no types
        """What a method is called with: its message, or messages. It alone has it, and lets it go when it may.

        A method that gives images to the desk leaves the room as soon as they are counted there.
        """
        if self._takes_stream:
            return _Messages(context, self._parse)
        await room.enter()
        has_image = self._method.endswith(WITH_IMAGES)
        given = await self._door.received(context, self._parse, has_image=has_image)
        if not has_image:
            room.leave()
        return given


class _Messages:
    """A stream's messages. Neither gRPC's iterator nor a generator: those hold the last message until the next comes,
    which is for ever where a caller keeps its stream open."""

    def __init__(self, context: Call, parse: Callable[[bytes], Any]) -> None:
        self._context = context
        self._parse = parse

    def __aiter__(self) -> _Messages:
        return self

    async def __anext__(self) -> Any:  # noqa: ANN401  # gRPC has no types
        """Raises OrderRefused."""
        raw = await self._context.read()
        if raw is grpc.aio.EOF:
            raise StopAsyncIteration
        return parsed(raw, self._parse)


@asynccontextmanager
async def _told(context: Call, method: str) -> AsyncIterator[None]:
    """Whatever goes wrong inside ends the call with words of ours.

    Not by ``context.abort``: its exception, which gRPC keeps with the call, holds the frames of the call and their
    images, and these the call; that circle is found by the garbage collector alone, long after memory has run out.
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


def _unary_answer(call: Call, **serializers: Call) -> Call:
    return grpc.stream_unary_rpc_method_handler(call, **serializers)
