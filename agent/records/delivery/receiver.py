"""Who is told of verdicts: the contract of all receivers. Used by one task of one event loop."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Protocol

from experts.errors import ConfigError

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from agent.records.outbox import Message


class ReceiverConnection(Protocol):
    """A receiver that can be told something now."""

    async def deliver(self, message: Message) -> None:
        """Tell it; when this returns it has acknowledged.

        Raises ReceiverUnavailable where it did not, MessageRefused where it never will.
        """

    async def lost(self) -> None:
        """Never returns; raises ReceiverUnavailable once the connection is gone."""


class Receiver(Protocol):
    """One receiver, connected to or not. ``name`` is its rows' in the outbox."""

    name: str

    def connected(self) -> AbstractAsyncContextManager[ReceiverConnection]:
        """Connect, and disconnect in the end. Raises ReceiverUnavailable."""


def tls_context(key: str, authority: Path | None) -> ssl.SSLContext:
    """Who is trusted: this authority, else the system's. ``key`` of the line file names it. Raises ConfigError."""
    try:
        return ssl.create_default_context(cafile=authority)
    except OSError as error:  # also what is no certificate
        raise ConfigError(f"{key}: {authority}: {error.strerror or error} - write a PEM file") from error
