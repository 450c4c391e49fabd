"""HTTP server of a line: the door at its addresses, on a thread of its own.

Guarantees: the server starts at every address, or at none. Connections without a request are at most ARRIVALS at each
address, TLS handshakes included; more are closed at once. ``stop`` takes no new connection, gives answers under way
STOP_S, closes all connections and ends the thread.
Why not uvicorn's own server: it has one address, takes the process's signals, and opens its sockets to everyone.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING

from uvicorn.config import Config
from uvicorn.server import ServerState

from agent.web.listening import Listener, listener_at
from agent.web.protocol import HEAD_BYTES, HEAD_S, BoundedProtocol
from experts.errors import AddressUnusable

if TYPE_CHECKING:
    import socket
    import ssl

    from agent.line_file.api import ApiSection
    from agent.web.door import Door

log = logging.getLogger(__name__)

ARRIVALS = 128  # callers come in bursts, and send their request within milliseconds
STOP_S = 0.2  # for answers under way, which take milliseconds
NO_FILES_S = 1.0  # pause while the process has no file for a connection


class WebServer:
    """Started once, stopped once. ``addresses``: in use, with the port that was found for port 0. ``tls``: of the
    HOST:PORT addresses."""

    def __init__(self, api: ApiSection, door: Door, tls: ssl.SSLContext | None = None) -> None:
        self.addresses: tuple[str, ...] = ()
        self._api = api
        self.door = door
        self._tls = tls
        self._listeners: list[Listener] = []
        self._accepting: list[asyncio.Task[None]] = []
        self._connecting = set[asyncio.Task[None]]()
        self._state = ServerState()
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
            accepting = asyncio.run_coroutine_threadsafe(self._started(listener), self._loop)
            accepting.result()
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

    async def _started(self, listener: Listener) -> None:
        self._accepting.append(asyncio.create_task(self._accept(listener)))

    async def _accept(self, listener: Listener) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener.socket)
            except OSError as error:  # such as too many open files
                log.warning("web_not_accepting address=%s reason=%s", listener.address, error.strerror)
                await asyncio.sleep(NO_FILES_S)
                continue
            if listener.arrivals >= ARRIVALS:
                connection.close()
                continue
            listener.arrivals += 1
            task = asyncio.create_task(self._connect(listener, connection))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    async def _connect(self, listener: Listener, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        tls = None if listener.place is not None else self._tls
        try:
            await loop.connect_accepted_socket(
                partial(BoundedProtocol, self._config, self._state, listener, loop), connection, ssl=tls,
                ssl_handshake_timeout=None if tls is None else HEAD_S,
            )  # fmt: skip
        except (OSError, asyncio.CancelledError):  # no TLS, another certificate, or gone; from now on not counted
            listener.arrivals -= 1
            connection.close()

    async def _stop(self) -> None:
        for task in (*self._accepting, *self._connecting):
            task.cancel()
        await asyncio.gather(*self._accepting, *self._connecting, return_exceptions=True)
        if self._state.tasks:
            await asyncio.wait(self._state.tasks, timeout=STOP_S)
        for connection in tuple(self._state.connections):
            connection.transport.abort()
        for task in tuple(self._state.tasks):
            task.cancel()
        if late := self._state.tasks:
            await asyncio.wait(late, timeout=STOP_S)
        await asyncio.sleep(0)  # aborted connections are told so
