"""``coserve profile``: the offline phase of one line on one box (CoServe, sections 4.4 and 4.5).

Guarantees: a killed run loses no measurement, the next run resumes; the finished profile replaces the earlier one
atomically; no agent of this line runs meanwhile, as each would slow the other.
Steps, in order: times of each kind on each processor, in every form of its backend or in the line file's; the fastest
proven form of each expert; links; one image on every expert, so that a failing expert spoils no later step; decoding,
and experts with smaller JPEGs; several executors at once; usage; the split of the memories and the number of executors.
"""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from itertools import starmap
from typing import TYPE_CHECKING, TypeAlias

from agent.deployment.build import detect_box
from agent.deployment.executors import executor_specs
from agent.deployment.memory_split import casual_allocation, pool_budgets
from agent.device_profile.identity import identity_of, is_of_another_box, packed_sha256
from agent.device_profile.records import SOURCE, LinkSpeed, StoredProfile, UsageOrigin
from agent.device_profile.store import ProfileDraft, read_profile, replace_usage
from agent.records.database import state_held
from agent.runtime.expert_copy import by_kind
from agent.runtime.measuring.batches import BatchOptions, why_no_larger
from agent.runtime.measuring.fits import TOLERANCE as PLATEAU_TOLERANCE
from agent.runtime.measuring.loads import measure_links
from experts.backends.capabilities import capabilities_of
from experts.backends.forms import form_of
from experts.errors import ConfigError, ExpertError, ImageError
from experts.expert import Precision
from experts.packed.weights import SegmentStore
from profiler.allocation.search import SearchOptions
from profiler.allocation.step import ENGINE, RUNS, AllocationStep
from profiler.microbench.agreement import TOLERANCE, candidate_precisions
from profiler.microbench.bench import Bench
from profiler.microbench.decoding import DecodingBench
from profiler.microbench.graphs import measure_graphs
from profiler.microbench.kinds import failing_experts, measure_kind, measure_speedups
from profiler.microbench.packed_forms import LinePacking, refuse_what_never_fits
from profiler.microbench.precision_choice import GIVE_MORE, PrecisionChoice
from profiler.replay.host_load import QUIET_FRACTION, CoresInUse
from profiler.usage import (
    UsageFound,
    computed_usage,
    refuse_uncountable,
    usage_from_results,
    usage_from_samples,
)
from profiler.workload.samples import LineSamples, is_synthetic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from agent.config import LineConfig
    from agent.device_profile.records import KindProfile, UsageProfile
    from agent.runtime.expert_copy import ExpertCopy
    from agent.runtime.machine.box import Box
    from profiler.microbench.packed_forms import Copies
    from profiler.microbench.precision_choice import Forms

    Progress: TypeAlias = Callable[[str, int, int], None]

MOST_FIT_ERROR = 0.15  # of a kind that is run; a larger error of K and B gets a note
MOST_UNUSED = PLATEAU_TOLERANCE  # of an image's time: larger batches than those run that save more get a note
AGAIN_IN_QUIET = "profile again with --fresh when the box is quiet"
MOST_TOGETHER = 4  # executors of one processor measured at once on as many cores, more where more are searched
DECODING_LIMIT_S = 120.0  # spent on decoding; the next run measures the other experts
KIND_LIMIT_S = 20.0  # spent on running one kind in one form on one processor
KEPT = {
    UsageOrigin.SERVED: "learned from {requests} served requests",
    UsageOrigin.COUNTED: "counted on {requests} sample requests",
}
OVER_RANKS = "its ranks are not measured, and it is served all the same"


@dataclass(frozen=True, slots=True)
class ProfilingOptions:
    """Options of `coserve profile`.

    ``samples``: a folder of images instead of the line's intake. ``count_usage``: run the routes on them.
    ``usage_from``: served history instead. ``allocation``: ENGINE (real runs), SIMULATE, or
    CASUAL (no search). ``fresh``: measure all again, also over a damaged or another box's profile.
    """

    samples: Path | None = None
    count_usage: bool = False
    usage_from: Path | None = None
    allocation: str = ENGINE
    fresh: bool = False
    tolerance: float = TOLERANCE
    batches: BatchOptions = field(default_factory=lambda: BatchOptions(limit_s=KIND_LIMIT_S))
    search: SearchOptions = field(default_factory=SearchOptions)


