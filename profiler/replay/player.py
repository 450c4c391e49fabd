"""Plays a trace on the real engine and measures it.

Guarantees: the clock starts after the initial placement, and all counts are differences to that time. Packed files are
verified before, as in a long-running agent, so that no load is hashed during the run. Every request has its outcome, or
the error that ended the agent is raised. Images are decoded before the clock starts.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from agent.core import events
from agent.core.effects import Evict, StartLoad
from agent.deployment.build import AS_SERVED, agent_with_requests
from experts.errors import ConfigError, ExpertError
from experts.expert import Verdict
from experts.images import read_image
from profiler.replay.host_load import CoresInUse, forget_peak_rss, peak_resident_bytes
from profiler.workload.generated_line import synthetic_pixels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from agent.config import LineConfig
    from agent.core.effects import Effect
    from agent.core.events import Event
    from agent.core.request import Outcome
    from agent.deployment.build import Agent, AgentOptions
    from agent.runtime.executor import RequestSource
    from agent.runtime.loop import Decider, LoopStatistics
    from agent.runtime.requests import Requests
    from experts.catalog import Catalog
    from profiler.workload.traces import TracedArrival

    Progress = Callable[[str, int, int], None]

PLACEMENT_LIMIT_S = 900.0  # 40 GB from a SATA drive take less
SETTLE_LIMIT_S = 60.0  # for loads in flight at the last outcome
VERIFIERS = 2


def experts_of(trace: Iterable[TracedArrival], catalog: Catalog) -> set[str]:
    """Experts that a trace may need: named ones, and all on the routes of its components."""
    arrivals = tuple(trace)
    named = {arrival.expert for arrival in arrivals if arrival.expert is not None}
    components = {arrival.component for arrival in arrivals if arrival.component is not None}
    return named | {step.expert for component in components for step in catalog.graph.routes[component]}


def images_of(trace: Sequence[TracedArrival], catalog: Catalog) -> tuple[NDArray[np.uint8], ...]:
    """Decoded image of every arrival: its own, or a synthetic one of its first expert's input size.

    Each file is decoded once. Raises ImageError.
    """
    decoded: dict[Path | str, NDArray[np.uint8]] = {}  # by file, or by expert
    images = []
    for arrival in trace:
        key = arrival.image or arrival.expert or catalog.graph.routes[str(arrival.component)][0].expert
        if key not in decoded:
            if isinstance(key, str):
                wanted, chance = catalog.experts[key].pixels, np.random.default_rng(list(key.encode()))
                decoded[key] = synthetic_pixels(chance, wanted.height, wanted.width)
            else:
                decoded[key] = read_image(key, str(key))
        images.append(decoded[key])
    return tuple(images)


@dataclass(frozen=True, slots=True)
class Decision:
    """Call of the Engine. ``cpu_s``: processor time of the deciding thread; in the rest of ``seconds`` other threads
    had the core."""

    event: type
    moves_experts: bool  # a load was started, or a copy evicted
    seconds: float
    cpu_s: float

    @property
    def is_expert_management(self) -> bool:
        """True where the time counts for moving experts (CoServe, section 4.3), not for scheduling requests (4.2)."""
        return self.moves_experts or self.event in (events.Loaded, events.LoadFailed, events.Quarantined)


class TimedDecider:
    """Decider that times another one. ``decisions`` grows on the loop's thread."""

    def __init__(self, decider: Decider) -> None:
        self._decider = decider
        self.decisions: list[Decision] = []
        self.next_wakeup_s = decider.next_wakeup_s
        self.statistics = decider.statistics
        self.check_invariants = decider.check_invariants

    def handle(self, event: Event, now: float) -> list[Effect]:
        started, cpu_started = time.perf_counter(), time.thread_time()
        effects = self._decider.handle(event, now)
        cpu_s, seconds = time.thread_time() - cpu_started, time.perf_counter() - started
        moves = any(isinstance(effect, StartLoad | Evict) for effect in effects)
        self.decisions.append(Decision(type(event), moves, seconds, cpu_s))
        return effects


