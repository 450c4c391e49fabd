"""Parts of the proof: a real agent's start, the cost of open pages, and an Engine that decides all the time."""

import os
import signal
import socket
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest

from experts.errors import CoServeError
from profiler.workload.traces import board_trace
from proof.parts.decisions import (
    decision_targets,
    measure_decisions,
    measure_growth,
    measure_workers,
    workers_target,
)
from proof.parts.pages import PAGES, measure_pages
from proof.parts.starting import StartTimes, measure_start, start_once
from tests.agent.service.fake_line import FakeLine

ROOT = Path(__file__).parents[3]
DEADLINE_S = 120.0
TELLS_ITS_ID = """
import os, socket, sys
if "serve" in sys.orig_argv:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.sendto(str(os.getpid()).encode(), os.environ["TOLD"])
"""  # every Python that finds it as sitecustomize runs it


@pytest.mark.slow
def test_agent_is_started_and_ended_and_leaves_nothing(tmp_path):
    found = measure_start(tmp_path, starts=1, warm=False)
    (times,) = found.rows
    assert times.starts == 1
    assert min(times.ready_s, times.resident_bytes, times.stop_s) > 0
    assert list(tmp_path.iterdir()) == []


def test_agent_that_does_not_start_is_reported_in_its_own_words(tmp_path):
    line = tmp_path / "line.yaml"
    line.write_text("line: l\nstate: ./state\nexpert: {}\n")
    with pytest.raises(CoServeError, match=r"(?s)ended by itself.*line\.yaml:3:1: expert: ") as refused:
        start_once(line)
    assert "not ready" in str(refused.value)


@pytest.mark.slow
def test_interrupted_start_command_leaves_no_agent_and_no_file(tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (tmp_path / "sitecustomize.py").write_text(TELLS_ITS_ID)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "TOLD": str(tmp_path / "told")}
    command = [sys.executable, "-m", "coserve", "bench", "start", "--dir", str(scratch), "--starts", "1000"]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.bind(environment["TOLD"])
        told.settimeout(DEADLINE_S)
        with subprocess.Popen(command, cwd=ROOT, env=environment) as bench:
            try:
                agent = psutil.Process(int(told.recv(32)))
                assert len(list(scratch.iterdir())) == 1
            finally:
                bench.terminate()
            assert bench.wait(DEADLINE_S) == 128 + signal.SIGTERM
    assert not agent.is_running()
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize(("ready_s", "resident_bytes", "reached"), [(10.0, 4e8, True), (10.1, 400_000_001, False)])
def test_missed_start_targets_are_reported(ready_s, resident_bytes, reached):
    assert {target.reached for target in StartTimes(3, ready_s, resident_bytes, 300_000_000, 2.0).targets} == {reached}


@pytest.mark.slow
def test_served_line_is_fed_with_pages_and_without_in_turns(tmp_path):
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


@pytest.mark.parametrize("policy", ["coserve", *(pytest.param(n, marks=pytest.mark.slow) for n in ("paper", "samba"))])
def test_both_halves_have_ended_batches_and_loads(policy):
    half, whole = (measure_decisions(500, calls, policy) for calls in (1000, 2000))
    first = {name: asdict(half)[name] for name in ("batches", "loads", "evictions")}
    second = {name: asdict(whole)[name] - count for name, count in first.items()}
    assert min(first.values()) > 10
    assert all(second[name] > count / 2 for name, count in first.items())


def test_longer_queue_is_a_row_and_growth_a_target():
    found = measure_growth((100, 400), 200, 70)
    assert [(row.workers, row.queued) for row in found.rows] == [(1, 100), (1, 400), (1, 300), (32, 9600)]
    assert "policy coserve" in found.text()
    assert all(0 < row.over_inference < 1 for row in found.rows)
    at_target = replace(found.rows[1], queued=10_000, cpu_an_image_s=101e-6)
    of_image, growth = decision_targets((replace(found.rows[0], cpu_an_image_s=75e-6), at_target))
    assert (of_image.found, of_image.reached) == ("101 us", False)
    assert (growth.found, growth.reached) == ("1.35", True)


def test_every_worker_works_and_the_time_of_many_is_compared_with_one():
    one, three = (measure_workers(workers, 1500, experts=100) for workers in (1, 3))
    assert (one.queued, three.queued) == (300, 900)
    assert min(one.batches, one.loads, three.batches, three.loads) > 10
    told = workers_target(replace(one, cpu_p99_s=100e-6), replace(three, cpu_p99_s=201e-6))
    assert (told.found, told.reached) == ("2.01", False)
