"""The line's HTTP addresses: pages and other applications.

Guarantees: a page's connection is cut off after CONNECTION_S; see ``agent.http.server`` for the rest. After ``stop``
only a thread whose question hangs in the line goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.http.server import HttpServer
from agent.web.pages import PATIENCE_S, Pages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent.http.exchange import Application
    from agent.web.readings import Line

CONNECTION_S = 10.0  # twice PATIENCE_S


class WebServer:
    """Started once, stopped once. ``also``: applications that are asked for a path before the pages."""

    def __init__(
        self,
        addresses: Sequence[str],
        line: Line,
        *,
        also: Sequence[Application] = (),
        patience_s: float = PATIENCE_S,
        connection_s: float = CONNECTION_S,
    ) -> None:
        self._pages = Pages(line, patience_s, connection_s)
        self._server = HttpServer(addresses, (*also, self._pages), connection_s)

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._server.addresses

    def start(self) -> None:
        """Raises AddressUnusable; then no address is served."""
        self._server.start()

    def stop(self) -> None:
        self._server.stop()
        self._pages.close()
