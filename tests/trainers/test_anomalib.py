"""Anomalib's exports of PaDiM and PatchCore, to judged images: its own scores and verdicts."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from tests.trainers.test_torch import FITTED

OWN_THRESHOLD = 0.5  # of Anomalib's exports, which scale their scores so
SCORE = 0.001  # largest difference of a served score from Anomalib's


@pytest.mark.slow
@pytest.mark.parametrize(("model", "group"), [("padim", "more"), ("patchcore", "quick")])
def test_anomalib_export_is_served_with_its_own_scores_and_verdicts(line, made_by, model, group):
    folder = made_by("anomalib", group)
    added = line.add(
        folder / model / "weights" / "onnx" / "model.onnx", "--normalize", "unit", "--threshold", str(OWN_THRESHOLD),
        "--trainer", "anomalib",
    )  # fmt: skip
    assert (added["kind"], added["entry"]["labels"]) == ("anomaly", ["ok", "anomalous"])
    answers = json.loads((folder / model / "answers.json").read_text())
    assert {answer["is_anomalous"] for answer in answers} == {True, False}
    for row, answer in zip(line.inspect([answer["image"] for answer in answers]), answers, strict=True):
        assert row["anomalies"][0]["score"] == pytest.approx(answer["score"], abs=SCORE)
        assert row["verdict"] == ("NG" if answer["is_anomalous"] else "OK")


class Before(torch.nn.Module):
    """Export of Anomalib before version 2, which cannot be installed beside it: a map on an unscaled range.

    The graph takes normalised images; the score is the map's maximum.
    """

    def forward(self, image):
        local = torch.nn.functional.avg_pool2d(image.square().sum(dim=1, keepdim=True), 5, stride=1, padding=2)
        return local.sqrt()


@pytest.mark.slow
def test_anomalib_map_is_served_by_its_maximum_and_a_learned_threshold(line, made_by, tmp_path):
    parts = made_by("anomalib", "more") / "parts"
    file = tmp_path / "model.onnx"
    torch.onnx.export(Before().eval(), (torch.zeros(1, 3, 64, 64),), file, output_names=["output"], verbose=False)
    added = line.add(file, "--normalize", "imagenet", "--id", "ano/before", *FITTED)
    assert "judges nothing without a threshold" in added["said"][-1]
    line.run("experts", "threshold", line.file, "ano/before", "--samples", parts)
    images = sorted(parts.glob("*/*.png"))
    rows = line.inspect(images)
    assert [row["verdict"] for row in rows] == ["NG" if image.parent.name == "bad" else "OK" for image in images]
    mean, deviation = np.array([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]], np.float32)
    for row, image in zip(rows, images, strict=True):
        pixels = (np.asarray(Image.open(image), np.float32) / 255 - mean) / deviation
        highest = Before()(torch.from_numpy(pixels).permute(2, 0, 1)[None]).max().item()
        assert row["anomalies"][0]["score"] == pytest.approx(highest, abs=SCORE)
