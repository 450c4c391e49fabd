"""The demo's anomaly expert: learned from good parts alone, as its source describes it, and served as an ONNX graph."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from agent.demo.rendering.components import OK
from agent.demo.training.anomalies import AnomalyPlan, anomaly_crops, train_anomaly, train_gaussians
from agent.demo.training.classifiers import normalised, pictures, resnet
from agent.demo.training.crops import LabelledCrop
from experts.backends import backend_for
from experts.expert import Precision, Task
from experts.thresholds.measuring import Meter

SIDE_PX = 32
SPOT = slice(20, 28)  # where bad parts are bright, down and across
PLAN = AnomalyPlan(frozenset({"lid"}), input_px=SIDE_PX, dimensions=6)


def crop_of(rng, label, number, component="lid"):
    pixels = np.full((SIDE_PX, SIDE_PX, 3), 110.0) + rng.normal(0.0, 6.0, (SIDE_PX, SIDE_PX, 3))
    if label != OK:
        pixels[SPOT, SPOT] = 250.0
    return LabelledCrop(component, label, f"{number:03d}.png", np.clip(pixels, 0, 255).astype(np.uint8))


@pytest.fixture(scope="module")
def crops():
    rng = np.random.default_rng(0)
    return [crop_of(rng, label, number) for label, count in ((OK, 40), ("spotted", 8)) for number in range(count)]


@pytest.fixture(scope="module")
def trunk():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return resnet(2).eval()


@pytest.fixture(scope="module")
def own(crops):
    (found,) = anomaly_crops(crops, PLAN, seed=0)
    return found


@pytest.fixture(scope="module")
def model(trunk, own):
    return train_gaussians(trunk, own, PLAN, seed=0)


@pytest.fixture(scope="module")
def trained(trunk, own, tmp_path_factory):
    return train_anomaly(trunk, own, PLAN, tmp_path_factory.mktemp("weights"), 0)


def test_good_parts_are_learned_from_or_vouch_for_the_threshold_and_bad_ones_only_that(crops, own):
    assert {crop.label for crop in own.training + own.good} == {OK}
    assert not {crop.source for crop in own.training} & {crop.source for crop in own.good}
    assert sorted(map(id, own.training + own.good + own.bad)) == sorted(map(id, crops))
    assert abs(len(own.training) - len(own.good)) <= 1


def test_only_the_components_that_are_named_get_one(crops):
    others = [crop_of(np.random.default_rng(0), OK, number, component="chip") for number in range(4)]
    assert [each.component for each in anomaly_crops([*crops, *others], PLAN, seed=0)] == ["lid"]
    assert anomaly_crops(others, PLAN, seed=0) == ()


def test_distances_are_mahalanobis_distances_from_what_was_learned(trunk, own):
    model = train_gaussians(trunk, own, PLAN, seed=0)
    seen, asked = (normalised(pictures(each, SIDE_PX)) for each in (own.training, own.bad))
    model.learn(seen)
    with torch.no_grad():
        features, strange = model.features(seen).double(), model.features(asked).double()
        told = model.distances(asked)
    for place in (0, 5, model.grid_px**2 - 1):
        spread = torch.cov(features[place].T) + 0.01 * torch.eye(PLAN.dimensions)
        off = strange[place] - features[place].mean(0)
        by_hand = (off @ torch.linalg.inv(spread) * off).sum(1).sqrt()
        assert told[place].tolist() == pytest.approx(by_hand.tolist(), rel=1e-3)


def test_the_strangest_place_is_where_the_defect_is(model, own):
    with torch.no_grad():
        maps = model(normalised(pictures(own.bad, SIDE_PX)))[:, 0]
    assert maps.shape == (len(own.bad), SIDE_PX, SIDE_PX)
    for each in maps:
        down, right = divmod(int(each.argmax()), SIDE_PX)
        assert SPOT.start - 4 <= down < SPOT.stop + 4
        assert SPOT.start - 4 <= right < SPOT.stop + 4


def test_the_threshold_parts_good_from_bad_among_crops_it_was_not_trained_on(trained, own):
    expert = trained.expert
    assert (expert.task, expert.architecture, expert.labels) == (Task.ANOMALY, "onnx", ("ok", "anomalous"))
    assert (trained.training, trained.good, trained.bad) == (len(own.training), len(own.good), len(own.bad))
    assert expert.threshold == trained.learned.rates.threshold
    assert trained.learned.rates.caught == 1.0
    meter = Meter(expert)
    assert max(meter.score(crop.pixels) for crop in own.good) < expert.threshold
    assert min(meter.score(crop.pixels) for crop in own.bad) >= expert.threshold


def test_the_graph_answers_as_the_model_that_was_trained(trained, trunk, own):
    with torch.no_grad():
        maps = train_gaussians(trunk, own, PLAN, seed=0)(normalised(pictures(own.bad, SIDE_PX)))
    meter = Meter(trained.expert)
    scores = [meter.score(crop.pixels) for crop in own.bad]
    assert scores == pytest.approx(maps.amax((1, 2, 3)).tolist(), rel=1e-3)


@pytest.mark.slow
def test_mean_and_spread_are_weights_that_are_switched(trained, trunk, own, tmp_path):
    """Experts of other parts run the same program with other weights."""
    other = replace(own, training=own.good, good=own.training, bad=())
    second = train_anomaly(trunk, other, PLAN, tmp_path, 0)
    assert second.learned.rates.caught is None  # without a bad crop the threshold lies above all good ones
    one, two = (backend_for("onnx").pack(each.expert, Precision.FP32) for each in (trained, second))
    assert one.program == two.program
    assert one.tensors.keys() == two.tensors.keys()
    differing = {name for name in one.tensors if not torch.equal(one.tensors[name], two.tensors[name])}
    assert len(differing) == 2  # the mean and the whitening; all else is the trunk's, and shared
    assert len({len(one.tensors[name]) for name in differing}) == 1  # a row for each place


def test_defects_teach_nothing(model, trunk, own):
    without = train_gaussians(trunk, replace(own, bad=()), PLAN, seed=0).state_dict()
    assert all(torch.equal(tensor, without[name]) for name, tensor in model.state_dict().items())
