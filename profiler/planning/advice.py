"""Advice on one policy in one memory: its limit, remedies and gains, and the sentences that tell them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from experts.sizes import size_text
from profiler.planning.decoding import REMOVED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from profiler.planning.decoding import DecodingLoad

FASTEST_SSD = 64.0  # times today's: faster ones are not on sale


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
        return f"The takt asks for {self.required_images_per_s:.2f} images/s: {'met' if self.is_met else missed}."


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

    ``gains``: of forms and memories, the largest first; ``other_forms``: forms tried for them. ``decoding``: None where
    not measured.
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
        return (first, *_limit_sentences(self), *takt, *gains)


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
        return f"With {memory.words}, or with {ssd.words}."
    if memory is not None:
        return f"With {memory.words}; {no_ssd} does as much."
    if ssd is not None:
        return f"With {ssd.words}; more memory does not do as much."
    return f"More memory alone does not reach {REMOVED:.0%} of that, and {no_ssd} does."
