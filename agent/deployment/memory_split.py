"""How the memories are shared out: weights against workspaces, and how many executors, where the line file says auto.

What the line file gives comes first, then the allocation that a device profile searched, then the rules that need
neither: the CoServe paper's casual choice (section 5.2), bounded by what the batches can use at most. Of a searched
allocation the workspaces are taken, bounded alike by what today's executors can use, and experts get the rest of
today's budget, which differs from one start to the next where it is auto. In a smaller budget than the search had, the
experts that it chose keep their room first, until batches have no more than the casual choice leaves them.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agent.core.performance import ExecutorSpec, Limits, PoolSpec
from agent.core.placement import footprints_in, pinned_homes
from agent.core.pool import misfits
from agent.deployment.executors import casual_executors
from agent.device_profile.records import Allocation, PoolAllocation
from experts.errors import ConfigError
from experts.sizes import mib

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from agent.config import LineConfig
    from agent.core.performance import ExpertProfile, Footprint, PerformanceMatrix
    from agent.runtime.machine.box import Box

log = logging.getLogger(__name__)

FRACTIONS = {"host": 0.6, "device": 0.9}  # of what is available: the rest is the system's, images', the page cache's
WORKSPACE_FRACTION = 0.25  # at most, where it is not given (section 5.2)
CASUAL = "casual"


@dataclass(frozen=True, slots=True)
class WorkspaceNeed:
    """Bytes that all executors of one memory can use at once: of one image each, and of their maximum batches."""

    executors: int
    least_bytes: int
    useful_bytes: int


def casual_allocation(box: Box, budgets: Mapping[str, int], ranked: Sequence[Footprint] = ()) -> Allocation:
    """CoServe casual: three quarters of each memory for experts, the rest for batches; executors by the same rule.

    ``budgets``: bytes by memory. ``ranked``: the experts' footprints, the most used first, to count those that fit.
    Source: CoServe, section 5.2, which gives the split for a GPU's memory; that of the CPU's executor is shared alike.
    """
    pools = []
    for pool, budget_bytes in budgets.items():
        workspace_bytes = int(budget_bytes * WORKSPACE_FRACTION)
        expert_bytes = budget_bytes - workspace_bytes
        pools.append(PoolAllocation(pool, expert_bytes, workspace_bytes, experts_that_fit(ranked, expert_bytes)))
    return Allocation(CASUAL, dict(budgets), tuple(pools), casual_executors(box))


def experts_that_fit(ranked: Sequence[Footprint], expert_bytes: int) -> int:
    """How many of these, from the first on, a memory holds together; what they share is counted once."""
    held: set[str] = set()
    for number, footprint in enumerate(ranked):
        new = [part for part in footprint.shared if part.id not in held]
        expert_bytes -= footprint.own_bytes + sum(part.size_bytes for part in new)
        if expert_bytes < 0:
            return number
        held.update(part.id for part in new)
    return len(ranked)


def pool_specs(
    config: LineConfig,
    box: Box,
    executors: Sequence[ExecutorSpec],
    profile: PerformanceMatrix,
    allocation: Allocation | None = None,
) -> tuple[PoolSpec, ...]:
    """Every memory of the box with its budget split. Raises ConfigError naming each expert that can never fit."""
    searched = {} if allocation is None else {share.pool: share for share in allocation.pools}
    homes = pinned_homes(_pinned(config), executors, profile.experts)
    specs = []
    problems: list[ConfigError] = []
    for pool in box.pools:
        budget_bytes = pool_budget_bytes(config, box, pool)
        footprints = footprints_in(pool, executors, profile.experts, homes)
        need = _workspace_need(pool, executors, profile)
        workspace_bytes = _workspace_bytes(config, budget_bytes, need)
        if config.memory.workspace is None and pool in searched:
            wanted_bytes = _searched_bytes(searched[pool], budget_bytes, need)
            workspace_bytes = _that_fits(pool, budget_bytes, wanted_bytes, workspace_bytes, footprints)
        expert_bytes = max(budget_bytes - workspace_bytes, 0)
        cache = "host" if box.is_split and pool == "device" else None
        specs.append(PoolSpec(pool, expert_bytes, workspace_bytes, cache))
        beside = " with all pinned experts" if homes else ""
        left = f"{beside}, but memory.{pool} leaves {mib(expert_bytes)} of its {mib(budget_bytes)} to experts"
        given = config.memory.workspace
        lower = "" if given is None else f" lower memory.workspace, which takes {mib(given)},"
        advice = f"raise memory.{pool},{lower} or take a smaller model"
        problems += [
            config.document.error(f"needs {mib(needed)}{left} - {advice}", "experts", name)
            for name, needed in misfits(footprints, expert_bytes).items()
        ]
    if problems:
        raise ConfigError.of(problems)
    return tuple(specs)


def limits_of(config: LineConfig, pools: tuple[PoolSpec, ...]) -> Limits:
    """What the Engine of this line has to keep to."""
    return Limits(pools, config.scheduling.max_overtake_s, pinned=_pinned(config))


def pool_budgets(config: LineConfig, box: Box) -> dict[str, int]:
    """What each memory may hold in all, by its name."""
    return {pool: pool_budget_bytes(config, box, pool) for pool in box.pools}


def pool_budget_bytes(config: LineConfig, box: Box, pool: str) -> int:
    """What a memory may hold in all: weights and workspaces."""
    given = config.memory.device if pool == "device" else config.memory.host
    if given is not None:
        return given
    return int(box.size_of(pool).available_bytes * FRACTIONS[pool])


def available_for(pool: str, budget_bytes: int) -> int:
    """How much of a memory has to be available for its automatic budget to be this."""
    return round(budget_bytes / FRACTIONS[pool])


def _pinned(config: LineConfig) -> frozenset[str]:
    return frozenset(name for name, expert in config.catalog.experts.items() if expert.pin)


def _workspace_need(pool: str, executors: Sequence[ExecutorSpec], profile: PerformanceMatrix) -> WorkspaceNeed:
    columns = [profile.experts[spec.processor].values() for spec in executors if spec.pool == pool]
    least_bytes = sum(_largest(column, at_maximum=False) for column in columns)
    return WorkspaceNeed(len(columns), least_bytes, sum(_largest(column, at_maximum=True) for column in columns))


def _workspace_bytes(config: LineConfig, budget_bytes: int, need: WorkspaceNeed) -> int:
    """What batches may take: as much as all executors can use at once, a quarter at most, one image each at least."""
    given = config.memory.workspace
    if given is None:
        return max(min(need.useful_bytes, int(budget_bytes * WORKSPACE_FRACTION)), need.least_bytes)
    if given < need.least_bytes:
        needs = f"one image on each of {need.executors} executors needs {mib(need.least_bytes)}"
        raise config.document.error(f"{mib(given)} is too little - {needs}", "memory", "workspace")
    return given


def _searched_bytes(searched: PoolAllocation, budget_bytes: int, need: WorkspaceNeed) -> int:
    """What the search gave to batches, brought to today's budget without a step in it: see the module."""
    beside_experts_bytes = min(budget_bytes - searched.expert_bytes, searched.workspace_bytes)
    casual_bytes = min(int(budget_bytes * WORKSPACE_FRACTION), searched.workspace_bytes)
    return max(min(max(beside_experts_bytes, casual_bytes), need.useful_bytes), need.least_bytes)


def _that_fits(
    pool: str,
    budget_bytes: int,
    wanted_bytes: int,
    casual_bytes: int,
    footprints: Sequence[tuple[str, Footprint, bool]],
) -> int:
    """The searched workspace; the casual one, told in the log, where the largest expert would not fit beside it."""
    if not misfits(footprints, budget_bytes - wanted_bytes):
        return wanted_bytes
    log.warning(
        "searched_workspace_left_out pool=%s searched=%s budget=%s used=%s: the largest expert would not fit beside it",
        pool, mib(wanted_bytes), mib(budget_bytes), mib(casual_bytes),
    )  # fmt: skip
    return casual_bytes


def _largest(column: Iterable[ExpertProfile], *, at_maximum: bool) -> int:
    performances = [each.performance for each in column]
    return max((each.workspace_for(each.max_batch if at_maximum else 1) for each in performances), default=0)
