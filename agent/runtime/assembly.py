"""Assembly of an agent's loop: memories, transfers, executors, and their shared parts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from agent.core.performance import HOST, tier_of
from agent.runtime.executor import BatchExecutor, Shared
from agent.runtime.images.preparation import Preparation
from agent.runtime.local_worker import LocalWorker
from agent.runtime.loop import AgentLoop
from agent.runtime.machine.box import products_bytes, threads_per_executor, torch_device
from agent.runtime.machine.device_loss import DeviceContext, watch_of, watch_of_memory
from agent.runtime.machine.memories import HostMemory, memory_for
from agent.runtime.machine.threads import teams
from agent.runtime.text_engines import text_engines
from agent.runtime.texts import RunningTexts
from agent.runtime.weights.drive import Drive, PacedLink, staging_bytes
from agent.runtime.weights.moe_loads import USAGE_FOLDER, MoeLoads
from agent.runtime.weights.skeletons import SkeletonShelf
from agent.runtime.weights.slots import SlotStore
from agent.runtime.weights.transfer import Transfers, load_threads

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent.core.request import Outcome
    from agent.runtime.loop import AgentPlan, Decider, LoopOptions
    from experts.packed.weights import SegmentStore


def assemble(
    engine: Decider,
    plan: AgentPlan,
    segments: SegmentStore,
    on_outcome: Callable[[int, Outcome], None],
    options: LoopOptions,
) -> AgentLoop:
    """Build a loop; call ``start``, and ``stop`` once. Raises BackendUnavailable."""
    inbox = SimpleQueue[Any]()
    worker = local_worker(replace(plan, setup=plan.setup.at("")), segments, inbox.put, options)
    return AgentLoop(engine, plan, worker, inbox, on_outcome, options)


def local_worker(
    plan: AgentPlan, segments: SegmentStore, post: Callable[[Any], None], options: LoopOptions
) -> LocalWorker:
    """The worker that is this process, with the executors and memories of the plan. ``post`` takes its answers.

    Raises BackendUnavailable.
    """
    box, setup = plan.box, plan.setup
    host = [pool for pool in setup.pools if tier_of(pool.name) == HOST]
    host_bytes = sum(each.expert_bytes + each.workspace_bytes + each.lease_bytes for each in host)
    context, link = DeviceContext(), PacedLink(options.ssd_bytes_per_s)
    memory = HostMemory(pinned=box.name == "cuda", context=context)
    drive = Drive(segments, memory, link, staging_bytes(host_bytes))
    shelf = SkeletonShelf(segments)
    stores = _stores(plan, shelf, MoeLoads(drive, kept=segments.directory / USAGE_FOLDER), context)
    operator_threads = threads_per_executor(box, setup.executors)
    watches = {pool: watch_of_memory(box, pool, context) for pool in stores}
    loads = setup.limits.loads_in_flight * (len(stores) if box.is_split else 1) + 1  # one in the background
    transfers = Transfers(drive, stores, plan.copies, post, load_threads(loads, operator_threads), watches)
    preparation = Preparation(box.cores, options.scaled)
    engines = text_engines(setup.executors, setup.limits, segments, setup.matrix, keeps_prefixes=options.keeps_prefixes)
    texts = RunningTexts(engines.by_executor, engines.lengths)
    shared = Shared(preparation, post, texts, partial(watch_of, context=context))
    team = teams(setup.executors, operator_threads)
    executors = {spec.id: BatchExecutor(spec, stores[spec.pool], team[spec.id], shared) for spec in setup.executors}
    worker = LocalWorker(stores, shelf, transfers, preparation, executors, texts, engines, plan.copies, context)
    worker.know(plan.copies, setup.matrix)
    return worker


def _stores(plan: AgentPlan, shelf: SkeletonShelf, moe_loads: MoeLoads, context: DeviceContext) -> dict[str, SlotStore]:
    stores = {}
    for spec in plan.setup.pools:
        beside_bytes = spec.lease_bytes + products_bytes(spec.name, plan.setup.executors)
        sizes = spec.expert_bytes, spec.workspace_bytes, beside_bytes
        memory = memory_for(plan.box, tier_of(spec.name), *sizes, context)
        devices = sorted({torch_device(each.processor) for each in plan.setup.executors if each.pool == spec.name})
        stores[spec.name] = SlotStore(memory, spec.expert_bytes, devices, shelf, moe_loads)
        stores[spec.name].pool = spec.name
    return stores
