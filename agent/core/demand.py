"""Demand: which copies are wanted, how strongly, and the loads that bring them. `room.py` evicts for them.

Wishes are claimed in this order whenever room or a link may be free:

    overdue          heads of queues with a request that has waited beyond the overtaking bound, oldest first; a memory
                     where such a head lacks room is *full*: no younger claim takes room there
    the heads        of all queues, before their executors are idle where the policy overlaps; a memory without room
                     for such a head is *short*
    the next groups  prefetch, while a link for them is free; in a short memory only into free room
    spare room       of memories neither full nor short: experts that may follow a running one (speculation), then the
                     initial placement (section 4.1)

Example: an executor runs a, b and c from a memory with room for two; A's route is a, then c, and B's is b.

    A comes        load a           for the head of the queue
    a is loaded    run a, load c    spare room: c may follow a
    B comes        nothing          one load at a time
    c is loaded    evict c, load b  b is the head now, and no queue waits for c
    a has run      evict a, load c  A goes on with c
    b is loaded    run b
    b has run      run c            which was loaded meanwhile

Guarantees: each move is reserved in the ledger before its effect, evictions before the load that needs their room; at
most ``loads_in_flight`` loads from one source; a failed load is retried after its pause; a pinned expert is
eventually placed; no expert in quarantine or on probation is loaded for spare room.
"""

from __future__ import annotations

from collections import deque
from enum import Enum, auto
from typing import TYPE_CHECKING

from agent.core import room, turns
from agent.core.effects import StartLoad
from agent.core.performance import SSD, tier_of
from agent.core.state import Load, ServedLine, State, Wish

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from agent.core.performance import ExecutorSpec, ExpertProfile
    from agent.core.pool import ModelPool
    from agent.core.queue import ExecutorQueue, Group
    from agent.core.room import Claim

PREFETCH_GROUPS = 16  # of each queue, behind its head; arbitrary
LONG_QUEUE_S = 5.0  # a longer queue runs in order, however late its requests
PATIENCE = 0.5  # of the overtaking bound: after that wait a head has no time left; arbitrary


class Answer(Enum):
    HERE = auto()  # resident, or being loaded
    STARTED = auto()
    NO_ROOM = auto()
    BUSY = auto()  # ``loads_in_flight`` loads from that source are under way
    WAIT = auto()  # the copy is being loaded into the host, or its failed load pauses


# -- wishes of queues --


def _upcoming(state: State) -> Iterator[Wish]:
    """Missing copies of the groups behind each head, by position, then by executor."""
    fronts = [(queue, state.pools[queue.spec.pool], head) for queue, head in _fronts(state)]
    for _ in range(PREFETCH_GROUPS):
        fronts = [(queue, pool, group.next) for queue, pool, group in fronts if group.next is not None]
        for queue, pool, group in fronts:
            if pool.entry(group.profile.copy) is None and not group.is_passed_over:
                yield _wish(queue, group)


def _heads(state: State, since_s: Callable[[Group], float]) -> list[tuple[float, int, ExecutorQueue, Group]]:
    """Heads of queues, oldest first, then by executor."""
    return sorted((since_s(head), queue.spec.id, queue, head) for queue, head in _fronts(state))


def _fronts(state: State) -> Iterator[tuple[ExecutorQueue, Group]]:
    return ((queue, head) for queue in state.touched_queues if (head := queue.front) is not None)


def _wish(queue: ExecutorQueue, group: Group) -> Wish:
    return Wish(queue.spec, group.expert, group.profile, group.oldest_s, group.starts_s)


# -- wishes for spare room --


def initial_placement(
    usage: dict[str, float], executors: Sequence[ExecutorSpec], runs_on: Mapping[str, Mapping[str, ExpertProfile]]
) -> Iterator[tuple[ExecutorSpec, str]]:
    """Deal experts round-robin to the pools, in descending usage probability (section 4.1).

    ``runs_on[processor]``: experts that can run there. One executor represents its pool. An expert skips pools where
    it cannot run.
    """
    pools = deque([*{spec.pool: spec for spec in reversed(executors)}.values()][::-1])
    for expert in sorted(usage, key=lambda name: (-usage[name], name)):
        able = next((place for place, spec in enumerate(pools) if expert in runs_on[spec.processor]), None)
        if able is not None:
            yield pools[able], expert
            pools.rotate(-able - 1)


def place(state: State, expert: str, spec: ExecutorSpec) -> None:
    wish_for(state, [_spare_wish(state, spec, expert)])
    state.touched.add(spec.worker)


