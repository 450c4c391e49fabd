"""coserve.v1.Inspection, the desk's own protocol."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING

from agent.doors.desk import BoardView, ResultsCursor
from agent.doors.grpc.messages import (
    board_message,
    order_of,
    part_message,
    reload_message,
    status_message,
)
from agent.doors.grpc.streams import OrderStream
from agent.doors.grpc.watching import watch
from agent.doors.orders import check_names
from agent.doors.proto import inspection_pb2 as pb
from agent.doors.refusals import text
from agent.faults.errors import OrderRefused, Reason

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from agent.doors.budget import Room
    from agent.doors.desk import Event
    from agent.doors.grpc.door import Door
    from agent.doors.orders import Orders

SERVICE = pb.DESCRIPTOR.services_by_name["Inspection"].full_name


class InspectionService:
    """Methods by the protocol's names. The door turns raised refusals into answers."""

    def __init__(self, orders: Orders, door: Door) -> None:
        self._orders = orders
        self._desk = orders.desk
        self._door = door
        self._reloading = asyncio.Lock()

    async def Inspect(self, request: pb.InspectRequest, room: Room) -> pb.InspectReply:
        """Judge one image; a caller that gives up withdraws it."""
        order = order_of(request)
        del request  # so that a waiting image has one copy in memory
        parts = await self._orders.judged(order, on_taken=room.leave)
        return pb.InspectReply(parts=[part_message(part) for part in parts])

    async def InspectStream(
        self, requests: AsyncIterator[pb.StreamOrder], room: Room
    ) -> AsyncIterator[pb.StreamAnswer]:
        async with aclosing(OrderStream(self._orders, self._door).answers(requests, room)) as answers:
            async for answer in answers:
                yield answer

    async def GetBoard(self, request: pb.GetBoardRequest, room: Room) -> pb.GetBoardReply:
        """Latest run of the boards with a serial."""
        check_names(serial=request.serial, board_type=request.board_type)
        boards = await self._orders.ask(self._desk.boards, request.serial, request.board_type or None)
        if not boards:
            raise OrderRefused(Reason.NOT_FOUND, f"no board {request.serial!r} is known")
        return pb.GetBoardReply(boards=[board_message(board) for board in boards])

    async def WatchResults(self, request: pb.WatchResultsRequest, room: Room) -> AsyncIterator[pb.WatchEvent]:
        """Stored results, then new ones."""
        check_names(file=request.file)
        seq, board = (
            getattr(request, name) if request.HasField(name) else None for name in ("after_seq", "after_board")
        )
        place = ResultsCursor(request.file or None, seq, board)
        watching = watch(self._orders, place, self._door.stopping, with_maps=request.wants_maps)
        async with aclosing(watching) as events:
            async for event, place in events:
                yield _event_message(event, place)

    async def Trigger(self, request: pb.TriggerRequest, room: Room) -> pb.TriggerReply:
        check_names(camera=request.camera, board=request.board, board_type=request.board_type, key=request.key)
        given = (request.board or None, request.board_type or None, request.key or None)
        key = await self._orders.ask(self._desk.trigger, request.camera, *given)
        return pb.TriggerReply(key=text(key))

    async def Status(self, request: pb.StatusRequest, room: Room) -> pb.StatusReply:
        return status_message(await self._orders.ask(self._desk.status))

    async def Explain(self, request: pb.ExplainRequest, room: Room) -> pb.ExplainReply:
        explained = await self._orders.ask(self._desk.explanation, request.subject)
        return pb.ExplainReply(sentences=[text(each) for each in explained.sentences])

    async def Reload(self, request: pb.ReloadRequest, room: Room) -> pb.ReloadReply:
        async with self._reloading:
            return reload_message(await self._orders.ask(self._desk.reload))


def _event_message(event: Event, place: ResultsCursor) -> pb.WatchEvent:
    message = pb.WatchEvent(file=place.file or "", after_seq=place.seq or 0, after_board=place.board or 0)
    if isinstance(event, BoardView):
        message.board.CopyFrom(board_message(event))
    else:
        message.result.CopyFrom(part_message(event))
    return message
