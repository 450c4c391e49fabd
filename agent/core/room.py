"""Room: copies that a claim may evict from a memory, and the table of claims from strong to weak.

A *spare* copy was loaded for a request of idle precedence, and no queue waits for it: spare copies are evicted first.
While a request of idle precedence runs or loads in a memory, no other copy is evicted there.

Guarantees: a copy in use, being loaded or pinned is never evicted; evictions are reserved in the ledger before their
effects.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from agent.core.effects import Evict, EvictionDecision, Standing
from agent.core.policy import RANKS, STAGE_BY_RANK, Evicting, EvictionCandidate, victims

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from agent.core.pool import ModelPool, PoolEntry
    from agent.core.state import State, Wish


class Evicts(Enum):
    """Copies that a claim may evict, of those that are not in use and not pinned."""

    ANY = auto()
    USED_LATER = auto()  # not queued, or queued for later than the claim's own group
    NOT_QUEUED = auto()
    LESS_USED = auto()  # not queued, and of a lower usage probability; any, for a policy that ranks by time
    NOTHING = auto()


@dataclass(frozen=True, slots=True, eq=False)
class Claim:
    """A row of the table of claims to room. ``name``: in the record of an eviction.

    ``by_cache``: copies for a device go through the memory in front of it. ``stages``: while the device lacks room, the
    copy goes into that memory only. ``makes_short``: without room, its memory is short.
    ``spares_heads``: evicts no copy that the head of another queue runs on.
    """

    name: str
    evicts: Evicts
    by_cache: bool = False
    stages: bool = False
    makes_short: bool = False
    spares_heads: bool = True


# The table of claims, from strong to weak.
# Head of a queue beyond the overtaking bound. It spares only heads that are older still, keeps its place on the link,
# evicts copy by copy, and reserves copies in use: executors that alternate on a copy cannot keep it forever.
OVERDUE = Claim("overdue", Evicts.ANY, by_cache=True)
DEMAND = Claim("head", Evicts.ANY, by_cache=True, makes_short=True)  # head of a queue
PATIENT = Claim("patient", Evicts.ANY)  # head of a short queue at a working executor: waits for a copy in use
PREFETCH = Claim("prefetch", Evicts.USED_LATER, by_cache=True, stages=True, makes_short=True)  # a later group
BYPASS = Claim("bypass", Evicts.NOT_QUEUED, by_cache=True, stages=True, makes_short=True)  # passes a busy link's group
STAGE = Claim("stage", Evicts.NOT_QUEUED, spares_heads=False)  # a later group's, for the host while the device is full
CACHE = Claim("cache", Evicts.LESS_USED, spares_heads=False)  # a copy for the host on its way to the device
PINNED = Claim("pinned", Evicts.NOT_QUEUED)  # a pinned expert that is not resident
EARLY = Claim("early", Evicts.NOTHING)  # group of a short queue with other work first: its victim is chosen later
SPARE = Claim("spare", Evicts.NOTHING)  # initial placement of others, speculation, experts on probation
IDLE = Claim("idle", Evicts.NOTHING, makes_short=True)  # head of idle precedence; takes no place on the link


SHORTAGE = "shortage"  # instead of a claim: the memory's budget was lowered
UNUSABLE = "unusable"  # instead of a claim: requests must not use the copy, or an operator unloaded it


def make_room(state: State, pool: ModelPool, wish: Wish, claim: Claim) -> bool:
    """Evict spare copies, oldest first, then copies that the claim may evict; False if the room stays too small."""
    footprint = wish.profile.footprint
    short = pool.needed_bytes(footprint) - pool.free_bytes
    for entry in spare_copies(state, pool) if short > 0 else ():
        decision = EvictionDecision(wish.profile.copy, short, (_candidate(state, entry, None),), claim.name)
        _evict(state, pool, entry, decision, STAGE_BY_RANK)
        short = pool.needed_bytes(footprint) - pool.free_bytes
        if short <= 0:
            break
    if short <= 0:
        return True
    if pool.has_spare and any(entry.is_spare and (entry.uses or not entry.is_resident) for entry in pool.entries()):
        return False  # it runs or loads; a spare copy that was pinned since would hold the others forever
    if claim.evicts is Evicts.NOTHING or (claim is STAGE and pool.name in state.all_queued):
        return False
    rank = RANKS[state.policy.evicting]
    ranked = sorted(_candidates(state, pool, wish, claim), key=rank)
    if claim is STAGE and not ranked:
        state.all_queued.add(pool.name)  # only loads start in this round, so no copy gets less queued
    chosen = victims(ranked, short, pool.holders, frozenset(shared.id for shared in footprint.shared))
    if claim is PATIENT and chosen is not None and not all(pool.is_evictable(each.copy) for each in chosen):
        return False
    leaving = chosen if chosen is not None else tuple(ranked) if claim is OVERDUE else ()
    decision = EvictionDecision(wish.profile.copy, short, tuple(ranked), claim.name)
    for victim in leaving:
        _evict(state, pool, victim, decision, rank(victim)[0])
    return pool.can_reserve(footprint)


def spare_copies(state: State, pool: ModelPool) -> list[PoolEntry]:
    if not pool.has_spare:
        return []
    entries = [entry for entry in pool.entries() if entry.is_spare and entry.is_evictable]
    return [entry for entry in entries if _next_use_s(state, pool, entry) is None]


def _candidates(state: State, pool: ModelPool, wish: Wish, claim: Claim) -> Iterator[EvictionCandidate]:
    """Copies that a claim may evict.

    With long queues most claims find none, so the cheap checks come first.
    """
    heads = spared_heads(state, pool, wish, claim)
    spared_until_s, usage_below = _bounds(state, wish, claim)
    spared = _awaited(state, pool) if spared_until_s == math.inf else frozenset()
    usage, soon_free = state.line.matrix.usage, _soon_free(state, pool) if claim is PATIENT else frozenset()
    for entry in pool.entries():
        if entry.expert in spared or entry.copy in heads or usage.get(entry.expert, 0.0) >= usage_below:
            continue
        if entry.is_evictable or entry.copy in soon_free:
            next_use_s = _next_use_s(state, pool, entry, spared_until_s)
            if next_use_s is None or next_use_s > spared_until_s:
                yield _candidate(state, entry, next_use_s)


def _soon_free(state: State, pool: ModelPool) -> frozenset[str]:
    """Unawaited copies in use, which become evictable when that use ends.

    Empty while a loaded copy there is unused: its usage probability was too high, so recently used copies are not
    preferred as victims.
    """
    awaited = _awaited(state, pool)
    unawaited = [entry for entry in pool.entries() if entry.expert not in awaited]
    if any(entry.is_untouched for entry in unawaited):
        return frozenset()
    return frozenset(entry.copy for entry in unawaited if entry.uses and not entry.pinned)


def _awaited(state: State, pool: ModelPool) -> Collection[str]:
    awaited = [queue.awaited for queue in state.users[pool.name]]
    return awaited[0] if len(awaited) == 1 else frozenset().union(*awaited)


def spared_heads(state: State, pool: ModelPool, wish: Wish, claim: Claim) -> frozenset[str]:
    """Copies of the heads of this memory's other queues, which the claim must not evict."""
    if not claim.spares_heads:
        return frozenset()
    others = [queue for queue in state.users[pool.name] if queue.spec.id != wish.spec.id]
    heads = [head for queue in others if (head := queue.front) is not None]
    if state.policy.overlapping:  # else the other executor may wait for this load, or for a similar one
        heads += [group for queue in others for group in queue.ongoing.values()]
    return frozenset(head.profile.copy for head in heads if claim is not OVERDUE or head.oldest_s <= wish.since_s)


