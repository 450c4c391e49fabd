"""Setup of one Engine over the agent's own executors and those of its workers. Pure functions of records.

A worker's names begin with its own: processor "w1/cpu", memory "w1/host". Workers of one kind on equal boxes share the
rows of their matrix.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING

from agent.core.performance import SSD
from agent.core.policy import PRESETS
from agent.deployment.placement import place_experts
from agent.runtime.machine.box import Box, MemorySize

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agent.core.performance import ExecutorSpec, PoolSpec
    from agent.deployment.engine_setup import EngineSetup
    from agent.runtime.expert_copy import ExpertCopy

TRANSFER_S = 0.002  # to send an encoded image to another process or box, with the cost of a message; arbitrary


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """A worker before it has its part. ``found``: its whole box; ``setup``: as of an agent on its part ``box``.

    ``node``: "" on the agent's box. ``absent``: forms that do not run there. ``copies``: by processor.
    """

    name: str
    node: str
    found: Box
    box: Box
    absent: Mapping[str, str]
    setup: EngineSetup
    copies: Mapping[str, Sequence[ExpertCopy]]


@dataclass(frozen=True, slots=True)
class JoinedWorker:
    """A worker's part in the Engine's setup."""

    setup: WorkerSetup
    executors: tuple[ExecutorSpec, ...]
    pools: tuple[PoolSpec, ...]


def part_of(box: Box, sharers: int) -> Box:
    """Part of a box for one of several workers, of which each has its own device."""
    host = MemorySize(box.host.total_bytes, box.host.available_bytes // sharers)
    return replace(box, cores=max(box.cores // sharers, 1), host=host)


def joined_workers(local: EngineSetup, setup: Sequence[WorkerSetup]) -> tuple[JoinedWorker, ...]:
    numbers = count(max((spec.id for spec in local.executors), default=-1) + 1)
    return tuple(_joined_worker(each, numbers) for each in setup)


def _joined_worker(setup: WorkerSetup, numbers: count[int]) -> JoinedWorker:
    prefix, drive = f"{setup.name}/", f"{setup.node}/{SSD}" if setup.node else SSD
    pools = tuple(
        replace(pool, name=prefix + pool.name, cache=pool.cache and prefix + pool.cache, worker=setup.name, drive=drive)
        for pool in setup.setup.pools
    )
    executors = tuple(
        replace(spec, id=next(numbers), processor=prefix + spec.processor, pool=prefix + spec.pool)
        for spec in setup.setup.executors
    )
    return JoinedWorker(setup, executors, pools)


def with_workers(local: EngineSetup, joined: Sequence[JoinedWorker]) -> EngineSetup:
    """Setup over all executors. An expert is broken if no executor can run it."""
    setup = local
    for each in joined:
        rows = each.setup.setup.matrix.experts
        columns = {f"{each.setup.name}/{processor}": column for processor, column in rows.items()}
        setup = setup.with_columns(columns, each.setup.setup.broken)
    pools = (*local.pools, *(pool for each in joined for pool in each.pools))
    prepared_bytes = [each.setup.setup.limits.prepared_bytes for each in joined]
    if local.executors:
        prepared_bytes.append(local.limits.prepared_bytes)
    executors = (*local.executors, *(spec for each in joined for spec in each.executors))
    limits = replace(local.limits, pools=pools, prepared_bytes=min(prepared_bytes), transfer_s=TRANSFER_S)
    if PRESETS[local.policy].placing:
        placement = place_experts(local.graph, setup.matrix, executors, pools, limits.pinned)
        limits = replace(limits, placement=placement.pools)
    return replace(setup, executors=executors, limits=limits)
