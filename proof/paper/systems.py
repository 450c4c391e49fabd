"""The systems of the paper's evaluation, each set up on one of its devices for one of its tasks, and simulated.

Memory (CoServe, sections 4.4 and 5.2). Each executor keeps its process's memory for itself. The GPU's memory is split
between experts and batches: 75 to 25 where nothing was searched, or with room for so many of the most used experts.
Host memory of a split device holds the batches of the CPU's executors at their maximum size, experts that the CPU runs,
and a cache in front of the GPU. Unified memory is split 75 to 25, or holds all executors' largest batches.

Loads. "framework": each executor loads for itself with PyTorch, so as many loads run at once as there are executors; a
unified memory holds the GPU's and the CPU's form of an expert apart (section 1). "packed": the bytes are read as the
processors want them, for the time that the link takes; in a unified memory one copy serves both.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING

from agent.core.effects import StartLoad
from agent.core.engine import EngineSetup
from agent.core.performance import (
    DEVICE,
    HOST,
    SSD,
    ExecutorSpec,
    ExpertProfile,
    Footprint,
    Limits,
    Performance,
    PerformanceMatrix,
    PoolSpec,
)
from agent.core.policy import PRESETS, Assigning
from agent.deployment.memory_needs import held_bytes
from experts.errors import ConfigError
from profiler.simulation.bounds import RequestSteps, Resources, arrivals_s, compute_s, unread_bytes
from profiler.simulation.forecast import resident_after
from profiler.simulation.simulator import Simulator
from proof.paper.devices import CPU, GPU

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from profiler.simulation.simulator import Simulation
    from proof.paper.devices import ArchitectureSection, PaperDevice, TimesSection
    from proof.paper.tasks import PaperTask

CASUAL_FRACTION = 0.75  # of the memory, for experts (section 5.2)
PATIENCE_S = 180.0  # section 5.1: all images of a board within, for example, 3 minutes; our bound on overtaking here


class Loading(StrEnum):
    FRAMEWORK = "framework"
    PACKED = "packed"


@dataclass(frozen=True, slots=True)
class System:
    """One system as configured. ``policy`` is a preset; ``executors`` by processor.

    ``experts``: how many of the most used ones the GPU's memory keeps room for; None: ``expert_fraction`` of it is
    for experts; that None, too: the rest beside the batches at their maximum size.
    """

    name: str
    policy: str
    executors: Mapping[str, int]
    experts: int | None = None
    expert_fraction: float | None = CASUAL_FRACTION
    loading: Loading = Loading.FRAMEWORK
    loads_in_flight: int | None = None  # None: as many as executors
    max_overtake_s: float = PATIENCE_S


@dataclass(frozen=True, slots=True)
class SystemRow:
    """One system on one task. ``experts``: how many of the most used ones fit beside the GPU's batches.

    ``roofline_images_per_s``: the bound on every schedule with the same executors, memories, loading and experts
    resident at the start, as in `coserve plan`. It and its fraction are None unless asked for.
    """

    task: str
    device: str
    policy: str
    images_per_s: float
    switches: int
    seconds: float
    bytes_read: int
    evictions: int
    loads: int
    batches: int
    executors: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    experts: int = 0
    roofline_images_per_s: float | None = None
    roofline_fraction: float | None = None


def simulate(system: System, device: PaperDevice, task: PaperTask, *, with_roofline: bool = False) -> SystemRow:
    """Run a task on a system, from the end of its initial placement to the last request's outcome.

    Raises ConfigError where the configuration has no room for an image of each executor or for the largest expert.
    """
    profile = device_profile(device, task, system.loading)
    specs = executor_specs(system, device)
    pools = pool_specs(system, device, task, specs)
    in_flight = len(specs) if system.loads_in_flight is None else system.loads_in_flight
    limits = Limits(pools, max_overtake_s=system.max_overtake_s, loads_in_flight=in_flight)
    setup = EngineSetup(task.graph, system.policy, specs, profile, limits)
    links = {SSD: device.links.ssd_bytes_per_s.value}
    if device.links.host_bytes_per_s is not None:
        links[HOST] = device.links.host_bytes_per_s.value
    speedups = {name: device.processor(name).speedups.value for name in (GPU, CPU)}
    simulator = Simulator(setup, task.predict, links, speedups)
    simulation = simulator.run(task.trace)
    loads = [each for at_s, each in simulation.effects if isinstance(each, StartLoad) and at_s >= simulation.started_s]
    gpu_pool = next(pool for pool in pools if pool.name == device.pool_of(GPU))
    statistics = simulator.engine.statistics()
    images_per_s = len(task.trace) / simulation.seconds
    roofline = _roofline_images_per_s(task, setup, simulation, links[SSD], speedups) if with_roofline else None
    return SystemRow(
        task=task.name,
        device=device.device,
        policy=system.name,
        images_per_s=images_per_s,
        switches=statistics.switches,
        seconds=simulation.seconds,
        bytes_read=sum(load.size_bytes for load in loads if load.source == SSD),
        evictions=statistics.evictions,
        loads=len(loads),
        batches=statistics.batches,
        executors=dict(Counter(spec.processor for spec in specs)),
        experts=sum(held <= gpu_pool.expert_bytes for held in held_by_usage(device, task)),
        roofline_images_per_s=roofline,
        roofline_fraction=None if roofline is None else images_per_s / roofline,
    )


def executor_specs(system: System, device: PaperDevice) -> tuple[ExecutorSpec, ...]:
    """The executors of a system, the GPU's first; a policy that gives everything to one executor has that one alone."""
    processors = [name for name in (GPU, CPU) for _ in range(system.executors.get(name, 0))]
    if PRESETS[system.policy].assigning is Assigning.FIRST:
        processors = processors[:1]
    return tuple(ExecutorSpec(number, name, device.pool_of(name)) for number, name in enumerate(processors))


