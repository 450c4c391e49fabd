"""Policy of a cache of moe_experts with a fixed number of places: pure; each event is answered with loads to start.

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
from dataclasses import astuple, dataclass, replace
from functools import partial
from operator import add
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

HALF_LIFE_PASSES = 128.0  # arbitrary: long against a text, short against a shift
PRIOR_PASSES = 32.0  # arbitrary: how many passes usage probabilities are worth


@dataclass(frozen=True, slots=True, order=True)
class MoeExpert:
    layer: int
    number: int


@dataclass(frozen=True, slots=True)
class LoadMoeExpert:
    """Fill the place, where ``evicted`` was; answered with ``loaded`` or ``failed``."""

    moe_expert: MoeExpert
    place: int
    evicted: MoeExpert | None


@dataclass(slots=True)
class MoeStatistics:
    """Counters since the start, of one cache or of several."""

    hits: int = 0  # needed and present
    late: int = 0  # needed during their load ahead
    misses: int = 0
    ahead: int = 0  # loads before a need
    ahead_used: int = 0  # of those: needed while still present
    loads: int = 0
    bytes_loaded: int = 0
    waited_s: float = 0.0  # of all needs together

    def plus(self, other: MoeStatistics) -> MoeStatistics:
        return MoeStatistics(*map(add, astuple(self), astuple(other)))


@dataclass(slots=True)
class _Occupancy:
    place: int
    pins: int
    is_speculative: bool
    is_loaded: bool = False


class MoeResidency:
    """The cache of one model with so many ``layers``. ``prior``: how likely a pass needs each moe_expert."""

    def __init__(
        self, places: int, layers: int, prior: Mapping[MoeExpert, float] | None = None, *, loads_at_once: int = 1
    ) -> None:
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
        self._needed: dict[MoeExpert, int] = {}  # not loading yet, with the number of passes that wait, in order
        self._predicted: dict[MoeExpert, None] = {}
        self._passes = 0
        self._layer = 0
        self._counts = MoeStatistics()
        self.in_flight = 0

    def need(self, layer: int, numbers: Iterable[int]) -> list[LoadMoeExpert]:
        """A pass is at this layer, and these of its moe_experts have tokens."""
        self._layer = layer
        self._predicted = {one: None for one in self._predicted if one.layer != layer}
        for number in numbers:
            moe_expert = MoeExpert(layer, number)
            self._touch(moe_expert)
            holding = self._held.get(moe_expert)
            if holding is None:
                self._counts.misses += 1
                self._needed[moe_expert] = self._needed.get(moe_expert, 0) + 1
                continue
            if holding.is_loaded:
                self._counts.hits += 1
            else:
                self._counts.late += 1
            self._counts.ahead_used += holding.is_speculative
            holding.pins, holding.is_speculative = holding.pins + 1, False
        return self._loads()

    def predict(self, layer: int, numbers: Iterable[int]) -> list[LoadMoeExpert]:
        """A later layer will probably need these, most likely first; replaces the last prediction."""
        self._predicted = dict.fromkeys(MoeExpert(layer, number) for number in numbers)
        return self._loads()

    def loaded(self, moe_expert: MoeExpert) -> list[LoadMoeExpert]:
        self.in_flight -= 1
        self._counts.loads += 1
        self._held[moe_expert].is_loaded = True
        self._offer(moe_expert)
        return self._loads()

    def failed(self, moe_expert: MoeExpert) -> list[LoadMoeExpert]:
        """A load failed: no retry before the moe_expert is needed or predicted again."""
        self.in_flight -= 1
        self._free.append(self._held.pop(moe_expert).place)
        self._predicted.pop(moe_expert, None)
        return self._loads()

    def used(self, moe_expert: MoeExpert) -> list[LoadMoeExpert]:
        """A pass has run a needed moe_expert, or does not need it any more."""
        holding = self._held.get(moe_expert)
        if holding is not None:
            holding.pins = max(holding.pins - 1, 0)
            self._offer(moe_expert)
        elif (waiting := self._needed.pop(moe_expert, 0)) > 1:
            self._needed[moe_expert] = waiting - 1
        return self._loads()

    def end_pass(self) -> list[LoadMoeExpert]:
        """All layers have run: predictions are dropped."""
        self._predicted.clear()
        self._passes += 1
        return self._loads()

    def place_of(self, moe_expert: MoeExpert) -> int | None:
        holding = self._held.get(moe_expert)
        return holding.place if holding is not None and holding.is_loaded else None

    def usage(self) -> dict[MoeExpert, float]:
        """Probability that a pass needs each moe_expert, by past passes: prior of the model's next cache."""
        now = self._passes / HALF_LIFE_PASSES
        fading = 2.0 ** (-1.0 / HALF_LIFE_PASSES)
        weight = (1.0 - fading**self._passes) / (1.0 - fading) + PRIOR_PASSES * fading**self._passes
        return {one: min(2.0 ** (rank - now) / weight, 1.0) for one, rank in self._ranks.items()}

    def statistics(self) -> MoeStatistics:
        return replace(self._counts)

    def check_invariants(self) -> None:
        """Raises AssertionError where places or loads do not add up."""
        places = [*self._free, *(holding.place for holding in self._held.values())]
        assert sorted(places) == list(range(self._places)), f"places are lost or held twice: {sorted(places)}"
        loading = sum(not holding.is_loaded for holding in self._held.values())
        assert loading == self.in_flight <= self._loads_at_once, f"{self.in_flight} in flight, {loading} loading"
        assert not self._needed.keys() & self._held.keys(), "a present moe_expert is waited for"

    def _touch(self, moe_expert: MoeExpert) -> None:
        """Count a pass that needs it. A rank is the logarithm of the weights of all such passes, as of pass 0."""
        now = self._passes / HALF_LIFE_PASSES
        rank = self._ranks.get(moe_expert, -math.inf)
        higher, lower = max(rank, now), min(rank, now)
        self._ranks[moe_expert] = higher + math.log2(1.0 + 2.0 ** (lower - higher))

    def _loads(self) -> list[LoadMoeExpert]:
        return [*iter(self._begin_one, None)]

    def _begin_one(self) -> LoadMoeExpert | None:
        """The first load that may start. While a need finds no place, nothing is loaded ahead."""
        if self.in_flight == self._loads_at_once:
            return None
        for moe_expert in self._needed:
            return self._begin(moe_expert, self._is_unpredicted) or self._begin(moe_expert, lambda victim: True)
        for moe_expert in (one for one in self._predicted if one not in self._held):
            return self._begin(moe_expert, partial(self._is_later, moe_expert))
        return None

    def _begin(self, moe_expert: MoeExpert, may_go: Callable[[MoeExpert], bool]) -> LoadMoeExpert | None:
        """Load into a free place, or into that of the lowest rank that may go; None without a place."""
        evicted = None if self._free else self._take_lowest(may_go)
        if evicted is not None:
            self._free.append(self._held.pop(evicted).place)
        if not self._free:
            return None
        place, pins = self._free.pop(), self._needed.pop(moe_expert, 0)
        self._held[moe_expert] = _Occupancy(place, pins, is_speculative=not pins)
        self._counts.ahead += not pins
        self.in_flight += 1
        return LoadMoeExpert(moe_expert, place, evicted)

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
        """Make it a candidate for eviction, unless it is pinned or loading."""
        holding = self._held[moe_expert]
        if holding.pins or not holding.is_loaded:
            return
        heapq.heappush(self._candidates, (self._rank(moe_expert), moe_expert))
        if len(self._candidates) > 2 * self._places:  # at least half of them are outdated
            held = (one for one, holding in self._held.items() if holding.is_loaded and not holding.pins)
            self._candidates = [(self._rank(one), one) for one in held]
            heapq.heapify(self._candidates)

    def _rank(self, moe_expert: MoeExpert) -> float:
        return self._ranks.get(moe_expert, -math.inf)

    def _is_unpredicted(self, victim: MoeExpert) -> bool:
        return victim not in self._predicted

    def _is_later(self, moe_expert: MoeExpert, victim: MoeExpert) -> bool:
        """True if the victim's layer does not run before the other's. A predicted moe_expert is never evicted."""
        return self._is_unpredicted(victim) and self._turns_until(victim.layer) >= self._turns_until(moe_expert.layer)

    def _turns_until(self, layer: int) -> int:
        return (layer - self._layer - 1) % self._layers  # the layer that runs now is next in the next pass
