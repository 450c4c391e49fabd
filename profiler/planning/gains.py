"""Gain of one change: another measured form, more memory, or the best form with the memory it needs.

Guarantees: each figure is simulated, for the same requests, with the constants measured in that form. A form not proven
to agree with fp32 says so. Gains below LEAST are not listed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from agent.deployment.engine_setup import Given, planned, profiled_box
from experts.errors import ConfigError
from experts.expert import Precision
from experts.sizes import size_text
from profiler.planning.advice import Gain, budget_text
from profiler.planning.limits import advise
from profiler.simulation.forecast import forecast, with_ssd

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agent.config import LineConfig
    from agent.deployment.engine_setup import EngineSetup
    from agent.device_profile.records import KindProfile, StoredProfile
    from profiler.planning.advice import Advice, MemoryRemedy
    from profiler.planning.decoding import DecodingTimes
    from profiler.simulation.forecast import Scenario

    Planned: TypeAlias = tuple[Scenario, EngineSetup]

LEAST = 1.02  # times today's images/s


@dataclass(frozen=True, slots=True)
class PlannedCase:
    """Plans one policy in one memory (``config``'s), in any form and with any budgets.

    ``ssd_bytes_per_s``: None: the measured speed. ``decoding``: None where not measured.
    """

    config: LineConfig
    profile: StoredProfile
    scenario: Scenario
    decoding: DecodingTimes | None
    required_images_per_s: float | None
    ssd_bytes_per_s: float | None

    def planned(self, form: Precision | None = None, budget_bytes: Mapping[str, int] | None = None) -> Planned:
        config = self.config.having(memory=budget_bytes)
        setup = planned(config, profiled_box(self.profile), self.profile, Given(form=form))
        if self.ssd_bytes_per_s is None:
            return self.scenario, setup
        return with_ssd(self.scenario, setup, self.ssd_bytes_per_s)

    def advice(self, form: Precision | None = None) -> Advice:
        """Advice without gains and decoding."""
        scenario, setup = self.planned(form)
        box, required = self.profile.box, self.required_images_per_s
        return advise(scenario, setup, box, required, lambda sizes: self.planned(form, sizes)[1])


def with_gains(advice: Advice, case: PlannedCase) -> Advice:
    """Adds the gains of other forms and of more memory, the largest first."""
    now = case.planned()[1]
    forms = _other_forms(case.profile, now)
    found = [gain for form in forms if (gain := _form_gain(case, now, form))]
    best = max(found, key=lambda gain: gain.images_per_s, default=None)
    if advice.memory is not None:
        found.append(_memory_gain(advice.memory))
    if best is not None and best.form is not None:
        remedy = case.advice(Precision(best.form)).memory
        if remedy is not None:
            found.append(_memory_gain(remedy, best))
    worth = [gain for gain in found if gain.images_per_s >= LEAST * advice.images_per_s]
    for place, gain in enumerate(worth):
        if gain.form and case.decoding and case.decoding.is_limit(*case.planned(Precision(gain.form))):
            remark = "; ".join(filter(None, (gain.remark, "decoding is the limit then")))
            worth[place] = replace(gain, remark=remark)
    gains = tuple(sorted(worth, key=lambda gain: -gain.images_per_s))
    return replace(advice, gains=gains, other_forms=tuple(map(str, forms)))


def _other_forms(profile: StoredProfile, setup: EngineSetup) -> list[Precision]:
    """Forms of image kinds that were measured on a used processor, but for one that everything runs in now."""
    processors = {spec.processor for spec in setup.executors}
    measured = {kind.precision for kind in _kinds_of_images(profile) if kind.processor in processors}
    run = {_form(row.copy) for name in processors for row in setup.matrix.experts.get(name, {}).values()}
    return [form for form in Precision if form in measured and run != {str(form)}]


def _form(copy: str) -> str:
    return copy.rpartition("@")[2]


def _form_gain(case: PlannedCase, now: EngineSetup, form: Precision) -> Gain | None:
    """Gain of a form; None where the memories are too small for it, or no expert would run in another form."""
    try:
        scenario, setup = case.planned(form)
        images_per_s = forecast(scenario, setup).images_per_s
    except ConfigError:
        return None
    changed = {
        _form(now.matrix.experts[name][expert].copy)
        for name in {spec.processor for spec in setup.executors}
        for expert, row in setup.matrix.experts.get(name, {}).items()
        if row.copy != now.matrix.experts[name][expert].copy
    }
    if not changed:
        return None
    change = f"{form} instead of {' and '.join(sorted(changed))}"
    return Gain(change, str(form), None, images_per_s, _doubt(case.profile, form))


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
    found = profile.agreements_of(kind)
    if differing := sum(each.images > 0 and not each.agrees for each in found):
        return f"does not agree with fp32 on the samples of {differing} of its experts"
    experts = {each.expert for each in profile.forms.values() if each.kind == kind.kind}
    proven = {each.expert for each in found if each.proves}
    if not proven:
        return "is not proven to agree with fp32"
    lacking = len(experts - proven)
    return f"is not proven to agree with fp32 for {lacking} of its experts" if lacking else ""


def _memory_gain(remedy: MemoryRemedy, form: Gain | None = None) -> Gain:
    sizes = budget_text(remedy.budget_bytes)
    short = [
        f"this box has {size_text(remedy.box_bytes[pool])} of {pool} memory"
        for pool, size in remedy.budget_bytes.items()
        if size > remedy.box_bytes[pool]
    ]
    if form is None:
        return Gain(sizes, None, remedy.budget_bytes, remedy.images_per_s, "; ".join(short))
    remark = "; ".join(filter(None, (form.remark, *short)))
    return Gain(f"{form.change}, and {sizes}", form.form, remedy.budget_bytes, remedy.images_per_s, remark)