@dataclass(frozen=True, slots=True)
class Profiled:
    profile: StoredProfile
    path: Path
    notes: tuple[str, ...]


def profile_line(config: LineConfig, options: ProfilingOptions, progress: Progress) -> Profiled:
    """Profile a line on this box. Raises ConfigError, AlreadyRunning while its agent runs, AgentCrashed.

    Another file in the profile's place is an error and stays, unless ``fresh``.
    """
    path = config.profile_file
    with state_held(config.state), closing(SegmentStore(config.packed_folder)) as segments:
        box = detect_box(config)
        if not options.fresh:
            _refuse_to_replace(path, box)
        served = None if options.usage_from is None else usage_from_results(options.usage_from, config)
        samples = LineSamples.find(config, options.samples)
        if options.count_usage:
            refuse_uncountable(config, samples)
        with ProfileDraft.open(path, config.line, identity_of(box), fresh=options.fresh) as draft:
            kept = None if served else _kept_usage(config, options, path)
            bench = Bench(box, box.processors[0], segments, samples, options.batches)
            return _Profiling(config, options, progress, bench, draft).run(served or kept)


def learn_usage(config: LineConfig, history: Path | None) -> Profiled | None:
    """Replace only the usage of the line's finished profile; None without a history. Raises ConfigError."""
    if history is None:
        return None
    path = config.profile_file
    if not path.exists():
        raise ConfigError(
            f"{path}: no finished profile yet - run `coserve profile {config.document.file}` first, or give "
            "--simulate or --casual to profile with this usage"
        )
    found = usage_from_results(history, config)
    read_profile(path)  # refuses a damaged file before anything is replaced
    replace_usage(path, found.usage)
    return Profiled(read_profile(path), path, found.notes)


def _kept_usage(config: LineConfig, options: ProfilingOptions, path: Path) -> UsageFound | None:
    """Learned or counted usage of the finished profile, unless the options replace it; computed for new experts."""
    if options.fresh or options.count_usage or not path.exists():
        return None
    then = read_profile(path)
    if then.line != config.line or then.usage.origin not in KEPT:
        return None
    computed = computed_usage(config).probabilities
    usage = replace(
        then.usage,
        probabilities={name: then.usage.probabilities.get(name, computed[name]) for name in sorted(computed)},
        pass_rates={name: rate for name, rate in then.usage.pass_rates.items() if name in computed},
    )
    origin = KEPT[usage.origin].format(requests=usage.requests)
    note = (
        f"usage stays as it was {origin}: --fresh computes it from quantities again, --usage-from learns it again, "
        "--count-usage counts it again"
    )
    return UsageFound(usage, (note,))


def _refuse_to_replace(path: Path, box: Box) -> None:
    if not path.exists():
        return
    then = read_profile(path).box
    if is_of_another_box(then, identity_of(box)):
        raise ConfigError(
            f"{path} is the profile of another box: {then.device}, {then.model}, {then.cores} cores; this one is "
            f"{box.name}, {box.model}, {box.cores} cores - move it away, or give --fresh to measure again"
        )


