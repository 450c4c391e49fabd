"""The cost of open pages, measured on a line of fakes; and its interval."""

import pytest

from profiler.workload.traces import board_trace
from proof.parts.pages import PAGES, measure_pages
from tests.agent.service.fake_line import FakeLine


@pytest.mark.slow
def test_a_served_line_is_fed_with_pages_and_without_by_turns(tmp_path):
    line = FakeLine(tmp_path)
    line.fake(0, label="bad", K_s=0.2)
    steps = []
    measured = measure_pages(line.config, board_trace(line.config, 1, 0), 2, None, lambda *step: steps.append(step))
    (cost,) = measured.rows
    assert (cost.pairs, cost.images, cost.pages) == (2, 2, f"{PAGES} clients")
    assert cost.low < cost.ratio < cost.high
    assert 0 < cost.images_per_s < 10
    assert cost.cpu_ratio > 0
    assert steps == [(1, 3), (2, 3), (3, 3)]
    assert '"image 200"' in measured.notes[1]
    assert "[" in measured.targets[0].found
    assert [each.name for each in line.config.state.iterdir() if each.name.startswith("bench-pages")] == []
