"""Split of the memories into weights and workspaces, for keys that are auto in the line file.

Keys and values of texts get their part first. A workspace is the line file's, else the device profile's searched one,
else the paper's casual choice (section 5.2), at most the maximum batches; experts get the rest. In a smaller budget
than searched, experts keep their room until batches have only the casual choice.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from agent.core.performance import DEVICE, HOST, ExecutorSpec, Limits, PoolSpec
from agent.deployment.executors import casual_executors
from agent.deployment.memory_needs import WORKSPACE_FRACTION, MemoryNeeds, memory_needs
from agent.device_profile.records import Allocation, PoolAllocation
from agent.line_file.texts import LONE_QUANTUM_S, QUANTUM_S
from agent.runtime.machine.box import products_bytes
from agent.runtime.weights.drive import staging_bytes
from experts.errors import ConfigError
from experts.sizes import mib

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from agent.config import LineConfig
    from agent.core.performance import PerformanceMatrix
    from agent.runtime.expert_copy import ExpertCopy
    from agent.runtime.machine.box import Box

log = logging.getLogger(__name__)

FRACTIONS = {HOST: 0.6, DEVICE: 0.9}  # of the available bytes; the rest is for the system, images and the page cache
PREPARED_FRACTION = 0.05  # of the host memory of experts and batches, and beside it
MOST_PREPARED_BYTES = 512 * 1024 * 1024  # some 850 images at 224 x 224
CASUAL = "casual"


def casual_allocation(box: Box, budgets: Mapping[str, int]) -> Allocation:
    """CoServe casual (section 5.2): three quarters of each memory for experts, the rest for batches; executors by the
    same section. ``budgets``: bytes by memory. The paper gives the split for a GPU's memory; a CPU's memory is split
    alike."""
    pools = []
    for pool, budget_bytes in budgets.items():
        workspace_bytes = int(budget_bytes * WORKSPACE_FRACTION)
        pools.append(PoolAllocation(pool, budget_bytes - workspace_bytes, workspace_bytes, experts=0))
    return Allocation(CASUAL, dict(budgets), tuple(pools), casual_executors(box))


def pool_specs(
    config: LineConfig,
    box: Box,
    executors: Sequence[ExecutorSpec],
    profile: PerformanceMatrix,
    allocation: Allocation | None = None,
) -> tuple[PoolSpec, ...]:
    """Memories, split. Raises ConfigError naming experts that can never fit."""
    specs = []
    problems: list[ConfigError] = []
    for needs, spec in shares_of(config, box, executors, profile, allocation):
        specs.append(spec)
        problems += _misfits(config, needs, spec.expert_bytes)
    if problems:
        raise ConfigError.of(problems)
    return tuple(specs)


def shares_of(
    config: LineConfig,
    box: Box,
    executors: Sequence[ExecutorSpec],
    profile: PerformanceMatrix,
    allocation: Allocation | None = None,
) -> Iterator[tuple[MemoryNeeds, PoolSpec]]:
    """``pool_specs`` without the check that experts fit, each with its needs."""
    searched = {} if allocation is None else {share.pool: share for share in allocation.pools}
    budgets, pinned = beside_libraries(pool_budgets(config, box), executors), pinned_experts(config)
    for pool, needs in memory_needs(budgets, executors, profile, pinned, config.texts.kv).items():
        workspace_bytes = _workspace_bytes(config, needs)
        if config.memory.workspace is None and pool in searched:
            workspace_bytes = _searched_bytes(searched[pool], needs, workspace_bytes)
        yield needs, needs.spec(max(needs.budget_bytes - workspace_bytes, 0), workspace_bytes)


def texts_where_they_fit(
    config: LineConfig,
    box: Box,
    executors: Sequence[ExecutorSpec],
    copies: Mapping[str, Sequence[ExpertCopy]],
    profile: PerformanceMatrix,
    allocation: Allocation | None = None,
) -> dict[str, list[ExpertCopy]]:
    """``copies``, by processor, without language models that are too large for its memory, but not for another's."""
    shares = shares_of(config, box, executors, profile, allocation)
    too_large = {needs.pool: needs.misfits(spec.expert_bytes) for needs, spec in shares}
    fitting = {
        copy.expert.id
        for processor, listed in copies.items()
        for copy in listed
        if copy.expert.takes_texts and copy.expert.id not in too_large[box.pool_of(processor)]
    }
    found = {}
    for processor, listed in copies.items():
        elsewhere = fitting & too_large[box.pool_of(processor)].keys()
        for expert in sorted(elsewhere & {copy.expert.id for copy in listed}):
            log.info("model_runs_elsewhere expert=%s processor=%s: too large for its memory", expert, processor)
        found[processor] = [copy for copy in listed if copy.expert.id not in elsewhere]
    return found


