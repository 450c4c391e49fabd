"""Throughputs for the allocation search: of this box's real engine, or of the same Engine under virtual time.

Guarantees: both run the same sample of requests, drawn by the line's known usage. Arrivals are fast enough
that memories and executors are the limit. A run with an unjudged request is an error that names the experts and images
to leave out of the sample.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import defaultdict
from dataclasses import replace
from itertools import accumulate, cycle
from pathlib import Path
from typing import TYPE_CHECKING

from agent.core.performance import ExecutorSpec, PoolSpec
from agent.deployment.build import AgentOptions
from agent.deployment.deployment import NOTHING, Overrides, planned
from agent.deployment.executors import executors_on
from agent.deployment.memory_split import pool_budgets
from agent.device_profile.records import UsageOrigin
from agent.faults.errors import SampleUnfit
from agent.line_file.usage import component_shares
from experts.errors import ConfigError, ImageError
from profiler.replay.player import experts_of, images_of, player
from profiler.simulation.forecast import forecast, scenario_of
from profiler.workload.traces import TracedArrival

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from agent.config import LineConfig
    from agent.core.performance import PerformanceMatrix
    from agent.device_profile.records import StoredProfile, UsageProfile
    from agent.runtime.machine.box import Box
    from experts.catalog import Catalog
    from profiler.allocation.search import SearchOptions, Throughput
    from profiler.replay.player import Played

SAMPLE_REQUESTS = 1000
SEED = 0
INTERVAL_S = 0.004  # between two requests, as in section 5.1
BUSY_FACTOR = 2.0  # rate of requests over the rate of executing them without any load, at least
NAMED = 3  # experts whose reasons a message gives


def sample_requests(
    config: LineConfig,
    count: int = SAMPLE_REQUESTS,
    images: Mapping[str, Iterable[Path]] | None = None,
    without: Mapping[str, str] = NOTHING,
    usage: UsageProfile | None = None,
) -> tuple[TracedArrival, ...]:
    """A smaller set of requests that represents the line's (section 4.4), in a random order.

    Each component has its share (``drawn_shares``) of the requests, rounded up or down by chance. A request takes the
    component's next image, and no more ``images`` are drawn. ``without``: experts that cannot be served; components
    with them on their routes are left out. Raises ConfigError where no component is left.
    """
    shares = drawn_shares(config, usage, without)
    if not shares:
        reasons = "".join(f"\n  - {name}: {reason}" for name, reason in sorted(without.items())[:NAMED])
        raise ConfigError(f"every route has an expert that cannot be served - nothing can be measured{reasons}")
    rng = random.Random(SEED)
    components, bounds = list(shares), list(accumulate(shares.values()))
    offset = rng.random()
    places = [(number + offset) / count * bounds[-1] for number in range(count)]
    drawn = [components[min(bisect_right(bounds, place), len(components) - 1)] for place in places]
    rng.shuffle(drawn)
    pictures = {name: cycle((images or {}).get(name, ())) for name in shares}
    return tuple(
        TracedArrival(number * INTERVAL_S, component, image=next(pictures[component], None))
        for number, component in enumerate(drawn)
    )


def drawn_shares(
    config: LineConfig, usage: UsageProfile | None = None, without: Mapping[str, str] = NOTHING
) -> dict[str, float]:
    """Share of each component in a sample; ``without`` as for ``sample_requests``.

    Without ``usage``, or with computed usage, shares follow the quantities on the boards. Else the first expert of a
    route gives its usage probability to the route's component. Components with one first expert divide its probability
    by their quantities, or evenly where no board has them. A first expert without a record counts as one more request,
    spread evenly over the routes, and at most as the rarest expert with a record.
    """
    routes, quantities = config.catalog.components, component_shares(config.catalog, config.boards)
    able = [name for name in sorted(routes) if not any(step.expert in without for step in routes[name])]
    if usage is None or usage.origin == UsageOrigin.COMPUTED:
        return {component: quantities[component] for component in able if component in quantities}
    by_first: defaultdict[str, list[str]] = defaultdict(list)
    for component in able:
        by_first[routes[component][0].expert].append(component)
    known = {first: usage.probabilities.get(first, 0.0) for first in by_first}
    unknown = min([1 / (usage.requests + 1) / len(routes), *(share for share in known.values() if share > 0)])
    shares: dict[str, float] = {}
    for first, components in by_first.items():
        parts = {component: quantities.get(component, 0.0) for component in components}
        if not any(parts.values()):
            parts = dict.fromkeys(components, 1.0)
        whole = sum(parts.values())
        shares |= {name: (known[first] or unknown) * part / whole for name, part in parts.items() if part}
    return dict(sorted(shares.items()))


def busy_interval_s(device: PerformanceMatrix, executors: Mapping[str, int]) -> float:
    """Seconds between two requests of a sample: the paper's 4 ms, or less if the box could keep up with that.

    ``executors``: most of each processor that will be tried. Requests come BUSY_FACTOR times as fast as these execute
    maximum batches, without loads and without slowing one another.
    """
    images_per_s = 0.0
    for processor, column in device.experts.items():
        rows = [(device.usage.get(expert, 0.0), row.performance) for expert, row in column.items()]
        image_s = sum(usage * (each.K_s + each.B_s / each.max_batch) for usage, each in rows)
        images_per_s += executors.get(processor, 0) / image_s if image_s > 0 else 0.0
    return min(INTERVAL_S, 1 / (BUSY_FACTOR * images_per_s)) if images_per_s > 0 else INTERVAL_S


def simulated_throughput(
    config: LineConfig,
    box: Box,
    profile: StoredProfile,
    trace: Sequence[TracedArrival],
    without: Mapping[str, str] = NOTHING,
) -> Throughput:
    """Throughput by simulation. Raises ConfigError for a setup that cannot be simulated."""
    scenario = scenario_of(config.catalog.graph, profile, trace)

    def images_per_s(executors: Sequence[ExecutorSpec], pools: Sequence[PoolSpec]) -> float:
        setup = planned(config, box, profile, Overrides(executors, pools), without)
        return forecast(scenario, setup).images_per_s

    return images_per_s


def engine_throughput(config: LineConfig, profile: StoredProfile, trace: Sequence[TracedArrival]) -> Throughput:
    """Throughput of a real agent for each configuration; the caller keeps other agents of the line away.

    Raises SampleUnfit when a request is not judged or an image is broken, AgentCrashed.
    """
    try:
        images = images_of(trace, config.catalog)
    except ImageError as error:
        raise SampleUnfit(f"sample image {error}", {}, {Path(error.image): error.message}) from error
    needed = experts_of(trace, config.catalog)

    def images_per_s(executors: Sequence[ExecutorSpec], pools: Sequence[PoolSpec]) -> float:
        options = AgentOptions(profile=profile, overrides=Overrides(executors, pools))
        with player(config, needed, options, is_strict=False) as stage:
            played = stage.play(trace, images)
        if played.unjudged(trace):
            raise _unfit(config.catalog, trace, played)
        return len(trace) / played.seconds

    return images_per_s


def device_matrix(
    config: LineConfig, box: Box, profile: StoredProfile, without: Mapping[str, str] = NOTHING
) -> PerformanceMatrix:
    """Performance matrix of every profiled processor that the line may use. Raises ConfigError for none."""
    measured = {kind.processor for kind in profile.kinds}
    allowed = [name for name in box.processors if config.executors is None or config.executors.get(name)]
    able = [name for name in allowed if name in measured]
    if not able:
        raise ConfigError(f"the device profile has no times on {', '.join(allowed)} - run `coserve profile` again")
    executors = executors_on(box, able)
    pools = [PoolSpec(pool, budget_bytes, 0) for pool, budget_bytes in pool_budgets(config, box).items()]
    return planned(config, box, profile, Overrides(executors, pools), without).matrix


def busy(
    trace: Sequence[TracedArrival], device: PerformanceMatrix, options: SearchOptions
) -> tuple[TracedArrival, ...]:
    """The trace, played faster where its requests would leave executors idle."""
    most = dict.fromkeys(device.experts, options.most_device_executors) | {"cpu": options.most_cpu_executors}
    span_s = trace[-1].at_s - trace[0].at_s
    busy_s = busy_interval_s(device, most) * (len(trace) - 1)
    factor = busy_s / span_s if span_s > busy_s else 1.0
    return tuple(replace(arrival, at_s=arrival.at_s * factor) for arrival in trace)


def _unfit(catalog: Catalog, trace: Sequence[TracedArrival], played: Played) -> SampleUnfit:
    engine, unjudged = played.after.engine, played.unjudged(trace)
    not_asked = {**engine.on_probation, **engine.quarantined}
    broken: dict[str, str] = {}
    for number in unjudged:
        arrival, outcome = trace[number], played.outcomes[number]
        expert = arrival.expert or catalog.graph.routes[str(arrival.component)][len(outcome.steps)].expert
        shown = "a synthetic image" if arrival.image is None else str(arrival.image)
        reason = str(outcome.reason).removeprefix(f"expert {expert}: ").removeprefix(f"{expert}: ")
        broken.setdefault(expert, not_asked.get(expert, f"on {shown}: {reason}"))
    first = played.unknown_reasons(trace)[0]
    return SampleUnfit(f"{len(unjudged)} of {len(trace)} sample requests were not judged: {first}", broken, {})
