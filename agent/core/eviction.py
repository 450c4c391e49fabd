"""Eviction: choice of the copies to evict, as pure functions.

Each strategy ranks the candidates; ``victims`` takes them in that order until the room suffices. TwoStage is the
paper's (section 4.3). Lookahead is ours, as the queues are the known future: experts without a queued use are evicted
first, by the paper's two stages, then experts with one, furthest use first (Belady's rule). Lru and Fifo are the
baselines'.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from agent.core.policy import Evicting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from collections.abc import Set as AbstractSet

    from agent.core.performance import Footprint

STAGE_BY_RANK = 0
STAGE_WITHOUT_PRELIMINARY = 1
STAGE_BY_USAGE = 2
STAGE_BY_NEXT_USE = 3


class EvictionCandidate(NamedTuple):
    """Evictable copy, with all inputs of a strategy. A tuple for speed: dozens per decision."""

    copy: str
    expert: str
    footprint: Footprint
    usage: float
    next_use_s: float | None  # predicted time of its next queued use
    lacks_preliminary: bool  # a subsequent expert whose preliminary experts are all absent and unawaited
    loaded_order: int
    used_order: int


@dataclass(frozen=True, slots=True)
class Strategy:
    """Order of eviction. ``rank``: sort key, first victim first; ``stage``: rule by which a candidate is evicted."""

    rank: Callable[[EvictionCandidate], tuple[float, float, str]]
    stage: Callable[[EvictionCandidate], int]

    def ranked(self, candidates: Iterable[EvictionCandidate]) -> list[EvictionCandidate]:
        return sorted(candidates, key=self.rank)


def _two_stage_stage(each: EvictionCandidate) -> int:
    return STAGE_WITHOUT_PRELIMINARY if each.lacks_preliminary else STAGE_BY_USAGE


def _two_stage_rank(each: EvictionCandidate) -> tuple[float, float, str]:
    if each.lacks_preliminary:
        return STAGE_WITHOUT_PRELIMINARY, -each.footprint.total_bytes, each.copy
    return STAGE_BY_USAGE, each.usage, each.copy


def _lookahead_stage(each: EvictionCandidate) -> int:
    return STAGE_BY_NEXT_USE if each.next_use_s is not None else _two_stage_stage(each)


def _lookahead_rank(each: EvictionCandidate) -> tuple[float, float, str]:
    if each.next_use_s is not None:
        return STAGE_BY_NEXT_USE, -each.next_use_s, each.copy
    return _two_stage_rank(each)


def _by_rank(each: EvictionCandidate) -> int:
    return STAGE_BY_RANK


STRATEGIES = {
    Evicting.LOOKAHEAD: Strategy(_lookahead_rank, _lookahead_stage),
    Evicting.TWO_STAGE: Strategy(_two_stage_rank, _two_stage_stage),
    Evicting.LRU: Strategy(lambda each: (STAGE_BY_RANK, each.used_order, each.copy), _by_rank),
    Evicting.FIFO: Strategy(lambda each: (STAGE_BY_RANK, each.loaded_order, each.copy), _by_rank),
}


def victims(
    ranked: list[EvictionCandidate], needed_bytes: int, holders: Callable[[str], int], kept: frozenset[str]
) -> tuple[EvictionCandidate, ...] | None:
    """Fewest of the ranked candidates, from the first on, that free ``needed_bytes``; None if all together do not.

    Shared tensors count as freed when the last of their ``holders`` leaves, unless the newcomer shares them (``kept``).
    Victims that later ones made superfluous are spared, the last ranked first.
    """
    chosen: list[EvictionCandidate] = []
    freed = 0
    leaving: dict[str, int] = {}
    for candidate in ranked:
        if freed >= needed_bytes:
            break
        chosen.append(candidate)
        freed += _freed_by_one_more(candidate, leaving, holders, kept)
    if freed < needed_bytes:
        return None
    spared, staying = set(), set(kept)
    for candidate in reversed(chosen[:-1]):
        worth = _freed_by_last_one(candidate, leaving, holders, staying)
        if freed - worth >= needed_bytes:
            freed -= worth
            spared.add(candidate.copy)
            staying.update(shared.id for shared in candidate.footprint.shared)
    return tuple(each for each in chosen if each.copy not in spared)


def _freed_by_one_more(
    candidate: EvictionCandidate, leaving: dict[str, int], holders: Callable[[str], int], kept: AbstractSet[str]
) -> int:
    """Bytes that one more candidate frees. ``leaving``: shared tensors -> holders that leave already."""
    for shared in candidate.footprint.shared:
        leaving[shared.id] = leaving.get(shared.id, 0) + 1
    return _freed_by_last_one(candidate, leaving, holders, kept)


def _freed_by_last_one(
    candidate: EvictionCandidate, leaving: dict[str, int], holders: Callable[[str], int], kept: AbstractSet[str]
) -> int:
    """Bytes that a candidate counted in ``leaving`` adds to those that all free together."""
    freed = candidate.footprint.own_bytes
    for shared in candidate.footprint.shared:
        if leaving[shared.id] == holders(shared.id) and shared.id not in kept:
            freed += shared.size_bytes
    return freed