def place_pinned(state: State, expert: str) -> bool:
    """Place a pinned expert at its home; False for an unpinned expert, which is loaded on demand."""
    home = state.line.homes.get(expert)
    if home is not None:
        place(state, expert, home)
    return home is not None


def place_due(state: State, since_s: float) -> None:
    """Wish for experts on probation (failed loads) whose pause ended after ``since_s``."""
    if state.is_draining:
        return
    for expert, standing in state.standings.items():
        if standing.copy is None or not since_s < standing.retry_s <= state.now or expert in state.line.retired:
            continue
        if expert in state.line.graph.placed and not place_pinned(state, expert):
            spec = next((spec for spec, row in state.rows_of(expert) if row.copy == standing.copy), None)
            if spec is not None:
                place(state, expert, spec)


def change_line(state: State, line: ServedLine, memories: Collection[str]) -> None:
    """Wish for new experts, for those with a new home, and in new memories; drop wishes for experts that left."""
    before, state.line = state.line, line
    pin_copies(state)
    keep_wishes(state, lambda wish: wish.expert not in line.retired)
    if not state.is_draining:
        moved = {expert for expert, home in line.homes.items() if before.homes.get(expert) != home}
        old = before.graph.experts - moved
        wish_for(state, (each for each in first_wishes(state) if each.expert not in old or each.spec.pool in memories))


def wish_for(state: State, wishes: Iterable[Wish]) -> None:
    for wish in wishes:
        state.placements[wish.spec.worker].append(wish)


def keep_wishes(state: State, stays: Callable[[Wish], bool]) -> None:
    """Drop all other wishes for spare room."""
    for wishes in (*state.placements.values(), state.speculations):
        staying = [wish for wish in wishes if stays(wish)]
        wishes.clear()
        wishes.extend(staying)


def pin_copies(state: State) -> None:
    """Pin the copies of pinned experts at their homes; copies cached for another memory stay unpinned."""
    rows = state.line.matrix.experts
    copies = {row.copy for column in rows.values() for row in column.values()}
    state.setbacks = {where: setback for where, setback in state.setbacks.items() if where[1] in copies}
    state.presence = +state.presence
    state.pinned = frozenset(
        (home.pool, rows[queue.spec.processor][name].copy)
        for name, home in state.line.homes.items()
        for queue in state.users[home.pool]
        if name in rows[queue.spec.processor]
    )
    for pool in state.pools.values():
        for entry in pool.entries():
            entry.pinned = (pool.name, entry.copy) in state.pinned


def speculate(state: State, spec: ExecutorSpec, expert: str) -> None:
    """Wish for the experts that may follow a running one."""
    if state.policy.overlapping:
        able = state.line.matrix.experts[spec.processor]
        following = (name for name in state.line.graph.subsequents(expert) if name in able)
        state.speculations.extend(_spare_wish(state, spec, name) for name in following)


def first_wishes(state: State) -> Iterator[Wish]:
    """Pinned experts at their homes, then the policy's initial placement."""
    line = state.line
    for expert, spec in line.homes.items():
        yield _spare_wish(state, spec, expert)
    if state.policy.placing:
        usage = {expert: line.matrix.usage.get(expert, 0.0) for expert in line.graph.placed - line.retired}
        planned = {expert: state.limits.placement[expert] for expert in usage.keys() & state.limits.placement.keys()}
        for expert in sorted(planned, key=lambda name: (-usage[name], name)):
            for spec in {spec.pool: spec for spec, _ in state.rows_of(expert) if spec.pool in planned[expert]}.values():
                yield _spare_wish(state, spec, expert)
        others = {expert: share for expert, share in usage.items() if expert not in planned}
        for spec, expert in initial_placement(others, state.executors, line.matrix.experts):
            yield _spare_wish(state, spec, expert)


def _spare_wish(state: State, spec: ExecutorSpec, expert: str) -> Wish:
    return Wish(spec, expert, state.line.matrix.experts[spec.processor][expert], state.now, state.now)


# -- claims, whenever room or a link may be free --


def claim_overdue(state: State) -> None:
    """Claim for overdue heads, and find the full memories."""
    for found in (state.kept_free, state.reserved, state.all_queued, state.full, state.short):
        found.clear()
    if not state.policy.bounded:
        return
    for since_s, _, queue, head in _heads(state, lambda head: head.oldest_s):
        if since_s > state.now - state.limits.max_overtake_s:
            return
        wish, pool, copy = _wish(queue, head), state.pools[queue.spec.pool], head.profile.copy
        if pool.entry(copy) is not None:
            continue
        is_first = pool.name not in state.full
        answer = _claim_one(state, wish, room.OVERDUE)
        if answer in (Answer.NO_ROOM, Answer.BUSY):
            state.full.add(pool.name)
            state.kept_free[_link(pool, _source_of(state, pool, copy))] += 1
        if answer is Answer.NO_ROOM and is_first:
            heads = room.spared_heads(state, pool, wish, room.OVERDUE)
            copies = (entry.copy for entry in pool.entries() if not entry.pinned and entry.copy not in heads)
            state.reserved[pool.name] = frozenset(copies)


