"""Tiny experts of every backend, written as real files."""

import copy
import functools
import json
import re
from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import save_file

from experts.backends import backend_for, observed_ranges
from experts.calibrations import CalibrationFolder
from experts.expert import Expert, InputSpec, Precision
from experts.packed.calibrated import calibration_of
from experts.packed.packing import pack_line
from experts.packed.weights import AlignedBuffer, SegmentStore, tensor_views
from tests.experts.onnx_text import model_of

LABELS = ("ok", "missing", "shifted")


class Slot:
    """One expert's memory: buffers of its segments, and a skeleton bound to them."""

    def __init__(self, expert, packed, store):
        self.store = store
        self.buffers = [AlignedBuffer(segment.slot_bytes) for segment in packed.segments]
        self.load(expert, packed)
        precision = Precision(packed.precision)
        self.skeleton = backend_for(expert.architecture).skeleton(expert, precision, store.program(packed), "cpu")
        views = {}
        for buffer, segment in zip(self.buffers, packed.segments, strict=True):
            views |= tensor_views(buffer.tensor, segment)
        self.skeleton.bind(views)

    def load(self, expert, packed):
        for buffer, segment in zip(self.buffers, packed.segments, strict=True):
            self.store.read(segment, buffer, expert.id)

    def infer(self, expert, *images):
        backend = backend_for(expert.architecture)
        return self.skeleton.infer(expert, [backend.prepare(expert, image) for image in images])


def bound(expert, precision=Precision.FP32):
    """A skeleton over an expert's weights, packed in this form."""
    backend = backend_for(expert.architecture)
    packed = backend.pack(expert, precision)
    skeleton = backend.skeleton(expert, precision, packed.program, "cpu")
    skeleton.bind(packed.tensors)
    return skeleton


def answers(expert, *images, precision=Precision.FP32):
    prepared = [backend_for(expert.architecture).prepare(expert, image) for image in images]
    return bound(expert, precision).infer(expert, prepared)


def calibrated(expert, form, folder, *images):
    """The expert with the ranges that a form of eight bits observes on these images, kept in ``folder``."""
    prepared = [backend_for(expert.architecture).prepare(expert, image).tensor for image in images]
    ranges = observed_ranges(expert, form, [torch.stack(prepared)])
    calibrations = CalibrationFolder(folder)
    calibrations.write(expert.id, calibration_of(expert, "", len(images), ("good", "bad"), lambda: ranges))
    return replace(expert, calibration=calibrations.path(expert.id))


def packed_in(store, experts, *forms):
    """What each expert is packed as, by form: all of them, or the test fails."""
    report = pack_line(experts, lambda expert: set(forms), store)
    assert report.failed == {}
    return report.packed


class ExpertFiles:
    def __init__(self, folder):
        self.folder = folder

    def expert(self, name, architecture, weights, labels=LABELS, size=64, stem=None):
        return Expert(name, architecture, weights, tuple(labels), InputSpec(size, size), stem=stem)

    def path(self, name, suffix):
        return self.folder / f"{name.replace('/', '-')}{suffix}"

    def torch_module(self, name, module, architecture, labels=LABELS, size=64, stem=None):
        path = self.path(name, ".safetensors")
        save_file({key: tensor.clone() for key, tensor in module.state_dict().items()}, path)
        return self.expert(name, architecture, path, labels, size, stem)

    def classifier(self, name, architecture="resnet18", seed=0, labels=LABELS, size=64, stem=None):
        module = trained_looking(self.build(architecture, len(labels), stem), seed)
        return self.torch_module(name, module, architecture, labels, size, stem)

    def build(self, architecture, label_count, stem=None):
        from experts.backends.vision.classifier import build_trainable

        return build_trainable(architecture, label_count, stem)

    def detector(self, name, architecture="yolov5n", seed=0, labels=LABELS, size=64):
        module = trained_looking(copy.deepcopy(fresh_detector(architecture, len(labels))), seed)
        spread_scores(module)
        return self.torch_module(name, module, architecture, labels, size)

    def fake(self, name, weight_bytes=300_001, labels=LABELS, size=16, **declared):
        path = self.path(name, ".yaml")
        path.write_text(json.dumps({"weight_bytes": weight_bytes, **declared}))
        return self.expert(name, "fake", path, labels, size)

    def onnx(self, name, seed=0, labels=LABELS, size=32, batch="n", outputs=None):
        path = self.path(name, ".onnx")
        onnx.save_model(onnx_classifier(seed, outputs or len(labels), size, batch), path)
        return self.expert(name, "onnx", path, labels, size)


