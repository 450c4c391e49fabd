"""A few steps of training: the files it writes are what the serving backends read, and share their trunk."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from agent.config import read_line
from agent.demo.line import scalar, synthetic_board, write_line_yaml
from agent.demo.rendering.components import OK, Detector, synthetic_components
from agent.demo.training import trunk
from agent.demo.training.anomalies import AnomalyPlan
from agent.demo.training.classifiers import (
    FOREIGN_LOGIT,
    ClassifierPlan,
    classifier_set,
    masks_and_targets,
    normalised,
    pictures,
)
from agent.demo.training.crops import LabelledCrop, load_crops, write_crops
from agent.demo.training.detectors import BoxDetector, DetectorPlan, centred, concerned, predict, train_detector
from agent.demo.training.learning import Descent, Pace
from agent.demo.training.train import TrainingPlan, real_plan, synthetic_plan, train_experts
from agent.demo.training.trunk import stored_network
from experts.backends import backend_for
from experts.errors import ConfigError, CoServeError
from experts.expert import Precision

NAMES = {"resistor-0402", "capacitor-0805", "diode-sod123", "shield-can"}
SHORT = Pace(steps=2, learning_rate=1e-3)
CLASSIFIERS = ClassifierPlan(input_px=32, joint_px=(32,), crops_centre=False, turns=False, own_epochs=1)


def quiet(stage, done, total):
    assert 0 < done <= total


@pytest.fixture(scope="module")
def crops(tmp_path_factory):
    folder = tmp_path_factory.mktemp("crops")
    write_crops(folder, [each for each in synthetic_components() if each.name in NAMES], 6, 0, 1, quiet)
    return load_crops(folder)


@pytest.fixture(scope="module")
def plan():
    shared_by = synthetic_plan().detectors.shared_by
    detectors = DetectorPlan(shared_by, input_px=32, copies=1, pace=SHORT, batch_size=8)
    return TrainingPlan(CLASSIFIERS, detectors, AnomalyPlan(frozenset({"shield-can"}), input_px=32, dimensions=6))


@pytest.fixture(scope="module")
def line(crops, plan, tmp_path_factory):
    folder = tmp_path_factory.mktemp("line")
    return folder, train_experts(crops, plan, folder, quiet, threads=1, seed=3)


def test_every_component_gets_a_classifier_and_its_detector(line):
    _, trained = line
    labels = {expert.id: expert.labels for expert in trained.experts}
    assert labels == {
        "cls/resistor-0402": (OK, "missing", "tombstone"),
        "cls/capacitor-0805": (OK, "cracked", "missing"),
        "cls/diode-sod123": (OK, "cracked", "missing"),
        "det/alignment": ("aligned", "shifted"),
        "det/polarity": ("correct", "reversed"),
        "ano/shield-can": (OK, "anomalous"),
    }
    assert [step.expert for step in trained.routes["diode-sod123"]] == ["cls/diode-sod123", "det/polarity"]
    told_apart = [steps for component, steps in trained.routes.items() if component != "shield-can"]
    assert all(0.0 < steps[0].min_score < 1.0 for steps in told_apart)
    assert 0.0 <= trained.label_accuracy <= trained.verdict_accuracy <= 1.0
    assert {"trunk", "classifiers", "detectors", "anomaly expert", "write"} <= trained.seconds.keys()


def test_a_measured_component_gets_an_anomaly_expert_alone(line):
    _, trained = line
    ((step,), (shield,)) = trained.routes["shield-can"], trained.anomalies
    assert (step.expert, step.passing, step.min_score) == ("ano/shield-can", {OK}, 0.0)
    assert shield.expert.threshold == shield.learned.rates.threshold
    assert (shield.training, shield.good, shield.bad) == (39, 38, 23)


def test_classifiers_share_the_trunk_and_own_the_rest(line):
    _, trained = line
    states = [load_file(expert.weights) for expert in trained.experts if expert.id.startswith("cls/")]
    own = {name for name in states[0] if name.startswith(("layer4.", "fc."))}
    for state in states[1:]:
        assert state.keys() == states[0].keys()
        assert all(torch.equal(state[name], states[0][name]) for name in state.keys() - own)
        assert not torch.equal(state["layer4.0.conv1.weight"], states[0]["layer4.0.conv1.weight"])
    own_bytes = sum(states[0][name].nbytes for name in own)
    assert own_bytes > 33e6


def test_serving_backends_accept_the_weights(line, crops):
    _, trained = line
    for expert in trained.experts:
        backend = backend_for(expert.architecture)
        packed = backend.pack(expert, Precision.FP32)
        skeleton = backend.skeleton(expert, Precision.FP32, packed.program, "cpu")
        skeleton.bind(packed.tensors)
        (prediction,) = skeleton.infer(expert, [backend.prepare(expert, np.array(crops[0].pixels))])
        assert prediction.label in {*expert.labels, "nothing-found"}


@pytest.mark.slow
def test_same_seed_gives_the_same_weights(line, crops, plan, tmp_path):
    _, first = line
    second = train_experts(crops, plan, tmp_path, quiet, threads=1, seed=3)
    assert second.routes == first.routes
    for one, other in zip(first.experts, second.experts, strict=True):
        assert one.weights.read_bytes() == other.weights.read_bytes()


def test_the_stored_network_knows_renderings_that_it_was_not_made_with(crops):
    joint = stored_network()
    labels = {each.name: each.own_labels for each in synthetic_components() if each.name in NAMES - {"shield-can"}}
    told_apart = [crop for crop in crops if crop.label in labels.get(crop.component, ())]
    data = classifier_set(told_apart, labels, lambda crop: crop.label, 64)
    masks, targets = masks_and_targets(data, joint.labels)
    with torch.no_grad():
        answers = joint.network(normalised(data.pictures)).masked_fill(masks, FOREIGN_LOGIT).argmax(1)
    assert (answers == targets).float().mean() >= 0.9
    assert trunk.FILE.stat().st_size <= 6e6


def test_another_file_in_the_place_of_the_stored_network_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(trunk, "FILE", tmp_path / "trunk.safetensors")
    trunk.FILE.write_bytes(b"another")
    with pytest.raises(CoServeError, match="install CoServe again"):
        stored_network()


def test_a_detector_learns_where_the_part_lies_and_how(crops):
    shared_by = synthetic_plan().detectors.shared_by
    plan = DetectorPlan(shared_by, copies=4, pace=Pace(60, 3e-3))
    chosen = concerned(crops, plan, Detector.ALIGNMENT)
    module = BoxDetector(stored_network().network, 2, plan.input_px)
    trained = train_detector(module, Detector.ALIGNMENT, chosen, plan, seed=0)
    batch = pictures(chosen, plan.input_px)
    right = [
        (found.label == "shifted") == (crop.label == "shifted")
        for crop, found in zip(chosen, predict(trained, batch), strict=True)
    ]
    assert sum(right) >= 0.9 * len(right)
    with torch.no_grad():
        boxes = trained.module(batch / 255.0)[:, :4, 0] / plan.input_px
    assert (boxes - centred(torch.tensor([crop.body for crop in chosen]))).abs().mean() < 0.05


def test_line_file_is_what_the_agent_reads(line):
    folder, trained = line
    file = folder / "line.yaml"
    quantities = {name: count for name, count in synthetic_board().items() if name in NAMES}
    write_line_yaml(file, trained, 300 * 1024**2 + 5, {"main-board": quantities}, takt_s=30.0)
    config = read_line(file, environment={})
    assert config.memory.host == 300 * 1024**2
    assert {expert.id: expert for expert in trained.experts} == {
        id_: dataclasses.replace(expert, weights=expert.weights.resolve())
        for id_, expert in config.catalog.experts.items()
    }
    assert config.catalog.graph.routes == trained.routes
    assert dict(config.boards["main-board"].components) == quantities
    assert "#" in file.read_text()


def test_line_file_without_boards(line):
    folder, trained = line
    file = folder / "single.yaml"
    write_line_yaml(file, trained, 1024**3, {})
    assert read_line(file, environment={}).boards == {}


@pytest.mark.parametrize(("text", "written"), [("ok", "ok"), ("no", "'no'"), ("00041", "'00041'"), ("a: b", "'a: b'")])
def test_scalars_are_quoted_where_yaml_would_read_something_else(text, written):
    assert scalar(text) == written


def crop_of(component, label, file):
    return LabelledCrop(component, label, file, np.zeros((32, 32, 3), np.uint8))


def test_crops_of_a_single_image_cannot_be_trained_on(plan, tmp_path):
    crops = [crop_of("r", label, f"1-{label}{n}.png") for label in (OK, "short") for n in range(6)]
    with pytest.raises(ConfigError, match="too few source images"):
        train_experts(crops, plan, tmp_path, quiet, threads=1, seed=0)


def test_detector_needs_to_know_where_the_part_lies(plan, tmp_path):
    crops = [crop_of("diode-sod123", label, f"{n}.png") for label in (OK, "missing", "reversed") for n in range(10)]
    with pytest.raises(ConfigError, match=r"bodies\.json does not say where the part lies"):
        train_experts(crops, plan, tmp_path, quiet, threads=1, seed=0)


def test_real_crops_get_no_anomaly_expert():
    assert not real_plan([crop_of("shield-can", "short", "1.png")]).anomalies.components
    assert synthetic_plan().anomalies.components == {"shield-can"}


def test_real_crops_are_turned_unless_a_label_speaks_of_orientation():
    assert real_plan([crop_of("b", "short", "1.png")]).classifiers.turns
    assert not real_plan([crop_of("b", "reversed", "1.png")]).classifiers.turns
    assert Detector.POLARITY.defect == "reversed"


@pytest.mark.parametrize("steps", range(1, 12))
def test_descent_goes_downhill_for_any_number_of_steps(steps):
    weight = torch.nn.Parameter(torch.tensor([4.0]))
    descent = Descent([weight], Pace(steps, learning_rate=0.1), weight_decay=0.0)
    for _ in range(steps):
        descent.step((weight**2).sum())
    assert 0.0 < weight.item() < 4.0
