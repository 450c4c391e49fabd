"""Server of a line's APIs over gRPC, at its addresses, on a separate thread.

Guarantees: the server starts at every address or at none. At a stop, health reports NOT_SERVING first, calls under way
are answered within the grace time, and new calls are UNAVAILABLE. Unix sockets are guarded by their permissions,
HOST:PORT by the configured certificates and tokens. Reflection answers on this machine only.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import ExitStack
from dataclasses import dataclass
from threading import Thread
from typing import TYPE_CHECKING, Any

import grpc.aio
from google.protobuf import descriptor_pb2, timestamp_pb2
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from agent.doors.access import Where
from agent.doors.grpc import health, inference, inspection
from agent.doors.grpc.door import Door, received_at_most_bytes
from agent.doors.grpc.guard import Guard
from agent.doors.orders import Orders
from agent.doors.proto import inference_pb2, inference_pb2_grpc, inspection_pb2, inspection_pb2_grpc
from agent.doors.statistics import CallStatistics
from agent.doors.unix_sockets import GROUPS, OWNERS, UnixSocket
from agent.faults.errors import AddressUnusable
from agent.line_file.api import UNIX, is_loopback

if TYPE_CHECKING:
    from agent.doors.access import Audit
    from agent.doors.credentials import Credentials
    from agent.doors.desk import Desk
    from agent.line_file.api import ApiSection

log = logging.getLogger(__name__)

SERVICES = (inspection.SERVICE, inference.SERVICE)
LAST_WORDS_S = 1.0  # for answers in transit when all calls have ended
KEEPALIVE_MS = 10_000  # until a silent caller is probed, as its calls count against the limits
KEEPALIVE_ANSWER_MS = 20_000
CALLERS_PING_MS = 5_000  # callers' own pings may come as often, with calls and without
CONNECTIONS = 512  # at each address: each is a file of this process, which the line needs too
HANDSHAKE_MS = 20_000  # for TLS and HTTP/2, of a caller that has connected
IDLE_MS = 300_000  # without a call: its caller connects again when it calls

Server = Any  # gRPC has no types


@dataclass(frozen=True, slots=True, eq=False)
class _Served:
    address: str
    server: Server
    socket: UnixSocket | None = None


class ApiServer:
    """Start and stop once. ``addresses``: bound addresses, with the real port in place of port 0."""

    def __init__(
        self, config: ApiSection, desk: Desk, credentials: Credentials, audit: Audit,
        statistics: CallStatistics | None = None,
    ) -> None:  # fmt: skip
        """``statistics``: shared with another wire."""
        self.addresses: tuple[str, ...] = ()
        self._config = config
        self._orders = Orders(desk)
        self._statistics = statistics or CallStatistics()
        self._door = Door(config.limits, audit)
        self._health = health.Health(SERVICES)
        self.credentials = credentials
        self._served: list[_Served] = []

    @property
    def calls(self) -> int:
        """Number of calls under way, without health and reflection."""
        return self._door.calls

    @property
    def orders_under_way(self) -> int:
        return self._orders.under_way

    def start(self) -> None:
        """Start serving. Raises AddressUnusable, and then serves no address."""
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="api", daemon=True)
        self._thread.start()
        try:
            self.addresses = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        except BaseException:
            self.stop(0.0)
            raise
        log.info("api_started addresses=%s", ",".join(self.addresses))

    def stop(self, grace_s: float) -> bool:
        """Answer calls under way within ``grace_s``, then end; False if callers were cut off."""
        is_idle = asyncio.run_coroutine_threadsafe(self._stop(grace_s), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._orders.stop()
        log.info("api_stopped all_answered=%s", is_idle)
        return is_idle

    async def _start(self) -> tuple[str, ...]:
        inspecting = inspection.InspectionService(self._orders, self._door)
        inferring = inference.GrpcInferenceService(self._orders, self._config.limits, self._statistics, self._door)
        for address in self._config.grpc:
            self._served.append(served := self._bound(address))
            inspection_pb2_grpc.add_InspectionServicer_to_server(inspecting, served.server)
            inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(inferring, served.server)
            health_pb2_grpc.add_HealthServicer_to_server(self._health, served.server)
            if is_loopback(served.address):
                names = (*SERVICES, health.SERVICE, reflection.SERVICE_NAME)
                reflection.enable_server_reflection(names, served.server, pool=_reflected())
        for served in self._served:
            await served.server.start()
        return tuple(served.address for served in self._served)

    def _bound(self, address: str) -> _Served:
        """Raises AddressUnusable."""
        if not address.startswith(UNIX):
            server = self._server(Where.LOOPBACK if is_loopback(address) else Where.FAR)
            try:
                if self.credentials.certificates is None:
                    port = server.add_insecure_port(address)
                else:
                    port = server.add_secure_port(address, self._encryption())
            except RuntimeError:
                port = 0
            if not port:
                raise AddressUnusable(address, _why_not(address))
            return _Served(f"{address.rpartition(':')[0]}:{port}", server)
        is_owners = self._config.is_owners(address)
        server = self._server(Where.OWNER if is_owners else Where.GROUP)
        place = UnixSocket(address, OWNERS if is_owners else GROUPS)
        with ExitStack() as failing:
            failing.callback(place.close)
            try:
                server.add_insecure_port(place.to_bind)
            except RuntimeError as error:
                raise AddressUnusable(address, "no socket can be made there") from error
            place.show()
            failing.pop_all()
        return _Served(address, server, place)

    def _encryption(self) -> Server:
        def now() -> Server:
            found = self.credentials.certificates
            assert found is not None
            return grpc.ssl_server_certificate_configuration([found.pair], root_certificates=found.authority)

        asks = self.credentials.asks_callers
        return grpc.dynamic_ssl_server_credentials(now(), now, require_client_authentication=asks)

    def _server(self, where: Where) -> Server:
        message_bytes = self._config.limits.message
        options = (
            ("grpc.max_receive_message_length", received_at_most_bytes(message_bytes)),
            ("grpc.max_send_message_length", message_bytes),
            ("grpc.http2.bdp_probe", 0),  # else gRPC receives megabytes of each call before the first read
            ("grpc.so_reuseport", 0),  # else a second agent could bind the port and take every other call
            ("grpc.keepalive_time_ms", KEEPALIVE_MS),
            ("grpc.keepalive_timeout_ms", KEEPALIVE_ANSWER_MS),
            ("grpc.http2.ping_timeout_ms", KEEPALIVE_ANSWER_MS),  # one minute by default, and decisive
            ("grpc.http2.min_ping_interval_without_data_ms", CALLERS_PING_MS),  # else a watcher's pings end it
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.max_allowed_incoming_connections", CONNECTIONS),
            ("grpc.max_connection_idle_ms", IDLE_MS),
            ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        )
        interceptors = [Guard(self.credentials.tokens, where), self._door]
        return grpc.aio.server(interceptors=interceptors, options=options)

    async def _stop(self, grace_s: float) -> bool:
        self._health.enter_graceful_shutdown()
        self._door.stopping.set()
        is_idle = await self._door.wait_until_idle(grace_s)
        await asyncio.gather(*(served.server.stop(LAST_WORDS_S if is_idle else 0.0) for served in self._served))
        for served in self._served:
            if served.socket is not None:
                served.socket.close()
        self._served.clear()
        return is_idle


def _reflected() -> DescriptorPool:
    """Descriptors of all services in one pool: the Open Inference Protocol has a separate one."""
    pool = DescriptorPool()
    for described in (timestamp_pb2, inspection_pb2, inference_pb2, health_pb2, reflection_pb2):
        file = descriptor_pb2.FileDescriptorProto()
        described.DESCRIPTOR.CopyToProto(file)
        pool.Add(file)
    return pool


def _why_not(address: str) -> str:
    """Reason of a failed bind, which gRPC hides."""
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]") or None, int(port), type=socket.SOCK_STREAM)
        for family, kind, _, _, place in found:
            with socket.socket(family, kind) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(place)
                probe.listen(1)
    except OSError as error:
        return error.strerror or str(error)
    return "it cannot be served"
