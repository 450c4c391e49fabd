"""Bounds that no schedule can beat: fewest switches, fewest loads in first-come-first-served order, least time.

Pure. Each bound holds for any scheduler of the same requests, executors and memories, also for one that knows the
future; each function gives the proof. Loads are counted after the start. A policy that loads while its executors work
has fewer switches (loads that a request waited for), never fewer loads.

Pinned experts, workspaces, the order of a route's steps and the limits on loads in flight are left out. Each of them
only removes choices, so the bounds hold without them.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING

from agent.core.request import IMAGE, Work

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from agent.core.performance import ExecutorSpec, ExpertProfile, Footprint, Performance, PerformanceMatrix, PoolSpec

NO_TOKENS: Mapping[str, Work] = MappingProxyType({})
SIZE_CLASS = Fraction(11, 10)  # experts whose bytes differ by less than this factor are of one class of sizes
BURSTS = 16  # longest pauses of a trace after which the remaining work is weighed: each costs a pass over it


@dataclass(frozen=True, slots=True)
class RequestSteps:
    """Request: arrival in seconds since the start, experts in order, and tokens for experts that count in tokens."""

    at_s: float
    experts: tuple[str, ...]
    work: Work = IMAGE


@dataclass(frozen=True, slots=True)
class Resources:
    """``speedups`` by processor, as ``StoredProfile.speedups``; none: independent executors.

    ``profile`` has a row for every expert of the requests on at least one executor's processor.
    """

    executors: tuple[ExecutorSpec, ...]
    pools: tuple[PoolSpec, ...]
    profile: PerformanceMatrix
    ssd_bytes_per_s: float
    speedups: Mapping[str, tuple[float, ...]]

    @property
    def processors(self) -> Counter[str]:
        return Counter(spec.processor for spec in self.executors)

    def performances(self, expert: str) -> dict[str, Performance]:
        """Performance by processor that has an executor and runs the expert."""
        columns = {name: self.profile.experts.get(name, {}) for name in self.processors}
        return {name: column[expert].performance for name, column in columns.items() if expert in column}

    def rows(self, expert: str, pool: str | None = None) -> list[ExpertProfile]:
        used = dict.fromkeys(spec.processor for spec in self.executors if pool in (None, spec.pool))
        columns = (self.profile.experts[processor] for processor in used)
        return [column[expert] for column in columns if expert in column]


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of a trace. ``switches``: experts to be loaded after the start.

    ``fcfs_switches``: the same when requests begin in the order of arrival. ``compute_s``, ``io_s``, ``arrivals_s``:
    least time for the work, for reading what cannot be there at the start, and for the last arrivals.
    """

    switches: int
    fcfs_switches: int
    compute_s: float
    io_s: float
    arrivals_s: float

    @property
    def seconds(self) -> float:
        """The roofline: the least time from the first arrival to the last outcome."""
        return max(self.compute_s, self.io_s, self.arrivals_s)


def bounds(requests: Sequence[RequestSteps], resources: Resources) -> Bounds:
    """Computes all bounds, for requests in the order of arrival. Memories begin with the best contents.

    First come, first served fixes the order of first steps alone: a further step queues behind all requests that have
    come by then. First steps are a part of any such order. Serving the whole order serves that part with no more loads,
    so their bound holds for the whole.
    """
    counts = Counter(expert for request in requests for expert in request.experts)
    switches = fewest_switches(counts, resources)
    first_uses = [expert for request in requests for expert in request.experts[:1]]
    return Bounds(
        switches=switches,
        fcfs_switches=max(switches, fewest_fcfs_switches(first_uses, resources)),
        compute_s=compute_s(counts, resources, tokens_of(requests)),
        io_s=unread_bytes(counts, resources) / resources.ssd_bytes_per_s,
        arrivals_s=arrivals_s(requests, resources),
    )


