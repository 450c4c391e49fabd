"""HTTP server of a line: the door at its addresses, on a thread of its own.

Guarantees: the server starts at every address, or at none. Connections without a request are at most ARRIVALS at each
address, TLS handshakes included; for one more, the one that is silent longest ends, of the peer that has most. ``stop``
takes no new connection, gives answers under way STOP_S, closes all connections and ends the thread.
Why not uvicorn's own server: it has one address, takes the process's signals, and opens its sockets to everyone.
"""

from __future__ import annotations

import asyncio
import logging
import socket as sockets
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING

from uvicorn.config import Config
from uvicorn.server import ServerState

from agent.doors.http.listening import WebListener, listener_at
from agent.doors.http.protocol import HEAD_BYTES, HEAD_S, BoundedProtocol
from agent.doors.shares import peer_of
from agent.faults.errors import AddressUnusable

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Callable

    from agent.doors.http.door import WebDoor
    from agent.doors.shares import Place
    from agent.line_file.api import ApiSection

log = logging.getLogger(__name__)

NO_OTHER_PAGE = (b"cross-origin-resource-policy", b"same-origin")  # may embed an answer
NO_TLS = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n"
    b'{"error": {"reason": "INVALID", "message": "this address is encrypted - use https://", "field": null}}'
)
STOP_S = 0.2  # for answers under way, which take milliseconds
NO_FILES_S = 1.0  # pause while the process has no file for a connection


class WebServer:
    """Started once, stopped once. ``addresses``: in use, with the port that was found for port 0. ``tls``: files of the
    HOST:PORT addresses."""

    def __init__(self, api: ApiSection, door: WebDoor, tls: ssl.SSLContext | None = None) -> None:
        self.addresses: tuple[str, ...] = ()
        self._api = api
        self.door = door
        self._tls = tls
        self._listeners: list[WebListener] = []
        self._connecting = set[asyncio.Task[None]]()
        self._state = ServerState()
        self._state.default_headers = [NO_OTHER_PAGE]
        self._is_stopping = False
        self._thread: Thread | None = None
        self._config = Config(
            door, http="h11", ws="none", lifespan="off", interface="asgi3", log_config=None, access_log=False,
            proxy_headers=False, timeout_keep_alive=int(HEAD_S), h11_max_incomplete_event_size=HEAD_BYTES,
        )  # fmt: skip

    def start(self) -> None:
        """Raises AddressUnusable; then no address is served."""
        try:
            for address in self._api.http:
                self._listeners.append(listener_at(address, self._api))
        except AddressUnusable:
            self._close()
            raise
        self._config.load()
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="web", daemon=True)
        self._thread.start()
        for listener in self._listeners:
            self._loop.call_soon_threadsafe(self._watch, listener)
        self.addresses = tuple(listener.address for listener in self._listeners)
        log.info("web_started addresses=%s", ",".join(self.addresses))

    def stop(self) -> None:
        """Stop; answers under way have STOP_S. Before ``start`` only the parts of the door are stopped."""
        if self._thread is not None:
            asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._thread = None
        self._close()
        self.door.stop()

    def _close(self) -> None:
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    def _watch(self, listener: WebListener) -> None:
        if not self._is_stopping:
            self._loop.add_reader(listener.socket, self._accept, listener)

    def _accept(self, listener: WebListener) -> None:
        """Accept one connection. No task waits for it: a task that is cancelled meanwhile would lose it."""
        try:
            connection, address = listener.socket.accept()
        except (BlockingIOError, ConnectionAbortedError):  # gone again
            return
        except OSError as error:  # such as too many open files
            log.warning("web_not_accepting address=%s reason=%s", listener.address, error.strerror)
            self._loop.remove_reader(listener.socket)
            self._loop.call_later(NO_FILES_S, self._watch, listener)
            return
        connection.setblocking(False)
        machine = listener.machine_of(connection, address)
        arrival = listener.arrivals.take(peer_of("", machine), lambda: task.cancel())
        assert arrival is not None  # each place of an arrival yields
        made = partial(BoundedProtocol, self._config, self._state, listener, machine, arrival, self._loop)
        task = self._loop.create_task(self._connect(listener, connection, made))
        self._connecting.add(task)
        task.add_done_callback(partial(self._connected, connection, arrival))

    async def _connect(
        self, listener: WebListener, connection: socket.socket, made: Callable[[], BoundedProtocol]
    ) -> None:
        loop = asyncio.get_running_loop()
        tls = None if listener.unix_socket is not None else self._tls
        if tls is not None and not await _begins_tls(connection):
            await loop.sock_sendall(connection, NO_TLS)
            connection.recv(2 * HEAD_BYTES)  # closed with bytes in receipt, it would lose the answer
            raise ConnectionAbortedError
        handshake_s = None if tls is None else HEAD_S
        await loop.connect_accepted_socket(made, connection, ssl=tls, ssl_handshake_timeout=handshake_s)

    def _connected(self, connection: socket.socket, arrival: Place, task: asyncio.Task[None]) -> None:
        self._connecting.discard(task)
        if task.cancelled() or task.exception() is not None:  # no TLS, another certificate, or gone
            arrival.leave()
            connection.close()

    async def _stop(self) -> None:
        self._is_stopping = True
        for listener in self._listeners:
            self._loop.remove_reader(listener.socket)
        deadline_s = self._loop.time() + STOP_S
        while (under_way := self._connecting | self._state.tasks) and self._loop.time() < deadline_s:
            await asyncio.wait(under_way, timeout=deadline_s - self._loop.time())
        for connection in tuple(self._state.connections):
            connection.transport.abort()
        if late := self._connecting | self._state.tasks:
            for task in late:
                task.cancel()
            await asyncio.wait(late, timeout=STOP_S)
        await asyncio.sleep(0)  # aborted connections are told so


async def _begins_tls(connection: socket.socket) -> bool:
    """True if the first byte is TLS's; the byte stays unread. Raises TimeoutError, and OSError."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(connection, readable.set)
    try:
        async with asyncio.timeout(HEAD_S):
            await readable.wait()
        return connection.recv(1, sockets.MSG_PEEK) in (b"\x16", b"")
    finally:
        loop.remove_reader(connection)
