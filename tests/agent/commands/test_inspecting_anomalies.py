"""An anomaly expert in a line: judged by its threshold, and by nothing without one."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import yaml
from PIL import Image

from agent.commands.inspection import inspect_images
from agent.config import read_line
from experts.backends.onnx.anomaly import certainty
from tests.experts.backends.onnx.anomaly_graphs import SIZE_PX, brightness


def quiet(stage, done, total):
    pass


def line_of(folder, threshold):
    onnx.save_model(brightness(("pred_score", "score"), ("anomaly_map", "map")), folder / "solder.onnx")
    expert = {
        "architecture": "onnx",
        "weights": "solder.onnx",
        "task": "anomaly",
        "input": {"size": [SIZE_PX, SIZE_PX], "normalize": "unit"},
    }
    document = {
        "line": "test",
        "state": "./state",
        "device": "cpu",
        "experts": {"anomaly/solder": expert if threshold is None else {**expert, "threshold": threshold}},
        "routes": {"solder": [{"expert": "anomaly/solder", "pass": ["ok"]}]},
        "memory": {"host": "40MiB", "workspace": "20MiB"},
    }
    (folder / "line.yaml").write_text(yaml.safe_dump(document))
    return read_line(folder / "line.yaml", {})


@pytest.fixture
def images(tmp_path):
    """One that is dark all over, and one with a bright spot."""
    dark = np.full((48, 64, 3), 51, np.uint8)
    spotted = dark.copy()
    spotted[30:40, 10:20] = 255
    files = [tmp_path / "dark.png", tmp_path / "spotted.png"]
    for file, pixels in zip(files, (dark, spotted), strict=True):
        Image.fromarray(pixels).save(file)
    return files


def test_a_threshold_makes_verdicts_of_scores(tmp_path, images):
    rows = inspect_images(line_of(tmp_path, 0.6), images, "solder", quiet)
    assert [(row["verdict"], row["label"]) for row in rows] == [("OK", "ok"), ("NG", "anomalous")]
    assert [row["anomalies"][0]["score"] for row in rows] == [pytest.approx(0.2), pytest.approx(1.0)]
    assert rows[0]["anomalies"][0]["expert"] == "anomaly/solder"
    assert rows[1]["score"] == pytest.approx(certainty(1.0, 0.6))


def test_without_a_threshold_everything_is_unknown_and_said_why(tmp_path, images):
    """The line starts all the same, and its times are measured."""
    rows = inspect_images(line_of(tmp_path, None), images, "solder", quiet)
    assert [row["verdict"] for row in rows] == ["UNKNOWN", "UNKNOWN"]
    assert all("anomaly/solder" in row["reason"] and "has no threshold" in row["reason"] for row in rows)
