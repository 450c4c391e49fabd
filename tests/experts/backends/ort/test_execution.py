"""ONNX Runtime as a form of execution: torch's answers, one program per architecture, packed beside the others."""

import os
import pickle

import onnx
import pytest
import torch
from torch import nn

from experts.backends import backend_for
from experts.backends.base import RefusedModule
from experts.backends.forms import FORMS
from experts.backends.ort.execution import runtime_form
from experts.backends.ort.layout import IDENTITY_KEY, runtime_identity
from experts.backends.ort.session import cuda_options, number_of
from experts.errors import BackendUnavailable, WeightsMismatch
from experts.expert import Precision
from tests.experts.conftest import packed_in

FORM = Precision.ONNXRUNTIME


def test_program_holds_no_weights_and_no_path_of_its_export(files):
    program = backend_for("squeezenet1_1").pack(files.classifier("cls/x", "squeezenet1_1"), FORM).program
    assert len(program) < 50_000
    model = onnx.load_from_string(program)
    assert [(note.key, note.value) for note in model.metadata_props] == [(IDENTITY_KEY, runtime_identity())]
    assert os.getcwd().encode() not in program
    assert not any(node.doc_string or node.metadata_props for node in model.graph.node)


def test_program_of_another_runtime_or_memory_with_gaps_is_refused(files):
    expert = files.classifier("cls/x", "squeezenet1_1")
    backend = backend_for(expert.architecture)
    packed = backend.pack(expert, FORM)
    with pytest.raises(BackendUnavailable, match=r"in stocks of .*pack the line again"):
        backend.skeleton(expert, FORM, packed.program.replace(b"in blocks of", b"in stocks of"), "cpu")
    gaps = {name: torch.zeros((*tensor.shape, 2))[..., 0] for name, tensor in packed.tensors.items()}
    with pytest.raises(ValueError, match="contiguous tensors only"):
        backend.skeleton(expert, FORM, packed.program, "cpu").bind(gaps)


class Weighted(nn.Module):
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
    def forward(self, images):
        return super().forward(images) + torch.rand((1, 4), device=images.device)


@pytest.mark.parametrize(
    ("module", "reason"), [(Asking, "torch cannot export it"), (Rolling, "does not answer as torch does: answer by")]
)
def test_module_that_exports_wrongly_is_refused_with_the_reason(files, module, reason):
    made = module().eval().requires_grad_(False)
    sample = {name: torch.ones(tensor.shape) for name, tensor in made.state_dict().items()}
    form = runtime_form(made, (8, 8), ("answer",), sample)
    assert isinstance(form, RefusedModule)
    assert reason in form.reason
    with pytest.raises(WeightsMismatch, match=f"resnet18 does not run in onnxruntime: .*{reason}.*choose fp32"):
        FORMS[FORM].accepted(files.expert("cls/x", "resnet18", files.folder / "x.safetensors"), form)


def test_serving_packed_weights_exports_nothing(files, store, forks):
    """A process that has exported nothing runs it from the packed files, without the exporter."""
    expert = files.classifier("cls/x", "squeezenet1_1")
    packed_in(store, [expert], FORM)
    program = f"""
import pickle, sys, warnings
warnings.simplefilter("error")
from pathlib import Path
import numpy as np
from experts.packed.weights import SegmentStore
from tests.experts.conftest import Slot, packed_in
expert, directory = pickle.loads({pickle.dumps((expert, store.directory))!r})
store = SegmentStore(directory)
packed = packed_in(store, [expert], {FORM.value!r})[expert.id][{FORM.value!r}]
print(Slot(expert, packed, store).infer(expert, np.zeros((64, 64, 3), np.uint8))[0].label)
store.close()
assert "onnxscript" not in sys.modules
"""
    ended = forks.run(program)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() in expert.labels


def test_gpu_without_a_number_is_the_one_that_torch_uses(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert [number_of(torch.device(each)) for each in ("cuda", "cuda:1", "cpu")] == [3, 1, 0]


def test_gpu_session_has_a_bounded_arena_tries_no_algorithms_and_computes_fp32():
    assert cuda_options(1, 8 * 2**30) == {
        "device_id": "1",
        "gpu_mem_limit": str(2**30),
        "arena_extend_strategy": "kSameAsRequested",
        "cudnn_conv_algo_search": "HEURISTIC",
        "use_tf32": "0",
    }
