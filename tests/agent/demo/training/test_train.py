"""A few steps of training: the files it writes are what the serving backends read, and share their trunk."""

import dataclasses
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from agent.commands.proving import unproven_line
from agent.config import read_line
from agent.demo.demo import packed_bytes
from agent.demo.line import write_line_yaml
from agent.demo.proving import prove, write_answers
from agent.demo.rendering.components import COMPONENTS, OK, Detector
from agent.demo.training import anomalies, detectors, train, trunk
from agent.demo.training.crops import render_crops
from agent.demo.training.detectors import BoxDetector, centred, train_head
from agent.demo.training.network import CropFeatures, normalised, pictures
from agent.demo.training.train import train_experts
from agent.demo.training.trunk import FOREIGN_LOGIT, LABELS, folded, masks_and_targets, stored_network, unfolded
from experts.backends import backend_for
from experts.errors import CoServeError
from experts.expert import Precision
from experts.llm.training.descent import descend
from experts.sizes import MEBIBYTE

NAMES = {"resistor-0402", "capacitor-0805", "diode-sod123", "shield-can"}


def quiet(stage, done, total):
    assert 0 < done <= total


@pytest.fixture(scope="module")
def crops():
    return render_crops([each for each in COMPONENTS if each.name in NAMES], 3, 0, 1, quiet)


@pytest.fixture(scope="module")
def trained_in(crops):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(detectors, "STEPS", 2)
        patch.setattr(anomalies, "DIMENSIONS", 6)
        yield lambda folder, crops=crops, are_rendered=True: train_experts(
            crops, folder / "weights", quiet, threads=1, seed=3, are_rendered=are_rendered
        )


@pytest.fixture(scope="module")
def line(trained_in, tmp_path_factory):
    folder = tmp_path_factory.mktemp("line")
    return folder, trained_in(folder)


def test_every_component_gets_a_classifier_and_its_detector_or_an_anomaly_expert_alone(line):
    _, trained = line
    assert {expert.id: expert.labels for expert in trained.experts} == {
        "cls/resistor-0402": (OK, "missing", "tombstone"),
        "cls/capacitor-0805": (OK, "cracked", "missing"),
        "cls/diode-sod123": (OK, "cracked", "missing"),
        "det/alignment": ("aligned", "shifted"),
        "det/polarity": ("correct", "reversed"),
        "ano/shield-can": (OK, "anomalous"),
    }
    steps = {name: [(step.expert, step.min_score) for step in steps] for name, steps in trained.routes.items()}
    assert steps["diode-sod123"] == [("cls/diode-sod123", 0.5), ("det/polarity", 0.0)]
    assert steps["shield-can"] == [("ano/shield-can", 0.0)]
    assert trained.seconds.keys() == {"trunk", "classifiers", "detectors", "anomaly expert"}
    (shield,) = trained.anomalies
    assert [shield.samples[each] for each in ("training", "good", "bad")] == [62, 61, 20]


def test_classifiers_share_the_trunk_and_own_the_rest(line):
    _, trained = line
    states = [load_file(expert.weights) for expert in trained.experts if expert.id.startswith("cls/")]
    own = {name for name in states[0] if name.startswith(("layer4.", "fc."))}
    for state in states[1:]:
        assert state.keys() == states[0].keys()
        assert all(torch.equal(state[name], states[0][name]) for name in state.keys() - own)
        assert not torch.equal(state["layer4.0.conv1.weight"], states[0]["layer4.0.conv1.weight"])
    assert sum(states[0][name].nbytes for name in own) > 33e6


def test_serving_backends_accept_the_weights(line, crops):
    _, trained = line
    for expert in trained.experts:
        backend = backend_for(expert.architecture)
        packed = backend.pack(expert, Precision.FP32)
        skeleton = backend.skeleton(expert, Precision.FP32, packed.program, "cpu")
        skeleton.bind(packed.tensors)
        (prediction,) = skeleton.infer(expert, [backend.prepare(expert, np.array(crops[0].pixels))])
        assert prediction.label in {*expert.labels, "nothing-found"}


def test_experts_are_proven_by_their_networks_answers_unless_labels_are_swapped(line, crops, tmp_path):
    _, trained = line
    answered = write_answers(tmp_path, trained, crops)
    changed = tuple(
        dataclasses.replace(each, labels=each.labels[::-1]) if each.id == "cls/diode-sod123" else each
        for each in answered.experts
    )
    packed_bytes(tmp_path, answered, quiet)
    write_line_yaml(tmp_path, dataclasses.replace(answered, experts=changed), 100 * MEBIBYTE, has_boards=False)
    proofs = prove(tmp_path / "line.yaml", quiet)
    found = {proof.expert: proof.holds for proof in proofs if not proof.expert.startswith("det/")}  # untrained boxes
    assert found == {
        "cls/resistor-0402": True,
        "cls/capacitor-0805": True,
        "cls/diode-sod123": False,
        "ano/shield-can": True,
    }
    lacks = unproven_line(read_line(tmp_path / "line.yaml"))
    assert {name for name in lacks if not name.startswith("det/")} == {"cls/diode-sod123"}


