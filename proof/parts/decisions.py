"""`coserve bench decisions`: time of ``Engine.handle`` against the number of queued requests, and of workers.

The line is the paper's board A on three executors of a device and one of the CPU, with memory for 40 experts,
simulated. Memory and queues are filled; then each request that ends is followed by another, and every call is timed.
One worker and WORKERS are timed alike on a line of CLUSTER_EXPERTS experts, with a placement by
``agent.deployment.placement``, and with equal memory and equally many queued requests for each worker.
"""

from __future__ import annotations

import platform
import random
import statistics
from collections import Counter
from dataclasses import dataclass, replace
from itertools import cycle
from math import inf
from typing import TYPE_CHECKING, cast

from agent.core.effects import Complete, Evict, Fail, StartBatch
from agent.core.engine import EngineSetup
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
from agent.deployment.placement import place_experts
from experts.graph import ExpertGraph, RouteStep
from profiler.bench.measured import Column, Measured, Target
from profiler.replay.player import TimedDecider
from profiler.simulation.simulator import Simulator
from proof.paper.tasks import BOARDS, CLASSIFIER, task_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from agent.core.effects import Effect
    from agent.core.engine import Engine

RESIDENT = 40
CALLS = 4000
QUEUED = (1_000, 10_000, 100_000)
EXECUTORS = (*(ExecutorSpec(number, "gpu", "device") for number in range(3)), ExecutorSpec(3, "cpu", "host"))
SECONDS_AN_IMAGE = {"cpu": 0.04, "gpu": 0.005}
OK = frozenset({"ok"})
TARGET_AN_IMAGE_S = 100e-6  # processor time over all events of an image
TARGET_QUEUED = 10_000
WORKERS = 32
CLUSTER_EXPERTS = 2_000
CLUSTER_QUEUED = 300  # of each worker
CLUSTER_GROWTH = 2.0
LOG_GROWTH = 5 / 3  # log 100 000 over log 1 000
PREPARED_BYTES = 256 * 2**20
CLASSIFIED, DETECTED = PreparedForm("classified", 3 * 224 * 224 * 4), PreparedForm("detected", 3 * 640 * 640 * 4)
TRANSFER_S = 0.001  # of an image to a worker
DRAWN = 20_000  # arrivals, taken again in turn
COLUMNS = (
    Column("workers", "workers", "d"),
    Column("queued", "queued", "d"),
    Column("batches", "batches", "d"),
    Column("loads", "loads", "d"),
    Column("evicted", "evictions", "d"),
    Column("p50 us", "p50_s", ".1f", 1e6),
    Column("p99 us", "p99_s", ".1f", 1e6),
    Column("worst us", "worst_s", ".1f", 1e6),
    Column("p99 us of CPU", "cpu_p99_s", ".1f", 1e6),
    Column("us of CPU an image", "cpu_an_image_s", ".1f", 1e6),
    Column("over inference", "over_inference", ".2%"),
)


@dataclass(frozen=True, slots=True)
class QueuedDecisionTimes:
    """Seconds of a ``handle`` call while about ``queued`` requests wait.

    ``batches`` and ``loads``: calls that ended one; ``evictions``: by all calls. ``cpu_p99_s``: CPU time of the
    deciding thread, which other processes do not lengthen. ``cpu_an_image_s``: over all calls, for each image that
    ended meanwhile; ``over_inference``: share of the executors' time for an image (CoServe, Figure 19).
    """

    workers: int
    queued: int
    batches: int
    loads: int
    evictions: int
    p50_s: float
    p99_s: float
    worst_s: float
    cpu_p99_s: float
    cpu_an_image_s: float
    over_inference: float


