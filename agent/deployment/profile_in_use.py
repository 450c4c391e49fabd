"""A line's use of its box's device profile: the file, its validity, and its values for each expert.

Guarantees: the line file comes before the profile. A profile of another box, other libraries or more memory is not
used. An expert with other weights than profiled keeps its kind's times and sizes, runs in fp32, decodes JPEGs in full.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from agent.device_profile.identity import (
    box_mismatches,
    decoding_sha256,
    expert_mismatches,
    identity_of,
    is_of_another_box,
    packed_sha256,
    verdict_sha256,
)
from agent.device_profile.records import SOURCE, UsageOrigin
from agent.device_profile.store import partial_of, read_profile
from agent.line_file.usage import usage_probabilities
from agent.runtime.expert_copy import kind_name
from experts.backends import GRAPH_FAMILIES, family, own_precision
from experts.backends.forms import FORMS, form_of
from experts.errors import ConfigError
from experts.expert import Precision

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from agent.config import LineConfig
    from agent.deployment.packed_copies import Precisions
    from agent.device_profile.records import ImageDecoding, StoredProfile
    from agent.runtime.machine.box import Box
    from experts.packed.weights import PackedExpert

log = logging.getLogger(__name__)

ACCELERATORS = frozenset({"cuda", "mps", "integrated"})
NAMED = 5  # experts in one alarm beside the first


def find_profile(config: LineConfig) -> StoredProfile | None:
    """The finished profile of this line; None without one. Raises ConfigError for an unreadable file."""
    path = config.profile_file
    if path.exists():
        return read_profile(path)
    if partial_of(path).exists():
        log.info(
            "profile_not_finished path=%s: not used; `coserve profile %s` resumes it",
            partial_of(path), config.document.file,
        )  # fmt: skip
    return None


def usable_profile(config: LineConfig, box: Box) -> tuple[StoredProfile | None, tuple[str, ...]]:
    """The line's profile if it is valid for this box; else None, and the alarm. Raises ConfigError if the line is
    strict."""
    try:
        profile = find_profile(config)
        if profile is not None and (reasons := box_mismatches(profile, identity_of(box))):
            path = config.profile_file
            replacing = " --fresh" if is_of_another_box(profile.box, identity_of(box)) else ""
            profiling = f"`coserve profile {config.document.file}{replacing}`"
            listed = "".join(f"\n  - {reason}" for reason in reasons)
            advice = f"run {profiling}, or move {path} away to serve with a quick probe"
            raise ConfigError(f"{path} is not valid for this box as it is now:{listed}\n{advice}")
    except ConfigError as error:
        if config.is_profile_strict:
            raise
        log.error("profile_not_used reason=%s", error)
        return None, (f"device profile not used, served by a quick probe: {' '.join(str(error).split())}",)
    return profile, ()


def advice_without_profile(config: LineConfig, box: Box) -> tuple[str, ...]:
    """Sentence about faster forms of CPUs that a profile proves without samples; none if no expert may change."""
    count = sum(
        not expert.takes_texts
        and family(expert.architecture) not in GRAPH_FAMILIES
        and (expert.precision or config.precision_beside(expert)) is None
        for expert in config.catalog.experts.values()
    )
    if not (count and ACCELERATORS.isdisjoint(box.processors)):
        return ()
    forms = [
        name
        for name, form in FORMS.items()
        if form.has_numbers_of_fp32 and form.is_automatic and not form.steps_aside and form.why_absent() is None
    ]
    if not forms:
        return ()
    return (
        f"{count} of {len(config.catalog.experts)} experts run in torch's fp32, as no profile has proven a faster form "
        f"- `coserve profile {config.document.file}` proves {' and '.join(forms)} without samples, in which a CPU with "
        "AVX2 judged 1.38 times as many images (40 ResNet101)",
    )


def changed_experts(config: LineConfig, profile: StoredProfile, packed: Iterable[PackedExpert]) -> dict[str, str]:
    """Packed experts that differ from their profile, and how. A form that was not profiled is accepted if the expert's
    kind was timed in it and the weights are the same."""
    listed = tuple(packed)
    timed = {(kind.kind, kind.precision) for kind in profile.kinds}
    experts = config.catalog.experts
    untimed = {
        each.expert
        for each in listed
        if (kind_name(experts[each.expert], each.program_sha256), each.precision) not in timed
    }
    sources = {(each.expert, SOURCE): each.source_sha256 for each in listed if each.expert not in untimed}
    digests = {(each.expert, each.precision): packed_sha256(each) for each in listed}
    there = {each.expert for each in listed}
    judged = {
        name: "has other thresholds or routes than in the proof of its form"
        for (name, _), own in profile.forms.items()
        if name in there and config.precision is None and own.precision != Precision.FP32
        if own.verdict_sha256 != verdict_sha256(config.catalog.graph, experts[name])
    }
    return judged | expert_mismatches(profile, digests | sources)


def change_alarms(config: LineConfig, changed: Mapping[str, str]) -> tuple[str, ...]:
    """Alarm for experts that differ from their profile; empty without any."""
    if not changed:
        return ()
    (first, how), *others = sorted(changed.items())
    more = f" (and {len(others)} more: {', '.join(name for name, _ in others[:NAMED])})" if others else ""
    return (
        f"device profile: expert {first} {how}{more}: times are its kind's, usage and proofs the earlier ones, "
        f"`precision: auto` runs it in fp32 - `coserve profile {config.document.file} --expert {first}`, then reload",
    )


def usage_of(config: LineConfig, profile: StoredProfile | None) -> dict[str, float]:
    """Usage probability of each expert: counted or served as profiled, computed from today's quantities."""
    if profile is None:
        return usage_probabilities(config.catalog, config.boards)
    usage = profile.usage
    if usage.origin == UsageOrigin.COMPUTED:
        return usage_probabilities(config.catalog, config.boards, usage.pass_rates)
    return {name: usage.probabilities.get(name, 0.0) for name in config.catalog.experts}