def device_profile(device: PaperDevice, task: PaperTask, loading: Loading) -> PerformanceMatrix:
    """The performance matrix of a device for a task's experts."""
    columns = {
        processor: {
            expert: _expert_profile(device, processor, expert, device.architectures[architecture], loading)
            for expert, architecture in task.architectures.items()
        }
        for processor in (GPU, CPU)
    }
    return PerformanceMatrix(columns, dict(task.usage))


def pool_specs(
    system: System, device: PaperDevice, task: PaperTask, specs: Sequence[ExecutorSpec]
) -> tuple[PoolSpec, ...]:
    """Every memory, split between experts and batches. Raises ConfigError for one without room for both."""
    return tuple(_pool_spec(name, system, device, task, specs) for name in device.pools)


def most_experts(system: System, device: PaperDevice, task: PaperTask) -> int:
    """The most experts that the GPU's memory has room for, beside one image of each executor."""
    pool = device.pool_of(GPU)
    users = _users(executor_specs(system, device), pool)
    room_bytes = _room_bytes(device, pool, users) - _workspace_bytes(device, users, largest_batch=1)
    return sum(held <= room_bytes for held in held_by_usage(device, task))


def held_by_usage(device: PaperDevice, task: PaperTask) -> tuple[int, ...]:
    most_used_first = sorted(task.usage, key=lambda expert: (-task.usage[expert], expert))
    architectures = (device.architectures[task.architectures[expert]] for expert in most_used_first)
    return held_bytes([Footprint(architecture.weight_bytes.value) for architecture in architectures])


def _roofline_images_per_s(
    task: PaperTask,
    setup: EngineSetup,
    simulation: Simulation,
    ssd_bytes_per_s: float,
    speedups: Mapping[str, tuple[float, ...]],
) -> float:
    resources = Resources(setup.executors, setup.pools, setup.matrix, ssd_bytes_per_s, speedups)
    steps = [
        RequestSteps(arrival.at_s, tuple(step.expert for step in simulation.outcomes[number].steps))
        for number, arrival in enumerate(task.trace)
    ]
    counts = Counter(expert for request in steps for expert in request.experts)
    before = [effect for at_s, effect in simulation.effects if at_s < simulation.started_s]
    unread = unread_bytes(counts, resources, resident_after(before))
    work_s, arriving_s = compute_s(counts, resources), arrivals_s(steps, resources)
    return len(steps) / max(work_s, unread / ssd_bytes_per_s, arriving_s)


