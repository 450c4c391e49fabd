"""Batches on fake tensors of CUDA, which know devices but no numbers: what mixes devices or asks for a value raises.

So each value that a device's batch needs on the host is asked for after its one copy there.
"""

import math
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from experts.backends import backend_for, torch_backend
from experts.backends.base import Prepared
from experts.backends.forms import form_of
from experts.backends.modules.binding import is_count
from experts.backends.onnx.backend import OnnxSkeleton
from experts.backends.vision.detector import DetectorBackend
from experts.errors import OutputInvalid
from experts.expert import Expert, InputSpec, Precision, Task
from tests.experts.backends.onnx.anomaly_graphs import brightness
from tests.experts.conftest import LABELS, bound

IMAGES = 3
COPYING = {"aten::to", "aten::_to_copy", "aten::copy_"}
SIZES = {"maxvit_t": 224, "vit_b_16": 32, "inception_v3": 96}
FAMILIES = [
    "resnet18", "mobilenet_v3_small", "efficientnet_b0", "densenet121", "googlenet", "inception_v3", "vit_b_16",
    "swin_t", "swin_v2_t", "maxvit_t", "regnet_y_400mf", "shufflenet_v2_x0_5", "yolov5n", "yolov6n", "yolo11n",
    "yolo26n",
]  # fmt: skip
SLOW = {"maxvit_t", "densenet121", "swin_v2_t", "inception_v3", "efficientnet_b0"}


class Crossings(TorchDispatchMode):
    """Copies between host and device, by direction."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        answer = func(*args, **(kwargs or {}))
        devices = [each.device.type for each in (*args, answer) if isinstance(each, torch.Tensor)]
        if func.name().partition(".")[0] in COPYING and len({*devices}) > 1:
            self.seen.append(" to ".join(devices))
        return answer


@contextmanager
def fake_cuda():
    """A device without numbers: its copies to the host, as shapes, and the others; the host gets noise."""
    downloads = []

    def leave():
        left.enter_context(unset_fake_temporarily())  # from here on, tensors of the host with numbers

    def copied_down(parts, device):
        assert {part.device.type for part in parts} == {device.type} == {"cuda"}
        downloads.append([tuple(part.shape) for part in parts])
        leave()
        return [torch.rand(shape) for shape in downloads[-1]]

    with FakeTensorMode(), Crossings() as crossings, ExitStack() as left, pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_backend, "copied_down", copied_down)
        yield downloads, crossings.seen, leave


def expert_of(architecture, tmp_path):
    side = SIZES.get(architecture, 64)
    return Expert("cls/x", architecture, tmp_path / "none", LABELS, InputSpec(side, side))


def inferred(expert, precision):
    """What a batch of a fake device answers, its copies down, and its copies up."""
    backend, side = backend_for(expert.architecture), expert.pixels.height
    skeleton, dtype = backend.skeleton(expert, precision, b"", "cuda"), form_of(precision).dtype
    module = backend.module(backend.structure(expert)).state_dict()
    weights = {name: each for name, each in module.items() if not is_count(name)}
    kinds = {name: (each.shape, dtype if each.is_floating_point() else each.dtype) for name, each in weights.items()}
    with fake_cuda() as (downloads, crossings, _):
        skeleton.bind({name: torch.empty(shape, dtype=of, device="cuda") for name, (shape, of) in kinds.items()})
        images = [Prepared(torch.rand(3, side, side), side, side) for _ in range(IMAGES)]
        return skeleton.infer(expert, images), downloads, crossings


CASES = [(each, Precision.FP32) for each in FAMILIES] + [("resnet18", Precision.FP16), ("yolo11n", Precision.FP16)]


@pytest.mark.parametrize(
    ("architecture", "precision"),
    [pytest.param(*each, marks=pytest.mark.slow if each[0] in SLOW else ()) for each in CASES],
)
def test_batch_of_a_device_is_one_copy_up_and_one_down(tmp_path, architecture, precision):
    predictions, downloads, crossings = inferred(expert_of(architecture, tmp_path), precision)
    assert len(predictions) == IMAGES
    assert (len(downloads), crossings) == (1, ["cpu to cuda"])
    if architecture.startswith("yolo"):  # distances to the sides, not bins
        assert downloads == [[(IMAGES, 4, 84), (IMAGES, len(LABELS), 84)]]


@pytest.mark.parametrize("architecture", ["yolo11n", "yolo26n"])
def test_distances_give_the_boxes_that_bins_give(files, architecture, image):
    expert = files.detector("det/x", architecture)
    backend, skeleton = DetectorBackend(), bound(expert)
    prepared = [backend.prepare(expert, image)] * 2
    with torch.inference_mode():
        outputs = skeleton.outputs([each.tensor for each in prepared])
        found = [backend.reader(expert)(expert, each, prepared) for each in (outputs, backend.condensed(outputs))]
    assert found[0] == found[1]
    assert found[0][0].boxes


@pytest.mark.parametrize("fault", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1])
def test_infinite_bin_or_score_is_still_found_among_distances(files, image, fault, place):
    expert = files.detector("det/x", "yolo11n")
    backend = DetectorBackend()
    prepared = [backend.prepare(expert, image)]
    with torch.inference_mode():
        outputs = [each.clone() for each in bound(expert).outputs([prepared[0].tensor])]
        outputs[place][0, 1, 5] = fault
        with pytest.raises(OutputInvalid, match="NaN or infinity"):
            backend.reader(expert)(expert, backend.condensed(outputs), prepared)


@pytest.mark.parametrize("kind", ["classifier", "anomaly"])
def test_onnx_batch_of_a_device_reads_its_answers_on_the_host(files, monkeypatch, kind):
    expert = files.onnx("cls/x")
    if kind == "anomaly":
        path = files.path("cls/y", ".onnx")
        onnx.save_model(brightness(("score", "score"), ("map", "map")), path)
        expert = replace(expert, weights=path, labels=("good", "bad"), task=Task.ANOMALY, threshold=0.5)
    session, devices = bound(expert)._session, []
    skeleton = OnnxSkeleton(session, "cuda")
    with fake_cuda() as (_, crossings, leave):

        def run(_, images):
            devices.append(images.device.type)
            leave()
            shapes = [[IMAGES, *output.shape[1:]] for output in session.get_outputs()]
            return [np.random.default_rng(0).random(shape, np.float32) for shape in shapes]

        monkeypatch.setattr(OnnxSkeleton, "_run", run)
        images = [Prepared(torch.rand(3, 32, 32), 32, 32) for _ in range(IMAGES)]
        predictions = skeleton.infer(expert, images)
    assert (len(predictions), devices, crossings) == (IMAGES, ["cuda"], ["cpu to cuda"])


def test_fp32_of_a_device_is_not_tf32(tmp_path):
    flags = torch.backends.cudnn, torch.backends.cuda.matmul
    for each in flags:
        each.allow_tf32 = True
    backend_for("resnet18").skeleton(expert_of("resnet18", tmp_path), Precision.FP32, b"", "cuda")
    assert [each.allow_tf32 for each in flags] == [False, False]
