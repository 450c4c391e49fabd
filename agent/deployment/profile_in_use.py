"""How a line uses the device profile of its box: which one, whether it still holds, and what it says for each expert.

Guarantees: the line file comes before the profile, and the profile before the rules that need none; one that does not
hold any more is refused with everything that has changed, and never used in part.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from agent.config import set_unless_given, usage_probabilities
from agent.device_profile.identity import (
    box_mismatches,
    identity_of,
    is_of_another_box,
    mismatches,
    packed_sha256,
)
from agent.device_profile.openmp import DEFAULT, SPINNING, VARIABLES
from agent.device_profile.records import SOURCE, UsageOrigin
from agent.device_profile.store import partial_of, read_profile
from agent.runtime.expert_copy import kind_name
from experts.backends import GRAPH_FAMILIES, family
from experts.errors import ConfigError
from experts.expert import Precision

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from agent.config import LineConfig
    from agent.device_profile.records import StoredProfile
    from agent.runtime.machine.box import Box
    from experts.packed.weights import PackedExpert

log = logging.getLogger(__name__)

ACCELERATORS = frozenset({"cuda", "mps"})


def find_profile(config: LineConfig) -> StoredProfile | None:
    """The profile of this line's box; None where there is none, or only one that is not finished.

    Raises ConfigError for a file that cannot be read as one.
    """
    path = config.profile_file
    if path.exists():
        return read_profile(path)
    if partial_of(path).exists():
        log.info(
            "profile_not_finished path=%s: not used; `coserve profile %s` resumes it",
            partial_of(path), config.document.file,
        )  # fmt: skip
    return None


def set_spinning(config: LineConfig) -> str | None:
    """Have this process wait between operators as the line's profile found best: to be called before torch is loaded.

    The setting that it runs with from now on; None where its user has set one of OpenMP's variables, which then counts.
    A profile that cannot be read changes nothing here: whoever starts from it says why.
    """
    path = config.profile_file
    setting = DEFAULT
    with suppress(ConfigError):
        setting = read_profile(path).spinning_setting if path.exists() else DEFAULT
    is_ours = set_unless_given(SPINNING[setting], VARIABLES)
    if setting != DEFAULT:
        told = setting if is_ours else f"given profile={setting}: a variable of the environment comes first"
        log.info("openmp_spinning setting=%s", told)
    return setting if is_ours else None


def set_default_spinning() -> None:
    """The same without a line: as an agent without a profile waits."""
    set_unless_given(SPINNING[DEFAULT], VARIABLES)


def refuse_other_box(config: LineConfig, profile: StoredProfile, box: Box, packed: Iterable[PackedExpert]) -> None:
    """Raises ConfigError if the profile is of another box or of other libraries, telling all that has changed.

    ``packed``: what lies packed already; a profile that fits the box is not yet asked about it.
    """
    if box_mismatches(profile, identity_of(box)):
        refuse_mismatches(config, profile, box, packed)


def refuse_mismatches(config: LineConfig, profile: StoredProfile, box: Box, packed: Iterable[PackedExpert]) -> None:
    """Raises ConfigError, with every reason, if the profile does not hold for this box and these packed experts."""
    reasons = changes(config, profile, box, packed)
    if not reasons:
        return
    path = config.profile_file
    told = "".join(f"\n  - {reason}" for reason in reasons)
    replacing = " --fresh" if is_of_another_box(profile.box, identity_of(box)) else ""
    advice = f"run `coserve profile {config.document.file}{replacing}`, or move {path} away to serve with a quick probe"
    raise ConfigError(f"{path} does not hold for this box and line as they are now:{told}\n{advice}")


def changes(config: LineConfig, profile: StoredProfile, box: Box, packed: Iterable[PackedExpert]) -> tuple[str, ...]:
    """What is not as it was profiled: the box, its libraries, the weights of these packed experts.

    A form that an expert was not profiled in is accepted where its kind was timed in it and its weights are the same.
    """
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
    return mismatches(profile, identity_of(box), digests | sources)


def usage_of(config: LineConfig, profile: StoredProfile | None) -> dict[str, float]:
    """How likely a request is to use each expert: counted or served probabilities as the profile has them.

    Those that were computed are computed again, from today's quantities with the profile's pass rates.
    """
    if profile is None:
        return usage_probabilities(config)
    usage = profile.usage
    if usage.origin == UsageOrigin.COMPUTED:
        return usage_probabilities(config, usage.pass_rates)
    return {name: usage.probabilities.get(name, 0.0) for name in config.catalog.experts}


def precisions_of(
    config: LineConfig,
    processors: Iterable[str],
    profile: StoredProfile | None,
    programs: Mapping[str, str | None],
) -> dict[str, dict[str, Precision]]:
    """processor -> expert -> the precision it is packed for and run in there.

    ``programs``: expert -> sha256 of its program, of those that are packed; it tells kinds of ONNX graphs apart.
    """
    return {
        processor: {
            name: precision_of(config, name, processor, profile, programs.get(name)) for name in config.catalog.experts
        }
        for processor in dict.fromkeys(processors)
    }


def precision_of(
    config: LineConfig, expert: str, processor: str, profile: StoredProfile | None, program_sha256: str | None
) -> Precision:
    """What the line file gives; where it says auto, what the profile chose for the expert's kind there, else fp32.

    ONNX graphs and fakes do not follow the line file: they are fp32, or what the profile chose. A form of the CPU only
    is for executors that run on it; the others take the same numbers as torch runs them. A language model may say its
    own.
    """
    described = config.catalog.experts[expert]
    if described.precision is not None:
        return described.precision
    if described.is_automatic:
        config = config.having(precision="auto")
    if config.precision is not None:
        is_elsewhere = processor in ACCELERATORS or described.takes_texts
        is_fixed = family(described.architecture) in GRAPH_FAMILIES
        return Precision.FP32 if is_fixed else config.precision.plain if is_elsewhere else config.precision
    if profile is None:
        return Precision.FP32
    chosen = profile.precisions.get((kind_name(described, program_sha256), processor))
    return Precision.FP32 if chosen is None else Precision(chosen)


def programs_of(packed: Sequence[PackedExpert]) -> dict[str, str | None]:
    """expert -> sha256 of its program; in fp32 where it lies packed in several precisions."""
    fp32_last = sorted(packed, key=lambda each: each.precision == Precision.FP32)
    return {each.expert: each.program_sha256 for each in fp32_last}


def scaled_experts(profile: StoredProfile | None) -> frozenset[str]:
    """The experts for which JPEGs are made smaller while they are decoded: those proven to say the same of them."""
    return frozenset() if profile is None else frozenset(each.expert for each in profile.decodings if each.agrees)