@dataclass(frozen=True, slots=True)
class Played:
    """Run from the first arrival to the last outcome. Requests are in the trace's order."""

    seconds: float
    outcomes: tuple[Outcome, ...]
    waits_s: tuple[float, ...]  # from arrival to outcome
    decisions: tuple[Decision, ...]
    before: LoopStatistics
    after: LoopStatistics
    peak_rss_bytes: int
    others_fraction: float  # of all cores, used by other processes meanwhile

    @property
    def labels(self) -> tuple[str | None, ...]:
        return tuple(outcome.label for outcome in self.outcomes)

    @property
    def resident_at_start(self) -> frozenset[str]:
        return frozenset(copy for pool in self.before.engine.pools for copy in pool.resident)

    def counted(self, count: Callable[[LoopStatistics], int]) -> int:
        return count(self.after) - count(self.before)

    def loads(self) -> dict[str, int]:
        before, after = self.before.engine.loads, self.after.engine.loads
        return {path: count - before.get(path, 0) for path, count in after.items()}

    def unjudged(self, trace: Sequence[TracedArrival]) -> tuple[int, ...]:
        """Numbers from 0 of unjudged requests. A request that names an expert is judged when that expert answered."""
        return tuple(
            number
            for number, (outcome, arrival) in enumerate(zip(self.outcomes, trace, strict=True))
            if outcome.verdict is Verdict.UNKNOWN and (arrival.expert is None or outcome.label is None)
        )

    def unknown_reasons(self, trace: Sequence[TracedArrival]) -> tuple[str, ...]:
        return tuple(self.outcomes[number].reason or "no reason given" for number in self.unjudged(trace))


@dataclass(slots=True)
class Player:
    agent: Agent
    timer: TimedDecider
    _requests: Requests

    def play(self, trace: Sequence[TracedArrival], images: Sequence[RequestSource]) -> Played:
        """Submit every request at its time and wait for every outcome. Raises AgentCrashed."""
        before = self.agent.loop.statistics()
        decided = len(self.timer.decisions)
        forget_peak_rss()
        cores = CoresInUse()
        started_s = time.monotonic()
        for arrival, image in zip(trace, images, strict=True):
            time.sleep(max(started_s + arrival.at_s - time.monotonic(), 0.0))
            self._requests.submit(image, component=arrival.component, expert=arrival.expert)
        ended = self._requests.collect()
        peak_rss_bytes, others_fraction = peak_resident_bytes(), cores.others_fraction()
        decisions = tuple(self.timer.decisions[decided:])
        self.agent.loop.wait_until_idle(SETTLE_LIMIT_S)
        return Played(
            seconds=max(end.at_s for end in ended) - started_s,
            outcomes=tuple(end.outcome for end in ended),
            waits_s=tuple(end.at_s - started_s - arrival.at_s for end, arrival in zip(ended, trace, strict=True)),
            decisions=decisions,
            before=before,
            after=self.agent.loop.statistics(),
            peak_rss_bytes=peak_rss_bytes,
            others_fraction=others_fraction,
        )


@contextmanager
def player(
    config: LineConfig,
    experts: Iterable[str],
    options: AgentOptions = AS_SERVED,
    progress: Progress = lambda *_: None,
    *,
    is_strict: bool = True,
    requests: Requests | None = None,
) -> Iterator[Player]:
    """Context: an agent after its initial placement, stopped at the end.

    ``experts``: those that traces need. ``is_strict``: raises ConfigError naming each expert that cannot be served, and
    WeightsError for a packed file that is damaged or gone; else their requests end UNKNOWN. ``requests``: another path
    of requests into the agent and back.
    """
    timers: list[TimedDecider] = []

    def timed(engine: Decider) -> Decider:
        timers.append(TimedDecider(options.decider(engine)))
        return timers[0]

    needed = sorted(set(experts))
    with agent_with_requests(config, progress, replace(options, decider=timed), requests) as (agent, requests):
        if is_strict:
            _refuse_broken(config, needed, agent.setup.broken)
        _verify(agent, needed, is_strict=is_strict)
        agent.start()
        if not agent.loop.wait_until_idle(PLACEMENT_LIMIT_S):
            raise ConfigError(f"{config.document.file}: experts were not placed within {PLACEMENT_LIMIT_S:.0f} s")
        if is_strict:
            engine = agent.loop.statistics().engine
            _refuse_broken(config, needed, {**engine.on_probation, **engine.quarantined})
        yield Player(agent, timers[0], requests)


def _verify(agent: Agent, experts: Sequence[str], *, is_strict: bool) -> None:
    """Hash the packed files of these experts, as an agent does at their first load.

    Unless ``is_strict``, a damaged file is left to its load, which fails for the same reason.
    """
    segments = {
        segment.sha256: (segment, packed.expert)
        for packed in agent.packed.values()
        if packed.expert in experts
        for segment in packed.segments
    }
    with ThreadPoolExecutor(VERIFIERS, thread_name_prefix="verify") as threads:
        for done in [threads.submit(agent.segments.verify, *each) for each in segments.values()]:
            error = done.exception()
            if error is not None and (is_strict or not isinstance(error, ExpertError)):
                raise error


def _refuse_broken(config: LineConfig, needed: Sequence[str], broken: Mapping[str, str]) -> None:
    problems = [
        config.document.error(f"cannot be served, and the trace needs it: {broken[expert]}", "experts", expert)
        for expert in needed
        if expert in broken
    ]
    if problems:
        raise ConfigError.of(problems)
