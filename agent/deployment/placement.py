"""One Engine over the agent's own executors and those of its workers, and the placement of experts on them.

A worker's names begin with its own: processor "w1/cpu", memory "w1/host". Workers of one kind on one box share the rows
of their matrix. Placement is balanced by usage and compute, with dependent experts together.

The load of a memory is the time that its executors are busy for an image of the line: usage probabilities times K
(CoServe, section 4.2). Pinned experts are placed first, then the others by load, the largest first (Graham's longest
processing time, 1969): each where the load is then the least, or with the experts before and after it on routes, as
long as that memory's load stays within SLACK. Hot experts, such as shared detectors, get several copies: so many that
none has more than a part of a memory's load, of PARTS the smallest that leaves room for all experts and balance.

Guarantees: no budget is exceeded; a copy lies only where an executor can run it, at most once in a memory; a pinned
expert lies at its home alone; equal arguments give equal placements. All experts have a place if every memory can run
all of them and has the largest one's room to spare. Where memories hold any number of experts, no load exceeds the
perfect balance by more than the largest load of one expert.

Where not all fit, the most used have places, and the scheduler finds an executor for each request of the others, as
without a placement. No room is kept for these: in simulations of lines with memory for 0.3 to 0.9 of their experts,
requests at the rate of a line waited for fewer switches so than with room kept or without a placement, and requests
that came all at once were judged about as fast (``tests/profiler/simulation/test_placement.py`` repeats some).
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from agent.core.performance import SSD, Footprint, pinned_homes
from agent.core.policy import PRESETS
from agent.core.pool import ModelPool

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from agent.core.engine import EngineSetup
    from agent.core.performance import ExecutorSpec, PerformanceMatrix, PoolSpec
    from experts.graph import ExpertGraph

SLACK = 0.1  # of a memory's load with perfect balance
PARTS = (0.05, 0.1, 0.2, 0.5, 1.0, math.inf)  # of the same, for one copy: the first is of many copies
LEAST_K_S = 1e-9  # of an expert that is measured to take no time
TRANSFER_S = 0.002  # to send an encoded image to another process or box, with the cost of a message; arbitrary


@dataclass(frozen=True, slots=True)
class WorkerShare:
    """Experts of one worker. ``load_s``: its executors' seconds of compute for an image of the line."""

    experts: tuple[str, ...]
    used_bytes: int
    load_s: float


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """``pools``: memories of each expert, as ``Limits.placement``; ``unplaced``: experts without room, by usage."""

    pools: Mapping[str, frozenset[str]]
    workers: Mapping[str, WorkerShare]
    unplaced: tuple[str, ...] = ()


def place_experts(
    graph: ExpertGraph,
    matrix: PerformanceMatrix,
    executors: Sequence[ExecutorSpec],
    pools: Sequence[PoolSpec],
    pinned: frozenset[str] = frozenset(),
) -> ExpertPlacement:
    """Place all experts but shadows in the memories that executors run from."""
    homes = {expert: spec.pool for expert, spec in pinned_homes(pinned, executors, matrix.experts).items()}

    def placed(part: float) -> _Placing:
        memories = [_Memory.of(pool, matrix, [spec for spec in executors if spec.pool == pool.name]) for pool in pools]
        placing = _Placing(graph, matrix.usage, [memory for memory in memories if memory.executors], homes)
        placing.place(part)
        return placing

    return min(map(placed, PARTS), key=_Placing.rank).result()


@dataclass(slots=True)
class _Memory:
    """``busy_s``: time of its executors for an image, by expert; ``load_s``: for an image of the line."""

    ledger: ModelPool
    executors: int
    busy_s: Mapping[str, float]
    footprints: Mapping[str, Footprint]  # by expert, of all copies that its executors run
    load_s: float = 0.0

    @classmethod
    def of(cls, spec: PoolSpec, matrix: PerformanceMatrix, executors: Sequence[ExecutorSpec]) -> _Memory:
        per_s: defaultdict[str, float] = defaultdict(float)
        copies: defaultdict[str, dict[str, Footprint]] = defaultdict(dict)
        for executor in executors:
            for expert, row in matrix.experts[executor.processor].items():
                per_s[expert] += 1.0 / max(row.performance.K_s, LEAST_K_S)
                copies[expert][row.copy] = row.footprint
        footprints = {
            expert: Footprint(
                sum(each.own_bytes for each in found.values()),
                tuple({part: None for each in found.values() for part in each.shared}),
            )
            for expert, found in copies.items()
        }
        return cls(ModelPool(spec), len(executors), {name: 1.0 / speed for name, speed in per_s.items()}, footprints)

    @property
    def spec(self) -> PoolSpec:
        return self.ledger.spec

    def has_room(self, expert: str) -> bool:
        return self.ledger.can_reserve(self.footprints[expert])


