"""BackgroundWork: requests that nobody waits for, of experts that run in the shadow of others.

An expert's *shadow* is another one, of no route, that is shown the same images later and decides nothing. What it is
asked is background work: it begins only while no request of the line is in flight on any executor, no load of theirs
is under way and nothing is left to be placed; one batch of one image or one load at a time on the whole box.

Guarantees: nothing but copies of other shadows that nothing waits for ever leaves a memory for background work, and
they leave before anything else does for anybody; at most ``Limits.background_requests`` wait, the oldest is dropped for
a new one; what it meets, a failed load, a failed batch or a memory that is too short, lowers no budget and ends nobody
else's request. So whoever arrives finds what it would have found without, but for what has begun: one batch of one
image on one executor, and one load. O(shadows that something waits for) a question.
Assumes: the Engine asks only while nothing else has work.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from agent.core.performance import ExecutorSpec, ExpertProfile, Limits

DROPPED = "dropped"  # the reason of a background request's outcome that later ones took the place of, or a drain


@dataclass(frozen=True, slots=True)
class BackgroundStatistics:
    """Background requests: that wait or run now, and what became of the others since the start."""

    waiting: int = 0
    running: int = 0
    ran: int = 0
    failed: int = 0
    dropped: int = 0


NO_BACKGROUND = BackgroundStatistics()


@dataclass(slots=True)
class _Pause:
    pause_s: float
    until_s: float


class BackgroundWork:
    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._waiting: dict[str, OrderedDict[int, int]] = {}  # expert -> request -> when it came, counted
        self._experts: dict[int, str] = {}  # request -> expert
        self._pauses: dict[str, _Pause] = {}  # memory -> pause
        self._came = 0
        self.batch: int | None = None  # that runs
        self.request: int | None = None  # in it
        self.ran = self.failed = self.dropped = 0

    @property
    def is_waiting(self) -> bool:
        return bool(self._experts)

    @property
    def requests(self) -> Collection[int]:
        return self._experts.keys()

    def __contains__(self, request: int) -> bool:
        return request in self._experts or request == self.request

    def expert_of(self, request: int) -> str | None:
        return self._experts.get(request)

    def offer(self, request: int, expert: str) -> list[int]:
        """A request waits from now on; those that are dropped for it."""
        self._came += 1
        self._experts[request] = expert
        self._waiting.setdefault(expert, OrderedDict())[request] = self._came
        too_many = len(self._experts) - self._limits.background_requests
        return list(self._experts)[:too_many] if too_many > 0 else []

    def leave(self, request: int) -> None:
        expert = self._experts.pop(request)
        waiting = self._waiting[expert]
        del waiting[request]
        if not waiting:
            del self._waiting[expert]

    def waiting_for(self, expert: str) -> tuple[int, ...]:
        return tuple(self._waiting.get(expert, ()))

    @property
    def awaited(self) -> tuple[str, ...]:
        return tuple(sorted(self._waiting, key=lambda expert: next(iter(self._waiting[expert].values()))))

    def homes(
        self,
        expert: str,
        executors: Sequence[ExecutorSpec],
        columns: Mapping[str, Mapping[str, ExpertProfile]],
        now: float,
    ) -> Iterator[tuple[ExecutorSpec, ExpertProfile]]:
        for spec in executors:
            profile = columns[spec.processor].get(expert)
            pause = self._pauses.get(spec.pool)
            if profile is not None and (pause is None or now >= pause.until_s):
                yield spec, profile

    def ran_short(self, pool: str, now: float) -> None:
        before = self._pauses.get(pool)
        pause_s = min(before.pause_s * 2 if before else self._limits.probation_s, self._limits.longest_pause_s)
        self._pauses[pool] = _Pause(pause_s, now + pause_s)

    def went_well(self, pool: str) -> None:
        self._pauses.pop(pool, None)

    def next_moment_s(self, now: float) -> float | None:
        if not self._experts:
            return None
        return min((pause.until_s for pause in self._pauses.values() if pause.until_s > now), default=None)

    def statistics(self) -> BackgroundStatistics:
        running = int(self.batch is not None)
        return BackgroundStatistics(len(self._experts), running, self.ran, self.failed, self.dropped)

    def check_invariants(self) -> None:
        listed = {request: expert for expert, waiting in self._waiting.items() for request in waiting}
        assert listed == self._experts, "background requests are miscounted"
        assert all(self._waiting.values()), "a shadow that nothing waits for is listed"
        assert len(self._experts) <= self._limits.background_requests, "more background requests wait than may"
        assert (self.batch is None) == (self.request is None), "a background batch without a request, or the reverse"
        assert self.request not in self._experts, "a background request waits and runs"
