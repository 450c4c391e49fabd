"""``coserve profile`` from start to end: the offline phase of one line on one box (CoServe, sections 4.4 and 4.5).

Guarantees: nothing that was measured is lost when it is killed, the next run goes on from there; the finished profile
replaces the earlier one as a whole or not at all; no agent of this line runs meanwhile, for both would slow the other.
In this order: each kind of experts once on each processor, in every form that its backend has or in the one that the
line file names; which forms agree with fp32, the fastest first, over all experts that have samples; links; several
executors at once; usage; and last the split of the memories and the number of executors.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TypeAlias

from agent.assembly import detect_box
from agent.budget import casual_allocation, pool_budgets
from agent.copies import copy_name
from agent.core.performance import ExecutorSpec
from agent.listing import packed_folder, profile_file
from agent.matrix import kind_of
from agent.profile import ProfileDraft, StoredProfile, identity_of, packed_sha256, read_profile, replace_usage
from agent.records.database import StateLock
from agent.runtime.device import torch_device
from agent.runtime.executor import threads_per_executor
from agent.runtime.slots import ExpertCopy
from experts.backends import family
from experts.errors import BackendUnavailable, ConfigError, ExpertError
from experts.expert import Precision
from experts.packing import forget_other_forms, pack_line
from experts.weights import SegmentStore
from profiler.agreement import TOLERANCE, candidate_precisions, choose_precision, compare, image_s
from profiler.allocation import SearchOptions
from profiler.batches import BatchOptions
from profiler.microbench import Bench, measure_kind, measure_links, measure_speedups
from profiler.samples import LineSamples
from profiler.throughput import SAMPLE_REQUESTS, sample_requests, search_in_simulation, search_on_engine
from profiler.usage import UsageFound, computed_usage, usage_from_results, usage_from_samples

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from agent.config import LineConfig
    from agent.profile import Agreement, Allocation, KindProfile, UsageProfile
    from agent.runtime.device import Box
    from experts.packing import PackingStep

    Copies: TypeAlias = "defaultdict[Precision, list[ExpertCopy]]"

REPRESENTATIVES = 4  # experts of a kind that are packed in every form; one is timed, and their files load in turn
MOST_TOGETHER = 4  # executors of one processor that are measured at once
KIND_LIMIT_S = 20.0  # spent on running one kind in one form on one processor
ONE_FORM = frozenset({"onnx", "fake"})  # families that the line's `precision` does not concern
ENGINE, SIMULATE, CASUAL = "engine", "simulate", "casual"  # where the allocation comes from


@dataclass(frozen=True, slots=True)
class ProfilingOptions:
    """What `coserve profile` was asked for.

    ``samples``: a folder of real images instead of the line's own intake. ``count_usage``: run the routes on them.
    ``allocation``: ENGINE (real runs of ``engine_requests`` each), SIMULATE (in seconds), or CASUAL (no search).
    ``fresh``: measure all anew.
    """

    samples: Path | None = None
    count_usage: bool = False
    usage_from: Path | None = None
    allocation: str = ENGINE
    engine_requests: int = 200
    fresh: bool = False
    tolerance: float = TOLERANCE
    batches: BatchOptions = field(default_factory=lambda: BatchOptions(limit_s=KIND_LIMIT_S))
    search: SearchOptions = field(default_factory=SearchOptions)


@dataclass(frozen=True, slots=True)
class Profiled:
    """The finished profile, where it lies, and what its reader should know."""

    profile: StoredProfile
    path: Path
    notes: tuple[str, ...]


def profile_line(config: LineConfig, options: ProfilingOptions, progress: Callable[[str, int, int], None]) -> Profiled:
    """Profile a line on this box. Raises ConfigError, AlreadyRunning while its agent runs, AgentCrashed."""
    with StateLock(config.state), closing(SegmentStore(packed_folder(config))) as segments:
        box = detect_box(config)
        samples = LineSamples.find(config, options.samples)
        with ProfileDraft.open(profile_file(config), config.line, identity_of(box), fresh=options.fresh) as draft:
            return _Profiling(config, options, progress, box, segments, samples, draft).run()


def learn_usage(config: LineConfig, history: Path | None) -> Profiled | None:
    """Put usage learned from served history into the line's finished profile, which is otherwise kept.

    None where no history is given, or the line has no finished profile yet. Raises ConfigError.
    """
    path = profile_file(config)
    if history is None or not path.exists():
        return None
    found = usage_from_results(history, config)
    read_profile(path)  # what is no profile is refused before anything is replaced
    replace_usage(path, found.usage)
    return Profiled(read_profile(path), path, found.notes)


class _Profiling:
    """One run. Each step saves what it found, and leaves alone what an earlier run saved."""

    def __init__(
        self,
        config: LineConfig,
        options: ProfilingOptions,
        progress: Callable[[str, int, int], None],
        box: Box,
        segments: SegmentStore,
        samples: LineSamples,
        draft: ProfileDraft,
    ) -> None:
        self._config = config
        self._options = options
        self._progress = progress
        self._box = box
        self._segments = segments
        self._samples = samples
        self._draft = draft
        self._packed_before = draft.packed()
        self._notes: list[str] = []
        self._failed: dict[str, str] = {}

    def run(self) -> Profiled:
        """All steps."""
        if self._samples.broken:
            self._notes.append(f"{len(self._samples.broken)} sample images are broken and were passed over")
        processors = self._processors()
        copies = self._packed({name: set(self._forms(name, processors)) for name in self._representatives()})
        for processor in processors:
            self._measure_kinds(processor, copies)
        chosen = {processor: self._choose(processor, copies) for processor in processors}
        precisions = {(kind, processor): form for processor, forms in chosen.items() for kind, form in forms.items()}
        if not precisions:
            raise ConfigError("no expert of this line can be run on this box:\n" + "\n".join(self._notes))
        self._draft.save_precisions(precisions)
        self._measure_links_and_speedups(copies, processors)
        self._save_packed(precisions)
        usage = self._usage(self._interim(precisions, computed_usage(self._config)))
        self._notes += usage.notes
        self._draft.save_usage(usage.usage)
        self._draft.save_allocation(self._allocation(self._interim(precisions, usage.usage)))
        profile = self._draft.finish()
        return Profiled(profile, profile_file(self._config), tuple(self._notes))

    def _save_packed(self, precisions: Mapping[tuple[str, str], str]) -> None:
        """Pack every expert as it will run, forget its other forms, and note what was profiled."""
        forms: defaultdict[str, set[Precision]] = defaultdict(set)
        for (kind, _), form in precisions.items():
            forms[kind].add(Precision(form))
        references = self._references(self._packed({}))
        wanted = {copy.expert.id: forms[kind_of(copy)] for copy in references if forms[kind_of(copy)]}
        copies = self._packed(wanted)
        listed = [copy for form in copies for copy in copies[form] if form in wanted.get(copy.expert.id, ())]
        kept = {name: wanted.get(name, {self._reference(name)}) for name in self._config.catalog.experts}
        forget_other_forms(kept, self._segments)
        self._draft.save_packed(
            {(copy.expert.id, str(copy.packed.precision)): packed_sha256(copy.packed) for copy in listed}
        )

    # -- what there is to measure --

    def _processors(self) -> tuple[str, ...]:
        """Those that the line may use, fastest first."""
        given = self._config.executors
        return tuple(name for name in self._box.processors if given is None or given.get(name, 0) > 0)

    def _forms(self, expert: str, processors: Iterable[str]) -> Iterable[Precision]:
        """What an expert may run in: what the line file gives, else all that its backend has."""
        architecture = self._config.catalog.experts[expert].architecture
        given = self._config.precision
        if given is not None and family(architecture) not in ONE_FORM:
            elsewhere = given.is_cpu_only and any(torch_device(processor) != "cpu" for processor in processors)
            return (given, Precision.FP32) if elsewhere else (given,)
        try:
            return {form for processor in processors for form in candidate_precisions(architecture, processor)}
        except BackendUnavailable as error:
            raise ConfigError(f"{error} - install it, or take the experts that need it off the line") from error

    def _representatives(self) -> set[str]:
        """A few experts of each kind, those with samples first: they stand for all others of it."""
        found: defaultdict[tuple[object, ...], list[str]] = defaultdict(list)
        for name, expert in self._config.catalog.experts.items():
            own = name if family(expert.architecture) in ONE_FORM else None
            found[expert.architecture, expert.stem, expert.input, own].append(name)
        ordered = (sorted(names, key=lambda name: not self._samples.of(name)) for names in found.values())
        return {name for names in ordered for name in names[:REPRESENTATIVES]}

    def _reference(self, expert: str) -> Precision:
        """The form that every expert is packed in: others are compared with it."""
        architecture = self._config.catalog.experts[expert].architecture
        given = self._config.precision
        return Precision.FP32 if given is None or family(architecture) in ONE_FORM else given

    def _packed(self, wanted: Mapping[str, set[Precision]]) -> Copies:
        """The line's copies in the forms wanted and in the reference, by form."""
        experts = self._config.catalog.experts
        forms = {name: wanted.get(name, set()) | {self._reference(name)} for name in experts}

        def step(step: PackingStep) -> None:
            self._progress("pack", step.number, step.total)

        report = pack_line(experts.values(), forms, self._segments, step)
        self._tell_failed({name: error.message for name, error in report.failed.items()})
        found: Copies = defaultdict(list)
        for name, by_form in report.packed.items():
            for form, packed in by_form.items():
                found[form].append(ExpertCopy(copy_name(name, form), experts[name], packed))
        return found

    def _tell_failed(self, failed: Mapping[str, str]) -> None:
        self._failed.update(failed)
        for name, reason in failed.items():
            note = f"{name} cannot be served: {reason}"
            if note not in self._notes:
                self._notes.append(note)

    # -- the steps --

    def _measure_kinds(self, processor: str, copies: Copies) -> None:
        """Every kind in every form that runs there; what an earlier run measured stays."""
        there = {(each.kind, each.processor, each.precision) for each in self._draft.kinds()}
        jobs = [
            (kind, form, listed)
            for form in copies
            for kind, listed in _by_kind(copies[form]).items()
            if form in candidate_precisions(listed[0].expert.architecture, processor)
        ]
        for number, (kind, form, listed) in enumerate(jobs, start=1):
            self._progress(f"measure on {processor}", number, len(jobs))
            if (kind, processor, str(form)) in there:
                continue
            try:
                self._draft.save_kind(measure_kind(self._bench(processor), listed))
            except ExpertError as error:
                self._notes.append(f"{kind} in {form} does not run on {processor}: {error.message}")

    def _choose(self, processor: str, copies: Copies) -> dict[str, str]:
        """The form of each kind: the fastest that agrees with fp32; with fp32 alone compared as far as it takes."""
        measured: defaultdict[str, list[KindProfile]] = defaultdict(list)
        for each in self._draft.kinds():
            if each.processor == processor:
                measured[each.kind].append(each)
        chosen = {}
        for kind, listed in _by_kind(self._references(copies)).items():
            if not measured[kind]:
                continue
            if self._config.precision is not None:
                form = self._reference(listed[0].expert.id)
                runs = any(profile.precision == form for profile in measured[kind])
                chosen[kind] = str(form if runs else Precision.FP32)
                continue
            chosen[kind] = self._fastest_that_agrees(processor, kind, measured[kind], listed)
        return chosen

    def _fastest_that_agrees(
        self, processor: str, kind: str, profiles: Sequence[KindProfile], reference: Sequence[ExpertCopy]
    ) -> str:
        agreements: list[Agreement] = []
        for profile in sorted(profiles, key=image_s):
            if profile.precision == Precision.FP32:
                break
            agreement = self._agreement(processor, kind, Precision(profile.precision), reference)
            agreements.append(agreement)
            if not agreement.images:
                self._notes.append(
                    f"{kind} on {processor} stays fp32: no sample images, so {profile.precision} is not proven to agree"
                )
                break
            if agreement.agrees:
                break
        return choose_precision(profiles, agreements)

    def _agreement(self, processor: str, kind: str, form: Precision, reference: Sequence[ExpertCopy]) -> Agreement:
        """Of all experts of the kind; an earlier one holds as long as nothing was packed anew since."""
        wanted = {copy.expert.id: {form} for copy in reference}
        others = [copy for copy in self._packed(wanted)[form] if kind_of(copy) == kind]
        digests = {(copy.expert.id, str(copy.packed.precision)): packed_sha256(copy.packed) for copy in others}
        key = (kind, processor, str(form))
        earlier = {(each.kind, each.processor, each.precision): each for each in self._draft.agreements()}
        is_same = all(self._packed_before.get(name) == digest for name, digest in digests.items())
        if key in earlier and is_same and earlier[key].tolerance == self._options.tolerance:
            return earlier[key]
        self._progress(f"compare {form} on {processor}", 0, 1)
        agreement = compare(self._bench(processor), reference, others, self._options.tolerance)
        self._draft.save_agreement(agreement)
        self._progress(f"compare {form} on {processor}", 1, 1)
        return agreement

    def _measure_links_and_speedups(self, copies: Copies, processors: Sequence[str]) -> None:
        references = self._references(copies)
        if not self._draft.links():
            self._draft.save_links(measure_links(self._box, references, self._segments))
        for processor in processors:
            if processor not in self._draft.speedups() and references:
                self._progress(f"executors of {processor}", 0, 1)
                kinds = _by_kind(references).values()
                most = min(self._box.cores, MOST_TOGETHER)
                largest = max(kinds, key=len)
                self._draft.save_speedups(processor, measure_speedups(self._bench(processor), largest, most))
                self._progress(f"executors of {processor}", 1, 1)

    def _usage(self, interim: StoredProfile) -> UsageFound:
        options = self._options
        if options.usage_from is not None:
            return usage_from_results(options.usage_from, self._config)
        if options.count_usage:
            return usage_from_samples(self._config, options.samples, self._progress, profile=interim)
        return UsageFound(computed_usage(self._config))

    def _allocation(self, interim: StoredProfile) -> Allocation:
        """Searched, or the casual one."""
        if self._options.allocation == CASUAL:
            return interim.allocation
        without = dict(self._failed)
        requests = SAMPLE_REQUESTS if self._options.allocation == SIMULATE else self._options.engine_requests
        trace = sample_requests(self._config, requests, images=self._images(), without=without)
        if self._options.allocation == SIMULATE:
            found = search_in_simulation(self._config, self._box, interim, trace, self._options.search, without)
        else:
            found = search_on_engine(
                self._config, self._box, interim, trace, self._progress, self._options.search, without
            )
        for search in dict.fromkeys(trial.search for trial in found.trials):
            self._draft.save_trials(search, [trial for trial in found.trials if trial.search == search])
        return found.allocation

    # -- small answers --

    def _bench(self, processor: str) -> Bench:
        executors = [ExecutorSpec(0, processor, self._box.pool_of(processor))]
        threads = threads_per_executor(self._box, executors)
        return Bench(self._box, processor, self._segments, self._samples, threads, self._options.batches)

    def _references(self, copies: Copies) -> list[ExpertCopy]:
        return [copy for form in copies for copy in copies[form] if form == self._reference(copy.expert.id)]

    def _images(self) -> dict[str, list[Path]]:
        """Sample images by component."""
        found: defaultdict[str, set[Path]] = defaultdict(set)
        for samples in self._samples.by_expert.values():
            for sample in samples:
                found[sample.component].add(sample.path)
        return {component: sorted(paths) for component, paths in found.items()}

    def _interim(self, precisions: Mapping[tuple[str, str], str], usage: UsageProfile) -> StoredProfile:
        """What is known before the search, with the casual allocation in the place of the searched one."""
        draft, config = self._draft, self._config
        casual = casual_allocation(self._box, pool_budgets(config, self._box))
        return StoredProfile(
            line=config.line,
            written_at=datetime.now(UTC).isoformat(timespec="seconds"),
            box=identity_of(self._box),
            links=draft.links(),
            kinds=draft.kinds(),
            agreements=draft.agreements(),
            precisions=precisions,
            packed=draft.packed(),
            usage=usage,
            allocation=casual,
            speedups=draft.speedups(),
        )


def _by_kind(copies: Sequence[ExpertCopy]) -> dict[str, list[ExpertCopy]]:
    found: defaultdict[str, list[ExpertCopy]] = defaultdict(list)
    for copy in copies:
        found[kind_of(copy)].append(copy)
    return dict(found)
