"""oneDNN as a form of execution: torch's answers, one graph per architecture and size, packed beside the others."""

import json
import logging
from dataclasses import replace

import psutil
import pytest
import torch

from experts.backends import backend_for
from experts.backends.base import RefusedModule
from experts.backends.forms import executable_forms, form_of
from experts.backends.onednn import execution, operators
from experts.backends.onednn import form as onednn_form
from experts.backends.onednn.operators import NARROW, WIDE, identity
from experts.errors import BackendUnavailable, WeightsMismatch
from experts.expert import Precision
from experts.packed.manifests import ManifestFolder
from tests.experts.conftest import calibrated, packed_in
from tests.forms import needs

FORM = Precision.ONEDNN_FP32
FORMS = [Precision.ONEDNN_FP32, Precision.ONEDNN_BF16]
MIB = 1024 * 1024


@pytest.fixture
def expert(files):
    return files.classifier("cls/x", "squeezenet1_1", seed=3)


def test_thousand_switches_construct_nothing_and_take_no_memory(files, store, make_slot, image):
    experts = [files.classifier(f"cls/{seed}", "squeezenet1_1", seed) for seed in (1, 2)]
    packed = packed_in(store, experts, FORM)
    slot = make_slot(experts[0], packed[experts[0].id][FORM], store)
    expected = []
    for expert in experts:
        slot.load(expert, packed[expert.id][FORM])
        expected.append(slot.infer(expert, image))
    bound, before_bytes = slot.skeleton._inputs, psutil.Process().memory_info().rss
    for number in range(1000):
        expert = experts[number % 2]
        slot.load(expert, packed[expert.id][FORM])
        if number % 100 < 2:
            assert slot.infer(expert, image) == expected[number % 2]
    assert slot.skeleton._inputs is bound
    assert psutil.Process().memory_info().rss - before_bytes < 4 * MIB
    assert expected[0] != expected[1]


@needs(Precision.ONEDNN_INT8)
def test_expert_that_answers_nan_is_not_calibrated(files, image, tmp_path):
    module = files.build("squeezenet1_1", 3)
    for parameter in module.parameters():
        parameter.data.fill_(1e30)
    expert = files.torch_module("cls/x", module, "squeezenet1_1")
    with pytest.raises(WeightsMismatch, match=r"cannot be calibrated: answer of features.*: .* have no levels"):
        calibrated(expert, Precision.ONEDNN_INT8, tmp_path, image)


@needs(Precision.ONEDNN_INT8)
def test_nan_weight_is_refused_with_its_name(expert, tmp_path, image, monkeypatch):
    """Folding makes one of numbers that were too large; a ReLU behind it may hide it from what is observed."""
    expert, backend = calibrated(expert, Precision.ONEDNN_INT8, tmp_path, image), backend_for(expert.architecture)
    form, name = form_of(Precision.ONEDNN_INT8), "features.3.expand3x3.weight"
    assert backend.pack(expert, form.name).program
    weights = backend.weights(expert, form)
    wrong = weights | {name: weights[name].clone().fill_(float("inf"))}
    monkeypatch.setattr(backend, "weights", lambda *_: wrong)
    with pytest.raises(WeightsMismatch, match=rf"{name}: .* NaN or infinity: choose fp32"):
        backend.pack(expert, form.name)


def spoil(program, **changed):
    return json.dumps(json.loads(program) | changed).encode()


SPOILED = [
    (lambda program: program[:-5], "its program is cut"),
    (lambda program: b"[1]", "its program is cut"),
    (lambda program: spoil(program, **{"made for": "torch 2.9, another CPU"}), "was packed for torch 2.9, another CPU"),
    (lambda program: spoil(program, weights={"fc.weight": "0" * 64}), "is of other weights"),
    (lambda program: spoil(program, weights={"features.0.weight": "0" * 64}), "is not in the layout that oneDNN wants"),
]


@pytest.mark.parametrize(("spoiled", "reason"), SPOILED)
def test_truncated_or_foreign_program_is_not_run(expert, spoiled, reason, monkeypatch):
    backend = backend_for(expert.architecture)
    program = backend.pack(expert, FORM).program
    monkeypatch.setattr(onednn_form, "blocked_view", lambda *_: pytest.fail("it reached the shim"))
    with pytest.raises(BackendUnavailable, match=f"{reason}.*pack the line again here"):
        backend.skeleton(expert, FORM, spoiled(program), "cpu")


def test_upgraded_cpu_or_torch_packs_again_and_logs_it(expert, store, monkeypatch, caplog):
    packed = packed_in(store, [expert], FORM, Precision.FP32)
    manifests = ManifestFolder(store.directory / "manifests")
    found = manifests.read(expert.id, FORM)
    assert json.loads(found.source.recipe)[-1] == form_of(FORM).recipe() == identity()
    older = found.source.recipe.replace(identity(), "torch 2.14.0, an older CPU, 4 cores")
    manifests.write(replace(found, source=replace(found.source, recipe=older)))
    with caplog.at_level(logging.WARNING):
        assert packed_in(store, [expert], FORM, Precision.FP32) == packed
    assert caplog.messages == [
        "packed_again precision=onednn-fp32 first=cls/x reason=packed for torch 2.14.0, an older CPU, 4 cores, "
        f"this box has {identity()}"
    ]
    assert manifests.read(expert.id, FORM) == found


@needs(Precision.ONEDNN_INT8)
def test_weights_of_another_greatest_value_are_packed_and_calibrated_again(files, store, image, monkeypatch):
    """A CPU with VNNI sums greater weights exactly: others would saturate, and their rounding shifts other answers."""
    form, other = Precision.ONEDNN_INT8, {WIDE: NARROW, NARROW: WIDE}[operators.weight_highest()]
    expert = files.classifier("cls/x", "squeezenet1_1", seed=3, size=56)  # proven by no other test of this process
    expert = calibrated(expert, form, store.directory, image)
    backend = backend_for(expert.architecture)
    packed, recipe = backend.pack(expert, form), form_of(form).recipe()
    levels = [tensor for tensor in packed.tensors.values() if tensor.dtype == torch.int8]
    assert max(int(each.abs().max()) for each in levels) == operators.weight_highest()
    monkeypatch.setattr(operators, "weight_highest", lambda: other)
    assert form_of(form).recipe() != recipe
    with pytest.raises(BackendUnavailable, match=r"it was packed for .*: pack the line again here"):
        backend.skeleton(expert, form, packed.program, "cpu")
    with pytest.raises(WeightsMismatch, match="no form of eight bits before it is calibrated"):
        backend.pack(expert, form)


def test_form_without_its_operators_is_not_offered_and_gives_the_reason(expert, monkeypatch):
    monkeypatch.setattr(operators, "why_absent", lambda dtype: "torch's C shim for opaque tensors")
    assert executable_forms().isdisjoint(FORMS)
    with pytest.raises(
        WeightsMismatch, match=r"onednn-fp32 does not run on this CPU: torch's C shim .*; choose auto or fp32"
    ):
        backend_for(expert.architecture).pack(expert, FORM)
    assert form_of(FORM).recipe() == ""


def test_unsupported_size_is_refused_in_the_architectures_own_words(files):
    small, backend = files.expert("cls/x", "alexnet", files.folder / "x.safetensors", size=16), backend_for("alexnet")
    form = execution._fused(backend, backend.structure(small), (16, 16), torch.float32)
    assert isinstance(form, RefusedModule)
    assert "too small" in form.reason
