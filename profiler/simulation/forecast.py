"""Forecast of a line on a trace: its Engine under virtual time, counted from the first arrival on.

Guarantees: equal line, profile, trace and seed give equal forecasts. A request runs the same experts under any policy,
memories and order: its passing of each step is drawn once, by the profile's pass rates. The initial placement is
complete before the trace starts and is not counted.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from agent.core.effects import Assigned, Evict, Fail, StartLoad
from agent.core.performance import SSD
from agent.core.request import IMAGE
from experts.document import suggestion
from experts.errors import ConfigError, MemoryExceeded
from experts.expert import NOTHING_FOUND, Prediction
from profiler.simulation.bounds import RequestSteps, Resources
from profiler.simulation.decoders import ImageTimes
from profiler.simulation.simulator import Simulator

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from agent.core.effects import Effect
    from agent.core.engine import EngineSetup
    from agent.core.performance import ExpertProfile
    from agent.device_profile.records import StoredProfile
    from experts.graph import ExpertGraph
    from profiler.simulation.simulator import Change
    from profiler.workload.traces import TracedArrival

ROUNDING = 1e-9  # 0.99 * 100 is 99 requests, not 100
LEAST_PASSES = 6  # of a trace, to see whether a queue grows
LEAST_REQUESTS = 2000  # in all passes: a queue that grows by a hundredth is then longer than batches make it vary
SHARING_PROCESSORS = frozenset({"cuda", "mps"})  # elsewhere the matrix holds the cost of several executors


@dataclass(frozen=True, slots=True)
class Scenario:
    """Demand on a line, and speeds of its links and processors, without memories and policy.

    ``steps``: the experts of each request of the trace, in order. ``link_bytes_per_s``: by source. ``images``: decoding
    times; None where not measured: images are then ready on arrival.
    """

    graph: ExpertGraph
    trace: tuple[TracedArrival, ...]
    steps: tuple[tuple[str, ...], ...]
    link_bytes_per_s: Mapping[str, float]
    speedups: Mapping[str, tuple[float, ...]]
    images: ImageTimes | None = None

    @property
    def requests(self) -> list[RequestSteps]:
        return [
            RequestSteps(arrival.at_s, experts, arrival.work)
            for arrival, experts in zip(self.trace, self.steps, strict=True)
        ]

    @property
    def images_asked(self) -> int:
        """Requests that are images; the others are texts."""
        return sum(arrival.work is IMAGE for arrival in self.trace)

    def with_texts(self, images_per_s: float) -> float:
        """Rate of all requests, texts included, at this rate of images."""
        return images_per_s * len(self.trace) / self.images_asked

    @property
    def experts(self) -> set[str]:
        return {expert for experts in self.steps for expert in experts}

    @property
    def offered_images_per_s(self) -> float:
        span_s = self.trace[-1].at_s - self.trace[0].at_s
        return (len(self.trace) - 1) / span_s if span_s > 0.0 else math.inf

    def repeated(self, passes: int, images_per_s: float) -> Scenario:
        """The requests ``passes`` times over, at this mean rate."""
        start_s, factor = self.trace[0].at_s, min(self.offered_images_per_s / images_per_s, 1.0)
        offsets_s = [(arrival.at_s - start_s) * factor for arrival in self.trace]
        trace = tuple(
            replace(arrival, at_s=len(self.trace) * number / images_per_s + offset_s)
            for number in range(passes)
            for arrival, offset_s in zip(self.trace, offsets_s, strict=True)
        )
        return replace(self, trace=trace, steps=self.steps * passes)

    @property
    def ssd_bytes_per_s(self) -> float:
        return self.link_bytes_per_s[SSD]

    def resources(self, setup: EngineSetup) -> Resources:
        return Resources(setup.executors, setup.pools, setup.matrix, self.ssd_bytes_per_s, self.speedups)

    def predict(self, request: int, expert: str) -> Prediction:
        """Prediction that takes a request along the steps drawn for it, and no further."""
        component, experts = self.trace[request].component, self.steps[request]
        if component is None:
            return Prediction("", 1.0)
        route = self.graph.routes[component]
        place = experts.index(expert)
        if place == len(route):
            return Prediction("", 1.0)  # the expert that a router chose ends the route
        if then := route[place].then:
            return Prediction(next(label for label, chosen in then.items() if chosen == experts[place + 1]), 1.0)
        if expert == experts[-1] and len(experts) < len(route):
            return Prediction(NOTHING_FOUND, 0.0)
        return Prediction(min(route[place].passing), 1.0)


@dataclass(frozen=True, slots=True)
class LineForecast:
    """Forecast of a trace, from its start to its last outcome. ``loads``: by path source_pool, such as ssd_host.

    ``resident_at_start``: copies in any memory at the first arrival. ``failed``: requests that no expert answered.
    """

    seconds: float
    waits_s: tuple[float, ...]
    switches: int
    loads: Mapping[str, int]
    evictions: int
    bytes_read: int
    resident_at_start: frozenset[str]
    failed: int = 0

    @property
    def images_per_s(self) -> float:
        return len(self.waits_s) / self.seconds if self.seconds > 0.0 else 0.0

    def loads_to(self, pools: Collection[str]) -> int:
        return sum(count for path, count in self.loads.items() if path.partition("_")[2] in pools)


def quantile_s(waits_s: Sequence[float], quantile: float) -> float:
    """Wait that this share of the waits, at least one, does not exceed (nearest rank)."""
    ordered = sorted(waits_s)
    return ordered[max(math.ceil(quantile * len(ordered) - ROUNDING), 1) - 1]


def scenario_of(graph: ExpertGraph, profile: StoredProfile, trace: Sequence[TracedArrival], seed: int = 0) -> Scenario:
    """Raises ConfigError for an empty trace, unknown names in a trace, and a profile without the speed of its SSD."""
    if not trace:
        raise ConfigError("an empty queue: the trace holds no request - there is nothing to plan")
    links = profile.link_bytes_per_s
    if links.get(SSD, 0.0) <= 0.0:
        raise ConfigError("the device profile has no speed of its SSD - run `coserve profile` for this line again")
    steps = draw_steps(trace, graph, profile.usage.pass_rates, seed)
    return Scenario(graph, tuple(trace), steps, links, sharing_speedups(profile), image_times(profile))


def image_times(profile: StoredProfile) -> ImageTimes | None:
    image_s = {each.expert: each.image_s for each in profile.decodings}
    return ImageTimes(profile.box.cores, image_s) if image_s else None


def sharing_speedups(profile: StoredProfile) -> dict[str, tuple[float, ...]]:
    """Speedups of processors whose executors slow one another down; a CPU's are in the matrix."""
    return {name: each for name, each in profile.speedups.items() if name in SHARING_PROCESSORS and each}


