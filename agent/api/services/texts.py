"""coserve.v1.Texts: texts as they are written."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING

from agent.api.calls.messages import text_order_of, text_reply
from agent.api.calls.orders import check_names
from agent.api.proto import inspection_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from agent.api.calls.door import Room
    from agent.api.calls.orders import Orders

SERVICE = pb.DESCRIPTOR.services_by_name["Texts"].full_name


class TextService:
    """The methods by the names that the protocol gives them; what they refuse is raised, and told by the door."""

    def __init__(self, texts: Orders) -> None:
        self._texts = texts

    async def Generate(self, request: pb.GenerateRequest, room: Room) -> AsyncIterator[pb.GenerateReply]:
        """A text; cancelled if its caller gives up."""
        check_names(model=request.model)
        async with self._texts.written(text_order_of(request)) as told, aclosing(told) as pieces:
            async for one in pieces:
                yield text_reply(one)
