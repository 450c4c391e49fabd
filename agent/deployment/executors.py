"""Number of executors of each processor: by the line file, else the profile, else the paper's rule."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from agent.core.performance import ExecutorSpec
from agent.core.policy import PRESETS, Assigning

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

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
