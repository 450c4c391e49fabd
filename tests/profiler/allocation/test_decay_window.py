"""Searches over throughputs: the paper's equations on hand-worked figures, and what goes beyond them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experts.errors import ConfigError
from profiler.allocation.decay_window import (
    DecayWindow,
    ExecutorCounts,
    SearchEnd,
    WindowOptions,
    decay_window_search,
    decay_windows,
    executor_sweep,
)


def upper_bounds(most, initial_window=15):
    return [window.upper for window in decay_windows(most, initial_window)]


class Measured:
    """Throughputs by number of experts, linear between two given ones."""

    def __init__(self, points):
        self.points = sorted(points.items())
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
        (160, 50, [50, 75, 88, 94, 97, 98, 148, 160]),  # the seventh would be 0.78 wide, so it is 50 again
    ],
)
def test_each_decay_window_is_narrower_by_the_factor(most, initial, bounds):
    assert upper_bounds(most, initial) == bounds


@given(st.integers(1, 1000), st.integers(1, 99))
def test_decay_windows_are_adjacent_from_empty_to_the_largest(most, initial_window):
    windows = list(decay_windows(most, initial_window))
    assert [window.lower for window in windows] == [0, *(window.upper for window in windows[:-1])]
    assert windows[-1].upper == most
    assert all(window.lower < window.upper for window in windows)


def test_decay_window_reproduces_the_papers_task_a():
    """18 and 22 predict 26; 23.998 is 7.7 % short of it: the window is 28 to 39 (section 5.3)."""
    search = decay_window_search(Measured({15: 18.0, 28: 22.0, 39: 26 * (1 - 0.077), 40: 1.0}), most=60)
    assert (search.window, search.end) == (DecayWindow(28, 39), SearchEnd.BEND)
    assert [(step.number, step.window.upper) for step in search.steps] == [(1, 15), (2, 28), (3, 39)]
    assert [step.predicted for step in search.steps] == [None, None, pytest.approx(26.0)]
    assert search.steps[2].error == pytest.approx(0.077)


def test_fitted_line_is_the_least_squares_one_through_all_values():
    """10, 12, 13 fit 1.5 N + 26/3, so f(4) = 14.6667; 13 is 11.4 % short of it, and 13 of f(3) = 14 only 7.1 %."""
    measured = Measured({15: 10.0, 28: 12.0, 39: 13.0, 48: 13.0})
    search = decay_window_search(measured, most=90, options=WindowOptions(error_margin=0.08))
    assert [step.predicted for step in search.steps[2:]] == [pytest.approx(14.0), pytest.approx(14 + 2 / 3)]
    assert [step.error for step in search.steps[2:]] == [pytest.approx(1 / 14), pytest.approx(1 - 39 / 44)]
    assert search.window == DecayWindow(39, 48)


@pytest.mark.parametrize(
    ("points", "most", "end", "window", "chosen"),
    [
        pytest.param({15: 6.0, 28: 8.0, 39: 9.4999}, 39, SearchEnd.BEND, (28, 39), 39, id="5 % short of the line"),
        pytest.param({15: 6.0, 28: 8.0, 39: 9.5001}, 39, SearchEnd.MEMORY, (28, 39), 39, id="hardly short of it"),
        pytest.param({15: 18, 28: 22, 34: 25.4, 39: 23.9}, 60, SearchEnd.BEND, (28, 39), 34, id="best in the middle"),
        pytest.param({15: 18.0, 28: 25.0, 39: 23.0}, 60, SearchEnd.BEND, (28, 39), 28, id="best at the lower bound"),
        pytest.param({15: 20.0, 28: 10.0, 39: 5.0}, 60, SearchEnd.NO_RISE, (0, 15), 15, id="drops at once"),
        pytest.param(  # each value is less than 5 % short of its line, yet the line through all five falls
            {15: 10.0, 28: 10.4, 39: 10.3, 48: 10.1, 56: 9.8, 62: 9.5},
            90,
            SearchEnd.NO_RISE,
            (15, 28),
            28,
            id="declines within the margin",
        ),
        pytest.param({2: 2.0, 4: 4.0}, 4, SearchEnd.MEMORY, (0, 4), 4, id="a memory below one window"),
    ],
)
def test_search_ends_at_a_bend_without_a_rise_or_with_the_memory(points, most, end, window, chosen):
    search = decay_window_search(Measured(points), most=most)
    assert (search.end, search.window, search.chosen) == (end, DecayWindow(*window), chosen)


def test_windows_below_the_least_are_skipped():
    measured = Measured({15: 1.0, 39: 10.0, 48: 12.0, 56: 9.0})
    search = decay_window_search(measured, most=60, least=30)
    assert measured.asked[:3] == [39, 48, 56]
    assert (search.window, search.chosen) == (DecayWindow(48, 56), 48)


@given(most=st.integers(40, 200), knee=st.integers(30, 200), start=st.floats(1.0, 50.0), drop=st.floats(0.2, 0.9))
def test_papers_own_window_finds_the_end_of_a_straight_rise(most, knee, start, drop):
    """Where each window adds as much as the one before, up to the knee, the search ends at the knee's window."""
    bounds = upper_bounds(most)
    last = sum(bound <= knee for bound in bounds)

    def throughput(experts):
        number = next(number for number, bound in enumerate(bounds) if experts <= bound) + 1
        return start + number if number <= last else (start + last) * (1 - drop)

    search = decay_window_search(throughput, most)
    if last < len(bounds):
        assert (search.end, search.window) == (SearchEnd.BEND, DecayWindow(bounds[last - 1], bounds[last]))
        assert search.chosen == bounds[last - 1]
    else:
        assert (search.end, search.chosen) == (SearchEnd.MEMORY, most)


