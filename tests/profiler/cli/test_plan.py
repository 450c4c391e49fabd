"""``coserve plan`` as it is typed: what it prints, from manifests and a profile alone, and what it refuses."""

import json
import shutil
import sqlite3

import pytest
import yaml

from agent.config import read_line
from agent.runtime.measuring.batches import BatchOptions
from experts.expert import Precision
from experts.packed.packing import pack_line
from experts.packed.weights import SegmentStore
from profiler.allocation.step import CASUAL
from profiler.profiling.profile_line import ProfilingOptions, profile_line
from tests.commands import coserve
from tests.profiler.lines import fakes, write_line

MIB = 2**20
EXPERTS = 4


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    """A line of four fakes of 3 MiB, one route each, profiled; tests copy it."""
    folder = tmp_path_factory.mktemp("line")
    document = fakes(EXPERTS) | {
        "boards": {"main": {"components": {"c0": 4, "c1": 3, "c2": 2, "c3": 1}, "takt_s": 5.0}},
        "memory": {"host": "64MiB"},
        "precision": "fp32",
        "executors": {"cpu": 1},
    }
    config = write_line(folder, document, weight_bytes=3 * MIB)
    options = ProfilingOptions(allocation=CASUAL, batches=BatchOptions(sizes=(1, 2), repeats=1, limit_s=0.5))
    profile_line(config, options, lambda *_: None)
    return folder


@pytest.fixture
def line(profiled, tmp_path):
    shutil.copytree(profiled, tmp_path / "line")
    return tmp_path / "line" / "line.yaml"


def plan(line, *words, check=0):
    return coserve("plan", line, *words, check=check)


def rows(line, *words):
    return json.loads(plan(line, *words, "--json").stdout)["rows"]


def trace(line):
    file = line.parent / "trace.jsonl"
    file.write_text(json.dumps({"t": 0.0, "expert": "cls/f2"}) + "\n")
    return file


def snapshot(folder):
    return {path: path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}


def test_plan_has_a_row_for_each_policy_and_memory(line):
    words = ("--policy", "coserve", "--policy", "samba", "--memory", "46MiB", "--memory", "host=1GiB")
    found = rows(line, *words)
    told = [(row["policy"], row["memory"]["host"] + row["memory"]["host_workspace"]) for row in found]
    sizes = (46 * MIB, 1024 * MIB)
    assert told == [(policy, size) for size in sizes for policy in ("coserve", "samba")]
    assert all(row["requests"] == 20 * 10 for row in found)  # twenty boards, where no trace is given
    assert found[2]["bound"]["switches"] == 0
    assert found == rows(line, *words)


def test_invalid_profile_is_planned_with_and_noted(line):
    config = read_line(line, {})
    pack_line(config.catalog.experts.values(), lambda _: {Precision.FP32}, SegmentStore(config.packed_folder))
    assert "note:" not in plan(line, "--boards", "2").stderr  # now that what was copied is known to be the same
    document = yaml.safe_load(line.read_text())
    weights = line.parent / "fake.yaml"
    weights.write_text(weights.read_text() + " ")
    with sqlite3.connect(read_line(line, {}).profile_file) as database:
        database.execute("UPDATE profile SET cores = cores + 1")
    told = plan(line, "--boards", "2").stderr
    note = "note: an agent that starts now would not use all of the profile: "
    assert told.count(note) == 1 + len(document["experts"])
    assert "the weights file of cls/f0 was written after packing" in told


def test_memory_that_is_too_small_hides_no_row_of_others(line):
    words = ("--policy", "coserve", "--policy", "samba", "--memory", "2MiB", "--memory", "46MiB", "--boards", "2")
    done = plan(line, *words, "--json")
    told = json.loads(done.stdout)
    assert [row["policy"] for row in told["rows"]] == ["coserve", "samba"]
    assert {row["memory"]["host"] + row["memory"]["host_workspace"] for row in told["rows"]} == {46 * MIB}
    assert told["rows"] == rows(line, *words[:4], *words[6:])
    assert told["advice"]["budget_bytes"] == {"host": 46 * MIB}  # of the first that was planned
    assert [(each["policy"], each["memory"]) for each in told["refused"]] == [("coserve", "2MiB"), ("samba", "2MiB")]
    for each in told["refused"]:
        assert "experts.cls/f0: needs 3.0 MiB, but memory.host leaves" in each["reason"]
        assert f"not planned: {each['policy']} with --memory 2MiB: {each['reason']}" in done.stderr
    table = plan(line, *words).stdout.splitlines()
    assert [text.split()[:3] for text in table[1:3]] == [["coserve", "46.0", "MiB"], ["samba", "46.0", "MiB"]]


def test_options_of_plan_override_the_line(line):
    (slow,) = rows(line, "--ssd-bandwidth", "1MB/s", "--executors", "cpu=2", "--boards", "2")
    assert slow["executors"] == {"cpu": 2}
    file = trace(line)
    (one,) = rows(line, "--trace", file, "--policy", "samba", "--memory", "host=64MiB,workspace=61000000B")
    assert one["memory"]["host_workspace"] == 61_000_000
    told = plan(line, "--trace", file, "--boards", "7", check=2).stderr
    assert "Invalid value for --boards: boards are of the generated trace" in " ".join(told.replace("│", " ").split())


def test_manifests_and_a_profile_suffice_and_nothing_is_written(line, tmp_path):
    elsewhere = read_line(line, {}).profile_file.rename(tmp_path / "box.db")
    (line.parent / "fake.yaml").unlink()
    shutil.rmtree(read_line(line, {}).packed_folder / "segments")
    before = snapshot(line.parent)
    assert "no device profile - run `coserve profile LINE.yaml`" in plan(line, check=78).stderr
    assert rows(line, "--profile", elsewhere, "--boards", "1")
    assert snapshot(line.parent) == before


def test_several_workers_are_shown_below_the_usual_plan(line):
    words = ("--memory", "46MiB", "--boards", "2")
    usual, further = plan(line, *words).stdout, plan(line, *words, "--workers", "2").stdout
    assert further.startswith(usual)
    assert "No request waits for a switch from" in further
    told = json.loads(plan(line, *words, "--workers", "2", "--json").stdout)
    assert "workers" not in json.loads(plan(line, *words, "--json").stdout)
    assert [row["workers"] for row in told["workers"]["rows"]] == [1, 2]
    assert told["workers"]["placement"]["workers"].keys() == {"w1", "w2"}
    assert told["workers"]["placement"]["pools"].keys() == {f"cls/f{number}" for number in range(EXPERTS)}


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--memory", "2MiB"), "experts.cls/f0: needs 3."),
        (("--executors", "cuda=1"), "cuda"),
        (("--ssd-bandwidth", "0MB/s"), "lets nothing through"),
        (("--memory", "device=2GiB"), "--memory device: this box has one memory for all its processors"),
    ],
)
def test_impossible_plan_is_refused(line, words, reason):
    assert reason in plan(line, *words, check=78).stderr
