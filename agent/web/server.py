"""Serves the pages at the line's HTTP addresses, all of which only this machine reaches.

Guarantees: it starts at every address, or at none. A connection is one request, and is cut off CONNECTION_S after it
came, whatever it does or leaves undone; more than CONNECTIONS at a time are closed at once, so that no caller takes
threads or memory from the agent. No name is asked of the network. When it stops, all
connections are, and no thread of it goes on but one whose question hangs in the line.
"""

from __future__ import annotations

import logging
import math
import socket
import sys
import threading
import time
from contextlib import ExitStack, suppress
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from agent.line_file.api import UNIX
from agent.unix_sockets import UnixSocket
from agent.web.pages import PATIENCE_S, Pages
from experts.errors import AddressUnusable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent.web.readings import Line

log = logging.getLogger(__name__)

CONNECTIONS = 16  # of each address at a time
CONNECTION_S = 10.0  # twice what a page may take
LOOK_S = 0.25  # how often overdue connections are looked for
STOP_S = 0.2  # for answers that are on their way: they take milliseconds, and the rest of a stop has little time


class WebServer:
    """Started once, stopped once. ``addresses``: where it answers; of a port 0 the one that was found."""

    def __init__(
        self,
        addresses: Sequence[str],
        line: Line,
        *,
        patience_s: float = PATIENCE_S,
        connection_s: float = CONNECTION_S,
    ) -> None:
        self.addresses: tuple[str, ...] = ()
        self._wanted = tuple(addresses)
        self._connection_s = connection_s
        self._pages = Pages(line, patience_s)
        self._served: list[_Served] = []

    def start(self) -> None:
        """Serve. Raises AddressUnusable, and then nothing is served."""
        try:
            for address in self._wanted:
                bind = self._at_path if address.startswith(UNIX) else self._at_port
                self._served.append(bind(address))
        except AddressUnusable:
            self.stop()
            raise
        for served in self._served:
            served.thread.start()
        self.addresses = tuple(served.address for served in self._served)
        log.info("web_started addresses=%s", ",".join(self.addresses))

    def stop(self) -> None:
        """End; what is being answered has STOP_S. What was never started has nothing to end."""
        for served in self._served:
            served.end()
        self._served.clear()
        self._pages.close()

    def _at_path(self, address: str) -> _Served:
        place = UnixSocket(address)
        with ExitStack() as undoing:
            undoing.callback(place.close)
            server = self._server(address, socket.AF_UNIX, place.to_bind.removeprefix(UNIX))
            undoing.callback(server.server_close)
            place.show()
            undoing.pop_all()
        return _Served(address, server, place)

    def _at_port(self, address: str) -> _Served:
        host, _, port = address.rpartition(":")
        try:
            family, *_, where = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        except OSError as error:
            raise AddressUnusable(address, error.strerror or str(error)) from error
        server = self._server(address, family, where)
        return _Served(f"{host}:{server.socket.getsockname()[1]}", server)

    def _server(self, address: str, family: socket.AddressFamily, where: Any) -> _Server:  # noqa: ANN401
        try:
            return _Server(family, where, self._pages, self._connection_s)
        except OSError as error:
            raise AddressUnusable(address, error.strerror or str(error)) from error


class _Served:
    """One address that is served, on a thread that takes its connections."""

    def __init__(self, address: str, server: _Server, place: UnixSocket | None = None) -> None:
        self.address = address
        self.thread = threading.Thread(target=server.serve_forever, args=(LOOK_S,), name="web", daemon=True)
        self._server = server
        self._place = place

    def end(self) -> None:
        if self.thread.ident is not None:
            self._server.shutdown()
            self.thread.join()
        self._server.server_close()
        if self._place is not None:
            self._place.close()
        self._server.finish(STOP_S)


class _Request(WSGIRequestHandler):
    """Writes no log: whoever looks after health asks every few seconds."""

    def log_message(self, *_: object) -> None:
        pass


class _Server(ThreadingMixIn, WSGIServer):
    """The standard library's, within bounds: see the module."""

    daemon_threads = True

    def __init__(self, family: socket.AddressFamily, where: Any, pages: Pages, connection_s: float) -> None:  # noqa: ANN401
        self.address_family = family
        self._connection_s = connection_s
        self._guard = threading.Lock()
        self._overdue_at_s: dict[socket.socket, float] = {}  # of each connection that is open
        super().__init__(where, _Request)
        self.set_app(pages)

    def server_bind(self) -> None:
        """As the standard library, which also asks the network what this machine is called."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "localhost", 0
        self.setup_environ()

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, caller = self.socket.accept()
        return connection, caller or ("", 0)  # at a unix socket callers have no address, and one is written down

    def verify_request(self, request: Any, client_address: Any) -> bool:  # noqa: ANN401
        """Whether there is room for one more connection; if so it has it until it ends."""
        with self._guard:
            has_room = len(self._overdue_at_s) < CONNECTIONS
            if has_room:
                self._overdue_at_s[request] = time.monotonic() + self._connection_s
        return has_room

    def service_actions(self) -> None:
        """Between two looks for connections: those that are overdue are cut off."""
        self._cut_off(time.monotonic())

    def shutdown_request(self, request: Any) -> None:  # noqa: ANN401
        with self._guard:
            self._overdue_at_s.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        """A caller that went away, or was cut off, is nothing to tell; the rest is a mistake of the program."""
        if not isinstance(sys.exception(), OSError):
            log.exception("web_request_failed")

    def finish(self, timeout_s: float) -> None:
        """Let the connections that are open end, then cut them off."""
        deadline_s = time.monotonic() + timeout_s
        while self._overdue_at_s and time.monotonic() < deadline_s:
            time.sleep(0.01)
        self._cut_off(math.inf)

    def _cut_off(self, now_s: float) -> None:
        with self._guard:  # so that none is closed meanwhile, and its number is another's
            for connection, overdue_at_s in self._overdue_at_s.items():
                if overdue_at_s <= now_s:
                    with suppress(OSError):
                        connection.shutdown(socket.SHUT_RDWR)
