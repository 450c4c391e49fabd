"""Web address as a receiver: each message is one POST of JSON, with its id as Idempotency-Key.

2xx acknowledges. 5xx, 408, 425, 429 and a timeout mean "retry later". Answers about the login or the address (3xx, 401,
403, 404, 405, 407) concern every message: all wait for a correction. Any other 4xx finally refuses this message. A
connection that ends on a message, or a 500, may be caused by the message (``by_message``).

One connection is kept open. Blocking calls run on the loop's executor. A call that is given up posts nothing
afterwards: its connection is closed for good.
"""

from __future__ import annotations

import asyncio
import http.client
import threading
import time
from contextlib import asynccontextmanager, suppress
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from agent.environment import read_secret
from agent.faults.errors import MessageRefused, ReceiverUnavailable
from agent.records.delivery.receiver import tls_context

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
        headers = await asyncio.to_thread(self._headers)  # the token's file may hang
        connection = WebhookConnection(self._section, self._tls, headers)
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
        self._http.auto_open = 0  # else a call that goes on after ``close`` would connect and post again
        self._lock = threading.Lock()  # a call's first byte against ``close``
        self._is_closed = False
        self._is_asking = False  # the request is being sent, or has been

    async def deliver(self, message: Message) -> None:
        """See ReceiverConnection."""
        self._is_asking = False
        exchange = asyncio.get_running_loop().run_in_executor(None, self._exchange, message)
        try:
            await asyncio.wait_for(asyncio.shield(exchange), self._timeout_s)
        except TimeoutError as error:
            reason = f"no answer within {self._timeout_s:g} s"
            raise self._unavailable(reason, by_message=self._is_asking) from error
        except (OSError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
            raise self._unavailable(reason, by_message=self._is_asking) from error
        finally:
            if not exchange.done():
                self.close()  # ends the exchange
                exchange.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def lost(self) -> None:
        """See ReceiverConnection. A web address is contacted for messages only."""
        await asyncio.Event().wait()

    def close(self) -> None:
        """Close for good, from any thread; ends a call that waits for an answer, or still connects."""
        with self._lock:
            self._is_closed = True
            with suppress(OSError, AttributeError):
                self._http.sock.shutdown(2)
        self._http.close()

    def _unavailable(
        self, reason: str, retry_s: float | None = None, *, by_message: bool = False
    ) -> ReceiverUnavailable:
        return ReceiverUnavailable(WebhookReceiver.name, f"{self._url}: {reason}", retry_s, by_message=by_message)

    def _exchange(self, message: Message) -> None:
        """Post and read the answer. Raises ReceiverUnavailable, MessageRefused, OSError, HTTPException."""
        was_open = self._http.sock is not None
        try:
            self._post(message)
        except STALE:
            if not was_open or self._is_closed:
                raise
            self._post(message)  # the server has closed the idle connection

    def _post(self, message: Message) -> None:
        try:
            headers = self._headers | {"Idempotency-Key": message.id}
            if self._http.sock is None:
                self._http.connect()
            with self._lock:
                if self._is_closed:
                    raise ConnectionAbortedError("given up meanwhile")
                self._is_asking = True
            self._http.request("POST", self._path, message.payload.encode(), headers)
            response = self._http.getresponse()
            text = response.read(READ_BYTES)
            if not response.isclosed():  # do not read the rest
                self._http.close()
        except BaseException:
            self._http.close()
            raise
        status, shown = response.status, " ".join(text.decode("utf-8", "replace").split())[:SHOWN_CHARACTERS]
        answer = f"{status} {shown}".strip()
        if 200 <= status < 300:
            return
        if status in NOT_NOW or status >= 500:
            retry_s = _retry_s(response.headers.get("Retry-After"))
            raise self._unavailable(
                f"answers {answer}", retry_s, by_message=status == http.HTTPStatus.INTERNAL_SERVER_ERROR
            )
        if status in NOT_THIS_WAY or status < 400:
            raise self._unavailable(f"answers {answer} - correct url or token of outbox.webhook")
        raise MessageRefused(WebhookReceiver.name, message.id, f"answered {answer}")


def _retry_s(retry_after: str | None) -> float | None:
    """Seconds of a Retry-After, from a number or a date; None for other values."""
    if retry_after is None:
        return None
    with suppress(ValueError):
        return max(float(int(retry_after)), 0.0)
    with suppress(ValueError, TypeError):
        return max(parsedate_to_datetime(retry_after).timestamp() - time.time(), 0.0)
    return None
