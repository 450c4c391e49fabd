"""The decay-window search: the paper's equations on hand-worked throughputs, and what it does beyond them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experts.errors import ConfigError
from profiler.allocation.decay_window import DecayWindow, SearchEnd, WindowOptions, decay_window_search, decay_windows


def upper_bounds(most, initial_window=15):
    return [window.upper for window in decay_windows(most, initial_window)]


class Measured:
    """Throughputs by number of experts; anything between two given ones lies on the line between them."""

    def __init__(self, **by_count):
        self.points = sorted((int(name.removeprefix("n")), value) for name, value in by_count.items())
        self.asked = []

    def __call__(self, experts):
        self.asked.append(experts)
        below = [point for point in self.points if point[0] <= experts]
        above = [point for point in self.points if point[0] >= experts]
        (left, low), (right, high) = (below or above)[-1 if below else 0], (above or below)[0 if above else -1]
        return low if left == right else low + (high - low) * (experts - left) / (right - left)


@pytest.mark.parametrize(
    ("most", "initial", "bounds"),
    [
        (60, 15, [15, 28, 39, 48, 56, 60]),  # 15; + 12.75 = 27.75; + 10.8375 = 38.5875; + 9.21... ; + 7.83...
        (80, 40, [40, 64, 78, 80]),  # 40, then 0.6 times as wide each: 24, 14.4, 8.64
        (160, 50, [50, 75, 88, 94, 97, 98, 148, 160]),  # the seventh would be 0.78 wide, so it is 50 again
    ],
)
def test_each_window_is_so_much_narrower_than_the_one_before(most, initial, bounds):
    assert upper_bounds(most, initial) == bounds


@given(st.integers(1, 1000), st.integers(1, 99))
def test_windows_lie_side_by_side_from_none_to_most(most, initial_window):
    windows = list(decay_windows(most, initial_window))
    assert [window.lower for window in windows] == [0, *(window.upper for window in windows[:-1])]
    assert windows[-1].upper == most
    assert all(window.lower < window.upper for window in windows)


def test_the_papers_task_a():
    """18 and 22 predict 26; 23.998 is 7.7 % short of it: the window is 28 to 39 (section 5.3)."""
    search = decay_window_search(Measured(n15=18.0, n28=22.0, n39=26 * (1 - 0.077), n40=1.0), most=60)
    assert search.window == DecayWindow(28, 39)
    assert search.end is SearchEnd.BEND
    assert [(step.number, step.window.upper) for step in search.steps] == [(1, 15), (2, 28), (3, 39)]
    assert [step.predicted for step in search.steps] == [None, None, pytest.approx(26.0)]
    assert search.steps[2].error == pytest.approx(0.077)


def test_the_line_is_the_least_squares_one_through_all_values_so_far():
    """10, 12, 13 fit 1.5 N + 26/3, so f(4) = 14.6667; 13 is 11.4 % short of it, and 13 of f(3) = 14 only 7.1 %."""
    measured = Measured(n15=10.0, n28=12.0, n39=13.0, n48=13.0)
    search = decay_window_search(measured, most=90, options=WindowOptions(error_margin=0.08))
    assert [step.predicted for step in search.steps[2:]] == [pytest.approx(14.0), pytest.approx(14 + 2 / 3)]
    assert [step.error for step in search.steps[2:]] == [pytest.approx(1 / 14), pytest.approx(1 - 39 / 44)]
    assert search.window == DecayWindow(39, 48)


@pytest.mark.parametrize(("value", "end"), [(9.4999, SearchEnd.BEND), (9.5001, SearchEnd.MEMORY)])
def test_the_margin_is_five_percent_of_the_line(value, end):
    search = decay_window_search(Measured(n15=6.0, n28=8.0, n39=value), most=39)
    assert search.end is end


def test_the_best_of_bounds_and_middle_is_chosen():
    middle = Measured(n15=18.0, n28=22.0, n34=25.4, n39=23.9)
    assert decay_window_search(middle, most=60).chosen == 34
    lower = Measured(n15=18.0, n28=25.0, n39=23.0)
    assert decay_window_search(lower, most=60).chosen == 28
    upper = Measured(n15=18.0, n28=22.0, n39=23.9)
    assert decay_window_search(upper, most=60).chosen == 39
    assert upper.asked == [15, 28, 39, 34]


@pytest.mark.parametrize(
    ("points", "most", "end", "window", "chosen"),
    [
        pytest.param(
            {"n15": 20.0, "n28": 10.0, "n39": 5.0}, 60, SearchEnd.NO_RISE, DecayWindow(0, 15), 15, id="drops at once"
        ),
        pytest.param(  # each value is less than 5 % short of its line, yet the line through all five falls
            {"n15": 10.0, "n28": 10.4, "n39": 10.3, "n48": 10.1, "n56": 9.8, "n62": 9.5},
            90,
            SearchEnd.NO_RISE,
            DecayWindow(15, 28),
            28,
            id="declines within the margin",
        ),
        pytest.param(
            {f"n{bound}": 10.0 + number for number, bound in enumerate(upper_bounds(60))},
            60,
            SearchEnd.MEMORY,
            DecayWindow(56, 60),
            60,
            id="rises to the end of the memory",
        ),
        pytest.param({"n2": 2.0, "n4": 4.0}, 4, SearchEnd.MEMORY, DecayWindow(0, 4), 4, id="a memory below one window"),
    ],
)
def test_the_search_ends_at_a_bend_or_without_a_rise_or_with_the_memory(points, most, end, window, chosen):
    search = decay_window_search(Measured(**points), most=most)
    assert (search.end, search.window, search.chosen) == (end, window, chosen)


def test_windows_below_the_least_are_passed_over():
    measured = Measured(n15=1.0, n39=10.0, n48=12.0, n56=9.0)
    search = decay_window_search(measured, most=60, least=30)
    assert measured.asked[:3] == [39, 48, 56]
    assert (search.window, search.chosen) == (DecayWindow(48, 56), 48)


@given(most=st.integers(40, 200), knee=st.integers(30, 200), start=st.floats(1.0, 50.0), drop=st.floats(0.2, 0.9))
def test_the_window_exactly_as_in_the_paper_finds_the_end_of_a_straight_rise(most, knee, start, drop):
    """Where each window adds as much as the one before, up to the knee, the search ends at the knee's window."""
    bounds = upper_bounds(most)
    reached = [number for number, bound in enumerate(bounds) if bound <= knee]
    last = len(reached)

    def throughput(experts):
        number = next(number for number, bound in enumerate(bounds) if experts <= bound) + 1
        return start + number if number <= last else (start + last) * (1 - drop)

    search = decay_window_search(throughput, most)
    if last < len(bounds):
        assert (search.end, search.window) == (SearchEnd.BEND, DecayWindow(bounds[last - 1], bounds[last]))
        assert search.chosen == bounds[last - 1]
    else:
        assert (search.end, search.chosen) == (SearchEnd.MEMORY, most)


def test_a_memory_without_room_is_refused_before_anything_runs():
    asked = Measured(n1=1.0)
    with pytest.raises(ConfigError, match="no expert fits into this memory - raise its budget"):
        decay_window_search(asked, most=0)
    assert asked.asked == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"initial_window": 0}, "--initial-window: 0 does not decay - take 1 to 99 experts"),
        ({"initial_window": 100}, "--initial-window: 100 does not decay"),
        ({"error_margin": 0.0}, "--error-margin: 0.0 never decides"),
        ({"error_margin": 1.0}, "take a fraction between 0 and 1"),
        ({"fit_values": 1}, "--fit-values: 1 throughputs make no line - take 2 or more"),
    ],
)
def test_options_without_meaning_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        WindowOptions(**options)
