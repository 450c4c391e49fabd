"""Turns: whose requests an idle executor runs next, and which of them together.

An expert with leases runs in quanta: its requests that are not done when one is over wait as its *ongoing* group for
the next. So an executor has two kinds of work, and they take turns:

    after a quantum        images: the first group in the queue's order whose expert may run
    after a batch          a quantum: of those of the ongoing groups and of the groups of experts that have none, the
    of images              one that stands first; an ongoing one goes to the tail after each
    if the one kind        the other does
    cannot go

A quantum of requests that begin, and that passes the ongoing group whose last turn is longest ago, makes that one the
next. A batch of an expert with an ongoing group takes that one's requests first, then those that have not begun
(iteration-level scheduling, seen from outside: Orca, section 3), as many as a batch, the workspace, the leases and the
overtaking bound let in. Where requests that have begun would fill all places, every other quantum keeps half of the
places for requests that can begin; of those that have begun, the one whose last quantum is longest ago goes first.
A request whose batch failed runs alone until its step ends: one that breaks every batch ends without the others.

Experts of one family may run in one batch. Whose turn it is, is decided for each of them as if it had no family; then
the others of the family whose copies may run now ride along in the places that are left: ongoing groups, whole or not
at all, so that each ride is a turn; then, of all of them together and in the queue's order, those that begin.

Guarantees, with an overlapping policy: an image whose expert may run is passed by no two quanta in a row, whatever has
begun or waits to begin; an ongoing group whose expert may run is passed by no two batches of images in a row, and
between two turns of ongoing groups by no two quanta of others. Whoever begins passes nobody that came longer before
it than the overtaking bound; an image does so only in the batch after a quantum; one that has begun passes nobody by
going on. In batches of ``n`` places, two at least, a request that can have its lease, as the ``w`` of its expert can
that wait before it, begins in the ``2 * ceil((w + 1) / (n // 2))``-th quantum of that expert at the latest, however
many have begun and however long these go on. Without overlap the queue's order decides in place of the kind, and an
ongoing group is passed by one batch. A group that cannot begin, for want of its lease or as one at a time can run, asks
for nothing and keeps nobody from running. Without leases every answer is what it would be without this: the head, or
the first group whose expert is here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from agent.core.leases import Leases
    from agent.core.placement import Placement
    from agent.core.pool import ModelPool
    from agent.core.queue import ExecutorQueue, Group
    from agent.core.splitter import BatchSplitter


@dataclass(frozen=True, slots=True)
class Share:
    """So many requests of a group, from its first one on, that run in the next batch."""

    group: Group
    count: int


@dataclass(slots=True, eq=False)
class Turns:
    _pools: Mapping[str, ModelPool]
    _placement: Placement
    _leases: Leases
    _splitter: BatchSplitter
    _is_overlapping: bool
    _max_overtake_s: float  # infinity without a bound
    _runs_alone: Callable[[int], bool]  # did a batch fail that this request was in?

    def look_again(self, queues: Sequence[ExecutorQueue]) -> None:
        """Leases, residency or groups have changed: mark the groups that are passed over."""
        for queue in queues:
            pool = self._pools[queue.spec.pool]
            for group in queue.ongoing.values():
                group.is_passed_over = pool.is_resident(group.profile.copy)
            for group in queue.begins:
                group.is_passed_over = not self._can_begin(queue, group)

    def next_group(self, queue: ExecutorQueue) -> Group | None:
        if not (queue.ongoing or queue.begins):
            return self._first(queue)
        if not self._is_overlapping:
            return self._next_in_order(queue)
        if queue.had_quantum:
            return self._next_images(queue) or self._next_quantum(queue)
        return self._next_quantum(queue) or self._next_images(queue)

    def is_anything_runnable(self, queue: ExecutorQueue) -> bool:
        return self._next_runnable(queue) is not None or self._longest_without_turn(queue) is not None

    def images_start(self, queue: ExecutorQueue) -> None:
        queue.had_quantum = False

    def quantum_starts(self, queue: ExecutorQueue, group: Group) -> list[Share]:
        """What of a group that runs in quanta, and of those that may ride along, runs in one batch; it begins now."""
        due = self._longest_without_turn(queue)
        shares = self._shares(queue, group)
        queue.had_quantum = True
        queue.owes_turn = due is not None and all(share.group is not due for share in shares)
        return shares

    def _shares(self, queue: ExecutorQueue, group: Group) -> list[Share]:
        places = _Places(self, queue)
        if group.alone:
            return self._begin(places, (group,), most=1)
        if group.is_ongoing and self._runs_alone(next(iter(group.requests))):
            return [Share(group, 1)]
        begun, riders = queue.ongoing.get(group.profile.copy), self._riders(queue, group)
        waiting = self._joining(queue, group)
        own = [each for each in waiting if each.profile.copy == group.profile.copy]
        shares: list[Share] = []
        if begun is not None and riders:
            kept = self._given_way(places, begun, riders, own)
            taken = places.take(begun, riders, kept)
            shares = [Share(begun, taken)] if taken else []
            if kept:
                shares += self._begin(places, own)
                more = places.take(begun, riders - taken)  # kept places that no request took
                return shares + ([Share(begun, more)] if more else [])
        if group.profile.family is None:
            return shares + self._begin(places, waiting)
        if not group.is_ongoing:  # it is its turn: none of its family takes its places
            waiting = [each for each in waiting if each.profile.copy != group.profile.copy]
            shares += self._begin(places, own)
            if any(share.count < len(share.group.requests) for share in shares) or not shares:
                waiting = []
        return shares + self._riding_along(places, group) + self._begin(places, waiting)

    def _given_way(self, places: _Places, begun: Group, riders: int, waiting: Sequence[Group]) -> int:
        """Places kept for requests that can begin, in a batch that those which have begun would fill."""
        left = places.left_for(begun)
        able = (self._leases.can_begin(request) for group in waiting for request in group.requests)
        kept = sum(takewhile(bool, islice(able, left // 2)))
        begun.gave_way = not begun.gave_way and kept > left - riders
        return kept if begun.gave_way else 0

    def _riding_along(self, places: _Places, group: Group) -> list[Share]:
        """Ongoing groups of the same family whose copies may run now, as far as all of each find a place."""
        shares = []
        for other in sorted(places.queue.ongoing.values(), key=lambda each: each.order):
            if other.profile.copy == group.profile.copy or not self._is_kin(places.queue, other, group):
                continue
            riders = self._riders(places.queue, other)
            if riders == len(other.requests) and places.left_for(other) >= riders:
                shares.append(Share(other, places.take(other, riders)))
        return shares

    def _is_kin(self, queue: ExecutorQueue, other: Group, group: Group) -> bool:
        if other.profile.copy == group.profile.copy:
            return True
        is_kin = other.profile.family is not None and other.profile.family == group.profile.family
        return is_kin and self._placement.may_use(self._pools[queue.spec.pool], other.profile.copy)

    def _joining(self, queue: ExecutorQueue, group: Group) -> list[Group]:
        """The groups that those who begin in a batch of this one come from, in their order."""
        return [
            each
            for each in (queue.all_to_begin(group.expert) if group.profile.family is None else queue.begins)
            if self._is_kin(queue, each, group) and not each.alone and (group.is_ongoing or each.order >= group.order)
        ]

    def _begin(self, places: _Places, groups: Sequence[Group], most: int | None = None) -> list[Share]:
        """Begin requests in order, up to the first that cannot; each takes its lease."""
        shares = []
        for group in groups:
            latest_s = self._passed_s(self._here(places.queue), group) + self._max_overtake_s
            left = places.left_for(group) if most is None else most
            count = 0
            for request, since_s in group.requests.items():
                if count >= left or since_s >= latest_s or not self._leases.can_begin(request):
                    break
                self._leases.begin(request)
                count += 1
            if count:
                shares.append(Share(group, places.take(group, count)))
            if count < len(group.requests):
                break
        return shares

    def _first(self, queue: ExecutorQueue) -> Group | None:
        front = queue.front
        if front is not None and self._placement.may_use(self._pools[queue.spec.pool], front.profile.copy):
            return front
        return self._next_runnable(queue) if self._is_overlapping else None

    def _next_in_order(self, queue: ExecutorQueue) -> Group | None:
        """Without overlap: an ongoing group, or the front, or nothing while the front's load is on its way."""
        longest, front = self._longest_without_turn(queue), queue.front
        if longest is not None and (queue.owes_turn or not queue.had_quantum):
            return longest
        first = self._first(queue)
        return longest if first is None and (front is None or front.is_ongoing) else first

    def _next_images(self, queue: ExecutorQueue) -> Group | None:
        """The first group of images whose expert may run now; after a quantum it may pass whoever waits to begin."""
        here = [
            group for group in self._here(queue) if not (queue.had_quantum and group.profile.performance.runs_in_quanta)
        ]
        images = [group for group in here if not group.profile.performance.runs_in_quanta]
        return self._first_within_bound(queue, images, here)

    def _next_quantum(self, queue: ExecutorQueue) -> Group | None:
        """The first of the ongoing groups and of those whose requests would begin without any that go on."""
        longest = self._longest_without_turn(queue)
        if longest is not None and queue.owes_turn:
            return longest
        pool, here = self._pools[queue.spec.pool], self._here(queue)
        beginning = (
            group
            for group in here
            if group.profile.performance.runs_in_quanta
            and self._placement.may_use(pool, group.profile.copy)
            and not self._riders(queue, group)
            and group.oldest_s < self._passed_s(here, group) + self._max_overtake_s
        )
        first = min(beginning, key=lambda group: group.order, default=None)
        if first is None or longest is None:
            return first or longest
        return min(first, longest, key=lambda group: group.order)

    def _next_runnable(self, queue: ExecutorQueue) -> Group | None:
        """The first group that is not ongoing whose expert may run now.

        None where one before it has its expert here, held for an overdue claim, and would be passed beyond the bound.
        """
        here = self._here(queue)
        return self._first_within_bound(queue, here, here)

    def _first_within_bound(self, queue: ExecutorQueue, groups: Sequence[Group], here: Sequence[Group]) -> Group | None:
        pool = self._pools[queue.spec.pool]
        runnable = (group for group in groups if self._placement.may_use(pool, group.profile.copy))
        first = min(runnable, key=lambda group: group.order, default=None)
        if first is None or self._max_overtake_s == math.inf:
            return first
        return first if first.newest_s < self._passed_s(here, first) + self._max_overtake_s else None

    def _here(self, queue: ExecutorQueue) -> list[Group]:
        """Of each expert that is here the next group that is not ongoing, if it can begin."""
        return [
            group
            for entry in self._pools[queue.spec.pool].entries()
            if (group := queue.first_to_begin(entry.expert)) is not None
            and not group.is_passed_over
            and entry.is_resident
        ]

    def _passed_s(self, here: Sequence[Group], group: Group) -> float:
        """When the oldest request was queued that a batch of this group would pass."""
        return min((each.oldest_s for each in here if each.order < group.order), default=math.inf)

    def _longest_without_turn(self, queue: ExecutorQueue) -> Group | None:
        pool = self._pools[queue.spec.pool]
        able = (group for group in queue.ongoing.values() if self._placement.may_use(pool, group.profile.copy))
        return min(able, key=lambda group: group.order, default=None)

    def _can_begin(self, queue: ExecutorQueue, group: Group) -> bool:
        """Is there a lease for its first request, and a place beside requests that have begun, or in turn with them?"""
        if not self._leases.can_begin(next(iter(group.requests))):
            return False
        riders = self._riders(queue, group)
        return not riders or self.batch_size(queue, group, riders + 1) > 1

    def _riders(self, queue: ExecutorQueue, group: Group) -> int:
        """How many of those that have begun would run in a batch of this group, if it could be so large."""
        begun = queue.ongoing.get(group.profile.copy)
        if begun is None or group.alone:
            return 0
        return sum(1 for _ in takewhile(lambda request: not self._runs_alone(request), begun.requests))

    def batch_size(self, queue: ExecutorQueue, group: Group, waiting: int) -> int:
        spec = queue.spec
        free_bytes = self._pools[spec.pool].workspace_for(spec.id)
        return self._splitter.batch_size(group.expert, spec.id, group.profile.performance, waiting, free_bytes)


class _Places:
    """The places of one batch: as many as each of its experts allows it to have."""

    def __init__(self, turns: Turns, queue: ExecutorQueue) -> None:
        self.queue = queue
        self._turns = turns
        self._most: int | None = None
        self._taken = 0

    def left_for(self, group: Group) -> int:
        return max(self._most_with(group) - self._taken, 0)

    def take(self, group: Group, count: int, kept: int = 0) -> int:
        """Take up to ``count`` places for a group, ``kept`` of them left free; how many were taken."""
        taken = min(count, max(self.left_for(group) - kept, 0))
        if taken:
            self._most = self._most_with(group)
            self._taken += taken
        return taken

    def _most_with(self, group: Group) -> int:
        own = self._turns.batch_size(self.queue, group, group.profile.performance.max_batch)
        return own if self._most is None else min(own, self._most)
