"""Advice on one policy in one memory: its limit, decoding included, with remedies, gains and sentences.

A batch takes K n + B once its images are prepared. The agent and the forecast (``profiler.simulation.decoders``) decode
ahead, on the cores that CPU executors compute on. Decoding is the limit if the cores, decoding and computing
(``profiler.simulation.core_time``), allow less than REMOVED of the rate of executors that never wait for images.
Experts without samples count with the mean image of the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from agent.core.request import IMAGE
from experts.sizes import size_text
from profiler.simulation.core_time import core_time
from profiler.simulation.decoders import ImageTimes
from profiler.simulation.forecast import forecast, image_times

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agent.core.engine import EngineSetup
    from agent.device_profile.records import StoredProfile
    from profiler.simulation.core_time import CoreTime
    from profiler.simulation.forecast import Scenario

REMOVED = 0.95  # of the best rate: a resource that allows more is not the limit
LEAST = 1.02  # times the present rate: a change that gains less is left out
FASTEST_SSD = 64.0  # times today's: faster ones are not on sale


@dataclass(frozen=True, slots=True)
class Help:
    """Rate that the cores would allow at most after one change alone."""

    change: str
    images_per_s: float


@dataclass(frozen=True, slots=True)
class DecodingLoad:
    """Decoding beside computing. Rates are of requests, texts among them.

    ``executors_images_per_s``: without waits for images. ``images``: number among the trace's requests. ``help``:
    largest first.
    """

    time: CoreTime
    images: int
    executors_images_per_s: float
    help: tuple[Help, ...] = ()

    @property
    def images_per_s(self) -> float:
        return self.time.images_per_s

    @property
    def alone_images_per_s(self) -> float:
        return self.images * self.time.cores / self.time.decoding_s

    @property
    def is_limit(self) -> bool:
        return self.images_per_s < REMOVED * self.executors_images_per_s

    @property
    def waiting_fraction(self) -> float:
        """Least part of their time that executors wait for images."""
        return max(1.0 - self.images_per_s / self.executors_images_per_s, 0.0)

    def figures(self) -> dict[str, float]:
        return {
            "images_per_s": self.images_per_s,
            "alone_images_per_s": self.alone_images_per_s,
            "decoding_share": self.time.decoding_share,
            "waiting_fraction": self.waiting_fraction,
        }

    def sentences(self) -> list[str]:
        time, images = self.time, self.images
        image_ms, compute_ms = time.decoding_s / images * 1e3, time.compute_s / images * 1e3
        cores = "1 core reaches" if time.cores == 1 else f"{time.cores} cores reach"
        limit = (
            f"Decoding is the limit: it takes {time.decoding_share:.0%} of the cores' time for an image "
            f"({image_ms:.0f} of {image_ms + compute_ms:.0f} ms of one core), so that {cores} "
            f"{time.images_per_s:.1f} images/s at most, and executors, which would run "
            f"{self.executors_images_per_s:.1f}, wait for images {self.waiting_fraction:.0%} of the time."
        )
        named = ", ".join(f"{each.change} {each.images_per_s:.1f}" for each in self.help)
        return [
            limit,
            f"In images/s, these would allow up to: {named}." if named else "No change would help by itself.",
        ]


@dataclass(frozen=True, slots=True)
class DecodingTimes:
    """Decoding times of a line's experts: ``images`` as served, ``smaller`` with every large JPEG decoded smaller.

    ``refusing``: experts that do not decide alike on smaller JPEGs.
    """

    images: ImageTimes
    smaller: ImageTimes
    refusing: tuple[str, ...]

    def time(self, scenario: Scenario, setup: EngineSetup) -> CoreTime:
        decoding_s = _of_all(self.images, scenario)
        return core_time(scenario.requests, scenario.resources(setup), self.images.cores, decoding_s)

    def is_limit(self, scenario: Scenario, setup: EngineSetup) -> bool:
        return self.time(scenario, setup).images_per_s < REMOVED * _alone(scenario, setup)

    def load(self, scenario: Scenario, setup: EngineSetup) -> DecodingLoad:
        """Raises ConfigError as ``forecast`` does."""
        time = self.time(scenario, setup)
        alone = _alone(scenario, setup)
        smaller, unlike = "JPEGs decoded to fewer pixels", len(self.refusing)
        if unlike:
            smaller += f" ({unlike} {'expert decides' if unlike == 1 else 'experts decide'} differently on them)"
        changes = {
            "images of half the pixels": replace(time, decoding_s=time.decoding_s / 2),
            smaller: replace(time, decoding_s=_of_all(self.smaller, scenario)),
        }
        found = [Help(change, min(each.images_per_s, alone)) for change, each in changes.items()]
        found.append(Help("a further core", replace(time, cores=time.cores + 1).images_per_s))
        worth = [each for each in found if each.images_per_s >= LEAST * time.images_per_s]
        return DecodingLoad(
            time, scenario.images_asked, alone, tuple(sorted(worth, key=lambda each: -each.images_per_s))
        )


def decoding_times(profile: StoredProfile, scenario: Scenario) -> DecodingTimes | None:
    """Decoding times of the line; None where none was measured, or the trace has no image."""
    images = image_times(profile)
    if images is None or not scenario.images_asked:
        return None
    return DecodingTimes(
        images=images,
        smaller=ImageTimes(images.cores, {each.expert: each.scaled_s / each.images for each in profile.decodings}),
        refusing=tuple(each.expert for each in profile.decodings if each.is_refuted),
    )


def _alone(scenario: Scenario, setup: EngineSetup) -> float:
    return forecast(replace(scenario, images=None), setup).images_per_s


def _of_all(times: ImageTimes, scenario: Scenario) -> float:
    return sum(
        times.of(steps[0]) for steps, each in zip(scenario.steps, scenario.trace, strict=True) if each.work is IMAGE
    )


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

    @property
    def words(self) -> str:
        texts = []
        for pool, size_bytes in self.budget_bytes.items():
            box_bytes = self.box_bytes[pool]
            box = f", this box has {size_text(box_bytes)}" if size_bytes > box_bytes else ""
            texts.append(f"{size_text(size_bytes)} of {pool} memory (now {size_text(self.now_bytes[pool])}{box})")
        return f"{' and '.join(texts)} it reaches {self.images_per_s:.1f} images/s"


@dataclass(frozen=True, slots=True)
class SsdRemedy:
    """Slowest SSD that removes the bottleneck, and its rate."""

    now_bytes_per_s: float
    bytes_per_s: float
    images_per_s: float

    @property
    def words(self) -> str:
        speed, now = speed_text(self.bytes_per_s), speed_text(self.now_bytes_per_s)
        return f"an SSD of {speed} (now {now}) it reaches {self.images_per_s:.1f} images/s"


@dataclass(frozen=True, slots=True)
class Takt:
    """Demand of the line's boards, and whether it is met: with the present memory, and with unlimited memory."""

    required_images_per_s: float
    is_met: bool
    is_met_unlimited: bool

    @property
    def sentence(self) -> str:
        missed = "missed now, met with unlimited memory" if self.is_met_unlimited else "missed with any memory"
        return f"The takt requires {self.required_images_per_s:.2f} images/s: {'met' if self.is_met else missed}."


