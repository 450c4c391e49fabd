"""`coserve bench tasks` as it is typed: what is refused, with which exit code, and one small run on the real engine."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from agent.core.performance import SSD
from agent.device_profile.records import (
    Allocation,
    BatchTimes,
    BoxIdentity,
    KindProfile,
    LinkSpeed,
    PoolAllocation,
    UsageProfile,
)
from agent.device_profile.store import ProfileDraft
from coserve import app
from proof.paper import scaled
from proof.paper.evaluation import ABLATIONS

USAGE, CONFIGURATION = 2, 78
BOX = BoxIdentity("cpu", "EPYC", ("cpu",), 2, 2**34, None, {})
KIND = KindProfile(
    "resnet101 224x224 imagenet", "resnet101", "cpu", "fp32", 2, 0.1, 0.01, 0.0, 4, 178_000_000, 0, 40_000_000,
    {SSD: 0.1}, (BatchTimes(1, (0.1,), 1),), "synthetic",
)  # fmt: skip


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """Runs the command in an empty folder, on the CPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COSERVE__DEVICE", "cpu")
    return lambda *words: CliRunner().invoke(app, ["bench", "tasks", *map(str, words)])


def test_a_box_without_an_accelerator_is_told_what_to_run_instead(tasks, tmp_path):
    with ProfileDraft.open(tmp_path / "profile.db", "line", BOX) as draft:
        draft.save_links([LinkSpeed(SSD, 2e9)])
        draft.save_kind(KIND)
        draft.save_precisions({(KIND.kind, "cpu"): "fp32"})
        draft.save_packed({})
        draft.save_usage(UsageProfile({}, {}, "computed from quantities"))
        draft.save_allocation(Allocation("casual", {"host": 8}, (PoolAllocation("host", 6, 2, 0),), {"cpu": 1}))
        draft.finish()
    done = tasks("--device", "profile.db")
    assert done.exit_code == CONFIGURATION, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("profile.db: this profile is of a box with cpu alone (EPYC)")
    assert "`coserve bench tasks --experts N`" in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--device", "nuna"], CONFIGURATION, "--device: 'nuna' is none of numa, uma, and no profile"),
        (["--device", "none.db"], CONFIGURATION, "none.db: no device profile - run `coserve profile LINE.yaml`"),
        (["--device", "nuna", "--out", "new"], CONFIGURATION, "--device: 'nuna' is none of numa, uma"),
        (["--device", "numa", "--device", "none.db", "--out", "new"], CONFIGURATION, "none.db: no device profile"),
        (["--experts", "2"], CONFIGURATION, "--experts: 2 is too few - memory holds 2 at least, take 3 or more"),
        (["--experts", "9", "--dir", "none"], CONFIGURATION, "none: no such folder - name one on the SSD to measure"),
        (["--experts", "9", "--device", "numa"], USAGE, "the real engine has no --device"),
    ],
)
def test_what_cannot_be_run_is_refused_and_nothing_is_written(words, code, said, tasks, tmp_path):
    done = tasks(*words)
    assert done.exit_code == code, done.stderr
    assert said in " ".join(done.stderr.replace("│", " ").split())
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_small_line_of_real_experts_under_every_policy(tasks, tmp_path, monkeypatch):
    """Three classifiers in memory for two; one object on stdout, and nothing of them left on the disk."""
    monkeypatch.setattr(scaled, "CLASSIFIER", "squeezenet1_1")  # a small one: a ResNet101 takes seconds to pack
    done = tasks("--experts", 3, "--requests", 1, "--json")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    policies = ["samba", "samba-fifo", "samba-parallel", *ABLATIONS, "coserve"]
    assert [(row["task"], row["policy"], row["requests"]) for row in found["rows"]] == [
        ("scaled", policy, 1) for policy in policies
    ]
    assert all(row["unknown"] == 0 and row["switches"] >= 0 for row in found["rows"])
    assert found["notes"][0] == "3 squeezenet1_1 at 224 px; memory for 2 of 3"
    assert list(tmp_path.iterdir()) == []
