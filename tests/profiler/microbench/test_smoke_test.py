"""Which experts run: one image each over the agent's own path."""

from __future__ import annotations

import json

import pytest
from PIL import Image

from agent.runtime.expert_copy import ExpertCopy
from agent.runtime.machine.detection import detect
from experts.expert import Expert, InputSpec, Precision
from experts.packed.packing import pack_line
from profiler.microbench.bench import Bench
from profiler.microbench.smoke_test import failing_experts
from profiler.workload.samples import LineSamples, Sample


@pytest.fixture
def copies(tmp_path, store):
    """Three fakes, each with a program of its own."""
    experts = []
    for number, name in enumerate("abc"):
        weights = tmp_path / f"{name}.yaml"
        weights.write_text(json.dumps({"weight_bytes": 1000 + number}))
        experts.append(Expert(f"cls/{name}", "fake", weights, ("ok", "bad"), InputSpec(8, 8)))
    packed = pack_line(experts, lambda _: {Precision.FP32}, store).packed
    return [ExpertCopy(f"{each.id}@fp32", each, packed[each.id][Precision.FP32]) for each in experts]


def bench(store, **samples):
    by_expert = {f"cls/{name}": (sample,) for name, sample in samples.items()}
    return Bench(detect("cpu"), "cpu", store, LineSamples(by_expert), threads=1)


def test_sound_experts_do_and_each_is_told_of(store, copies):
    steps = []
    assert failing_experts(bench(store), copies, lambda done, total: steps.append((done, total))) == {}
    assert steps == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert failing_experts(bench(store), []) == {}


def test_one_that_cannot_be_loaded_fails_and_those_after_it_run(store, copies):
    store.program_path(copies[0].packed.program_sha256).unlink()
    (failing,) = failing_experts(bench(store), copies).items()
    assert failing[0] == "cls/a"
    assert failing[1]


def test_what_runs_is_its_sample(store, copies, tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "good.png")
    (tmp_path / "broken.png").write_bytes(b"no image")
    good, broken = (Sample(tmp_path / f"{name}.png", "c", None, "crops") for name in ("good", "broken"))
    (failing,) = failing_experts(bench(store, a=good, b=broken), copies).items()
    assert failing[0] == "cls/b"
    assert "broken.png" in failing[1]
