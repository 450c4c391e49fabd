"""Decay-window search for the number of experts to keep room for, and the sweep over executors.

Sources: CoServe (ASPLOS '25), section 4.4, equations 1 to 3; section 5.3, Figure 17.
Guarantees: deterministic; pure except for the given throughput, which is called once per setting.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import linear_regression
from typing import TYPE_CHECKING

from experts.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

INITIAL_WINDOW = 15  # experts (section 5.3)
ERROR_MARGIN = 0.05  # section 5.3
FIT_VALUES = 2  # throughputs that make a line, at least
DECLINES = 2  # in a row: further executors only slow each other (section 5.3)


@dataclass(frozen=True, slots=True)
class WindowOptions:
    """``initial_window``: 1 to 99 experts. Raises ConfigError for an error margin that never decides."""

    initial_window: int = INITIAL_WINDOW
    error_margin: float = ERROR_MARGIN
    fit_values: int = FIT_VALUES

    def __post_init__(self) -> None:
        if not 0 < self.error_margin < 1:
            raise ConfigError(f"--error-margin: {self.error_margin} never decides - take a fraction between 0 and 1")


AS_IN_THE_PAPER = WindowOptions()


class SearchEnd(StrEnum):
    """Reason why the window stopped."""

    BEND = "short of the line"  # equation 3
    NO_RISE = "the line does not rise"
    MEMORY = "no more experts fit"


@dataclass(frozen=True, slots=True)
class DecayWindow:
    lower: int
    upper: int

    @property
    def middle(self) -> int:
        return (self.lower + self.upper + 1) // 2


@dataclass(frozen=True, slots=True)
class WindowStep:
    """The throughput at one window's upper bound. ``predicted``, ``error``: by equations 2 and 3; None before a fit."""

    number: int
    window: DecayWindow
    images_per_s: float
    predicted: float | None
    error: float | None


@dataclass(frozen=True, slots=True)
class WindowSearch:
    """Steps of the window, its end, and the number of experts chosen. ``tried``: throughput of each number run."""

    steps: tuple[WindowStep, ...]
    end: SearchEnd
    window: DecayWindow
    tried: Mapping[int, float]
    chosen: int


def decay_windows(most: int, initial_window: int = INITIAL_WINDOW) -> Iterator[DecayWindow]:
    """Adjacent windows from 0 to ``most`` experts (section 4.4, equation 1).

    Each is (1 - initial window / 100) times as wide as the one before; bounds are rounded, the last one is ``most``.
    Such windows add up to 100 experts, and the paper ends there. Here the initial width is taken again once a window
    would be narrower than one expert.
    """
    decay_factor = 1 - initial_window / 100
    width, bound, lower = float(initial_window), 0.0, 0
    while lower < most:
        bound += width
        upper = min(math.floor(bound + 0.5), most)
        yield DecayWindow(lower, upper)
        lower, width = upper, width * decay_factor
        if width < 1:
            width = float(initial_window)


def decay_window_search(
    throughput: Callable[[int], float], most: int, least: int = 1, options: WindowOptions = AS_IN_THE_PAPER
) -> WindowSearch:
    """Search the number of experts (section 4.4, equations 1 to 3). ``throughput(n)``: images/s with n experts.

    Equation 2's line is fitted by least squares to the throughputs at the first N upper bounds, numbered 1 to N. The
    window stops at N + 1 where the throughput is short of the line by more than the error margin. The throughput starts
    to drop in the window after the highest of the first N.

    Beyond the paper: a line without a rise, or the end of the memory, also stops the window, and the window up to the
    highest throughput is taken. Within the window, where the paper draws at random, the best of both bounds and the
    middle is chosen, of equal ones the most experts. No window ends below ``least`` experts. Raises ConfigError where
    no expert fits.
    """
    if most < 1:
        raise ConfigError("no expert fits into this memory - raise its budget")
    tried: dict[int, float] = {}
    steps: list[WindowStep] = []
    end = SearchEnd.MEMORY
    possible = [window for window in decay_windows(most, options.initial_window) if window.upper >= min(least, most)]
    for number, window in enumerate(possible, start=1):
        values = [step.images_per_s for step in steps]
        predicted = None
        if len(values) >= options.fit_values:
            line = linear_regression(range(1, number), values)
            if line.slope <= 0:
                end = SearchEnd.NO_RISE
                break
            predicted = line.slope * number + line.intercept
        value = tried[window.upper] = throughput(window.upper)
        error = None if predicted is None else (predicted - value) / predicted
        steps.append(WindowStep(number, window, value, predicted, error))
        if error is not None and error > options.error_margin:
            end = SearchEnd.BEND
            break
    of_the_line = steps[:-1] if end is SearchEnd.BEND else steps
    highest = max(of_the_line, key=lambda step: (step.images_per_s, step.number))
    chosen_window = steps[highest.number].window if end is SearchEnd.BEND else highest.window
    if chosen_window.middle not in tried:
        tried[chosen_window.middle] = throughput(chosen_window.middle)
    within = [count for count in tried if chosen_window.lower <= count <= chosen_window.upper]
    chosen = max(within, key=lambda count: (tried[count], count))
    return WindowSearch(tuple(steps), end, chosen_window, tried, chosen)


@dataclass(frozen=True, slots=True)
class ExecutorCounts:
    device: int
    cpu: int


@dataclass(slots=True)
class ExecutorSweep:
    """Runs each pair of counts once. ``steps``: throughputs in order; None where memory does not hold so many."""

    throughput: Callable[[ExecutorCounts], float | None]
    steps: dict[ExecutorCounts, float | None] = field(default_factory=dict)

    @property
    def best(self) -> ExecutorCounts | None:
        """The best run, of equal ones the one with the fewest executors; None where no run was possible."""
        able = [
            (value, -counts.device - counts.cpu, counts) for counts, value in self.steps.items() if value is not None
        ]
        return max(able, key=lambda each: each[:2])[2] if able else None

    def value(self, counts: ExecutorCounts) -> float | None:
        if counts not in self.steps:
            self.steps[counts] = self.throughput(counts)
        return self.steps[counts]

    def climb(self, ascending: Iterable[ExecutorCounts]) -> None:
        """Try counts until DECLINES in a row are no better than the best, or one cannot run."""
        best: float | None = None
        fallen = 0
        for counts in ascending:
            value = self.value(counts)
            if best is not None and (value is None or (fallen + 1 == DECLINES and value <= best)):
                return
            if value is not None:
                best, fallen = (value, 0) if best is None or value > best else (best, fallen + 1)


def executor_sweep(
    throughput: Callable[[ExecutorCounts], float | None], most_device: int, most_cpu: int
) -> ExecutorSweep:
    """Sweep device executors from 1 on beside one of the CPU, then, with the best count, CPU executors from none on.

    ``most_device`` 0: a box with a CPU only; ``most_cpu`` 0: a CPU that runs no experts. Each row ends after DECLINES
    counts in a row that are no better than its best. The paper begins with one CPU executor, and never tries none.
    """
    sweep = ExecutorSweep(throughput)
    beside = min(most_cpu, 1)
    if most_device:
        sweep.climb(ExecutorCounts(device, beside) for device in range(1, most_device + 1))
    best = sweep.best
    device = best.device if best else min(most_device, 1)
    sweep.climb(ExecutorCounts(device, cpu) for cpu in range(0 if device else 1, most_cpu + 1))
    return sweep
