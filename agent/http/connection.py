"""HTTP connection: one request is read and answered, then the connection is closed.

Guarantees: a connection ends within the terms of its application, whatever the caller does; a request's head has
``head_s``. Memory per connection is bounded: HEAD_BYTES of head, the body that the terms allow, READ_BYTES. A caller
that sends more gets the HTTP status for it. h11 parses the protocol; sockets and time are here.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from http import HTTPStatus
from typing import TYPE_CHECKING

import h11

from agent.http.exchange import HttpAnswer, HttpRequest
from agent.line_file.api import is_loopback_name

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Sequence

    from agent.http.exchange import Application, Terms

log = logging.getLogger(__name__)

HEAD_BYTES = 16 * 1024  # of a request's line and headers
READ_BYTES = 64 * 1024  # at once
LINGER_S = 1.0  # for a caller that still sends: cutting the connection off would lose the refusal
SURPLUS_BYTES = 64 * 1024  # behind the request, while it is answered
TEXT = ("content-type", "text/plain; charset=utf-8")


class HttpConnection:
    """Implements ``agent.http.exchange.Stream``. For the loop's thread only. ``counts``: connections of its address by
    application; under None connections without a request."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, applications: Sequence[Application],
                 counts: Counter[Application | None], *, is_local_user: bool) -> None:  # fmt: skip
        self._reader = reader
        self._writer = writer
        self._applications = applications
        self._counts = counts
        self._application: Application | None = None
        self._is_local_user = is_local_user
        self._protocol = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES)
        self._stall_s: float | None = None
        writer.transport.set_write_buffer_limits(0)  # senders wait until their bytes are sent

    async def serve(self, head_s: float) -> None:
        """Serve the request. ``head_s``: deadline of its line and headers."""
        came_s = asyncio.get_running_loop().time()
        self._counts[None] += 1
        try:
            async with asyncio.timeout(head_s) as cut:
                head = await self._event()
                if isinstance(head, h11.Request):
                    await self._serve_request(head, cut, came_s)
        except h11.RemoteProtocolError as error:
            reason = f"{error}\n".encode("utf-8", "backslashreplace")
            await self._refuse_protocol(HttpAnswer(error.error_status_hint, reason, (TEXT,)))
        except (TimeoutError, OSError, h11.LocalProtocolError):
            pass  # the caller is gone, or cut off
        finally:
            self._counts[self._application] -= 1
            self._writer.transport.abort()

    async def begin(self, status: int, headers: tuple[tuple[str, str], ...]) -> None:
        reason = HTTPStatus(status).phrase.encode()
        await self._send(h11.Response(status_code=status, headers=[*headers, ("connection", "close")], reason=reason))

    async def send(self, piece: bytes) -> None:
        await self._send(h11.Data(data=piece))

    async def _serve_request(self, head: h11.Request, cut: asyncio.Timeout, came_s: float) -> None:
        host = next((value.decode("latin-1") for name, value in head.headers if name == b"host"), None)
        path, _, query = head.target.decode("latin-1").partition("?")
        application = next((each for each in self._applications if each.serves(path)), self._applications[-1])
        terms = application.terms
        self._stall_s = terms.stall_s
        if not (self._is_local_user or host is None or _is_own_name(host)):
            reason = f"{host[:100]!r} is not a name of this machine - use localhost or a loopback address"
            await self._say(application.refusal(421, reason))  # a browser's page of another site, whose name leads here
            await self._linger()
            return
        if self._counts[application] >= terms.connections:
            reason = f"{terms.connections} requests are under way - try again later"
            await self._say(application.refusal(503, reason))
            return
        self._counts[None] -= 1
        self._counts[application] += 1
        self._application = application
        body = await self._body(head, terms)
        if body is None:
            reason = f"a body of more than {terms.body_bytes} bytes, which are the most"
            await self._say(application.refusal(413, reason))
            await self._linger()
            return
        cut.reschedule(came_s + terms.longest_s)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers}
        method = head.method.decode("latin-1")
        await self._answered(application, HttpRequest(method, path, query, headers, body, self._is_local_user))

    async def _answered(self, application: Application, request: HttpRequest) -> None:
        if not application.terms.withdraws:
            await self._answer(application, request)
            return
        answering = asyncio.create_task(self._answer(application, request))
        leaving = asyncio.create_task(self._until_closed())
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (answering, leaving):
                task.cancel()
            ended = await asyncio.gather(answering, leaving, return_exceptions=True)
        if isinstance(ended[0], Exception):
            raise ended[0]

    async def _answer(self, application: Application, request: HttpRequest) -> None:
        try:
            answer = await application.answer(request, self)
        except OSError:
            raise
        except Exception:  # the boundary of one request
            log.exception("http_request_failed path=%s", request.path)
            answer = application.refusal(500, "an internal error of the agent - see its log")
        if answer is not None and self._protocol.our_state is h11.SEND_RESPONSE:
            await self._say(answer)
        elif self._protocol.our_state is h11.SEND_BODY:
            await self._send(h11.EndOfMessage())

    async def _until_closed(self) -> None:
        """Wait until the caller closes, or sends more than SURPLUS_BYTES."""
        surplus = 0
        while surplus <= SURPLUS_BYTES and (content := await self._reader.read(READ_BYTES)):
            surplus += len(content)

    async def _body(self, head: h11.Request, terms: Terms) -> bytes | None:
        """The body; None if it exceeds the terms."""
        announced = next((int(value) for name, value in head.headers if name == b"content-length"), 0)
        if announced > terms.body_bytes:
            return None
        if self._protocol.they_are_waiting_for_100_continue:
            await self._send(h11.InformationalResponse(status_code=100, headers=[]))
        body = bytearray()
        while isinstance(event := await self._event(), h11.Data):
            body += event.data
            if len(body) > terms.body_bytes:
                return None
        if isinstance(event, h11.ConnectionClosed):
            raise ConnectionResetError
        return bytes(body)

    async def _event(self) -> object:
        while (event := self._protocol.next_event()) is h11.NEED_DATA:
            self._protocol.receive_data(await self._reader.read(READ_BYTES))
        return event

    async def _say(self, answer: HttpAnswer) -> None:
        await self.begin(answer.status, (*answer.headers, ("content-length", str(len(answer.body)))))
        await self.send(answer.body)
        await self._send(h11.EndOfMessage())

    async def _refuse_protocol(self, answer: HttpAnswer) -> None:
        """Refuse a caller that does not speak HTTP."""
        with suppress(OSError, TimeoutError, h11.LocalProtocolError):
            if self._protocol.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                await self._say(answer)
                await self._linger()

    async def _linger(self) -> None:
        """Wait LINGER_S at most until the caller closes; bytes that still come are dropped."""
        self._writer.write_eof()
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while await self._reader.read(READ_BYTES):
                    continue

    async def _send(self, event: h11.Event) -> None:
        """Raises OSError, also for a caller that reads nothing for ``stall_s``."""
        content = self._protocol.send(event)
        if not content:
            return
        self._writer.write(content)
        try:
            async with asyncio.timeout(self._stall_s):
                await self._writer.drain()
        except TimeoutError:
            raise ConnectionAbortedError("the caller reads nothing") from None


def _is_own_name(host: str) -> bool:
    name, _, port = host.rpartition(":")
    return is_loopback_name((name if port.isdigit() else host).lower())
