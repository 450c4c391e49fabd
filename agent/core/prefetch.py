"""What to load next: the wishes for a pool, the most urgent first. Pure questions over the queues; nothing moves here.

Three kinds of wish, in this order: what stands at the head of a queue (demand), what the next groups need (prefetch,
while the executor is busy), and what may follow what runs now (speculation, into free room only). The head of a queue
is its first group that is not passed over: what can begin, or has begun and is not here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from agent.core.performance import ExecutorSpec, ExpertProfile
    from agent.core.pool import ModelPool
    from agent.core.queue import ExecutorQueue, Group


@dataclass(frozen=True, slots=True)
class Wish:
    """A copy that a queue wants in its executor's pool. ``since_s``: when its group's oldest request was queued."""

    spec: ExecutorSpec
    expert: str
    profile: ExpertProfile
    since_s: float
    starts_s: float


def demands(queues: Iterable[ExecutorQueue]) -> list[Wish]:
    """The head of every queue, oldest first."""
    heads = [(head.opened_s, queue.spec, head) for queue in queues if (head := queue.front) is not None]
    return [_wish(spec, group) for _, spec, group in sorted(heads, key=lambda each: (each[0], each[1].id))]


def overdue(queues: Iterable[ExecutorQueue], until_s: float) -> list[Wish]:
    """The heads with a request that has waited since ``until_s`` or before, oldest first."""
    heads = [(head.oldest_s, queue.spec, head) for queue in queues if (head := queue.front) is not None]
    late = sorted((each for each in heads if each[0] <= until_s), key=lambda each: (each[0], each[1].id))
    return [_wish(spec, group) for _, spec, group in late]


def upcoming(queues: Iterable[ExecutorQueue], depth: int, pools: Mapping[str, ModelPool]) -> Iterator[Wish]:
    """What is not there yet of the groups behind the heads, ``depth`` of each queue: by place, then by executor."""
    fronts = [(queue.spec, pools[queue.spec.pool], head) for queue in queues if (head := queue.front) is not None]
    for _ in range(depth):
        fronts = [(spec, pool, group.next) for spec, pool, group in fronts if group.next is not None]
        for spec, pool, group in fronts:
            if pool.entry(group.profile.copy) is None and not group.is_passed_over:
                yield _wish(spec, group)


def _wish(spec: ExecutorSpec, group: Group) -> Wish:
    return Wish(spec, group.expert, group.profile, group.oldest_s, group.starts_s)


def initial_placement(
    usage: dict[str, float], executors: Sequence[ExecutorSpec], runs_on: dict[str, dict[str, ExpertProfile]]
) -> list[tuple[ExecutorSpec, str]]:
    """Experts dealt round-robin to the pools, in descending usage probability (section 4.1).

    ``runs_on[processor]`` holds the experts that can run there. One executor stands for its pool; an expert that the
    pool whose turn it is cannot run goes to the next pool that can.
    """
    pools = list({spec.pool: spec for spec in reversed(executors)}.values())[::-1]
    dealt = []
    turn = 0
    for expert in sorted(usage, key=lambda name: (-usage[name], name)):
        for offset in range(len(pools)):
            spec = pools[(turn + offset) % len(pools)]
            if expert in runs_on[spec.processor]:
                dealt.append((spec, expert))
                turn += offset + 1
                break
    return dealt
