"""Time of a decision: ``Engine.handle`` against the number of queued requests.

The line is the paper's board A on three executors of a device and one of the CPU, with memory for 40 experts. Memory
and a queue are filled; then each request that ends is followed by another one, and every load and batch is answered
after the time that its performance gives. Every call is timed. Images are prepared ahead.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections import Counter
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from agent.core.effects import Assigned, Complete, Evict, Fail, StartBatch, StartLoad
from agent.core.engine import Engine
from agent.core.events import Arrived, Finished, Loaded, Started
from agent.core.performance import (
    SSD,
    ExecutorSpec,
    ExpertProfile,
    Footprint,
    Limits,
    Performance,
    PerformanceMatrix,
    PoolSpec,
    PreparedForm,
)
from agent.core.policy import PRESETS
from experts.expert import Prediction
from profiler.bench.measured import Column, Measured, Target
from proof.paper.tasks import BOARDS, CLASSIFIER, task_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent.core.effects import Effect
    from agent.core.events import Event
    from agent.core.request import Batch

RESIDENT = 40
CALLS = 4000
QUEUED = (1_000, 10_000, 100_000)
EXECUTORS = (*(ExecutorSpec(number, "gpu", "device") for number in range(3)), ExecutorSpec(3, "cpu", "host"))
PROCESSOR_OF = {spec.pool: spec.processor for spec in EXECUTORS}
SECONDS_AN_IMAGE = {"cpu": 0.04, "gpu": 0.005}
TARGET_P99_S = 200e-6
TARGET_QUEUED = 10_000
LOG_GROWTH = 5 / 3  # log 100 000 over log 1 000
PREPARED_BYTES = 256 * 2**20
CLASSIFIED, DETECTED = PreparedForm("classified", 3 * 224 * 224 * 4), PreparedForm("detected", 3 * 640 * 640 * 4)
DRAWN = 20_000  # arrivals, taken again in turn
COLUMNS = (
    Column("queued", "queued", "d"),
    Column("batches", "batches", "d"),
    Column("loads", "loads", "d"),
    Column("evicted", "evictions", "d"),
    Column("p50 us", "p50_s", ".1f", 1e6),
    Column("p99 us", "p99_s", ".1f", 1e6),
    Column("worst us", "worst_s", ".1f", 1e6),
    Column("p99 us of CPU", "cpu_p99_s", ".1f", 1e6),
)


@dataclass(frozen=True, slots=True)
class QueuedDecisionTimes:
    """Seconds of one ``handle`` call while about ``queued`` requests wait.

    ``batches`` and ``loads``: calls with the end of one; ``evictions``: copies that all calls evicted. ``cpu_p99_s``:
    the deciding thread's own processor time, without other users of the cores.
    """

    queued: int
    batches: int
    loads: int
    evictions: int
    p50_s: float
    p99_s: float
    worst_s: float
    cpu_p99_s: float


def measure_decisions(queued: int, calls: int = CALLS, policy: str = "coserve") -> QueuedDecisionTimes:
    """Time ``calls`` events at a steady queue of about ``queued`` requests."""
    line = _BusyLine(policy)
    line.fill(queued)
    times, cpu_times = [], []
    kinds: Counter[type] = Counter()
    for _ in range(calls):
        event, now = line.next_event()
        started, cpu_started = time.perf_counter(), time.thread_time()
        effects = line.engine.handle(event, now)
        cpu_times.append(time.thread_time() - cpu_started)
        times.append(time.perf_counter() - started)
        line.carry_out(effects)
        kinds.update((type(event), *map(type, effects)))
    unexpected = line.engine.statistics().unexpected_events
    assert not unexpected, f"{unexpected} answers were given out of turn"
    p99 = int(calls * 0.99)
    return QueuedDecisionTimes(
        queued=queued,
        batches=kinds[Finished],
        loads=kinds[Loaded],
        evictions=kinds[Evict],
        p50_s=statistics.median(times),
        p99_s=sorted(times)[p99],
        worst_s=max(times),
        cpu_p99_s=sorted(cpu_times)[p99],
    )


def measure_growth(queued: Sequence[int] = QUEUED, calls: int = CALLS) -> Measured:
    """Time decisions at each of these lengths of queue, in ascending order."""
    rows = tuple(measure_decisions(each, calls) for each in queued)
    notes = (
        f"{BOARDS['A'].types} component types, policy coserve; of {calls} calls each: batches and loads that ended, "
        "copies evicted, else arrivals",
        f"p99 of CPU time grows x{rows[-1].cpu_p99_s / rows[0].cpu_p99_s:.2f} from the first row to the last",
    )
    machine = f"Python {platform.python_version()}, {platform.machine()}"
    return Measured(machine, COLUMNS, rows, decision_targets(rows), notes)


def decision_targets(rows: Sequence[QueuedDecisionTimes]) -> tuple[Target, ...]:
    """A decision's time at TARGET_QUEUED, and its growth, which is at most a logarithm's."""
    wanted = f"at most {TARGET_P99_S * 1e6:.0f} us"
    at_target = [
        Target(f"decision, p99 with {each.queued:,} queued", wanted, f"{each.p99_s * 1e6:.0f} us",
               each.p99_s <= TARGET_P99_S)
        for each in rows if each.queued == TARGET_QUEUED
    ]  # fmt: skip
    growth = rows[-1].p99_s / rows[0].p99_s
    what = f"the same, {rows[-1].queued:,} queued over {rows[0].queued:,}"
    return (*at_target, Target(what, f"at most {LOG_GROWTH:.2f}", f"{growth:.2f}", growth <= LOG_GROWTH))


class _BusyLine:
    """An Engine at work in virtual time; a request that ends is followed by another."""

    def __init__(self, policy: str) -> None:
        task = task_of(BOARDS["A"], DRAWN, "decisions")
        self.waiting = 0  # requests in queues
        self._components = [arrival.component for arrival in task.trace]
        self._matrix = PerformanceMatrix(
            {
                processor: {name: _profile(name, kind, processor) for name, kind in task.architectures.items()}
                for processor in SECONDS_AN_IMAGE
            },
            dict(task.usage),
        )
        pools = (PoolSpec("host", RESIDENT * 2, 64), PoolSpec("device", RESIDENT, 64, cache="host"))
        limits = Limits(pools, prepared_bytes=PREPARED_BYTES)
        self.engine = Engine(task.graph, self._matrix, EXECUTORS, PRESETS[policy], limits)
        self._requests = 0
        self._now = 0.0
        self._due: list[tuple[float, int, Event]] = []  # a heap; the number orders events of one time
        self._number = 0
        self._running: dict[int, Batch] = {}  # by executor
        self._ahead: dict[int, Batch] = {}  # by executor, behind that

    def fill(self, queued: int) -> None:
        """Memory first, as it is when the agent starts; then the queues."""
        self.carry_out(self.engine.handle(Started(), self._now))
        while self._due:
            event, now = self.next_event()
            self.carry_out(self.engine.handle(event, now))
        while self.waiting < queued:
            self.carry_out(self.engine.handle(self._arrival(), self._now))

    def next_event(self) -> tuple[Event, float]:
        self._now, _, event = heappop(self._due)
        if isinstance(event, Finished):
            executor = next(one for one, batch in self._running.items() if batch.id == event.batch)
            del self._running[executor]
            if executor in self._ahead:
                self._begin(self._ahead.pop(executor))
        return event, self._now

    def carry_out(self, effects: list[Effect]) -> None:
        """Answer every load and batch when it would be done, and replace every request that ended."""
        for effect in effects:
            if isinstance(effect, Assigned):
                self.waiting += 1
            elif isinstance(effect, StartLoad):
                row = self._matrix.experts[PROCESSOR_OF[effect.pool]][effect.expert]
                self._answer(row.load_s[effect.source], Loaded(effect.load))
            elif isinstance(effect, StartBatch):
                self.waiting -= len(effect.batch.requests)
                if effect.batch.executor in self._running:
                    self._ahead[effect.batch.executor] = effect.batch
                else:
                    self._begin(effect.batch)
            elif isinstance(effect, Complete | Fail):
                self._answer(0.0, self._arrival())

    def _begin(self, batch: Batch) -> None:
        self._running[batch.executor] = batch
        performance = self._matrix.experts[EXECUTORS[batch.executor].processor][batch.expert].performance
        results = tuple(Prediction("ok", 1.0) for _ in batch.requests)
        self._answer(performance.latency_s(len(results)), Finished(batch.id, results))

    def _arrival(self) -> Arrived:
        self._requests += 1
        return Arrived(self._requests, self._components[self._requests % len(self._components)])

    def _answer(self, after_s: float, event: Event) -> None:
        self._number += 1
        heappush(self._due, (self._now + after_s, self._number, event))


def _profile(name: str, architecture: str, processor: str) -> ExpertProfile:
    slow, form = SECONDS_AN_IMAGE[processor], CLASSIFIED if architecture == CLASSIFIER else DETECTED
    performance = Performance(slow, slow, 8, 1)
    return ExpertProfile(name, performance, Footprint(1), {SSD: 0.06, "host": 0.02}, prepared=form)