def fewest_switches(experts: Collection[str], resources: Resources) -> int:
    """Number of these experts that cannot be in memory at the start: each costs at least one switch.

    Proof. Let S be the copies that a memory of C bytes holds at the start. A part shared by h of the copies that may
    be wanted there is charged to each of them with its size over h. The charges of S are then its own bytes and, for
    each part, no more than its size: at most C in all. So the experts of the smallest charges, up to a sum of C, are
    the most that can be there: a larger one in place of a smaller one makes no room. With several memories the sum of
    these counts is one limit, and the count for one memory as large as all together is another: both hold. A needed
    expert that is in no memory has to be loaded once, in any order. QED.

    Exact for one memory without shared parts; never more than any schedule's loads.
    """
    by_pool = _bytes_by_pool(experts, resources)
    capacities = {pool.name: pool.expert_bytes for pool in resources.pools}
    apart = sum(_most_that_fit(sizes.values(), capacities[pool]) for pool, sizes in by_pool.items())
    together = _most_that_fit(_least_bytes(by_pool).values(), sum(capacities[pool] for pool in by_pool))
    return max(len(experts) - min(apart, together), 0)


def fewest_fcfs_switches(uses: Sequence[str], resources: Resources) -> int:
    """Fewest loads that any rule of eviction needs when experts are used in exactly this order.

    Belady's MIN (1966) evicts the expert that is used again last, and is exact for experts of one size. The best start
    saves as many loads as there are places. MIN fills its places from an empty memory without an eviction. A start that
    saved more could be loaded into an empty memory, one by one, for fewer loads than MIN's.

    With mixed sizes the least number of loads is NP-hard. The bound is the larger of two. One adds up classes of
    experts of about one size, each with all the memory and places for its smallest member. The other takes all experts
    as one class. Both hold: a schedule's loads are the sum of its loads of each class, and a class's resident experts
    fit into that many places. Shared parts count as in ``fewest_switches``. Several memories add up their places.
    """
    by_pool = _bytes_by_pool(set(uses), resources)
    capacities = {pool.name: pool.expert_bytes for pool in resources.pools}
    partitions = ([set(uses)], _size_classes(_least_bytes(by_pool)))
    totals = [
        sum(
            _loads_from_best_start([use for use in uses if use in members], _places(members, by_pool, capacities))
            for members in partition
        )
        for partition in partitions
    ]
    return max(totals)


def belady_loads(uses: Iterable[str], places: int) -> int:
    """Loads of MIN from an empty memory with ``places`` for experts, at least one."""
    if places < 1:
        raise ValueError(f"a memory with {places} places runs nothing")
    order = list(uses)
    following = _next_uses(order)
    next_use: dict[str, int] = {}  # by resident expert
    furthest: list[tuple[int, str]] = []  # next_use as a heap, with stale entries
    loads = 0
    for at, expert in enumerate(order):
        if expert not in next_use:
            loads += 1
            while len(next_use) >= places:
                negative_at, victim = heapq.heappop(furthest)
                if next_use.get(victim) == -negative_at:
                    del next_use[victim]
        next_use[expert] = following[at]
        heapq.heappush(furthest, (-following[at], expert))
    return loads


def unread_bytes(experts: Collection[str], resources: Resources, resident: Collection[str] | None = None) -> int:
    """Least bytes of these experts that have to be read from the SSD after the start.

    ``resident``: copies in any memory at the start; None: the best ones, which fill all memories. An expert counts with
    the smallest of its copies, a shared part once and only where every copy of an expert needs it.
    """
    own_bytes = 0
    parts: dict[str, int] = {}
    held: set[str] = set()
    for expert in experts:
        rows = resources.rows(expert)
        there = [row for row in rows if resident is not None and row.copy in resident]
        held.update(part.id for row in there for part in row.footprint.shared)
        if not there:
            own_bytes += min(row.footprint.own_bytes for row in rows)
            common = set.intersection(*(set(row.footprint.shared) for row in rows))
            parts |= {part.id: part.size_bytes for part in common}
    needed_bytes = own_bytes + sum(size for part, size in parts.items() if part not in held)
    there_bytes = sum(pool.expert_bytes for pool in resources.pools) if resident is None else 0
    return max(needed_bytes - there_bytes, 0)


def tokens_of(requests: Iterable[RequestSteps]) -> dict[str, Work]:
    """Tokens to read and to write for these requests, by expert that counts in tokens."""
    totals: dict[str, Work] = {}
    for request in requests:
        if request.work is not IMAGE:
            for expert in request.experts:
                sum_ = totals.get(expert, IMAGE)
                totals[expert] = Work(sum_.prompt + request.work.prompt, sum_.output + request.work.output)
    return totals


