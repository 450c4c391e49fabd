"""From a line file to an agent that is ready to start: packs, profiles or probes, plans the memories, puts it together.

Guarantees: whatever must not start raises ConfigError here, before any request is taken; what is wrong with single
experts does not stop the others: they are quarantined, and every request for them says why. With a device profile of
the box nothing is run or timed at the start; what skeletons are copies of is made here, so that nothing is constructed
beside running batches; ``planned`` gives what such an agent would decide with, from manifests.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack, closing, suppress
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import psutil

from agent.core.engine import Engine
from agent.core.policy import PRESETS
from agent.deployment.executors import executor_specs
from agent.deployment.memory_split import limits_of, pool_specs
from agent.deployment.packed_copies import changed_sources, copies_of, lying_packed
from agent.deployment.performance_matrix import core_share, matrix, unmeasured
from agent.deployment.profile_in_use import (
    changes,
    find_profile,
    precisions_of,
    programs_of,
    refuse_mismatches,
    refuse_other_box,
    usage_of,
)
from agent.runtime.executor import threads_per_executor
from agent.runtime.loop import AgentLoop, LoopOptions, assemble
from agent.runtime.machine.detection import detect
from agent.runtime.measuring.probe import Probed, estimated_matrix, probe
from agent.runtime.templates import Templates, make_templates
from experts.backends import backend_for
from experts.errors import BackendUnavailable, ConfigError
from experts.packing import PackingStep, pack_line
from experts.weights import SegmentStore

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from agent.config import LineConfig
    from agent.core.performance import ExecutorSpec, Limits, PerformanceMatrix, PoolSpec
    from agent.core.request import Outcome
    from agent.deployment.packed_copies import Precisions
    from agent.device_profile.records import StoredProfile
    from agent.runtime.expert_copy import ExpertCopy
    from agent.runtime.loop import Decider
    from agent.runtime.machine.box import Box
    from experts.expert import Precision
    from experts.packing import PackingReport

log = logging.getLogger(__name__)

Progress: TypeAlias = "Callable[[str, int, int], None]"


@dataclass(frozen=True, slots=True)
class Agent:
    """A line's agent, not started yet. ``broken``: experts that cannot be served, and why.

    ``probed``: what is known of the experts' times, from ``stored`` or a probe at this start.
    """

    config: LineConfig
    box: Box
    executors: Sequence[ExecutorSpec]
    pools: Sequence[PoolSpec]
    limits: Limits
    precisions: Precisions
    stored: StoredProfile | None
    probed: Probed
    loop: AgentLoop
    segments: SegmentStore
    templates: Templates  # of whatever it may load: while they are held, nothing is constructed beside batches
    broken: Mapping[str, str]
    rss_before_bytes: int  # of this process, before it touched any weights

    @property
    def matrix(self) -> PerformanceMatrix:
        """The performance matrix and the usage that its Engine decides with."""
        return self.probed.matrix

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
    progress: Progress,
    options: LoopOptions | None = None,
    packed: Path | None = None,
    *,
    profile: StoredProfile | Literal["auto"] | None = "auto",
    executors: Sequence[ExecutorSpec] | None = None,
    pools: Sequence[PoolSpec] | None = None,
    usage: Mapping[str, float] | None = None,
    decider: Callable[[Engine], Decider] = lambda engine: engine,
) -> Agent:
    """An agent for a line, over its own packed weights or those in ``packed``.

    ``profile``: "auto" takes the line's own, which has to hold for the box and the experts as they are; one that is
    given is taken as it is; None probes. ``executors``, ``pools`` and ``usage`` (of every expert) stand in the place of
    what line file and profile say. ``decider`` may put something between the loop and its Engine, such as a clock.
    Raises ConfigError for what must not start, and MemoryExceeded for ``pools`` that are too small.
    """
    _import_runtimes(config)
    rss_before_bytes = psutil.Process().memory_info().rss
    with ExitStack() as on_failure:
        segments = on_failure.enter_context(closing(SegmentStore(packed or config.packed_folder)))
        ground = _groundwork(config, segments.directory, profile, executors)
        report = pack(config, segments, ground.precisions, progress)
        copies = copies_of(config, ground.precisions, report.packed)
        by_name = {copy.name: copy for listed in copies.values() for copy in listed}
        if ground.stored is not None and profile == "auto":
            refuse_mismatches(config, ground.stored, ground.box, [copy.packed for copy in by_name.values()])
        probed, specs = _memories(config, ground, copies, segments, progress, pools, usage)
        templates = make_templates(
            copies, segments, threads_per_executor(ground.box, ground.executors),
            lambda done, total: progress("templates", done, total),
        )  # fmt: skip
        limits = limits_of(config, specs)
        engine = Engine(config.catalog.graph, probed.matrix, ground.executors, PRESETS[config.policy], limits)
        loop = assemble(
            decider(engine), ground.box, ground.executors, limits, by_name, segments, on_outcome,
            options or LoopOptions(), probed.matrix,
        )  # fmt: skip
        on_failure.pop_all()
    broken = {name: error.message for name, error in report.failed.items()} | dict(probed.failed)
    broken = dict(templates.failed) | broken
    return Agent(
        config, ground.box, ground.executors, specs, limits, ground.precisions, ground.stored, probed, loop, segments,
        templates, broken, rss_before_bytes,
    )  # fmt: skip


def pack_as_served(config: LineConfig, segments: SegmentStore, progress: Progress) -> PackingReport:
    """Bring a line's packed weights up to date, in the precisions that its agent would run."""
    ground = _groundwork(config, segments.directory, "auto", None)
    return pack(config, segments, ground.precisions, progress)


