"""Setup of one Engine over the agent's own executors and those of its workers. Pure functions of records.

A worker's names begin with its own: processor "w1/cpu", memory "w1/host". Workers of one kind on one box share the
rows of their matrix.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from agent.core.performance import SSD
from agent.core.policy import PRESETS
from agent.deployment.placement import ExpertPlacement, place_experts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent.deployment.engine_setup import EngineSetup

TRANSFER_S = 0.002  # to send an encoded image to another process or box, with the cost of a message; arbitrary


class WorkerSetup(NamedTuple):
    """``setup``: as of an agent on the worker's part of its box. ``node``: of that box, "" for the agent's."""

    name: str
    node: str
    setup: EngineSetup


def with_workers(local: EngineSetup, workers: Sequence[WorkerSetup]) -> tuple[EngineSetup, ExpertPlacement]:
    """Setup over all executors, with the placement if its policy follows one. An expert is broken if no executor can
    run it."""
    if not workers:
        return local, ExpertPlacement({}, {})
    setup = local
    for worker in workers:
        setup = _joined(setup, worker)
    limits = replace(setup.limits, transfer_s=TRANSFER_S)
    placement = place_experts(setup.graph, setup.matrix, setup.executors, setup.pools, limits.pinned)
    if PRESETS[setup.policy].placing:
        limits = replace(limits, placement=placement.pools)
    return replace(setup, limits=limits), placement


def _joined(setup: EngineSetup, worker: WorkerSetup) -> EngineSetup:
    own, prefix = worker.setup, f"{worker.name}/"
    drive = f"{worker.node}/{SSD}" if worker.node else SSD
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
    setup = setup.with_columns(worker.name, own.matrix.experts, own.broken)
    return replace(setup, executors=(*setup.executors, *executors), limits=limits)
