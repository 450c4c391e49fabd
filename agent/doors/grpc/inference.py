"""inference.GRPCInferenceService: the Open Inference Protocol over gRPC, its stream included."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING

from agent.doors.grpc.streams import InferStream
from agent.doors.inference import InferenceService
from agent.doors.proto import inference_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable

    from agent.doors.budget import Room
    from agent.doors.grpc.door import Door
    from agent.doors.orders import Orders
    from agent.doors.statistics import CallStatistics
    from agent.line_file.api import ApiLimitsSection

SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name


class GrpcInferenceService(InferenceService):
    """All methods over gRPC."""

    def __init__(self, orders: Orders, limits: ApiLimitsSection, statistics: CallStatistics, door: Door) -> None:
        super().__init__(orders, limits, statistics)
        self._door = door

    def ModelInfer(self, request: pb.ModelInferRequest, room: Room) -> Awaitable[pb.ModelInferResponse]:
        return self.infer(request, room.leave)

    async def ModelStreamInfer(
        self, requests: AsyncIterator[pb.ModelInferRequest], room: Room
    ) -> AsyncIterator[pb.ModelStreamInferResponse]:
        async with aclosing(InferStream(self.infer, self._door).answers(requests, room)) as answers:
            async for answer in answers:
                yield answer
