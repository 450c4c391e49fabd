"""Number of executors of each processor: by the line file, else the profile, else the paper's rule.

GPUs of the box: one for each process, first the agent's own, then its workers, then ranks of models.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from agent.core.performance import ExecutorSpec
from agent.core.policy import PRESETS, Assigning
from agent.environment import torchrun_meeting, visible_gpus

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from agent.config import LineConfig
    from agent.device_profile.records import Allocation
    from agent.runtime.machine.box import Box

CORES_PER_CPU_EXECUTOR = 4  # one image's operators hardly run faster on more cores
SPLIT_DEVICE_EXECUTORS = 3  # section 5.2, on NUMA devices
UNIFIED_DEVICE_EXECUTORS = 2  # section 5.2, on UMA devices
ONE_OF_METAL = "Metal ends a process in which two threads issue work at once"
GRAPHS_BYTES = 128 * 1024 * 1024  # arbitrary: of an executor's CUDA graphs and their pool
LEAST_GAIN = 1.05  # of CUDA graphs, which take memory from experts
EMULATED = ("emulated", "integrated")
ON_GPU = ("cuda", "auto")


def executor_specs(
    config: LineConfig, box: Box, allocation: Allocation | None = None, graphs: Mapping[str, float] | None = None
) -> tuple[ExecutorSpec, ...]:
    """Executors of a line on this box, the device's first. ``graphs``: as in a profile. Raises ConfigError for a
    processor that the box lacks."""
    counts: Mapping[str, int] | None = config.executors
    if counts is None:
        counts = _auto_executors(box) if allocation is None else allocation.executors
        counts = {name: 1 if name == "mps" else number for name, number in counts.items()}
    for processor in counts:
        if processor not in box.processors:
            there = ", ".join(box.processors)
            raise config.document.error(f"this box has no {processor!r} - use {there}", "executors", processor)
    if counts.get("mps", 0) > 1:
        raise config.document.error(f"give 1: {ONE_OF_METAL}", "executors", "mps")
    ordered = sorted(counts, key=lambda processor: (processor == "cpu", processor))
    processors = [processor for processor in ordered for _ in range(counts[processor])]
    if PRESETS[config.policy].assigning is Assigning.FIRST:
        processors = processors[:1]
    if not processors:
        raise config.document.error("there is no executor - give one at least", "executors")
    return tuple(
        replace(spec, graphs_bytes=GRAPHS_BYTES) if (graphs or {}).get(spec.processor, 0) >= LEAST_GAIN else spec
        for spec in executors_on(box, processors)
    )


def are_in_workers(config: LineConfig) -> bool:
    """True if the agent's own process has no executor: beside workers, unless the line file names some or has language
    models."""
    takes_texts = any(expert.takes_texts for expert in config.catalog.experts.values())
    return bool(config.cluster.workers) and config.executors is None and not takes_texts


def executors_on(box: Box, processors: Iterable[str]) -> tuple[ExecutorSpec, ...]:
    return tuple(ExecutorSpec(number, processor, box.pool_of(processor)) for number, processor in enumerate(processors))


def casual_executors(box: Box) -> dict[str, int]:
    """Three on a device with split memory, two with unified memory, one on the CPU (CoServe, section 5.2) or Metal."""
    device_executors = SPLIT_DEVICE_EXECUTORS if box.is_split else UNIFIED_DEVICE_EXECUTORS
    return {name: 1 if name in ("cpu", "mps") else device_executors for name in box.processors}


def _auto_executors(box: Box) -> Mapping[str, int]:
    """Casual counts, but one executor for an emulated device, which is the CPU, and several on a CPU alone."""
    casual = casual_executors(box)
    if box.processors == ("cpu",):
        return {"cpu": max(box.cores // CORES_PER_CPU_EXECUTOR, 1)}
    return {processor: 1 if processor in EMULATED else count for processor, count in casual.items()}


def gpus_of_workers(config: LineConfig) -> dict[str, str]:
    """The GPU that each worker of this box sees, by name, if it may have one; "" if none is left."""
    gpus = _beside_agent(config)
    return {name: next(gpus, "") for name, kind in config.cluster.kinds.items() if kind.device in ON_GPU}


def gpus_of_ranks(config: LineConfig, count: int) -> dict[str, tuple[str, ...]]:
    """GPUs of language models whose ranks get one each, by expert. ``count``: of this box, for such ranks.

    Ranks of other models compute on CPUs, as those of several boxes do.
    """
    if config.device not in ON_GPU or torchrun_meeting() is not None:
        return {}
    here = () if config.cluster.address is not None else gpus_of_workers(config)
    left = list(islice(_beside_agent(config), max(count - _of_agent(config), 0)))[len(here) :]
    found = {}
    for name, expert in config.catalog.experts.items():
        if expert.parallel is not None and expert.parallel.ranks <= len(left):
            found[name], left = tuple(left[: expert.parallel.ranks]), left[expert.parallel.ranks :]
    return found


def _beside_agent(config: LineConfig) -> Iterator[str]:
    gpus = visible_gpus()
    for _ in range(_of_agent(config)):
        next(gpus, None)
    return gpus


def _of_agent(config: LineConfig) -> int:
    """1 if the agent's own process has executors of a GPU, if there is one."""
    own = config.executors
    return int(config.device in ON_GPU and not are_in_workers(config) and (own is None or bool(own.get("cuda"))))
