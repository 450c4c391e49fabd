"""What a result keeps of an anomaly expert: what it measured, and where, of images that are NG."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from agent.config import read_line
from agent.core.request import Outcome, StepResult
from agent.service.inspections.rows import judged_result
from experts.expert import Anomaly, AnomalyMap, Prediction, Verdict
from tests.lines import subject

SOLDER = subject(component="solder")
HEAT = AnomalyMap(2, 3, -1.5, 4.0, bytes([0, 10, 20, 30, 40, 255]))
STRANGE = Prediction("anomalous", 0.9, anomaly=Anomaly(4.0, 2.0, HEAT))
FINE = Prediction("ok", 0.9, anomaly=Anomaly(1.0, 2.0))
PLAIN = Prediction("missing", 0.8)


@pytest.fixture
def line(tmp_path):
    def read(images="ng"):
        (tmp_path / "line.yaml").write_text(
            "line: test\nstate: ./state\n"
            "experts:\n  anomaly/x: {architecture: onnx, weights: x.onnx, task: anomaly, input: {size: [8, 8]}}\n"
            "routes:\n  solder: [{expert: anomaly/x, pass: [ok]}]\n"
            f"records: {{images: {images}}}\n"
        )
        return read_line(tmp_path / "line.yaml", {})

    return read


def outcome(verdict, *predictions):
    steps = tuple(StepResult(f"anomaly/{number}", each) for number, each in enumerate(predictions))
    return Outcome(verdict, predictions[-1].label, predictions[-1].score, steps)


def test_an_ng_image_keeps_where_it_is_strange(line):
    result = judged_result(line(), SOLDER, outcome(Verdict.NG, FINE, STRANGE, PLAIN))
    measured = [step.get("anomaly") for step in result.detail["steps"]]
    assert measured == [{"score": 1.0, "threshold": 2.0}, {"score": 4.0, "threshold": 2.0}, None]
    (kept,) = result.maps
    assert (kept.step, kept.expert) == (1, "anomaly/1")
    with Image.open(io.BytesIO(kept.png)) as picture:
        assert picture.mode == "L"
        assert np.asarray(picture).tolist() == [[0, 10, 20], [30, 40, 255]]
        assert (float(picture.text["lowest"]), float(picture.text["highest"])) == (-1.5, 4.0)


@pytest.mark.parametrize(("verdict", "images"), [(Verdict.OK, "all"), (Verdict.UNKNOWN, "ng"), (Verdict.NG, "none")])
def test_no_map_is_kept_of_what_is_not_ng_or_where_no_images_are(line, verdict, images):
    assert judged_result(line(images), SOLDER, outcome(verdict, STRANGE)).maps == ()
