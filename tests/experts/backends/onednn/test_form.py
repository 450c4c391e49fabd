"""oneDNN as a form of execution: torch's answers, one graph per architecture and size, packed beside the others."""

import json
import logging
from dataclasses import replace

import psutil
import pytest
import torch

from experts.backends import backend_for, observed_ranges
from experts.backends.base import RefusedModule
from experts.backends.forms import executable_forms, form_of
from experts.backends.onednn import execution, operators
from experts.backends.onednn import form as onednn_form
from experts.backends.onednn.operators import identity
from experts.calibrations import CalibrationFolder, read_calibration
from experts.errors import BackendUnavailable, OutputInvalid, WeightsMismatch
from experts.expert import Precision
from experts.packed.calibrated import calibration_of
from experts.packed.manifests import ManifestFolder
from experts.packed.packing import pack_line
from tests.forms import each_of, needs

FORM = Precision.ONEDNN_FP32
FORMS = [Precision.ONEDNN_FP32, Precision.ONEDNN_BF16]
MIB = 1024 * 1024


def skeleton_of(expert, precision=FORM):
    backend = backend_for(expert.architecture)
    packed = backend.pack(expert, precision)
    skeleton = backend.skeleton(expert, precision, packed.program, "cpu")
    skeleton.bind(packed.tensors)
    return skeleton


def answers_of(expert, precision, *images):
    prepared = [backend_for(expert.architecture).prepare(expert, image) for image in images]
    return skeleton_of(expert, precision).infer(expert, prepared)


def packed_in(store, experts, *precisions):
    report = pack_line(experts, lambda expert: set(precisions), store)
    assert report.failed == {}
    return report.packed


@pytest.fixture
def expert(files):
    return files.classifier("cls/x", "squeezenet1_1", seed=3)


@pytest.mark.parametrize("precision", each_of(*FORMS))
@pytest.mark.parametrize("architecture", ["squeezenet1_1", "mobilenet_v3_small", "resnet18"])
def test_a_classifier_answers_as_in_fp32(files, image, architecture, precision):
    expert = files.classifier("cls/x", architecture, seed=3)
    images = (image, image[::-1].copy(), 255 - image)
    expected, found = answers_of(expert, Precision.FP32, *images), answers_of(expert, precision, *images)
    tolerance = 1e-5 if precision is Precision.ONEDNN_FP32 else 0.05
    assert [each.score for each in found] == pytest.approx([each.score for each in expected], abs=tolerance)
    if precision is Precision.ONEDNN_FP32:
        assert [each.label for each in found] == [each.label for each in expected]


def test_a_detector_finds_the_boxes_of_fp32(files, image):
    expert = files.detector("det/x", "yolov5n")
    expected, found = (answers_of(expert, precision, image)[0] for precision in (Precision.FP32, FORM))
    assert len(found.boxes) == len(expected.boxes) > 0
    corners = [
        torch.tensor([[box.left, box.top, box.right, box.bottom, box.score] for box in each.boxes])
        for each in (found, expected)
    ]
    distances = (corners[0][:, None] - corners[1][None]).abs().amax(dim=2)  # nearly equal scores may swap places
    assert max(distances.amin(dim=0).max(), distances.amin(dim=1).max()) < 0.01


def test_experts_of_one_architecture_share_program_and_graph(files):
    backend = backend_for("squeezenet1_1")
    experts = [files.classifier(f"cls/{seed}", "squeezenet1_1", seed) for seed in (1, 2)]
    packed = [backend.pack(expert, FORM) for expert in experts]
    assert packed[0].program == packed[1].program
    assert list(packed[0].tensors) == list(packed[1].tensors)
    skeletons = [backend.skeleton(expert, FORM, packed[0].program, "cpu") for expert in experts]
    assert skeletons[0]._module is skeletons[1]._module


def test_two_sizes_of_images_are_two_layouts(files):
    backend = backend_for("squeezenet1_1")
    packed = [backend.pack(files.classifier("cls/x", "squeezenet1_1", size=size), FORM) for size in (64, 96)]
    assert packed[0].program != packed[1].program


