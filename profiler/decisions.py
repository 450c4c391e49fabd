"""How long a decision takes: ``Engine.handle`` timed against the number of queued requests.

The line is the paper's board A: 352 experts, log-normal quantities, memory for 40, three executors of a device and
one of the CPU. A queue is filled, then as many requests arrive as batches finish, and every call is timed.
"""

from __future__ import annotations

import platform
import random
import statistics
import time
from collections import deque
from dataclasses import dataclass

from agent.core.effects import Effect, StartBatch, StartLoad
from agent.core.engine import Engine
from agent.core.events import Arrived, Event, Finished, Loaded, Started
from agent.core.performance import (
    SSD,
    DeviceProfile,
    ExecutorSpec,
    ExpertProfile,
    Footprint,
    Limits,
    Performance,
    PoolSpec,
)
from agent.core.policy import PRESETS
from experts.expert import Prediction
from experts.graph import ExpertGraph, RouteStep

EXPERTS = 352
DETECTORS = 12
RESIDENT = 40
TARGET_P99_S = 200e-6
TARGET_QUEUED = 10_000


@dataclass(frozen=True, slots=True)
class DecisionTimes:
    """Seconds of one ``handle`` call while about ``queued`` requests wait.

    ``cpu_p99_s`` is the deciding thread's own processor time: what is left when other processes share the cores.
    """

    queued: int
    calls: int
    p50_s: float
    p99_s: float
    worst_s: float
    cpu_p99_s: float


def measure_decisions(queued: int, calls: int = 4000, policy: str = "coserve") -> DecisionTimes:
    """Time ``calls`` events at a steady queue of about ``queued`` requests."""
    engine, components, weights = _paper_line(policy)
    rng = random.Random(7)
    pending: deque[Effect] = deque(engine.handle(Started(), 0.0))
    now = 0.0
    arrivals = iter(rng.choices(components, weights, k=queued + calls))
    for number in range(queued):
        now += 1e-6
        pending.extend(engine.handle(Arrived(number, next(arrivals)), now))
    times: list[float] = []
    cpu_times: list[float] = []
    number = queued
    while len(times) < calls:
        event = _next_answer(pending)
        if event is None or len(times) % 2:
            event, number = Arrived(number, next(arrivals)), number + 1
        now += 0.004
        started, cpu_started = time.perf_counter(), time.thread_time()
        effects = engine.handle(event, now)
        cpu_times.append(time.thread_time() - cpu_started)
        times.append(time.perf_counter() - started)
        pending.extend(effects)
    times.sort()
    cpu_times.sort()
    p99 = int(calls * 0.99)
    return DecisionTimes(queued, calls, statistics.median(times), times[p99], times[-1], cpu_times[p99])


def report() -> tuple[list[str], list[DecisionTimes]]:
    """Lines to print, and the figures: against queue lengths from 1 000 to 100 000."""
    rows = [measure_decisions(queued) for queued in (1_000, TARGET_QUEUED, 100_000)]
    lines = [
        f"Decision time, {EXPERTS} experts, policy coserve; Python {platform.python_version()}, {platform.machine()}",
        f"{'queued':>9} {'p50 us':>8} {'p99 us':>8} {'worst us':>9} {'p99 us of CPU':>14}",
    ]
    lines += [
        f"{r.queued:>9} {r.p50_s * 1e6:8.1f} {r.p99_s * 1e6:8.1f} {r.worst_s * 1e6:9.1f} {r.cpu_p99_s * 1e6:14.1f}"
        for r in rows
    ]
    at_target = rows[1]
    verdict = "reached" if at_target.p99_s <= TARGET_P99_S else "SHORT of its target"
    lines.append(f"target: p99 at most {TARGET_P99_S * 1e6:.0f} us at {TARGET_QUEUED} queued: {verdict}")
    growth, cpu_growth = rows[2].p99_s / rows[0].p99_s, rows[2].cpu_p99_s / rows[0].cpu_p99_s
    lines.append(f"growth of p99 from 1 000 to 100 000 queued: x{growth:.2f}, of its CPU time x{cpu_growth:.2f}")
    return lines, rows


def _paper_line(policy: str) -> tuple[Engine, list[str], list[float]]:
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
    profile = DeviceProfile(
        {
            processor: {
                name: ExpertProfile(name, Performance(slow, slow, 8, 1), Footprint(1), {SSD: 0.06, "host": 0.02})
                for name in classifiers + detectors
            }
            for processor, slow in (("cpu", 0.04), ("gpu", 0.005))
        },
        usage,
    )
    executors = [ExecutorSpec(number, "gpu", "device") for number in range(3)] + [ExecutorSpec(3, "cpu", "host")]
    pools = (PoolSpec("host", RESIDENT * 2, 64), PoolSpec("device", RESIDENT, 64, cache="host"))
    engine = Engine(ExpertGraph(classifiers + detectors, routes), profile, executors, PRESETS[policy], Limits(pools))
    return engine, list(routes), weights


def _next_answer(pending: deque[Effect]) -> Event | None:
    """The answer to the oldest effect that wants one."""
    while pending:
        effect = pending.popleft()
        if isinstance(effect, StartLoad):
            return Loaded(effect.load)
        if isinstance(effect, StartBatch):
            return Finished(effect.batch.id, tuple(Prediction("ok", 1.0) for _ in effect.batch.requests))
    return None
