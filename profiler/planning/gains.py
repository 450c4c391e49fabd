"""Gain of one change: another measured form, more memory, or the best form with the memory it needs.

Guarantees: each figure is simulated, for the same requests, with the constants measured in that form. A form not proven
to agree with fp32 says so. Gains below LEAST are not listed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from experts.errors import ConfigError
from experts.expert import Precision
from experts.sizes import size_text
from profiler.simulation.forecast import forecast

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from agent.deployment.engine_setup import EngineSetup
    from agent.device_profile.records import KindProfile, StoredProfile
    from profiler.planning.advice import Advice, MemoryRemedy
    from profiler.simulation.forecast import Scenario

    Planned = tuple[Scenario, EngineSetup]

LEAST = 1.02  # times today's images/s


@dataclass(frozen=True, slots=True)
class Gain:
    """One change alone. ``form``, ``budget_bytes`` (by memory): the new value, or None for no change."""

    change: str
    form: str | None
    budget_bytes: Mapping[str, int] | None
    images_per_s: float
    remark: str = ""

    def sentence(self, now_images_per_s: float) -> str:
        remark = f"; {self.remark}" if self.remark else ""
        factor = self.images_per_s / now_images_per_s
        return f"{self.change}: {self.images_per_s:.1f} images/s, {factor:.2f} times as many{remark}."


def other_forms(profile: StoredProfile, setup: EngineSetup) -> list[Precision]:
    """Forms of image kinds that were measured on a used processor, but for one that everything runs in now."""
    processors = {spec.processor for spec in setup.executors}
    measured = {kind.precision for kind in _kinds_of_images(profile) if kind.processor in processors}
    run = {row.copy.rpartition("@")[2] for name in processors for row in setup.matrix.experts.get(name, {}).values()}
    return [form for form in Precision if form in measured and run != {str(form)}]


def gains(
    profile: StoredProfile,
    forms: Sequence[Precision],
    now: EngineSetup,
    advice: Advice,
    in_form: Callable[[Precision], Planned],
    advised: Callable[[Precision], Advice],
    is_decoding_limit: Callable[[Precision], bool] = lambda _: False,
) -> tuple[Gain, ...]:
    """Gains of ``forms`` and of more memory over ``advice`` on ``now``, the largest first.

    By form: ``in_form`` gives its plan, ``advised`` its advice, ``is_decoding_limit`` whether executors wait for
    images.
    """
    found = [gain for form in forms if (gain := _form_gain(profile, now, form, in_form))]
    if advice.memory is not None:
        found.append(_memory_gain(advice.memory))
    best = max((gain for gain in found if gain.form), key=lambda gain: gain.images_per_s, default=None)
    if best is not None and best.form is not None:
        remedy = advised(Precision(best.form)).memory
        if remedy is not None:
            found.append(_memory_gain(remedy, best))
    worth = [gain for gain in found if gain.images_per_s >= LEAST * advice.images_per_s]
    told = [_with_limit(gain) if gain.form and is_decoding_limit(Precision(gain.form)) else gain for gain in worth]
    return tuple(sorted(told, key=lambda gain: -gain.images_per_s))


def _with_limit(gain: Gain) -> Gain:
    return replace(gain, remark="; ".join(filter(None, (gain.remark, "decoding is the limit then"))))


def _form_gain(
    profile: StoredProfile, now: EngineSetup, form: Precision, in_form: Callable[[Precision], Planned]
) -> Gain | None:
    """None where the memories are too small."""
    try:
        scenario, setup = in_form(form)
        images_per_s = forecast(scenario, setup).images_per_s
    except ConfigError:
        return None
    processors = dict.fromkeys(spec.processor for spec in setup.executors)
    changed = {
        now.matrix.experts[name][expert].copy.rpartition("@")[2]
        for name in processors
        for expert, row in setup.matrix.experts.get(name, {}).items()
        if row.copy != now.matrix.experts[name][expert].copy
    }
    if not changed:
        return None
    return Gain(
        f"{form} instead of {' and '.join(sorted(changed))}", str(form), None, images_per_s, _doubt(profile, form)
    )


def _doubt(profile: StoredProfile, form: Precision) -> str:
    """Doubts about a form, by kind; empty where it agrees with fp32 everywhere."""
    if form is Precision.FP32:
        return ""
    doubts = {
        f"{kind.kind} {doubt}": None
        for kind in _kinds_of_images(profile)
        if kind.precision == form
        if (doubt := _form_doubt(profile, kind))
    }
    return "; ".join(doubts)


def _kinds_of_images(profile: StoredProfile) -> list[KindProfile]:
    on_the_line = profile.kinds_run
    return [kind for kind in profile.kinds if kind.kind in on_the_line and not kind.lease_bytes]


def _form_doubt(profile: StoredProfile, kind: KindProfile) -> str:
    """Number of a kind's experts without a proof against fp32, in words; empty for none."""
    key = (kind.kind, kind.processor, kind.precision)
    found = [each for each in profile.agreements if (each.kind, each.processor, each.precision) == key]
    if differing := sum(each.images > 0 and not each.agrees for each in found):
        return f"does not agree with fp32 on the samples of {differing} of its experts"
    experts = {each.expert for each in profile.forms.values() if each.kind == kind.kind}
    proven = {each.expert for each in found if each.proves}
    if not proven:
        return "is not proven to agree with fp32"
    lacking = len(experts - proven)
    return f"is not proven to agree with fp32 for {lacking} of its experts" if lacking else ""


def _memory_gain(remedy: MemoryRemedy, form: Gain | None = None) -> Gain:
    sizes = " and ".join(f"{size_text(size)} of {pool} memory" for pool, size in remedy.budget_bytes.items())
    short = [
        f"this box has {size_text(remedy.box_bytes[pool])} of {pool} memory"
        for pool, size in remedy.budget_bytes.items()
        if size > remedy.box_bytes[pool]
    ]
    remark = "; ".join((*((form.remark,) if form is not None and form.remark else ()), *short))
    change = sizes if form is None else f"{form.change}, and {sizes}"
    return Gain(change, None if form is None else form.form, remedy.budget_bytes, remedy.images_per_s, remark)