def precision_of(
    config: LineConfig, expert: str, processor: str, profile: StoredProfile | None, program_sha256: str | None
) -> Precision:
    """The line file's precision; for auto the profile's for the expert, else for its kind, else the default. The
    default is fp32, or a language model's stored precision if the processor multiplies in it. ONNX graphs and fakes
    ignore the line file. A form that only CPUs run becomes torch's on other processors."""
    described = config.catalog.experts[expert]
    if described.precision is not None:
        return described.precision
    if described.is_automatic:
        config = config.having(precision="auto")
    if config.precision is not None:
        is_elsewhere = processor in ACCELERATORS or described.takes_texts
        is_fixed = family(described.architecture) in GRAPH_FAMILIES
        return Precision.FP32 if is_fixed else form_of(config.precision).plain if is_elsewhere else config.precision
    kind = kind_name(described, program_sha256)
    own = None if profile is None else profile.forms.get((expert, processor))
    if own is not None and own.kind == kind and own.verdict_sha256 == verdict_sha256(config.catalog.graph, described):
        return Precision(own.precision)
    chosen = None if profile is None else profile.precisions.get((kind, processor))
    return own_precision(described, processor) if chosen is None else Precision(chosen)


def unproven(config: LineConfig, precisions: Precisions, changed: Collection[str]) -> Precisions:
    """Precisions with fp32 for ``changed`` experts in forms of the profile; forms of the line file stay."""

    def is_chosen(expert: str, processor: str) -> bool:
        return expert in changed and precision_of(config, expert, processor, None, None) is Precision.FP32

    return {
        processor: {name: Precision.FP32 if is_chosen(name, processor) else form for name, form in column.items()}
        for processor, column in precisions.items()
    }


def programs_of(packed: Sequence[PackedExpert]) -> dict[str, str | None]:
    """expert -> sha256 of its program, fp32's if there are several."""
    fp32_last = sorted(packed, key=lambda each: each.precision == Precision.FP32)
    return {each.expert: each.program_sha256 for each in fp32_last}


def bound_decodings(
    config: LineConfig, profile: StoredProfile, forms: Callable[[str], Iterable[str]]
) -> tuple[ImageDecoding, ...]:
    """Proofs of smaller JPEGs that hold for an expert's input, thresholds and routes now, in one of its ``forms``."""
    experts, graph = config.catalog.experts, config.catalog.graph
    return tuple(
        each
        for each in profile.decodings
        if (expert := experts.get(each.expert))
        and each.bound_sha256 in {decoding_sha256(graph, expert, form) for form in forms(each.expert)}
    )


def scaled_experts(profile: StoredProfile | None) -> frozenset[str]:
    """Experts whose JPEGs may be decoded smaller, with proof that answers stay the same."""
    return frozenset() if profile is None else frozenset(each.expert for each in profile.decodings if each.agrees)