def _expert_profile(
    device: PaperDevice, processor: str, expert: str, architecture: ArchitectureSection, loading: Loading
) -> ExpertProfile:
    times = _times(architecture, processor)
    is_apart = loading is Loading.FRAMEWORK and not device.is_split
    return ExpertProfile(
        f"{expert}@{processor}" if is_apart else expert,
        Performance(times.K_s.value, times.B_s.value, times.max_batch.value, times.workspace_bytes.value),
        Footprint(architecture.weight_bytes.value),
        _load_s(device, device.pool_of(processor), architecture, loading),
    )


def _load_s(device: PaperDevice, pool: str, architecture: ArchitectureSection, loading: Loading) -> dict[str, float]:
    """Seconds of a load into a memory, by source. A framework's load into a GPU's own memory passes the host's."""
    weight_bytes, framework = architecture.weight_bytes.value, architecture.framework_load_s
    over_ssd_s, over_host_s = weight_bytes / device.links.ssd_bytes_per_s.value, None
    if loading is Loading.FRAMEWORK:
        over_host_s = framework.host.value if framework.host is not None else None
        over_ssd_s = framework.ssd.value - (over_host_s or 0.0 if pool == HOST else 0.0)
    elif device.links.host_bytes_per_s is not None:
        over_host_s = weight_bytes / device.links.host_bytes_per_s.value
    return {SSD: over_ssd_s} if over_host_s is None or pool == HOST else {SSD: over_ssd_s, HOST: over_host_s}


def _pool_spec(
    name: str, system: System, device: PaperDevice, task: PaperTask, specs: Sequence[ExecutorSpec]
) -> PoolSpec:
    users = _users(specs, name)
    room_bytes = _room_bytes(device, name, users)
    held = held_by_usage(device, task)
    largest_bytes = max(each.weight_bytes.value for each in device.architectures.values())
    if name == device.pool_of(GPU) and system.experts is not None:
        expert_bytes = max(held[min(system.experts, len(held)) - 1], largest_bytes)
    elif name == device.pool_of(GPU) and system.expert_fraction is not None:
        expert_bytes = int(room_bytes * system.expert_fraction)
    else:
        expert_bytes = room_bytes - _workspace_bytes(device, users)
    if expert_bytes < largest_bytes or room_bytes - expert_bytes < _workspace_bytes(device, users, largest_batch=1):
        raise ConfigError(
            f"{system.name} on {device.device}: {name} has {room_bytes} bytes, {expert_bytes} of them for experts: "
            f"no room for the largest expert, or for an image of each of {len(users)} executors - take fewer of either"
        )
    return PoolSpec(name, expert_bytes, room_bytes - expert_bytes, HOST if name == DEVICE else None)


def _users(specs: Sequence[ExecutorSpec], pool: str) -> list[ExecutorSpec]:
    return [spec for spec in specs if spec.pool == pool]


def _room_bytes(device: PaperDevice, pool: str, users: Sequence[ExecutorSpec]) -> int:
    return device.usable_bytes(pool) - sum(device.processor(spec.processor).executor_bytes.value for spec in users)


def _workspace_bytes(device: PaperDevice, users: Sequence[ExecutorSpec], largest_batch: int | None = None) -> int:
    return sum(
        max(
            times.workspace_bytes.value * (largest_batch or times.max_batch.value)
            for times in (_times(architecture, spec.processor) for architecture in device.architectures.values())
        )
        for spec in users
    )


def _times(architecture: ArchitectureSection, processor: str) -> TimesSection:
    return architecture.gpu if processor == GPU else architecture.cpu
