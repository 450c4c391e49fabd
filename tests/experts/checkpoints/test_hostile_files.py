"""Hundreds of hostile and damaged files, 2000 in `make test-all`: nothing runs, each ends in one line or in weights.

All are read in one process under the limits of a real reading, with every request to the interpreter watched; some of
them go all the way, each in a process of its own.
"""

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from experts.checkpoints import reading
from experts.checkpoints.reading import read_checkpoint
from experts.errors import WeightsCorrupt, WeightsRefused

ROOT = Path(__file__).parents[3]
SEED = 12
EVERY = 100  # of these files one goes all the way
ENDS = {"read", "WeightsRefused", "WeightsCorrupt"}
CPYTHON_SAYS = "SystemError: deallocated bytearray object has exported buffers\n"  # where memory for one is refused
MEMORY_BYTES, TIME_S = 2_000_000_000, 30.0


def beside(name):
    """A module that lies beside this one, where no package is."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def canaries(tmp_path_factory):
    """Where something would be if anything had been run: a file, and a port at which nobody may knock."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        yield tmp_path_factory.mktemp("canary") / "it-ran", listening


@pytest.fixture(scope="module", params=[700, pytest.param(2000, marks=pytest.mark.slow)])
def folder(request, tmp_path_factory, canaries):
    marker, listening = canaries
    made = tmp_path_factory.mktemp("hostile")
    for number, content in enumerate(
        beside("hostile").hostile_files(request.param, SEED, marker, listening.getsockname()[1])
    ):
        (made / f"{number:04}.pt").write_bytes(content)
    return made


def ended(path):
    try:
        return read_checkpoint(path).where
    except (WeightsRefused, WeightsCorrupt) as error:
        return str(error)


def assert_untouched(canaries):
    marker, listening = canaries
    assert not marker.exists()
    assert beside("hostile").VARIABLE not in os.environ
    with pytest.raises(BlockingIOError):
        listening.accept()


def test_hostile_files_end_in_one_line_and_run_nothing(folder, canaries):
    reading = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("read_all.py")), str(folder)],
        capture_output=True, text=True, timeout=600, check=False, cwd=ROOT, env={"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (reading.returncode, reading.stderr.replace(CPYTHON_SAYS, "")) == (0, "")
    told = json.loads(reading.stdout)
    assert len(told["outcomes"]) == len(list(folder.glob("*.pt")))
    assert [line for line, _ in told["outcomes"].values() if line.partition(":")[0] not in ENDS] == []
    assert {line.partition(":")[0] for line, _ in told["outcomes"].values()} == ENDS  # it is no test of one thing alone
    assert (told["seen"], told["same_environment"]) == ([], True)
    assert [line for line, _ in told["outcomes"].values() if "\n" in line or len(line) > 500] == []
    assert max(seconds for _, seconds in told["outcomes"].values()) < TIME_S
    assert told["peak_bytes"] < MEMORY_BYTES
    assert_untouched(canaries)


def test_hostile_files_run_nothing_on_the_whole_way(folder, canaries):
    for path in sorted(folder.glob("*.pt"))[::EVERY]:
        assert "\n" not in ended(path)
    assert_untouched(canaries)


def test_file_that_would_end_the_process_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "LIMIT_S_PER_GB", 3)
    for number, content in enumerate(beside("hostile").process_bombs()):
        (tmp_path / f"{number}.pt").write_bytes(beside("hostile").archive(content))
        with pytest.raises((WeightsRefused, WeightsCorrupt), match=rf"{number}\.pt.*no weights do"):
            read_checkpoint(tmp_path / f"{number}.pt")
