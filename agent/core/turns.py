"""Turns: the requests of an idle executor's next batch.

An expert with leases runs in quanta: its unfinished requests wait for the next quantum as its *ongoing* group. So an
executor alternates between two kinds of work; if one kind cannot run, the other does:

    after a quantum           images: the first group in the queue's order whose expert may run
    after a batch of images   a quantum of the first group in the queue that is ongoing (which moves to the tail after
                              each quantum), or whose expert has no ongoing group

A batch of an expert with an ongoing group takes that group's requests first, then requests that begin (iteration-level
scheduling by quanta: Orca, section 3). Where begun requests would fill all places, every other quantum leaves
half of them to requests of the group's expert that can begin. A request whose batch failed runs alone until its step
ends. Other experts of the family fill the places left: ongoing groups, whole or not at all, then requests that begin.

Example: t writes texts, a judges images, and both are in memory. A text comes and runs; an image comes meanwhile. After
the quantum the image runs, then the next quantum, which a text that came meanwhile joins behind the first.

Guarantees, with an overlapping policy: an image whose expert may run is passed by no two quanta in a row. An ongoing
group whose expert may run is passed by no two batches of images in a row. Nor do two quanta of other groups pass it
between two turns of ongoing groups. A request that begins passes no request older than it by the overtaking bound or
more; an image does so only in the batch after a quantum. Take batches of ``n >= 2`` places, and a request that can have
its lease, behind ``w`` such requests of its expert. It begins at the latest in that expert's quantum number ``2 *
ceil((w + 1) / (n // 2))``. Without overlap the queue's order decides, not the kind, and one batch passes an ongoing
group. A group that cannot begin claims no load and keeps no other group from running.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent.core.queue import ExecutorQueue, Group
    from agent.core.state import State


@dataclass(frozen=True, slots=True)
class Share:
    """First ``count`` requests of a group, for the next batch."""

    group: Group
    count: int


def look_again(state: State) -> None:
    """Mark the groups that are passed over, after a change of leases, residency or groups."""
    for queue in state.touched_queues:
        pool = state.pools[queue.spec.pool]
        for group in queue.ongoing.values():
            group.is_passed_over = pool.is_resident(group.profile.copy)
        for group in queue.begins:
            group.is_passed_over = not _can_begin(state, queue, group)


def next_group(state: State, queue: ExecutorQueue) -> Group | None:
    if not (queue.ongoing or queue.begins):
        return _first(state, queue)
    if not state.policy.overlapping:
        return _next_in_order(state, queue)
    if queue.had_quantum:
        return _next_runnable(state, queue, is_for_images=True) or _next_quantum(state, queue)
    return _next_quantum(state, queue) or _next_runnable(state, queue, is_for_images=True)


def is_anything_runnable(state: State, queue: ExecutorQueue) -> bool:
    return _next_runnable(state, queue) is not None or _longest_without_turn(state, queue) is not None


def quantum_starts(state: State, queue: ExecutorQueue, group: Group) -> list[Share]:
    """Begin a quantum: its requests, of this group and of other groups that may share the batch."""
    due = _longest_without_turn(state, queue)
    places = _Places(state, queue)
    if group.alone:
        _begin(state, places, (group,), most=1)
    elif group.is_ongoing and _runs_alone(state, next(iter(group.requests))):
        places.take(group, 1)
    else:
        _fill(state, places, group)
    queue.had_quantum = True
    queue.owes_turn = due is not None and all(share.group is not due for share in places.shares)
    return places.shares


def _fill(state: State, places: _Places, group: Group) -> None:
    queue = places.queue
    begun, riders = queue.ongoing.get(group.profile.copy), _riders(state, queue, group)
    to_begin = queue.all_to_begin(group.expert) if group.profile.family is None else queue.begins
    able = (each for each in to_begin if _is_kin(state, queue, each, group) and not each.alone)
    waiting = [each for each in able if group.is_ongoing or each.order >= group.order]
    own = [each for each in waiting if each.profile.copy == group.profile.copy]
    if begun is not None and riders:
        beside = sum(len(each.requests) for each in _companions(state, queue, group))
        kept = _reserved_places(state, places, begun, riders + beside, own)
        taken = places.take(begun, riders, kept)
        if kept:
            _begin(state, places, own)
            places.take(begun, riders - taken)  # places that no beginning request took
            _ride_along(state, places, group)
            return
    if group.profile.family is not None:
        if not group.is_ongoing:  # its turn: no other expert of its family takes its places
            waiting = [each for each in waiting if each.profile.copy != group.profile.copy]
            _begin(state, places, own)
            if any(share.count < len(share.group.requests) for share in places.shares) or not places.shares:
                waiting = []
        _ride_along(state, places, group)
    _begin(state, places, waiting)


def _reserved_places(state: State, places: _Places, begun: Group, riders: int, waiting: Sequence[Group]) -> int:
    """Places reserved for requests that can begin, in a batch that ``riders`` begun requests would fill."""
    left = places.left_for(begun)
    able = (state.leases.can_begin(request) for group in waiting for request in group.requests)
    kept = sum(takewhile(bool, islice(able, left // 2)))
    begun.gave_way = not begun.gave_way and kept > left - riders
    return kept if begun.gave_way else 0


def _ride_along(state: State, places: _Places, group: Group) -> None:
    """Take places for companions: for all of a group, or for none."""
    for other in _companions(state, places.queue, group):
        if places.left_for(other) >= len(other.requests):
            places.take(other, len(other.requests))


def _companions(state: State, queue: ExecutorQueue, group: Group) -> list[Group]:
    """Ongoing groups of other experts in the family that may run in this group's batch."""
    return [
        other
        for other in sorted(queue.ongoing.values(), key=lambda each: each.order)
        if other.profile.copy != group.profile.copy
        and _is_kin(state, queue, other, group)
        and _riders(state, queue, other) == len(other.requests)
    ]