def test_a_frozen_backbone_is_shared_in_this_form_too(files, store, make_slot, image):
    module = files.build("mobilenet_v3_small", 3)
    first = files.torch_module("cls/first", module.eval(), "mobilenet_v3_small")
    with torch.no_grad():
        for parameter in module.classifier[-1].parameters():
            parameter.normal_()
    second = files.torch_module("cls/second", module, "mobilenet_v3_small")
    packed = packed_in(store, [first, second], FORM)
    forms = [packed[expert.id][FORM] for expert in (first, second)]
    assert forms[0].own.size_bytes == 4096 * -(-(3 * 1024 + 3) * 4 // 4096)  # the head alone
    assert forms[0].shared == forms[1].shared != ()
    assert forms[0].layout == forms[1].layout
    answers = [
        make_slot(expert, form, store).infer(expert, image) for expert, form in zip((first, second), forms, strict=True)
    ]
    assert answers[0] != answers[1]


def test_a_thousand_switches_construct_nothing_and_take_no_memory(files, store, make_slot, image):
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


def test_the_name_of_a_tensor_tells_its_layout(expert):
    packed = backend_for(expert.architecture).pack(expert, FORM)
    told = json.loads(packed.program)
    assert told["made for"] == identity()
    assert told["images"] == [64, 64]
    for name, digest in told["weights"].items():
        assert packed.tensors[f"{name} {digest[:16]}"].dim() == 1
    assert "features.0.bias" in packed.tensors


def calibrated(expert, folder, *images):
    """The expert with ranges observed on these images."""
    prepared = [backend_for(expert.architecture).prepare(expert, image).tensor for image in images]
    ranges = {Precision.ONEDNN_INT8: observed_ranges(expert, Precision.ONEDNN_INT8, [torch.stack(prepared)])}
    calibrations = CalibrationFolder(folder)
    calibrations.write(expert.id, calibration_of(expert, "", len(images), ("good", "bad"), ranges))
    return replace(expert, calibration=calibrations.path(expert.id))


@needs(Precision.ONEDNN_INT8)
@pytest.mark.parametrize("architecture", ["squeezenet1_1", "mobilenet_v3_small", "resnet18"])
def test_a_classifier_answers_in_eight_bits_as_in_fp32(files, image, tmp_path, architecture):
    images = (image, image[::-1].copy(), 255 - image)
    expert = calibrated(files.classifier("cls/x", architecture, seed=3), tmp_path, *images)
    expected, found = (answers_of(expert, each, *images) for each in (Precision.FP32, Precision.ONEDNN_INT8))
    assert [each.score for each in found] == pytest.approx([each.score for each in expected], abs=0.05)


@needs(Precision.ONEDNN_INT8)
def test_an_expert_that_was_not_calibrated_has_no_eight_bits(expert):
    with pytest.raises(WeightsMismatch, match="no form of eight bits before it is calibrated"):
        backend_for(expert.architecture).pack(expert, Precision.ONEDNN_INT8)


@needs(Precision.ONEDNN_INT8)
def test_an_expert_that_answers_with_no_number_is_not_calibrated(files, image, tmp_path):
    module = files.build("squeezenet1_1", 3)
    for parameter in module.parameters():
        parameter.data.fill_(1e30)
    expert = files.torch_module("cls/x", module, "squeezenet1_1")
    with pytest.raises(WeightsMismatch, match=r"cannot be calibrated: answer of features.*: .* have no levels"):
        calibrated(expert, tmp_path, image)


@needs(Precision.ONEDNN_INT8)
def test_a_weight_that_is_no_number_is_refused_with_its_name(expert, tmp_path, image):
    """Folding makes one of numbers that were too large; a ReLU behind it may hide it from what is observed."""
    expert, backend = calibrated(expert, tmp_path, image), backend_for(expert.architecture)
    form = form_of(Precision.ONEDNN_INT8)
    weights = backend.weights(expert, form)
    ranges = read_calibration(expert.calibration).ranges[form.name]
    decided = execution._decided(backend, backend.structure(expert), (64, 64), torch.int8)
    name = "features.3.expand3x3.weight"
    wrong = weights | {name: weights[name].clone().fill_(float("inf"))}
    assert onednn_form.packable(expert, form, decided, weights, ranges).program
    assert backend.pack(expert, Precision.ONEDNN_INT8).program
    with pytest.raises(WeightsMismatch, match=rf"{name}: .* have no levels: choose fp32"):
        onednn_form.packable(expert, form, decided, wrong, ranges)


def spoil(program, **changed):
    return json.dumps(json.loads(program) | changed).encode()


@pytest.mark.parametrize(
    ("spoiled", "reason"),
    [
        (lambda program: program[:-5], "its program is cut"),
        (lambda program: b"", "its program is cut"),
        (lambda program: b"[1]", "its program is cut"),
        (
            lambda program: spoil(program, **{"made for": "torch 2.9, another CPU"}),
            "was packed for torch 2.9, another CPU",
        ),
        (lambda program: spoil(program, weights={"fc.weight": "0" * 64}), "is of other weights"),
        (lambda program: spoil(program, weights={"features.0.weight": "0" * 64}), "does not lie as oneDNN wants it"),
    ],
)
def test_a_program_that_is_cut_or_foreign_is_not_run(expert, spoiled, reason, monkeypatch):
    backend = backend_for(expert.architecture)
    program = backend.pack(expert, FORM).program
    monkeypatch.setattr(onednn_form, "blocked_view", lambda *_: pytest.fail("it reached the shim"))
    with pytest.raises(BackendUnavailable, match=f"{reason}.*pack the line again here"):
        backend.skeleton(expert, FORM, spoiled(program), "cpu")


def test_tensors_of_another_layout_do_not_bind(expert):
    backend = backend_for(expert.architecture)
    packed = backend.pack(expert, FORM)
    skeleton = backend.skeleton(expert, FORM, packed.program, "cpu")
    foreign = {name.replace("features.0.weight ", "features.0.weight f"): each for name, each in packed.tensors.items()}
    with pytest.raises(ValueError, match="do not fit the skeleton"):
        skeleton.bind(foreign)
    cut = {name: each[:-16] if each.dim() == 1 and " " in name else each for name, each in packed.tensors.items()}
    with pytest.raises(ValueError, match="are needed, not"):
        skeleton.bind(cut)


def test_another_cpu_or_torch_packs_again_and_says_so(expert, store, monkeypatch, caplog):
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


def test_it_runs_on_the_cpu_only(expert):
    backend = backend_for(expert.architecture)
    with pytest.raises(BackendUnavailable, match="on the CPU, not on cuda:0"):
        backend.skeleton(expert, FORM, backend.pack(expert, FORM).program, "cuda:0")


def test_without_its_operators_the_form_is_not_offered_and_says_why(expert, monkeypatch):
    monkeypatch.setattr(operators, "why_absent", lambda dtype: "torch's C shim for opaque tensors")
    assert executable_forms().isdisjoint(FORMS)
    with pytest.raises(
        WeightsMismatch, match=r"onednn-fp32 does not run on this CPU: torch's C shim .*; choose auto or fp32"
    ):
        backend_for(expert.architecture).pack(expert, FORM)
    assert form_of(FORM).recipe() == ""


def test_an_answer_that_is_not_a_number_is_no_prediction(files, image):
    module = files.build("squeezenet1_1", 3)
    for parameter in module.parameters():
        parameter.data.fill_(1e30)
    with pytest.raises(OutputInvalid):
        answers_of(files.torch_module("cls/x", module, "squeezenet1_1"), FORM, image)


def test_a_size_that_an_architecture_does_not_take_is_refused_with_its_own_words(files):
    small, backend = files.expert("cls/x", "alexnet", files.folder / "x.safetensors", size=16), backend_for("alexnet")
    form = execution._fused(backend, backend.structure(small), (16, 16), torch.float32)
    assert isinstance(form, RefusedModule)
    assert "too small" in form.reason
