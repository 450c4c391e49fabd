"""Traces on a running agent: requests come when the trace says, counted from its first arrival."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from agent.config import read_line
from profiler.replay.host_load import CoresInUse
from profiler.replay.images import experts_of, images_of
from profiler.replay.player import player
from profiler.workload.generated_line import LineRecipe, generate_line
from profiler.workload.traces import read_trace

RECIPE = LineRecipe(classifiers=2, architecture="squeezenet1_1", requests=4, memory_for=2, classifier_px=64, seed=3)
EIGHT_O_CLOCK_S = 28_800


@pytest.fixture
def config(tmp_path):
    return read_line(generate_line(tmp_path / "line", RECIPE).line, {"COSERVE__DEVICE": "cpu"})


def test_an_hour_cut_out_of_a_day_is_played_at_once(tmp_path, config):
    file = tmp_path / "morning.jsonl"
    rows = [{"t": EIGHT_O_CLOCK_S + 0.01 * n, "expert": f"cls/00{n % 2}"} for n in range(4)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trace = read_trace(file, config.catalog)
    assert [arrival.at_s for arrival in trace] == pytest.approx([0.0, 0.01, 0.02, 0.03])
    with player(config, experts_of(trace, config.catalog)) as stage:
        played = stage.play(trace, images_of(trace, config.catalog))
    assert trace[-1].at_s <= played.seconds < EIGHT_O_CLOCK_S
    assert all(0.0 <= wait_s <= played.seconds for wait_s in played.waits_s)
    assert played.unjudged(trace) == ()


class Cores(NamedTuple):
    """As psutil tells of all of them together."""

    user: float
    system: float
    idle: float


class Own(NamedTuple):
    """As psutil tells of a process and of its children that have ended."""

    user: float
    system: float
    children_user: float
    children_system: float


def test_what_a_process_has_its_children_do_no_others_took(monkeypatch):
    """By hand, of 100 s of all cores: 10 s idle, 20 s this process, 30 s its children, 40 s others."""
    moments = iter([(Cores(50.0, 10.0, 40.0), Own(1.0, 1.0, 2.0, 2.0)), (Cores(130.0, 20.0, 50.0), Own(19, 3, 28, 6))])
    now = {}

    def cpu_times():
        now["all"], now["own"] = next(moments)
        return now["all"]

    monkeypatch.setattr("profiler.replay.host_load.psutil.cpu_times", cpu_times)
    monkeypatch.setattr(
        "profiler.replay.host_load.psutil.Process", lambda: SimpleNamespace(cpu_times=lambda: now["own"])
    )
    assert CoresInUse().others_fraction() == pytest.approx(0.4)
