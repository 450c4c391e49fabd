"""Policies: the compared systems, as switches of one Engine; and the copies that each evicts, as pure functions.

``coserve`` is ours; ``paper`` is the CoServe paper without our additions; the Samba-CoE forms are its baselines
(section 5.1) and none, em, em-ra its ablations (section 5.3).

Copies are ranked for eviction; ``victims`` takes them in that order until the room suffices. Two-stage is the paper's
(section 4.3). Lookahead is ours, as the queues are the known future: experts without a queued use are evicted first, by
the paper's two stages, then experts with one, furthest use first (Belady's rule). LRU and FIFO are the baselines'.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Set as AbstractSet

    from agent.core.performance import Footprint


class Assigning(StrEnum):
    MAKESPAN = "makespan"  # section 4.2
    ROUND_ROBIN = "round-robin"
    FIRST = "first"  # a single executor


class Evicting(StrEnum):
    LOOKAHEAD = "lookahead"  # furthest queued use, then the two stages
    TWO_STAGE = "two-stage"  # section 4.3
    LRU = "lru"
    FIFO = "fifo"


@dataclass(frozen=True, slots=True)
class Policy:
    name: str
    assigning: Assigning
    arranging: bool  # a request is queued behind the last one of its expert, not at the tail (section 4.2)
    evicting: Evicting
    placing: bool  # experts are placed by usage probability before the first request (section 4.1)
    overlapping: bool = False  # loads run while the executor works: prefetch, and resident groups run meanwhile
    bounded: bool = False  # overtaking ends after max_overtake_s


PRESETS = {
    policy.name: policy
    for policy in (
        Policy("coserve", Assigning.MAKESPAN, True, Evicting.LOOKAHEAD, True, overlapping=True, bounded=True),
        Policy("paper", Assigning.MAKESPAN, True, Evicting.TWO_STAGE, True),
        Policy("samba", Assigning.FIRST, False, Evicting.LRU, False),
        Policy("samba-fifo", Assigning.FIRST, False, Evicting.FIFO, False),
        Policy("samba-parallel", Assigning.ROUND_ROBIN, False, Evicting.LRU, False),
        Policy("none", Assigning.ROUND_ROBIN, False, Evicting.FIFO, False),
        Policy("em", Assigning.ROUND_ROBIN, False, Evicting.TWO_STAGE, True),
        Policy("em-ra", Assigning.ROUND_ROBIN, True, Evicting.TWO_STAGE, True),
    )
}


STAGE_BY_RANK = 0  # LRU and FIFO; also copies that leave without a choice: spare or broken
STAGE_WITHOUT_PRELIMINARY = 1
STAGE_BY_USAGE = 2
STAGE_BY_NEXT_USE = 3


class EvictionCandidate(NamedTuple):
    """Evictable copy, with all inputs of a rank. A tuple for speed: dozens per decision."""

    copy: str
    expert: str
    footprint: Footprint
    usage: float
    next_use_s: float | None  # predicted time of its next queued use
    lacks_preliminary: bool  # a subsequent expert whose preliminary experts are all absent and unawaited
    loaded_order: int
    used_order: int


def _two_stage_rank(each: EvictionCandidate) -> tuple[int, float, str]:
    if each.lacks_preliminary:
        return STAGE_WITHOUT_PRELIMINARY, -each.footprint.total_bytes, each.copy
    return STAGE_BY_USAGE, each.usage, each.copy


def _lookahead_rank(each: EvictionCandidate) -> tuple[int, float, str]:
    if each.next_use_s is not None:
        return STAGE_BY_NEXT_USE, -each.next_use_s, each.copy
    return _two_stage_rank(each)


# Sort keys, first victim first. Each begins with the stage, the rule by which a candidate is evicted.
RANKS: dict[Evicting, Callable[[EvictionCandidate], tuple[int, float, str]]] = {
    Evicting.LOOKAHEAD: _lookahead_rank,
    Evicting.TWO_STAGE: _two_stage_rank,
    Evicting.LRU: lambda each: (STAGE_BY_RANK, each.used_order, each.copy),
    Evicting.FIFO: lambda each: (STAGE_BY_RANK, each.loaded_order, each.copy),
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
    """Count the candidate in ``leaving`` (shared tensor -> its holders that leave); return the bytes that it frees."""
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