class _Profiling:
    """A run of the profiler. Each step saves its findings and keeps those of an earlier run."""

    def __init__(
        self, config: LineConfig, options: ProfilingOptions, progress: Progress, bench: Bench, draft: ProfileDraft
    ) -> None:
        self._config = config
        self._options = options
        self._progress = progress
        self._bench = bench
        self._box = bench.box
        self._samples = bench.samples
        self._draft = draft
        self._search = options.search.on(bench.box)
        self._packing = LinePacking(config, bench.segments, bench.samples, progress, bench.box)
        self._notes: list[str] = []

    def run(self, served: UsageFound | None) -> Profiled:
        """``served``: usage learned from history, now or before."""
        if broken := self._samples.broken:
            several = f"{len(broken)} sample images are broken and were skipped, the first"
            skipped = "one sample image is broken and was skipped" if len(broken) == 1 else several
            self._notes.append(f"{skipped}: {broken[0]}")
        if (given := self._config.executors) is not None:
            executor_specs(self._config, self._box)  # raises ConfigError for a processor that the box lacks
        processors = tuple(name for name in self._box.processors if given is None or given.get(name, 0) > 0)
        representatives = self._packing.representatives(processors)
        copies = self._packing.pack(representatives)
        standing = [copy for form in copies for copy in copies[form] if copy.expert.id in representatives]
        refuse_what_never_fits(self._config, self._box, processors, standing)
        for processor in processors:
            self._measure_kinds(processor, copies)
        forms = self._choose(processors, self._packing.references(copies))
        if not self._draft.links():
            speeds = measure_links(self._box, self._packing.references(copies), self._bench.segments)
            self._draft.save_links(list(starmap(LinkSpeed, speeds.items())))
        able = self._able(processors, forms, self._keep(processors, forms))
        self._measure_decoding(processors[0], able[processors[0]])
        for processor in processors:
            self._measure_speedups(processor, able[processor])
            self._measure_graphs(processor, able[processor])
        usage = served or UsageFound(computed_usage(self._config))
        if served is None and self._options.count_usage:
            interim = self._interim(forms, usage.usage)
            usage = usage_from_samples(self._config, self._options.samples, self._progress, profile=interim)
        self._draft.save_usage(usage.usage)
        failed = self._packing.failed
        step = AllocationStep(self._config, self._box, self._samples, self._draft, failed, self._search)
        interim = self._interim(forms, usage.usage)
        self._draft.save_allocation(step.allocate(self._options.allocation, interim, self._progress))
        self._draft.save_trials(RUNS, ())
        self._notes += step.notes
        profile = self._draft.finish()
        experts = self._config.catalog.experts
        unserved = [
            f"{name} cannot be served: {reason}" if experts[name].parallel is None else f"{name}: {OVER_RANKS}"
            for name, reason in failed.items()
        ]
        notes = (*self._notes, *self._packing.notes, *unserved, *usage.notes)
        return Profiled(profile, self._config.profile_file, notes)

    def _measure_kinds(self, processor: str, copies: Copies) -> None:
        """Time every kind in every form of the processor. Earlier times stay, unless samples replace noise."""
        there = {(each.kind, each.processor, each.precision): each for each in self._draft.kinds()}
        jobs = [
            (kind, form, listed)
            for form in copies
            for kind, listed in by_kind(copies[form]).items()
            if form in candidate_precisions(listed[0].expert.architecture, processor) or not form_of(form).is_automatic
        ]
        for number, (kind, form, listed) in enumerate(jobs):
            self._progress(f"measure on {processor}", number, len(jobs))
            earlier = there.get((kind, processor, str(form)))
            is_sampled = any(self._samples.of(copy.expert.id) for copy in listed)
            if earlier is not None and not (is_synthetic(earlier.samples) and is_sampled):
                continue
            try:
                with self._noticing_others(f"{kind} in {form} on {processor}"):
                    measured = measure_kind(self._bench.on(processor), listed)
                self._draft.save_kind(measured)
            except ExpertError as error:
                self._notes.append(f"{kind} in {form} does not run on {processor}: {error.message}")
        if jobs:
            self._progress(f"measure on {processor}", len(jobs), len(jobs))

    def _choose(self, processors: Sequence[str], references: Sequence[ExpertCopy]) -> Forms:
        choice = PrecisionChoice(self._config, self._packing, self._draft, self._options.tolerance, self._progress)
        choice.forget_changed(references)
        forms = choice.on([self._bench.on(processor) for processor in processors], references)
        self._notes += choice.notes
        able = {copy.expert.id for copy in references if any(forms.of(copy, name) for name in processors)}
        if not able:
            reasons = "\n".join([*self._notes, *self._packing.failed.values()])
            raise ConfigError(f"no expert of this line can be run on this box:\n{reasons}")
        for kind, listed in by_kind(references).items():
            used = {name: sorted({form for copy in listed if (form := forms.of(copy, name))}) for name in processors}
            runs = [f"{name} in {' and '.join(each)}" for name, each in used.items() if each]
            if 0 < len(runs) < len(processors):
                self._notes.append(f"{kind} runs on {' and '.join(runs)} only")
        for copy in references:
            if copy.expert.id not in able:
                self._packing.failed.setdefault(copy.expert.id, f"its kind ({copy.kind}) runs on no processor")
        self._draft.save_precisions(forms.kinds, list(forms.experts.values()))
        run = self._interim(forms, computed_usage(self._config)).chosen_kinds
        self._notes += [
            f"{each.kind} in {each.precision} on {each.processor}: batches were up to {each.fit_error:.0%} off K n + B "
            f"- {AGAIN_IN_QUIET}"
            for each in run
            if each.fit_error > MOST_FIT_ERROR
        ]
        self._notes += [note for each in run if (note := self._unused(each))]
        return forms

    def _unused(self, kind: KindProfile) -> str | None:
        most = kind.max_batch
        batch_s = kind.K_s * most + kind.B_s
        is_largest = most == max((batch.batch_size for batch in kind.batches), default=None)
        if not is_largest or kind.B_s <= MOST_UNUSED * batch_s or kind.lease_bytes:
            return None
        free_bytes = self._box.size_of(self._box.pool_of(kind.processor)).available_bytes
        reason = why_no_larger(kind.batches, self._options.batches, free_bytes)
        return (
            f"{kind.kind} in {kind.precision} on {kind.processor}: batches of more than {most} were not run: {reason}; "
            f"by its line larger ones might take up to {kind.B_s / batch_s:.0%} less for an image"
        )

    def _able(self, processors: Sequence[str], forms: Forms, kept: Sequence[ExpertCopy]) -> dict[str, list[ExpertCopy]]:
        copies = {
            processor: [
                copy
                for copy in kept
                if (form := forms.of(copy, processor))
                and self._packing.runs_in(copy.expert.id, Precision(form)) == copy.packed.precision
            ]
            for processor in processors
        }
        for processor, listed in copies.items():
            report = partial(self._progress, f"try on {processor}")
            for name, reason in failing_experts(self._bench.on(processor), listed, report).items():
                self._packing.failed.setdefault(name, f"on {processor}: {reason}")
        failed = self._packing.failed
        return {name: [copy for copy in listed if copy.expert.id not in failed] for name, listed in copies.items()}

    def _measure_decoding(self, processor: str, copies: Sequence[ExpertCopy]) -> None:
        """Decoding times, and experts with smaller JPEGs; earlier measurements stay.

        Measured on the first processor, in its form; experts of other processors alone are left out.
        """
        bench = DecodingBench(self._bench.on(processor), self._config.catalog.graph, self._options.tolerance)
        there = {each.expert: each.of_sha256 for each in self._draft.decodings()}
        sampled = [copy for copy in copies if self._samples.of(copy.expert.id) and not copy.expert.takes_texts]
        missing = [copy for copy in sampled if there.get(copy.expert.id) != bench.of_sha256(copy)]
        names = {copy.expert.id for copy in sampled} - {copy.expert.id for copy in missing}
        found = [each for each in self._draft.decodings() if each.expert in names]
        started, left_out = time.monotonic(), 0
        for number, copy in enumerate(missing):
            self._progress("decoding images", number, len(missing))
            if time.monotonic() - started > DECODING_LIMIT_S:
                left_out += 1
                continue
            with suppress(ImageError):  # the sample is gone: the next run has others
                found += [measured] if (measured := bench.measure(copy)) is not None else []
        if missing:
            self._progress("decoding images", len(missing), len(missing))
        self._draft.save_decodings(found)
        self._notes += [
            f"{each.expert} gets JPEGs of full size: decoded to fewer pixels, {each.labels_differ} labels "
            f"of {each.smaller} differ, and scores by {each.largest_score_difference:.3f}"
            for each in found
            if each.is_refuted
        ]
        if few := [each for each in found if each.smaller and not each.is_enough]:
            shown = f"{few[0].expert} has {few[0].smaller}, of which {few[0].failing} fail"
            self._notes.append(
                f"{len(few)} experts get JPEGs of full size: smaller ones are proven by {few[0].least} large ones, "
                f"{few[0].least_each} that pass and {few[0].least_each} that fail; {shown}{GIVE_MORE}"
            )
        if left_out:
            self._notes.append(
                f"{left_out} experts get JPEGs of full size: the comparison with smaller ones ended after "
                f"{DECODING_LIMIT_S:.0f} s - profile again, which resumes there"
            )

    def _measure_speedups(self, processor: str, copies: Sequence[ExpertCopy]) -> None:
        """Measures the kind of images with the most experts, without failing experts; texts share one executor."""
        of_images = [copy for copy in copies if not copy.expert.takes_texts]
        most = min(self._box.cores, max(MOST_TOGETHER, self._search.most_cpu_executors))
        if len(self._draft.speedups().get(processor, ())) >= most:
            return
        self._progress(f"executors of {processor}", 0, 1)
        reason = "" if of_images else "texts alone run there" if copies else "none of the experts runs there"
        speedups: tuple[float, ...] = (1.0,)
        left = max(by_kind(of_images).values(), key=len, default=[])
        max_batch = min([each.max_batch for each in self._draft.kinds() if each.processor == processor], default=1)
        while left:
            try:
                with self._noticing_others(f"the gain of several executors of {processor}"):
                    speedups = measure_speedups(self._bench.on(processor), left, most, max_batch)
                reason = ""
                break
            except ExpertError as error:
                reason, failing = error.message, error.expert
                left = [copy for copy in left if copy.expert.id != failing]
        if reason:
            self._notes.append(
                f"executors of {processor} were not measured together, and are assumed to gain nothing: {reason}"
            )
        self._draft.save_speedups(processor, speedups)
        self._progress(f"executors of {processor}", 1, 1)

    def _measure_graphs(self, processor: str, copies: Sequence[ExpertCopy]) -> None:
        """Measures one expert of each kind; kinds that run without graphs keep the gain near 1."""
        if not capabilities_of(processor).has_graphs or processor in self._draft.graphs():
            return
        times = []
        for kind, listed in by_kind(copies).items():
            try:
                times.append(measure_graphs(self._bench.on(processor), listed[0]))
            except ExpertError as error:
                self._notes.append(f"{kind} on {processor} was not measured with CUDA graphs: {error.message}")
        if times:
            eager_s, graphs_s = map(sum, zip(*times, strict=True))
            self._draft.save_graphs(processor, eager_s / graphs_s)

    def _keep(self, processors: Sequence[str], forms: Forms) -> list[ExpertCopy]:
        references = {
            (name, form): digest
            for (name, form), digest in self._draft.packed().items()
            if name in self._config.catalog.experts and form == self._packing.reference(name)
        }
        wanted: defaultdict[str, set[Precision]] = defaultdict(set)
        for copy in self._packing.references(self._packing.pack({}, None)):
            wanted[copy.expert.id] |= {Precision(form) for name in processors if (form := forms.of(copy, name))}
        kept = self._packing.keep(wanted)
        digests = {(copy.expert.id, str(copy.packed.precision)): packed_sha256(copy.packed) for copy in kept}
        sources = {(copy.expert.id, SOURCE): copy.packed.source_sha256 for copy in kept}
        self._draft.save_packed({**references, **digests, **sources})
        return kept

    @contextmanager
    def _noticing_others(self, what: str) -> Iterator[None]:
        cores = CoresInUse()
        yield
        others = cores.others_fraction()
        if others > QUIET_FRACTION:
            self._notes.append(
                f"other processes had {others:.0%} of the cores while {what} was measured - {AGAIN_IN_QUIET}"
            )

    def _interim(self, forms: Forms, usage: UsageProfile) -> StoredProfile:
        draft, config = self._draft, self._config
        return StoredProfile(
            line=config.line,
            written_at=datetime.now(UTC).isoformat(timespec="seconds"),
            box=identity_of(self._box),
            links=draft.links(),
            kinds=draft.kinds(),
            agreements=draft.agreements(),
            precisions=forms.kinds,
            packed=draft.packed(),
            usage=usage,
            allocation=casual_allocation(self._box, pool_budgets(config, self._box)),
            speedups=draft.speedups(),
            graphs=draft.graphs(),
            decodings=draft.decodings(),
            forms=forms.experts,
        )