def measure_decisions(queued: int, calls: int = CALLS, policy: str = "coserve") -> QueuedDecisionTimes:
    """Time ``calls`` events at a steady queue of about ``queued`` requests."""
    task = task_of(BOARDS["A"], DRAWN, "decisions")
    columns = {
        processor: {name: _profile(name, kind, processor) for name, kind in task.architectures.items()}
        for processor in SECONDS_AN_IMAGE
    }
    pools = (PoolSpec("host", RESIDENT * 2, 64), PoolSpec("device", RESIDENT, 64, cache="host"))
    matrix, limits = PerformanceMatrix(columns, dict(task.usage)), Limits(pools, prepared_bytes=PREPARED_BYTES)
    setup = EngineSetup(task.graph, policy, EXECUTORS, matrix, limits)
    line = _BusyLine(setup, [arrival.component for arrival in task.trace])
    return _measure(line, queued, calls)


def measure_workers(workers: int, calls: int = CALLS, experts: int = CLUSTER_EXPERTS) -> QueuedDecisionTimes:
    """Time decisions on so many workers, of a device each. WORKERS have memory for four fifths of the experts."""
    names = [f"{number:04d}" for number in range(experts)]
    graph = ExpertGraph(names, {name: (RouteStep(name, OK),) for name in names})
    weights = [1 / (1 + number) for number in range(experts)]
    usage = {name: weight / sum(weights) for name, weight in zip(names, weights, strict=True)}
    matrix = PerformanceMatrix({"gpu": {name: _profile(name, CLASSIFIER, "gpu") for name in names}}, usage)
    room = experts * 4 // 5 // WORKERS
    pools = []
    for worker in (f"w{number}" for number in range(workers)):
        host = PoolSpec(f"{worker}/host", 2 * room, 64, drive=f"{worker}/{SSD}")
        pools += [host, replace(host, name=f"{worker}/device", expert_bytes=room, cache=host.name)]
    executors = [ExecutorSpec(number, "gpu", pool.name) for number, pool in enumerate(pools[1::2])]
    placement = place_experts(graph, matrix, executors, pools)
    limits = Limits(tuple(pools), prepared_bytes=PREPARED_BYTES, placement=placement.pools, transfer_s=TRANSFER_S)
    components = random.Random(1).choices(names, weights, k=DRAWN)
    line = _BusyLine(EngineSetup(graph, "coserve", tuple(executors), matrix, limits), components)
    return _measure(line, CLUSTER_QUEUED * workers, calls)


def _measure(line: _BusyLine, queued: int, calls: int) -> QueuedDecisionTimes:
    line.fill(queued)
    line.timer.decisions.clear()
    line.ended, line.inference_s = 0, 0.0
    evictions = sum(line.step() for _ in range(calls))
    unexpected = line.timer.statistics().unexpected_events
    assert not unexpected, f"{unexpected} answers were given out of turn"
    decisions = line.timer.decisions
    events = Counter(decision.event for decision in decisions)
    seconds, p99 = sorted(decision.seconds for decision in decisions), int(calls * 0.99)
    cpu_s = sum(decision.cpu_s for decision in decisions)
    return QueuedDecisionTimes(
        workers=len({pool.worker for pool in line.setup.pools}),
        queued=queued,
        batches=events[Finished],
        loads=events[Loaded],
        evictions=evictions,
        p50_s=statistics.median(seconds),
        p99_s=seconds[p99],
        worst_s=seconds[-1],
        cpu_p99_s=sorted(decision.cpu_s for decision in decisions)[p99],
        cpu_an_image_s=cpu_s / line.ended,
        over_inference=cpu_s / line.inference_s,
    )