@pytest.mark.slow
def test_same_seed_gives_the_same_weights(line, trained_in, tmp_path):
    _, first = line
    second = trained_in(tmp_path)
    assert second.routes == first.routes
    for one, other in zip(first.experts, second.experts, strict=True):
        assert one.weights.read_bytes() == other.weights.read_bytes()


@pytest.mark.slow
def test_crops_of_real_boards_train_a_joint_network_and_no_other_expert_than_classifiers(
    trained_in, crops, tmp_path, monkeypatch
):
    monkeypatch.setattr(train, "JOINT", train.JOINT._replace(sides_px=(8, 16)))
    few = [crop for crop in crops if crop.component in {"resistor-0402", "shield-can"}]
    trained = trained_in(tmp_path, few, are_rendered=False)
    assert {expert.id: expert.labels for expert in trained.experts} == {
        "cls/resistor-0402": (OK, "missing", "shifted", "tombstone"),
        "cls/shield-can": (OK, "dented", "missing", "scratched", "stained"),
    }
    first, second = (load_file(expert.weights)["conv1.weight"] for expert in trained.experts)
    assert torch.equal(first, second)
    assert not torch.equal(first, stored_network().state_dict()["conv1.weight"])


@pytest.mark.parametrize(("name", "turns"), [("resistor-0402", True), ("diode-sod123", False)])
def test_real_crops_are_turned_unless_a_label_speaks_of_orientation(
    trained_in, crops, tmp_path, monkeypatch, name, turns
):
    train_jointly = Mock(side_effect=InterruptedError)
    monkeypatch.setattr(train, "train_jointly", train_jointly)
    with pytest.raises(InterruptedError):
        trained_in(tmp_path, [crop for crop in crops if crop.component == name], are_rendered=False)
    assert train_jointly.call_args.args[3].turns is turns


def test_stored_network_recognises_renderings_it_was_not_made_with(crops):
    network = stored_network()
    classified = [crop for crop in crops if crop.label in LABELS.get(crop.component, ())]
    masks, targets = masks_and_targets(classified, LABELS, network.labels)
    with torch.no_grad():
        answers = network(normalised(pictures(classified))).masked_fill(masks, FOREIGN_LOGIT).argmax(1)
    assert (answers == targets).float().mean() >= 0.9
    assert trunk.FILE.stat().st_size <= 6e6


def test_narrowing_a_network_again_changes_little():
    state = stored_network().state_dict()
    again = unfolded(folded(state), state)
    assert all(torch.allclose(each, again[name], atol=0.02 * float(each.abs().max())) for name, each in state.items())


def test_replaced_stored_network_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(trunk, "FILE", tmp_path / "trunk.safetensors")
    trunk.FILE.write_bytes(b"another")
    with pytest.raises(CoServeError, match="install CoServe again"):
        stored_network()


def test_detector_learns_place_and_shift_of_a_part(crops, monkeypatch):
    monkeypatch.setattr(detectors, "STEPS", 60)
    chosen = [c for c in crops if c.component in {"resistor-0402", "capacitor-0805"} and c.label in {OK, "shifted"}]
    module = BoxDetector(stored_network(), Detector.ALIGNMENT)
    with torch.no_grad():
        features = module.trunk.eval()(normalised(pictures(chosen)))[-1]
    train_head(module, [CropFeatures(chosen, features, torch.zeros(len(chosen), 2))], seed=0)
    with torch.no_grad():
        answers = module(pictures(chosen) / 255.0)[:, :, 0]
    is_shifted = torch.tensor([crop.label == "shifted" for crop in chosen])
    assert (answers[:, 4:].argmax(1).bool() == is_shifted).float().mean() >= 0.9
    assert (answers[:, :4] / 64 - centred(torch.tensor([crop.body for crop in chosen]))).abs().mean() < 0.05


def test_written_line_file_is_read_by_the_agent(line):
    folder, trained = line
    first, *others = trained.experts
    first = dataclasses.replace(first, labels=("ok", "no", "00041"))  # quoted: YAML would read something else
    write_line_yaml(
        folder, dataclasses.replace(trained, experts=(first, *others)), 300 * MEBIBYTE + 5, has_boards=False
    )
    config = read_line(folder / "line.yaml", environment={})
    assert config.memory.host == 300 * MEBIBYTE
    assert config.catalog.experts == {
        each.id: dataclasses.replace(each, weights=each.weights.resolve()) for each in (first, *others)
    }
    assert config.catalog.graph.routes == trained.routes
    assert config.boards == {}
    write_line_yaml(folder, trained, MEBIBYTE, has_boards=True)  # its other components are not trained here
    boards = yaml.safe_load((folder / "line.yaml").read_text())["boards"]
    assert boards["demo-board"]["components"] == {each.name: each.quantity for each in COMPONENTS}


@pytest.mark.parametrize("steps", range(1, 12))
def test_descent_goes_downhill_for_any_number_of_steps(steps):
    weight = torch.nn.Parameter(torch.tensor([4.0]))
    descend([weight], range(steps), lambda _: (weight**2).sum(), 0.1)
    assert 0.0 < weight.item() < 4.0
