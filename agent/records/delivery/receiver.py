"""Contract of receivers: messages are delivered in order, at least once, with their ids. For one task of one loop."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Protocol

from experts.errors import ConfigError

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from agent.records.outbox import Message


class ReceiverConnection(Protocol):
    """Open connection to a receiver."""

    async def deliver(self, message: Message) -> None:
        """Deliver; returns after the acknowledgement.

        Raises ReceiverUnavailable without one, MessageRefused for a final refusal."""

    async def lost(self) -> None:
        """Never returns; raises ReceiverUnavailable once the connection is gone."""


class Receiver(Protocol):
    """``name``: key of the receiver's rows in the outbox."""

    name: str

    def connected(self) -> AbstractAsyncContextManager[ReceiverConnection]:
        """Connection as a context. Raises ReceiverUnavailable."""


def tls_context(key: str, authority: Path | None) -> ssl.SSLContext:
    """TLS context that trusts this authority, else the system's. ``key``: named in errors. Raises ConfigError."""
    try:
        return ssl.create_default_context(cafile=authority)
    except OSError as error:  # raised also for a file without a certificate
        raise ConfigError(f"{key}: {authority}: {error.strerror or error} - write a PEM file") from error
