"""Answers beside known ones: what agrees, what is worst, and a model that does not see its images."""

from dataclasses import replace
from pathlib import Path

import pytest

from experts.errors import ConfigError
from experts.expert import Anomaly, BoundingBox, Expert, InputSpec, LabelScore, Prediction, Task
from experts.proving.answers import KnownAnswer, KnownBox
from experts.proving.comparing import compare, require_comparable

EXPERT = Expert("cls/a", "resnet18", Path("a.safetensors"), ("ok", "bent", "gone"), InputSpec(8, 8))
ANOMALY = replace(EXPERT, architecture="onnx", labels=("ok", "anomalous"), task=Task.ANOMALY)
FOUND = BoundingBox("bent", 0.8, 10, 10, 50, 50)


def known(label=None, score=None, **more):
    return KnownAnswer(Path("1.png"), label, score, **more)


def anomaly(score, label="ok"):
    return Prediction(label, 0.5, anomaly=Anomaly(score, 0.5))


@pytest.mark.parametrize(
    ("answer", "prediction", "why"),
    [
        (known("ok"), Prediction("ok", 0.4), ""),
        (known("ok", 0.505), Prediction("ok", 0.5), ""),
        (known("ok", 0.52), Prediction("ok", 0.5), "ok 0.500 instead of 0.520"),
        (known("bent", 0.52), Prediction("ok", 0.5), "is ok instead of bent"),
        (known(scores=(("ok", 0.2), ("bent", 0.7))), Prediction("bent", 0.6), "bent 0.600 instead of 0.700"),
        (known("bent", boxes=()), Prediction("bent", 0.8, (FOUND,)), "also bent 0.80 at 10, 10"),
        (known(boxes=(KnownBox("bent", 10, 10, 50, 51, 0.8),)), Prediction("bent", 0.8, (FOUND,)), ""),
        (
            known(boxes=(KnownBox("bent", 10, 10, 50, 60, 0.8),)),
            Prediction("bent", 0.8, (FOUND,)),
            "no bent at 10, 10; also bent 0.80 at 10, 10",
        ),
        (known(boxes=(KnownBox("bent", 12, 12, 60, 60),)), Prediction("bent", 0.8, (FOUND,)), ""),
        (known(boxes=(KnownBox("bent", 10, 10, 50, 50, 0.6),)), Prediction("bent", 0.8, (FOUND,)), "bent 0.800 inst"),
        (known(boxes=(KnownBox("bent", 0, 0, 5, 5, 0.1),)), Prediction("nothing-found", 0.0), ""),
    ],
)  # fmt: skip
def test_image_agrees_if_all_known_answers_agree(answer, prediction, why):
    (row,) = compare(EXPERT, [answer], [prediction]).rows
    assert row.agrees == (not why)
    assert row.why.startswith(why)


def test_multilabel_answers_are_compared_label_by_label():
    expert = replace(EXPERT, task=Task.MULTILABEL, otherwise="clean")
    outputs = tuple(
        LabelScore.of(label, score, 0.5) for label, score in zip(EXPERT.labels, (0.1, 0.2, 0.3), strict=True)
    )
    prediction = Prediction("clean", 0.7, outputs=outputs)
    (row,) = compare(expert, [known(scores=(("ok", 0.1), ("bent", 0.2), ("gone", 0.3)))], [prediction]).rows
    assert (row.label, row.why) == ("clean", "")
    (row,) = compare(expert, [known(scores=(("ok", 0.1), ("bent", 0.25)))], [prediction]).rows
    assert row.why == "bent 0.200 instead of 0.250"


def test_wrong_score_of_a_lower_label_differs():
    outputs = tuple(
        LabelScore.of(label, score, 0.5) for label, score in zip(EXPERT.labels, (0.6, 0.1, 0.3), strict=True)
    )
    answer = known(scores=(("ok", 0.6), ("bent", 0.3), ("gone", 0.1)))
    (row,) = compare(EXPERT, [answer], [Prediction("ok", 0.6, outputs=outputs)]).rows
    assert row.why == "bent 0.100 instead of 0.300"


def test_anomaly_scores_agree_on_their_own_scale_and_labels_by_the_threshold():
    answers = [known(anomaly=40.2), known(anomaly=0.002), known("good", anomaly=9.0), known("scratch", anomaly=41.0)]
    predictions = [anomaly(40.1), anomaly(0.0025), anomaly(9.5), anomaly(41.0, "anomalous")]
    rows = compare(replace(ANOMALY, threshold=20.0), answers, predictions).rows
    assert [row.why for row in rows] == ["is ok (40.1) instead of anomalous", "", "anomaly score 9.5 instead of 9", ""]
    assert [row.why for row in compare(ANOMALY, answers[:1], predictions[:1]).rows] == [""]


def test_worst_differences_come_first_and_images_are_counted_by_label():
    answers = [known("ok", 0.9), known("bent", 0.9), known("bent", 0.6), known("ok", 0.5)]
    found = [Prediction("ok", 0.9), Prediction("ok", 0.9), Prediction("bent", 0.5), Prediction("gone", 0.4)]
    comparison = compare(EXPERT, answers, found)
    assert (comparison.images, comparison.agreed, comparison.is_proof) == (4, 1, False)
    assert comparison.largest_difference == pytest.approx(0.1)
    assert [row.known for row in comparison.worst(2)] == [answers[1], answers[3]]
    assert comparison.count_of({"ok"}) == 2


NOTHING = Prediction("nothing-found", 0.0)


@pytest.mark.parametrize(
    ("answers", "predictions", "blind"),
    [
        ([known(boxes=(KnownBox("bent", 1, 1, 2, 2),)), known(boxes=())], [NOTHING] * 2, "on 1 of them something is"),
        ([known("bent"), known("ok")], [NOTHING] * 2, "on 2 of them something is"),
        ([known(boxes=())] * 2, [NOTHING] * 2, "give also images with something to find"),
        ([known("ok"), known("ok")], [Prediction("ok", 0.7)] * 2, "its answer is the same on all of 2 images: ok 0.7"),
        ([known("ok", 1.0), known("ok", 1.0)], [Prediction("ok", 1.0)] * 2, ""),
        ([known("ok"), known("ok")], [Prediction("ok", 0.7), Prediction("ok", 0.8)], ""),
    ],
)
def test_model_that_does_not_see_its_images_is_reported_as_blind(answers, predictions, blind):
    comparison = compare(EXPERT, answers, predictions)
    assert bool(comparison.blind) == bool(blind)
    assert blind in comparison.blind
    assert not (blind and comparison.is_proof)


@pytest.mark.parametrize(
    ("expert", "answer", "match"),
    [
        (EXPERT, known("NG"), r"x.csv: 1.png has the label NG, and cls/a has ok, bent, gone"),
        (EXPERT, known(scores=(("good", 0.5),)), "has the label good"),
        (ANOMALY, known("good"), "an answer of an anomaly expert needs `anomaly`, its score$"),
    ],
)
def test_answers_with_other_labels_are_refused(expert, answer, match):
    with pytest.raises(ConfigError, match=match):
        require_comparable(expert, [answer], "x.csv")