def _is_kin(state: State, queue: ExecutorQueue, other: Group, group: Group) -> bool:
    if other.profile.copy == group.profile.copy:
        return True
    is_kin = other.profile.family is not None and other.profile.family == group.profile.family
    return is_kin and state.may_use(state.pools[queue.spec.pool], other.profile.copy)


def _begin(state: State, places: _Places, groups: Sequence[Group], most: int | None = None) -> None:
    """Begin requests in order, up to the first that cannot; each takes its lease."""
    for group in groups:
        latest_s = _passed_s(_here(state, places.queue), group) + state.overtake_s
        left = places.left_for(group) if most is None else most
        count = 0
        for request, since_s in group.requests.items():
            if count >= left or since_s >= latest_s or not state.leases.can_begin(request):
                break
            state.leases.begin(request)
            count += 1
        places.take(group, count)
        if count < len(group.requests):
            break


def _first(state: State, queue: ExecutorQueue) -> Group | None:
    front = queue.front
    if front is not None and state.may_use(state.pools[queue.spec.pool], front.profile.copy):
        return front
    return _next_runnable(state, queue) if state.policy.overlapping else None


def _next_in_order(state: State, queue: ExecutorQueue) -> Group | None:
    """Next group without overlap: an ongoing group or the front; None while the front's copy is loading."""
    longest, front = _longest_without_turn(state, queue), queue.front
    if longest is not None and (queue.owes_turn or not queue.had_quantum):
        return longest
    first = _first(state, queue)
    return longest if first is None and (front is None or front.is_ongoing) else first


def _next_quantum(state: State, queue: ExecutorQueue) -> Group | None:
    """First ongoing group, or first group that can begin and whose expert has no ongoing requests."""
    longest = _longest_without_turn(state, queue)
    if longest is not None and queue.owes_turn:
        return longest
    pool, here = state.pools[queue.spec.pool], _here(state, queue)
    beginning = (
        group
        for group in here
        if group.profile.performance.runs_in_quanta
        and state.may_use(pool, group.profile.copy)
        and not _riders(state, queue, group)
        and group.oldest_s < _passed_s(here, group) + state.overtake_s
    )
    first = min(beginning, key=lambda group: group.order, default=None)
    if first is None or longest is None:
        return first or longest
    return min(first, longest, key=lambda group: group.order)


