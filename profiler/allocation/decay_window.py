"""Decay-window search for the number of experts to keep room for (CoServe, section 4.4, equations 1 to 3).

Guarantees: pure but for the given throughput, which is asked once for each number of experts; deterministic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from statistics import linear_regression
from typing import TYPE_CHECKING

from experts.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

INITIAL_WINDOW = 15  # experts (section 5.3)
ERROR_MARGIN = 0.05  # section 5.3
FIT_VALUES = 2  # throughputs that make a line, at least


@dataclass(frozen=True, slots=True)
class WindowOptions:
    """Raises ConfigError, naming the option, for values that no search can work with."""

    initial_window: int = INITIAL_WINDOW
    error_margin: float = ERROR_MARGIN
    fit_values: int = FIT_VALUES

    def __post_init__(self) -> None:
        if not 1 <= self.initial_window < 100:
            raise ConfigError(f"--initial-window: {self.initial_window} does not decay - take 1 to 99 experts")
        if not 0 < self.error_margin < 1:
            raise ConfigError(f"--error-margin: {self.error_margin} never decides - take a fraction between 0 and 1")
        if self.fit_values < FIT_VALUES:
            raise ConfigError(f"--fit-values: {self.fit_values} throughputs make no line - take {FIT_VALUES} or more")


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
    """The throughput at one window's upper bound. ``predicted``, ``error``: of equations 2 and 3; None before a fit."""

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
    """Windows from 0 to ``most`` experts, side by side (section 4.4, equation 1).

    Each is (1 - initial window / 100) times as wide as the one before; bounds are rounded, the last one is ``most``.
    Such a row adds up to 100 experts, and the paper ends there. Here the row starts again with the initial width once
    a window would be narrower than one expert.
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

    The paper leaves open: the fewest throughputs of a line; that a line without a rise, or the end of the memory, stops
    the window, too, and the window up to the highest throughput is taken; and the choice within the window, which it
    draws at random. Here the best of both bounds and the middle is chosen, of equal ones the most experts. No window
    ends below ``least`` experts. Raises ConfigError where no expert fits.
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
    chosen_window = _window_of_the_drop(steps, end)
    if chosen_window.middle not in tried:
        tried[chosen_window.middle] = throughput(chosen_window.middle)
    within = [count for count in tried if chosen_window.lower <= count <= chosen_window.upper]
    chosen = max(within, key=lambda count: (tried[count], count))
    return WindowSearch(tuple(steps), end, chosen_window, tried, chosen)


def _window_of_the_drop(steps: Sequence[WindowStep], end: SearchEnd) -> DecayWindow:
    if end is SearchEnd.BEND:
        before = steps[:-1]
        highest = max(before, key=lambda step: (step.images_per_s, step.number))
        return steps[highest.number].window
    return max(steps, key=lambda step: (step.images_per_s, step.number)).window
