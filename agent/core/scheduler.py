"""Predict, assign, arrange (section 4.2): which executor gets a request, and where in its queue it stands.

Guarantees: O(executors) a request, whatever is queued; the same queues and the same request give the same answer.
With a bounded policy nobody joins a group ahead of a request ``max_overtake_s`` or more after that was queued: a
group stops growing once the next one has stood behind it for that long.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from agent.core.effects import Assigned, AssignmentCandidate
from agent.core.policy import Assigning
from agent.core.queue import ExecutorQueue
from agent.core.request import IMAGE

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from agent.core.performance import ExecutorSpec, ExpertProfile, PerformanceMatrix
    from agent.core.policy import Policy
    from agent.core.queue import Group
    from agent.core.request import Work


class _Option(NamedTuple):
    """One queue that could take the request: the group it would join (None: it opens one), and what it would add."""

    queue: ExecutorQueue
    profile: ExpertProfile
    group: Group | None
    addition_s: float
    load_s: float
    tokens_s: float


class Scheduler:
    """The queues of all executors. ``switch_s(executor, profile)``: seconds until the copy could run there.

    ``barred(expert, now)``: executors to avoid for now, where there are others.
    """

    def __init__(
        self,
        executors: Sequence[ExecutorSpec],
        matrix: PerformanceMatrix,
        policy: Policy,
        max_overtake_s: float,
        switch_s: Callable[[ExecutorSpec, ExpertProfile], float],
        barred: Callable[[str, float], Collection[int]] = lambda *_: (),
    ) -> None:
        used = executors[:1] if policy.assigning is Assigning.FIRST else executors
        self.queues = tuple(ExecutorQueue(spec) for spec in used)
        self.matrix = matrix
        self._policy = policy
        self._max_overtake_s = max_overtake_s
        self._switch_s = switch_s
        self._barred = barred
        self._turn = 0

    def place(
        self, request: int, expert: str, now: float, work: Work = IMAGE, unable: Collection[int] = ()
    ) -> tuple[Group, Assigned] | None:
        """Queue a request: its group and the decision. None when no executor outside of ``unable`` runs the expert."""
        options = [
            self._option(queue, expert, profile, now, 0.0 if work is IMAGE else profile.performance.tokens_s(work))
            for queue in self.queues
            if (profile := self.matrix.experts[queue.spec.processor].get(expert)) is not None
        ]
        if unable:
            options = [option for option in options if option.queue.spec.id not in unable]
        if not options:
            return None
        barred = self._barred(expert, now)
        if barred:
            options = [option for option in options if option.queue.spec.id not in barred] or options
        candidates = tuple(
            AssignmentCandidate(option.queue.spec.id, option.queue.length_s(now), option.addition_s)
            for option in options
        )
        chosen = options[self._choose(candidates)]
        group = chosen.group
        if group is None:
            group = chosen.queue.open(expert, chosen.profile, request, now, chosen.load_s, chosen.tokens_s)
        else:
            chosen.queue.join(group, request, now, chosen.tokens_s)
        return group, Assigned(request, expert, chosen.queue.spec.id, chosen.group is not None, candidates)

    def _choose(self, candidates: tuple[AssignmentCandidate, ...]) -> int:
        if self._policy.assigning is not Assigning.MAKESPAN:
            self._turn += 1
            return (self._turn - 1) % len(candidates)
        return shortest_makespan(candidates)

    def _option(
        self, queue: ExecutorQueue, expert: str, profile: ExpertProfile, now: float, tokens_s: float
    ) -> _Option:
        """What the request would add to this queue: its work, and for one that opens a group also B and the switch."""
        performance = profile.performance
        group = self._group_to_join(queue, expert, now)
        work_s = performance.K_s + tokens_s
        if group is not None:
            return _Option(queue, profile, group, work_s, 0.0, tokens_s)
        load_s = 0.0 if queue.first_group(expert) is not None else self._switch_s(queue.spec, profile)
        return _Option(queue, profile, None, work_s + performance.B_s + load_s, load_s, tokens_s)

    def _group_to_join(self, queue: ExecutorQueue, expert: str, now: float) -> Group | None:
        group = queue.last_group(expert)
        if group is None or group.alone:
            return None
        if group is queue.tail:
            return group
        if not self._policy.arranging:
            return None
        # The next group was opened before any request behind this one was queued: the oldest wait is at most its age.
        behind = group.next
        if self._policy.bounded and behind is not None and now - behind.opened_s >= self._max_overtake_s:
            return None
        return group


def shortest_makespan(candidates: Sequence[AssignmentCandidate]) -> int:
    """Which candidate keeps the longest queue shortest; ties: the smallest addition, then the lowest executor."""
    longest = max(each.queue_s for each in candidates)  # no addition is negative: its own only grows when chosen

    def rank(index: int) -> tuple[float, float, int]:
        each = candidates[index]
        return max(longest, each.queue_s + each.addition_s), each.addition_s, each.executor

    return min(range(len(candidates)), key=rank)
