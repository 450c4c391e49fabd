"""Web address as a receiver: each message is one POST of JSON, with its id as Idempotency-Key.

2xx acknowledges. 5xx, 408, 425, 429 and a timeout mean "retry later". Answers about the login or the address (3xx, 401,
403, 404, 405, 407) concern every message: all wait for a correction. Any other 4xx finally refuses this message.

One connection is kept open. Blocking calls run on a daemon thread.
"""

from __future__ import annotations

import asyncio
import http.client
import time
from contextlib import asynccontextmanager, suppress
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from agent.config import read_secret
from agent.records.delivery.receiver import tls_context
from experts.errors import MessageRefused, ReceiverUnavailable

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator

    from agent.line_file.records import WebhookSection
    from agent.records.outbox import Message

NOT_NOW = frozenset({408, 425, 429})
NOT_THIS_WAY = frozenset({401, 403, 404, 405, 407})
READ_BYTES = 64 * 1024  # of an answer, which must be read before the connection is reused
SHOWN_CHARACTERS = 200
STALE = (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError)


class WebhookReceiver:
    """Web address of a line file. Raises ConfigError for a missing token or authority."""

    name = "webhook"

    def __init__(self, section: WebhookSection) -> None:
        self._section = section
        self._tls = tls_context("outbox.webhook.ca", section.ca) if section.url.startswith("https:") else None
        self._headers()

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[WebhookConnection]:
        """See Receiver. Opened by the first message."""
        connection = WebhookConnection(self._section, self._tls, self._headers())
        try:
            yield connection
        finally:
            connection.close()

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "User-Agent": "coserve"}
        if self._section.token is not None:
            headers["Authorization"] = f"Bearer {read_secret(self._section.token)}"
        return headers


class WebhookConnection:
    """HTTP connection, opened by the first message."""

    def __init__(self, section: WebhookSection, tls: ssl.SSLContext | None, headers: dict[str, str]) -> None:
        parts = urlsplit(section.url)
        self._url = section.url
        self._timeout_s = section.timeout_s
        self._path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._headers = headers
        self._http = (
            http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=section.timeout_s)
            if tls is None
            else http.client.HTTPSConnection(str(parts.hostname), parts.port, timeout=section.timeout_s, context=tls)
        )

    async def deliver(self, message: Message) -> None:
        """See ReceiverConnection."""
        exchange = asyncio.get_running_loop().run_in_executor(None, self._exchange, message)
        try:
            await asyncio.wait_for(asyncio.shield(exchange), self._timeout_s)
        except TimeoutError as error:
            raise self._unavailable(f"no answer within {self._timeout_s:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise self._unavailable(str(error) or type(error).__name__) from error
        finally:
            if not exchange.done():
                self.close()  # ends the exchange
                exchange.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def lost(self) -> None:
        """See ReceiverConnection. A web address is contacted for messages only."""
        await asyncio.Event().wait()

    def close(self) -> None:
        """Close, from any thread; ends a call that waits for an answer."""
        with suppress(OSError, AttributeError):
            self._http.sock.shutdown(2)
        self._http.close()

    def _unavailable(self, reason: str, retry_s: float | None = None) -> ReceiverUnavailable:
        return ReceiverUnavailable(WebhookReceiver.name, f"{self._url}: {reason}", retry_s)

    def _exchange(self, message: Message) -> None:
        """Post and read the answer. Raises ReceiverUnavailable, MessageRefused, OSError, HTTPException."""
        was_open = self._http.sock is not None
        try:
            self._post(message)
        except STALE:
            if not was_open:
                raise
            self._post(message)  # the server has closed the idle connection

    def _post(self, message: Message) -> None:
        try:
            headers = self._headers | {"Idempotency-Key": message.id}
            self._http.request("POST", self._path, message.payload.encode(), headers)
            response = self._http.getresponse()
            text = response.read(READ_BYTES)
            if not response.isclosed():  # do not read the rest
                self._http.close()
        except BaseException:
            self._http.close()
            raise
        status, shown = response.status, " ".join(text.decode("utf-8", "replace").split())[:SHOWN_CHARACTERS]
        said = f"{status} {shown}".strip()
        if 200 <= status < 300:
            return
        if status in NOT_NOW or status >= 500:
            raise self._unavailable(f"answers {said}", _retry_s(response.headers.get("Retry-After")))
        if status in NOT_THIS_WAY or status < 400:
            raise self._unavailable(f"answers {said} - correct url or token of outbox.webhook")
        raise MessageRefused(WebhookReceiver.name, message.id, f"answered {said}")


def _retry_s(retry_after: str | None) -> float | None:
    """Seconds of a Retry-After, from a number or a date; None for other values."""
    if retry_after is None:
        return None
    with suppress(ValueError):
        return max(float(int(retry_after)), 0.0)
    with suppress(ValueError, TypeError):
        return max(parsedate_to_datetime(retry_after).timestamp() - time.time(), 0.0)
    return None
