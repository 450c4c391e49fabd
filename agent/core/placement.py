"""Placement: which expert lies in which memory, what moves next, and who makes room for it.

Guarantees: every move is reserved in the pool's ledger before its effect is sent, evictions before the load that
needs their room; no more than ``loads_in_flight`` loads from one source at a time; a copy whose load failed is tried
again after a pause at the earliest, which doubles up to ``longest_pause_s``. What failed loads say of their expert is
the Engine's to decide; those for want of a file, as of a mount that dropped, count only after ``away_s`` of them.

How strong a claim to room is, from strong to weak:
    OVERDUE   head of a queue, with a request that has waited for longer than the overtaking bound: evicts whatever
              may go but the heads that are older still, even bit by bit, and keeps its place on the link it needs:
              nobody younger loads from there before it; what it takes once it is not in use any more is held for
              it, so that executors that take turns do not keep it in use for ever
    DEMAND    head of a queue: evicts by rank, but not what stands at the head of another queue
    PATIENT   head of a short queue whose executor works: as DEMAND, but where something that is in use and not queued
              would go first, were it free, it waits for that
    PREFETCH  a later group of a long queue: evicts only what is not queued, or is queued for later than itself
    BYPASS    a later group, past one that waits for a busy link: evicts only what is not queued
    STAGE     a later group's copy, for the host while the device is full: evicts only what is not queued
    CACHE     a copy for the host on its way to the device: evicts only what the policy deems worth less
    PINNED    an expert that is to stay in memory and is not there: evicts only what is not queued
    EARLY     any group of a short queue that has other work first: free room only
    SPARE     initial placement of others, speculation, and experts on probation: free room only
    BACKGROUND  a shadow that something waits for, while nobody else has work: free room, and that of other shadows

A copy of an expert that is only in another one's shadow, and that no queue waits for, counts as free room for every
claim but its like: it leaves first. While background work is under way in a memory nothing else leaves it: who lacks
room there waits for the end of that one batch or load, so that nothing is ever evicted for a shadow.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from agent.core.effects import Evict, EvictionDecision, StartLoad
from agent.core.eviction import STAGE_BY_RANK, STRATEGIES, Candidate, victims
from agent.core.performance import SSD
from agent.core.policy import Evicting

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from agent.core.effects import Effect
    from agent.core.performance import ExecutorSpec, ExpertProfile, Footprint, Limits, PerformanceMatrix
    from agent.core.policy import Policy
    from agent.core.pool import Entry, ModelPool
    from agent.core.prefetch import Wish
    from agent.core.queue import ExecutorQueue
    from experts.graph import ExpertGraph


class Claim(Enum):
    OVERDUE = auto()
    DEMAND = auto()
    PATIENT = auto()
    PREFETCH = auto()
    BYPASS = auto()
    STAGE = auto()
    CACHE = auto()
    PINNED = auto()
    EARLY = auto()
    SPARE = auto()
    BACKGROUND = auto()


class Answer(Enum):
    HERE = auto()  # resident, or on its way already
    STARTED = auto()
    NO_ROOM = auto()
    BUSY = auto()  # as many loads as may be are under way from there
    WAIT = auto()  # the copy is on its way to the host, or its failed load pauses


@dataclass(frozen=True, slots=True)
class Load:
    copy: str
    expert: str
    source: str
    pool: str
    is_background: bool = False


@dataclass(frozen=True, slots=True)
class Setback:
    """A copy whose loads failed in a row, from ``since_s`` on, and its backoff."""

    attempts: int
    pause_s: float
    retry_s: float
    since_s: float


class Placement:
    def __init__(
        self,
        pools: Mapping[str, ModelPool],
        queues: Sequence[ExecutorQueue],
        graph: ExpertGraph,
        matrix: PerformanceMatrix,
        policy: Policy,
        limits: Limits,
        homes: Mapping[str, ExecutorSpec],
    ) -> None:
        self.pools = dict(pools)
        self.loads: dict[int, Load] = {}
        self.counts: Counter[str] = Counter()  # loads by path, evictions by stage, bytes read from the SSD
        self._queues = queues
        self._policy = policy
        self._limits = limits
        self._presence: Counter[str] = Counter()  # expert -> copies loading or resident, over all pools
        self._setbacks: dict[tuple[str, str], Setback] = {}
        self.change_line(graph, matrix, homes)
        self._in_flight: Counter[str] = Counter()
        self._kept_free: Counter[str] = Counter()  # source -> places on its link that overdue claims wait for
        self._held: dict[str, frozenset[str]] = {}  # memory -> copies that an overdue claim waits to see free
        self._all_queued: set[str] = set()  # memories where a claim to STAGE found nothing in this look at everything
        self._last_load = 0
        self.background_runs_in: str | None = None  # the memory of the background batch that runs
        self._users = {name: tuple(q for q in queues if q.spec.pool == name) for name in self.pools}
        self._fed = {name: tuple(p for p in self.pools.values() if p.spec.cache == name) for name in self.pools}

    def change_line(self, graph: ExpertGraph, matrix: PerformanceMatrix, homes: Mapping[str, ExecutorSpec]) -> None:
        """From now on by these routes and this usage; what is in memory is pinned if it is to stay there for good."""
        self._graph = graph
        self._in_shadow = graph.in_shadow
        self._usage = matrix.usage
        copies = {row.copy for column in matrix.experts.values() for row in column.values()}
        self._setbacks = {place: setback for place, setback in self._setbacks.items() if place[1] in copies}
        self._presence = +self._presence
        at_home = [
            (queue.spec.processor, name, home)
            for name, home in homes.items()
            for queue in self._queues
            if queue.spec.pool == home.pool
        ]
        self._pinned = frozenset(
            (home.pool, matrix.experts[processor][name].copy)
            for processor, name, home in at_home
            if name in matrix.experts[processor]
        )  # not what a memory merely caches for another one
        for pool in self.pools.values():
            for entry in pool.entries():
                entry.pinned = (pool.name, entry.copy) in self._pinned

    def bring(self, wish: Wish, claim: Claim, now: float, effects: list[Effect]) -> Answer:
        """Have a copy in the wish's pool, if that takes a load and the claim is strong enough for its room."""
        pool, copy = self.pools[wish.spec.pool], wish.profile.copy
        if pool.entry(copy) is not None:
            return Answer.HERE
        source = SSD
        if pool.spec.cache is not None:
            cache = self.pools[pool.spec.cache]
            cached = cache.entry(copy)
            if cached is not None:
                if not cached.is_resident:
                    return Answer.WAIT
                source = cache.name
            elif claim in (Claim.OVERDUE, Claim.DEMAND, Claim.PREFETCH, Claim.BYPASS):
                answer = self._start(cache, SSD, wish, Claim.CACHE, now, effects)
                if answer is not Answer.NO_ROOM:
                    return answer
        return self._start(pool, source, wish, claim, now, effects)

    def bring_in_background(self, wish: Wish, kept: Collection[str], now: float, effects: list[Effect]) -> Answer:
        """Have a shadow's copy in the wish's pool, in free room and that of other shadows but those that are kept."""
        pool, copy = self.pools[wish.spec.pool], wish.profile.copy
        setback = self._setbacks.get((pool.name, copy))
        if pool.entry(copy) is None and (setback is None or now >= setback.retry_s):
            self._shadows_leave(pool, wish, kept, effects)
        return self.bring(wish, Claim.BACKGROUND, now, effects)

    def stage(self, wish: Wish, now: float, effects: list[Effect]) -> Answer:
        """Have a copy in the memory in front of the wish's pool, while that one is full."""
        pool, copy = self.pools[wish.spec.pool], wish.profile.copy
        if pool.spec.cache is None or pool.entry(copy) is not None:
            return Answer.NO_ROOM
        cache = self.pools[pool.spec.cache]
        if cache.entry(copy) is not None:
            return Answer.HERE
        return self._start(cache, SSD, wish, Claim.STAGE, now, effects)

    def keep_free(self, wish: Wish) -> None:
        """Nobody younger takes the place on the link that this wish waits for, until ``release``."""
        self._kept_free[self.source_of(self.pools[wish.spec.pool], wish.profile.copy)] += 1

    def may_prefetch(self, full: Collection[str]) -> bool:
        """Could a load still start for a later group: from the SSD, or from a memory into one that is not ``full``?"""
        if not self._is_busy(SSD):
            return True
        return any(
            pool.spec.cache is not None and pool.name not in full and not self._is_busy(pool.spec.cache)
            for pool in self.pools.values()
        )

    def is_under_way(self, wish: Wish) -> bool:
        return self.pools[wish.spec.pool].entry(wish.profile.copy) is not None

    def hold(self, wish: Wish) -> None:
        """Nobody begins to use what this overdue wish takes as soon as it is free, until ``release``."""
        pool = self.pools[wish.spec.pool]
        heads = self._spared_heads(pool, wish, Claim.OVERDUE)
        copies = (entry.copy for entry in pool.entries() if not entry.pinned and entry.copy not in heads)
        self._held[pool.name] = frozenset(copies)

    def may_use(self, pool: ModelPool, copy: str) -> bool:
        return pool.is_resident(copy) and copy not in self._held.get(pool.name, ())

    def set_back(self, pool: str, copy: str, attempts: int, now: float, *, is_away: bool = False) -> Setback:
        """Back off a copy in a memory, for twice as long as the last time."""
        before, limits = self._setbacks.get((pool, copy)), self._limits
        longest_s = limits.longest_away_pause_s if is_away else limits.longest_pause_s
        pause_s = min(before.pause_s * 2 if before else limits.load_backoff_s, longest_s)
        setback = Setback(attempts, pause_s, now + pause_s, self._failing_since_s(pool, copy, now))
        self._setbacks[pool, copy] = setback
        return setback

    def retry_s(self, pool: str, copy: str) -> float:
        return self._setbacks[pool, copy].retry_s

    @property
    def has_setbacks(self) -> bool:
        return bool(self._setbacks)

    def is_barred(self, pool: str, copy: str, now: float) -> bool:
        """Has it failed so often, there or on its way there, that it is not to be asked there while it pauses?"""
        cache = self.pools[pool].spec.cache
        is_on_its_way = cache is not None and self.pools[pool].entry(copy) is None
        places = (pool, cache) if cache is not None and is_on_its_way else (pool,)
        setbacks = (self._setbacks.get((place, copy)) for place in places)
        attempts = self._limits.load_attempts
        return any(each is not None and each.attempts >= attempts and now < each.retry_s for each in setbacks)

    def ran(self, pool: str, copy: str) -> None:
        self._setbacks.pop((pool, copy), None)

    def shrink(self, pool: ModelPool, to_bytes: int, effects: list[Effect]) -> None:
        """Evict what may go, first to go first, until no more than so much lies there or nothing may go any more."""
        strategy = STRATEGIES[self._policy.evicting]
        candidates = [
            self._candidate(entry, self._next_use_s(pool, entry)) for entry in pool.entries() if entry.is_evictable
        ]
        spare = {entry.copy for entry in self._spare_shadows(pool)}
        ranked = sorted(strategy.ranked(candidates), key=lambda each: each.copy not in spare)
        for victim in ranked:
            if pool.used_bytes <= to_bytes:
                return
            short = pool.used_bytes - to_bytes
            self._evict(pool, victim, strategy.stage(victim), EvictionDecision("", short, tuple(ranked)), effects)

    def release(self) -> None:
        self._kept_free.clear()
        self._held.clear()
        self._all_queued.clear()

    def loaded(self, load: Load) -> None:
        self._end(load)
        self.pools[load.pool].loaded(load.copy)
        self._setbacks.pop((load.pool, load.copy), None)

    def load_failed(self, load: Load, now: float, *, is_away: bool = False) -> Setback:
        """Count a failed load. ``is_away``: its file was missing, which counts only after ``away_s`` of that."""
        self._end(load)
        self.pools[load.pool].load_failed(load.copy)
        self._presence[load.expert] -= 1
        before = self._setbacks.get((load.pool, load.copy))
        is_waited_for = is_away and now - self._failing_since_s(load.pool, load.copy, now) < self._limits.away_s
        attempts = (before.attempts if before else 0) + (not is_waited_for)
        return self.set_back(load.pool, load.copy, attempts, now, is_away=is_away)

    def _failing_since_s(self, pool: str, copy: str, now: float) -> float:
        """When the present run of failures began; ``away_s`` without one ends a run."""
        before = self._setbacks.get((pool, copy))
        return now if before is None or now - before.retry_s > self._limits.away_s else before.since_s

    def discard(self, expert: str, effects: list[Effect]) -> None:
        """An expert that is not to be asked leaves every memory where nothing uses it."""
        for pool in self.pools.values():
            for entry in [entry for entry in pool.entries() if entry.expert == expert]:
                if entry.uses == 0 and entry.is_resident:
                    decision = EvictionDecision(entry.copy, 0, ())
                    candidate = self._candidate(entry, self._next_use_s(pool, entry))
                    self._evict(pool, candidate, STAGE_BY_RANK, decision, effects)

    def source_of(self, pool: ModelPool, copy: str) -> str:
        cache = pool.spec.cache
        return cache if cache is not None and self.pools[cache].entry(copy) is not None else SSD

    def next_retry_s(self, now: float) -> float | None:
        """When the next failed load may be tried again; those whose time has come wait for somebody to want them."""
        return min((setback.retry_s for setback in self._setbacks.values() if setback.retry_s > now), default=None)

    def is_retry_due(self, after_s: float, until_s: float) -> bool:
        return any(after_s < setback.retry_s <= until_s for setback in self._setbacks.values())

    def _is_busy(self, source: str) -> bool:
        return self._in_flight[source] + self._kept_free[source] >= self._limits.loads_in_flight

    def _end(self, load: Load) -> None:
        if not load.is_background:
            self._in_flight[load.source] -= 1
        if load.source != SSD:
            self.pools[load.source].end_use(load.copy)

    def _start(
        self, pool: ModelPool, source: str, wish: Wish, claim: Claim, now: float, effects: list[Effect]
    ) -> Answer:
        copy = wish.profile.copy
        setback = self._setbacks.get((pool.name, copy))
        if self._is_busy(source):
            return Answer.BUSY
        if setback is not None and now < setback.retry_s:
            return Answer.WAIT
        if not self._make_room(pool, wish, claim, effects):
            return Answer.NO_ROOM
        if source != SSD:
            self.pools[source].start_use(copy)
        pinned = (pool.name, copy) in self._pinned
        size_bytes = pool.start_load(copy, wish.expert, wish.profile.footprint, pinned=pinned)
        self._presence[wish.expert] += 1
        is_background = claim is Claim.BACKGROUND
        if not is_background:  # it takes nobody's place on the link
            self._in_flight[source] += 1
        self._last_load += 1
        self.loads[self._last_load] = Load(copy, wish.expert, source, pool.name, is_background)
        self.counts[f"{source}_{pool.name}"] += 1
        if source == SSD:
            self.counts["bytes_read"] += size_bytes
        effects.append(StartLoad(self._last_load, wish.expert, copy, source, pool.name, size_bytes))
        return Answer.STARTED

    def _make_room(self, pool: ModelPool, wish: Wish, claim: Claim, effects: list[Effect]) -> bool:
        footprint = wish.profile.footprint
        short = pool.needed_bytes(footprint) - pool.free_bytes
        if short > 0 and self._in_shadow and claim is not Claim.BACKGROUND:
            short = self._shadows_leave(pool, wish, (), effects)
        if short <= 0:
            return True
        if claim is Claim.BACKGROUND or self._has_background_work(pool):
            return False
        if claim in (Claim.EARLY, Claim.SPARE) or (claim is Claim.STAGE and pool.name in self._all_queued):
            return False
        strategy = STRATEGIES[self._policy.evicting]
        ranked = strategy.ranked(self._candidates(pool, wish, claim))
        if claim is Claim.STAGE and not ranked:
            self._all_queued.add(pool.name)  # until the next look loads only begin, which makes nothing less queued
        kept = frozenset(part.id for part in footprint.shared)
        chosen = victims(ranked, short, pool.holders, kept)
        if claim is Claim.PATIENT and chosen is not None and not all(pool.is_evictable(each.copy) for each in chosen):
            return False
        leaving = chosen if chosen is not None else tuple(ranked) if claim is Claim.OVERDUE else ()
        decision = EvictionDecision(wish.profile.copy, short, tuple(ranked))
        for victim in leaving:
            self._evict(pool, victim, strategy.stage(victim), decision, effects)
        return pool.can_reserve(footprint)

    def _shadows_leave(self, pool: ModelPool, wish: Wish, kept: Collection[str], effects: list[Effect]) -> int:
        """Spare shadows but those that are kept leave, until there is room; the bytes that lack still, 0 or less."""
        footprint, copy = wish.profile.footprint, wish.profile.copy
        for entry in self._spare_shadows(pool):
            short = pool.needed_bytes(footprint) - pool.free_bytes
            if short <= 0:
                break
            if entry.expert not in kept:
                candidate = self._candidate(entry, None)
                decision = EvictionDecision(copy, short, (candidate,))
                self._evict(pool, candidate, STAGE_BY_RANK, decision, effects)
        return pool.needed_bytes(footprint) - pool.free_bytes

    def _spare_shadows(self, pool: ModelPool) -> list[Entry]:
        """Copies that may leave, of experts in the shadow of others that no queue waits for; the oldest first."""
        return [
            entry
            for entry in pool.entries()
            if entry.expert in self._in_shadow and entry.is_evictable and self._next_use_s(pool, entry) is None
        ]

    def _has_background_work(self, pool: ModelPool) -> bool:
        if self.background_runs_in == pool.name:
            return True
        return any(load.is_background and pool.name in (load.pool, load.source) for load in self.loads.values())

    def _candidates(self, pool: ModelPool, wish: Wish, claim: Claim) -> Iterator[Candidate]:
        """What this claim may take: see the module's table of claims.

        While queues are long most claims find nothing, so of what may not go no more is asked than that.
        """
        heads = self._spared_heads(pool, wish, claim)
        spared_until_s, usage_below = self._bounds(wish, claim)
        spared = self._awaited(pool) if spared_until_s == math.inf else frozenset()
        soon_free = self._not_awaited_in_use(pool) if claim is Claim.PATIENT else frozenset()
        for entry in pool.entries():
            if (
                (entry.is_evictable or entry.copy in soon_free)
                and entry.copy not in heads
                and entry.expert not in spared
                and self._usage.get(entry.expert, 0.0) < usage_below
            ):
                next_use_s = self._next_use_s(pool, entry, spared_until_s)
                if next_use_s is None or next_use_s > spared_until_s:
                    yield self._candidate(entry, next_use_s)

    def _not_awaited_in_use(self, pool: ModelPool) -> frozenset[str]:
        """Copies that will be evictable once what uses them now is over, if nobody comes for them.

        None while something lies there that nobody has asked for since it came: usage was wrong about that one, so
        what has just been used is no worse.
        """
        awaited = self._awaited(pool)
        if any(entry.is_untouched and entry.expert not in awaited for entry in pool.entries()):
            return frozenset()
        in_use = (entry for entry in pool.entries() if entry.uses and not entry.pinned)
        return frozenset(entry.copy for entry in in_use if entry.expert not in awaited)

    def _awaited(self, pool: ModelPool) -> Collection[str]:
        awaited = [queue.awaited for queue in self._users[pool.name]]
        return awaited[0] if len(awaited) == 1 else frozenset().union(*awaited)

    def _spared_heads(self, pool: ModelPool, wish: Wish, claim: Claim) -> frozenset[str]:
        """Copies that the heads of this memory's other queues run on, and that the claim must leave there."""
        if claim in (Claim.CACHE, Claim.STAGE):
            return frozenset()
        others = [queue for queue in self._users[pool.name] if queue.spec.id != wish.spec.id]
        heads = [head for queue in others if (head := queue.front) is not None]
        if self._policy.overlapping:  # else its executor may wait for this very wish, or for one like it
            heads += [group for queue in others for group in queue.ongoing.values()]
        return frozenset(
            head.profile.copy for head in heads if claim is not Claim.OVERDUE or head.oldest_s <= wish.since_s
        )

    def _bounds(self, wish: Wish, claim: Claim) -> tuple[float, float]:
        """A claim leaves what is used until the one, and what is used as often as the other or more."""
        if claim is Claim.PREFETCH:
            return wish.starts_s, math.inf
        if claim in (Claim.BYPASS, Claim.STAGE, Claim.PINNED):
            return math.inf, math.inf
        if claim is Claim.CACHE and self._policy.evicting not in (Evicting.LRU, Evicting.FIFO):
            return math.inf, self._usage.get(wish.expert, 0.0)
        return -math.inf, math.inf

    def _candidate(self, entry: Entry, next_use_s: float | None) -> Candidate:
        usage, lacks = self._usage.get(entry.expert, 0.0), self._lacks_preliminary(entry.expert)
        return Candidate(
            entry.copy, entry.expert, entry.footprint, usage, next_use_s, lacks, entry.loaded_order, entry.used_order
        )

    def _next_use_s(self, pool: ModelPool, entry: Entry, soon_s: float = -math.inf) -> float | None:
        """Predicted time of the next queued use of this copy in this memory, or, for a cache, in the one it feeds.

        Of several uses until ``soon_s`` any may be told.
        """
        users = self._users[pool.spec.name]
        for fed in self._fed[pool.spec.name]:
            if fed.entry(entry.copy) is None:
                users = users + self._users[fed.spec.name]
        earliest: float | None = None
        for queue in users:
            group = queue.first_group(entry.expert)
            if group is not None and (earliest is None or group.starts_s < earliest):
                earliest = group.starts_s
                if earliest <= soon_s:
                    break
        return earliest

    def _lacks_preliminary(self, expert: str) -> bool:
        """Section 4.3, stage 1: a subsequent expert none of whose preliminary experts is resident or awaited."""
        preliminaries = self._graph.preliminaries(expert)
        if not preliminaries:
            return False
        return not any(
            self._presence[name] > 0 or any(queue.first_group(name) is not None for queue in self._queues)
            for name in preliminaries
        )

    def _evict(
        self, pool: ModelPool, victim: Candidate, stage: int, decision: EvictionDecision, effects: list[Effect]
    ) -> None:
        freed = pool.evict(victim.copy)
        self._presence[victim.expert] -= 1
        self.counts[f"evictions_stage_{stage}"] += 1
        effects.append(Evict(victim.expert, victim.copy, pool.name, freed, stage, decision))


def pinned_homes(
    pinned: frozenset[str], executors: Sequence[ExecutorSpec], profiles: Mapping[str, Mapping[str, ExpertProfile]]
) -> dict[str, ExecutorSpec]:
    """The executor in whose memory each pinned expert stays for good: the first one that can run it."""
    homes = {}
    for expert in sorted(pinned):
        home = next((spec for spec in executors if expert in profiles[spec.processor]), None)
        if home is not None:
            homes[expert] = home
    return homes


def footprints_in(
    pool: str,
    executors: Sequence[ExecutorSpec],
    profiles: Mapping[str, Mapping[str, ExpertProfile]],
    homes: Mapping[str, ExecutorSpec],
) -> list[tuple[str, Footprint, bool]]:
    """(expert, footprint, pinned) of every copy that may have to run in a memory."""
    processors = sorted({spec.processor for spec in executors if spec.pool == pool})
    copies = {
        profile.copy: (expert, profile.footprint, expert in homes and homes[expert].pool == pool)
        for processor in processors
        for expert, profile in sorted(profiles[processor].items())
    }
    return list(copies.values())
