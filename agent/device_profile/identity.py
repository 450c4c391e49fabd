"""Identity of the box and the experts that a profile was measured on, and differences since."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from agent.device_profile.records import SOURCE, BoxIdentity, StoredProfile
from experts.backends.forms import FORMS
from experts.sizes import mib

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from agent.runtime.machine.box import Box
    from experts.expert import Expert
    from experts.graph import ExpertGraph
    from experts.packed.weights import PackedExpert


def identity_of(box: Box) -> BoxIdentity:
    """Identity that a profile of this box holds for. Forms of the box are tried; others depend on library versions."""
    return BoxIdentity(
        device=box.name,
        model=box.model,
        processors=box.processors,
        cores=box.cores,
        host_bytes=box.host.total_bytes,
        device_bytes=None if box.device is None else box.device.total_bytes,
        versions=dict(box.versions),
        forms=", ".join(sorted(_forms_of_the_box())),
    )


def _forms_of_the_box() -> Iterator[str]:
    return (name for name, form in FORMS.items() if form.is_of_the_box and form.why_absent() is None)


def packed_sha256(packed: PackedExpert) -> str:
    """Digest of source file, program and tensors. Sharing is left out: it changes with other experts."""
    tensors = sorted(
        [spec.name, spec.dtype, list(spec.shape), list(spec.stride)]
        for segment in packed.segments
        for spec in segment.tensors
    )
    parts = [packed.architecture, packed.precision, packed.source_sha256, packed.program_sha256, tensors]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def verdict_sha256(graph: ExpertGraph, expert: Expert) -> str:
    """Digest of an expert's entry and its routes' steps; weights and calibration are in ``packed_sha256``."""
    asking = sorted(
        (component, number, sorted(step.passing), step.min_score, sorted(step.then.items()))
        for component, steps in graph.routes.items()
        for number in graph.turns(component, expert.id)
        for step in [steps[min(number, len(steps) - 1)]]
    )
    told = replace(expert, weights=Path(), calibration=None, pin=False)
    return hashlib.sha256(repr((told, asking)).encode()).hexdigest()


def box_mismatches(profile: StoredProfile, box: BoxIdentity) -> tuple[str, ...]:
    """Reasons why a profile does not hold for a box. Memory counts only below the profile's budget."""
    budgets = profile.allocation.budget_bytes
    return (*differences(profile.box, box), *_shrunken(budgets, box))


def is_of_another_box(then: BoxIdentity, now: BoxIdentity) -> bool:
    return any(differences(replace(then, versions={}, forms=""), replace(now, versions={}, forms="")))


def differences(then: BoxIdentity, now: BoxIdentity) -> Iterator[str]:
    """Differences of two boxes, without memory."""
    if then.device != now.device:
        yield f"the device is {now.device} now, {then.device} in the profile"
    if then.model != now.model:
        yield f"the device's model is {now.model!r} now, {then.model!r} in the profile"
    if then.processors != now.processors:
        here, there = (" and ".join(box.processors) for box in (now, then))
        yield f"the processors are {here} now, {there} in the profile"
    if then.cores != now.cores:
        yield f"the cores are {now.cores} now, {then.cores} in the profile"
    for library in sorted({*then.versions, *now.versions}):
        here, there = (box.versions.get(library, "not installed") for box in (now, then))
        if here != there:
            yield f"{library} is {here} now, {there} in the profile"
    if then.forms != now.forms:
        yield f"oneDNN's forms on this CPU are {now.forms or 'none'} now, {then.forms or 'none'} in the profile"


def _shrunken(budgets: Mapping[str, int], box: BoxIdentity) -> Iterator[str]:
    """Memories smaller than their budget; an emulated device's memory is part of the host's."""
    sizes = {"host": box.host_bytes, "device": None if box.device == "emulated" else box.device_bytes}
    for pool, budget_bytes in budgets.items():
        size_bytes = sizes.get(pool)
        if size_bytes is not None and size_bytes < budget_bytes:
            yield f"the {pool} memory is {mib(size_bytes)} now, the profile shares out {mib(budget_bytes)}"


def expert_mismatches(profile: StoredProfile, packed: Mapping[tuple[str, str], str]) -> dict[str, str]:
    """Experts that differ from their profile, and how. Their proofs do not hold any more.

    ``packed``: (expert, precision) -> ``packed_sha256`` of every expert on the line. (expert, SOURCE) -> sha256 of the
    owner's file excuses a form that was not profiled, where the file is the same.
    """
    known = {expert for expert, _ in profile.packed}
    found = {expert: "is not in the profile" for expert, _ in packed if expert not in known}
    for (expert, precision), sha256 in packed.items():
        then = profile.packed.get((expert, precision))
        if expert not in known or precision == SOURCE or then == sha256:
            continue
        source, source_then = packed.get((expert, SOURCE)), profile.packed.get((expert, SOURCE))
        if then is not None:
            found[expert] = f"in {precision} has other packed weights than those that were profiled"
        elif source is None or source_then is None:
            found[expert] = f"was not profiled in {precision}"
        elif source != source_then:
            found[expert] = "has other weights than those that were profiled"
    return found
