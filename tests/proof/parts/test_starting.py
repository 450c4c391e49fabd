"""A real agent is timed, ended and cleaned up; one that cannot start is reported with the end of its log."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from experts.errors import CoServeError
from proof.parts.starting import StartTimes, measure_start, start_once

ROOT = Path(__file__).parents[3]
DEADLINE_S = 120.0
TELLS_ITS_ID = """
import os, socket, sys
if "serve" in sys.orig_argv:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.sendto(str(os.getpid()).encode(), os.environ["TOLD"])
"""  # every Python that finds it as sitecustomize runs it


@pytest.mark.slow
def test_an_agent_is_started_and_ended_and_leaves_nothing(tmp_path):
    found = measure_start(tmp_path, starts=1, warm=False)
    (times,) = found.rows
    assert times.starts == 1
    assert min(times.ready_s, times.resident_bytes, times.stop_s) > 0
    assert list(tmp_path.iterdir()) == []


def test_an_agent_that_does_not_start_is_told_by_its_own_words(tmp_path):
    line = tmp_path / "line.yaml"
    line.write_text("line: l\nstate: ./state\nexpert: {}\n")
    with pytest.raises(CoServeError, match=r"(?s)ended by itself.*line\.yaml:3:1: expert: ") as refused:
        start_once(line)
    assert "not ready" in str(refused.value)


@pytest.mark.slow
def test_no_agent_and_no_file_is_left_when_the_command_is_ended_half_way(tmp_path):
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
def test_targets_tell_what_is_missed(ready_s, resident_bytes, reached):
    assert {target.reached for target in StartTimes(3, ready_s, resident_bytes, 2.0).targets} == {reached}
