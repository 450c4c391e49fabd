"""The performance matrix of a line from its box's device profile: no probe, no model, no clock.

An expert takes the times of its kind; its footprint is exact, from the packed bytes. Pure functions of records.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from agent.core.names import copy_name, form_of
from agent.core.performance import (
    DEVICE,
    HOST,
    SSD,
    ExpertProfile,
    Footprint,
    Performance,
    PerformanceMatrix,
    SharedTensors,
)
from agent.deployment.profile_in_use import scaled_experts
from agent.runtime.expert_copy import SHORT_SHA256, prepared_form
from agent.runtime.machine.box import torch_device

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from agent.core.performance import ExecutorSpec
    from agent.device_profile.records import KindProfile, StoredProfile
    from agent.runtime.expert_copy import ExpertCopy
    from agent.runtime.machine.box import Box
    from experts.expert import Precision


def matrix(
    profile: StoredProfile,
    box: Box,
    copies: Mapping[str, Sequence[ExpertCopy]],
    usage: Mapping[str, float],
    executors: Sequence[ExecutorSpec] | None = None,
) -> PerformanceMatrix:
    """The matrix of these copies, by processor. An expert whose kind was not measured there has no row. ``executors``:
    None for the measured number. If executors share a processor otherwise than measured, K and B are scaled
    (``core_share``)."""
    kinds = {(kind.kind, kind.processor, kind.precision): kind for kind in profile.kinds}
    links, reduced = profile.link_bytes_per_s, scaled_experts(profile)
    experts: dict[str, dict[str, ExpertProfile]] = {}
    for processor, listed in copies.items():
        sources = (SSD, HOST) if box.pool_of(processor) == DEVICE else (SSD,)
        column = experts.setdefault(processor, {})
        for copy in listed:
            kind = kinds.get((copy.kind, processor, copy.packed.precision))
            if kind is None:
                continue
            factor = 1.0 if executors is None else core_share(profile, kind, executors)
            loaded = Footprint(copy.loaded_bytes)
            load_s = {source: load_time_s(kind, source, loaded, links) for source in sources}
            column[copy.expert.id] = ExpertProfile(
                copy.name,
                _performance(kind, factor),
                copy.footprint,
                load_s,
                prepared=prepared_form(copy.expert, is_reduced=copy.expert.id in reduced),
            )
    return PerformanceMatrix(experts, dict(usage))


def in_form(
    matrix: PerformanceMatrix,
    profile: StoredProfile,
    form: Precision,
    kinds: Mapping[str, str],
    executors: Sequence[ExecutorSpec],
) -> PerformanceMatrix:
    """The matrix with every expert of images in ``form`` if its kind was measured in it. ``kinds``: by expert. Needs no
    weights packed in that form: bytes are scaled as those of the kind's measured expert."""
    measured = {(kind.kind, kind.processor, kind.precision): kind for kind in profile.kinds if not kind.lease_bytes}

    def row_in_form(processor: str, expert: str, row: ExpertProfile) -> ExpertProfile:
        kind = measured.get((kinds.get(expert, ""), processor, form))
        now = measured.get((kinds.get(expert, ""), processor, form_of(row.copy)))
        if kind is None or now is None or kind is now:
            return row
        ratio = kind.weight_bytes / max(now.weight_bytes, 1)
        # shared tensors of another form are other bytes
        shared = [SharedTensors(f"{part.id}@{form}", round(part.size_bytes * ratio)) for part in row.footprint.shared]
        footprint = Footprint(round(row.footprint.own_bytes * ratio), tuple(shared))
        factor = core_share(profile, kind, executors)
        load_s = {source: load_time_s(kind, source, footprint, profile.link_bytes_per_s) for source in row.load_s}
        performance = _performance(kind, factor)
        return replace(row, copy=copy_name(expert, form), performance=performance, footprint=footprint, load_s=load_s)

    return matrix.changed(row_in_form)


