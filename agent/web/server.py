"""The line's HTTP addresses: its pages, and whatever else is to be served there.

Guarantees: a page's connection is cut off CONNECTION_S after it came, whatever it does or leaves undone; see
``agent.http.server`` for the rest. When it stops, no thread of it goes on but one whose question hangs in the line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.http.server import HttpServer
from agent.web.pages import PATIENCE_S, Pages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent.http.exchange import Application
    from agent.web.readings import Line

CONNECTION_S = 10.0  # twice what a page may take


class WebServer:
    """Started once, stopped once. ``also``: what is served beside the pages, asked first whether a path is its own."""

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
        """Where it answers; of a port 0 the one that was found."""
        return self._server.addresses

    def start(self) -> None:
        """Serve. Raises AddressUnusable, and then nothing is served."""
        self._server.start()

    def stop(self) -> None:
        """End. What was never started has nothing to end."""
        self._server.stop()
        self._pages.close()
