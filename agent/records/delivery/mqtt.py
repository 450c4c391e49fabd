"""MQTT broker as a receiver: MQTT 5, or 3.1.1 where the broker knows no other. QoS 1: it acknowledges each message.

Topics, below TOPIC/LINE:
    status                    "online", or "offline" by the agent's end or by its last will; retained
    board/SERIAL/verdict      a board's verdict
    component/ng              an image that is NG or UNKNOWN
    component/result          any image
    alarm                     an alarm that was raised or cleared

In a serial `/`, `+`, `#`, `%` and the characters that MQTT 1.5.3 forbids (control characters, surrogates,
noncharacters) are percent-encoded: each serial is one level of its topic.

A broker of MQTT 5 says how large a message may be, and why it refuses a message or ends the connection.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import ssl
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import urlsplit

from aiomqtt import Client, MqttCodeError, MqttError, ProtocolVersion, Will

from agent.environment import read_secret
from agent.faults.errors import MessageRefused, ReceiverUnavailable
from agent.records.delivery.receiver import tls_context
from agent.records.outbox import ALARM, BOARD

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from agent.line_file.records import MqttSection
    from agent.records.outbox import Message

PORTS = {"mqtt": 1883, "mqtts": 8883}
KEEPALIVE_S = 20  # detection time of a vanished broker
ANSWER_S = 10.0
GOODBYE_S = 0.5
TAKEN_OVER = 0x8E
TAKEN_OVER_RETRY_S = 30.0  # two agents with one client id take turns, each for that long
TAKEN_OVER_SHOWN_S = 300.0
TAKEN_OVER_ENDS = 3  # accepted connections in a row that end without a reason: mosquitto 2.0 gives none
STEADY_S = 600.0  # a connection that holds for that long has no rival
LOGIN_REFUSED = frozenset({4, 5, 0x86, 0x87})  # bad user or password, not authorised; codes of MQTT 3.1.1 and 5
OTHER_VERSION = frozenset({1, 0x84})
FAILED = 0x80  # lowest code of a failure in MQTT 5
QUOTA_EXCEEDED = 0x97
NEVER = frozenset({0x90, 0x95, 0x99})  # topic name invalid, packet too large, payload format invalid
NOT_THE_MESSAGE = frozenset({0x89, 0x8B, 0x8D, TAKEN_OVER, 0x98, 0x9C, 0x9D})  # busy, ends, silence, moved, ...
NONCHARACTERS = "".join(chr(plane << 16 | last) for plane in range(17) for last in (0xFFFE, 0xFFFF))
RESERVED = re.compile(rf"[/+#%\x00-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef{NONCHARACTERS}]")
QUIET = logging.getLogger(f"{__name__}.client")  # the library also logs the errors it raises
QUIET.setLevel(logging.CRITICAL)


class MqttReceiver:
    """Broker of a line file. Raises ConfigError for a missing password or authority."""

    name = "mqtt"

    def __init__(self, section: MqttSection, line: str) -> None:
        self._section = section
        self._client_id = section.client_id or f"coserve-{line}"
        self._prefix = f"{section.topic.rstrip('/')}/{level(line)}"
        self._tls = tls_context("outbox.mqtt.ca", section.ca) if section.url.startswith("mqtts:") else None
        self._protocol = ProtocolVersion.V5
        self._ends = 0  # accepted connections in a row that ended without a reason, each on another message or none
        self._ended_on = ""  # the message of the last one
        self._password()

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[MqttConnection]:
        """See Receiver."""
        status = f"{self._prefix}/status"
        password = await asyncio.to_thread(self._password)  # its file may hang
        client = self._client(Will(status, "offline", qos=1, retain=True), password)
        is_accepted, began_s = False, asyncio.get_running_loop().time()
        try:
            async with client:
                is_accepted = True
                connection = MqttConnection(client, self._prefix, self._ended)
                try:
                    await connection.publish(status, "online", retain=True)
                    yield connection
                finally:
                    await connection.close(status)
        except MqttError as error:
            if not is_accepted:
                raise self._not_accepted(error) from error
            if asyncio.get_running_loop().time() - began_s > STEADY_S:
                self._ends = 0
            raise self._ended(error) from error

    def _not_accepted(self, error: MqttError) -> ReceiverUnavailable:
        self._ends, code = 0, _code(error)
        is_silent = isinstance(error.__context__, TimeoutError) and not error.__context__.args  # else: no network
        if is_silent or code in OTHER_VERSION:
            is_5 = self._protocol is ProtocolVersion.V5
            self._protocol = ProtocolVersion.V311 if is_5 else ProtocolVersion.V5
        if code is None:
            reason = _network_reason(error)
        elif code in LOGIN_REFUSED:
            reason = f"the broker refuses the login ({error}) - correct user and password"
        elif code in OTHER_VERSION:
            reason = "the broker refuses this version of MQTT: another one is tried"
        else:
            reason = f"the broker refuses the connection of client id {self._client_id!r} ({error}) - see its log"
        return ReceiverUnavailable(self.name, f"{self._section.url}: {reason}")

    def _taken_over(self, *, by_message: bool) -> ReceiverUnavailable:
        reason = (
            "the broker ends one accepted connection after the other, as where another client has the client id "
            f"{self._client_id!r}, too - give each box its own `line`, or its own outbox.mqtt.client_id"
        )
        return ReceiverUnavailable(
            self.name, f"{self._section.url}: {reason}", TAKEN_OVER_RETRY_S, shown_s=TAKEN_OVER_SHOWN_S,
            by_message=by_message,
        )  # fmt: skip

    def _ended(self, error: MqttError, what: str = "") -> ReceiverUnavailable:
        """``what``: the message that an accepted connection ended on."""
        code = _code(error)
        by_message = bool(what) and code not in NOT_THE_MESSAGE
        self._ends = 0 if code != FAILED else self._ends + (not what or what != self._ended_on)
        self._ended_on = what
        if code == TAKEN_OVER or self._ends >= TAKEN_OVER_ENDS:
            return self._taken_over(by_message=by_message)
        if code is None:
            reason = _network_reason(error)
        else:
            cause = "without a reason" if code == FAILED else f"({error.__cause__ or error})"
            reason = f"the broker ended the accepted connection {cause} - see the broker's log"
        return ReceiverUnavailable(self.name, f"{self._section.url}: {reason}{what}", by_message=by_message)

    def _client(self, will: Will, password: str | None) -> _Client:
        parts = urlsplit(self._section.url)
        return _Client(
            str(parts.hostname),
            parts.port or PORTS[parts.scheme],
            username=self._section.user,
            password=password,
            identifier=self._client_id,
            protocol=self._protocol,
            will=will,
            timeout=ANSWER_S,
            keepalive=KEEPALIVE_S,
            tls_context=self._tls,
            logger=QUIET,
        )

    def _password(self) -> str | None:
        secret = self._section.password
        return None if secret is None else read_secret(secret)


class _Client(Client):
    """Client with two facts of MQTT 5 that the library drops. ``most_bytes``: limit of a packet; None: any; ``answer``:
    code of the last acknowledgement."""

    most_bytes: int | None = None
    answer = 0

    def _on_connect(self, *given: Any, **named: Any) -> None:  # noqa: ANN401
        self.most_bytes = getattr(given[-1], "MaximumPacketSize", None)
        super()._on_connect(*given, **named)

    def _on_publish(self, *given: Any, **named: Any) -> None:  # noqa: ANN401
        self.answer = given[3].value
        super()._on_publish(*given, **named)


class MqttConnection:
    def __init__(self, client: _Client, prefix: str, ended: Callable[[MqttError, str], ReceiverUnavailable]) -> None:
        self._client = client
        self._prefix = prefix
        self._ended = ended
        self._lost = asyncio.ensure_future(_until_lost(client))

    async def deliver(self, message: Message) -> None:
        """See ReceiverConnection. MQTT and the broker refuse topics and payloads that are too long."""
        topic, was_open = f"{self._prefix}/{_topic(message)}", not self._lost.done()
        size_bytes, most_bytes = _packet_bytes(topic, message.payload), self._client.most_bytes
        if most_bytes is not None and size_bytes > most_bytes:
            why = f"it has {size_bytes} bytes, and the broker takes {most_bytes} - raise its limit of a packet's size"
            raise MessageRefused(MqttReceiver.name, message.id, why)
        try:
            await self.publish(topic, message.payload)
        except ValueError as error:
            raise MessageRefused(MqttReceiver.name, message.id, str(error)) from error
        except MqttError as error:
            raise self._ended(error, f", on message {message.id}" if was_open else "") from error
        if self._client.answer in NEVER:
            why = f"the broker refuses its topic or content (code {self._client.answer:#x})"
            raise MessageRefused(MqttReceiver.name, message.id, why)
        if self._client.answer >= FAILED:
            why = f"the broker refuses {topic} (code {self._client.answer:#x}) - correct its access rules, or its quota"
            raise ReceiverUnavailable(MqttReceiver.name, why, by_message=self._client.answer != QUOTA_EXCEEDED)

    async def lost(self) -> None:
        await asyncio.shield(self._lost)

    async def publish(self, topic: str, payload: str, *, retain: bool = False) -> None:
        """Publish, and wait for the acknowledgement. Raises MqttError, at once if the connection is lost meanwhile."""
        self._client.answer = 0
        publishing = asyncio.ensure_future(self._client.publish(topic, payload, qos=1, retain=retain))
        try:
            await asyncio.wait((publishing, self._lost), return_when=asyncio.FIRST_COMPLETED)
            if not publishing.done():
                self._lost.result()
            publishing.result()
        finally:
            publishing.cancel()
            await asyncio.gather(publishing, return_exceptions=True)

    async def close(self, status: str) -> None:
        """Publish the status offline if connected, within GOODBYE_S."""
        if not self._lost.done():
            with suppress(MqttError, TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(self.publish(status, "offline", retain=True), GOODBYE_S)
        self._client.timeout = GOODBYE_S
        self._lost.cancel()
        await asyncio.gather(self._lost, return_exceptions=True)


def level(text: str) -> str:
    return RESERVED.sub(lambda found: "".join(f"%{byte:02X}" for byte in found[0].encode(errors="surrogatepass")), text)


async def _until_lost(client: Client) -> NoReturn:
    """Wait for the connection's end, the only event without subscriptions."""
    async for _ in client.messages:
        pass
    raise MqttError("the connection ended")


