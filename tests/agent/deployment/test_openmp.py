"""How long OpenMP's threads wait is settled before torch is loaded: seen by the process, and by the library itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from PIL import Image

from agent.config import read_line
from agent.deployment.build import detect_box
from agent.device_profile.identity import identity_of
from agent.device_profile.openmp import DEFAULT, SPINNING, VARIABLES
from agent.device_profile.records import Allocation, KindProfile, LinkSpeed, SpinTimes, UsageProfile
from agent.device_profile.store import ProfileDraft

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


class Line:
    """One fake expert; a profile that chose a setting, as far as a start asks for one."""

    def __init__(self, folder):
        self.folder = folder
        fake = {"architecture": "fake", "weights": "f.yaml", "labels": ["ok", "bad"], "input": {"size": [8, 8]}}
        (folder / "f.yaml").write_text(json.dumps({"weight_bytes": 1000, "label": "ok"}))
        self.document = {
            "line": "test",
            "state": "./state",
            "experts": {"cls/f": fake},
            "routes": {"c": [{"expert": "cls/f", "pass": ["ok"]}]},
            "memory": {"host": "20MiB", "workspace": "10MiB"},
            "device": "cpu",
        }
        self.file = folder / "line.yaml"
        self.file.write_text(yaml.safe_dump(self.document))
        Image.new("RGB", (8, 8)).save(folder / "image.png")

    def profiled(self, setting):
        config = read_line(self.file, {})
        path = config.profile_file
        kind = KindProfile(
            "fake 8x8 unit", "fake", "cpu", "fp32", 1, 0.001, 0.001, 0.0, 4, 1000, 0, 0, {"ssd": 0.001}, (), "synthetic"
        )
        with ProfileDraft.open(path, "test", identity_of(detect_box(config))) as draft:
            draft.save_links([LinkSpeed("ssd", 1e9)])
            draft.save_kind(kind)
            draft.save_precisions({(kind.kind, "cpu"): "fp32"})
            draft.save_packed({})
            draft.save_usage(UsageProfile({"cls/f": 1.0}, {}, "served", 1))
            draft.save_allocation(Allocation("casual", {}, (), {"cpu": 1}))
            draft.save_spinning([SpinTimes(setting, (0.1,), (0.2,), is_chosen=True)])
            draft.finish()
        return path

    def start(self, *arguments, ends_at_torch=True, **environment):
        """What a command's process has in its environment when torch is first asked for; and its stderr."""
        kept = {name: value for name, value in os.environ.items() if name not in VARIABLES}
        done = subprocess.run(
            [sys.executable, "-c", WATCHED % (sorted(VARIABLES), ends_at_torch), *map(str, arguments)],
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


def test_an_agent_waits_as_its_profile_says_and_the_library_that_torch_loads_sees_it(line):
    line.profiled("short")
    seen, told = line.start(*inspecting(line), ends_at_torch=False, OMP_DISPLAY_ENV="VERBOSE")
    assert seen == SPINNING["short"]
    if "GOMP_SPINCOUNT" in told:  # GNU's library tells what it has read; other ones have no such variable
        assert "GOMP_SPINCOUNT = '1000'" in told


def commands(line):
    trace = line.folder / "trace.jsonl"
    trace.write_text("")
    return [
        ("serve", line.file),
        ("bench", line.file, "--trace", trace),
        ("bench", "overhead", line.file, "--trace", trace),
        ("profile", line.file, "--casual"),
    ]


@pytest.mark.parametrize("number", range(4), ids=["serve", "bench", "bench overhead", "profile"])
def test_every_command_that_runs_the_line_sets_it_before_torch_is_loaded(line, number):
    line.profiled("none")
    seen, _ = line.start(*commands(line)[number])
    assert seen == {"GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}


@pytest.mark.parametrize("variable", sorted(VARIABLES))
def test_what_whoever_starts_it_has_set_comes_first(line, variable):
    line.profiled("short")
    assert line.start(*inspecting(line), **{variable: "1"})[0] == {variable: "1"}


def test_without_a_profile_or_with_a_default_or_a_damaged_one_it_is_our_default(line):
    """Not the library's, which is milliseconds."""
    assert line.start(*inspecting(line))[0] == SPINNING[DEFAULT]
    path = line.profiled("default")
    assert line.start(*inspecting(line))[0] == SPINNING[DEFAULT]
    path.write_bytes(path.read_bytes()[:500])
    seen, told = line.start(*inspecting(line), ends_at_torch=False)
    assert seen == SPINNING[DEFAULT]
    assert str(path) in told
