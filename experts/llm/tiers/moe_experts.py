"""Policy of a cache of moe_experts with a fixed number of places: pure, events in, decisions out.

Guarantees, in any order of events: a needed moe_expert is not evicted before each waiting pass has used it. A load
ahead takes a free place, or that of a moe_expert that is not needed sooner. Needs go before speculation. Every need is
met, even with a single place, as long as each load is answered and each loaded moe_expert is used.

Eviction order is LRFU (Lee et al., IEEE Trans. Computers 50(12), 2001): every pass that needs a moe_expert counts 1,
and halves in weight with each ``HALF_LIFE_PASSES``. The ranking of two moe_experts does not change while neither is
needed, so each rank is one number in a heap.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

HALF_LIFE_PASSES = 128.0  # arbitrary: long against a text, short against a shift
PRIOR_PASSES = 32.0  # arbitrary: how many passes usage probabilities are worth


@dataclass(frozen=True, slots=True, order=True)
class MoeExpert:
    layer: int
    number: int


@dataclass(frozen=True, slots=True)
class MoeExpertsNeeded:
    """A layer is to be run, and these of its experts have tokens."""

    layer: int
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MoeExpertsPredicted:
    """A later layer will likely need these, the likeliest first. Takes the place of what was predicted before."""

    layer: int
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MoeExpertLoaded:
    moe_expert: MoeExpert


@dataclass(frozen=True, slots=True)
class MoeExpertNotLoaded:
    """A Load failed: its place is free; waiting passes have to be told."""

    moe_expert: MoeExpert


@dataclass(frozen=True, slots=True)
class MoeExpertUsed:
    """A needed one has run, or is not needed any more."""

    moe_expert: MoeExpert


@dataclass(frozen=True, slots=True)
class PassEnded:
    """All layers have run: predictions are dropped."""


@dataclass(frozen=True, slots=True)
class EvictMoeExpert:
    moe_expert: MoeExpert
    place: int


@dataclass(frozen=True, slots=True)
class LoadMoeExpert:
    """Fill the place; answer with Loaded or NotLoaded. ``is_needed``: a pass waits for it."""

    moe_expert: MoeExpert
    place: int
    is_needed: bool


Event: TypeAlias = (
    MoeExpertsNeeded | MoeExpertsPredicted | MoeExpertLoaded | MoeExpertNotLoaded | MoeExpertUsed | PassEnded
)
Decision: TypeAlias = EvictMoeExpert | LoadMoeExpert


@dataclass(slots=True)
class ResidencyStatistics:
    """Counters since the start."""

    places: int
    held: int = 0
    hits: int = 0  # needed and there
    late: int = 0  # needed while they were being loaded ahead
    misses: int = 0
    ahead: int = 0  # loaded before they were needed
    ahead_used: int = 0  # and then needed while still there
    evictions: int = 0


@dataclass(slots=True)
class _Occupancy:
    place: int
    is_loaded: bool = False
    pins: int = 0
    is_speculative: bool = False


@dataclass(slots=True)
class _LoadWishes:
    """Loads to start, in this order. ``needed``: with the number of passes that wait."""

    needed: dict[MoeExpert, int] = field(default_factory=dict)
    predicted: dict[MoeExpert, None] = field(default_factory=dict)


class MoeResidency:
    """The cache of one model with so many ``layers``. ``prior``: how likely a pass needs each moe_expert."""

    def __init__(
        self, places: int, layers: int, prior: Mapping[MoeExpert, float] | None = None, *, loads_at_once: int = 1
    ) -> None:
        if places < 1 or layers < 1 or loads_at_once < 1:
            raise ValueError(f"{places} places, {layers} layers, {loads_at_once} loads")
        self._places = places
        self._layers = layers
        self._loads_at_once = loads_at_once
        self._ranks = {
            moe_expert: math.log2(PRIOR_PASSES * probability)
            for moe_expert, probability in (prior or {}).items()
            if probability > 0
        }
        self._held: dict[MoeExpert, _Occupancy] = {}
        self._free = list(range(places - 1, -1, -1))  # the lowest is taken first
        self._candidates: list[tuple[float, MoeExpert]] = []  # a heap; entries may be out of date
        self._wishes = _LoadWishes()
        self._in_flight = 0
        self._passes = 0
        self._layer = 0
        self._counts = ResidencyStatistics(places)

    def handle(self, event: Event) -> tuple[Decision, ...]:
        """Decisions that follow from an event: loads to start, each behind the eviction that makes room for it."""
        match event:
            case MoeExpertsNeeded(layer, numbers):
                self._need(layer, numbers)
            case MoeExpertsPredicted(layer, numbers):
                self._wishes.predicted = dict.fromkeys(MoeExpert(layer, number) for number in numbers)
            case MoeExpertLoaded(moe_expert):
                self._loaded(moe_expert)
            case MoeExpertNotLoaded(moe_expert):
                self._drop(moe_expert)
            case MoeExpertUsed(moe_expert):
                self._unpin(moe_expert)
            case PassEnded():
                self._end_pass()
        return tuple(self._begin_loads())

    def place_of(self, moe_expert: MoeExpert) -> int | None:
        holding = self._held.get(moe_expert)
        return holding.place if holding is not None and holding.is_loaded else None

    @property
    def in_flight(self) -> int:
        return self._in_flight

    def usage(self) -> dict[MoeExpert, float]:
        """Probability that a pass needs each moe_expert, by past passes: prior of the model's next cache."""
        now = self._passes / HALF_LIFE_PASSES
        fading = 2.0 ** (-1.0 / HALF_LIFE_PASSES)
        weight = (1.0 - fading**self._passes) / (1.0 - fading) + PRIOR_PASSES * fading**self._passes
        return {one: min(2.0 ** (rank - now) / weight, 1.0) for one, rank in self._ranks.items()}

    def statistics(self) -> ResidencyStatistics:
        return replace(self._counts, held=len(self._held))

    def check_invariants(self) -> None:
        """Raises AssertionError where the books are wrong."""
        places = [*self._free, *(holding.place for holding in self._held.values())]
        assert sorted(places) == list(range(self._places)), f"places are lost or held twice: {sorted(places)}"
        loading = sum(not holding.is_loaded for holding in self._held.values())
        assert loading == self._in_flight <= self._loads_at_once, f"{self._in_flight} in flight, {loading} loading"
        assert not self._wishes.needed.keys() & self._held.keys(), "what is there is waited for"

    def _need(self, layer: int, numbers: Iterable[int]) -> None:
        self._layer = layer
        self._wishes.predicted = {one: None for one in self._wishes.predicted if one.layer != layer}
        for number in numbers:
            moe_expert = MoeExpert(layer, number)
            self._touch(moe_expert)
            holding = self._held.get(moe_expert)
            if holding is None:
                self._counts.misses += 1
                self._wishes.needed[moe_expert] = self._wishes.needed.get(moe_expert, 0) + 1
                continue
            if holding.is_loaded:
                self._counts.hits += 1
            else:
                self._counts.late += 1
            self._counts.ahead_used += holding.is_speculative
            holding.pins, holding.is_speculative = holding.pins + 1, False

    def _touch(self, moe_expert: MoeExpert) -> None:
        """Count a pass that needs it: the logarithm of what all those that did weigh, as of pass 0."""
        now = self._passes / HALF_LIFE_PASSES
        rank = self._ranks.get(moe_expert, -math.inf)
        higher, lower = max(rank, now), min(rank, now)
        self._ranks[moe_expert] = higher + math.log2(1.0 + 2.0 ** (lower - higher))

    def _loaded(self, moe_expert: MoeExpert) -> None:
        self._in_flight -= 1
        holding = self._held[moe_expert]
        holding.is_loaded = True
        if not holding.pins:
            self._offer(moe_expert)

    def _drop(self, moe_expert: MoeExpert) -> None:
        """Its load failed: no retry before it is needed or predicted again."""
        self._in_flight -= 1
        self._free.append(self._held.pop(moe_expert).place)
        self._wishes.predicted.pop(moe_expert, None)

    def _unpin(self, moe_expert: MoeExpert) -> None:
        holding = self._held.get(moe_expert)
        if holding is None:
            self._unwish(moe_expert)
            return
        holding.pins = max(holding.pins - 1, 0)
        if holding.is_loaded and not holding.pins:
            self._offer(moe_expert)

    def _unwish(self, moe_expert: MoeExpert) -> None:
        waiting = self._wishes.needed.pop(moe_expert, 0)
        if waiting > 1:
            self._wishes.needed[moe_expert] = waiting - 1

    def _end_pass(self) -> None:
        self._wishes.predicted.clear()
        self._passes += 1

    def _begin_loads(self) -> Iterator[Decision]:
        while self._in_flight < self._loads_at_once:
            begun = self._begin_one()
            if not begun:
                return
            yield from begun

    def _begin_one(self) -> tuple[Decision, ...]:
        """The first wish that may have a place. While a need finds none, nothing is loaded ahead."""
        for moe_expert in self._wishes.needed:
            return self._begin(moe_expert, self._is_unpredicted) or self._begin(moe_expert, lambda victim: True)
        for moe_expert in (one for one in self._wishes.predicted if one not in self._held):
            return self._begin(moe_expert, partial(self._is_later, moe_expert))
        return ()

    def _begin(self, moe_expert: MoeExpert, may_go: Callable[[MoeExpert], bool]) -> tuple[Decision, ...]:
        """Load it into a free place, or into that of the lowest one that may go; nothing where there is none."""
        evicted = None if self._free else self._take_lowest(may_go)
        if not self._free and evicted is None:
            return ()
        pins = self._wishes.needed.pop(moe_expert, 0)
        freed: tuple[Decision, ...] = ()
        if evicted is not None:
            self._counts.evictions += 1
            self._free.append(self._held.pop(evicted).place)
            freed = (EvictMoeExpert(evicted, self._free[-1]),)
        place = self._free.pop()
        self._held[moe_expert] = _Occupancy(place, pins=pins, is_speculative=not pins)
        self._counts.ahead += not pins
        self._in_flight += 1
        return (*freed, LoadMoeExpert(moe_expert, place, pins > 0))

    def _take_lowest(self, may_go: Callable[[MoeExpert], bool]) -> MoeExpert | None:
        passed_over: list[tuple[float, MoeExpert]] = []
        found = None
        while self._candidates and found is None:
            rank, moe_expert = heapq.heappop(self._candidates)
            holding = self._held.get(moe_expert)
            if holding is None or holding.pins or not holding.is_loaded or rank != self._rank(moe_expert):
                continue  # the entry is out of date
            if may_go(moe_expert):
                found = moe_expert
            else:
                passed_over.append((rank, moe_expert))
        for entry in passed_over:
            heapq.heappush(self._candidates, entry)
        return found

    def _offer(self, moe_expert: MoeExpert) -> None:
        """Make it a candidate for eviction."""
        heapq.heappush(self._candidates, (self._rank(moe_expert), moe_expert))
        if len(self._candidates) > 2 * self._places:  # half of them, or more, are out of date
            held = (one for one, holding in self._held.items() if holding.is_loaded and not holding.pins)
            self._candidates = [(self._rank(one), one) for one in held]
            heapq.heapify(self._candidates)

    def _rank(self, moe_expert: MoeExpert) -> float:
        return self._ranks.get(moe_expert, -math.inf)

    def _is_unpredicted(self, victim: MoeExpert) -> bool:
        return victim not in self._wishes.predicted

    def _is_later(self, moe_expert: MoeExpert, victim: MoeExpert) -> bool:
        """Is the victim's layer's turn not before the other's? What is predicted itself never goes."""
        return self._is_unpredicted(victim) and self._turns_until(victim.layer) >= self._turns_until(moe_expert.layer)

    def _turns_until(self, layer: int) -> int:
        return (layer - self._layer - 1) % self._layers  # the layer that runs now is next in the next pass