def claim(state: State) -> None:
    """Claim for all other wishes, after every possible batch has started."""
    is_idle = state.queued_idle is not None
    for _, executor, queue, head in _heads(state, lambda head: head.opened_s):
        if state.policy.overlapping or executor not in state.running:
            wish = _wish(queue, head)
            _claim_one(state, wish, room.IDLE if is_idle else _head_claim(state, wish))
    if state.policy.overlapping:
        _prefetch(state)
    while state.speculations:
        wish = state.speculations.popleft()
        if _may_load(state, wish.expert):
            _take_spare(state, wish, room.SPARE)
    _load_placements(state)


def switch_s(state: State, spec: ExecutorSpec, profile: ExpertProfile) -> float:
    """Predicted seconds until a copy could run on an executor; 0 when it is resident."""
    pool = state.pools[spec.pool]
    return 0.0 if pool.is_resident(profile.copy) else profile.load_s[tier_of(_source_of(state, pool, profile.copy))]


def executors_to_spare(state: State, expert: str) -> set[int]:
    """Executors that can run an expert without evicting any copy but spare ones."""
    able = set()
    for spec, row in state.rows_of(expert):
        pool = state.pools[spec.pool]
        spare_bytes = sum(pool.freed_bytes(entry.copy) for entry in room.spare_copies(state, pool))
        if pool.entry(row.copy) is not None or pool.needed_bytes(row.footprint) <= pool.free_bytes + spare_bytes:
            able.add(spec.id)
    return able


def _head_claim(state: State, wish: Wish) -> Claim:
    """Claim of a queue's head. Behind a batch that is queued ahead, a head claims as a later group."""
    executor = wish.spec.id
    if executor in state.queued_ahead:
        return room.EARLY if _has_time(state, wish) else room.PREFETCH
    if not state.policy.overlapping or executor not in state.running or not _has_time(state, wish):
        return room.DEMAND
    return room.EARLY if turns.is_anything_runnable(state, state.queue_of[executor]) else room.PATIENT


def _has_time(state: State, wish: Wish) -> bool:
    """True if the wish is young and its queue short: its victim is chosen later, when more of the queue is known.

    False on a device with a memory in front of it, which loads early from that memory, not from the SSD.
    """
    if state.pools[wish.spec.pool].spec.cache is not None:
        return False
    bound_s, length_s = state.limits.max_overtake_s, state.queue_of[wish.spec.id].length_s(state.now)
    return state.now - wish.since_s < PATIENCE * bound_s and length_s <= min(bound_s, LONG_QUEUE_S)


def _claim_one(state: State, wish: Wish, claim: Claim, *, is_later: bool = False) -> Answer:
    """Claim room: none in a full memory, only free room for later groups in a short one; both may stage."""
    is_full, is_short = wish.spec.pool in state.full, is_later and wish.spec.pool in state.short
    if is_full or is_short:
        staged = _stage(state, wish, claim)
        return staged if is_full or staged not in (Answer.HERE, Answer.NO_ROOM) else _bring(state, wish, room.SPARE)
    answer = _bring(state, wish, claim)
    if answer is Answer.NO_ROOM and claim.makes_short:
        state.short.add(wish.spec.pool)
    return answer


def _prefetch(state: State) -> None:
    """Load for the groups behind the heads while a link is free."""
    passed: set[str] = set()  # memories where an earlier group waits for a busy link
    for wish in _upcoming(state):
        claim = room.EARLY if _has_time(state, wish) else room.BYPASS if wish.spec.pool in passed else room.PREFETCH
        if _claim_one(state, wish, claim, is_later=True) is Answer.BUSY:
            if not _may_prefetch(state):
                return
            passed.add(wish.spec.pool)


def _may_prefetch(state: State) -> bool:
    """True if a link for a later group is free: the SSD's, or that of a cache whose device has room."""
    lacking = state.full | state.short
    return any(
        not _is_busy(state, pool.spec.drive)
        or (pool.spec.cache is not None and pool.name not in lacking and not _is_busy(state, pool.spec.cache))
        for pool in state.pools.values()
        if pool.spec.worker in state.touched
    )