def _next_runnable(state: State, queue: ExecutorQueue, *, is_for_images: bool = False) -> Group | None:
    """First group that is not ongoing and whose expert may run; images may pass texts after a quantum.

    None if that group would overtake, beyond the bound, a group whose expert is reserved for an overdue claim.
    """
    pool, here = state.pools[queue.spec.pool], _here(state, queue)
    images = [group for group in here if not group.profile.performance.runs_in_quanta] if is_for_images else here
    runnable = (group for group in images if state.may_use(pool, group.profile.copy))
    first = min(runnable, key=lambda group: group.order, default=None)
    if first is None or state.overtake_s == math.inf:
        return first
    passed_s = _passed_s(images if queue.had_quantum else here, first)
    return first if first.newest_s < passed_s + state.overtake_s else None


def _here(state: State, queue: ExecutorQueue) -> list[Group]:
    """Next group of each resident expert that is not ongoing and can begin."""
    return [
        group
        for entry in state.pools[queue.spec.pool].entries()
        if (group := queue.first_to_begin(entry.expert)) is not None and not group.is_passed_over and entry.is_resident
    ]


def _passed_s(here: Sequence[Group], group: Group) -> float:
    """Queueing time of the oldest request that a batch of this group would overtake."""
    return min((each.oldest_s for each in here if each.order < group.order), default=math.inf)


def _longest_without_turn(state: State, queue: ExecutorQueue) -> Group | None:
    pool = state.pools[queue.spec.pool]
    able = (group for group in queue.ongoing.values() if state.may_use(pool, group.profile.copy))
    return min(able, key=lambda group: group.order, default=None)


def _can_begin(state: State, queue: ExecutorQueue, group: Group) -> bool:
    """True if a group's first request can have a lease, and a place in a batch with the begun requests."""
    if not state.leases.can_begin(next(iter(group.requests))):
        return False
    riders = _riders(state, queue, group)
    return not riders or batch_size(state, queue, group, riders + 1) > 1


def _riders(state: State, queue: ExecutorQueue, group: Group) -> int:
    """Number of begun requests for a batch of this group, without the limit of its size."""
    begun = queue.ongoing.get(group.profile.copy)
    if begun is None or group.alone:
        return 0
    return sum(1 for _ in takewhile(lambda request: not _runs_alone(state, request), begun.requests))


def batch_size(state: State, queue: ExecutorQueue, group: Group, waiting: int) -> int:
    spec = queue.spec
    free_bytes = state.pools[spec.pool].workspace_for(spec.id)
    return state.splitter.batch_size(group.expert, spec.id, group.profile.performance, waiting, free_bytes)


def _runs_alone(state: State, request: int) -> bool:
    """True after a failed batch of this request."""
    return state.tickets[request].attempts > 0


class _Places:
    """Places of one batch, limited by each of its experts. ``shares``: taken places."""

    def __init__(self, state: State, queue: ExecutorQueue) -> None:
        self.queue = queue
        self.shares: list[Share] = []
        self._state = state
        self._most: int | None = None

    def left_for(self, group: Group) -> int:
        return max(self._most_with(group) - sum(share.count for share in self.shares), 0)

    def take(self, group: Group, count: int, kept: int = 0) -> int:
        """Take up to ``count`` places for a group, but leave ``kept`` free; returns the number taken."""
        taken = min(count, max(self.left_for(group) - kept, 0))
        if taken:
            self._most = self._most_with(group)
            self.shares.append(Share(group, taken))
        return taken

    def _most_with(self, group: Group) -> int:
        own = batch_size(self._state, self.queue, group, group.profile.performance.max_batch)
        return own if self._most is None else min(own, self._most)
