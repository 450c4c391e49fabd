"""HTTP server: applications at the line's addresses, which only this machine reaches.

Guarantees: the server starts at every address, or at none. A connection is one request (``agent.http.connection``).
Connections beyond ARRIVALS without a request are closed; beyond an application's maximum they are refused. So callers
cannot exhaust the agent's memory. No name is resolved over the network. One thread serves all addresses; ``stop``
closes all connections and ends that thread.
Why not another server: gRPC's speaks no HTTP/1, the standard library's takes a thread for each connection and never
cuts off slow readers, and frameworks bound neither heads nor slow readers.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING

from agent.http.connection import READ_BYTES, HttpConnection
from agent.line_file.api import UNIX
from agent.unix_sockets import UnixSocket
from experts.errors import AddressUnusable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent.http.exchange import Application

log = logging.getLogger(__name__)

ARRIVALS = 128  # of each address: callers come in bursts, and send their request within milliseconds
STOP_S = 0.2  # for answers under way, which take milliseconds
BACKLOG = 128


@dataclass(frozen=True, slots=True, eq=False)
class _Listener:
    """Bound address. ``place``: of a unix socket."""

    address: str
    socket: socket.socket
    place: UnixSocket | None = None

    def close(self) -> None:
        self.socket.close()
        if self.place is not None:
            self.place.close()


class HttpServer:
    """Started once, stopped once. ``addresses``: in use, with the port that was found for port 0. ``applications``: the
    first that serves a path answers; the last one answers all other paths."""

    def __init__(self, addresses: Sequence[str], applications: Sequence[Application], head_s: float) -> None:
        self.addresses: tuple[str, ...] = ()
        self._wanted = tuple(addresses)
        self._applications = tuple(applications)
        self._head_s = head_s
        self._listeners: list[_Listener] = []
        self._servers: list[asyncio.Server] = []
        self._thread: Thread | None = None

    def start(self) -> None:
        """Raises AddressUnusable; then no address is served."""
        try:
            for address in self._wanted:
                self._listeners.append(_at_path(address) if address.startswith(UNIX) else _at_port(address))
        except AddressUnusable:
            self.stop()
            raise
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="web", daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        self.addresses = tuple(listener.address for listener in self._listeners)
        log.info("web_started addresses=%s", ",".join(self.addresses))

    def stop(self) -> None:
        """Stop; answers under way have STOP_S. Does nothing before ``start``."""
        if self._thread is not None:
            asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._thread = None
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    async def _start(self) -> None:
        for listener in self._listeners:
            serve = partial(self._serve, Counter(), listener.place is not None)
            self._servers.append(await asyncio.start_server(serve, sock=listener.socket, limit=READ_BYTES))

    async def _stop(self) -> None:
        loop = asyncio.get_running_loop()
        for listener in self._listeners:  # asyncio's own close would lose connections that are accepted, not yet served
            loop.remove_reader(listener.socket)
        deadline_s = loop.time() + STOP_S
        while under_way := asyncio.all_tasks() - {asyncio.current_task()}:  # accepted connections included
            _, late = await asyncio.wait(under_way, timeout=max(0.0, deadline_s - loop.time()))
            if loop.time() < deadline_s:
                continue  # connections accepted meanwhile have new tasks
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        for server in self._servers:
            server.close()

    async def _serve(
        self,
        counts: Counter[Application | None],
        is_local_user: bool,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        if counts[None] >= ARRIVALS:
            writer.transport.abort()
            return
        connection = HttpConnection(reader, writer, self._applications, counts, is_local_user=is_local_user)
        try:
            await connection.serve(self._head_s)
        except Exception:  # the boundary of a connection
            log.exception("web_connection_failed")


def _at_path(address: str) -> _Listener:
    place = UnixSocket(address)
    with ExitStack() as undoing:
        undoing.callback(place.close)
        listening = _listening(address, socket.AF_UNIX, place.to_bind.removeprefix(UNIX))
        undoing.callback(listening.close)
        place.show()
        undoing.pop_all()
    return _Listener(address, listening, place)


def _at_port(address: str) -> _Listener:
    host, _, port = address.rpartition(":")
    try:
        family, *_, where = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise AddressUnusable(address, error.strerror or str(error)) from error
    listening = _listening(address, family, where)
    return _Listener(f"{host}:{listening.getsockname()[1]}", listening)


def _listening(address: str, family: socket.AddressFamily, where: object) -> socket.socket:
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family is not socket.AF_UNIX:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(where)  # type: ignore[arg-type]  # as getaddrinfo returns it
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise AddressUnusable(address, error.strerror or str(error)) from error
    listening.setblocking(False)
    return listening