def draw_steps(
    trace: Sequence[TracedArrival], graph: ExpertGraph, pass_rates: Mapping[str, float], seed: int
) -> tuple[tuple[str, ...], ...]:
    """Experts that each request runs: each step passes at its rate, else at 1; a router draws a label evenly.

    Raises ConfigError naming every component and expert that the line does not have.
    """
    strangers = [*_strangers(trace, graph)]
    if strangers:
        raise ConfigError.of([ConfigError(text) for text in dict.fromkeys(strangers)])
    drawn: list[tuple[str, ...]] = []
    for number, arrival in enumerate(trace):
        if arrival.component is None:
            drawn.append((arrival.expert or "",))
            continue
        rng = random.Random(f"{seed} {number}")
        experts: list[str] = []
        for step in graph.routes[arrival.component]:
            experts.append(step.expert)
            if step.then:
                experts.append(step.then[rng.choice(sorted(step.then))])
            elif rng.random() >= pass_rates.get(step.expert, 1.0):
                break
        drawn.append(tuple(experts))
    return tuple(drawn)


def forecast(scenario: Scenario, setup: EngineSetup, changes: Sequence[Change] = ()) -> LineForecast:
    """``changes`` as of ``Simulator.run``. Raises ConfigError when a needed expert cannot fit or run, or a text never
    has room."""
    _refuse_unable(scenario, setup)
    _refuse_too_long(scenario, setup)
    try:
        simulator = Simulator(setup, scenario.predict, scenario.link_bytes_per_s, scenario.speedups, scenario.images)
    except MemoryExceeded as error:
        raise ConfigError(f"{error} - plan with more memory, or with a smaller model") from error
    simulation = simulator.run(scenario.trace, changes=changes)
    effects = [effect for _, effect in simulation.effects]
    start = next(at for at, effect in enumerate(effects) if isinstance(effect, Assigned | Fail))
    loads = [effect for effect in effects[start:] if isinstance(effect, StartLoad)]
    return LineForecast(
        seconds=max(simulation.finished_s.values()),
        waits_s=simulation.waits_s(scenario.trace),
        switches=simulator.engine.statistics().switches,  # before the trace no request waits
        loads=dict(sorted(Counter(f"{load.source}_{load.pool}" for load in loads).items())),
        evictions=sum(isinstance(effect, Evict) for effect in effects[start:]),
        bytes_read=sum(load.size_bytes for load in loads if load.source == SSD),
        resident_at_start=resident_after(effects[:start]),
        failed=sum(isinstance(effect, Fail) for effect in effects),
    )


