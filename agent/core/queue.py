"""ExecutorQueue: one executor's work, as groups of requests that need one expert.

Groups are in the order they were opened; groups of a failed batch return to the front. Begun requests move to the tail
after each quantum, as the *ongoing* group of their copy, which no request joins. All operations are O(1) in the number
of requests.

A group has two ages. ``opened_s``: no request in it or behind it was queued before, which limits joining the groups in
front of it. ``oldest_s``: time of its oldest remaining request, which decides the group's claim. In an ongoing group
both count from the last quantum of its requests.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from collections.abc import Set as AbstractSet

    from agent.core.performance import ExecutorSpec, ExpertProfile


@dataclass(slots=True, eq=False)
class Group:
    """Consecutive requests for one expert. ``next`` and ``previous``: neighbours in the queue.

    ``requests``: time each was queued, oldest first; a group in a queue is never empty. ``is_passed_over``: the group
    claims no load: it is ongoing and its expert resident, or none of its requests can begin (see ``turns``).
    """

    expert: str
    profile: ExpertProfile
    opened_s: float
    starts_s: float  # predicted at its opening
    fixed_s: float  # B and the switch: paid once
    order: int = 0  # ascending from head to tail
    alone: bool = False  # after a failed batch: requests run one by one
    is_ongoing: bool = False
    is_passed_over: bool = False
    gave_way: bool = False  # ongoing: its last quantum left places to requests that begin
    requests: OrderedDict[int, float] = field(default_factory=OrderedDict)
    next: Group | None = None
    previous: Group | None = None

    @property
    def oldest_s(self) -> float:
        return next(iter(self.requests.values()))

    @property
    def newest_s(self) -> float:
        return next(reversed(self.requests.values()))


class ExecutorQueue:
    def __init__(self, spec: ExecutorSpec) -> None:
        self.spec = spec
        self.head: Group | None = None
        self.tail: Group | None = None
        self.running_until_s: float | None = None
        self.is_overtaken = False  # the latest batch was not the head's, whose expert was still loading
        self.request_count = 0
        self.unfinished_s = 0.0  # predicted work of the running batch that its quantum leaves
        self.ahead_s = 0.0  # predicted for the batch that is queued ahead, behind what runs
        self.ahead_requests = 0
        self.had_quantum = False  # the latest batch is a quantum: images run next
        self.owes_turn = False  # the last quantum skipped the ongoing group that has waited longest
        self.ongoing: dict[str, Group] = {}  # by copy
        self.begins: dict[Group, None] = {}  # groups whose requests need a lease to begin, in order of arrival
        self._pending_s = 0.0
        self._tokens_s: dict[int, float] = {}  # by request, where not 0
        self._groups_of: dict[str, deque[Group]] = {}  # except ongoing groups

    def length_s(self, now: float) -> float:
        """Predicted seconds until the queue is empty (section 4.2, 'total inference time')."""
        running = max(self.running_until_s - now, 0.0) if self.running_until_s is not None else 0.0
        return running + self.unfinished_s + self.ahead_s + self._pending_s

    def next_start_s(self, now: float) -> float:
        return max(self.running_until_s or now, now) + self.ahead_s

    @property
    def front(self) -> Group | None:
        """First group that is not passed over; the executor claims room for it."""
        group = self.head
        while group is not None and group.is_passed_over:
            group = group.next
        return group

    def groups(self) -> Iterator[Group]:
        group = self.head
        while group is not None:
            yield group
            group = group.next

    def first_group(self, expert: str) -> Group | None:
        if self.ongoing:
            for group in self.ongoing.values():
                if group.expert == expert:
                    return group
        groups = self._groups_of.get(expert)  # first_to_begin inlined, for speed
        return groups[0] if groups else None

    def first_to_begin(self, expert: str) -> Group | None:
        groups = self._groups_of.get(expert)
        return groups[0] if groups else None

    def all_to_begin(self, expert: str) -> tuple[Group, ...]:
        return tuple(self._groups_of.get(expert, ()))

    def last_group(self, expert: str) -> Group | None:
        groups = self._groups_of.get(expert)
        return groups[-1] if groups else None

    @property
    def awaited(self) -> AbstractSet[str]:
        if self.ongoing:
            return self._groups_of.keys() | {group.expert for group in self.ongoing.values()}
        return self._groups_of.keys()

    def join(self, group: Group, request: int, queued_s: float, tokens_s: float = 0.0) -> None:
        """Append a request to its group. ``tokens_s``: predicted seconds on top of the group's K."""
        group.requests[request] = queued_s
        self.request_count += 1
        self._pending_s += group.profile.performance.K_s
        if tokens_s:
            self._tokens_s[request] = tokens_s
            self._pending_s += tokens_s

    def open(
        self, expert: str, profile: ExpertProfile, request: int, now: float, load_s: float, tokens_s: float = 0.0
    ) -> Group:
        starts_s = now + self.length_s(now)
        if self.tail is not None:
            starts_s = max(starts_s, self.tail.starts_s)
        group = Group(expert, profile, now, starts_s, fixed_s=profile.performance.B_s + load_s)
        self._append(group)
        self._groups_of.setdefault(expert, deque()).append(group)
        self._enter(group, {request: now}, {request: tokens_s})
        return group

    def go_on(self, expert: str, profile: ExpertProfile, tokens_s: Mapping[int, float], now: float) -> Group:
        """Move requests after a quantum to the tail, as their copy's ongoing group. ``tokens_s``: left of each."""
        group = self.ongoing.get(profile.copy)
        if group is None:
            group = Group(expert, profile, now, now, fixed_s=0.0, is_ongoing=True)
            self.ongoing[profile.copy] = group
        else:
            self._unlink(group)
        self._append(group)
        group.opened_s = group.starts_s = now
        self._pending_s += profile.performance.B_s - group.fixed_s
        group.fixed_s = profile.performance.B_s
        for request, left_s in tokens_s.items():
            self.join(group, request, now, left_s)
        return group

    def give_back(
        self,
        expert: str,
        profile: ExpertProfile,
        queued_s: Mapping[int, float],
        now: float,
        tokens_s: Mapping[int, float] | None = None,
    ) -> Group:
        """Open a group at the front for requests of a failed batch; they run alone. ``queued_s``: oldest first."""
        group = Group(expert, profile, now, now, fixed_s=profile.performance.B_s, alone=True)
        group.next = self.head
        group.order = self.head.order - 1 if self.head is not None else 0
        if self.head is None:
            self.tail = group
        else:
            self.head.previous = group
        self.head = group
        self._groups_of.setdefault(expert, deque()).appendleft(group)
        self._enter(group, queued_s, tokens_s or {})
        return group

    def _enter(self, group: Group, queued_s: Mapping[int, float], tokens_s: Mapping[int, float]) -> None:
        if group.profile.performance.runs_in_quanta:
            self.begins[group] = None
        self._pending_s += group.fixed_s
        for request, since_s in queued_s.items():
            self.join(group, request, since_s, tokens_s.get(request, 0.0))

    def take(self, group: Group, count: int) -> tuple[int, ...]:
        taken = tuple(group.requests.popitem(last=False)[0] for _ in range(count))
        self.request_count -= count
        self._pending_s -= group.profile.performance.K_s * count + group.fixed_s
        if self._tokens_s:
            self._pending_s -= sum(self._tokens_s.pop(request, 0.0) for request in taken)
        group.fixed_s = 0.0
        self._close_if_empty(group)
        return taken

    def remove(self, group: Group, request: int) -> None:
        del group.requests[request]
        self.request_count -= 1
        self._pending_s -= group.profile.performance.K_s + self._tokens_s.pop(request, 0.0)
        self._close_if_empty(group)

    def _close_if_empty(self, group: Group) -> None:
        if group.requests:
            return
        self._pending_s -= group.fixed_s
        self._unlink(group)
        if group.is_ongoing:
            del self.ongoing[group.profile.copy]
        else:
            self._forget(group)
        if self.head is None:
            self._pending_s = 0.0  # no rounding error outlives an empty queue

    def _forget(self, group: Group) -> None:
        self.begins.pop(group, None)
        groups = self._groups_of[group.expert]
        groups.remove(group)  # few: one open group, and groups closed by the overtaking bound
        if not groups:
            del self._groups_of[group.expert]

    def _append(self, group: Group) -> None:
        group.previous, group.next = self.tail, None
        group.order = self.tail.order + 1 if self.tail is not None else 0
        if self.tail is None:
            self.head = group
        else:
            self.tail.next = group
        self.tail = group

    def _unlink(self, group: Group) -> None:
        if group.previous is None:
            self.head = group.next
        else:
            group.previous.next = group.next
        if group.next is None:
            self.tail = group.previous
        else:
            group.next.previous = group.previous
