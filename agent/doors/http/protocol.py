"""uvicorn's HTTP/1 connection with bounds on heads, idleness and callers that do not read.

Guarantees: a head is complete within HEAD_S of the connection, or of the answer before it, else the connection ends. A
caller that takes nothing for ``stall_s`` is cut off, and a slow one only where others want its place. Bytes behind a
request that is being answered are few, and a caller that leaves meanwhile is noticed. A body's pieces are worth their
time. Rest of a body that nobody wants is dropped for LINGER_S at most: cutting the connection off at once would lose
the refusal. The bytes of a head are bounded by ``h11_max_incomplete_event_size``, those of bodies by
``routes.body_of``.
"""

from __future__ import annotations

import logging
import re
import socket
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol, cast

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

if TYPE_CHECKING:
    import asyncio

    from starlette.responses import Response
    from uvicorn.config import Config
    from uvicorn.server import ServerState

    from agent.doors.http.listening import WebListener
    from agent.doors.shares import Place

CONNECTION = "coserve.connection"  # key of the state in a scope
HEAD_BYTES = 16 * 1024  # of a request's line and headers
HEAD_S = 10.0
STALL_S = 10.0  # unless the part of a request says otherwise
LINGER_S = 1.0
LOOK_S, HEARD_BYTES = 1.0, 4096  # who takes fewer is silent: its place yields to others
SLOW_S = 60.0  # from then on each reader is
PASSED = struct.Struct("=24xI92xQ16xI")  # tcpi_unacked, tcpi_bytes_acked, tcpi_notsent_bytes of Linux
SURPLUS_BYTES = 64 * 1024  # behind a request, while it is answered
MANY_PIECES, SMALL_BYTES = 1000, 64  # a chunk of one byte takes the loop as long as one of thousands

BEGUN_BYTES = 200  # of a request that is none, to tell what it is
ASKED = re.compile(rb"[A-Z]+ ([!-~]*)")
OTHER_PROTOCOLS = {
    b"\x16\x03": "TLS came, and this address is not encrypted - use http://, or add api.tls to the line file",
    b"PRI * HTTP/2": "HTTP/2 came, and HTTP/1.1 is spoken here - switch HTTP/2 off in the client or proxy",
}
REMEDIES = {
    "Missing mandatory Host: header": "HTTP/1.1 wants the header Host - send it, or HTTP/1.0",
    "a length and chunks": "the body has a length and chunks - send one of the two",
    "tiny pieces": "the body comes in tiny pieces - send larger chunks",
    "Receive buffer too long": f"the head has more than {HEAD_BYTES} bytes - send fewer headers, or a shorter path",
}

quiet = logging.getLogger("agent.doors.http.uvicorn")  # uvicorn warns of every request that is no HTTP
quiet.setLevel(logging.ERROR)


class _Requests(h11.Connection):
    """Refuses bodies in tiny pieces, and a length beside chunks, by which a proxy may find another end of the body."""

    _pieces = _bytes = 0
    begun = b""  # of the request that is awaited
    wrong: h11.RemoteProtocolError

    def receive_data(self, data: bytes) -> None:
        if self.their_state is h11.IDLE and len(self.begun) < BEGUN_BYTES:
            self.begun = (self.begun + data)[:BEGUN_BYTES]
        super().receive_data(data)

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        try:
            event = super().next_event()
            self._check(event)
        except h11.RemoteProtocolError as error:
            self.wrong = error
            raise
        return event

    def _check(self, event: h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]) -> None:
        if isinstance(event, h11.Request):
            self._pieces = self._bytes = 0
            if event.http_version not in (b"1.0", b"1.1"):
                raise h11.RemoteProtocolError("another version of HTTP", error_status_hint=505)
            self.begun = b""
            if {b"content-length", b"transfer-encoding"} <= {name for name, _ in event.headers}:
                raise h11.RemoteProtocolError("a length and chunks")
        elif isinstance(event, h11.Data):
            self._pieces += 1
            self._bytes += len(event.data)
            if self._pieces > MANY_PIECES and self._bytes < SMALL_BYTES * self._pieces:
                raise h11.RemoteProtocolError("tiny pieces")


class RefusingApp(Protocol):
    def refusal(self, path: str, status: int, reason: str) -> Response:
        """Answer to what is no request, in the format of the path's part."""


