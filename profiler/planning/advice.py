"""Limit of a line, and the memory or SSD that would remove it: found by simulation, told in sentences.

The rule. A line reaches its best with room for all experts and useful batches in every memory, each expert read before.
At REMOVED of that or more, loads are not the limit: arrivals are when the line is done about as soon as they allow,
else compute. Below, the SSD is the limit when it is busy for SSD_BUSY of the time, or when all that room is there
already; else memory is: requests wait for one load after another. Decoding goes before all of these where executors
wait for images (``profiler.planning.decoding``). The smallest memory and the slowest SSD that reach REMOVED of the best
are found by bisection, each alone, to a step of STEP; throughput is taken to rise with both. A memory that is tried is
split between experts and batches as the agent would do it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from agent.core.performance import DEVICE, HOST
from agent.core.request import IMAGE
from agent.deployment.memory_needs import memory_needs
from experts.sizes import size_text
from profiler.simulation.bounds import bounds
from profiler.simulation.forecast import forecast, reaches, with_expert_bytes, with_ssd

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from agent.deployment.engine_setup import EngineSetup
    from agent.device_profile.records import BoxIdentity
    from profiler.planning.decoding import DecodingLoad
    from profiler.planning.gains import Gain
    from profiler.simulation.bounds import Bounds
    from profiler.simulation.forecast import LineForecast, Scenario

    Split = Callable[[Mapping[str, int]], EngineSetup]  # what is decided with, in budgets in bytes by memory

REMOVED = 0.95  # of what unlimited memory gives
SSD_BUSY = 0.8  # arbitrary: beyond it loads can hardly overlap any better
SLACK = 1.02  # arrivals limit a line whose work takes clearly less time than they do
STEP = 1.02  # of the bisection: sizes closer than this are one
FASTEST_SSD = 64.0  # times today's: faster ones are not on sale
UNLIMITED_BYTES = 2**50  # of a memory


class Limit(StrEnum):
    """Resource that a line waits for most."""

    ARRIVALS = "arrivals"
    COMPUTE = "compute"
    SSD = "ssd"
    MEMORY = "memory"
    DECODING = "decoding"  # of images, before their batches


@dataclass(frozen=True, slots=True)
class MemoryRemedy:
    """Smallest budgets (experts and workspaces, by memory) that remove the bottleneck, and their rate.

    Only memories that have to grow are named: the one of most of the work where that is enough, else all by one factor.
    ``box_bytes``: the box's own.
    """

    now_bytes: Mapping[str, int]
    budget_bytes: Mapping[str, int]
    box_bytes: Mapping[str, int]
    images_per_s: float


@dataclass(frozen=True, slots=True)
class SsdRemedy:
    """Slowest SSD that removes the bottleneck, and its rate."""

    now_bytes_per_s: float
    bytes_per_s: float
    images_per_s: float


@dataclass(frozen=True, slots=True)
class Takt:
    """Demand of the line's boards, and whether it is met: with the present memory, and with unlimited memory."""

    required_images_per_s: float
    is_met: bool
    is_met_unlimited: bool


@dataclass(frozen=True, slots=True)
class Advice:
    """One policy with its memory. A remedy is None where none is needed, or none helps by itself.

    ``gains``: of forms and memories, the largest first (``profiler.planning.gains``); ``other_forms``: forms tried for
    them.
    """

    policy: str
    budget_bytes: Mapping[str, int]
    limit: Limit
    images_per_s: float
    unlimited_images_per_s: float
    switches: int
    ssd_busy_fraction: float
    memory: MemoryRemedy | None
    ssd: SsdRemedy | None
    takt: Takt | None
    gains: tuple[Gain, ...] = ()
    other_forms: tuple[str, ...] = ()
    decoding: DecodingLoad | None = None  # None: not measured

    @property
    def sentences(self) -> tuple[str, ...]:
        sizes = " and ".join(f"{size_text(size)} of {pool} memory" for pool, size in self.budget_bytes.items())
        rates = f"{self.images_per_s:.1f} of the {self.unlimited_images_per_s:.1f} images/s"
        first = f"{self.policy} with {sizes} reaches {rates} that unlimited memory gives."
        return (first, *_limit_sentences(self), *_takt_sentences(self), *_gain_sentences(self))