@dataclass(slots=True)
class _Placing:
    graph: ExpertGraph
    usage: Mapping[str, float]
    memories: Sequence[_Memory]
    homes: Mapping[str, str]  # pinned expert -> memory
    found: dict[str, Sequence[_Memory]] = field(default_factory=dict)  # expert -> memories
    unplaced: list[str] = field(default_factory=list)
    most_s: float = 0.0  # load of a memory that is in balance

    def rank(self) -> tuple[bool, float, int]:
        """Sort key: a place for each expert before balance, and balance before a place for more of them."""
        return bool(self.unplaced), max(self.most_s, *(each.load_s for each in self.memories)), len(self.unplaced)

    def place(self, part: float) -> None:
        """Place each expert, with as many copies as leave none more than this part of a memory's ideal load."""
        able = {name: [each for each in self.memories if name in each.busy_s] for name in self.graph.placed}
        spread_s = {expert: self._share_s(expert, memories) for expert, memories in able.items() if memories}
        ideal_s = sum(spread_s.values())
        single_s = max((self._share_s(name, [each]) for name in spread_s for each in able[name]), default=0.0)
        self.most_s = ideal_s + min(SLACK * ideal_s, single_s)
        for expert in sorted(spread_s, key=lambda name: (name not in self.homes, -spread_s[name], name)):
            copies = math.ceil(spread_s[expert] * len(able[expert]) / (part * ideal_s)) if ideal_s else 1
            home = self.homes.get(expert)
            options = [each for each in able[expert] if home in (None, each.spec.name) and each.has_room(expert)]
            if options:
                self._put(expert, self._chosen(expert, options, max(copies, 1)))
            else:
                self.unplaced.append(expert)

    def result(self) -> ExpertPlacement:
        workers: dict[str, WorkerShare] = {}
        for memory in self.memories:
            share = workers.get(memory.spec.worker, WorkerShare((), 0, 0.0))
            workers[memory.spec.worker] = WorkerShare(
                tuple(sorted({*share.experts, *(entry.expert for entry in memory.ledger.entries())})),
                share.used_bytes + memory.ledger.used_bytes,
                share.load_s + memory.load_s * memory.executors,
            )
        pools = {name: frozenset(each.spec.name for each in found) for name, found in sorted(self.found.items())}
        unplaced = sorted(self.unplaced, key=lambda name: (-self.usage.get(name, 0.0), name))
        return ExpertPlacement(pools, workers, tuple(unplaced))

    def _chosen(self, expert: str, options: Sequence[_Memory], copies: int) -> Sequence[_Memory]:
        """Memories that are the least busy then; before them those with relatives of the expert, within the slack."""
        others = options[: min(copies, len(options)) - 1]
        ties = {worker: self._ties(expert, worker) for worker in {each.spec.worker for each in options}}

        def rank(memory: _Memory) -> tuple[float, float, int, str]:
            load_s = memory.load_s + self._share_s(expert, [memory, *(each for each in others if each is not memory)])
            tie = ties[memory.spec.worker] if load_s <= self.most_s else 0.0
            return -tie, load_s, memory.ledger.used_bytes, memory.spec.name

        return sorted(options, key=rank)[:copies]

    def _ties(self, expert: str, worker: str) -> float:
        """Usage of the dependencies between the expert and the experts of a worker."""
        before, after = self.graph.preliminaries(expert), self.graph.subsequents(expert)
        pairs = [*((name, expert) for name in before), *((name, name) for name in after)]
        near = {name for name, _ in pairs if any(each.spec.worker == worker for each in self.found.get(name, ()))}
        return sum(self.usage.get(subsequent, 0.0) for name, subsequent in pairs if name in near)

    def _put(self, expert: str, memories: Sequence[_Memory]) -> None:
        self.found[expert] = memories
        for each in memories:
            each.ledger.start_load(expert, expert, each.footprints[expert], pinned=expert in self.homes)
            each.load_s += self._share_s(expert, memories)

    def _share_s(self, expert: str, memories: Sequence[_Memory]) -> float:
        """Load of each of these memories by an expert, of which they take equal times."""
        return self.usage.get(expert, 0.0) / sum(1.0 / memory.busy_s[expert] for memory in memories)


# -- one Engine over all of them --


def with_workers(
    local: EngineSetup, workers: Mapping[str, EngineSetup], node: Callable[[str], str]
) -> tuple[EngineSetup, ExpertPlacement]:
    """Setup over all executors, with the placement if its policy follows one. An expert is broken if no executor can
    run it. ``workers``: each setup as of an agent on the worker's part of its box; ``node``: of that box, "" for the
    agent's."""
    if not workers:
        return local, ExpertPlacement({}, {})
    setup = local
    for name, own in workers.items():
        setup = _joined(setup, name, node(name), own)
    limits = replace(setup.limits, transfer_s=TRANSFER_S)
    placement = place_experts(setup.graph, setup.matrix, setup.executors, setup.pools, limits.pinned)
    if PRESETS[setup.policy].placing:
        limits = replace(limits, placement=placement.pools)
    return replace(setup, limits=limits), placement


def _joined(setup: EngineSetup, worker: str, node: str, own: EngineSetup) -> EngineSetup:
    prefix = f"{worker}/"
    drive = f"{node}/{SSD}" if node else SSD
    pools = tuple(
        replace(pool, name=prefix + pool.name, cache=pool.cache and prefix + pool.cache, drive=drive)
        for pool in own.pools
    )
    first = 1 + max((spec.id for spec in setup.executors), default=-1)
    executors = tuple(
        replace(spec, id=number, processor=prefix + spec.processor, pool=prefix + spec.pool)
        for number, spec in enumerate(own.executors, first)
    )
    prepared_bytes = own.limits.prepared_bytes
    if setup.executors:
        prepared_bytes = min(prepared_bytes, setup.limits.prepared_bytes)
    limits = replace(setup.limits, pools=(*setup.pools, *pools), prepared_bytes=prepared_bytes)
    setup = setup.with_columns(worker, own.matrix.experts, own.broken)
    return replace(setup, executors=(*setup.executors, *executors), limits=limits)
