"""Who leaves when room is needed: pure functions of what is known.

Each strategy ranks the candidates, first to go first; ``victims`` then takes them in that order until the room is
made. TwoStage is the paper's (section 4.3). Lookahead is ours: the queues are the known future, so an expert with a
queued use goes only after every expert without one, furthest use first (Belady's rule); among those without one the
paper's two stages decide. Lru and Fifo are what the baselines do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agent.core.policy import Evicting

if TYPE_CHECKING:
    from agent.core.performance import Footprint

STAGE_BY_RANK = 0
STAGE_WITHOUT_PRELIMINARY = 1
STAGE_BY_USAGE = 2
STAGE_BY_NEXT_USE = 3


@dataclass(frozen=True, slots=True)
class Candidate:
    """An evictable copy and all that a strategy may know of it."""

    copy: str
    expert: str
    footprint: Footprint
    usage: float
    next_use_s: float | None  # predicted time of its next queued use
    lacks_preliminary: bool  # a subsequent expert none of whose preliminary experts is resident or awaited
    loaded_order: int
    used_order: int


@dataclass(frozen=True, slots=True)
class Victim:
    """A candidate that has to go, and which stage said so."""

    candidate: Candidate
    stage: int


Strategy = Callable[[Iterable[Candidate]], list[Victim]]


def two_stage(candidates: Iterable[Candidate]) -> list[Victim]:
    """Stage 1: subsequent experts without a preliminary one, largest first. Stage 2: ascending usage probability."""
    victims = [
        Victim(each, STAGE_WITHOUT_PRELIMINARY if each.lacks_preliminary else STAGE_BY_USAGE) for each in candidates
    ]
    return sorted(victims, key=_two_stage_rank)


def _two_stage_rank(victim: Victim) -> tuple[int, float, str]:
    each = victim.candidate
    rank = -each.footprint.total_bytes if victim.stage == STAGE_WITHOUT_PRELIMINARY else each.usage
    return victim.stage, rank, each.copy


def lookahead(candidates: Iterable[Candidate]) -> list[Victim]:
    """Those without a queued use by the two stages; then the others, furthest next use first."""
    known = list(candidates)
    idle = two_stage(each for each in known if each.next_use_s is None)
    awaited = [(each.next_use_s, each) for each in known if each.next_use_s is not None]
    awaited.sort(key=lambda pair: (-pair[0], pair[1].copy))
    return idle + [Victim(each, STAGE_BY_NEXT_USE) for _, each in awaited]


def lru(candidates: Iterable[Candidate]) -> list[Victim]:
    """Least recently used first."""
    return [Victim(each, STAGE_BY_RANK) for each in sorted(candidates, key=lambda each: each.used_order)]


def fifo(candidates: Iterable[Candidate]) -> list[Victim]:
    """First loaded, first to go."""
    return [Victim(each, STAGE_BY_RANK) for each in sorted(candidates, key=lambda each: each.loaded_order)]


STRATEGIES: dict[Evicting, Strategy] = {
    Evicting.LOOKAHEAD: lookahead,
    Evicting.TWO_STAGE: two_stage,
    Evicting.LRU: lru,
    Evicting.FIFO: fifo,
}


def victims(
    ranked: list[Victim], needed_bytes: int, part_holders: Callable[[str], int], kept_parts: frozenset[str]
) -> tuple[Victim, ...] | None:
    """The fewest of the ranked, from the first on, that free ``needed_bytes``; None if all of them do not.

    A shared part counts as freed when its last holder goes (``part_holders`` says how many there are), unless the
    newcomer shares it (``kept_parts``). A victim that later ones made superfluous is spared, the last ranked first.
    """
    chosen: list[Victim] = []
    for victim in ranked:
        if _freed(chosen, part_holders, kept_parts) >= needed_bytes:
            break
        chosen.append(victim)
    if _freed(chosen, part_holders, kept_parts) < needed_bytes:
        return None
    for victim in reversed(chosen[:-1]):
        without = [other for other in chosen if other is not victim]
        if _freed(without, part_holders, kept_parts) >= needed_bytes:
            chosen = without
    return tuple(chosen)


def _freed(chosen: list[Victim], part_holders: Callable[[str], int], kept_parts: frozenset[str]) -> int:
    """What these would free together."""
    total = 0
    leaving: dict[str, int] = {}
    for victim in chosen:
        total += victim.candidate.footprint.own_bytes
        for part in victim.candidate.footprint.shared:
            leaving[part.id] = leaving.get(part.id, 0) + 1
            if leaving[part.id] == part_holders(part.id) and part.id not in kept_parts:
                total += part.size_bytes
    return total
