"""Identity of a profile's box and experts, and their differences from the present ones."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import TYPE_CHECKING

from agent.device_profile.records import SOURCE, BoxIdentity, StoredProfile
from experts.backends.forms import FORMS
from experts.sizes import mib
from experts.thresholds.binding import entry_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agent.runtime.machine.box import Box
    from experts.expert import Expert
    from experts.graph import ExpertGraph
    from experts.packed.weights import PackedExpert


def identity_of(box: Box) -> BoxIdentity:
    """Identity of this box. Forms that depend on the box are tried; others depend on library versions."""
    forms = (form.name_here for form in FORMS.values() if form.is_of_the_box and form.why_absent() is None)
    return BoxIdentity(
        device=box.name,
        model=box.model,
        processors=box.processors,
        cores=box.cores,
        host_bytes=box.host.total_bytes,
        device_bytes=None if box.device is None else box.device.total_bytes,
        versions=dict(box.versions),
        forms=", ".join(sorted(forms)),
        cpu=box.cpu,
        drive=box.drive,
    )


def packed_sha256(packed: PackedExpert) -> str:
    """Digest of source file, program and tensors, without sharing, which depends on other experts."""
    tensors = sorted(
        [spec.name, spec.dtype, list(spec.shape), list(spec.stride)]
        for segment in packed.segments
        for spec in segment.tensors
    )
    parts = [packed.architecture, packed.precision, packed.source_sha256, packed.program_sha256, tensors]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def verdict_sha256(graph: ExpertGraph, expert: Expert) -> str:
    """Digest of an expert's entry and its steps on routes. ``packed_sha256`` covers weights and calibration."""
    steps = sorted(
        (component, number, sorted(step.passing), step.min_score, sorted(step.then.items()))
        for component, route in graph.routes.items()
        for number in graph.turns(component, expert.id)
        for step in [route[min(number, len(route) - 1)]]
    )
    return hashlib.sha256(f"({entry_text(expert)}, {steps!r})".encode()).hexdigest()


def decoding_sha256(graph: ExpertGraph, expert: Expert, form: str) -> str:
    """Digest that binds a proof of smaller JPEGs: input, thresholds and routes, and the form that was compared."""
    return hashlib.sha256(f"{form} {verdict_sha256(graph, expert)}".encode()).hexdigest()


def box_mismatches(profile: StoredProfile, box: BoxIdentity) -> tuple[str, ...]:
    """Reasons why a profile is not valid for a box. Memory counts only below the profile's budget."""
    sizes = {"host": box.host_bytes, "device": None if box.device == "emulated" else box.device_bytes}  # the host's
    shrunken = (
        f"the {pool} memory is {mib(size_bytes)} now, the profile shares out {mib(budget_bytes)}"
        for pool, budget_bytes in profile.allocation.budget_bytes.items()
        if (size_bytes := sizes.get(pool)) is not None and size_bytes < budget_bytes
    )
    return (*differences(profile.box, box), *shrunken)


def is_of_another_box(then: BoxIdentity, now: BoxIdentity) -> bool:
    return any(differences(replace(then, versions={}, forms=""), replace(now, versions={}, forms="")))


def differences(then: BoxIdentity, now: BoxIdentity) -> tuple[str, ...]:
    """Differences of two boxes in sentences.

    Not compared: memory, and a CPU or a drive that one of the boxes does not name."""
    libraries, missing = sorted({*then.versions, *now.versions}), "not installed"
    facts: Sequence[tuple[str, object, object]] = (
        ("the device is", then.device, now.device),
        ("the device's model is", repr(then.model), repr(now.model)),
        ("the processors are", " and ".join(then.processors), " and ".join(now.processors)),
        ("the cores are", then.cores, now.cores),
        *((f"{name} is", then.versions.get(name, missing), now.versions.get(name, missing)) for name in libraries),
        ("oneDNN's forms on this CPU are", then.forms or "none", now.forms or "none"),
        ("the CPU is", then.cpu or now.cpu, now.cpu or then.cpu),
        ("the drive of the packed weights is", then.drive or now.drive, now.drive or then.drive),
    )
    return tuple(f"{fact} {here} now, {there} in the profile" for fact, there, here in facts if here != there)


def expert_mismatches(profile: StoredProfile, packed: Mapping[tuple[str, str], str]) -> dict[str, str]:
    """Experts that differ from their profile, and how: their proofs are void. ``packed``: (expert, precision) ->
    ``packed_sha256`` of every expert on the line, and (expert, SOURCE) -> sha256 of the owner's file. An equal source
    makes up for a form that was not profiled."""
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
