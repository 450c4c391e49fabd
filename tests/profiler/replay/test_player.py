"""Traces on a running agent: requests come when the trace says, counted from its first arrival."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import pytest

from agent.config import read_line
from profiler.replay.host_load import CoresInUse
from profiler.workload.generated_line import LineRecipe, generate_line

RECIPE = LineRecipe(classifiers=2, architecture="squeezenet1_1", requests=4, memory_for=2, classifier_px=64, seed=3)


@pytest.fixture
def config(tmp_path):
    return read_line(generate_line(tmp_path / "line", RECIPE).line, {"COSERVE__DEVICE": "cpu"})


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