def pack(config: LineConfig, segments: SegmentStore, precisions: Precisions, progress: Progress) -> PackingReport:
    """Bring a line's packed weights up to date. ``precisions``: processor -> expert -> precision."""

    def wanted(expert: str) -> set[Precision]:
        return {column[expert] for column in precisions.values()}

    def step(step: PackingStep) -> None:
        progress("pack", step.number, step.total)

    try:
        return pack_line(config.catalog.experts.values(), wanted, segments, step)
    except BackendUnavailable as error:
        raise ConfigError(f"{error} - install it, or take the experts that need it off the line") from error


def detect_box(config: LineConfig) -> Box:
    """This box, as the line file wants it seen. Raises ConfigError for a device that is not there."""
    try:
        return detect(config.device)
    except BackendUnavailable as error:
        raise config.document.error(str(error), "device") from error


def doubts(config: LineConfig, profile: StoredProfile) -> tuple[str, ...]:
    """Why an agent of this line that starts now would refuse this profile, or might; nothing is packed or hashed."""
    try:
        box = detect_box(config)
    except ConfigError as error:
        return (str(error),)
    packed = lying_packed(config, config.packed_folder)
    written = [
        f"the weights of {name} were written to after they were packed: if they are others now, profile again"
        for name in changed_sources(config, config.packed_folder)
    ]
    return (*changes(config, profile, box, packed), *written)


@dataclass(frozen=True, slots=True)
class _Groundwork:
    """What is settled before anything is packed."""

    box: Box
    stored: StoredProfile | None
    executors: tuple[ExecutorSpec, ...]
    precisions: Precisions


def _groundwork(
    config: LineConfig,
    packed: Path,
    profile: StoredProfile | Literal["auto"] | None,
    executors: Sequence[ExecutorSpec] | None,
) -> _Groundwork:
    box = detect_box(config)
    stored = find_profile(config) if profile == "auto" else profile
    lying = [] if stored is None else lying_packed(config, packed)
    if stored is not None and profile == "auto":
        refuse_other_box(config, stored, box, lying)
    allocation = None if stored is None else stored.allocation
    specs = tuple(executors or executor_specs(config, box, allocation))
    precisions = precisions_of(config, [spec.processor for spec in specs], stored, programs_of(lying))
    return _Groundwork(box, stored, specs, precisions)


def _memories(
    config: LineConfig,
    ground: _Groundwork,
    copies: Mapping[str, Sequence[ExpertCopy]],
    segments: SegmentStore,
    progress: Progress,
    pools: Sequence[PoolSpec] | None,
    given_usage: Mapping[str, float] | None,
) -> tuple[Probed, tuple[PoolSpec, ...]]:
    """The experts' times, from the profile or a probe, and how the memories are shared out."""
    box, executors, usage = ground.box, ground.executors, given_usage or usage_of(config, ground.stored)
    if ground.stored is not None:
        probed = _profiled(config, ground.stored, box, copies, usage, executors)
        return probed, tuple(pools or pool_specs(config, box, executors, probed.matrix, ground.stored.allocation))
    if pools is None:
        pool_specs(config, box, executors, estimated_matrix(box, copies, usage))  # what cannot fit is not even probed
    progress("probe", 0, 1)
    probed = probe(box, copies, segments, usage, threads_per_executor(box, executors))
    progress("probe", 1, 1)
    return probed, tuple(pools or pool_specs(config, box, executors, probed.matrix))


def _profiled(
    config: LineConfig,
    stored: StoredProfile,
    box: Box,
    copies: Mapping[str, Sequence[ExpertCopy]],
    usage: Mapping[str, float],
    executors: Sequence[ExecutorSpec],
) -> Probed:
    measured = {kind.processor for kind in stored.kinds}
    strange = [processor for processor, listed in copies.items() if listed and processor not in measured]
    if strange:
        raise config.document.error(
            f"the device profile has no times on {', '.join(strange)} - run `coserve profile {config.document.file}`",
            "executors",
        )
    found = matrix(stored, box, copies, usage, executors)
    log.info("profile_used written_at=%s kinds=%d executors=%d", stored.written_at, len(stored.kinds), len(executors))
    for share in sorted({core_share(stored, kind, executors) for kind in stored.kinds}, key=astuple):
        if share.factor != 1.0 and share.processor in copies:
            log.info(
                "cpu_times_scaled processor=%s factor=%.2f executors=%d profiled_threads=%d by=%s",
                share.processor, share.factor, share.executors, share.threads_profiled,
                "speedups" if share.is_measured else "shared cores",
            )  # fmt: skip
    return Probed(found, unmeasured(found, copies))


def _import_runtimes(config: LineConfig) -> None:
    """The backends of this line, before anything is measured; one that is not there is told of by packing."""
    for architecture in sorted({expert.architecture for expert in config.catalog.experts.values()}):
        with suppress(BackendUnavailable):
            backend_for(architecture)
