"""How long a decision takes: ``Engine.handle`` timed against the number of queued requests.

The line is the paper's board A: 352 experts, log-normal quantities, memory for 40, three executors of a device and
one of the CPU. Memory and a queue are filled; then each request that ends is followed by a new one, every load and
batch is answered after the time that the line's performance gives it, and every call is timed, whatever it is for.
Images are prepared ahead, as in an agent.
"""

from __future__ import annotations

import platform
import random
import statistics
import time
from collections import Counter
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate
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
from experts.graph import ExpertGraph, RouteStep
from profiler.tables import text_table
from profiler.targets import Target

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from agent.core.effects import Effect
    from agent.core.events import Event
    from agent.core.request import Batch

EXPERTS = 352
DETECTORS = 12
RESIDENT = 40
CALLS = 4000
EXECUTORS = (*(ExecutorSpec(number, "gpu", "device") for number in range(3)), ExecutorSpec(3, "cpu", "host"))
PROCESSOR_OF = {spec.pool: spec.processor for spec in EXECUTORS}
TARGET_P99_S = 200e-6
TARGET_QUEUED = 10_000
PREPARED_BYTES = 256 * 2**20
CLASSIFIED, DETECTED = PreparedForm("classified", 3 * 224 * 224 * 4), PreparedForm("detected", 3 * 640 * 640 * 4)
LOG_GROWTH = 5 / 3  # log 100 000 over log 1 000


@dataclass(frozen=True, slots=True)
class DecisionTimes:
    """Seconds of one ``handle`` call while about ``queued`` requests wait: ``fewest_queued`` to ``most_queued``.

    ``batches`` and ``loads``: how many of the calls told the end of one; ``evictions``: how many copies they evicted.
    ``cpu_p99_s`` is the deciding thread's own processor time: what is left when other processes share the cores.
    """

    queued: int
    calls: int
    batches: int
    loads: int
    evictions: int
    fewest_queued: int
    most_queued: int
    p50_s: float
    p99_s: float
    worst_s: float
    cpu_p99_s: float


def measure_decisions(queued: int, calls: int = CALLS, policy: str = "coserve") -> DecisionTimes:
    """Time ``calls`` events at a steady queue of about ``queued`` requests."""
    line = _BusyLine(policy)
    line.fill(queued)
    times: list[float] = []
    cpu_times: list[float] = []
    lengths: list[int] = []
    kinds: Counter[type[Event]] = Counter()
    evictions = 0
    while len(times) < calls:
        event, now = line.next_event()
        started, cpu_started = time.perf_counter(), time.thread_time()
        effects = line.engine.handle(event, now)
        cpu_times.append(time.thread_time() - cpu_started)
        times.append(time.perf_counter() - started)
        line.carry_out(effects)
        lengths.append(line.waiting)
        kinds[type(event)] += 1
        evictions += sum(isinstance(effect, Evict) for effect in effects)
    times.sort()
    cpu_times.sort()
    unexpected = line.engine.statistics().unexpected_events
    assert not unexpected, f"{unexpected} answers were given out of turn"
    p99 = int(calls * 0.99)
    return DecisionTimes(
        queued=queued,
        calls=calls,
        batches=kinds[Finished],
        loads=kinds[Loaded],
        evictions=evictions,
        fewest_queued=min(lengths),
        most_queued=max(lengths),
        p50_s=statistics.median(times),
        p99_s=times[p99],
        worst_s=times[-1],
        cpu_p99_s=cpu_times[p99],
    )


def measure_growth() -> tuple[DecisionTimes, ...]:
    return tuple(measure_decisions(queued) for queued in (1_000, TARGET_QUEUED, 100_000))


def decision_targets(measured: Sequence[DecisionTimes]) -> tuple[Target, Target]:
    """The time of a decision where it is stated for, and that it grows no faster than a logarithm."""
    at_target = next(times for times in measured if times.queued == TARGET_QUEUED)
    what, wanted = f"decision, p99 with {TARGET_QUEUED:,} queued", f"at most {TARGET_P99_S * 1e6:.0f} us"
    growth = measured[-1].p99_s / measured[0].p99_s
    return (
        Target(what, wanted, f"{at_target.p99_s * 1e6:.0f} us", at_target.p99_s <= TARGET_P99_S),
        Target(
            "the same, 100,000 queued over 1,000", f"at most {LOG_GROWTH:.2f}", f"{growth:.2f}", growth <= LOG_GROWTH
        ),
    )


def report(measured: Sequence[DecisionTimes]) -> str:
    """The figures in words, and whether they reach the target."""
    headings = ("queued", "batches", "loads", "evicted", "p50 us", "p99 us", "worst us", "p99 us of CPU")
    rows = []
    for times in measured:
        microseconds = (f"{each * 1e6:.1f}" for each in (times.p50_s, times.p99_s, times.worst_s, times.cpu_p99_s))
        rows.append((times.queued, times.batches, times.loads, times.evictions, *microseconds))
    p99, growth = decision_targets(measured)
    cpu_growth = measured[-1].cpu_p99_s / measured[0].cpu_p99_s
    python = f"Python {platform.python_version()}, {platform.machine()}"
    return "\n".join(
        (
            f"Decision time, {EXPERTS} experts, policy coserve; {python}",
            f"of {CALLS} calls each: batches and loads that ended, copies evicted, else arrivals",
            text_table([headings, *rows], "{:>9} {:>8} {:>6} {:>8} {:>8} {:>8} {:>9} {:>14}"),
            f"target: p99 {p99.wanted} at {TARGET_QUEUED} queued: {p99.remark}",
            f"growth of p99 from 1 000 to 100 000 queued: x{growth.found}, of its CPU time x{cpu_growth:.2f}",
        )
    )


