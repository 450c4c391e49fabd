"""From a line file to an agent that is ready to start: packs, probes, plans the memories, puts the parts together.

Guarantees: whatever must not start raises ConfigError here, before any request is taken; what is wrong with single
experts does not stop the others: they are quarantined, and every request for them says why.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from agent.budget import executor_specs, pool_specs
from agent.config import usage_probabilities
from agent.core.engine import Engine
from agent.core.performance import Limits
from agent.core.policy import PRESETS
from agent.listing import packed_folder
from agent.runtime.device import detect
from agent.runtime.executor import threads_per_executor
from agent.runtime.loop import AgentLoop, LoopOptions, assemble
from agent.runtime.probe import estimated_profile, probe
from agent.runtime.slots import ExpertCopy
from experts.backends import backend_for, family
from experts.errors import BackendUnavailable, ConfigError
from experts.expert import Precision
from experts.packing import PackingStep, pack_line
from experts.weights import SegmentStore

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from agent.config import LineConfig
    from agent.core.performance import ExecutorSpec, PoolSpec
    from agent.core.request import Outcome
    from agent.runtime.device import Box
    from agent.runtime.loop import Decider
    from agent.runtime.probe import Probed
    from experts.packing import PackingReport


@dataclass(frozen=True, slots=True)
class Agent:
    """A line's agent, not started yet. ``broken``: experts that cannot be served, and why."""

    config: LineConfig
    box: Box
    executors: Sequence[ExecutorSpec]
    pools: Sequence[PoolSpec]
    probed: Probed
    loop: AgentLoop
    segments: SegmentStore
    broken: Mapping[str, str]
    rss_before_bytes: int  # of this process, before it touched any weights

    def start(self) -> None:
        """Begin to place experts and take requests."""
        self.loop.start()
        for expert, reason in self.broken.items():
            self.loop.quarantine(expert, reason)

    def stop(self) -> None:
        """End; requests under way stay without an outcome. Raises AgentCrashed, after everything has ended."""
        try:
            self.loop.stop()
        finally:
            self.segments.close()


def build_agent(
    config: LineConfig,
    on_outcome: Callable[[int, Outcome], None],
    progress: Callable[[str, int, int], None],
    options: LoopOptions | None = None,
    packed: Path | None = None,
    decider: Callable[[Engine], Decider] = lambda engine: engine,
) -> Agent:
    """An agent for a line, over its own packed weights or those in ``packed``.

    ``decider`` may put something between the loop and its Engine, such as a clock.
    Raises ConfigError for what must not start.
    """
    _import_runtimes(config)
    rss_before_bytes = psutil.Process().memory_info().rss
    box = _detect(config)
    executors = executor_specs(config, box)
    segments = SegmentStore(packed or packed_folder(config))
    precisions = {
        processor: {name: precision_of(config, name) for name in config.catalog.experts}
        for processor in dict.fromkeys(spec.processor for spec in executors)
    }
    report = pack(config, segments, precisions, progress)
    copies = {
        processor: [
            ExpertCopy(copy_name(name, precision), config.catalog.experts[name], report.packed[name][precision])
            for name, precision in wanted.items()
            if precision in report.packed.get(name, {})
        ]
        for processor, wanted in precisions.items()
    }
    usage = usage_probabilities(config)
    pool_specs(config, box, executors, estimated_profile(box, copies, usage))  # what cannot fit is not even probed
    progress("probe", 0, 1)
    threads = threads_per_executor(box, executors)
    probed = probe(box, copies, segments, usage, threads)
    progress("probe", 1, 1)
    pools = pool_specs(config, box, executors, probed.profile)
    pinned = frozenset(name for name, expert in config.catalog.experts.items() if expert.pin)
    limits = Limits(pools, config.scheduling.max_overtake_s, pinned=pinned)
    engine = Engine(config.catalog.graph, probed.profile, executors, PRESETS[config.policy], limits)
    by_name = {copy.name: copy for listed in copies.values() for copy in listed}
    loop = assemble(decider(engine), box, executors, limits, by_name, segments, on_outcome, options or LoopOptions())
    broken = {name: error.message for name, error in report.failed.items()} | dict(probed.failed)
    return Agent(config, box, executors, pools, probed, loop, segments, broken, rss_before_bytes)


def pack(
    config: LineConfig,
    segments: SegmentStore,
    precisions: Mapping[str, Mapping[str, Precision]],
    progress: Callable[[str, int, int], None],
) -> PackingReport:
    """Bring a line's packed weights up to date. ``precisions``: processor -> expert -> precision."""

    def wanted(expert: str) -> set[Precision]:
        return {column[expert] for column in precisions.values()}

    def step(step: PackingStep) -> None:
        progress("pack", step.number, step.total)

    try:
        return pack_line(config.catalog.experts.values(), wanted, segments, step)
    except BackendUnavailable as error:
        raise ConfigError(f"{error} - install it, or take the experts that need it off the line") from error


def copy_name(expert: str, precision: Precision) -> str:
    """What the Engine calls an expert in one precision."""
    return f"{expert}@{precision}"


def precision_of(config: LineConfig, expert: str) -> Precision:
    """The precision an expert is packed and run in.

    auto is fp32 until a device profile has shown a faster one to agree with it; ONNX graphs and fakes are fp32 always.
    """
    if family(config.catalog.experts[expert].architecture) in {"onnx", "fake"}:
        return Precision.FP32
    return config.precision or Precision.FP32


def _import_runtimes(config: LineConfig) -> None:
    """The backends of this line, before anything is measured; one that is not there is told of by packing."""
    for architecture in sorted({expert.architecture for expert in config.catalog.experts.values()}):
        with suppress(BackendUnavailable):
            backend_for(architecture)


def _detect(config: LineConfig) -> Box:
    try:
        return detect(config.device)
    except BackendUnavailable as error:
        raise config.document.error(str(error), "device") from error
