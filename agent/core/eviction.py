"""Who leaves when room is needed: pure functions of what is known.

Each strategy ranks the candidates, first to go first; ``victims`` then takes them in that order until the room is
made. Two-stage is the paper's (section 4.3). Lookahead is ours: the queues are the known future, so an expert with
a queued use goes only after every expert without one, furthest use first (Belady's rule); among those without one
the paper's two stages decide. Lru and Fifo are what the baselines do.
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


class Candidate(NamedTuple):
    """An evictable copy and all that a strategy may know of it (a tuple: dozens are made for each decision)."""

    copy: str
    expert: str
    footprint: Footprint
    usage: float
    next_use_s: float | None  # predicted time of its next queued use
    lacks_preliminary: bool  # a subsequent expert none of whose preliminary experts is resident or awaited
    loaded_order: int
    used_order: int


@dataclass(frozen=True, slots=True)
class Strategy:
    """``rank`` sorts candidates, first to go first; ``stage`` says by which rule one would go."""

    rank: Callable[[Candidate], tuple[float, float, str]]
    stage: Callable[[Candidate], int]

    def ranked(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        return sorted(candidates, key=self.rank)


def _two_stage_stage(each: Candidate) -> int:
    return STAGE_WITHOUT_PRELIMINARY if each.lacks_preliminary else STAGE_BY_USAGE


def _two_stage_rank(each: Candidate) -> tuple[float, float, str]:
    if each.lacks_preliminary:
        return STAGE_WITHOUT_PRELIMINARY, -each.footprint.total_bytes, each.copy
    return STAGE_BY_USAGE, each.usage, each.copy


def _lookahead_stage(each: Candidate) -> int:
    return STAGE_BY_NEXT_USE if each.next_use_s is not None else _two_stage_stage(each)


def _lookahead_rank(each: Candidate) -> tuple[float, float, str]:
    if each.next_use_s is not None:
        return STAGE_BY_NEXT_USE, -each.next_use_s, each.copy
    return _two_stage_rank(each)


def _by_rank(each: Candidate) -> int:
    return STAGE_BY_RANK


STRATEGIES = {
    Evicting.LOOKAHEAD: Strategy(_lookahead_rank, _lookahead_stage),
    Evicting.TWO_STAGE: Strategy(_two_stage_rank, _two_stage_stage),
    Evicting.LRU: Strategy(lambda each: (STAGE_BY_RANK, each.used_order, each.copy), _by_rank),
    Evicting.FIFO: Strategy(lambda each: (STAGE_BY_RANK, each.loaded_order, each.copy), _by_rank),
}


def victims(
    ranked: list[Candidate], needed_bytes: int, part_holders: Callable[[str], int], kept_parts: frozenset[str]
) -> tuple[Candidate, ...] | None:
    """The fewest of the ranked, from the first on, that free ``needed_bytes``; None if all of them do not.

    A shared part counts as freed when its last holder goes (``part_holders`` says how many there are), unless the
    newcomer shares it (``kept_parts``). A victim that later ones made superfluous is spared, the last ranked first.
    """
    chosen: list[Candidate] = []
    freed = 0
    leaving: dict[str, int] = {}
    for candidate in ranked:
        if freed >= needed_bytes:
            break
        chosen.append(candidate)
        freed += _freed_by_one_more(candidate, leaving, part_holders, kept_parts)
    if freed < needed_bytes:
        return None
    spared, staying = set(), set(kept_parts)
    for candidate in reversed(chosen[:-1]):
        worth = _freed_by_last_one(candidate, leaving, part_holders, staying)
        if freed - worth >= needed_bytes:
            freed -= worth
            spared.add(candidate.copy)
            staying.update(part.id for part in candidate.footprint.shared)
    return tuple(each for each in chosen if each.copy not in spared)


def _freed_by_one_more(
    candidate: Candidate, leaving: dict[str, int], part_holders: Callable[[str], int], kept_parts: AbstractSet[str]
) -> int:
    """What one more frees, after those already counted in ``leaving`` (shared part -> holders that leave)."""
    for part in candidate.footprint.shared:
        leaving[part.id] = leaving.get(part.id, 0) + 1
    return _freed_by_last_one(candidate, leaving, part_holders, kept_parts)


def _freed_by_last_one(
    candidate: Candidate, leaving: dict[str, int], part_holders: Callable[[str], int], kept_parts: AbstractSet[str]
) -> int:
    """What one of those counted in ``leaving`` adds to what they free together."""
    freed = candidate.footprint.own_bytes
    for part in candidate.footprint.shared:
        if leaving[part.id] == part_holders(part.id) and part.id not in kept_parts:
            freed += part.size_bytes
    return freed
