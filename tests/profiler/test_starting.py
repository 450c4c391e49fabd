"""Starting a real agent: it is timed, ended and cleaned up; one that cannot start is told by its own words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from experts.errors import CoServeError
from profiler.starting import StartTimes, measure_start, report, start_once

TIMES = StartTimes(starts=3, ready_s=6.2, resident_bytes=380_000_000, stop_s=2.0)


def test_an_agent_is_started_and_ended_and_leaves_nothing(tmp_path):
    times = measure_start(tmp_path, starts=1, warm=False)
    assert times.starts == 1
    assert min(times.ready_s, times.resident_bytes, times.stop_s) > 0
    assert list(tmp_path.iterdir()) == []


def test_an_agent_that_does_not_start_is_told_by_its_own_words(tmp_path):
    line = tmp_path / "line.yaml"
    line.write_text("line: l\nstate: ./state\nexpert: {}\n")
    with pytest.raises(CoServeError, match=r"(?s)ended by itself.*line\.yaml:3:1: expert: ") as refused:
        start_once(line)
    assert "not ready" in str(refused.value)


def test_no_start_is_no_measurement(tmp_path):
    with pytest.raises(ValueError, match="0 starts"):
        measure_start(tmp_path, starts=0)


def test_targets_that_are_reached_are_said():
    text = report(TIMES)
    for part in ("6.2 s, target 10 s: reached", "380 MB, target 400 MB: reached", "2.0 s"):
        assert part in text
    assert TIMES.meets_targets


def test_targets_that_are_missed_are_said():
    missed = replace(TIMES, ready_s=10.1, resident_bytes=400_000_001)
    assert report(missed).count("SHORT of its target") == 2
    assert not missed.meets_targets