def measure_growth(queued: Sequence[int] = QUEUED, calls: int = CALLS, experts: int = CLUSTER_EXPERTS) -> Measured:
    """Time decisions at each of these lengths of queue, in ascending order, and on one and WORKERS workers."""
    rows = tuple(measure_decisions(each, calls) for each in queued)
    one, many = (measure_workers(workers, calls, experts) for workers in (1, WORKERS))
    notes = (
        f"{BOARDS['A'].types} component types, policy coserve; of {calls} calls each: batches and loads that ended, "
        "copies evicted, else arrivals",
        "over inference: CPU time of all decisions over the executors' time for the same images (CoServe, Figure 19)",
        f"the last two rows: {experts:,} experts, each worker with a device and {CLUSTER_QUEUED} queued",
    )
    machine = f"Python {platform.python_version()}, {platform.machine()}"
    targets = (*decision_targets(rows), workers_target(one, many))
    return Measured(machine, COLUMNS, (*rows, one, many), targets, notes)


def workers_target(one: QueuedDecisionTimes, many: QueuedDecisionTimes) -> Target:
    """CPU time on many workers over that on one, of one run: the machine's speed is in both."""
    growth = many.cpu_p99_s / one.cpu_p99_s
    what = f"decision, p99 of CPU with {WORKERS} workers over 1"
    return Target(what, f"at most {CLUSTER_GROWTH:.2f}", f"{growth:.2f}", growth <= CLUSTER_GROWTH)


def decision_targets(rows: Sequence[QueuedDecisionTimes]) -> tuple[Target, ...]:
    """Processor time of an image's decisions at TARGET_QUEUED, and its growth, which is at most a logarithm's."""
    wanted = f"at most {TARGET_AN_IMAGE_S * 1e6:.0f} us"
    at_target = [
        Target(f"decisions, CPU an image with {each.queued:,} queued", wanted, f"{each.cpu_an_image_s * 1e6:.0f} us",
               each.cpu_an_image_s <= TARGET_AN_IMAGE_S)
        for each in rows if each.queued == TARGET_QUEUED
    ]  # fmt: skip
    growth = rows[-1].cpu_an_image_s / rows[0].cpu_an_image_s
    what = f"the same, {rows[-1].queued:,} queued over {rows[0].queued:,}"
    return (*at_target, Target(what, f"at most {LOG_GROWTH:.2f}", f"{growth:.2f}", growth <= LOG_GROWTH))


class _BusyLine(Simulator):
    """Simulation without an end: a request that ends is followed by another."""

    def __init__(self, setup: EngineSetup, components: Iterable[str | None]) -> None:
        super().__init__(setup)
        self.timer = TimedDecider(self.engine)
        self.engine = cast("Engine", self.timer)
        self._processors = {spec.id: spec.processor for spec in setup.executors}
        self.ended = 0  # images
        self.inference_s = 0.0  # of executors, without waits
        self._now = 0.0
        self._arriving = enumerate(cycle(components))

    def fill(self, queued: int) -> None:
        """Fill the memory, as an agent does at its start, then the queues."""
        self._handle(Started(), 0.0)
        while self._next_s() < inf:
            self.step()
        for _ in range(queued):
            self._handle(Arrived(*next(self._arriving)), self._now)
        self._log.clear()

    def step(self) -> int:
        """Handle the next event; the number of evictions."""
        self._now = self._next_s()
        self._handle(self._take_next(), self._now)
        evictions = sum(isinstance(effect, Evict) for _, effect in self._log)
        self._log.clear()
        return evictions

    def _carry_out(self, effect: Effect, now: float) -> None:
        super()._carry_out(effect, now)
        if isinstance(effect, StartBatch):
            column = self.setup.matrix.experts[self._processors[effect.batch.executor]]
            self.inference_s += column[effect.batch.expert].performance.latency_s(len(effect.batch.requests))
        if isinstance(effect, Complete | Fail):
            self.ended += 1
            self._post(now, Arrived(*next(self._arriving)))


def _profile(name: str, architecture: str, processor: str) -> ExpertProfile:
    slow, form = SECONDS_AN_IMAGE[processor], CLASSIFIED if architecture == CLASSIFIER else DETECTED
    performance = Performance(slow, slow, 8, 1)
    return ExpertProfile(name, performance, Footprint(1), {SSD: 0.06, "host": 0.02}, prepared=form)