def _stage(state: State, wish: Wish, claim: Claim) -> Answer:
    """Load a copy into the memory in front of the wish's pool, while that pool is full."""
    pool, copy = state.pools[wish.spec.pool], wish.profile.copy
    if not claim.stages or pool.spec.cache is None or pool.entry(copy) is not None:
        return Answer.NO_ROOM
    cache = state.pools[pool.spec.cache]
    return Answer.HERE if cache.entry(copy) is not None else _start(state, cache, SSD, wish, room.STAGE)


def _load_placements(state: State) -> None:
    """Load placements while room and a link are free; a pinned expert may evict others, and waits for room."""
    for placements in [state.placements[worker] for worker in state.queues_at if worker in state.touched]:
        for _ in range(len(placements)):
            wish = placements.popleft()
            if not _may_load(state, wish.expert):
                continue
            is_pinned = wish.expert in state.line.homes
            answer = _take_spare(state, wish, room.PINNED if is_pinned else room.SPARE)
            if answer is Answer.BUSY:
                placements.appendleft(wish)
                break
            if answer in (Answer.NO_ROOM, Answer.WAIT) and is_pinned:
                placements.append(wish)


def _take_spare(state: State, wish: Wish, claim: Claim) -> Answer:
    lacks_room = wish.spec.pool in state.full or wish.spec.pool in state.short
    return Answer.NO_ROOM if lacks_room else _bring(state, wish, claim)


def _may_load(state: State, expert: str) -> bool:
    standing = state.standings.get(expert)
    return standing is None or state.now >= standing.retry_s


# -- loads --


def _bring(state: State, wish: Wish, claim: Claim) -> Answer:
    """Start the load that brings a copy to the wish's pool, if the claim is strong enough for its room."""
    pool, copy = state.pools[wish.spec.pool], wish.profile.copy
    if pool.entry(copy) is not None:
        return Answer.HERE
    source = SSD
    if pool.spec.cache is not None:
        cache = state.pools[pool.spec.cache]
        cached = cache.entry(copy)
        if cached is not None:
            if not cached.is_resident:
                return Answer.WAIT
            source = cache.name
        elif claim.by_cache:
            answer = _start(state, cache, SSD, wish, room.CACHE)
            if answer is not Answer.NO_ROOM:
                return answer
    return _start(state, pool, source, wish, claim)


def _start(state: State, pool: ModelPool, source: str, wish: Wish, claim: Claim) -> Answer:
    copy = wish.profile.copy
    link = _link(pool, source)
    if _is_busy(state, link):
        return Answer.BUSY
    setback = state.setbacks.get((pool.name, copy))
    if setback is not None and state.now < setback.pause.until_s:
        return Answer.WAIT
    if not room.make_room(state, pool, wish, claim):
        return Answer.NO_ROOM
    if source != SSD:
        state.pools[source].start_use(copy)
    size_bytes = pool.start_load(copy, wish.expert, wish.profile.footprint, pinned=(pool.name, copy) in state.pinned)
    state.presence[wish.expert] += 1
    if claim is room.IDLE:
        pool.mark_spare(copy)
    else:
        state.in_flight[link] += 1
    state.last_load += 1
    state.loads[state.last_load] = Load(copy, wish.expert, source, pool.name, claim is room.IDLE)
    state.counts[f"{source}_{pool.name}"] += 1
    if source == SSD:
        state.counts["bytes_read"] += size_bytes
    state.effects.append(StartLoad(state.last_load, wish.expert, copy, source, pool.name, size_bytes))
    return Answer.STARTED


def load_over(state: State, load: Load) -> None:
    """Free the load's place on the link, and its source's copy."""
    pool = state.pools[load.pool]
    if not load.is_idle:
        state.in_flight[_link(pool, load.source)] -= 1
    if load.source != SSD:
        state.pools[load.source].end_use(load.copy)
    state.touched.update(each.spec.worker for each in state.pools.values() if each.spec.drive == pool.spec.drive)


def _link(pool: ModelPool, source: str) -> str:
    """Link of a load into a memory: of its drive, or of the memory that the copy comes from."""
    return pool.spec.drive if source == SSD else source


def _is_busy(state: State, link: str) -> bool:
    return state.in_flight[link] + state.kept_free[link] >= state.limits.loads_in_flight


def _source_of(state: State, pool: ModelPool, copy: str) -> str:
    cache = pool.spec.cache
    return cache if cache is not None and state.pools[cache].entry(copy) is not None else SSD
