"""A line file becomes an agent that is ready to start: pack, profile or probe, split the memories, assemble.

Guarantees: a line that must not start raises ConfigError here. A faulty expert is quarantined with the reason, and the
others are served. With a device profile, only experts that differ from it are probed.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Literal, TypeAlias

import psutil

from agent.core.names import expert_of
from agent.core.performance import PerformanceMatrix
from agent.deployment.deployment import AS_CONFIGURED, Deployment, Overrides, decided
from agent.deployment.executors import are_in_workers
from agent.deployment.packed_copies import changed_sources, copies_of, other_thresholds, packed_experts, with_forms
from agent.deployment.performance_matrix import core_share, matrix, unmeasured, with_families
from agent.deployment.placement import with_workers
from agent.deployment.profile_in_use import (
    advice_without_profile,
    bound_decodings,
    change_alarms,
    changed_experts,
    scaled_experts,
    unproven,
    usable_profile,
)
from agent.deployment.ranked_experts import beside_ranks, parts_of_ranks, times_of_ranks
from agent.deployment.worker_manager import WorkerManager, processes_on_box
from agent.device_profile.identity import box_mismatches, identity_of
from agent.faults.errors import DeviceMissing
from agent.runtime.assembly import assemble
from agent.runtime.loop import AgentLoop, AgentPlan, LoopOptions
from agent.runtime.machine.box import threads_per_executor
from agent.runtime.machine.detection import detect, drive_of
from agent.runtime.machine.threads import end_team, one_thread
from agent.runtime.measuring.probe import Probed, estimated_matrix, probe
from agent.runtime.requests import Requests
from agent.runtime.weights.skeletons import Templates, make_templates
from experts.backends import backend_for
from experts.backends.forms import form_of
from experts.errors import BackendUnavailable, ConfigError, ExpertError
from experts.expert import OTHER_THRESHOLD, Precision
from experts.packed.calibrated import why_not_calibrated
from experts.packed.packing import pack_line
from experts.packed.weights import SegmentStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from agent.config import LineConfig
    from agent.core.engine import EngineSetup
    from agent.core.performance import ExpertProfile
    from agent.core.request import Outcome
    from agent.deployment.deployment import Copies
    from agent.deployment.packed_copies import Precisions
    from agent.device_profile.records import StoredProfile
    from agent.runtime.expert_copy import ExpertCopy
    from agent.runtime.loop import Decider
    from agent.runtime.machine.box import Box
    from experts.packed.packing import PackingReport
    from experts.packed.weights import PackedExpert

log = logging.getLogger(__name__)

Progress: TypeAlias = "Callable[[str, int, int], None]"


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """Options of ``build_agent``. ``packed``: folder of weights instead of the line's. ``profile``: "auto" takes the
    line's, or probes with an alarm if it is not valid here; a given profile is trusted; None probes. ``decider`` may
    wrap the Engine, for example with a clock."""

    loop: LoopOptions = field(default_factory=LoopOptions)
    packed: Path | None = None
    profile: StoredProfile | Literal["auto"] | None = "auto"
    overrides: Overrides = AS_CONFIGURED
    decider: Callable[[Decider], Decider] = lambda engine: engine


AS_SERVED = AgentOptions()


@dataclass(frozen=True, slots=True)
class Agent:
    """A line's agent. ``setup``: arguments of its Engine; ``packed``: weights that it may load, by copy."""

    config: LineConfig
    box: Box
    setup: EngineSetup
    stored: StoredProfile | None
    packed: Mapping[str, PackedExpert]
    loop: AgentLoop
    workers: WorkerManager  # beside this process
    segments: SegmentStore
    templates: Templates  # of all copies, so that no module is constructed during batches
    rss_before_bytes: int  # of this process, before weights are loaded
    copies: Mapping[str, ExpertCopy] = field(default_factory=dict)  # by name, all of the matrix
    experts: Mapping[str, str] = field(default_factory=dict)  # the Engine's name by the line's, if they differ
    retired: frozenset[str] = frozenset()  # the Engine's names of experts of earlier lines
    changes: int = 0  # of the line, since the start
    earlier_names: frozenset[str] = frozenset()  # of experts, in earlier line files
    alarms: tuple[str, ...] = ()  # why the device profile is not used, or not for all experts

    def expert(self, name: str) -> str:
        return self.experts.get(name, name)

    @property
    def served(self) -> list[PackedExpert]:
        """Packed weights of the experts that the line has now, in each form that serves."""
        names = {self.expert(name) for name in self.config.catalog.experts}
        return [packed for copy, packed in self.packed.items() if expert_of(copy) in names]

    def start(self) -> None:
        self.loop.start()
        for expert, reason in self.setup.broken.items():
            self.loop.quarantine(expert, reason)

    def stop(self) -> None:
        """End; requests under way get no outcome. Raises AgentCrashed, after all threads have ended."""
        self.workers.stop()
        try:
            self.loop.stop()
        finally:
            self.segments.close()