def compute_s(counts: Mapping[str, int], resources: Resources, tokens: Mapping[str, Work] = NO_TOKENS) -> float:
    """Least time in which the executors can run these experts so often, with every expert resident from the start.

    ``tokens``: read and written for that, by expert.

    n images of an expert on one processor take at least ``K_s * n + B_s * ceil(n / max_batch)`` (CoServe, section 4.2).
    Give every executor of processor p the weight y_p, all weights together 1. The time is no less than the weighted sum
    of all work, which is no less than the sum of each expert's work where it weighs least. Any weights give a bound.
    Weights under which one kind of experts weighs the same everywhere are tried; for linear work on two processors the
    best weights are among them. Processors with ``speedups`` count as the executors that they are worth.
    """
    strengths = {name: _strength(name, count, resources) for name, count in resources.processors.items()}
    performances = {expert: resources.performances(expert) for expert in counts}
    return max(
        (
            sum(
                _least_work_s(counts[expert], performances[expert], weights)
                + _least_tokens_s(tokens.get(expert, IMAGE), performances[expert], weights)
                for expert in counts
            )
            for weights in _weightings(list(performances.values()), strengths)
        ),
        default=0.0,
    )


def arrivals_s(requests: Sequence[RequestSteps], resources: Resources) -> float:
    """Earliest end of the last request, as no request starts before it arrives.

    The larger of two bounds: each request's own steps, one after another, on the fastest processors; and the work of
    all requests after each of the trace's BURSTS longest pauses.
    """
    if not requests:
        return 0.0
    ordered = sorted(requests, key=lambda request: request.at_s)
    alone_s = {
        (expert, request.work): _alone_s(expert, resources, request.work)
        for request in ordered
        for expert in request.experts
    }
    chains_s = (request.at_s + sum(alone_s[expert, request.work] for expert in request.experts) for request in ordered)
    pauses_s = [later.at_s - earlier.at_s for earlier, later in pairwise(ordered)]
    moments = [0, *heapq.nlargest(BURSTS, range(1, len(ordered)), key=lambda start: pauses_s[start - 1])]
    suffixes_s = (
        ordered[start].at_s
        + compute_s(
            Counter(expert for request in ordered[start:] for expert in request.experts),
            resources,
            tokens_of(ordered[start:]),
        )
        for start in moments
    )
    return max((*chains_s, *suffixes_s))


# -- memories --


def _bytes_by_pool(experts: Collection[str], resources: Resources) -> dict[str, dict[str, Fraction]]:
    """Each expert's charge in each memory that it can run from; see ``fewest_switches``."""
    by_pool = {}
    for pool in dict.fromkeys(spec.pool for spec in resources.executors):
        rows = {expert: resources.rows(expert, pool) for expert in experts}
        copies = {row.copy: row.footprint for listed in rows.values() for row in listed}
        holders = Counter(part.id for footprint in copies.values() for part in footprint.shared)
        by_pool[pool] = {
            expert: min(_charge(row.footprint, holders) for row in listed) for expert, listed in rows.items() if listed
        }
    return by_pool


def _charge(footprint: Footprint, holders: Mapping[str, int]) -> Fraction:
    return footprint.own_bytes + sum(
        (Fraction(part.size_bytes, holders[part.id]) for part in footprint.shared), Fraction()
    )


def _least_bytes(by_pool: Mapping[str, Mapping[str, Fraction]]) -> dict[str, Fraction]:
    """Each expert's charge in its cheapest memory."""
    least: dict[str, Fraction] = {}
    for sizes in by_pool.values():
        for expert, size in sizes.items():
            least[expert] = min(size, least.get(expert, size))
    return least


def _most_that_fit(sizes: Iterable[Fraction], capacity_bytes: int) -> int:
    return sum(total <= capacity_bytes for total in accumulate(sorted(sizes)))


def _size_classes(sizes: Mapping[str, Fraction]) -> list[set[str]]:
    classes: list[set[str]] = []
    smallest = Fraction(0)
    for expert in sorted(sizes, key=lambda name: (sizes[name], name)):
        if not classes or sizes[expert] > SIZE_CLASS * smallest:
            classes.append(set())
            smallest = sizes[expert]
        classes[-1].add(expert)
    return classes