def _bounds(state: State, wish: Wish, claim: Claim) -> tuple[float, float]:
    """Limits of a claim: it keeps copies used at or before the first, and experts of at least the second usage."""
    if claim.evicts is Evicts.USED_LATER:
        return wish.starts_s, math.inf
    if claim.evicts is Evicts.NOT_QUEUED:
        return math.inf, math.inf
    if claim.evicts is Evicts.LESS_USED and state.policy.evicting not in (Evicting.LRU, Evicting.FIFO):
        return math.inf, state.line.matrix.usage.get(wish.expert, 0.0)
    return -math.inf, math.inf


def _candidate(state: State, entry: PoolEntry, next_use_s: float | None) -> EvictionCandidate:
    usage, lacks = state.line.matrix.usage.get(entry.expert, 0.0), _lacks_preliminary(state, entry.expert)
    return EvictionCandidate(
        entry.copy, entry.expert, entry.footprint, usage, next_use_s, lacks, entry.loaded_order, entry.used_order
    )


def _next_use_s(state: State, pool: ModelPool, entry: PoolEntry, soon_s: float = -math.inf) -> float | None:
    """Predicted time of a copy's next queued use in this memory, or, for a cache, in the memory that it feeds.

    Any use at or before ``soon_s`` may be returned, not only the earliest.
    """
    users = state.users[pool.spec.name]
    for fed in state.fed[pool.spec.name]:
        if fed.entry(entry.copy) is None:
            users = users + state.users[fed.spec.name]
    earliest: float | None = None
    for queue in users:
        group = queue.first_group(entry.expert)
        if group is not None and (earliest is None or group.starts_s < earliest):
            earliest = group.starts_s
            if earliest <= soon_s:
                break
    return earliest


