"""The demo's anomaly expert: trained on good parts alone, as its source describes it, and served as an ONNX graph."""

import numpy as np
import pytest
import torch

from agent.demo.rendering.components import OK
from agent.demo.training import anomalies
from agent.demo.training.anomalies import PatchGaussians, train_anomaly
from agent.demo.training.crops import LabelledCrop, divide
from agent.demo.training.network import INPUT_PX, normalised, pictures, resnet
from experts.backends import backend_for
from experts.expert import Precision, Task
from experts.thresholds.learning import Meter

SPOT = slice(40, 56)  # where bad parts are bright, down and across


def crop_of(rng, label, number):
    pixels = np.full((INPUT_PX, INPUT_PX, 3), 110.0) + rng.normal(0.0, 6.0, (INPUT_PX, INPUT_PX, 3))
    if label != OK:
        pixels[SPOT, SPOT] = 250.0
    return LabelledCrop("lid", label, f"{number:03d}.png", np.clip(pixels, 0, 255).astype(np.uint8))


@pytest.fixture(scope="module")
def crops():
    rng = np.random.default_rng(0)
    return [crop_of(rng, label, number) for label, count in ((OK, 24), ("spotted", 4)) for number in range(count)]


@pytest.fixture(scope="module", autouse=True)
def few_dimensions():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(anomalies, "DIMENSIONS", 6)
        yield


@pytest.fixture(scope="module")
def trunk():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return resnet((OK, "spotted")).eval()


@pytest.fixture(scope="module")
def parts(crops):
    """Good crops to learn from, good ones for the threshold, bad ones."""
    training, good = divide([crop for crop in crops if crop.label == OK], 0.5, seed=0)
    return training, good, tuple(crop for crop in crops if crop.label != OK)


@pytest.fixture(scope="module")
def model(few_dimensions, trunk, parts):
    return PatchGaussians(trunk, parts[0], seed=0)


@pytest.fixture(scope="module")
def trained(few_dimensions, trunk, crops, tmp_path_factory):
    return train_anomaly(trunk, crops, tmp_path_factory.mktemp("weights"), 0)


def test_anomaly_distances_are_mahalanobis_distances(trunk, parts, monkeypatch):
    monkeypatch.setattr(anomalies, "SHIFTS_PX", ((0, 0),))
    model = PatchGaussians(trunk, parts[0], seed=0)
    seen, asked = (normalised(pictures(each)) for each in (parts[0], parts[2]))
    with torch.no_grad():
        features, strange = model.features(seen).double(), model.features(asked).double()
        found = model.distances(asked)
    for place in (0, 5, model.grid_px**2 - 1):
        spread = torch.cov(features[place].T) + 0.01 * torch.eye(6)
        off = strange[place] - features[place].mean(0)
        by_hand = (off @ torch.linalg.inv(spread) * off).sum(1).sqrt()
        assert found[place].tolist() == pytest.approx(by_hand.tolist(), rel=1e-3)


def test_threshold_separates_good_from_bad_among_unseen_crops(trained, parts):
    expert = trained.expert
    training, good, bad = parts
    assert (expert.task, expert.architecture, expert.labels) == (Task.ANOMALY, "onnx", ("ok", "anomalous"))
    counts = {"training": len(training), "good": len(good), "bad": len(bad)}
    assert trained.samples == counts | {"threshold": expert.threshold, "expected": 1 / (len(good) + 1)}
    meter = Meter(expert)
    assert max(meter.score(crop.pixels) for crop in good) < expert.threshold
    assert min(meter.score(crop.pixels) for crop in bad) >= expert.threshold


def test_anomaly_graph_answers_as_the_trained_model_and_peaks_at_the_defect(trained, model, parts):
    with torch.no_grad():
        maps = model(normalised(pictures(parts[2])))
    assert maps.shape == (len(parts[2]), 1, INPUT_PX, INPUT_PX)
    meter = Meter(trained.expert)
    scores = [meter.score(crop.pixels) for crop in parts[2]]
    assert scores == pytest.approx(maps.amax((1, 2, 3)).tolist(), rel=1e-3)
    places = [divmod(int(each.argmax()), INPUT_PX) for each in maps]
    assert all(SPOT.start - 4 <= place < SPOT.stop + 4 for both in places for place in both)


@pytest.mark.slow
def test_mean_and_spread_are_weights_that_are_switched(trained, trunk, parts, tmp_path):
    second = train_anomaly(trunk, parts[1], tmp_path, 0)
    assert second.samples["bad"] == 0
    one, two = (backend_for("onnx").pack(each.expert, Precision.FP32) for each in (trained, second))
    assert one.program == two.program
    assert one.tensors.keys() == two.tensors.keys()
    differing = {name for name in one.tensors if not torch.equal(one.tensors[name], two.tensors[name])}
    assert len(differing) == 2  # the mean and the whitening; all else is the trunk's, and shared
    assert len({len(one.tensors[name]) for name in differing}) == 1  # a row for each place
