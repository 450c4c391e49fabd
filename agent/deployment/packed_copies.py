"""Copies of a line: its packed experts, by precision. Reads nothing but manifests."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from agent.deployment.moe_caches import places_of
from agent.runtime.expert_copy import ExpertCopy
from experts.expert import Precision
from experts.packed.manifests import ManifestFolder
from experts.packed.sources import is_there, sha256_of, stamp_of
from experts.thresholds.binding import is_bound_elsewhere

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from agent.config import LineConfig
    from experts.packed.manifests import Manifest
    from experts.packed.weights import PackedExpert

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


def copy_name(expert: str, precision: Precision) -> str:
    return f"{expert}@{precision}"


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
