"""An exact tie between labels: the image is UNKNOWN, whichever runtime computed it, and others beside it are judged."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from agent.runtime.executor import judge
from experts.backends.onnx import answers
from experts.backends.onnx.answers import OutputKind
from experts.backends.vision.boxes import suppressed
from experts.backends.vision.classifier import predictions
from experts.errors import OutputInvalid
from experts.expert import Expert, InputSpec, Rejected

EXPERT = Expert("cls/x", "resnet18", Path("x"), ("ok", "ng", "gone"), InputSpec(8, 8))
TIED, CLEAR = [0.4, 0.4, 0.2], [0.4, 0.35, 0.25]


@dataclass
class Answering:
    """A skeleton whose images are their own probabilities."""

    def infer(self, expert, images):
        return predictions(expert, torch.tensor(images))


def test_image_with_tied_scores_is_unknown_and_others_of_its_batch_are_judged():
    first, second = judge(Answering(), EXPERT, [TIED, CLEAR])
    assert isinstance(first, Rejected)
    assert "its scores for ok and ng are equal, 0.4: it does not tell them apart" in first.reason
    assert (second.label, round(second.score, 3)) == ("ok", 0.4)


def test_tied_best_scores_of_a_graph_are_refused_and_lower_ties_are_not():
    for row in (np.float32([[3, 3, 1]]), np.float32([[0.4, 0.4, 0.2]])):
        with pytest.raises(OutputInvalid, match="its scores for ok and ng are equal"):
            answers.predictions(OutputKind.LOGITS, EXPERT, [[row]], [None])
    (found,) = answers.predictions(OutputKind.LOGITS, EXPERT, [[np.float32([[3, 1, 1]])]], [None])
    assert found.label == "ok"


def test_box_with_two_best_labels_is_no_answer_unless_it_does_not_count():
    boxes = torch.tensor([[0.0, 0, 4, 4], [4, 4, 8, 8]])
    with pytest.raises(OutputInvalid, match="its scores for ok and ng are equal"):
        suppressed(EXPERT, boxes, torch.tensor([[0.9, 0.1, 0.1], [0.6, 0.6, 0.1]]))
    rows = suppressed(EXPERT, boxes, torch.tensor([[0.9, 0.1, 0.1], [0.2, 0.2, 0.1]]))
    assert [int(row[5]) for row in rows] == [0]
