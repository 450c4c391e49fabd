"""Predict, assign, arrange, split (section 4.2): which executor gets a request, where it queues, how large batches are.

Example: an executor loads expert a in 10 s, and runs it in 2 s a batch and 1 s an image. A first request for a costs
10 + 2 + 1 s. A request for b opens a group behind it. A second request for a joins the first one's group, ahead of b's,
for 1 s: one batch judges both.

Guarantees: O(executors) per request, whatever is queued; equal queues and requests give equal answers. With a bounded
policy a request joins no group ahead of a request queued ``max_overtake_s`` or more before: a group stops growing
once the next group has waited that long.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from agent.core.effects import Assigned, AssignmentCandidate
from agent.core.policy import Assigning
from agent.core.queue import ExecutorQueue
from agent.core.request import IMAGE

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from agent.core.performance import ExecutorSpec, ExpertProfile, Limits, Performance, PerformanceMatrix
    from agent.core.policy import Policy
    from agent.core.queue import Group
    from agent.core.request import Work


LOPSIDED = 2.0  # a queue that is so many times shorter takes requests that a plan gives to another; arbitrary


class _Option(NamedTuple):
    """Queue that could take the request. ``group``: the one to join; None: the request opens one."""

    queue: ExecutorQueue
    group: Group | None
    addition_s: float
    tokens_s: float
    load_s: float = 0.0


class Placing(NamedTuple):
    """Request to assign.

    ``unable``: executors that cannot take it. ``worker``: has its image. ``alone``: it joins no group.
    """

    request: int
    expert: str
    work: Work = IMAGE
    unable: Collection[int] = ()
    worker: str = ""
    alone: bool = False


class Scheduler:
    """Assigns requests to queues. ``switch_s(executor, profile)``: seconds until the copy could run there.

    ``barred(expert)``: executors to avoid while others can run it. ``limits`` and ``matrix`` are those of now.
    """

    def __init__(
        self,
        executors: Sequence[ExecutorSpec],
        matrix: PerformanceMatrix,
        policy: Policy,
        limits: Limits,
        switch_s: Callable[[ExecutorSpec, ExpertProfile], float],
        barred: Callable[[str], Collection[int]] = lambda _: (),
    ) -> None:
        self.queues: tuple[ExecutorQueue, ...] = ()
        self.matrix = matrix
        self.limits = limits
        self._policy = policy
        self._switch_s = switch_s
        self._barred = barred
        self._turn = 0
        self.join(executors)

    def join(self, executors: Sequence[ExecutorSpec]) -> None:
        """Add executors; a policy with a single executor takes the first, if it has none."""
        if self._policy.assigning is Assigning.FIRST:
            executors = () if self.queues else executors[:1]
        queues = (*self.queues, *(ExecutorQueue(spec) for spec in executors))
        self.queues = tuple(sorted(queues, key=lambda queue: queue.spec.id))

    def lose(self, executors: Collection[int]) -> None:
        """Remove executors, whose queues are empty."""
        self.queues = tuple(queue for queue in self.queues if queue.spec.id not in executors)

    def place(self, placing: Placing, now: float) -> tuple[Group, Assigned] | None:
        """Queue a request: its group and the decision. None if no executor outside ``unable`` can run the expert."""
        request, expert = placing.request, placing.expert
        options = self._options(placing, now)
        if not options:
            return None
        candidates = tuple(
            AssignmentCandidate(option.queue.spec.id, option.queue.length_s(now), option.addition_s)
            for option in options
        )
        chosen = options[self._choose(candidates)]
        group = chosen.group
        if group is None:
            profile = self.matrix.experts[chosen.queue.spec.processor][expert]
            group = chosen.queue.open(expert, profile, request, now, chosen.load_s, chosen.tokens_s)
            group.alone = placing.alone
        else:
            chosen.queue.join(group, request, now, chosen.tokens_s)
        return group, Assigned(request, expert, chosen.queue.spec.id, chosen.group is not None, candidates)

    def _options(self, placing: Placing, now: float) -> list[_Option]:
        """Executors that can take a request: those of its plan that are not barred, else those not barred, else any."""
        expert, unable = placing.expert, placing.unable
        able = [
            (queue, profile)
            for queue in self.queues
            if (profile := self.matrix.experts[queue.spec.processor].get(expert)) is not None
            and not (unable and queue.spec.id in unable)
        ]
        barred = self._barred(expert)
        if barred:
            able = [each for each in able if each[0].spec.id not in barred] or able
        if expert in self.limits.placement:
            able = self._planned(able, self.limits.placement[expert], now)
        return [self._option(queue, profile, placing, now) for queue, profile in able]

    def _choose(self, candidates: tuple[AssignmentCandidate, ...]) -> int:
        if self._policy.assigning is not Assigning.MAKESPAN:
            self._turn += 1
            return (self._turn - 1) % len(candidates)
        return shortest_makespan(candidates)

    def _planned(
        self, able: list[tuple[ExecutorQueue, ExpertProfile]], pools: frozenset[str], now: float
    ) -> list[tuple[ExecutorQueue, ExpertProfile]]:
        """Executors of the plan; all, if there are none or another queue is much shorter than each of theirs."""
        planned = [each for each in able if each[0].spec.pool in pools]
        if not planned or len(planned) == len(able):
            return able
        shortest_s = min(queue.length_s(now) for queue, _ in planned)
        other_s = min(queue.length_s(now) for queue, _ in able if queue.spec.pool not in pools)
        return able if shortest_s > LOPSIDED * other_s + self.limits.max_overtake_s else planned

    def _option(self, queue: ExecutorQueue, profile: ExpertProfile, placing: Placing, now: float) -> _Option:
        """Cost of the request in this queue: its work and transfer, plus B and the switch if it opens a group."""
        performance, expert = profile.performance, placing.expert
        tokens_s = 0.0 if placing.work is IMAGE else performance.tokens_s(placing.work)
        work_s = performance.K_s + tokens_s
        if self.limits.transfer_s and queue.spec.worker != placing.worker:
            work_s += self.limits.transfer_s
        group = None if placing.alone else self._group_to_join(queue, expert, now)
        if group is not None:
            return _Option(queue, group, work_s, tokens_s)
        load_s = 0.0 if queue.first_group(expert) is not None else self._switch_s(queue.spec, profile)
        return _Option(queue, None, work_s + performance.B_s + load_s, tokens_s, load_s)

    def _group_to_join(self, queue: ExecutorQueue, expert: str, now: float) -> Group | None:
        group = queue.last_group(expert)
        if group is None or group.alone:
            return None
        if group is queue.tail:
            return group
        if not self._policy.arranging:
            return None
        # The next group opened before any request behind it was queued, so no wait there is longer than its age.
        behind = group.next
        if self._policy.bounded and behind is not None and now - behind.opened_s >= self.limits.max_overtake_s:
            return None
        return group


def shortest_makespan(candidates: Sequence[AssignmentCandidate]) -> int:
    """Index of the candidate that keeps the longest queue shortest; ties: smallest addition, then lowest executor."""
    longest = max(each.queue_s for each in candidates)  # no addition is negative: its own only grows when chosen

    def rank(index: int) -> tuple[float, float, int]:
        each = candidates[index]
        return max(longest, each.queue_s + each.addition_s), each.addition_s, each.executor

    return min(range(len(candidates)), key=rank)


FIRST_PATIENCE = 16
LONGEST_PATIENCE = 1024


@dataclass(slots=True)
class ProvenLimit:
    """Proven batch size of one expert on one executor, and the number of good batches in a row."""

    requests: int
    patience: int
    good_batches: int = 0


class BatchSplitter:
    """Size of the next batch (section 4.2, 'request splitting').

    At most the profiled maximum, the room of the free workspace, and a proven limit. A shortage of memory lowers the
    limit of that expert on that executor at once, and good batches raise it slowly:

        out of memory with n requests     the limit becomes n / 2, at least 1
        ``patience`` good batches in a    the limit doubles, up to the profiled maximum; after as many batches at that
        row, each as large as the limit   maximum it is forgotten

    ``patience`` begins at FIRST_PATIENCE and doubles at each further out-of-memory, up to LONGEST_PATIENCE: in a
    memory that is too small, one batch in a thousand fails, not every other one.
    """

    def __init__(self) -> None:
        self._limits: dict[tuple[str, int], ProvenLimit] = {}

    def batch_size(self, expert: str, executor: int, performance: Performance, waiting: int, free_bytes: int) -> int:
        """Size of the next batch, at least 1: each executor is guaranteed the workspace of one image."""
        limit = min(performance.max_batch, waiting)
        proven = self._limits.get((expert, executor))
        if proven is not None:
            limit = min(limit, proven.requests)
        if performance.workspace_bytes:
            limit = min(limit, (free_bytes - performance.workspace_base_bytes) // performance.workspace_bytes)
        return max(limit, 1)

    def ran_out_of_memory(self, expert: str, executor: int, batch_size: int) -> None:
        before = self._limits.get((expert, executor))
        patience = FIRST_PATIENCE if before is None else min(before.patience * 2, LONGEST_PATIENCE)
        self._limits[expert, executor] = ProvenLimit(max(batch_size // 2, 1), patience)

    def forget(self, executors: Collection[int]) -> None:
        self._limits = {each: limit for each, limit in self._limits.items() if each[1] not in executors}

    def ran(self, expert: str, executor: int, batch_size: int, max_batch: int) -> None:
        proven = self._limits.get((expert, executor))
        if proven is None or batch_size < proven.requests:
            return
        proven.good_batches += 1
        if proven.good_batches < proven.patience:
            return
        if proven.requests >= max_batch:
            del self._limits[expert, executor]
        else:
            proven.requests, proven.good_batches = min(proven.requests * 2, max_batch), 0