class BoundedProtocol(H11Protocol):
    """Connection of a listener, which counted it when it came. ``is_owner``: see ``WebListener.is_owner``;
    ``machine``: HOST:PORT or user of the other end."""

    def __init__(
        self, config: Config, state: ServerState, listener: WebListener, machine: str, arrival: Place,
        loop: asyncio.AbstractEventLoop,
    ) -> None:  # fmt: skip
        super().__init__(config, state, {CONNECTION: self}, loop)
        self.conn = _Requests(h11.SERVER, HEAD_BYTES)
        self.logger = quiet
        self.listener = listener
        self.machine, self.is_owner = machine, listener.is_owner(machine)
        self.place: Place | None = None  # of the request
        self.stall_s = STALL_S
        self._arrival = arrival
        self._is_idle = True
        self._asked_s = 0.0
        self._taken_bytes = -1
        self._surplus_bytes = 0
        self._due: asyncio.TimerHandle | None = None  # the head, or the end of what is dropped
        self._stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast("asyncio.Transport", transport))
        self.transport.set_write_buffer_limits(1)  # paused as long as bytes wait: TLS never resumes at 0
        self._arrival.offer(self.transport.abort)
        self._expect(HEAD_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._count(is_idle=False)
        self._expect(None)
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_answering:
            self._surplus_bytes += len(data)
            if self._surplus_bytes > SURPLUS_BYTES:
                self.transport.abort()
                return
        super().data_received(data)
        if self._is_answering:
            self.flow.resume_reading()  # h11 has paused it; a caller that leaves is noticed by reading only

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before and not self.transport.is_closing():
            self._surplus_bytes, self.stall_s, self._asked_s = 0, STALL_S, self.loop.time()
            self._count(is_idle=False)
            self._expect(None)

    def send_400_response(self, msg: str) -> None:
        with suppress(h11.LocalProtocolError):  # an answer is under way
            self._refuse()
        if self.cycle is not None:
            self.cycle.disconnected = True  # its answer has no caller any more
        self._count(is_idle=True)
        self._expect(LINGER_S)
        self.transport.close()

    def on_response_complete(self) -> None:
        self._count(is_idle=True)  # also one that is closing: TLS waits for its caller to agree
        self._expect(HEAD_S if self.conn.their_state is h11.DONE else LINGER_S)
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.place is not None:
            self.place.offer(self.transport.abort)
        self._look(self._passed()[0], self.loop.time())

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()
        if self.place is not None:
            self.place.keep()

    def _look(self, taken_bytes: int, since_s: float) -> None:
        """Look what the caller has taken, who is cut off if that is nothing for ``stall_s``."""
        now_bytes, now_s = self._passed()[0], self.loop.time()
        if now_bytes == taken_bytes and now_s - since_s >= self.stall_s:
            self.transport.abort()
            return
        if now_bytes - taken_bytes >= HEARD_BYTES and now_s - self._asked_s < SLOW_S and self.place is not None:
            self.place.touch()
        since_s = since_s if now_bytes == taken_bytes else now_s
        self._stalled = self.loop.call_later(min(LOOK_S, self.stall_s), self._look, now_bytes, since_s)

    def _passed(self) -> tuple[int, bool]:
        """Bytes that the other end's system has taken, or ours where it does not say; and whether more are waiting."""
        if self.client is not None and hasattr(socket, "TCP_INFO"):
            connection = self.transport.get_extra_info("socket")
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, PASSED.size)
            if len(info) == PASSED.size:
                unacknowledged, taken_bytes, unsent_bytes = PASSED.unpack(info)
                return taken_bytes, unacknowledged + unsent_bytes > 0
        left_bytes = self.transport.get_write_buffer_size()
        return -left_bytes, left_bytes > 0

    def _refuse(self) -> None:
        """Answer what is no request, in the format of its path as far as it has one."""
        requests = cast("_Requests", self.conn)
        begun, error = requests.begun, requests.wrong
        asked = ASKED.match(begun)
        path = self.scope["path"] if self.scope and not begun else asked[1].decode() if asked else ""
        reason = REMEDIES.get(str(error)) or f"this is no request of HTTP/1.1: {error} - send one, as GET / HTTP/1.1"
        reason = next((remedy for start, remedy in OTHER_PROTOCOLS.items() if begun.startswith(start)), reason)
        answer = cast("RefusingApp", self.app).refusal(path, error.error_status_hint, reason)
        status = answer.status_code
        headers = [*self.server_state.default_headers, *answer.raw_headers, (b"connection", b"close")]
        head = h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status])
        for event in (head, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete

    def _expect(self, within_s: float | None) -> None:
        if self._due is not None:
            self._due.cancel()
        self._due = None if within_s is None else self.loop.call_later(within_s, self._end)

    def _end(self) -> None:
        before_bytes, (self._taken_bytes, waits) = self._taken_bytes, self._passed()
        if self.flow.write_paused or (waits and self._taken_bytes != before_bytes):
            self._expect(HEAD_S)  # the answer is still being read; a stall ends it
        else:
            self.transport.abort()

    def _count(self, *, is_idle: bool) -> None:
        if is_idle and not self._is_idle:
            arrival = self.listener.arrivals.take(self._arrival.peer, self.transport.abort)
            assert arrival is not None  # each place of an arrival yields
            self._arrival = arrival
        elif not is_idle:
            self._arrival.leave()
        self._is_idle = is_idle