def advise(
    scenario: Scenario, setup: EngineSetup, box: BoxIdentity, required_images_per_s: float | None, split: Split
) -> Advice:
    """``required_images_per_s``: by the line's takt. ``split``: the agent's setup with these budgets.

    Raises ConfigError as ``forecast`` does.
    """
    now = forecast(scenario, setup)
    spacious = _with_room_for_all(setup, split)
    settled, roomy = with_ssd(scenario, spacious, math.inf)
    unlimited = forecast(settled, roomy)
    best_images_per_s = max(unlimited.images_per_s, now.images_per_s)
    target_images_per_s = REMOVED * best_images_per_s
    busy_fraction = now.bytes_read / scenario.ssd_bytes_per_s / now.seconds if now.seconds > 0.0 else 0.0
    memory = ssd = takt = None
    if now.images_per_s >= target_images_per_s:
        floor = bounds(scenario.requests, scenario.resources(setup))
        limit = Limit.ARRIVALS if _waits_for_arrivals(now, floor) else Limit.COMPUTE
    else:
        limit = Limit.SSD if busy_fraction >= SSD_BUSY or _is_as_roomy(setup, spacious) else Limit.MEMORY
        memory = _memory_remedy(scenario, setup, box, target_images_per_s, spacious, split)
        ssd = _ssd_remedy(scenario, setup, target_images_per_s)
    images = sum(arrival.work is IMAGE for arrival in scenario.trace)
    if required_images_per_s is not None and images:
        rate = required_images_per_s * len(scenario.trace) / images  # texts come with them
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


def with_decoding(advice: Advice, load: DecodingLoad | None) -> Advice:
    is_limit = load is not None and load.is_limit
    return replace(advice, decoding=load, limit=Limit.DECODING if is_limit else advice.limit)


def speed_text(bytes_per_s: float) -> str:
    """An SSD's bandwidth, rounded up: `1.4 GB/s`, `530 MB/s`."""
    if bytes_per_s >= 1e9:
        return f"{math.ceil(bytes_per_s / 1e8) / 10:.1f} GB/s"
    return f"{math.ceil(bytes_per_s / 1e6)} MB/s"


def _waits_for_arrivals(now: LineForecast, floor: Bounds) -> bool:
    keeps_up = now.seconds * REMOVED <= floor.arrivals_s
    return keeps_up and floor.arrivals_s > SLACK * floor.compute_s


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
            box_bytes = {pool: _box_bytes(box, pool) for pool in pools}
            return MemoryRemedy(now, found, box_bytes, played(found).images_per_s)
    return None


def _smallest_budgets(
    now_bytes: Mapping[str, int], most_bytes: Mapping[str, int], is_enough: Callable[[Mapping[str, int]], bool]
) -> dict[str, int] | None:
    """Smallest budgets that are enough, with these memories grown together; None where none are."""

    def grown(factor: float) -> dict[str, int]:
        return {pool: min(int(max(size, 1) * factor), most_bytes[pool]) for pool, size in now_bytes.items()}

    most = max(most_bytes[pool] / max(size, 1) for pool, size in now_bytes.items())
    factor = _smallest(1.0, most, lambda factor: is_enough(grown(factor)))
    return None if factor is None else grown(factor)


def _box_bytes(box: BoxIdentity, pool: str) -> int:
    return box.device_bytes if pool == DEVICE and box.device_bytes is not None else box.host_bytes


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