def unmeasured(matrix: PerformanceMatrix, kinds: Mapping[str, str]) -> dict[str, str]:
    """Experts without a row, and why. ``kinds``: by expert."""
    able = {expert for column in matrix.experts.values() for expert in column}
    return {
        expert: f"no expert of its kind ({kind}) could be run when the box was profiled"
        for expert, kind in kinds.items()
        if expert not in able
    }


def core_share(profile: StoredProfile, kind: KindProfile, executors: Sequence[ExecutorSpec]) -> float:
    """Slowdown of a kind by executors that share the cores, or an accelerator. n executors with a speedup of S(n) each
    take n / S(n) times as long (``StoredProfile.speedups``; 1 without, and the last value beyond its end). On a CPU a
    kind was measured as one of cores / threads executors, on an accelerator alone."""
    device = torch_device(kind.processor)
    now = max(sum(torch_device(spec.processor) == device for spec in executors), 1)
    then = max(profile.box.cores // kind.threads, 1) if device == "cpu" else 1
    speedups = profile.speedups.get(kind.processor, ())
    return _slowdown(now, speedups) / _slowdown(then, speedups)


def load_time_s(kind: KindProfile, source: str, footprint: Footprint, links: Mapping[str, float]) -> float:
    """Seconds to load an expert's own bytes; shared bytes are usually loaded already. The kind's measured time plus the
    difference in bytes over the link's speed. Without that speed, in proportion to the bytes; for a source that was not
    measured, the link alone."""
    measured_s, speed = kind.load_s.get(source), links.get(source)
    if speed is None:
        if measured_s is None:
            raise ValueError(f"the profile has neither a load time of {kind.kind} from {source} nor that link's speed")
        return measured_s * footprint.own_bytes / max(kind.weight_bytes, 1)
    fixed_s = 0.0 if measured_s is None else max(measured_s - kind.weight_bytes / speed, 0.0)
    return fixed_s + footprint.own_bytes / speed


def _slowdown(executors: int, speedups: Sequence[float]) -> float:
    together = speedups[min(executors, len(speedups)) - 1] if speedups else 1.0
    return executors / together


def _performance(kind: KindProfile, factor: float) -> Performance:
    return Performance(
        K_s=kind.K_s * factor,
        B_s=kind.B_s * factor,
        max_batch=kind.max_batch,
        workspace_bytes=kind.workspace_bytes,
        workspace_base_bytes=kind.workspace_base_bytes,
        K_prompt_s=kind.K_prompt_s * factor,
        K_output_s=kind.K_output_s * factor,
        lease_bytes=kind.lease_bytes,
    )


def families(copies: Iterable[ExpertCopy]) -> dict[str, str]:
    """Family of each copy that has one: language models on one backbone, whose texts may share a quantum. Copies of one
    family have the same kind and precision, and share a segment of weights; of several the largest."""
    texts = {copy.name: copy for copy in copies if copy.expert.takes_texts}
    holders: defaultdict[tuple[str, str, str], set[str]] = defaultdict(set)
    for copy in texts.values():
        for segment in copy.packed.shared:
            holders[_key(copy, segment.sha256)].add(copy.name)
    found = {}
    for name, copy in texts.items():
        common = [segment for segment in copy.packed.shared if len(holders[_key(copy, segment.sha256)]) > 1]
        if common:
            largest = max(common, key=lambda segment: (segment.size_bytes, segment.sha256))
            found[name] = " ".join((copy.kind, copy.packed.precision, largest.sha256[:SHORT_SHA256]))
    return found


def with_families(matrix: PerformanceMatrix, copies: Iterable[ExpertCopy]) -> PerformanceMatrix:
    named: Mapping[str, str] = families(copies)
    return matrix.changed(lambda _processor, _expert, row: replace(row, family=named.get(row.copy)))


def _key(copy: ExpertCopy, segment: str) -> tuple[str, str, str]:
    return copy.kind, copy.packed.precision, segment