def limits_of(config: LineConfig, pools: tuple[PoolSpec, ...]) -> Limits:
    given_s = config.texts.quantum_s
    host = (pool for pool in pools if pool.name == HOST)
    host_bytes = sum(pool.expert_bytes + pool.workspace_bytes + pool.lease_bytes for pool in host)
    return Limits(
        pools,
        config.scheduling.max_overtake_s,
        quantum_s=QUANTUM_S if given_s is None else given_s,
        lone_quantum_s=LONE_QUANTUM_S if given_s is None else given_s,
        prepared_bytes=prepared_bytes(config, host_bytes),
        pinned=pinned_experts(config),
    )


def prepared_bytes(config: LineConfig, host_bytes: int) -> int:
    """Memory for images prepared ahead, beside the ``host_bytes`` of experts."""
    if config.memory.images is not None:
        return config.memory.images
    return min(int(host_bytes * PREPARED_FRACTION), MOST_PREPARED_BYTES)


def pool_budgets(config: LineConfig, box: Box) -> dict[str, int]:
    """Budget of each memory for weights and workspaces, nearest to the SSD first.

    A host memory beside a device's gives the buffers of loads into the device their part first.
    """
    given = {HOST: config.memory.host, DEVICE: config.memory.device}
    budgets = {
        pool: size if (size := given[pool]) is not None else int(box.size_of(pool).available_bytes * FRACTIONS[pool])
        for pool in box.pools
    }
    if DEVICE in budgets:
        budgets[HOST] -= staging_bytes(budgets[HOST])
    return budgets


def beside_libraries(budgets: Mapping[str, int], executors: Sequence[ExecutorSpec]) -> dict[str, int]:
    """Budgets less what libraries of these executors keep in each memory."""
    return {pool: size_bytes - products_bytes(pool, executors) for pool, size_bytes in budgets.items()}


def available_for(pool: str, budgets: Mapping[str, int]) -> int:
    """Free bytes of which a memory of these budgets is the share."""
    given_bytes = budgets[pool]
    if pool == HOST and DEVICE in budgets:
        for _ in range(4):  # each pass leaves a sixteenth of the one before
            given_bytes = budgets[pool] + staging_bytes(given_bytes)
    return round(given_bytes / FRACTIONS[pool])


def pinned_experts(config: LineConfig) -> frozenset[str]:
    return frozenset(name for name, expert in config.catalog.experts.items() if expert.pin)


def _workspace_bytes(config: LineConfig, needs: MemoryNeeds) -> int:
    given = config.memory.workspace
    if given is None:
        return needs.casual_workspace_bytes
    if given < needs.one_image_bytes:
        least = f"one image on each of {needs.executors} executors needs {mib(needs.one_image_bytes)}"
        raise config.document.error(f"{mib(given)} is too little - {least}", "memory", "workspace")
    return given


def _searched_bytes(searched: PoolAllocation, needs: MemoryNeeds, casual_bytes: int) -> int:
    """The searched workspace in today's budget (see the module); the casual one if the largest expert would not fit."""
    budget_bytes = needs.budget_bytes
    beside_experts_bytes = min(budget_bytes - searched.expert_bytes, searched.workspace_bytes)
    quarter_bytes = min(int(budget_bytes * WORKSPACE_FRACTION), searched.workspace_bytes)
    wanted_bytes = min(max(beside_experts_bytes, quarter_bytes), needs.maximum_batch_bytes)
    wanted_bytes = max(wanted_bytes, needs.one_image_bytes)
    if not needs.misfits(budget_bytes - wanted_bytes):
        return wanted_bytes
    log.warning(
        "searched_workspace_left_out pool=%s searched=%s budget=%s used=%s: the largest expert would not fit beside it",
        needs.pool, mib(wanted_bytes), mib(budget_bytes), mib(casual_bytes),
    )  # fmt: skip
    return casual_bytes


def _misfits(config: LineConfig, needs: MemoryNeeds, expert_bytes: int) -> Iterator[ConfigError]:
    beside = " with all pinned experts" if pinned_experts(config) else ""
    given = config.memory.workspace
    lower = "" if given is None else f" lower memory.workspace, which takes {mib(given)},"
    if needs.lease_bytes:
        lower += f" lower texts.kv, which takes {mib(needs.lease_bytes * needs.arenas)},"
    left = f"memory.{needs.pool} leaves {mib(expert_bytes)} of its {mib(needs.whole_bytes)} to experts"
    advice = f"raise memory.{needs.pool},{lower} or take a smaller model"
    for name, needed_bytes in needs.misfits(expert_bytes).items():
        yield config.document.error(f"needs {mib(needed_bytes)}{beside}, but {left} - {advice}", "experts", name)
