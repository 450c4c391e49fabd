"""Limit of a line, and the gains of changes, found by simulation: another memory, SSD or measured form.

A line reaches its best with room for all experts and useful batches in every memory, each expert read before. At
REMOVED of that or more, arrivals are the limit when the line is done about as soon as they allow, else compute. Below,
the SSD is the limit if it is busy for SSD_BUSY of the time or memory already has that room; else memory is. Decoding
takes precedence over all of these (``profiler.planning.advice``). The smallest memory and the slowest SSD that reach
REMOVED of the best are found by bisection, each alone; a tried memory is split as by the agent.

Guarantees: every figure is simulated for the same requests, with the constants measured in that form. A form not proven
to agree with fp32 is marked. Gains below LEAST are not listed.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from agent.core.names import form_of
from agent.core.performance import DEVICE, HOST
from agent.deployment.deployment import Overrides, planned, profiled_box
from agent.deployment.memory_needs import memory_needs
from experts.errors import ConfigError
from experts.expert import Precision
from experts.sizes import size_text
from profiler.planning.advice import (
    FASTEST_SSD,
    LEAST,
    REMOVED,
    Advice,
    Gain,
    Limit,
    MemoryRemedy,
    SsdRemedy,
    Takt,
    budget_text,
)
from profiler.simulation.bounds import bounds
from profiler.simulation.forecast import forecast, reaches, with_expert_bytes, with_ssd

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from agent.config import LineConfig
    from agent.core.engine import EngineSetup
    from agent.device_profile.records import BoxIdentity, KindProfile, StoredProfile
    from profiler.planning.advice import DecodingTimes
    from profiler.simulation.forecast import LineForecast, Scenario

    Split = Callable[[Mapping[str, int]], EngineSetup]  # setup with budgets in bytes by memory
    Planned: TypeAlias = tuple[Scenario, EngineSetup]

SSD_BUSY = 0.8  # arbitrary: beyond it loads can hardly overlap any better
SLACK = 1.02  # arrivals limit a line whose work takes clearly less time than they do
STEP = 1.02  # of the bisection: sizes closer than this are one
UNLIMITED_BYTES = 2**50  # of a memory


def advise(
    scenario: Scenario, setup: EngineSetup, box: BoxIdentity, required_images_per_s: float | None, split: Split
) -> Advice:
    """``required_images_per_s``: by the line's takt. ``split``: the agent's setup with these budgets.

    Raises ConfigError as ``forecast`` does.
    """
    now = forecast(scenario, setup)
    needs = memory_needs(_budgets(setup), setup.executors, setup.matrix, setup.limits.pinned, kv_bytes=0)
    room_bytes = {pool.name: max((*needs[pool.name].held_bytes, pool.expert_bytes)) for pool in setup.pools}
    spacious = with_expert_bytes(split({pool.name: UNLIMITED_BYTES for pool in setup.pools}), room_bytes)
    settled, roomy = with_ssd(scenario, spacious, math.inf)
    unlimited = forecast(settled, roomy)
    best_images_per_s = max(unlimited.images_per_s, now.images_per_s)
    target_images_per_s = REMOVED * best_images_per_s
    busy_fraction = now.bytes_read / scenario.ssd_bytes_per_s / now.seconds if now.seconds > 0.0 else 0.0
    memory = ssd = takt = None
    if now.images_per_s >= target_images_per_s:
        floor = bounds(scenario.requests, scenario.resources(setup))
        keeps_up = now.seconds * REMOVED <= floor.arrivals_s
        limit = Limit.ARRIVALS if keeps_up and floor.arrivals_s > SLACK * floor.compute_s else Limit.COMPUTE
    else:
        is_roomy = all(
            pool.expert_bytes >= most.expert_bytes and pool.workspace_bytes >= most.workspace_bytes
            for pool, most in zip(setup.pools, spacious.pools, strict=True)
        )
        limit = Limit.SSD if busy_fraction >= SSD_BUSY or is_roomy else Limit.MEMORY
        memory = _memory_remedy(scenario, setup, box, target_images_per_s, spacious, split)
        ssd = _ssd_remedy(scenario, setup, target_images_per_s)
    if required_images_per_s is not None and scenario.images_asked:
        rate = scenario.with_texts(required_images_per_s)
        is_met = reaches(scenario, setup, now, rate)
        is_met_unlimited = is_met or reaches(settled, roomy, unlimited, rate)
        takt = Takt(required_images_per_s, is_met, is_met_unlimited)
    return Advice(
        policy=setup.policy,
        budget_bytes=_budgets(setup),
        limit=limit,
        images_per_s=now.images_per_s,
        unlimited_images_per_s=best_images_per_s,
        switches=now.switches,
        ssd_busy_fraction=busy_fraction,
        memory=memory,
        ssd=ssd,
        takt=takt,
    )


def _memory_remedy(
    scenario: Scenario,
    setup: EngineSetup,
    box: BoxIdentity,
    target_images_per_s: float,
    spacious: EngineSetup,
    split: Split,
) -> MemoryRemedy | None:
    """Grows the device's memory first where executors run from one, else the host's."""
    used = {spec.pool for spec in setup.executors}
    main = DEVICE if DEVICE in used else HOST
    now_bytes, most_bytes = _budgets(setup), _budgets(spacious)

    def played(budget_bytes: Mapping[str, int]) -> LineForecast:
        return forecast(scenario, split(budget_bytes))

    for pools in dict.fromkeys(((main,), tuple(now_bytes))):
        now, most = ({pool: sizes[pool] for pool in pools} for sizes in (now_bytes, most_bytes))
        found = _smallest_budgets(now, most, lambda sizes: played(sizes).images_per_s >= target_images_per_s)
        if found is not None:
            sizes = {HOST: box.host_bytes, DEVICE: box.device_bytes or box.host_bytes}
            box_bytes = {pool: sizes[pool] for pool in pools}
            return MemoryRemedy(now, found, box_bytes, played(found).images_per_s)
    return None


def _smallest_budgets(
    now_bytes: Mapping[str, int], most_bytes: Mapping[str, int], is_enough: Callable[[Mapping[str, int]], bool]
) -> dict[str, int] | None:
    def grown(factor: float) -> dict[str, int]:
        return {pool: min(int(max(size, 1) * factor), most_bytes[pool]) for pool, size in now_bytes.items()}

    most = max(most_bytes[pool] / max(size, 1) for pool, size in now_bytes.items())
    factor = _smallest(1.0, most, lambda factor: is_enough(grown(factor)))
    return None if factor is None else grown(factor)


def _ssd_remedy(scenario: Scenario, setup: EngineSetup, target_images_per_s: float) -> SsdRemedy | None:
    now_bytes_per_s = scenario.ssd_bytes_per_s

    def with_speed(bytes_per_s: float) -> LineForecast:
        return forecast(*with_ssd(scenario, setup, bytes_per_s))

    fastest = now_bytes_per_s * FASTEST_SSD
    found = _smallest(now_bytes_per_s, fastest, lambda speed: with_speed(speed).images_per_s >= target_images_per_s)
    if found is None:
        return None
    return SsdRemedy(now_bytes_per_s, found, with_speed(found).images_per_s)


def _smallest(too_little: float, most: float, is_enough: Callable[[float], bool]) -> float | None:
    """Smallest value that is enough, to a step of STEP; None where even the largest is not."""
    if most <= too_little or not is_enough(most):
        return None
    enough = most
    while enough > STEP * too_little:
        middle = math.sqrt(too_little * enough)
        if is_enough(middle):
            enough = middle
        else:
            too_little = middle
    return enough


def _budgets(setup: EngineSetup) -> dict[str, int]:
    return {pool.name: pool.expert_bytes + pool.workspace_bytes + pool.lease_bytes for pool in setup.pools}


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
        setup = planned(config, profiled_box(self.profile), self.profile, Overrides(form=form))
        if self.ssd_bytes_per_s is None:
            return self.scenario, setup
        return with_ssd(self.scenario, setup, self.ssd_bytes_per_s)

    def advice(self, form: Precision | None = None) -> Advice:
        scenario, setup = self.planned(form)
        box, required = self.profile.box, self.required_images_per_s
        return advise(scenario, setup, box, required, lambda sizes: self.planned(form, sizes)[1])


def with_gains(advice: Advice, case: PlannedCase) -> Advice:
    """Adds the gains of other forms and of more memory, the largest first."""
    now = case.planned()[1]
    processors = {spec.processor for spec in now.executors}
    measured = {kind.precision for kind in _kinds_of_images(case.profile) if kind.processor in processors}
    run = {form_of(row.copy) for name in processors for row in now.matrix.experts.get(name, {}).values()}
    forms = [form for form in Precision if form in measured and run != {str(form)}]
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
    return replace(advice, gains=gains, other_forms=tuple(map(str, forms)), proofs=_proofs(case))


def _proofs(case: PlannedCase) -> tuple[str, ...]:
    """Evidence of the forms that the profile chose, with the number of experts."""
    chosen = case.profile.forms.values() if case.config.precision is None else ()
    found = Counter((each.precision, each.why) for each in chosen if each.precision != Precision.FP32)
    return tuple(
        f"{count} {'expert runs' if count == 1 else 'experts run'} in {form}: {why}."
        for (form, why), count in sorted(found.items())
    )


def _form_gain(case: PlannedCase, now: EngineSetup, form: Precision) -> Gain | None:
    """Gain of a form; None where the memories are too small for it, or no expert would run in another form."""
    try:
        scenario, setup = case.planned(form)
        images_per_s = forecast(scenario, setup).images_per_s
    except ConfigError:
        return None
    changed = {
        form_of(now.matrix.experts[name][expert].copy)
        for name in {spec.processor for spec in setup.executors}
        for expert, row in setup.matrix.experts.get(name, {}).items()
        if row.copy != now.matrix.experts[name][expert].copy
    }
    if not changed:
        return None
    change = f"{form} instead of {' and '.join(sorted(changed))}"
    return Gain(change, str(form), None, images_per_s, _doubt(case.profile, form))


def _doubt(profile: StoredProfile, form: Precision) -> str:
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
    """Number of a kind's experts without a proof against fp32, as text; empty for none."""
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
