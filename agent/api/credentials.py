"""Credentials at HOST:PORT: certificates and the token, read again at each reload.

Guarantees: mismatched files are refused by name, and the earlier ones stay in use; tokens are compared in constant
time.
"""

from __future__ import annotations

import hmac
import ssl
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from agent.api.calls.refusals import refuse
from agent.config import read_secret
from experts.errors import ConfigError, OrderRefused, Refusing

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from agent.line_file.api import TlsSection
    from agent.line_file.values import SecretSection

BEARER = "Bearer "

Call = Any  # gRPC has no types


class Certificates:
    """Certificate and key of this box, and the authority of accepted callers."""

    def __init__(self, tls: TlsSection) -> None:
        """Raises ConfigError."""
        self._asks_callers = tls.client_ca is not None
        self._now = _read(tls)

    def read_anew(self, tls: TlsSection) -> None:
        """Reload for later connections. Raises ConfigError and then changes nothing. The server's start decides whether
        callers need a certificate."""
        self._now = _read(tls)

    def for_server(self) -> Call:
        return grpc.dynamic_ssl_server_credentials(
            self._now, lambda: self._now, require_client_authentication=self._asks_callers
        )


def _read(tls: TlsSection) -> Call:
    check = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        check.load_cert_chain(tls.certificate, tls.key, password="")  # without it, a prompt on the terminal
        if tls.client_ca is not None:
            check.load_verify_locations(tls.client_ca)
        authority = None if tls.client_ca is None else tls.client_ca.read_bytes()
        pair = (tls.key.read_bytes(), tls.certificate.read_bytes())
    except OSError as error:  # includes SSLError
        files = ", ".join(str(file) for file in (tls.certificate, tls.key, tls.client_ca) if file)
        reason = (
            "no certificate, its key and an authority in PEM" if isinstance(error, ssl.SSLError) else error.strerror
        )
        raise ConfigError(f"api.tls: {files}: {reason} - correct the files, or their paths") from error
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=authority)


class TokenGuard(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # gRPC has no types
    """Accepts calls with the token; refuses others before receiving their messages."""

    def __init__(self, token: SecretSection) -> None:
        """Raises SecretMissing."""
        self._token = read_secret(token).encode()

    def become(self, other: TokenGuard) -> None:
        self._token = other._token

    async def intercept_service(self, continuation: Callable[[Call], Awaitable[Call]], details: Call) -> Call:
        """The requested method, or one that refuses."""
        shown = dict(details.invocation_metadata).get("authorization", "")
        token = shown[len(BEARER) :] if shown[: len(BEARER)].lower() == BEARER.lower() else ""
        if hmac.compare_digest(token.encode(), self._token):
            return await continuation(details)
        return grpc.stream_unary_rpc_method_handler(_refuse)


async def _refuse(requests: Call, context: Call) -> None:
    refused = OrderRefused(
        Refusing.UNAUTHENTICATED, "this address wants a token - send the metadata authorization: Bearer TOKEN"
    )
    refuse(context, refused)
