"""A model of one output in a line: judged by its threshold, told and stored with its probability."""

from __future__ import annotations

import json

import numpy as np
import pytest
import yaml
from PIL import Image
from typer.testing import CliRunner

from agent.cli.app import app
from agent.config import read_line
from experts.backends import backend_for
from experts.backends.classifier import write_random_weights
from experts.expert import Precision


@pytest.fixture
def line(tmp_path):
    """A line's file, of an expert that is more or less undecided; and an image."""
    write_random_weights(tmp_path / "x.safetensors", "squeezenet1_1", 1, seed=0, image_size=64)
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "part.png")

    def write(**keys):
        expert = {
            "architecture": "squeezenet1_1", "weights": "x.safetensors", "task": "multilabel", "labels": ["bent"],
            "input": {"size": [64, 64]}, **keys,
        }  # fmt: skip
        document = {
            "line": "test", "state": "./state", "device": "cpu", "experts": {"cls/x": expert},
            "routes": {"coil": [{"expert": "cls/x", "pass": [keys.get("otherwise", "bent")]}]},
            "memory": {"host": "40MiB", "workspace": "20MiB"},
        }  # fmt: skip
        (tmp_path / "line.yaml").write_text(yaml.safe_dump(document))
        return tmp_path / "line.yaml"

    return write


def probability(file):
    expert = read_line(file, {}).catalog.experts["cls/x"]
    backend = backend_for("squeezenet1_1")
    packed = backend.pack(expert, Precision.FP32)
    skeleton = backend.skeleton(expert, Precision.FP32, packed.program, "cpu")
    skeleton.bind(packed.tensors)
    with Image.open(file.parent / "part.png") as image:
        return skeleton.infer(expert, [backend.prepare(expert, np.asarray(image))])[0].outputs[0].score


def inspected(file, *words):
    done = CliRunner().invoke(
        app, ["inspect", str(file), str(file.parent / "part.png"), "--component", "coil", "--json", *words]
    )
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)["results"][0]


def test_it_is_good_only_where_its_defect_does_not_hold(line, tmp_path):
    score = probability(line(otherwise="ok"))
    assert 0 < score < 1
    rows = [inspected(line(otherwise="ok", thresholds={"bent": score + step})) for step in (-1e-4, 1e-4)]
    assert [(row["verdict"], row["label"]) for row in rows] == [("NG", "bent"), ("OK", "ok")]
    assert [row["score"] for row in rows] == [pytest.approx(score, abs=1e-5), pytest.approx(1 - score, abs=1e-5)]
    assert [output["holds"] for row in rows for output in row["outputs"]] == [True, False]
    assert rows[0]["outputs"][0]["score"] == pytest.approx(score, abs=1e-5)


def test_where_nothing_says_what_it_is_otherwise_nothing_passes(line):
    score = probability(line())
    row = inspected(line(thresholds={"bent": score + 1e-4}))
    assert (row["verdict"], row["label"]) == ("NG", "nothing-found")