def build_agent(
    config: LineConfig,
    on_outcome: Callable[[int, Outcome], None],
    progress: Progress,
    options: AgentOptions = AS_SERVED,
) -> Agent:
    """An agent, not started. Raises ConfigError for a line that must not start, MemoryExceeded for too small given
    pools."""
    for architecture in sorted({expert.architecture for expert in config.catalog.experts.values()}):
        with suppress(BackendUnavailable):  # reported by packing
            backend_for(architecture)  # import runtimes before memory is measured
    rss_before_bytes = psutil.Process().memory_info().rss
    with ExitStack() as on_failure:
        segments = on_failure.enter_context(closing(SegmentStore(options.packed or config.packed_folder)))
        line = deployment_of(config, segments.directory, options)
        if options.profile == "auto" and line.profile is None:
            for advice in advice_without_profile(config, line.box):
                log.info("no_profile %s", advice)
        workers = WorkerManager(config, segments, options.loop.ssd_bytes_per_s)
        on_failure.callback(workers.close)
        workers.start(progress)
        parts = line_parts(workers, line, segments, progress)
        times = line_times(workers, parts, segments, progress)
        here = parts[""]
        by_name = {copy.name: copy for part in parts.values() for copy in part.all_copies}
        setups = {name: part.setup(times[name].matrix, times[name].failed) for name, part in parts.items()}
        local = setups.pop("")
        setup, _ = with_workers(local, setups, workers.node)
        templates = make_templates(
            here.copies, segments, threads_per_executor(here.box, here.executors),
            lambda done, total: progress("templates", done, total),
        )  # fmt: skip
        loop = assemble(
            options.decider(setup.engine()),
            AgentPlan(here.box, setup, by_name),
            segments,
            on_outcome,
            replace(options.loop, keeps_prefixes=config.texts.prefix_cache, scaled=scaled_experts(here.profile)),
        )
        workers.attach(loop, setup, progress)
        on_failure.pop_all()
    setup = replace(setup, broken=dict(templates.failed) | dict(setup.broken))
    rows = (row for column in setup.matrix.experts.values() for row in column.values())
    packed = {row.copy: by_name[row.copy].packed for row in rows}
    return Agent(
        config, here.box, setup, here.profile, packed, loop, workers, segments, templates, rss_before_bytes,
        by_name, alarms=all_alarms(parts),
    )  # fmt: skip


def line_parts(
    workers: WorkerManager,
    line: Deployment,
    segments: SegmentStore,
    progress: Progress,
    in_use: Iterable[PackedExpert] = (),
) -> dict[str, Deployment]:
    """A line's parts by worker, packed; "" is the agent's own process. Language models run there, or on ranks."""

    def of_worker(name: str) -> Deployment:
        own = workers.deployment(name, here)
        precisions = _calibrated(own.config, segments.directory, _executable(own.precisions))
        found = packed_as_proven(replace(own, precisions=precisions), segments, progress, in_use)
        images = {
            processor: [copy for copy in listed if not copy.expert.takes_texts]
            for processor, listed in found.copies.items()
        }
        return replace(found, copies=images)

    here = packed_as_proven(line, segments, progress, in_use)
    here = replace(here, copies=_held_copies(here))
    return {"": here, **workers.for_each(of_worker), **dict(parts_of_ranks(here, segments.directory))}


