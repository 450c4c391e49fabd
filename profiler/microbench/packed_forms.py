"""Packs a line's experts while it is profiled: forms to try, to compare with, to keep; calibrates forms of eight bits.

Guarantees: every expert is packed in its reference, which is fp32 unless the line file gives another precision, and in
the forms to try; after ``keep`` only in forms that the agent will run. An expert that cannot be packed is reported once
and does not affect others. An expert is never calibrated on images that judge it, nor on images of a single label,
whose ranges do not cover other labels. A calibration of equal weights on equal images is reused.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, TypeAlias

import torch

from agent.deployment.executors import executor_specs
from agent.deployment.memory_split import pool_budgets
from agent.deployment.moe_caches import MoeCaches
from agent.deployment.packed_copies import copy_of
from agent.runtime.expert_copy import ExpertCopy, kind_name
from agent.runtime.machine.box import torch_device
from agent.runtime.machine.threads import one_thread
from agent.runtime.measuring.probe import estimated_matrix
from experts.backends import GRAPH_FAMILIES, family, observed_ranges, prepare
from experts.backends.forms import form_of, runs_as
from experts.calibrations import CalibrationFolder
from experts.errors import BackendUnavailable, ConfigError, ExpertError, ImageError
from experts.expert import Precision
from experts.images import decode_image
from experts.packed.calibrated import calibration_of, why_not_calibrated
from experts.packed.packing import forget_other_forms, pack_line
from experts.sizes import mib
from profiler.microbench.agreement import candidate_precisions
from profiler.workload.samples import stamps_sha256

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from agent.config import LineConfig
    from agent.core.performance import PerformanceMatrix
    from agent.runtime.machine.box import Box
    from experts.expert import Expert
    from experts.packed.packing import PackingStep
    from experts.packed.weights import SegmentStore
    from profiler.workload.samples import LineSamples, Sample

    Copies: TypeAlias = "defaultdict[Precision, list[ExpertCopy]]"

LABELS_LEAST = 2
BATCH = 4  # images at a time; the ranges do not depend on it
REPRESENTATIVES = 4  # experts of a kind that are packed in every form; one is timed, the files of all are loaded
MISSING_RUNTIME = "install it, or take the experts that need it off the line"


class Calibrating:
    """Calibrations of one profiling run. ``packed``: the folder of packed weights, beside which they are stored."""

    def __init__(self, samples: LineSamples, packed: Path, progress: Callable[[str, int, int], None]) -> None:
        self._samples = samples
        self._packed = packed
        self._progress = progress
        self._folder = CalibrationFolder.beside(packed)
        self._reasons: dict[tuple[str, Precision], str | None] = {}

    def why_not(self, expert: Expert, form: Precision) -> str | None:
        """Reason why these samples cannot judge a calibrated form of the expert; the first call calibrates it."""
        if (expert.id, form) not in self._reasons:
            try:
                self._reasons[expert.id, form] = self._calibrated(expert, form)
            except (ExpertError, ImageError) as error:
                self._reasons[expert.id, form] = error.message
        return self._reasons[expert.id, form]

    def has_form(self, expert: Expert, form: Precision) -> bool:
        """True where an agent runs the expert in the form, calibrated on these samples or on earlier ones."""
        if self.why_not(expert, form) is None:
            return True
        try:
            return why_not_calibrated(expert, form, self._packed) is None
        except ExpertError:  # missing weights, which packing reports
            return False

    def _calibrated(self, expert: Expert, form: Precision) -> str | None:
        images = self._samples.calibrating.get(expert.id, ())
        there = self._folder.read(expert.id)
        labels = _labels(images)
        lacking = why_not_calibrated(expert, form, self._packed)
        if len(labels) < LABELS_LEAST:
            every = self._samples.of(expert.id)
            return _too_few(_labels(every)) if every or lacking else None
        digest = stamps_sha256(images)
        if there is not None and there.samples_sha256 == digest and lacking is None:
            return None
        decoded = (decode_image(each.path, str(each.path), each.max_pixels) for each in images)
        prepared = (prepare(expert, image).tensor for image in decoded)
        batches = (torch.stack([first, *islice(prepared, BATCH - 1)]) for first in prepared)
        observe = partial(observed_ranges, expert, form, batches)
        found = calibration_of(expert, digest, len(images), labels, observe)
        if there is not None and replace(there, ranges=found.ranges) == found:  # of other forms of the same expert
            found = replace(found, ranges={**there.ranges, **found.ranges})
        self._folder.write(expert.id, found)
        done = self._samples.calibrating.keys() & {*(name for name, _ in self._reasons), expert.id}
        self._progress("calibrate", len(done), len(self._samples.calibrating))
        return None


def _labels(images: Sequence[Sample]) -> tuple[str, ...]:
    return tuple(sorted({sample.label or sample.folder for sample in images}))


def _too_few(labels: Sequence[str]) -> str:
    if not labels:
        return "there are no sample images to calibrate it on: give --samples FOLDER"
    if len(labels) < LABELS_LEAST:
        return f"its sample images show one label only ({labels[0]}): give --samples FOLDER with good and bad parts"
    return (
        "it takes two sample images of each of two labels at least, of which one calibrates and one judges: give "
        "--samples FOLDER with more"
    )


class LinePacking:
    """A line's packed weights. ``failed``: reasons by expert that cannot be served; later steps add to it.

    Packing adds experts that lack their reference, or every form that they would run in. ``notes``: reasons why other
    experts cannot be packed in a form to try, each once. Models larger than the memories of ``box`` are held as on its
    agent.
    """

    def __init__(
        self,
        config: LineConfig,
        segments: SegmentStore,
        samples: LineSamples,
        progress: Callable[[str, int, int], None],
        box: Box | None = None,
    ) -> None:
        self._box = box
        self.failed: dict[str, str] = {}
        self.notes: list[str] = []
        self._refused: dict[str, str] = {}  # experts that could not be packed in one form at least, and why
        self._config = config
        self._segments = segments
        self._calibrating = Calibrating(samples, segments.directory, progress)
        self._samples = samples
        self._progress = progress

    def reference(self, expert: str) -> Precision:
        """Form that the expert is always packed in, and that others are compared with."""
        described = self._config.catalog.experts[expert]
        if described.precision is not None:
            return described.precision
        given = self._config.precision_beside(described)
        is_fixed = family(described.architecture) in GRAPH_FAMILIES
        if given is None or is_fixed:
            return Precision.FP32
        return form_of(given).plain if described.takes_texts else self.runs_in(expert, given)

    def why_not_calibrated(self, expert: str, form: Precision) -> str | None:
        return self._calibrating.why_not(self._config.catalog.experts[expert], form)

    def runs_in(self, expert: str, name: Precision) -> Precision:
        """The form, or its plain form where the CPU lacks it or a calibration is missing, as on the agent."""
        described, form = self._config.catalog.experts[expert], form_of(name)
        is_able = runs_as(name) is name and (not form.needs_calibration or self._calibrating.has_form(described, name))
        return name if is_able else form.plain

    def references(self, copies: Copies) -> list[ExpertCopy]:
        return [copy for form in copies for copy in copies[form] if form == self.reference(copy.expert.id)]

    def representatives(self, processors: Sequence[str]) -> dict[str, set[Precision]]:
        """A few experts of each kind and the forms to try; experts with samples first. Raises ConfigError."""
        found: defaultdict[tuple[str, str | None], list[str]] = defaultdict(list)
        for name, expert in self._config.catalog.experts.items():
            own = name if family(expert.architecture) in GRAPH_FAMILIES else None
            found[kind_name(expert, None), own].append(name)
        ordered = (sorted(names, key=lambda name: not self._samples.of(name)) for names in found.values())
        return {name: self._forms(name, processors) for names in ordered for name in names[:REPRESENTATIVES]}

    def pack(self, wanted: Mapping[str, set[Precision]], stage: str | None = "pack") -> Copies:
        """Copies of all experts in references and wanted forms, by form. ``stage``: for progress; None: silent."""
        experts = self._config.catalog.experts
        tried = {name: {self.runs_in(name, form) for form in wanted.get(name, ())} for name in experts}
        forms = {name: tried[name] | {self.reference(name)} for name in experts}

        def step(step: PackingStep) -> None:
            if stage is not None:
                self._progress(stage, step.number, step.total)

        try:
            with one_thread():
                report = pack_line(experts.values(), forms, self._segments, step)
        except BackendUnavailable as error:
            raise ConfigError(f"{error} - {MISSING_RUNTIME}") from error
        self._refused.update({name: error.message for name, error in report.failed.items()})
        lacking = [name for name in report.failed if self.reference(name) not in report.packed.get(name, {})]
        self.failed.update({name: self._refused[name] for name in lacking})
        tried_in_vain = (self._refused[name] for name in report.failed if name not in lacking)
        self.notes = list(dict.fromkeys((*self.notes, *tried_in_vain)))
        found: Copies = defaultdict(list)
        for name, by_form in report.packed.items():
            for form, packed in by_form.items():
                found[form].append(copy_of(self._config, name, form, packed))
        return found if self._box is None else as_held(self._config, self._box, found)

    def keep(self, forms: Mapping[str, set[Precision]]) -> list[ExpertCopy]:
        """Packs every expert in the ``forms`` that it runs in, forgets its others, and returns the copies."""
        wanted = {name: listed for name, listed in forms.items() if listed}
        copies = self.pack(wanted, "pack as chosen")
        runs = {name: {self.runs_in(name, form) for form in forms} for name, forms in wanted.items()}
        kept = {name: runs.get(name, {self.reference(name)}) for name in self._config.catalog.experts}
        forget_other_forms(kept, self._segments)
        standing = [copy for form in copies for copy in copies[form] if form in runs.get(copy.expert.id, ())]
        unserved = wanted.keys() - {copy.expert.id for copy in standing}
        self.failed.update({name: self._refused[name] for name in sorted(unserved)})
        return standing

    def _forms(self, expert: str, processors: Iterable[str]) -> set[Precision]:
        described = self._config.catalog.experts[expert]
        if described.precision is not None:
            return {described.precision}
        if self._config.precision_beside(described) is not None:
            reference = self.reference(expert)
            is_elsewhere = any(torch_device(processor) != "cpu" for processor in processors)
            return {reference, form_of(reference).plain} if is_elsewhere else {reference}
        try:
            return {form for each in processors for form in candidate_precisions(described.architecture, each)}
        except BackendUnavailable as error:
            raise ConfigError(f"{error} - {MISSING_RUNTIME}") from error


def as_held(config: LineConfig, box: Box, copies: Copies) -> Copies:
    """Copies with as many moe_experts as an agent holds: all, where there is room."""
    executors = executor_specs(config, box)

    def sizes(listed: Mapping[str, Sequence[ExpertCopy]]) -> PerformanceMatrix:
        return estimated_matrix(box, listed, {})

    caches = MoeCaches(config, box, executors, None, sizes)
    held: Copies = defaultdict(list)
    for form, listed in copies.items():
        held[form] = caches.sized({spec.processor: listed for spec in executors})[executors[0].processor]
    return held


def refuse_what_never_fits(
    config: LineConfig, box: Box, processors: Iterable[str], copies: Iterable[ExpertCopy]
) -> None:
    """Raises ConfigError naming each expert that fits in no form into a memory that it could run from.

    Called before anything is timed; the room of batches and pinned experts is known later.
    """
    least: dict[str, int] = {}
    for copy in copies:
        size_bytes = copy.footprint.total_bytes
        least[copy.expert.id] = min(size_bytes, least.get(copy.expert.id, size_bytes))
    budgets = pool_budgets(config, box)
    pool = max((box.pool_of(processor) for processor in processors), key=budgets.__getitem__)
    problems = [
        config.document.error(
            f"needs {mib(needed)}, but memory.{pool} is {mib(budgets[pool])} - raise memory.{pool}, or take a "
            "smaller model",
            "experts",
            name,
        )
        for name, needed in least.items()
        if needed > budgets[pool]
    ]
    if problems:
        raise ConfigError.of(problems)