def _topic(message: Message) -> str:
    if message.event == BOARD:
        return f"board/{level(message.board or '')}/verdict"
    return ALARM if message.event == ALARM else f"component/{message.event}"


def _packet_bytes(topic: str, payload: str) -> int:
    """Size of a PUBLISH of MQTT 5: header, length, topic, number, no properties, payload."""
    rest_bytes = 2 + len(topic.encode()) + 2 + 1 + len(payload.encode())
    return 1 + (rest_bytes.bit_length() + 6) // 7 + rest_bytes


def _code(error: MqttError) -> int | None:
    """The broker's code for the end of a connection; None without one."""
    for each in (error, error.__cause__):
        if isinstance(each, MqttCodeError):
            return each.rc if each.rc is None or isinstance(each.rc, int) else int(each.rc.value)
    return None


def _network_reason(error: MqttError) -> str:
    cause = error.__cause__ or error.__context__ or error
    if isinstance(cause, TimeoutError):
        return f"no answer within {ANSWER_S:g} s - see whether an MQTT broker is there, and whether the url needs mqtts"
    if isinstance(cause, ssl.SSLError):
        return f"no TLS with the broker ({cause}) - correct ca, or the broker's certificate"
    if isinstance(cause, socket.gaierror):
        return f"the host is unknown ({cause.strerror}) - correct the url, or the box's DNS"
    if isinstance(cause, OSError):
        return f"{cause.strerror or cause} - see whether the broker runs there and the network holds"
    return str(cause) or type(cause).__name__