def line_times(
    workers: WorkerManager,
    parts: Mapping[str, Deployment],
    segments: SegmentStore,
    progress: Progress,
    chosen: Callable[[Iterable[ExpertCopy]], list[ExpertCopy]] = list,
    known: Callable[[str, ExpertCopy], ExpertProfile | None] = lambda *_: None,
) -> dict[str, Probed]:
    """Times of the chosen copies by worker, and experts that cannot run. ``known``: rows by processor, not measured.

    Raises ConfigError, before measuring, for experts that cannot fit, and WorkerBroken.
    """

    def times(name: str) -> Probed:
        own = parts[name]

        def measure(untimed: Copies) -> Probed:
            if name:
                return workers.measure(name, own, untimed, progress)
            return probe(own.box, untimed, segments, own.usage, threads_per_executor(own.box, own.executors))

        def known_here(processor: str, copy: ExpertCopy) -> ExpertProfile | None:
            return known(f"{name}/{processor}" if name else processor, copy)

        wanted = {processor: chosen(listed) for processor, listed in own.copies.items()}
        found = _times(own, wanted, measure, progress, known_here)
        unpacked = {expert: error.message for expert, error in own.unpacked.items()}
        return replace(found, failed=unpacked | dict(found.failed))

    ranked = {
        name: times_of_ranks(part)
        for name, part in parts.items()
        if any(copy.expert.parallel is not None for copy in part.all_copies)
    }
    return {"": times(""), **workers.for_each(times), **ranked}


def all_alarms(parts: Mapping[str, Deployment]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(alarm for part in parts.values() for alarm in part.alarms))


@contextmanager
def agent_with_requests(
    config: LineConfig, progress: Progress, options: AgentOptions = AS_SERVED, requests: Requests | None = None
) -> Iterator[tuple[Agent, Requests]]:
    """An agent to start, and requests to it; stopped at the end. Raises as ``build_agent``."""
    requests = requests or Requests()
    agent = build_agent(config, requests.report, progress, options)
    requests.watch(agent.loop)
    try:
        yield agent, requests
    finally:
        agent.stop()


def packed_as_proven(
    plan: Deployment, segments: SegmentStore, progress: Progress, in_use: Iterable[PackedExpert] = ()
) -> Deployment:
    """Pack a line as profiled; pack experts that differ from their profile again in fp32, with an alarm."""
    config, profile, in_use = plan.config, plan.profile, tuple(in_use)
    plan = _packed(plan, pack(config, segments, plan.precisions, progress, in_use))
    packed = [copy.packed for copy in plan.all_copies]
    plan = replace(plan, alarms=(*plan.alarms, *_threshold_alarms(config, packed)))
    if profile is None or plan.takes_any:
        return plan
    changed = changed_experts(config, profile, packed)
    for name, how in sorted(changed.items()):
        log.warning("expert_not_as_profiled expert=%s: it %s", name, how)
    precisions = unproven(config, plan.precisions, changed)
    if precisions != plan.precisions:
        plan = _packed(replace(plan, precisions=precisions), pack(config, segments, precisions, progress, in_use))
    alarms = (*plan.alarms, *change_alarms(config, changed))
    bound = bound_decodings(config, profile, lambda name: {each[name] for each in precisions.values() if name in each})
    profile = replace(profile, decodings=tuple(each for each in bound if each.expert not in changed))
    return replace(plan, profile=profile, alarms=alarms, changed=changed)


