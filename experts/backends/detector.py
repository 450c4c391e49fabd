"""Detectors: the YOLO families of ultralytics, built from its YAML files by name. The only module that imports it.

An expert is a state dict of the family with one class per label. Images are letterboxed and scaled to [0, 1] whatever
``normalize`` says, as ultralytics trains. The head's raw outputs are decoded here, in float32: coordinates stay exact
in bf16, and threads share no cache of anchors.
"""

from __future__ import annotations

import atexit
import math
import os
import re
import shutil
import tempfile
import warnings
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING

import torch
from PIL import Image

from experts.backends.boxes import candidates, prediction, suppressed
from experts.backends.letterbox import letterboxed
from experts.backends.made_once import MadeOnce
from experts.backends.modules.binding import Weightless, weight_names
from experts.backends.outputs import await_writes, require_numbers
from experts.backends.state_dict import executable, fit
from experts.backends.torch_backend import TorchBackend
from experts.backends.weight_files import read_state_dict
from experts.errors import WeightsMismatch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import numpy as np
    from torch import Tensor
    from torch.nn import Module

    from experts.backends.base import Prepared
    from experts.backends.forms.base import Form, Reader
    from experts.expert import Expert, Prediction


def _keep_ultralytics_to_itself() -> None:
    """Set ultralytics' environment, its only way in: no network, installing, settings or chatter."""
    os.environ.setdefault("YOLO_OFFLINE", "true")
    os.environ.setdefault("YOLO_AUTOINSTALL", "false")
    os.environ.setdefault("YOLO_VERBOSE", "false")
    if "YOLO_CONFIG_DIR" not in os.environ:
        private = tempfile.mkdtemp(prefix="coserve-ultralytics-")
        os.environ["YOLO_CONFIG_DIR"] = private
        atexit.register(shutil.rmtree, private, ignore_errors=True)


_keep_ultralytics_to_itself()
_torch_save, _open_image = torch.save, Image.open

from ultralytics.cfg import get_cfg  # noqa: E402
from ultralytics.nn.modules.conv import Conv  # noqa: E402
from ultralytics.nn.modules.head import Detect, v10Detect  # noqa: E402
from ultralytics.nn.tasks import DetectionModel, yaml_model_load  # noqa: E402
from ultralytics.utils import SETTINGS  # noqa: E402
from ultralytics.utils.ops import make_divisible  # noqa: E402

torch.save, Image.open = _torch_save, _open_image  # the import replaced both for the whole process
SETTINGS.update({"sync": False})

_one_at_a_time = Lock()

OUTPUTS = ("boxes", "scores")
SIDES = 4  # of a box
TEMPLATES_KEPT = 64  # beside those that are held: packing goes through the line's forms in turn


