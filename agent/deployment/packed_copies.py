"""Copies of a line: its packed experts, by precision. Reads nothing but manifests."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TypeAlias

from agent.core.names import copy_name, line_name
from agent.core.request import Doubts
from agent.deployment.moe_caches import places_of
from agent.line_file.proofs import Proof, kept_proofs, proof_identity, proven, save_proof
from agent.runtime.expert_copy import ExpertCopy
from experts.expert import NOTHING_FOUND, Precision
from experts.packed.manifests import ManifestFolder
from experts.packed.sources import is_there, sha256_of, stamp_of
from experts.proving.comparing import GOOD_LABELS
from experts.thresholds.binding import is_bound_elsewhere

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from agent.config import LineConfig
    from agent.line_file.proofs import Lack, Proven
    from experts.packed.manifests import Manifest
    from experts.packed.weights import PackedExpert
    from experts.proving.comparing import AnswerComparison

Precisions: TypeAlias = "Mapping[str, Mapping[str, Precision]]"  # processor -> expert -> precision


def with_forms(precisions: Precisions, form_of: Callable[[str, Precision], Precision]) -> Precisions:
    """The precisions, with ``form_of(expert, precision)`` in place of each."""
    return {
        processor: {name: form_of(name, form) for name, form in column.items()}
        for processor, column in precisions.items()
    }


def copies_of(
    config: LineConfig, precisions: Precisions, packed: Mapping[str, Mapping[Precision, PackedExpert]]
) -> dict[str, list[ExpertCopy]]:
    """Copies that run on executors of these processors: not those of ranks."""
    experts = config.catalog.experts
    return {
        processor: [
            copy_of(config, name, precision, packed[name][precision])
            for name, precision in wanted.items()
            if precision in packed.get(name, {}) and experts[name].parallel is None
        ]
        for processor, wanted in precisions.items()
    }


def copy_of(config: LineConfig, expert: str, precision: Precision, packed: PackedExpert) -> ExpertCopy:
    """An expert in one precision; a threshold of other weights is dropped. Raises ConfigError for a small moe_cache."""
    served = config.catalog.experts[expert]
    if is_bound_elsewhere(served, packed.source_sha256):
        served = replace(served, threshold=None)
    return ExpertCopy(copy_name(expert, precision), served, packed, places_of(config, expert, packed))


def other_thresholds(config: LineConfig, packed: Iterable[PackedExpert]) -> list[str]:
    """Experts whose threshold belongs to other weights or another input."""
    experts = config.catalog.experts
    return sorted({each.expert for each in packed if is_bound_elsewhere(experts[each.expert], each.source_sha256)})


def proven_copies(config: LineConfig, served: Iterable[PackedExpert]) -> Proven:
    """Experts that are proven in each form that they are served in, and the others."""
    forms: defaultdict[str, set[tuple[str, str]]] = defaultdict(set)
    for each in served:
        forms[each.expert].add((each.precision, each.source_sha256))
    return proven(config.catalog.experts.values(), forms, kept_proofs(config.state), config.packed_folder)


def keep_proof(
    config: LineConfig,
    expert: str,
    served: tuple[str, str],
    comparison: AnswerComparison,
    by: tuple[str, str],
    at: datetime | None = None,
) -> Proof:
    """Keep a comparison of an expert as a proof in the line's state. Raises OSError.

    ``served``: its form, and the sha256 of its weights. ``by``: who made it, and why the expert is trusted even if it
    disagrees; without a reason the earlier one counts where it is no worse than then.
    """
    form, sha256 = served
    steps = [step for route in config.catalog.components.values() for step in route if step.expert == expert]
    good = {label for step in steps for label in step.passing} or GOOD_LABELS
    passing = comparison.count_of(good | ({NOTHING_FOUND} if config.catalog.experts[expert].nothing_found else set()))
    if not comparison.is_proof and not by[1]:
        trusted = [each for each in kept_proofs(config.state) if each.expert == expert and each.why]
        is_no_worse = trusted and trusted[-1].images == comparison.images and trusted[-1].agreed <= comparison.agreed
        by = (trusted[-1].by, trusted[-1].why) if is_no_worse else by
    proof = Proof(
        expert=expert, form=form,
        identity=proof_identity(config.catalog.experts[expert], sha256, form, config.packed_folder),
        images=comparison.images, passing=passing, others=comparison.images - passing, agreed=comparison.agreed,
        difference=comparison.largest_difference, at=at or datetime.now(UTC), by=by[0],
        why="" if comparison.is_proof else by[1], blind=comparison.blind,
    )  # fmt: skip
    save_proof(config.state, proof)
    return proof


def doubts_of(config: LineConfig, lacks: Mapping[str, Lack]) -> Doubts:
    """Experts on which no verdict, or no OK, may rest, as the line file wants it. ``lacks``: by the Engine's names."""

    def reason(expert: str, lack: Lack) -> str:
        name = line_name(expert)
        known = config.catalog.experts.get(name)
        answers = "" if known is None or known.check else " --check DATA"
        verify = f"`coserve experts verify {config.document.file} {name}{answers}`"
        return f"{name} is unproven: {lack.why} - run {verify}"

    stops = config.golden is not None and config.golden.on_difference == "stop"
    reasons = {name: reason(name, lack) for name, lack in lacks.items()}
    passing = {name: reasons[name] for name, lack in lacks.items() if lack.differs and stops}
    blank = {name for name, each in config.catalog.experts.items() if each.nothing_found}
    wanted = {name: why for name, why in reasons.items() if config.require_proof or line_name(name) in blank}
    return Doubts(wanted, passing)


def packed_experts(config: LineConfig, directory: Path) -> list[PackedExpert]:
    """Packed experts of the line by manifest, in known precisions."""
    found = (manifest.packed for manifest in _manifests(directory))
    return [each for each in found if each.expert in config.catalog.experts and each.precision in set(Precision)]


def changed_sources(config: LineConfig, directory: Path) -> list[str]:
    """Packed experts whose weights file has changed since."""
    experts, found = config.catalog.experts, []
    for name, source in sorted({each.packed.expert: each.source for each in _manifests(directory)}.items()):
        expert = experts.get(name)
        if expert is not None and is_there(expert) and stamp_of(expert) != source.stamp:
            found += [name] if sha256_of(expert) != source.sha256 else []
    return found


def _manifests(directory: Path) -> list[Manifest]:
    return ManifestFolder(directory / "manifests").read_all()


def by_precision(packed: Iterable[PackedExpert]) -> dict[str, dict[Precision, PackedExpert]]:
    found: defaultdict[str, dict[Precision, PackedExpert]] = defaultdict(dict)
    for each in packed:
        found[each.expert][Precision(each.precision)] = each
    return dict(found)


def packed_manifests(config: LineConfig) -> dict[str, list[Manifest]]:
    """Manifests of each expert of a line, one per precision; an empty list if not packed."""
    found: dict[str, list[Manifest]] = {name: [] for name in config.catalog.experts}
    for manifest in _manifests(config.packed_folder):
        found.get(manifest.packed.expert, []).append(manifest)
    return found
