"""``coserve profile LINE --expert ID``: proves one expert of a profiled line again, with its current weights.

Guarantees: an agent of the line may run meanwhile; the expert is packed in a temporary folder. Only this expert's
entries of the profile change; a kind without times is timed and added. Times of a known kind stay, as retraining does
not change them. The calibration of a proven form is copied to the agent's folder.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from agent.deployment.build import detect_box
from agent.deployment.executors import executor_specs
from agent.deployment.profile_in_use import usable_profile
from agent.device_profile.identity import packed_sha256
from agent.device_profile.records import SOURCE
from agent.device_profile.store import ProfileDraft, read_profile, replace_proofs
from experts.backends.forms import form_of
from experts.calibrations import CalibrationFolder
from experts.errors import ConfigError
from experts.expert import Precision
from experts.graph import ExpertGraph
from experts.packed.weights import SegmentStore
from profiler.microbench.bench import Bench
from profiler.microbench.decoding import DecodingBench
from profiler.microbench.kinds import measure_kind
from profiler.microbench.packed_forms import LinePacking
from profiler.microbench.precision_choice import PrecisionChoice
from profiler.profiling.profile_line import Profiled
from profiler.workload.samples import LineSamples

if TYPE_CHECKING:
    from agent.config import LineConfig
    from agent.device_profile.records import StoredProfile
    from profiler.profiling.profile_line import ProfilingOptions, Progress


def profile_expert(config: LineConfig, expert: str, options: ProfilingOptions, progress: Progress) -> Profiled:
    """Raises ConfigError for an unknown expert, a line without a profile of this box, and an expert that cannot run."""
    described = config.catalog.experts.get(expert)
    if described is None:
        raise ConfigError(f"{config.document.file}: no expert {expert!r} on this line")
    box, path = detect_box(config), config.profile_file
    profile, _ = usable_profile(config.model_copy(update={"is_profile_strict": True}), box)
    if profile is None:
        raise ConfigError(f"{path}: no finished profile yet - run `coserve profile {config.document.file}` first")
    samples = LineSamples.find(config, options.samples)
    catalog = replace(config.catalog, experts={expert: described}, graph=ExpertGraph([expert], {}))
    alone = config.model_copy(update={"catalog": catalog})
    with (
        TemporaryDirectory(prefix="profile-", dir=config.state) as folder,
        closing(SegmentStore(Path(folder) / "packed")) as segments,
        ProfileDraft.open(Path(folder) / "profile.db", config.line, profile.box) as draft,
    ):
        calibrations, tried = (CalibrationFolder.beside(each) for each in (config.packed_folder, segments.directory))
        calibrations.copy(expert, tried)
        packing = LinePacking(alone, segments, samples, progress)
        references = packing.references(packing.pack({}))
        if not references:
            raise ConfigError(f"{expert}: {packing.failed[expert]}")
        processors = dict.fromkeys(spec.processor for spec in executor_specs(config, box, profile.allocation))
        benches = [Bench(box, processor, segments, samples, options.batches) for processor in processors]
        known = {(kind.kind, kind.processor) for kind in profile.kinds}
        new = [measure_kind(each, references) for each in benches if (references[0].kind, each.processor) not in known]
        for kind in (*profile.kinds, *new):
            draft.save_kind(kind)
        choice = PrecisionChoice(config, packing, draft, options.tolerance, progress)
        forms = choice.on(benches, references)
        agreements = draft.agreements()
        progress("prove", 1, 1)
        run = {form.precision for form in forms.experts.values()} or {*forms.kinds.values()}
        packed_in = packing.pack({expert: {Precision(form) for form in run}})
        copies = [copy for form, listed in packed_in.items() if form in run for copy in listed]
        decoding = DecodingBench(benches[0], config.catalog.graph, options.tolerance).measure((copies or references)[0])
        if any(form_of(copy.packed.precision).needs_calibration for copy in copies):
            tried.copy(expert, calibrations)
    packed = {(expert, str(copy.packed.precision)): packed_sha256(copy.packed) for copy in (*references, *copies)}
    others = _without(profile, expert)
    proven = replace(
        others,
        packed={**others.packed, **packed, (expert, SOURCE): references[0].packed.source_sha256},
        decodings=(*others.decodings, *([] if decoding is None else [decoding])),
        forms={**others.forms, **forms.experts},
        agreements=(*others.agreements, *agreements),
    )
    replace_proofs(path, proven, new)
    return Profiled(read_profile(path), path, tuple(choice.notes))


def _without(profile: StoredProfile, expert: str) -> StoredProfile:
    return replace(
        profile,
        packed={key: sha256 for key, sha256 in profile.packed.items() if key[0] != expert},
        decodings=tuple(each for each in profile.decodings if each.expert != expert),
        forms={key: each for key, each in profile.forms.items() if key[0] != expert},
        agreements=tuple(each for each in profile.agreements if each.expert != expert),
    )