def _lacks_preliminary(state: State, expert: str) -> bool:
    """True for a subsequent expert whose preliminary experts are all absent and unawaited (section 4.3, stage 1)."""
    preliminaries = state.line.graph.preliminaries(expert)
    return bool(preliminaries) and not any(state.presence[name] > 0 or state.is_awaited(name) for name in preliminaries)


def _evict(
    state: State, pool: ModelPool, victim: EvictionCandidate | PoolEntry, decision: EvictionDecision, stage: int
) -> None:
    freed = pool.evict(victim.copy)
    state.presence[victim.expert] -= 1
    state.counts[f"evictions_stage_{stage}"] += 1
    state.effects.append(Evict(victim.expert, victim.copy, pool.name, freed, stage, decision))


def shrink(state: State, pool: ModelPool, to_bytes: int) -> None:
    """Evict in order of rank, until at most ``to_bytes`` are used or no copy is evictable."""
    rank, spare = RANKS[state.policy.evicting], {entry.copy for entry in spare_copies(state, pool)}
    evictable = [entry for entry in pool.entries() if entry.is_evictable]
    candidates = [_candidate(state, entry, _next_use_s(state, pool, entry)) for entry in evictable]
    ranked = sorted(candidates, key=lambda each: (each.copy not in spare, rank(each)))
    for victim in ranked:
        short = pool.used_bytes - to_bytes
        if short <= 0:
            return
        _evict(state, pool, victim, EvictionDecision("", short, tuple(ranked), SHORTAGE), rank(victim)[0])


def discard(state: State, expert: str, only: ModelPool | None = None) -> None:
    """Evict an expert that requests must not use, from every memory or one; copies used by a batch or a load stay."""
    for pool in state.pools.values() if only is None else (only,):
        for entry in [entry for entry in pool.entries() if entry.expert == expert]:
            if entry.uses == 0 and entry.is_resident:
                _evict(state, pool, entry, EvictionDecision(entry.copy, 0, (), UNUSABLE), STAGE_BY_RANK)
                state.touched.add(pool.spec.worker)


def discard_if_gone(state: State, expert: str) -> None:
    """Discard a quarantined expert, or a retired one that no request waits for."""
    is_done = expert in state.line.retired and not state.is_awaited(expert)
    if is_done or state.standing_of(expert) is Standing.QUARANTINE:
        discard(state, expert)
