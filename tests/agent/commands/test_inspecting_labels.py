"""A model of one output in a line: judged by its threshold, reported with its probability."""

import json

import numpy as np
import pytest
from PIL import Image

from experts.backends.classifier import write_random_weights
from tests.agent.line_files import LineFile, expert, route
from tests.commands import coserve


def inspected(folder, **keys):
    """The row of an image, judged by an undecided expert."""
    told = {"task": "multilabel", "labels": ["bent"], "otherwise": "ok"} | keys
    line = LineFile(
        folder,
        device="cpu",
        experts={"cls/x": expert("x.safetensors", "squeezenet1_1", 64, **told)},
        routes={"coil": route("cls/x")},
        memory={"host": "40MiB", "workspace": "20MiB"},
    )
    words = ("inspect", line.write(), folder / "part.png", "--component", "coil", "--json")
    return json.loads(coserve(*words, check=0).stdout)["results"][0]


def test_it_is_good_only_where_its_defect_does_not_hold(tmp_path):
    write_random_weights(tmp_path / "x.safetensors", "squeezenet1_1", 1, seed=0, image_size=64)
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "part.png")
    score = inspected(tmp_path)["outputs"][0]["score"]
    assert 0 < score < 1
    rows = [inspected(tmp_path, thresholds={"bent": score + step}) for step in (-1e-4, 1e-4)]
    assert [(row["verdict"], row["label"]) for row in rows] == [("NG", "bent"), ("OK", "ok")]
    assert [row["score"] for row in rows] == [pytest.approx(score, abs=1e-5), pytest.approx(1 - score, abs=1e-5)]
    assert [output["holds"] for row in rows for output in row["outputs"]] == [True, False]
    assert rows[0]["outputs"][0]["score"] == pytest.approx(score, abs=1e-5)