class _BusyLine:
    """An Engine at work: what it asks for is answered in virtual time; a request that ends is followed by another."""

    def __init__(self, policy: str) -> None:
        self._profile, self.engine, components, weights = _paper_line(policy)
        self.waiting = 0  # requests in queues
        self._components = _drawn(components, weights)
        self._requests = 0
        self._now = 0.0
        self._due: list[tuple[float, int, Event]] = []  # a heap; the number keeps what is due at once in order
        self._number = 0
        self._running: dict[int, Batch] = {}  # by executor
        self._held: dict[int, Batch] = {}  # by executor, behind that

    def fill(self, queued: int) -> None:
        """Memory first, as it is when the agent starts; then the queues."""
        self.carry_out(self.engine.handle(Started(), self._now))
        while self._due:
            event, now = self.next_event()
            self.carry_out(self.engine.handle(event, now))
        while self.waiting < queued:
            self.carry_out(self.engine.handle(self._arrival(), self._now))

    def next_event(self) -> tuple[Event, float]:
        """The next event, and its time."""
        self._now, _, event = heappop(self._due)
        if isinstance(event, Finished):
            self._begin_held(event.batch)
        return event, self._now

    def carry_out(self, effects: list[Effect]) -> None:
        """Have every load and batch answered when it would be done, and every request that ended replaced."""
        for effect in effects:
            if isinstance(effect, Assigned):
                self.waiting += 1
            elif isinstance(effect, StartLoad):
                processor = PROCESSOR_OF[effect.pool]
                self._answer(self._profile.experts[processor][effect.expert].load_s[effect.source], Loaded(effect.load))
            elif isinstance(effect, StartBatch):
                self.waiting -= len(effect.batch.requests)
                if effect.batch.executor in self._running:
                    self._held[effect.batch.executor] = effect.batch
                else:
                    self._begin(effect.batch)
            elif isinstance(effect, Complete | Fail):
                self._answer(0.0, self._arrival())

    def _begin(self, batch: Batch) -> None:
        self._running[batch.executor] = batch
        performance = self._profile.experts[EXECUTORS[batch.executor].processor][batch.expert].performance
        results = tuple(Prediction("ok", 1.0) for _ in batch.requests)
        self._answer(performance.latency_s(len(results)), Finished(batch.id, results))

    def _begin_held(self, answered: int) -> None:
        """Begins the batch queued ahead behind one that has its answer now."""
        executor = next(executor for executor, batch in self._running.items() if batch.id == answered)
        del self._running[executor]
        held = self._held.pop(executor, None)
        if held is not None:
            self._begin(held)

    def _arrival(self) -> Arrived:
        self._requests += 1
        return Arrived(self._requests, next(self._components))

    def _answer(self, after_s: float, event: Event) -> None:
        self._number += 1
        heappush(self._due, (self._now + after_s, self._number, event))


def _drawn(components: list[str], weights: list[float]) -> Iterator[str]:
    """Components by their weights, without an end."""
    rng = random.Random(7)
    sums = list(accumulate(weights))
    while True:
        yield rng.choices(components, cum_weights=sums)[0]


def _paper_line(policy: str) -> tuple[PerformanceMatrix, Engine, list[str], list[float]]:
    rng = random.Random(3)
    classifiers = [f"cls/{number}" for number in range(EXPERTS - DETECTORS)]
    detectors = [f"det/{number}" for number in range(DETECTORS)]
    ok = frozenset({"ok"})
    routes = {}
    for number, classifier in enumerate(classifiers):
        then = (RouteStep(detectors[number % DETECTORS], ok),) if number % 3 == 0 else ()
        routes[f"c{number}"] = (RouteStep(classifier, ok), *then)
    weights = [rng.lognormvariate(0, 2) for _ in routes]
    usage = {name: weight / sum(weights) for name, weight in zip(classifiers, weights, strict=True)}
    profile = PerformanceMatrix(
        {
            processor: {
                name: ExpertProfile(
                    name,
                    Performance(slow, slow, 8, 1),
                    Footprint(1),
                    {SSD: 0.06, "host": 0.02},
                    prepared=DETECTED if name in detectors else CLASSIFIED,
                )
                for name in classifiers + detectors
            }
            for processor, slow in (("cpu", 0.04), ("gpu", 0.005))
        },
        usage,
    )
    pools = (PoolSpec("host", RESIDENT * 2, 64), PoolSpec("device", RESIDENT, 64, cache="host"))
    limits = Limits(pools, prepared_bytes=PREPARED_BYTES)
    engine = Engine(ExpertGraph(classifiers + detectors, routes), profile, EXECUTORS, PRESETS[policy], limits)
    return profile, engine, list(routes), weights