def reaches(scenario: Scenario, setup: EngineSetup, played: LineForecast, images_per_s: float) -> bool:
    """True if the line keeps up with that many images per second. ``played``: the forecast of this scenario.

    The trace is repeated at that rate. The line falls behind if its queue grows: if more requests are open after
    each of the last third of all passes than after any of the first third, one aside. The wait of the last images is no
    evidence, as it contains batches and loads.
    """
    requests = len(scenario.trace)
    if not played.loads and played.images_per_s >= images_per_s:
        return True  # in time, and the next pass starts with the same experts in memory
    passes = max(LEAST_PASSES, math.ceil(LEAST_REQUESTS / requests))
    repeated = scenario.repeated(passes, images_per_s)
    waits_s = forecast(repeated, setup).waits_s
    ends_s = sorted(arrival.at_s + wait_s for arrival, wait_s in zip(repeated.trace, waits_s, strict=True))
    came = [requests * (each + 1) for each in range(passes)]
    still_open = [count - bisect_right(ends_s, count / images_per_s * (1.0 + ROUNDING)) for count in came]
    third = passes // 3
    return min(still_open[-third:]) <= max(still_open[:third]) + 1


def with_ssd(scenario: Scenario, setup: EngineSetup, bytes_per_s: float) -> tuple[Scenario, EngineSetup]:
    """Scenario and setup with another SSD speed; the part of a load's time apart from its read stays."""
    links = {**scenario.link_bytes_per_s, SSD: bytes_per_s}
    gain_s_per_byte = 1.0 / bytes_per_s - 1.0 / scenario.ssd_bytes_per_s

    def at_speed(_processor: str, _expert: str, row: ExpertProfile) -> ExpertProfile:
        load_s = max(row.load_s[SSD] + row.footprint.own_bytes * gain_s_per_byte, 0.0)
        return replace(row, load_s={**row.load_s, SSD: load_s})

    return replace(scenario, link_bytes_per_s=links), replace(setup, matrix=setup.matrix.changed(at_speed))


def with_expert_bytes(setup: EngineSetup, expert_bytes: Mapping[str, int]) -> EngineSetup:
    pools = tuple(replace(pool, expert_bytes=expert_bytes.get(pool.name, pool.expert_bytes)) for pool in setup.pools)
    return replace(setup, limits=replace(setup.limits, pools=pools))


def _strangers(trace: Iterable[TracedArrival], graph: ExpertGraph) -> Iterable[str]:
    for arrival in trace:
        if arrival.component is not None and arrival.component not in graph.routes:
            hint = suggestion(arrival.component, graph.routes)
            yield f"the trace asks for component {arrival.component!r}, which has no route on this line - {hint}"
        elif arrival.component is None and arrival.expert not in graph.experts:
            hint = suggestion(str(arrival.expert), graph.experts)
            yield f"the trace asks for expert {arrival.expert!r}, which this line does not have - {hint}"


def _refuse_unable(scenario: Scenario, setup: EngineSetup) -> None:
    processors = dict.fromkeys(spec.processor for spec in setup.executors)
    able = {expert for processor in processors for expert in setup.matrix.experts.get(processor, {})}
    unable = sorted(scenario.experts - able)
    if unable:
        there = ", ".join(processors) or "none"
        raise ConfigError.of(
            [
                ConfigError(f"no executor can run {expert}, executors are on: {there} - add one, or profile it there")
                for expert in unable
            ]
        )


def _refuse_too_long(scenario: Scenario, setup: EngineSetup) -> None:
    """Raises ConfigError for a text without room for its keys and values in a memory that its experts run from."""
    leases = {pool.name: pool.lease_bytes for pool in setup.pools}
    longest: dict[str, int] = {}
    for arrival, experts in zip(scenario.trace, scenario.steps, strict=True):
        if arrival.work is not IMAGE:
            for expert in experts:
                longest[expert] = max(longest.get(expert, 0), arrival.work.most)
    problems = []
    for expert, tokens in sorted(longest.items()):
        rooms = [
            (row.performance.lease_bytes, leases[spec.pool])
            for spec in setup.executors
            if (row := setup.matrix.experts.get(spec.processor, {}).get(expert)) is not None
        ]
        if not any(token_bytes * tokens <= room_bytes for token_bytes, room_bytes in rooms):
            fit = max(room_bytes // token_bytes for token_bytes, room_bytes in rooms)
            problems.append(
                f"the trace has a text of {tokens} tokens for {expert}, and texts.kv has room for {fit} - raise it, or "
                "shorten the text"
            )
    if problems:
        raise ConfigError.of([ConfigError(problem) for problem in problems])


def resident_after(effects: Iterable[Effect]) -> frozenset[str]:
    """Copies in any memory after these effects, from empty memories."""
    held: set[tuple[str, str]] = set()
    for effect in effects:
        if isinstance(effect, StartLoad):
            held.add((effect.pool, effect.copy))
        elif isinstance(effect, Evict):
            held.discard((effect.pool, effect.copy))
    return frozenset(copy for _, copy in held)
