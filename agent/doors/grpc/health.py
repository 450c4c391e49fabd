"""grpc.health.v1.Health: state of each service; watchers are notified of changes at once."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from grpc_health.v1 import health_pb2

from agent.faults.errors import OrderRefused, Reason

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN

Message = Any  # its stubs have no types


class Health:
    """State of all services: serving until the stop begins.

    Replaces the servicer of grpcio-health-checking: its first watcher that leaves removes the condition that other
    watchers of the service wait for, so they never see the end.
    """

    def __init__(self, services: Iterable[str]) -> None:
        self._services = frozenset(("", *services))  # "": the server as a whole
        self._ending = asyncio.Event()

    def enter_graceful_shutdown(self) -> None:
        """Report NOT_SERVING from now on, also to watchers, whose streams end."""
        self._ending.set()

    async def Check(self, request: Message, context: Message) -> Message:
        """State of one service. Raises OrderRefused for an unknown one."""
        if request.service not in self._services:
            raise OrderRefused(Reason.NOT_FOUND, "no such service - ask for one by its full name, or for none")
        return health_pb2.HealthCheckResponse(status=self._status(request.service))

    async def Watch(self, request: Message, context: Message) -> AsyncIterator[Message]:
        """State of one service, now and at each change."""
        if not self._ending.is_set():
            yield health_pb2.HealthCheckResponse(status=self._status(request.service))
            await self._ending.wait()
        yield health_pb2.HealthCheckResponse(status=self._status(request.service))

    def _status(self, service: str) -> int:
        if service not in self._services:
            return int(SERVICE_UNKNOWN)
        return int(NOT_SERVING if self._ending.is_set() else SERVING)
