"""Contestants that alternate, so that a change of the machine's speed affects all equally.

Guarantees: each contestant warms up before any time counts; every round runs each one once, in rotated order, so that
none always follows the same one. A pause precedes each run: threads of other runtimes spin for about a millisecond
after their last operator, on the cores of the next contestant.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

ROUNDS_LEAST = 3  # for a median, beyond any limit
PAUSE_S = 0.003

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class TimedTurns(Generic[Result]):
    """Counted runs of one way, in order."""

    seconds: tuple[float, ...]
    results: tuple[Result, ...] = ()

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    def scaled(self, factor: float) -> TimedTurns[Result]:
        return TimedTurns(tuple(seconds * factor for seconds in self.seconds))


@dataclass(frozen=True, slots=True)
class Plan:
    """Extent of a comparison. ``limit_s``: no round beyond ROUNDS_LEAST begins later. ``progress``: of rounds."""

    rounds: int
    warming_up: int = 2  # rounds that do not count
    limit_s: float = math.inf
    progress: Callable[[int, int], None] = lambda done, total: None


def by_turns(ways: Mapping[str, Callable[[], Result]], plan: Plan) -> dict[str, TimedTurns[Result]]:
    """Run every way in every round. Raises what a way raises."""
    runs: dict[str, list[tuple[float, Result]]] = {name: [] for name in ways}
    names, ends_s = list(ways), perf_counter() + plan.limit_s
    for number in range(-plan.warming_up, plan.rounds):
        if number >= ROUNDS_LEAST and perf_counter() >= ends_s:
            break
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            run = one_turn(ways[name])
            if number >= 0:
                runs[name].append(run)
        plan.progress(plan.warming_up + number + 1, plan.warming_up + plan.rounds)
    return {
        name: TimedTurns(tuple(seconds for seconds, _ in each), tuple(result for _, result in each))
        for name, each in runs.items()
    }


def one_turn(way: Callable[[], Result]) -> tuple[float, Result]:
    """Seconds and result of one run, after a pause."""
    sleep(PAUSE_S)
    started_s = perf_counter()
    result = way()
    return perf_counter() - started_s, result