def _with_room_for_all(setup: EngineSetup, split: Split) -> EngineSetup:
    needs = memory_needs(_budgets(setup), setup.executors, setup.matrix, setup.limits.pinned, kv_bytes=0)
    room_bytes = {pool.name: max((*needs[pool.name].held_bytes, pool.expert_bytes)) for pool in setup.pools}
    return with_expert_bytes(split({pool.name: UNLIMITED_BYTES for pool in setup.pools}), room_bytes)


def _is_as_roomy(setup: EngineSetup, spacious: EngineSetup) -> bool:
    return all(
        pool.expert_bytes >= most.expert_bytes and pool.workspace_bytes >= most.workspace_bytes
        for pool, most in zip(setup.pools, spacious.pools, strict=True)
    )


def _budgets(setup: EngineSetup) -> dict[str, int]:
    return {pool.name: pool.expert_bytes + pool.workspace_bytes + pool.lease_bytes for pool in setup.pools}


# -- sentences --


def _limit_sentences(advice: Advice) -> list[str]:
    if advice.limit is Limit.DECODING and advice.decoding is not None:
        return advice.decoding.sentences()
    if advice.limit is Limit.ARRIVALS:
        return ["Arrivals are the limit: the last images are judged about as soon as they can be after they come."]
    if advice.limit is Limit.COMPUTE:
        return [f"Compute is the limit: no memory and no SSD would gain more than {1 / REMOVED - 1:.0%}."]
    if advice.limit is Limit.SSD:
        busy = f"and it is busy {advice.ssd_busy_fraction:.0%} of the time"
        told = [f"The SSD is the limit: requests wait for {advice.switches} switches, {busy}."]
    else:
        waits = (
            f"requests wait for {advice.switches} switches"
            if advice.switches
            else "batches get less of it than they can use"
        )
        told = [f"Memory is the limit: {waits}."]
    return [*told, _remedy_sentence(advice)]


def _remedy_sentence(advice: Advice) -> str:
    memory, ssd = advice.memory, advice.ssd
    no_ssd = f"no SSD up to {FASTEST_SSD:.0f} times as fast as this one"
    if memory is not None and ssd is not None:
        return f"With {_memory_words(memory)}, or with {_ssd_words(ssd)}."
    if memory is not None:
        return f"With {_memory_words(memory)}; {no_ssd} does as much."
    if ssd is not None:
        return f"With {_ssd_words(ssd)}; more memory does not do as much."
    return f"More memory alone does not reach {REMOVED:.0%} of that, and {no_ssd} does."


def _memory_words(remedy: MemoryRemedy) -> str:
    words = []
    for pool, size_bytes in remedy.budget_bytes.items():
        box_bytes = remedy.box_bytes[pool]
        box = f", this box has {size_text(box_bytes)}" if size_bytes > box_bytes else ""
        words.append(f"{size_text(size_bytes)} of {pool} memory (now {size_text(remedy.now_bytes[pool])}{box})")
    return f"{' and '.join(words)} it reaches {remedy.images_per_s:.1f} images/s"


def _ssd_words(remedy: SsdRemedy) -> str:
    speed, now = speed_text(remedy.bytes_per_s), speed_text(remedy.now_bytes_per_s)
    return f"an SSD of {speed} (now {now}) it reaches {remedy.images_per_s:.1f} images/s"


def _takt_sentences(advice: Advice) -> list[str]:
    if advice.takt is None:
        return []
    asked = f"The takt asks for {advice.takt.required_images_per_s:.2f} images/s"
    if advice.takt.is_met:
        return [f"{asked}: met."]
    if advice.takt.is_met_unlimited:
        return [f"{asked}: missed now, met with unlimited memory."]
    return [f"{asked}: missed with any memory."]


def _gain_sentences(advice: Advice) -> list[str]:
    told = [gain.sentence(advice.images_per_s) for gain in advice.gains]
    if advice.other_forms and not any(gain.form for gain in advice.gains):
        told.append(f"No other form that was measured would gain: {', '.join(advice.other_forms)}.")
    return told
