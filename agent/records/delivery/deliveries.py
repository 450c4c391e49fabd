"""Deliveries: all receivers of a line, on one loop beside the agent.

Guarantees: a hanging receiver delays no other receiver, no verdict and no end of the process. ``stop`` returns within
its timeout, and undelivered messages wait in the outbox for the next run.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from agent.records.delivery.pump import Pump
from agent.records.outbox import Outbox, OutboxCounts, OutboxReader, forget
from experts.daemon_threads import DaemonThreads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future
    from datetime import datetime

    from agent.config import LineConfig
    from agent.records.delivery.receiver import Receiver
    from agent.records.result_writer import ResultStore

log = logging.getLogger(__name__)

CANCEL_AGAIN_S = 1.2  # longer than a receiver takes to disconnect
CALLS_AT_ONCE = 4  # of one receiver, hanging ones included
_receiver: ContextVar[str] = ContextVar("receiver")  # on whose behalf the loop runs now


@dataclass(frozen=True, slots=True)
class DeliveryStatistics:
    """Snapshot of one receiver. ``given_way``: since its results file was created; other counts since the start.
    ``refusal``: its last refused message, for a time."""

    receiver: str
    waiting: int
    given_way: int
    delivered: int
    refused: int
    alarm: str | None
    refusal: str | None


def _mqtt(config: LineConfig) -> Receiver | None:
    if config.outbox.mqtt is None:
        return None
    try:
        from agent.records.delivery.mqtt import MqttReceiver  # an extra
    except ImportError as error:
        missing = f"{error} - MQTT is an extra: pip install coserve[mqtt]"
        raise config.document.error(missing, "outbox", "mqtt") from error
    return MqttReceiver(config.outbox.mqtt, config.line)


def _webhook(config: LineConfig) -> Receiver | None:
    if config.outbox.webhook is None:
        return None
    from agent.records.delivery.webhook import WebhookReceiver

    return WebhookReceiver(config.outbox.webhook)


RECEIVERS: list[Callable[[LineConfig], Receiver | None]] = [_mqtt, _webhook]


def line_receivers(config: LineConfig) -> tuple[Receiver, ...]:
    """Receivers of a line file. Raises ConfigError for a receiver that cannot work as configured."""
    return tuple(receiver for make in RECEIVERS if (receiver := make(config)) is not None)


def line_outbox(config: LineConfig, receivers: Sequence[Receiver]) -> Outbox:
    names = [receiver.name for receiver in receivers]
    section = config.outbox
    return Outbox(config.line, names, section.events, section.limit, section.most_boxes)


class Deliveries:
    """Call ``start`` and ``stop`` once; stop before closing the store."""

    def __init__(self, receivers: Sequence[Receiver], outbox: Outbox, store: ResultStore, per_s: float) -> None:
        self._store = store
        self._outbox = outbox
        self._reader = OutboxReader(store.path)
        self._pumps = {each.name: self._pump(each, per_s) for each in receivers}
        self._stopping = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Deliver messages of earlier runs, then new ones."""
        self._store.write(self._outbox.begin, _tell_forgotten)
        for pump in self._pumps.values():
            self._outbox.when_committed(pump.wake)
        if self._pumps:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._run, args=(self._loop,), name="outbox", daemon=True)
            self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Stop delivering; False after the timeout: a hanging thread ends with the process."""
        if self._loop is None or self._thread is None:
            return True
        with suppress(RuntimeError):  # it has ended already
            self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def statistics(self) -> tuple[DeliveryStatistics, ...]:
        return tuple(self._statistics(name, pump) for name, pump in self._pumps.items())

    def oldest(self) -> dict[str, datetime | None]:
        """Time of the oldest waiting verdict by receiver; without receivers whose rows cannot be read."""
        found = {}
        for name in self._pumps:
            with suppress(OSError, sqlite3.Error):
                found[name] = self._reader.oldest(name)
        return found

    def _statistics(self, name: str, pump: Pump) -> DeliveryStatistics:
        counts = OutboxCounts(0, 0)
        with suppress(OSError, sqlite3.Error):  # the store's alarm has the reason
            counts = self._reader.standing(name)
        return DeliveryStatistics(
            name, counts.waiting, counts.given_way, pump.delivered, pump.refused, pump.alarm, pump.refusal
        )

    def _pump(self, receiver: Receiver, per_s: float) -> Pump:
        def settle(ids: Sequence[str], done: Callable[[], None]) -> None:
            self._store.write(partial(forget, receiver.name, ids), lambda _: done())

        return Pump(receiver, self._reader, settle, per_s)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            loop.set_default_executor(_Calls())
            runner.run(self._deliver())

    async def _deliver(self) -> None:
        """Cancel repeatedly: Python 3.11's `asyncio.wait_for` loses a cancellation that coincides with its result."""
        tasks = [asyncio.create_task(_deliver_to(name, pump)) for name, pump in self._pumps.items()]
        await self._stopping.wait()
        while under_way := [task for task in tasks if not task.done()]:
            for task in under_way:
                task.cancel()
            await asyncio.wait(under_way, timeout=CANCEL_AGAIN_S)


async def _deliver_to(receiver: str, pump: Pump) -> None:
    _receiver.set(receiver)
    await pump.run()


class _Calls(ThreadPoolExecutor):
    """Executor of the loop's blocking calls, on daemon threads. asyncio insists on a ThreadPoolExecutor.

    Each receiver has threads of its own: hanging calls of one delay no other.
    """

    def __init__(self) -> None:
        super().__init__(max_workers=1)
        self._daemons = defaultdict[str, DaemonThreads](lambda: DaemonThreads(CALLS_AT_ONCE, "outbox_calls"))

    def submit(self, call: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:  # noqa: ANN401
        return self._daemons[_receiver.get()].submit(call, *given, **named)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Return at once: a hanging call ends with the process."""
        for daemons in self._daemons.values():
            daemons.stop(timeout_s=0.0)
        super().shutdown(wait=False, cancel_futures=cancel_futures)


def _tell_forgotten(messages: int) -> None:
    if messages:
        log.warning("outbox_forgotten messages=%d: their receivers are not in the line file any more", messages)
