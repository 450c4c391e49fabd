"""The choice of precisions of a line of fakes that are all of one kind: what it rests on, and what is said of it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import yaml
from PIL import Image

from agent.config import read_line
from agent.deployment.build import detect_box
from agent.device_profile.identity import identity_of
from agent.device_profile.store import ProfileDraft
from profiler.allocation.step import CASUAL
from profiler.microbench.batches import BatchOptions
from profiler.profiling.profile_line import ProfilingOptions, profile_line

SHORT = BatchOptions(sizes=(1, 2), repeats=1, limit_s=0.5)
FASTEST_BF16 = {"fp16": 1.0, "onnxruntime": 1.0, "onednn-fp32": 1.0, "onednn-bf16": 1.0, "fp32": 0.5, "bf16": 0.001}
FASTEST_FP32 = FASTEST_BF16 | {"fp32": 0.0005}


class LineOfOneKind:
    """Fakes cls/f0, cls/f1 and so on with a route each, which all declare the same; `precision: auto`."""

    def __init__(self, folder, experts=6):
        self.folder = folder
        weights = folder / "fake.yaml"
        weights.write_text(json.dumps({"weight_bytes": 300_000, "workspace_bytes": 1000, "label": "ok"}))
        fake = {"architecture": "fake", "labels": ["ok", "bad"], "input": {"size": [8, 8]}, "weights": weights.name}
        document = {
            "line": "test",
            "state": "./state",
            "experts": {f"cls/f{number}": fake for number in range(experts)},
            "routes": {f"c{number}": [{"expert": f"cls/f{number}", "pass": ["ok"]}] for number in range(experts)},
            "memory": {"host": "512MiB"},
            "device": "cpu",
            "precision": "auto",
        }
        (folder / "line.yaml").write_text(yaml.safe_dump(document))
        self.config = read_line(folder / "line.yaml", {})

    def crops(self, *components):
        """A sample folder with one image of each of these."""
        for number in components:
            place = self.folder / "crops" / f"c{number}" / "ok"
            place.mkdir(parents=True)
            Image.new("RGB", (8, 8), (100, 100, 30)).save(place / "0.png")
        return self.folder / "crops"

    def profiled(self, samples, seconds):
        """Its profile as if a killed run had found batches in each form to take so long."""
        options = ProfilingOptions(samples=samples, allocation=CASUAL, batches=SHORT)
        profile_line(self.config, options, lambda *_: None)
        with ProfileDraft.open(self.config.profile_file, "test", identity_of(detect_box(self.config))) as draft:
            for kind in draft.kinds():
                draft.save_kind(replace(kind, K_s=seconds[kind.precision], B_s=seconds[kind.precision]))
        return profile_line(self.config, options, lambda *_: None)


@pytest.fixture
def line(tmp_path):
    return LineOfOneKind(tmp_path)


def compared(done):
    """What is told of comparisons."""
    return [note for note in done.notes if "compared with fp32" in note]


@pytest.mark.parametrize(
    ("sampled", "told"),
    [
        ((0,), "1 of its 6 experts were compared with fp32, and there are no sample images of cls/f1, cls/f2, cls/f3 "
               "and 2 more"),
        ((0, 2, 4), "3 of its 6 experts were compared with fp32, and there are no sample images of cls/f1, cls/f3, "
                    "cls/f5"),
    ],
)  # fmt: skip
def test_what_some_of_a_kind_agree_in_is_taken_for_all_and_told(line, sampled, told):
    done = line.profiled(line.crops(*sampled), FASTEST_BF16)
    ((kind, processor), form), *others = done.profile.precisions.items()
    assert (processor, form, others) == ("cpu", "bf16", [])
    advice = "give --samples FOLDER with images of their components, too"
    assert compared(done) == [f"{kind} in bf16 on cpu: {told} - {advice}"]


@pytest.mark.parametrize(
    ("sampled", "seconds", "form"), [(range(6), FASTEST_BF16, "bf16"), ((0,), FASTEST_FP32, "fp32")]
)
def test_nothing_is_told_where_all_were_compared_or_nothing_had_to_be(line, sampled, seconds, form):
    done = line.profiled(line.crops(*sampled), seconds)
    assert set(done.profile.precisions.values()) == {form}
    assert compared(done) == []