def _packed(plan: Deployment, report: PackingReport) -> Deployment:
    return replace(plan, copies=copies_of(plan.config, plan.precisions, report.packed), unpacked=report.failed)


def _threshold_alarms(config: LineConfig, packed: Iterable[PackedExpert]) -> list[str]:
    """Alarms for experts whose threshold belongs to other weights: they judge nothing."""
    alarms = [
        f"expert {name}: {OTHER_THRESHOLD}, so every image is UNKNOWN - run `coserve experts threshold "
        f"{config.document.file} {name} --samples DATA`, then reload"
        for name in other_thresholds(config, packed)
    ]
    for alarm in alarms:
        log.warning("threshold_of_others %s", alarm)
    return alarms


def pack(
    config: LineConfig,
    segments: SegmentStore,
    precisions: Precisions,
    progress: Progress,
    in_use: Iterable[PackedExpert] = (),
) -> PackingReport:
    """Pack new experts. ``precisions``: by processor and expert; ``in_use``: packed files that must stay."""
    try:
        with one_thread():
            return pack_line(
                config.catalog.experts.values(),
                lambda expert: {column[expert] for column in precisions.values() if expert in column},
                segments, lambda step: progress("pack", step.number, step.total), in_use,
            )  # fmt: skip
    except BackendUnavailable as error:
        raise ConfigError(f"{error} - install it, or remove the experts that need it from the line") from error
    finally:
        end_team()


def detect_box(config: LineConfig) -> Box:
    """This box, as the line file wants it. Raises DeviceMissing."""
    try:
        return replace(detect(config.device), drive=drive_of(config.packed_folder))
    except BackendUnavailable as error:
        found = config.document.error(str(error), "device")
        raise DeviceMissing(found.message, found.place) from error


def doubts(config: LineConfig, profile: StoredProfile) -> tuple[str, ...]:
    """Reasons why a profile may be invalid for an agent that starts now. Packs and hashes nothing."""
    try:
        box = detect_box(config)
    except ConfigError as error:
        return (str(error),)
    packed = packed_experts(config, config.packed_folder)
    written = [
        f"the weights file of {name} was written after packing: if the weights are new, run "
        f"`coserve profile {config.document.file} --expert {name}`"
        for name in changed_sources(config, config.packed_folder)
    ]
    changes = change_alarms(config, changed_experts(config, profile, packed))
    return (*box_mismatches(profile, identity_of(box)), *changes, *written)


def deployment_of(config: LineConfig, packed: Path, options: AgentOptions, box: Box | None = None) -> Deployment:
    """Decisions of an agent that starts now. ``box``: a supposed one; default: this one. Raises ConfigError."""
    whole = box or detect_box(config)
    stored, alarms = usable_profile(config, whole) if options.profile == "auto" else (options.profile, ())
    box = whole.shared_by(processes_on_box(config))
    if options.overrides.pools is None:  # else ranks have their memory
        box = beside_ranks(config, box)
    found = [] if stored is None else packed_experts(config, packed)
    overrides = options.overrides
    if overrides.executors is None and are_in_workers(config):
        overrides = replace(overrides, executors=())
    plan = decided(config, box, stored, found, overrides)
    precisions = _calibrated(config, packed, _executable(plan.precisions))
    return replace(plan, precisions=precisions, alarms=alarms, takes_any=options.profile != "auto")


def _executable(precisions: Precisions) -> Precisions:
    """Replace forms that do not run on this CPU by torch's form, with a warning for each."""
    wanted = {name for column in precisions.values() for name in column.values() if form_of(name).is_cpu_only}
    reasons = {name: reason for name in sorted(wanted) if (reason := form_of(name).why_absent()) is not None}
    for name, reason in reasons.items():
        advice = "write `precision: auto` or fp32"
        log.warning(
            "form_absent precision=%s runs_as=%s reason=%s advice=%s", name, form_of(name).plain, reason, advice
        )
    return with_forms(precisions, lambda _, name: form_of(name).plain if name in reasons else name)


