"""MQTT 3.1.1 broker as a receiver. QoS 1: the broker acknowledges each message.

Topics, below TOPIC/LINE:
    status                    "online", or "offline" by the agent's end or by its last will; retained
    board/SERIAL/verdict      a board's verdict
    component/ng              an image that is NG or UNKNOWN
    component/result          any image
    alarm                     an alarm that was raised or cleared

In a serial `/`, `+`, `#`, `%` and control characters are percent-encoded: each serial is one level of its topic.
"""

from __future__ import annotations

import asyncio
import logging
import re
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, NoReturn
from urllib.parse import urlsplit

from aiomqtt import Client, MqttCodeError, MqttError, Will

from agent.config import read_secret
from agent.records.delivery.receiver import tls_context
from agent.records.outbox import ALARM, BOARD
from experts.errors import MessageRefused, ReceiverUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from agent.line_file.records import MqttSection
    from agent.records.outbox import Message

PORTS = {"mqtt": 1883, "mqtts": 8883}
KEEPALIVE_S = 20  # detection time of a vanished broker
ANSWER_S = 10.0
GOODBYE_S = 0.5
LOGIN_REFUSED = frozenset({4, 5, 134, 135})  # bad user or password, not authorised; codes of MQTT 3.1.1 and 5
RESERVED = re.compile(r"[/+#%\x00-\x1f\x7f-\x9f]")
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
        self._password()

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[MqttConnection]:
        """See Receiver."""
        status = f"{self._prefix}/status"
        client = self._client(Will(status, "offline", qos=1, retain=True))
        try:
            async with client:
                connection = MqttConnection(client, self._prefix)
                try:
                    await connection.publish(status, "online", retain=True)
                    yield connection
                finally:
                    await connection.close(status)
        except MqttError as error:
            raise ReceiverUnavailable(self.name, f"{self._section.url}: {_reason(error)}") from error

    def _client(self, will: Will) -> Client:
        parts = urlsplit(self._section.url)
        return Client(
            str(parts.hostname),
            parts.port or PORTS[parts.scheme],
            username=self._section.user,
            password=self._password(),
            identifier=self._client_id,
            will=will,
            timeout=ANSWER_S,
            keepalive=KEEPALIVE_S,
            tls_context=self._tls,
            logger=QUIET,
        )

    def _password(self) -> str | None:
        secret = self._section.password
        return None if secret is None else read_secret(secret)


class MqttConnection:
    def __init__(self, client: Client, prefix: str) -> None:
        self._client = client
        self._prefix = prefix
        self._lost = asyncio.ensure_future(_until_lost(client))

    async def deliver(self, message: Message) -> None:
        """See ReceiverConnection. MQTT refuses topics and payloads that are too long."""
        try:
            await self.publish(f"{self._prefix}/{_topic(message)}", message.payload)
        except ValueError as error:
            raise MessageRefused(MqttReceiver.name, message.id, str(error)) from error

    async def lost(self) -> None:
        await asyncio.shield(self._lost)

    async def publish(self, topic: str, payload: str, *, retain: bool = False) -> None:
        """Publish, and wait for the acknowledgement. Raises MqttError, at once if the connection is lost meanwhile."""
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
    return RESERVED.sub(lambda found: "".join(f"%{byte:02X}" for byte in found[0].encode()), text)


async def _until_lost(client: Client) -> NoReturn:
    """Wait for the connection's end, the only event without subscriptions."""
    async for _ in client.messages:
        pass
    raise MqttError("the connection ended")


def _topic(message: Message) -> str:
    if message.event == BOARD:
        return f"board/{level(message.board or '')}/verdict"
    return ALARM if message.event == ALARM else f"component/{message.event}"


def _reason(error: MqttError) -> str:
    if isinstance(error, MqttCodeError) and getattr(error.rc, "value", error.rc) in LOGIN_REFUSED:
        return f"the broker refuses the login ({error}) - correct user and password"
    cause = error.__cause__ or error.__context__
    return str(cause or error) or type(error).__name__
