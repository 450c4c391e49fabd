"""Many orders over one stream: each is answered when it ends, and none ends the stream.

Guarantees: backpressure: orders are read only while the caller reads its answers, and after the desk has counted the
last order. When the agent stops, orders under way are answered before the stream ends. When the caller disconnects,
orders under way are withdrawn, except accepted ones.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

from agent.doors.grpc.messages import order_of, part_message
from agent.doors.orders import NAME_CHARACTERS, first_of
from agent.doors.proto import inference_pb2 as oip
from agent.doors.proto import inspection_pb2 as pb
from agent.doors.refusals import INTERNAL, MISTAKE, retry_ms, text
from agent.faults.errors import OrderRefused, Reason

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

    from agent.doors.budget import Room
    from agent.doors.grpc.door import Door
    from agent.doors.orders import Orders

log = logging.getLogger(__name__)

WINDOW = 1000  # orders of a stream under way, or answered and unread
FINAL_WANTED = "triton_enable_empty_final_response"
FINAL = "triton_final_response"

Infer: TypeAlias = "Callable[[oip.ModelInferRequest, Callable[[], None]], Awaitable[oip.ModelInferResponse]]"
Request = TypeVar("Request")
Answer = TypeVar("Answer")


class Conversation(ABC, Generic[Request, Answer]):
    def __init__(self, door: Door) -> None:
        self._door = door
        self._ready: asyncio.Queue[tuple[Answer, bool] | None] = asyncio.Queue()
        self._window = asyncio.Semaphore(WINDOW)
        self._under_way: set[asyncio.Task[None]] = set()

    @abstractmethod
    async def carry_out(self, request: Request, on_taken: Callable[[], None]) -> Answer:
        """Judge one order; returns its last answer. ``on_taken``: the desk counts the order. Raises OrderRefused.
        No other object holds the request: a waiting image has one copy."""

    @abstractmethod
    def empty(self, request: Request) -> Answer:
        """Answer with only the order's id; short, as a thousand may wait for a slow caller."""

    @abstractmethod
    def failed(self, answer: Answer, reason: str, message: str, again_ms: int | None) -> Answer:
        """Answer for a refused or failed order, based on its ``empty`` answer."""

    def put(self, answer: Answer, *, is_last: bool = False) -> None:
        self._ready.put_nowait((answer, is_last))

    async def answers(self, requests: AsyncIterator[Request], room: Room) -> AsyncGenerator[Answer, None]:
        """Answers until the caller and all orders have ended. Raises OrderRefused when the agent stops."""
        if room.call is not None:
            room.call.is_busy = lambda: bool(self._under_way)
        reader = asyncio.create_task(self._read(requests))
        reader.add_done_callback(lambda _: self._ready.put_nowait(None))
        try:
            while (ready := await self._ready.get()) is not None:
                answer, is_last = ready
                yield answer
                if is_last:
                    self._window.release()
            await reader
        finally:
            tasks = (reader, *self._under_way)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, requests: AsyncIterator[Request]) -> None:
        """Take orders until the caller ends or the agent stops; then wait for orders under way."""
        taking = asyncio.create_task(self._take(requests))
        await first_of(taking, self._door.stopping.wait())
        await asyncio.gather(taking, return_exceptions=True)
        await asyncio.gather(*self._under_way)
        if self._door.stopping.is_set():
            raise OrderRefused(Reason.STOPPING, "the agent is stopping - send the orders again after its restart")
        taking.result()

    async def _take(self, requests: AsyncIterator[Request]) -> None:
        async for request in requests:
            await self._window.acquire()
            is_taken = asyncio.Event()
            task = asyncio.create_task(self._answer(request, is_taken.set))
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)
            del request  # the next request may take long
            await is_taken.wait()

    async def _answer(self, request: Request, on_taken: Callable[[], None]) -> None:
        empty, carrying = self.empty(request), self.carry_out(request, on_taken)
        del request
        try:
            answer = await carrying
        except OrderRefused as refused:
            answer = self.failed(empty, str(refused.reason), text(str(refused)), retry_ms(refused))
        except Exception:
            log.exception("api_failed in a stream")
            answer = self.failed(empty, INTERNAL, MISTAKE, None)
        finally:
            on_taken()
        self.put(answer, is_last=True)


class OrderStream(Conversation[pb.StreamOrder, pb.StreamAnswer]):
    """Stream of coserve.v1: each order is accepted, then judged."""

    def __init__(self, orders: Orders, door: Door) -> None:
        super().__init__(door)
        self._orders = orders
        self._ids: set[str] = set()

    async def carry_out(self, request: pb.StreamOrder, on_taken: Callable[[], None]) -> pb.StreamAnswer:
        """Raises OrderRefused."""
        id_ = request.id
        if not id_ or len(id_) > NAME_CHARACTERS or id_ in self._ids:
            raise OrderRefused(
                Reason.INVALID,
                f"an order needs an id of at most {NAME_CHARACTERS} characters, unlike those under way on this stream",
            )
        self._door.check_size(request.ByteSize())
        order = order_of(request.order)
        del request
        accepted = pb.StreamAnswer(id=id_, accepted=pb.Accepted())
        self._ids.add(id_)
        try:
            parts = await self._orders.judged(order, on_taken=on_taken, on_accepted=lambda: self.put(accepted))
        finally:
            self._ids.discard(id_)
        return pb.StreamAnswer(id=id_, judged=pb.InspectReply(parts=[part_message(part) for part in parts]))

    def empty(self, request: pb.StreamOrder) -> pb.StreamAnswer:
        return pb.StreamAnswer(id=request.id[:NAME_CHARACTERS])

    def failed(self, answer: pb.StreamAnswer, reason: str, message: str, again_ms: int | None) -> pb.StreamAnswer:
        answer.refused.CopyFrom(pb.Refused(reason=reason, message=message, retry_ms=again_ms))
        return answer


class InferStream(Conversation[oip.ModelInferRequest, oip.ModelStreamInferResponse]):
    """Stream of the Open Inference Protocol."""

    def __init__(self, infer: Infer, door: Door) -> None:
        super().__init__(door)
        self._infer = infer

    async def carry_out(
        self, request: oip.ModelInferRequest, on_taken: Callable[[], None]
    ) -> oip.ModelStreamInferResponse:
        """Raises OrderRefused."""
        self._door.check_size(request.ByteSize())
        wants_final = FINAL_WANTED in request.parameters and request.parameters[FINAL_WANTED].bool_param
        inferring = self._infer(request, on_taken)
        del request
        response = await inferring
        if wants_final:
            response.parameters[FINAL].bool_param = True
        return oip.ModelStreamInferResponse(infer_response=response)

    def empty(self, request: oip.ModelInferRequest) -> oip.ModelStreamInferResponse:
        id_, model = request.id[:NAME_CHARACTERS], request.model_name[:NAME_CHARACTERS]
        return oip.ModelStreamInferResponse(infer_response=oip.ModelInferResponse(id=id_, model_name=model))

    def failed(
        self, answer: oip.ModelStreamInferResponse, reason: str, message: str, again_ms: int | None
    ) -> oip.ModelStreamInferResponse:
        answer.error_message = f"{reason}: {message}"
        return answer