def _calibrated(config: LineConfig, packed: Path, precisions: Precisions) -> Precisions:
    """Replace calibrated forms by plain ones for experts whose weights have no calibration, with a warning for each."""
    given = {pair for column in precisions.values() for pair in column.items()}
    reasons: dict[tuple[str, Precision], str] = {}
    for expert, name in sorted(pair for pair in given if form_of(pair[1]).needs_calibration):
        with suppress(ExpertError):  # packing reports missing weights
            if (reason := why_not_calibrated(config.catalog.experts[expert], name, packed)) is not None:
                reasons[expert, name] = reason
    for (expert, name), reason in reasons.items():
        plain = form_of(name).plain
        log.warning("not_calibrated expert=%s precision=%s runs_as=%s reason=%s", expert, name, plain, reason)
    return with_forms(precisions, lambda expert, name: form_of(name).plain if (expert, name) in reasons else name)


def _held_copies(plan: Deployment) -> Copies:
    """Its copies, with as many moe_experts as there is room for."""
    profile = plan.profile
    if profile is None:
        return plan.sized(plan.copies, lambda sized: estimated_matrix(plan.box, sized, plan.usage))
    return plan.sized(plan.copies, lambda sized: matrix(profile, plan.box, sized, plan.usage, plan.executors))


def _times(
    plan: Deployment, copies: Copies, measure: Callable[[Copies], Probed], progress: Progress,
    known: Callable[[str, ExpertCopy], ExpertProfile | None],
) -> Probed:  # fmt: skip
    """Times of the profile, known or measured ones. Raises as ``line_times``."""
    profile = plan.profile
    timed = PerformanceMatrix({}, plan.usage) if profile is None else _profiled(plan, profile, copies)
    untimed = _untimed(plan, timed, copies)
    again = {
        processor: {copy.expert.id: row for copy in listed if (row := known(processor, copy)) is not None}
        for processor, listed in untimed.items()
    }
    untimed = {
        processor: [copy for copy in listed if copy.expert.id not in again[processor]]
        for processor, listed in untimed.items()
    }
    probed = Probed(PerformanceMatrix({}), {})
    if any(untimed.values()):
        plan.setup(estimated_matrix(plan.box, untimed, plan.usage))
        progress("probe", 0, 1)
        probed = measure(untimed)
        progress("probe", 1, 1)
    columns = {
        processor: {
            **timed.experts.get(processor, {}),
            **again[processor],
            **probed.matrix.experts.get(processor, {}),
        }
        for processor in copies
    }
    found = with_families(PerformanceMatrix(columns, timed.usage), chain.from_iterable(copies.values()))
    kinds = {copy.expert.id: copy.kind for listed in copies.values() for copy in listed}
    failed = unmeasured(found, kinds) if profile is not None else {}
    return Probed(found, failed | dict(probed.failed))


def _untimed(plan: Deployment, timed: PerformanceMatrix, copies: Copies) -> dict[str, list[ExpertCopy]]:
    """Copies to probe: all without a profile, else new and changed experts without times."""
    measured = {kind.processor for kind in plan.profile.kinds} if plan.profile is not None else set()
    return {
        processor: [
            copy
            for copy in listed
            if copy.expert.id not in timed.experts.get(processor, {})
            and (processor not in measured or copy.expert.id in plan.changed)
        ]
        for processor, listed in copies.items()
    }


def _profiled(plan: Deployment, stored: StoredProfile, copies: Copies) -> PerformanceMatrix:
    executors = plan.executors * plan.processes
    log.info("profile_used written_at=%s kinds=%d executors=%d", stored.written_at, len(stored.kinds), len(executors))
    for processor, factor in sorted({(kind.processor, core_share(stored, kind, executors)) for kind in stored.kinds}):
        if factor != 1.0 and processor in copies:
            log.info("times_scaled processor=%s factor=%.2f executors=%d", processor, factor, len(executors))
    return matrix(stored, plan.box, copies, plan.usage, executors)