@dataclass(frozen=True, slots=True)
class Gain:
    """Rate after one change alone. ``form``, ``budget_bytes`` (by memory): the new value, or None for no change."""

    change: str
    form: str | None
    budget_bytes: Mapping[str, int] | None
    images_per_s: float
    remark: str = ""

    def sentence(self, now_images_per_s: float) -> str:
        remark = f"; {self.remark}" if self.remark else ""
        factor = self.images_per_s / now_images_per_s
        return f"{self.change}: {self.images_per_s:.1f} images/s, {factor:.2f} times as many{remark}."


@dataclass(frozen=True, slots=True)
class Advice:
    """Advice on one policy with its memory. A remedy is None where none is needed, or none helps by itself.

    ``gains``: gains by forms and memories, the largest first; ``other_forms``: forms tried for them. ``proofs``: of
    the forms that are run. ``decoding``: None where not measured.
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
    proofs: tuple[str, ...] = ()
    decoding: DecodingLoad | None = None

    def with_decoding(self, load: DecodingLoad | None) -> Advice:
        is_limit = load is not None and load.is_limit
        return replace(self, decoding=load, limit=Limit.DECODING if is_limit else self.limit)

    @property
    def sentences(self) -> tuple[str, ...]:
        rates = f"{self.images_per_s:.1f} of the {self.unlimited_images_per_s:.1f} images/s"
        first = f"{self.policy} with {budget_text(self.budget_bytes)} reaches {rates} that unlimited memory gives."
        gains = [gain.sentence(self.images_per_s) for gain in self.gains]
        if self.other_forms and not any(gain.form for gain in self.gains):
            gains.append(f"No other form that was measured would gain: {', '.join(self.other_forms)}.")
        takt = [] if self.takt is None else [self.takt.sentence]
        return (first, *_limit_sentences(self), *takt, *self.proofs, *gains)


def budget_text(budget_bytes: Mapping[str, int]) -> str:
    return " and ".join(f"{size_text(size)} of {pool} memory" for pool, size in budget_bytes.items())


def speed_text(bytes_per_s: float) -> str:
    """An SSD's bandwidth, rounded up: `1.4 GB/s`, `530 MB/s`."""
    if bytes_per_s >= 1e9:
        return f"{math.ceil(bytes_per_s / 1e8) / 10:.1f} GB/s"
    return f"{math.ceil(bytes_per_s / 1e6)} MB/s"


def _limit_sentences(advice: Advice) -> list[str]:
    if advice.limit is Limit.DECODING and advice.decoding is not None:
        return advice.decoding.sentences()
    if advice.limit is Limit.ARRIVALS:
        return ["Arrivals are the limit: the last images are judged about as soon as possible after they arrive."]
    if advice.limit is Limit.COMPUTE:
        return [f"Compute is the limit: no memory and no SSD would gain more than {1 / REMOVED - 1:.0%}."]
    if advice.limit is Limit.SSD:
        busy = f"and it is busy {advice.ssd_busy_fraction:.0%} of the time"
        limit = f"The SSD is the limit: requests wait for {advice.switches} switches, {busy}."
    else:
        waits = (
            f"requests wait for {advice.switches} switches"
            if advice.switches
            else "batches get less memory than they can use"
        )
        limit = f"Memory is the limit: {waits}."
    return [limit, _remedy_sentence(advice)]


def _remedy_sentence(advice: Advice) -> str:
    memory, ssd = advice.memory, advice.ssd
    no_ssd = f"no SSD up to {FASTEST_SSD:.0f} times as fast as this one"
    if memory is not None and ssd is not None:
        return f"With {memory.words}, or with {ssd.words}."
    if memory is not None:
        return f"With {memory.words}; {no_ssd} does as much."
    if ssd is not None:
        return f"With {ssd.words}; more memory does not do as much."
    return f"More memory alone does not reach {REMOVED:.0%} of that, and {no_ssd} does."
