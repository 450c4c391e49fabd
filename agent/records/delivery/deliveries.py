"""Deliveries: all receivers of a line, each on its thread.

Guarantees: a hanging receiver delays no other receiver, no verdict and no end of the process. ``stop`` returns within
its timeout, and undelivered messages wait in the outbox for the next run.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
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
        self._threads = {each.name: _DeliveryThread(self._pump(each, per_s)) for each in receivers}

    def start(self) -> None:
        """Deliver messages of earlier runs, then new ones."""
        self._store.write(self._outbox.begin, _tell_forgotten)
        for thread in self._threads.values():
            self._outbox.when_committed(thread.pump.wake)
            thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Stop delivering; False after the timeout: a hanging thread ends with the process."""
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads.values():
            thread.cancel()
        ended = [thread.wait(deadline_s - time.monotonic()) for thread in self._threads.values()]
        return all(ended)

    def statistics(self) -> tuple[DeliveryStatistics, ...]:
        return tuple(self._statistics(name, thread.pump) for name, thread in self._threads.items())

    def oldest(self) -> dict[str, datetime | None]:
        """Time of the oldest waiting verdict by receiver; without receivers whose rows cannot be read."""
        found = {}
        for name in self._threads:
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


class _DeliveryThread:
    def __init__(self, pump: Pump) -> None:
        self.pump = pump
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._begun.wait()

    def cancel(self) -> None:
        if self._loop is not None and self._task is not None:
            with suppress(RuntimeError):  # it has ended already
                self._loop.call_soon_threadsafe(self._task.cancel)

    def wait(self, timeout_s: float) -> bool:
        """Cancel repeatedly: Python 3.11's `asyncio.wait_for` loses a cancellation that coincides with its result."""
        deadline_s = time.monotonic() + max(timeout_s, 0.0)
        while self._thread.is_alive():
            self._thread.join(min(max(deadline_s - time.monotonic(), 0.0), CANCEL_AGAIN_S))
            if time.monotonic() >= deadline_s:
                break
            self.cancel()
        return not self._thread.is_alive()

    def _run(self) -> None:
        with asyncio.Runner() as runner, suppress(asyncio.CancelledError):
            runner.run(self._main())

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_default_executor(_Daemons())
        self._task = asyncio.current_task()
        self._begun.set()
        await self.pump.run()


class _Daemons(ThreadPoolExecutor):
    """Executor of a loop's blocking calls, on daemon threads: asyncio insists on a ThreadPoolExecutor."""

    def __init__(self) -> None:
        super().__init__(max_workers=1)
        self._daemons = DaemonThreads(4, "outbox_calls")

    def submit(self, call: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:  # noqa: ANN401
        return self._daemons.submit(call, *given, **named)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Return at once: a hanging call ends with the process."""
        self._daemons.stop(timeout_s=0.0)
        super().shutdown(wait=False, cancel_futures=cancel_futures)


def _tell_forgotten(messages: int) -> None:
    if messages:
        log.warning("outbox_forgotten messages=%d: their receivers are not in the line file any more", messages)
