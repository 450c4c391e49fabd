"""Contestants that take turns: a change of the machine's speed touches all of them alike.

Guarantees: each way runs before any time counts; every round runs each way once, in rotated order, so that no way
always follows the same one. A pause precedes each run: threads of other runtimes spin for about a millisecond after
their last operator, on the cores of the next way.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

ROUNDS_LEAST = 3  # for a median, beyond any limit

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Clock:
    now_s: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep
    pause_s: float = 0.003


@dataclass(frozen=True, slots=True)
class TimedTurns(Generic[Result]):
    """Counted runs of one way, in order."""

    seconds: tuple[float, ...]
    results: tuple[Result, ...] = ()

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def least_s(self) -> float:
        return min(self.seconds)

    def scaled(self, factor: float) -> TimedTurns[Result]:
        return TimedTurns(tuple(seconds * factor for seconds in self.seconds))


@dataclass(frozen=True, slots=True)
class Plan:
    """Extent of a comparison. ``limit_s``: no round begins later, beyond ROUNDS_LEAST."""

    rounds: int
    warming_up: int = 2  # rounds that count for nothing
    limit_s: float = math.inf
    clock: Clock = Clock()
    told: Callable[[int, int], None] = lambda done, total: None  # rounds


def by_turns(ways: Mapping[str, Callable[[], Result]], plan: Plan) -> dict[str, TimedTurns[Result]]:
    """Run every way in every round. Raises what a way raises."""
    runs: dict[str, list[tuple[float, Result]]] = {name: [] for name in ways}
    ends_s = plan.clock.now_s() + plan.limit_s
    for number in range(-plan.warming_up, plan.rounds):
        if number >= ROUNDS_LEAST and plan.clock.now_s() >= ends_s:
            break
        for name in rotated(list(ways), number):
            run = one_turn(ways[name], plan.clock)
            if number >= 0:
                runs[name].append(run)
        plan.told(plan.warming_up + number + 1, plan.warming_up + plan.rounds)
    return {
        name: TimedTurns(tuple(seconds for seconds, _ in each), tuple(result for _, result in each))
        for name, each in runs.items()
    }


def one_turn(way: Callable[[], Result], clock: Clock | None = None) -> tuple[float, Result]:
    """Seconds and result of one run, after a pause."""
    clock = clock or Clock()
    clock.sleep(clock.pause_s)
    started_s = clock.now_s()
    result = way()
    return clock.now_s() - started_s, result


def rotated(names: Sequence[str], number: int) -> list[str]:
    first = number % max(len(names), 1)
    return [*names[first:], *names[:first]]
