"""Alarms of a line: what is wrong now, by name; raised and cleared in the records, and told to receivers.

Guarantees: an alarm is raised once it has been there for RAISED_S, and cleared once it has been gone for CLEARED_S, so
what comes and goes is one alarm. It has one number from raising to clearing, also over a restart of the agent. A raised
alarm is shown at once, and stored as soon as the store can.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from agent.records.station.alarms import Alarm, clear_alarm, open_alarms, raise_alarm
from agent.records.station.audit import storable
from agent.records.verdict import AlarmRow
from agent.service.desk.line_state import standing_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from datetime import datetime

    from sqlite_utils import Database

    from agent.deployment.build import Agent
    from agent.records.outbox import Outbox
    from agent.records.result_writer import ResultStore
    from agent.subject import SourceStatus

LOOK_S = 1.0  # between two steps
RAISED_S = 3.0  # a camera connects within it
CLEARED_S = 10.0


class AlarmWatch:
    """Call ``step`` from one thread; ``open`` is for any. ``current``: the alarms that are there now; those of one name
    are one. ``clock``: monotonic seconds; ``wall``: dates of rows."""

    def __init__(
        self,
        current: Callable[[], Iterable[Alarm]],
        store: ResultStore,
        outbox: Outbox,
        *,
        clock: Callable[[], float],
        wall: Callable[[], datetime],
    ) -> None:
        self._current = current
        self._store = store
        self._outbox = outbox
        self._clock = clock
        self._wall = wall
        self._lock = threading.Lock()
        self._open = {row.name: row for row in open_alarms(store.path)}  # at first those of the earlier run
        self._seen_s: dict[str, float] = {}  # first look of alarms not raised yet
        self._gone_s: dict[str, float] = {}  # first look without alarms not cleared yet

    @property
    def open(self) -> tuple[AlarmRow, ...]:
        """Raised alarms, oldest first, with their latest messages."""
        with self._lock:
            return tuple(self._open.values())

    def step(self) -> None:
        now_s = self._clock()
        messages: defaultdict[str, list[str]] = defaultdict(list)
        for alarm in self._current():
            messages[storable(alarm.name)].append(alarm.message)
        there = {name: storable("; ".join(texts)) for name, texts in messages.items()}
        self._seen_s = {name: self._seen_s.get(name, now_s) for name in there if name not in self._open}
        self._gone_s = {name: self._gone_s.get(name, now_s) for name in self._open if name not in there}
        with self._lock:
            self._open |= {name: replace(row, message=there[name]) for name, row in self._open.items() if name in there}
        for name in [name for name, since_s in self._seen_s.items() if now_s - since_s >= RAISED_S]:
            self._raise(name, there[name])
        for name in [name for name, since_s in self._gone_s.items() if now_s - since_s >= CLEARED_S]:
            self._clear(name)

    def _raise(self, name: str, message: str) -> None:
        at = self._wall()
        with self._lock:
            self._open[name] = AlarmRow(None, name, message, at)

        def write(database: Database) -> AlarmRow:
            row = raise_alarm(database, name, message, at)
            self._outbox.alarm_stored(database, row)
            return row

        self._store.write(write, self._raised)

    def _raised(self, row: AlarmRow) -> None:
        """Callback on the store's thread; the alarm may be cleared already."""
        with self._lock:
            if row.name in self._open and self._open[row.name].number is None:
                self._open[row.name] = replace(self._open[row.name], number=row.number)
        self._outbox.committed()

    def _clear(self, name: str) -> None:
        at = self._wall()
        with self._lock:
            del self._open[name]

        def write(database: Database) -> None:
            for row in clear_alarm(database, name, at):
                self._outbox.alarm_stored(database, row)

        self._store.write(write, lambda _: self._outbox.committed())


def loss_alarms(agent: Agent) -> Iterator[Alarm]:
    for name, reason in agent.loop.lost.items():
        if name in agent.setup.workers:
            yield Alarm(f"worker/{name}", f"worker {name} is lost, and starts again: {reason}")
        else:
            message = f"{name} is lost until the agent starts again, and other executors do its work: {reason}"
            yield Alarm(f"device/{name}", message)


def source_alarms(sources: Iterable[SourceStatus]) -> Iterator[Alarm]:
    for each in sources:
        if each.alarm is not None:
            yield Alarm(f"{each.kind}/{each.name}", f"{each.name}: {each.alarm}")


def standing_alarms(agent: Agent) -> Iterator[Alarm]:
    """Experts in quarantine, or on probation. Blocks while the agent's loop makes no progress."""
    for name, reason in standing_of(agent, agent.loop.statistics().engine).items():
        yield Alarm(f"expert/{name}", f"expert {name} gets no requests: {reason}")


def budget_alarms(agent: Agent) -> Iterator[Alarm]:
    """Memories with a lower budget than planned. Blocks while the agent's loop makes no progress."""
    planned = {pool.name: pool.expert_bytes for pool in agent.setup.pools}
    for pool in agent.loop.statistics().engine.pools:
        if pool.expert_bytes < planned.get(pool.name, 0):
            yield Alarm(
                f"budget/{pool.name}",
                f"memory {pool.name} has {pool.expert_bytes} bytes for experts, {planned[pool.name]} were planned: the "
                f"box has less memory, and more is tried later - end what else takes it, or lower memory.{pool.name}",
            )
