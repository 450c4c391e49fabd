"""How the memories are shared out: weights against workspaces, and how many executors, where the line file says auto.

A searched allocation comes from a device profile; these are the rules that need none: the CoServe paper's casual
choice (section 5.2), bounded by what the batches can use at most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.core.performance import ExecutorSpec, PoolSpec
from agent.core.placement import footprints_in, pinned_homes
from agent.core.policy import PRESETS, Assigning
from agent.core.pool import misfits
from experts.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from agent.config import LineConfig
    from agent.core.performance import DeviceProfile, ExpertProfile
    from agent.runtime.device import Box

HOST_FRACTION = 0.6  # of what is available: the rest is for the system, decoded images and the page cache
DEVICE_FRACTION = 0.9
WORKSPACE_FRACTION = 0.25  # at most, where it is not given (section 5.2)
CORES_PER_CPU_EXECUTOR = 4  # beyond that one image's operators hardly run faster
DEVICE_EXECUTORS = {"cuda": 3, "mps": 2, "emulated": 1}  # the paper's for NUMA and UMA


def executor_specs(config: LineConfig, box: Box) -> tuple[ExecutorSpec, ...]:
    """The executors of a line on this box, the device's first. Raises ConfigError for a processor it does not have."""
    counts = config.executors if config.executors is not None else _casual_executors(box)
    for processor in counts:
        if processor not in box.processors:
            there = ", ".join(box.processors)
            raise config.document.error(f"this box has no {processor!r} - use {there}", "executors", processor)
    ordered = sorted(counts, key=lambda processor: (processor == "cpu", processor))
    processors = [processor for processor in ordered for _ in range(counts[processor])]
    if PRESETS[config.policy].assigning is Assigning.FIRST:
        processors = processors[:1]  # one executor does everything: it gets all threads and the whole workspace
    if not processors:
        raise config.document.error("no executor at all - give one at least", "executors")
    return tuple(ExecutorSpec(number, processor, box.pool_of(processor)) for number, processor in enumerate(processors))


def pool_specs(
    config: LineConfig, box: Box, executors: Sequence[ExecutorSpec], profile: DeviceProfile
) -> tuple[PoolSpec, ...]:
    """Every memory of the box with its budget split. Raises ConfigError naming each expert that can never fit."""
    specs = []
    problems: list[ConfigError] = []
    for pool in box.pools:
        budget_bytes = pool_budget_bytes(config, box, pool)
        users = [spec for spec in executors if spec.pool == pool]
        workspace_bytes = _workspace_bytes(config, budget_bytes, users, profile)
        expert_bytes = max(budget_bytes - workspace_bytes, 0)
        cache = "host" if box.is_split and pool == "device" else None
        specs.append(PoolSpec(pool, expert_bytes, workspace_bytes, cache))
        problems += _misfit_problems(config, pool, expert_bytes, budget_bytes, executors, profile)
    if problems:
        raise ConfigError.of(problems)
    return tuple(specs)


def pool_budget_bytes(config: LineConfig, box: Box, pool: str) -> int:
    """What a memory may hold in all: weights and workspaces."""
    given = config.memory.device if pool == "device" else config.memory.host
    if given is not None:
        return given
    fraction = DEVICE_FRACTION if pool == "device" else HOST_FRACTION
    return int(box.size_of(pool).available_bytes * fraction)


def _casual_executors(box: Box) -> dict[str, int]:
    device = {processor: DEVICE_EXECUTORS[processor] for processor in box.processors if processor in DEVICE_EXECUTORS}
    return device | {"cpu": 1 if device else max(box.cores // CORES_PER_CPU_EXECUTOR, 1)}


def _workspace_bytes(
    config: LineConfig, budget_bytes: int, users: Sequence[ExecutorSpec], profile: DeviceProfile
) -> int:
    """What batches may take: as much as all executors can use at once, a quarter at most, one image each at least."""
    columns = [profile.experts[spec.processor].values() for spec in users]
    useful = sum(_largest(column, at_maximum=True) for column in columns)
    least = sum(_largest(column, at_maximum=False) for column in columns)
    given = config.memory.workspace
    if given is not None:
        if given < least:
            needs = f"one image on each of {len(users)} executors needs {_mib(least)}"
            raise config.document.error(f"{_mib(given)} is too little - {needs}", "memory", "workspace")
        return given
    return max(min(useful, int(budget_bytes * WORKSPACE_FRACTION)), least)


def _largest(column: Iterable[ExpertProfile], *, at_maximum: bool) -> int:
    performances = [each.performance for each in column]
    return max((each.workspace_for(each.max_batch if at_maximum else 1) for each in performances), default=0)


def _misfit_problems(
    config: LineConfig,
    pool: str,
    expert_bytes: int,
    budget_bytes: int,
    executors: Sequence[ExecutorSpec],
    profile: DeviceProfile,
) -> list[ConfigError]:
    pinned = frozenset(name for name, expert in config.catalog.experts.items() if expert.pin)
    homes = pinned_homes(pinned, executors, profile.experts)
    needs = misfits(footprints_in(pool, executors, profile.experts, homes), expert_bytes)
    left = f"memory.{pool} leaves {_mib(expert_bytes)} of its {_mib(budget_bytes)} to experts"
    beside = " with all pinned experts" if homes else ""
    advice = f"raise memory.{pool}, or take a smaller model"
    return [
        config.document.error(f"needs {_mib(needed)}{beside}, but {left} - {advice}", "experts", name)
        for name, needed in needs.items()
    ]


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"
