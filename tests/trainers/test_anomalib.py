"""Anomalib's exports of PaDiM and PatchCore, to judged images: its own scores and verdicts."""

from __future__ import annotations

import json

import pytest

OWN_THRESHOLD = 0.5  # of Anomalib's exports, which scale their scores so
SCORE = 0.001  # how far what is served may be from what Anomalib says


@pytest.mark.parametrize("model", ["padim", "patchcore"])
def test_its_export_is_served_with_its_own_scores_and_verdicts(line, made_by, model):
    folder = made_by("anomalib")
    added = line.add(
        folder / model / "weights" / "onnx" / "model.onnx", "--normalize", "unit", "--threshold", str(OWN_THRESHOLD)
    )
    assert (added["kind"], added["entry"]["labels"]) == ("anomaly", ["ok", "anomalous"])
    answers = json.loads((folder / model / "answers.json").read_text())
    assert {answer["is_anomalous"] for answer in answers} == {True, False}
    rows = line.inspect([answer["image"] for answer in answers])
    for row, answer in zip(rows, answers, strict=True):
        assert row["anomalies"][0]["score"] == pytest.approx(answer["score"], abs=SCORE)
        assert row["verdict"] == ("NG" if answer["is_anomalous"] else "OK")


def test_its_own_checkpoint_is_named_and_told_to_be_exported(line, made_by):
    told = line.refused(made_by("anomalib") / "patchcore" / "weights" / "torch" / "model.pt")
    assert "export it to ONNX" in told
