"""Torchvision's classifiers as training scripts save them, to judged images: torch's own probabilities."""

import functools

import pytest
import torch
from torch import nn

from tests.trainers.torchvision_models import LABELS, SIZE, prepared, trained

SCORE = 0.01  # largest difference of a served score from torch's
FITTED = ("--fit", "stretched", "--resample", "bilinear")
GRAPH = ("--normalize", "imagenet", "--task", "multiclass", *FITTED)
OPTIONS = ("--size", f"{SIZE}x{SIZE}", *GRAPH)
PLAIN = ("--variant", "plain")
FORMS = {  # of files, with their content; tests/experts/checkpoints/test_reading.py reads all others
    "state dict": nn.Module.state_dict,
    "checkpoint": lambda network: {"epoch": 1, "model_state_dict": network.state_dict(), "classes": list(LABELS)},
    "whole DataParallel": lambda network: {"model": nn.DataParallel(network), "class_names": list(LABELS)},
}


@pytest.fixture(scope="module")
def networks(images):
    return functools.cache(lambda name: trained(name, images))


def own_answers(network, images):
    """Label and probability of each image, as a script finds them."""
    with torch.no_grad():
        scores, labels = network(prepared(images)).softmax(dim=1).max(dim=1)
    return [LABELS[label] for label in labels.tolist()], scores.tolist()


def require_same(rows, labels, scores, tolerance=SCORE):
    assert len(set(labels)) == len(LABELS)
    assert max(scores) < 0.999
    assert [row["label"] for row in rows] == labels
    assert [row["score"] for row in rows] == pytest.approx(scores, abs=tolerance)
    assert [row["verdict"] for row in rows] == ["OK" if label == "ok" else "NG" for label in labels]


@pytest.mark.parametrize(
    ("architecture", "form"),
    [
        *(("resnet18", form) for form in ("checkpoint", "whole DataParallel")),
        pytest.param("resnet18", "state dict", marks=pytest.mark.slow),
        pytest.param("mobilenet_v3_small", "checkpoint", marks=pytest.mark.slow),
    ],
)
def test_torch_model_is_served_with_its_own_answers(line, networks, images, tmp_path, architecture, form):
    network = networks(architecture)
    document = FORMS[form](network)
    torch.save(document, tmp_path / "checkpoint.pt")
    told = () if form == "whole DataParallel" else PLAIN
    names_labels = isinstance(document, dict) and {"classes", "class_names"} & document.keys()
    added = line.add(
        tmp_path / "checkpoint.pt", *OPTIONS, *told, *([] if names_labels else ["--labels", ",".join(LABELS)])
    )
    assert (added["entry"]["architecture"], added["entry"]["labels"]) == (architecture, list(LABELS))
    require_same(line.inspect(images), *own_answers(network, images))