def _places(
    members: Collection[str], by_pool: Mapping[str, Mapping[str, Fraction]], capacities: Mapping[str, int]
) -> int:
    """Most experts that all memories together can hold, all taken as small as the smallest."""
    places = 0
    for pool, sizes in by_pool.items():
        smallest = min((sizes[expert] for expert in members if expert in sizes), default=None)
        if smallest is not None:
            places += int(capacities[pool] // smallest)
    return max(places, 1)


def _loads_from_best_start(uses: Sequence[str], places: int) -> int:
    return belady_loads(uses, places) - min(places, len(set(uses)))


def _next_uses(order: Sequence[str]) -> list[int]:
    """Position of the expert's next use, for each use; the order's length for a last use."""
    following = [len(order)] * len(order)
    seen: dict[str, int] = {}
    for at in range(len(order) - 1, -1, -1):
        following[at] = seen.get(order[at], len(order))
        seen[order[at]] = at
    return following


# -- time --


def _strength(processor: str, executors: int, resources: Resources) -> float:
    """Executors at full speed that these are worth together, at most."""
    speedups = resources.speedups.get(processor)
    return max(speedups[:executors]) if speedups else float(executors)


def _weightings(
    performances: Sequence[Mapping[str, Performance]], strengths: Mapping[str, float]
) -> list[dict[str, float]]:
    """Weights of one executor of each processor, such that all executors together weigh 1."""
    distinct = {tuple(sorted((name, _per_image_s(each)) for name, each in rows.items())) for rows in performances}
    weightings = []
    for costs in sorted(distinct):
        if any(cost_s <= 0.0 for _, cost_s in costs):
            continue  # work that takes no time bounds none
        total = sum(strengths[name] / cost_s for name, cost_s in costs)
        weightings.append({name: 1.0 / (cost_s * total) for name, cost_s in costs})
    return weightings


def _per_image_s(performance: Performance) -> float:
    """Seconds of an image in the largest batch, or of a token read and one written."""
    if performance.runs_in_quanta:
        return performance.K_prompt_s + performance.K_output_s
    return performance.latency_s(performance.max_batch) / performance.max_batch


def _least_tokens_s(tokens: Work, performances: Mapping[str, Performance], weights: Mapping[str, float]) -> float:
    """Weighted seconds of these tokens, each on its cheapest processor."""
    if tokens is IMAGE:
        return 0.0
    read_s = min(each.K_prompt_s * weights.get(name, 0.0) for name, each in performances.items())
    written_s = min(each.K_output_s * weights.get(name, 0.0) for name, each in performances.items())
    return tokens.prompt * read_s + tokens.output * written_s


def _least_work_s(count: int, performances: Mapping[str, Performance], weights: Mapping[str, float]) -> float:
    """Weighted seconds of ``count`` images, shared out over the processors in the way that weighs least."""
    least, *others = [_weighed_s(count, each, weights.get(name, 0.0)) for name, each in performances.items()]
    for work in others[:-1]:
        least = [min(least[n - m] + work[m] for m in range(n + 1)) for n in range(count + 1)]
    return min(least[count - m] + others[-1][m] for m in range(count + 1)) if others else least[count]


def _weighed_s(count: int, performance: Performance, weight: float) -> list[float]:
    """Weighted seconds of 0 to ``count`` images, in the largest batches."""
    batches = [-(-number // performance.max_batch) for number in range(count + 1)]
    return [weight * (performance.K_s * number + performance.B_s * batches[number]) for number in range(count + 1)]


def _alone_s(expert: str, resources: Resources, work: Work) -> float:
    counts = resources.processors
    return min(
        (performance.latency_s(1) + performance.tokens_s(work)) / _pace(counts[name], resources.speedups.get(name))
        for name, performance in resources.performances(expert).items()
    )


def _pace(executors: int, speedups: Sequence[float] | None) -> float:
    """Highest pace of one among so many executors, against one alone."""
    if not speedups:
        return 1.0
    return max(speed / running for running, speed in enumerate(speedups[:executors], start=1))