@dataclass(frozen=True, slots=True, weakref_slot=True)
class _Template:
    """A model without memory: as its weights come, and as they are run."""

    original: DetectionModel
    folded: DetectionModel
    strides: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _Answered:
    """Reads the head's raw outputs, boxes and scores."""

    template: _Template

    def __call__(self, expert: Expert, outputs: Sequence[Tensor], batch: Sequence[Prepared]) -> tuple[Prediction, ...]:
        require_numbers(expert, *outputs)
        height, width = batch[0].tensor.shape[1:]
        grids = tuple((int(height // stride), int(width // stride)) for stride in self.template.strides)
        anchors, scale = _anchors(grids, self.template.strides, str(outputs[0].device))
        if outputs[0].shape[1] == SIDES:  # distances: one in pixels may be infinite, of a box that is not told, too
            require_numbers(expert, outputs[0].float() * scale)
        scores = outputs[1].float().sigmoid().transpose(1, 2)
        found = [self._rows(expert, *each, anchors, scale).tolist() for each in zip(outputs[0], scores, strict=True)]
        return tuple(prediction(expert, rows, prepared) for rows, prepared in zip(found, batch, strict=True))

    @staticmethod
    def _rows(expert: Expert, raw_boxes: Tensor, scores: Tensor, anchors: Tensor, scale: Tensor) -> Tensor:
        """Rows of one image: only candidate boxes are decoded, as of thousands nearly none is told."""
        chosen = candidates(expert, scores)
        boxes = _decoded(raw_boxes[:, chosen], anchors[:, chosen], scale[:, chosen])
        require_numbers(expert, boxes)
        return suppressed(expert, boxes, scores[chosen])


class DetectorBackend(TorchBackend):
    """See experts.backends.base.Backend."""

    outputs = OUTPUTS

    def prepare(self, expert: Expert, image: np.ndarray) -> Prepared:
        return letterboxed(image, expert.pixels)

    def structure(self, expert: Expert) -> tuple[str, int]:
        return expert.architecture, len(expert.labels)

    def prototype(self, expert: Expert) -> object:
        return _template_of(expert)

    def module(self, structure: tuple[str, int]) -> Module:
        return _template(*structure).folded

    def sample(self, structure: tuple[str, int]) -> dict[str, Tensor]:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            return _folded(_template(*structure), _build(*structure).state_dict())

    def weights(self, expert: Expert, form: Form) -> dict[str, Tensor]:
        template = _template_of(expert)
        found = {f"model.{re.sub(r'^(model[.])+', '', name)}": t for name, t in read_state_dict(expert).items()}
        fitted = fit(expert, found, template.original.state_dict())
        return executable(expert, _folded(template, fitted), form)

    def reader(self, expert: Expert) -> Reader:
        return _Answered(_template_of(expert))


def build_trainable(architecture: str, class_count: int) -> Module:
    """A fresh model in training mode: ``model.loss(batch)`` works. ValueError for an unknown architecture."""
    model = _build(architecture, class_count)
    model.args = get_cfg()
    return model.train()


def write_onnx_export(path: Path, architecture: str, labels: Sequence[str], side_px: int, seed: int) -> None:
    """Export by ultralytics itself, without suppression. ``path`` ends in .onnx. Raises ValueError, OSError."""
    from ultralytics import YOLO

    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = build_trainable(architecture, len(labels)).eval()
    model.names, model.args, model.task = dict(enumerate(labels)), dict(vars(model.args)), "detect"
    model.pt_path = path.with_suffix(".pt")  # is not there: the exporter writes beside it, under its name
    facade = YOLO(f"{architecture}.yaml", task="detect")
    facade.model = model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own exporter
        facade.export(format="onnx", imgsz=side_px, simplify=False)


@dataclass(frozen=True, slots=True)
class Outline:
    """Number of layers, and channels of the first: they tell most architectures apart before they are built."""

    layers: int
    first_channels: int


def outline(architecture: str) -> Outline:
    """Read ultralytics' YAML of it. Raises ValueError for an unknown architecture."""
    try:
        document = yaml_model_load(f"{architecture}.yaml")
    except FileNotFoundError as error:
        raise ValueError(f"ultralytics has no model {architecture!r}") from error
    scales = document.get("scales") or {"": (1.0, document.get("width_multiple", 1.0), math.inf)}
    _, width, *most = scales.get(document["scale"]) or next(iter(scales.values()))
    channels = next(arguments[0] for *_, arguments in document["backbone"] if arguments)  # YOLOv9e's first has none
    first_channels = make_divisible(min(channels, most[0] if most else math.inf) * width, 8)
    return Outline(len(document["backbone"]) + len(document["head"]), int(first_channels))


def weight_shapes(architecture: str, class_count: int) -> dict[str, tuple[int, ...]]:
    """Build without memory for weights. Raises ValueError for an unknown architecture."""
    with Weightless():
        return {name: tuple(tensor.shape) for name, tensor in _build(architecture, class_count).state_dict().items()}


def _template_of(expert: Expert) -> _Template:
    try:
        template = _template(expert.architecture, len(expert.labels))
    except ValueError as error:
        raise WeightsMismatch(expert.id, str(error)) from error
    largest = int(max(template.strides))
    if expert.pixels.height % largest or expert.pixels.width % largest:
        size = f"{expert.pixels.height}x{expert.pixels.width}"
        raise WeightsMismatch(expert.id, f"{expert.architecture} takes sizes in multiples of {largest}, not {size}")
    return template


def _make_template(architecture: str, label_count: int) -> _Template:
    with Weightless():
        original = _build(architecture, label_count).eval().requires_grad_(False)
        folded = deepcopy(original)
        folded.fuse(verbose=False)
    head = folded.model[-1]
    head.training = True  # of the head alone: it answers with its raw outputs
    strides = tuple(float(stride) for stride in head.stride)
    return _Template(original, folded, strides)


_template = MadeOnce(_make_template, TEMPLATES_KEPT)


def _folded(template: _Template, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights that inference reads, from those as they come."""
    model = deepcopy(template.original)
    model.load_state_dict(tensors, strict=False, assign=True)  # all but the counts of training batches
    model.fuse(verbose=False)
    names = weight_names(template.folded)
    return {name: tensor for name, tensor in model.state_dict().items() if name in names}


def _build(architecture: str, class_count: int) -> DetectionModel:
    try:
        with _building_alone():
            model = DetectionModel(f"{architecture}.yaml", nc=class_count, verbose=False)
    except FileNotFoundError as error:
        raise ValueError(f"ultralytics has no model {architecture!r}") from error
    if type(model.model[-1]) not in {Detect, v10Detect}:
        raise ValueError(f"{architecture} is not a plain YOLO detector: choose one such as yolov5m or yolo11s")
    model.end2end = False  # of two heads (YOLOv10, YOLO26) the one whose boxes go through suppression, as by default
    return model


@contextmanager
def _building_alone() -> Iterator[None]:
    """One model at a time: while a YOLOv6 is built, its activation is that of every model built in this process."""
    with _one_at_a_time:
        activation = Conv.default_act
        try:
            yield
        finally:
            Conv.default_act = activation


def _decoded(raw_boxes: Tensor, anchors: Tensor, scale: Tensor) -> Tensor:
    """Corners in pixels, float32: a side is the expectation over bins (Generalized Focal Loss, arXiv 2006.04388)."""
    bins = raw_boxes.float().unflatten(0, (SIDES, len(raw_boxes) // SIDES))
    weights = torch.arange(bins.shape[1], dtype=torch.float32, device=bins.device).view(1, -1, 1)
    distances = (bins.softmax(1) * weights).sum(1) if bins.shape[1] > 1 else bins.squeeze(1)
    left_top, right_bottom = distances.split(2)
    return (torch.cat((anchors - left_top, anchors + right_bottom)) * scale).T


@cache  # as many as the line has sizes
def _anchors(grids: tuple[tuple[int, int], ...], strides: tuple[float, ...], device: str) -> tuple[Tensor, Tensor]:
    """The centres of all cells in units of their level (2, anchors), and that unit in pixels (1, anchors)."""
    centres, units = [], []
    for (height, width), stride in zip(grids, strides, strict=True):
        rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        centres.append(torch.stack((columns.flatten(), rows.flatten())) + 0.5)
        units.append(torch.full((1, height * width), stride))
    placed = torch.cat(centres, dim=1).to(device), torch.cat(units, dim=1).to(device)
    await_writes(torch.device(device))  # other executors read them on streams of their own
    return placed