def test_memory_without_room_is_refused_before_anything_runs():
    measured = Measured({1: 1.0})
    with pytest.raises(ConfigError, match="no expert fits into this memory - raise its budget"):
        decay_window_search(measured, most=0)
    assert measured.asked == []


@pytest.mark.parametrize(
    ("device", "cpu", "run", "best"),
    [
        pytest.param(
            [0, 10, 18, 25, 24, 23, 99],
            [0, 2, 1, 0.5, 9],
            [(1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (3, 0), (3, 2), (3, 3)],
            (3, 1),
            id="the paper's order: two declines end a row",
        ),
        pytest.param([0, 10, 9, 12, 11, 10], [0], [(n, 0) for n in range(1, 6)], (3, 0), id="one decline does not"),
        pytest.param([0, 10, 9], [3, 2, 1], None, (1, 0), id="best without the CPU"),
        pytest.param([5] * 5, [0] * 5, None, (1, 0), id="of equal throughputs the fewest executors"),
        pytest.param([0], [0, 4, 6, 7, 6, 5, 9, 9, 9], [(0, n) for n in range(1, 6)], (0, 3), id="a CPU only"),
        pytest.param([0, 1, 2, None], [0], [(1, 0), (2, 0), (3, 0)], (2, 0), id="a row ends where the memory does"),
    ],
)
def test_sweep_equals_one_by_hand(device, cpu, run, best):
    """A throughput made of one part by device executors and one by CPU executors; None: no room."""

    def throughput(counts):
        parts = device[counts.device], cpu[counts.cpu]
        return None if None in parts else sum(parts)

    sweep = executor_sweep(throughput, most_device=len(device) - 1, most_cpu=len(cpu) - 1)
    assert run is None or [(counts.device, counts.cpu) for counts in sweep.steps] == run
    assert sweep.best == ExecutorCounts(*best)


@given(
    st.lists(st.integers(0, 50), min_size=7, max_size=7),
    st.lists(st.integers(0, 50), min_size=5, max_size=5),
    st.integers(0, 6),
    st.integers(0, 4),
)
def test_sweep_runs_nothing_twice_and_finds_the_best_of_its_runs(device, cpu, most_device, most_cpu):
    asked = []

    def throughput(counts):
        asked.append(counts)
        return float(device[counts.device] + cpu[counts.cpu])

    sweep = executor_sweep(throughput, most_device, most_cpu)
    assert len(asked) == len(set(asked))
    assert all(counts.device + counts.cpu >= 1 for counts in asked)
    assert sweep.best == max(sweep.steps, key=lambda each: (sweep.steps[each], -each.device - each.cpu), default=None)
