"""``coserve profile LINE --expert ID``: one expert of a profiled line proven anew, as its weights are now.

Guarantees: an agent of the line may run meanwhile; nothing that it has packed is touched, as the expert is packed in a
folder of its own that goes in the end. Of the finished profile only what is of this expert changes, and a kind that it
has no times of is added. The times of a kind that is there stay: retraining does not change them. A calibration that
a form was proven by is left where the agent packs by it.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from agent.core.performance import ExecutorSpec
from agent.deployment.build import detect_box
from agent.deployment.executors import executor_specs
from agent.deployment.profile_in_use import usable_profile
from agent.device_profile.identity import packed_sha256
from agent.device_profile.records import SOURCE
from agent.device_profile.store import ProfileDraft, read_profile, replace_proofs
from agent.runtime.machine.box import threads_per_executor
from experts.calibrations import CalibrationFolder
from experts.errors import ConfigError
from experts.expert import Precision
from experts.graph import ExpertGraph
from experts.packed.weights import SegmentStore
from profiler.microbench.decoding import DecodingBench
from profiler.microbench.kinds import Bench, measure_kind
from profiler.microbench.packed_forms import LinePacking
from profiler.microbench.precision_choice import PrecisionChoice
from profiler.profiling.profile_line import Profiled
from profiler.workload.samples import LineSamples

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent.config import LineConfig
    from agent.runtime.machine.box import Box
    from profiler.profiling.profile_line import ProfilingOptions


def profile_expert(
    config: LineConfig, expert: str, options: ProfilingOptions, progress: Callable[[str, int, int], None]
) -> Profiled:
    """Raises ConfigError for no such expert, for a line without a profile of this box, and for what cannot be run."""
    described = config.catalog.experts.get(expert)
    if described is None:
        raise ConfigError(f"{config.document.file}: no expert {expert!r} on this line")
    box, path = detect_box(config), config.profile_file
    profile, _ = usable_profile(replace(config, is_profile_strict=True), box)
    if profile is None:
        raise ConfigError(f"{path}: no finished profile yet - run `coserve profile {config.document.file}` first")
    samples = LineSamples.find(config, options.samples)
    alone = replace(
        config, catalog=replace(config.catalog, experts={expert: described}, graph=ExpertGraph([expert], {}))
    )
    with (
        TemporaryDirectory(prefix="profile-", dir=config.state) as folder,
        ExitStack() as stack,
        closing(SegmentStore(Path(folder) / "packed")) as segments,
    ):
        calibrations, tried = (CalibrationFolder.beside(each) for each in (config.packed_folder, segments.directory))
        calibrations.copy(expert, tried)
        packing = LinePacking(alone, segments, samples, progress)
        references = packing.references(packing.pack({}))
        if not references:
            raise ConfigError(f"{expert}: {packing.failed[expert]}")
        processors = dict.fromkeys(spec.processor for spec in executor_specs(config, box, profile.allocation))
        benches = [_bench(box, processor, segments, samples, options) for processor in processors]
        known = {(kind.kind, kind.processor) for kind in profile.kinds}
        new = [measure_kind(each, references) for each in benches if (references[0].kind, each.processor) not in known]
        found = stack.enter_context(ProfileDraft.open(Path(folder) / "profile.db", config.line, profile.box))
        for kind in (*profile.kinds, *new):
            found.save_kind(kind)
        choice = PrecisionChoice(config, packing, found, options.tolerance, progress)
        chosen = [choice.on(bench, references) for bench in benches]
        agreements = found.agreements()
        progress("prove", 1, 1)
        own = [form for each in chosen for form in each.experts]
        run = {form.precision for form in own} or {form for each in chosen for form in each.kinds.values()}
        lying = packing.pack({expert: {Precision(form) for form in run}})
        copies = [copy for form in lying for copy in lying[form] if copy.expert.id == expert and str(form) in run]
        decoding = DecodingBench(benches[0], config.catalog.graph, options.tolerance).measure((copies or references)[0])
        if any(copy.packed.precision == Precision.ONEDNN_INT8 for copy in copies):
            tried.copy(expert, calibrations)  # what was proven is what its agent packs by
    packed = {key: sha256 for key, sha256 in profile.packed.items() if key[0] != expert}
    packed[expert, SOURCE] = references[0].packed.source_sha256
    packed |= {(expert, str(copy.packed.precision)): packed_sha256(copy.packed) for copy in (*references, *copies)}
    proven = replace(
        profile,
        packed=packed,
        decodings=(*(e for e in profile.decodings if e.expert != expert), *([] if decoding is None else [decoding])),
        forms={key: each for key, each in profile.forms.items() if key[0] != expert}
        | {(each.expert, each.processor): each for each in own},
        agreements=(*(each for each in profile.agreements if each.expert != expert), *agreements),
    )
    replace_proofs(path, proven, new)
    return Profiled(read_profile(path), path, tuple(choice.notes))


def _bench(box: Box, processor: str, segments: SegmentStore, samples: LineSamples, options: ProfilingOptions) -> Bench:
    threads = threads_per_executor(box, [ExecutorSpec(0, processor, box.pool_of(processor))])
    return Bench(box, processor, segments, samples, threads, options.batches)
