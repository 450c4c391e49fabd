"""Credentials at HOST:PORT of both wires: tokens and certificates, read again at each reload.

Guarantees: mismatched files are refused by name, and the earlier ones stay in use.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agent.doors.access import Tokens
from experts.errors import ConfigError

if TYPE_CHECKING:
    from agent.line_file.api import ApiSection, TlsSection


@dataclass(frozen=True, slots=True)
class Certificates:
    """``pair``: key and certificate of this box as PEM. ``authority``: signs callers' certificates, if they are
    asked."""

    pair: tuple[bytes, bytes]
    authority: bytes | None
    context: ssl.SSLContext


class Credentials:
    """Tokens and certificates of a line. The start decides whether addresses are encrypted, and whether callers need a
    certificate or token."""

    def __init__(self, api: ApiSection) -> None:
        """Raises ConfigError for unreadable certificates or tokens."""
        self.tokens = Tokens(api)
        self.certificates = None if api.tls is None else _read(api.tls)
        self.asks_callers = api.tls is not None and api.tls.client_ca is not None

    def reload(self, api: ApiSection) -> None:
        """Change what later connections and calls need. Raises ConfigError and then changes nothing."""
        tokens = Tokens(api)
        if self.certificates is not None and api.tls is not None:
            self.certificates = _read(api.tls)
        self.tokens.become(tokens)

    def context(self) -> ssl.SSLContext | None:
        """Context that takes the present certificates at each handshake, for a server that keeps its context."""
        if self.certificates is None:
            return None
        context = self.certificates.context
        context.sni_callback = self._take_newest
        if self.asks_callers:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _take_newest(self, connection: ssl.SSLObject, name: str | None, first: ssl.SSLContext) -> None:
        if self.certificates is not None:
            connection.context = self.certificates.context


def _read(tls: TlsSection) -> Certificates:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(tls.certificate, tls.key, password="")  # without it, a prompt on the terminal
        if tls.client_ca is not None:
            context.load_verify_locations(tls.client_ca)
        authority = None if tls.client_ca is None else tls.client_ca.read_bytes()
        return Certificates((tls.key.read_bytes(), tls.certificate.read_bytes()), authority, context)
    except OSError as error:  # includes SSLError
        files = ", ".join(str(file) for file in (tls.certificate, tls.key, tls.client_ca) if file)
        reason = (
            "no certificate, its key and an authority in PEM" if isinstance(error, ssl.SSLError) else error.strerror
        )
        raise ConfigError(f"api.tls: {files}: {reason} - correct the files, or their paths") from error
