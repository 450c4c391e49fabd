"""ONNX Runtime as a form of execution: torch's answers, one program per architecture, packed beside the others."""

import json
import os
from dataclasses import replace

import onnx
import pytest
import torch
from torch import nn

from experts.backends import backend_for
from experts.backends.base import RefusedModule
from experts.backends.forms import FORMS, executable_forms, form_of
from experts.backends.ort import session as onnx_session
from experts.backends.ort.execution import packable, runtime_form
from experts.backends.ort.layout import IDENTITY_KEY, runtime_identity
from experts.errors import BackendUnavailable, OutputInvalid, WeightsMismatch
from experts.expert import Precision
from experts.packed.manifests import ManifestFolder
from experts.packed.packing import pack_line

FORM = Precision.ONNXRUNTIME


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


@pytest.mark.parametrize("architecture", ["squeezenet1_1", "mobilenet_v3_small"])
def test_a_classifier_answers_as_in_fp32(files, image, architecture):
    expert = files.classifier("cls/x", architecture, seed=3)
    images = (image, image[::-1].copy(), 255 - image)
    expected, found = answers_of(expert, Precision.FP32, *images), answers_of(expert, FORM, *images)
    assert [each.label for each in found] == [each.label for each in expected]
    assert [each.score for each in found] == pytest.approx([each.score for each in expected], abs=1e-5)
    assert found[0].score < 1  # not so certain that nothing could change it


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


def test_experts_of_one_architecture_share_program_and_session(files):
    backend = backend_for("squeezenet1_1")
    experts = [files.classifier(f"cls/{seed}", "squeezenet1_1", seed) for seed in (1, 2)]
    made = onnx_session._sessions.count
    packed = [backend.pack(expert, FORM) for expert in experts]
    assert onnx_session._sessions.count == made  # that it was tried on leaves no session behind
    assert packed[0].program == packed[1].program
    assert list(packed[0].tensors) == list(packed[1].tensors)
    assert not any(torch.equal(packed[0].tensors[name], packed[1].tensors[name]) for name in packed[0].tensors)
    sessions = {id(backend.skeleton(expert, FORM, packed[0].program, "cpu")._session) for expert in experts}
    assert len(sessions) == 1


def test_the_program_holds_no_weights_and_no_trace_of_who_exported_it(files):
    program = backend_for("squeezenet1_1").pack(files.classifier("cls/x", "squeezenet1_1"), FORM).program
    assert len(program) < 50_000
    model = onnx.load_from_string(program)
    assert [(note.key, note.value) for note in model.metadata_props] == [(IDENTITY_KEY, runtime_identity())]
    assert os.getcwd().encode() not in program
    assert not any(node.doc_string or node.metadata_props for node in model.graph.node)


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


def test_forms_lie_beside_one_another(files, store):
    expert = files.classifier("cls/x", "squeezenet1_1")
    manifests = ManifestFolder(store.directory / "manifests")
    alone = packed_in(store, [expert], Precision.FP32)[expert.id]
    written = manifests.path(expert.id, "fp32").stat().st_mtime_ns
    both = packed_in(store, [expert], Precision.FP32, FORM)[expert.id]
    assert both[Precision.FP32] == alone[Precision.FP32]
    assert manifests.path(expert.id, "fp32").stat().st_mtime_ns == written
    assert both[FORM].layout != both[Precision.FP32].layout
    assert [both[precision].program_sha256 is None for precision in (Precision.FP32, FORM)] == [True, False]
    names = sorted(path.name for path in (store.directory / "manifests" / "cls").iterdir())
    assert names == ["x.fp32.json", "x.onnxruntime.json"]


def test_manifests_of_other_forms_know_nothing_of_this_one(files, store):
    """What was packed before this form existed is still up to date."""
    expert = files.classifier("cls/x", "squeezenet1_1")
    packed_in(store, [expert], Precision.FP32, FORM)
    manifests = ManifestFolder(store.directory / "manifests")
    recipe = [1, "squeezenet1_1", None, list(expert.labels), [64, 64]]
    assert json.loads(manifests.read(expert.id, "fp32").source.recipe) == recipe
    assert json.loads(manifests.read(expert.id, "onnxruntime").source.recipe) == [*recipe, form_of(FORM).recipe()]
    assert form_of(Precision.FP32).recipe() == ""
    assert runtime_identity() in form_of(FORM).recipe()


def test_what_was_packed_for_another_runtime_is_packed_again(files, store):
    expert = files.classifier("cls/x", "squeezenet1_1")
    packed = packed_in(store, [expert], FORM)
    manifests = ManifestFolder(store.directory / "manifests")
    found = manifests.read(expert.id, FORM)
    older = found.source.recipe.replace(runtime_identity(), "onnxruntime 1.0.0, channels in blocks of 8")
    manifests.write(replace(found, source=replace(found.source, recipe=older)))
    assert packed_in(store, [expert], FORM) == packed
    assert manifests.read(expert.id, FORM) == found


def test_a_program_for_another_runtime_is_not_run(files):
    expert = files.classifier("cls/x", "squeezenet1_1")
    backend = backend_for(expert.architecture)
    program = backend.pack(expert, FORM).program.replace(b"in blocks of", b"in stocks of")
    with pytest.raises(BackendUnavailable, match=r"in stocks of .*pack the line again"):
        backend.skeleton(expert, FORM, program, "cpu")