@functools.cache
def fresh_detector(architecture, label_count):
    from experts.backends.vision.detector import build_trainable

    return build_trainable(architecture, label_count)


def spread_scores(detector, branch="one2many", mean_logit=-1):
    """Give a detector scores around the confidence that a box needs, and far enough apart that no two of them tie.

    ``branch``: whose, where it has two.
    """
    last = re.compile(r"cv3\.\d\.2\.(weight|bias)$")  # the class branch's last convolution, on each level
    heads = {key: tensor for key, tensor in detector.named_parameters() if last.search(key)}
    with torch.no_grad():
        raw = detector(torch.from_numpy(picture(96, 96)).permute(2, 0, 1).unsqueeze(0) / 255)[1]
        deviation, mean = torch.std_mean(raw.get(branch, raw)["scores"])
        for key, tensor in heads.items():
            if key.endswith("bias"):
                tensor.sub_(mean).mul_(1.5 / deviation).add_(mean_logit)
            else:
                tensor.mul_(1.5 / deviation)


def trained_looking(module, seed):
    """Weights in which every tensor counts, BatchNorm's statistics included."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, tensor in module.state_dict().items():
            if key.endswith("running_var"):
                tensor.uniform_(0.5, 1.5, generator=generator)
            elif key.endswith("running_mean"):
                tensor.normal_(0, 0.2, generator=generator)
            elif tensor.is_floating_point() and tensor.dim() > 1 and "dfl" not in key:
                tensor.normal_(0, (2 / tensor[0].numel()) ** 0.5, generator=generator)
            elif tensor.is_floating_point() and key.endswith("bias"):
                tensor.normal_(0, 0.1, generator=generator)
    return module.eval()


def tell_apart(module, images, logit):
    """A squeezenet's last layer gives the first of two images ``logit`` and its negative, the second the reverse."""
    with torch.no_grad():
        ok, bad = module.features(images).mean(dim=(2, 3))
        across = 2 * logit / (ok - bad).square().sum() * (ok - bad)
        last, middle = module.classifier[1], across @ (ok + bad) / 2
        last.weight.copy_(torch.stack([across, -across])[:, :, None, None])
        last.bias.copy_(torch.stack([-middle, middle]))


def onnx_classifier(seed, outputs, size, batch):
    """Conv, BatchNorm, Relu, pooling and a linear layer, as an exporter would write them."""
    random = np.random.default_rng(seed)
    text = f"""classifier (float[{batch},3,{size},{size}] image) => (float[{batch},{outputs}] logits) {{
        c = Conv<pads=[1, 1, 1, 1], strides=[2, 2]>(image, "conv.weight")
        b = BatchNormalization(c, "norm.weight", "norm.bias", "norm.mean", "norm.var")
        r = Relu(b)
        p = GlobalAveragePool(r)
        f = Flatten(p)
        logits = Gemm<transB=1>(f, "fc.weight", "fc.bias")
    }}"""
    weights = {
        "conv.weight": random.normal(0, 0.3, (16, 3, 3, 3)), "norm.weight": random.uniform(0.5, 1.5, 16),
        "norm.bias": random.normal(0, 0.1, 16), "norm.mean": random.normal(0, 0.2, 16),
        "norm.var": random.uniform(0.5, 1.5, 16), "fc.weight": random.normal(0, 1, (outputs, 16)),
        "fc.bias": random.normal(0, 0.5, outputs),
    }  # fmt: skip
    return model_of(text, **weights)


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Small inputs gain nothing from more, and threads of several processes on few cores wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def files(tmp_path):
    folder = tmp_path / "weights"
    folder.mkdir()
    return ExpertFiles(folder)


@pytest.fixture
def store(tmp_path):
    store = SegmentStore(tmp_path / "packed")
    yield store
    store.close()


@pytest.fixture
def image():
    """Larger than most experts' input, and not square."""
    return picture(90, 140)


def picture(height, width):
    rows, columns = np.mgrid[0:height, 0:width]
    layers = [(rows * 3 + columns) % 256, (columns * 2) % 256, (rows * columns // 16) % 256]
    return np.stack(layers, axis=2).astype(np.uint8)


@pytest.fixture(scope="session")
def make_slot():
    return Slot
