"""The wait of OpenMP's threads is set before torch is loaded: seen by the process, and by the library."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from agent.environment import SPINNING, SPINNING_VARIABLES, set_spinning
from tests.agent.line_files import LineFile, expert, fake, route

ROOT = Path(__file__).parents[3]
PATIENCE_S = 120.0
WATCHED = """
import json, os, runpy, sys

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch" and not hasattr(Watch, "seen"):
            Watch.seen = {each: os.environ.get(each) for each in %r}
            if %r:
                sys.exit()

sys.meta_path.insert(0, Watch())
import atexit
atexit.register(lambda: print("AT TORCH", json.dumps(getattr(Watch, "seen", "not loaded"))))
sys.argv = ["coserve", *sys.argv[1:]]
runpy.run_path("coserve.py", run_name="__main__")
"""


class Line(LineFile):
    """One fake expert."""

    def __init__(self, folder):
        memory = {"host": "20MiB", "workspace": "10MiB"}
        super().__init__(
            folder, experts={"cls/f": expert("f.yaml")}, routes={"c": route("cls/f")}, memory=memory, device="cpu"
        )
        fake(folder / "f.yaml", 1000)
        self.write()
        Image.new("RGB", (8, 8)).save(folder / "image.png")

    def start(self, *arguments, ends_at_torch=True, **environment):
        """Environment of a command's process at its first import of torch; and its stderr."""
        kept = {name: value for name, value in os.environ.items() if name not in SPINNING_VARIABLES}
        done = subprocess.run(
            [sys.executable, "-c", WATCHED % (sorted(SPINNING_VARIABLES), ends_at_torch), *map(str, arguments)],
            cwd=ROOT,
            env=kept | environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        told = [each.removeprefix("AT TORCH ") for each in done.stdout.splitlines() if each.startswith("AT TORCH ")]
        return {name: value for name, value in json.loads(told[-1]).items() if value is not None}, done.stderr


@pytest.fixture
def line(tmp_path):
    return Line(tmp_path)


def inspecting(line):
    return "inspect", line.file, line.folder / "image.png", "--component", "c"


@pytest.mark.slow
def test_agent_spins_ten_thousand_pauses_and_torchs_library_sees_it(line):
    """The library's default is milliseconds."""
    seen, told = line.start(*inspecting(line), ends_at_torch=False, OMP_DISPLAY_ENV="VERBOSE")
    assert seen == SPINNING
    if "GOMP_SPINCOUNT" in told:  # GNU's library tells what it has read; other ones have no such variable
        assert "GOMP_SPINCOUNT = '10000'" in told


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("serve", ()),
        ("profile", ("--casual",)),
        pytest.param("bench", ("--trace", "/dev/null"), marks=pytest.mark.slow),
    ],
)
def test_every_command_that_runs_the_line_sets_spinning_before_torch_loads(line, before, after):
    assert line.start(*before.split(), line.file, *after)[0] == SPINNING


@pytest.mark.parametrize("variable", sorted(SPINNING_VARIABLES))
def test_environment_variable_overrides_the_spin_count(monkeypatch, variable):
    for name in SPINNING_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "1")
    set_spinning()
    assert {name: os.environ[name] for name in SPINNING_VARIABLES if name in os.environ} == {variable: "1"}
