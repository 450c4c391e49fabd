"""ExecutorQueue: one executor's work, as groups of requests that need one expert.

Groups stand in the order they were opened, except that work given back by a failed batch goes in front. All
operations are O(1) in the number of requests; asking for the first group of an expert is O(1), too.

A group has two ages. Nothing in it or behind it was queued before ``opened_s``: who may still join what stands in
front of it goes by that. ``oldest_s`` is its oldest remaining request's: what the group itself may claim goes by that,
as one that requests keep joining while others leave grows old without anybody in it that has waited for long.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, KeysView, Mapping

    from agent.core.performance import ExecutorSpec, ExpertProfile


@dataclass(slots=True, eq=False)
class Group:
    """Requests on one expert that run one after another. ``next`` and ``previous`` are its neighbours.

    ``requests`` holds when each was queued, the oldest first; a group in a queue is never empty.
    """

    expert: str
    profile: ExpertProfile
    opened_s: float
    starts_s: float  # predicted when it was opened
    fixed_s: float  # B and the switch: paid once
    order: int = 0  # ascending from head to tail
    alone: bool = False  # its requests run one by one, after a batch of them failed
    requests: OrderedDict[int, float] = field(default_factory=OrderedDict)
    next: Group | None = None
    previous: Group | None = None

    @property
    def oldest_s(self) -> float:
        """When its oldest remaining request was queued."""
        return next(iter(self.requests.values()))

    @property
    def newest_s(self) -> float:
        """When its newest request was queued."""
        return next(reversed(self.requests.values()))


class ExecutorQueue:
    """The groups of one executor, first to run first."""

    def __init__(self, spec: ExecutorSpec) -> None:
        self.spec = spec
        self.head: Group | None = None
        self.tail: Group | None = None
        self.running_until_s: float | None = None
        self.is_overtaken = False  # what runs, or ran last, was not the head: its expert was still on its way
        self.request_count = 0
        self._pending_s = 0.0
        self._groups_of: dict[str, deque[Group]] = {}

    def length_s(self, now: float) -> float:
        """Predicted time until everything queued here is done (section 4.2, 'total inference time')."""
        running = max(self.running_until_s - now, 0.0) if self.running_until_s is not None else 0.0
        return running + self._pending_s

    def groups(self) -> Iterator[Group]:
        """From head to tail."""
        group = self.head
        while group is not None:
            yield group
            group = group.next

    def first_group(self, expert: str) -> Group | None:
        """The next group on this expert."""
        groups = self._groups_of.get(expert)
        return groups[0] if groups else None

    def last_group(self, expert: str) -> Group | None:
        """The last group on this expert: the one that a request may join."""
        groups = self._groups_of.get(expert)
        return groups[-1] if groups else None

    @property
    def awaited(self) -> KeysView[str]:
        """Every expert with a group here."""
        return self._groups_of.keys()

    def join(self, group: Group, request: int, queued_s: float) -> None:
        """Put a request behind the last one of its group."""
        group.requests[request] = queued_s
        self.request_count += 1
        self._pending_s += group.profile.performance.K_s

    def open(self, expert: str, profile: ExpertProfile, request: int, now: float, load_s: float) -> Group:
        """A new group at the tail."""
        starts_s = now + self.length_s(now)
        if self.tail is not None:
            starts_s = max(starts_s, self.tail.starts_s)
        group = Group(expert, profile, now, starts_s, fixed_s=profile.performance.B_s + load_s)
        group.previous = self.tail
        group.order = self.tail.order + 1 if self.tail is not None else 0
        if self.tail is None:
            self.head = group
        else:
            self.tail.next = group
        self.tail = group
        self._groups_of.setdefault(expert, deque()).append(group)
        self._pending_s += group.fixed_s
        self.join(group, request, now)
        return group

    def give_back(self, expert: str, profile: ExpertProfile, queued_s: Mapping[int, float], now: float) -> Group:
        """A new group in front of all others, for requests whose batch failed; they run alone, and are as old as ever.

        ``queued_s``: when each of them was queued, the oldest first.
        """
        group = Group(expert, profile, now, now, fixed_s=profile.performance.B_s, alone=True)
        group.next = self.head
        group.order = self.head.order - 1 if self.head is not None else 0
        if self.head is None:
            self.tail = group
        else:
            self.head.previous = group
        self.head = group
        self._groups_of.setdefault(expert, deque()).appendleft(group)
        self._pending_s += group.fixed_s
        for request, since_s in queued_s.items():
            self.join(group, request, since_s)
        return group

    def take(self, group: Group, count: int) -> tuple[int, ...]:
        """The first requests of a group leave the queue to run."""
        taken = tuple(group.requests.popitem(last=False)[0] for _ in range(count))
        self.request_count -= count
        self._pending_s -= group.profile.performance.K_s * count + group.fixed_s
        group.fixed_s = 0.0
        self._close_if_empty(group)
        return taken

    def remove(self, group: Group, request: int) -> None:
        """One request leaves without running."""
        del group.requests[request]
        self.request_count -= 1
        self._pending_s -= group.profile.performance.K_s
        self._close_if_empty(group)

    def _close_if_empty(self, group: Group) -> None:
        if group.requests:
            return
        self._pending_s -= group.fixed_s
        self._unlink(group)
        groups = self._groups_of[group.expert]
        groups.remove(group)  # a handful at most: one open group, and those that the overtaking bound closed
        if not groups:
            del self._groups_of[group.expert]
        if self.head is None:
            self._pending_s = 0.0  # no rounding error outlives an empty queue

    def _unlink(self, group: Group) -> None:
        if group.previous is None:
            self.head = group.next
        else:
            group.previous.next = group.next
        if group.next is None:
            self.tail = group.previous
        else:
            group.next.previous = group.previous
