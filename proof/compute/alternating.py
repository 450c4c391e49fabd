"""Ways to do the same, timed in turn: changes of the machine touch all of them alike.

Guarantees: each way runs once before any time counts; every round runs each way once, in rotated order, so no way
always follows the same one. A pause lies between two runs: threads of other runtimes spin for about a millisecond after
their last operator, on the cores of the next way.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Ways = Mapping[str, Callable[[], object]]

PAUSE_S = 0.003
WARMING_UP = 2  # rounds that count for nothing
ROUNDS_LEAST = 3  # for a median, whatever the limit


@dataclass(frozen=True, slots=True)
class Clock:
    now_s: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep


@dataclass(frozen=True, slots=True)
class Times:
    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def least_s(self) -> float:
        return min(self.seconds)

    def scaled(self, factor: float) -> Times:
        return Times(tuple(seconds * factor for seconds in self.seconds))


def alternating(ways: Ways, rounds: int, clock: Clock | None = None, *, limit_s: float = math.inf) -> dict[str, Times]:
    """Times of each way; after ``limit_s`` no round begins beyond ROUNDS_LEAST. Raises what a way raises."""
    clock = clock or Clock()
    names = list(ways)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    ends_s = clock.now_s() + limit_s
    for number in range(-WARMING_UP, rounds):
        if number >= ROUNDS_LEAST and clock.now_s() >= ends_s:
            break
        for name in _turned(names, number):
            took_s = one_run(ways[name], clock)
            if number >= 0:
                seconds[name].append(took_s)
    return {name: Times(tuple(each)) for name, each in seconds.items()}


def one_run(way: Callable[[], object], clock: Clock | None = None) -> float:
    """Seconds of one run, after a pause."""
    clock = clock or Clock()
    clock.sleep(PAUSE_S)
    started_s = clock.now_s()
    way()
    return clock.now_s() - started_s


def _turned(names: Sequence[str], number: int) -> list[str]:
    first = number % max(len(names), 1)
    return [*names[first:], *names[:first]]