def test_it_runs_on_the_cpu_only(files):
    expert = files.classifier("cls/x", "squeezenet1_1")
    backend = backend_for(expert.architecture)
    with pytest.raises(BackendUnavailable, match="on the CPU, not on cuda:0"):
        backend.skeleton(expert, FORM, backend.pack(expert, FORM).program, "cuda:0")
    cpu_only = [name for name, form in FORMS.items() if form.is_cpu_only]
    onednn = [Precision.ONEDNN_FP32, Precision.ONEDNN_BF16, Precision.ONEDNN_INT8]
    assert cpu_only == [FORM, *onednn, Precision.ONNXRUNTIME_INT8]


def test_torchs_architectures_offer_it_and_onnx_graphs_do_not():
    others = {name for name, form in FORMS.items() if form.why_absent() is not None}
    of_torch = frozenset(Precision) - others - {Precision.INT8}  # which is of language models
    assert {FORM, Precision.FP32, Precision.BF16, Precision.FP16} <= of_torch == executable_forms()
    assert backend_for("resnet18").precisions == backend_for("yolov5n").precisions == of_torch
    assert backend_for("onnx").precisions == {Precision.FP32}


def test_an_answer_that_is_not_a_number_is_no_prediction(files, image):
    module = files.build("squeezenet1_1", 3)
    for parameter in module.parameters():
        parameter.data.fill_(1e30)
    expert = files.torch_module("cls/x", module, "squeezenet1_1")
    with pytest.raises(OutputInvalid):
        answers_of(expert, FORM, image)


def test_memory_with_gaps_is_refused(files):
    expert = files.classifier("cls/x", "squeezenet1_1")
    backend = backend_for(expert.architecture)
    packed = backend.pack(expert, FORM)
    gaps = {name: torch.zeros((*tensor.shape, 2))[..., 0] for name, tensor in packed.tensors.items()}
    with pytest.raises(ValueError, match="contiguous tensors only"):
        backend.skeleton(expert, FORM, packed.program, "cpu").bind(gaps)


class Weighted(nn.Module):
    """A module of one convolution; subclasses spoil it."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1, device="meta")

    def forward(self, images):
        return self.conv(images).mean(dim=(2, 3))


class Asking(Weighted):
    """Its way depends on the values of the images, which no graph can hold."""

    def forward(self, images):
        return super().forward(images) if images.sum() > 0 else images.mean(dim=(2, 3))


class Rolling(Weighted):
    """It answers differently each time."""

    def forward(self, images):
        return super().forward(images) + torch.rand((1, 4), device=images.device)


def graph_of(module, size=(8, 8)):
    sample = {name: torch.ones(tensor.shape) for name, tensor in module.state_dict().items()}
    return runtime_form(module.eval().requires_grad_(False), size, ("answer",), sample)


def test_any_module_that_can_be_exported_is_checked_and_taken():
    form = graph_of(Weighted())
    assert list(form.inputs) == ["conv.weight", "conv.bias"]


@pytest.mark.parametrize(
    ("module", "reason"), [(Asking, "torch cannot export it"), (Rolling, "does not answer as torch does: answer by")]
)
def test_what_does_not_hold_is_refused_with_the_reason(files, module, reason):
    form = graph_of(module())
    assert isinstance(form, RefusedModule)
    assert reason in form.reason
    with pytest.raises(WeightsMismatch, match=f"resnet18 does not run in onnxruntime: .*{reason}.*choose fp32 or bf16"):
        packable(files.expert("cls/x", "resnet18", files.folder / "x.safetensors"), FORMS[FORM], form, {})


def test_serving_what_is_packed_exports_nothing(files, store, forks):
    """A process that has exported nothing runs it from the packed files, without the exporter."""
    expert = files.classifier("cls/x", "squeezenet1_1")
    packed_in(store, [expert], FORM)
    program = (
        "import sys, warnings\n"
        "warnings.simplefilter('error')\n"
        "from pathlib import Path\n"
        "import numpy as np, torch\n"
        "from experts.backends import backend_for\n"
        "from experts.expert import Expert, InputSpec, Precision\n"
        "from experts.packed.packing import pack_line\n"
        "from experts.packed.weights import AlignedBuffer, SegmentStore, tensor_views\n"
        "torch.set_num_threads(1)\n"
        f"path, labels = Path({str(expert.weights)!r}), {expert.labels}\n"
        "expert = Expert('cls/x', 'squeezenet1_1', path, labels, InputSpec(64, 64))\n"
        f"store = SegmentStore(Path({str(store.directory)!r}))\n"
        "form = Precision.ONNXRUNTIME\n"
        "packed = pack_line([expert], lambda name: {form}, store).packed[expert.id][form]\n"
        "buffer = AlignedBuffer(packed.own.slot_bytes)\n"
        "store.read(packed.own, buffer, expert.id)\n"
        "backend = backend_for(expert.architecture)\n"
        "skeleton = backend.skeleton(expert, form, store.program(packed), 'cpu')\n"
        "skeleton.bind(tensor_views(buffer.tensor, packed.own))\n"
        "image = np.zeros((64, 64, 3), dtype=np.uint8)\n"
        "print(skeleton.infer(expert, [backend.prepare(expert, image)])[0].label)\n"
        "store.close()\n"
        "assert 'onnxscript' not in sys.modules\n"
    )
    ended = forks.run(program)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() in expert.labels
