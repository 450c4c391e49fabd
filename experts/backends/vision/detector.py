"""Detectors: the YOLO families of ultralytics, built from its YAML files by name. The only module that imports it.

An expert is a state dict of the family with one class per label. Images are letterboxed and scaled to [0, 1], as
ultralytics trains, regardless of ``normalize``. The head's raw outputs are decoded here, in float32: coordinates stay
exact in bf16, and threads share no cache of anchors.
"""

from __future__ import annotations

import atexit
import math
import os
import re
import shutil
import tempfile
import warnings
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING

import torch
from PIL import Image

from experts.backends.modules.binding import Weightless, weight_names
from experts.backends.modules.compiler import compiler_left_out
from experts.backends.outputs import require_numbers
from experts.backends.torch_backend import Template, TorchBackend
from experts.backends.vision.boxes import candidates, prediction, suppressed
from experts.backends.vision.pixels import letterboxed
from experts.backends.weight_files import read_state_dict
from experts.errors import WeightsMismatch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import numpy as np
    from torch import Tensor
    from torch.nn import Module

    from experts.backends.base import Prepared
    from experts.backends.forms.base import Reader
    from experts.expert import Expert, Prediction


def _isolate_ultralytics() -> None:
    """Set its environment, the only way to switch off network, installing, its settings folder and output."""
    os.environ.setdefault("YOLO_OFFLINE", "true")
    os.environ.setdefault("YOLO_AUTOINSTALL", "false")
    os.environ.setdefault("YOLO_VERBOSE", "false")
    if "YOLO_CONFIG_DIR" not in os.environ:
        private = tempfile.mkdtemp(prefix="coserve-ultralytics-")
        os.environ["YOLO_CONFIG_DIR"] = private
        atexit.register(shutil.rmtree, private, ignore_errors=True)


_isolate_ultralytics()
_torch_save, _open_image = torch.save, Image.open

from ultralytics.cfg import get_cfg  # noqa: E402
from ultralytics.nn.modules.conv import Conv  # noqa: E402
from ultralytics.nn.modules.head import Detect, v10Detect  # noqa: E402
from ultralytics.nn.tasks import DetectionModel, yaml_model_load  # noqa: E402
from ultralytics.utils import SETTINGS  # noqa: E402
from ultralytics.utils.ops import make_divisible  # noqa: E402

torch.save, Image.open = _torch_save, _open_image  # the import replaces both for the whole process
SETTINGS.update({"sync": False})

_one_at_a_time = Lock()

SIDES = 4  # of a box


@dataclass(frozen=True, slots=True)
class _Answered:
    """``Reader`` of the head's raw outputs: boxes and scores."""

    strides: tuple[float, ...]
    template: Template  # kept alive: another reader of this kind builds no model

    def __call__(self, expert: Expert, outputs: Sequence[Tensor], batch: Sequence[Prepared]) -> tuple[Prediction, ...]:
        require_numbers(expert, *outputs)
        height, width = batch[0].tensor.shape[1:]
        grids = tuple((int(height // stride), int(width // stride)) for stride in self.strides)
        anchors, scale = _anchors(grids, self.strides)
        if outputs[0].shape[1] == SIDES:  # distances: any box's may become infinite in pixels
            require_numbers(expert, outputs[0].float() * scale)
        scores = outputs[1].float().sigmoid().transpose(1, 2)
        found = [self._rows(expert, *each, anchors, scale).tolist() for each in zip(outputs[0], scores, strict=True)]
        return tuple(prediction(expert, rows, prepared) for rows, prepared in zip(found, batch, strict=True))

    @staticmethod
    def _rows(expert: Expert, raw_boxes: Tensor, scores: Tensor, anchors: Tensor, scale: Tensor) -> Tensor:
        """Rows of one image: of thousands of boxes only the few candidates are decoded."""
        chosen = candidates(expert, scores)
        boxes = _decoded(raw_boxes[:, chosen], anchors[:, chosen], scale[:, chosen])
        require_numbers(expert, boxes)
        return suppressed(expert, boxes, scores[chosen])


class DetectorBackend(TorchBackend):
    """Implements ``experts.backends.base.Backend`` for ultralytics' detectors."""

    outputs = ("boxes", "scores")

    def prepare(self, expert: Expert, image: np.ndarray) -> Prepared:
        return letterboxed(image, replace(expert.pixels, normalize="unit"))

    def structure(self, expert: Expert) -> tuple[str, int]:
        return expert.architecture, len(expert.labels)

    def build(self, structure: tuple[str, int]) -> Module:
        return _build(*structure)

    def make_template(self, structure: tuple[str, int]) -> Template:
        with compiler_left_out(), Weightless():
            original = _build(*structure).eval().requires_grad_(False)
            folded = deepcopy(original)
            folded.fuse(verbose=False)
        folded.model[-1].training = True  # the head alone: it answers with its raw outputs
        names = weight_names(folded)

        def fold(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            model = deepcopy(original)
            model.load_state_dict(tensors, strict=False, assign=True)  # all but the counts of training batches
            model.fuse(verbose=False)
            return {name: tensor for name, tensor in model.state_dict().items() if name in names}

        return Template(original, folded, fold)

    def prototype(self, expert: Expert) -> Template:
        template = super().prototype(expert)
        largest = int(max(_strides(template)))
        if expert.pixels.height % largest or expert.pixels.width % largest:
            size = f"{expert.pixels.height}x{expert.pixels.width}"
            raise WeightsMismatch(expert.id, f"{expert.architecture} takes sizes in multiples of {largest}, not {size}")
        return template

    def read_weights(self, expert: Expert, *, as_headers: bool = False) -> dict[str, Tensor]:
        found = read_state_dict(expert, as_headers=as_headers)
        return {f"model.{re.sub(r'^(model[.])+', '', name)}": tensor for name, tensor in found.items()}

    def condensed(self, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Distances instead of bins: a sixteenth of the bytes. What is no number stays none."""
        boxes, scores = outputs
        faults = (boxes.float() - boxes.float()).amax(dim=1, keepdim=True)  # 0, or NaN for NaN and infinity
        return _distances(boxes) + faults, scores

    def reader(self, expert: Expert) -> Reader:
        template = self.prototype(expert)
        return _Answered(_strides(template), template)


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
    model.pt_path = path.with_suffix(".pt")  # need not exist: the exporter derives its output path from this name
    facade = YOLO(f"{architecture}.yaml", task="detect")
    facade.model = model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's exporter warns
        facade.export(format="onnx", imgsz=side_px, simplify=False)


@dataclass(frozen=True, slots=True)
class Outline:
    """Number of layers, and channels of the first: they distinguish most architectures without building them."""

    layers: int
    first_channels: int


def outline(architecture: str) -> Outline:
    """Read ultralytics' YAML of an architecture. Raises ValueError for an unknown one."""
    try:
        document = yaml_model_load(f"{architecture}.yaml")
    except FileNotFoundError as error:
        raise ValueError(f"ultralytics has no model {architecture!r}") from error
    scales = document.get("scales") or {"": (1.0, document.get("width_multiple", 1.0), math.inf)}
    _, width, *most = scales.get(document["scale"]) or next(iter(scales.values()))
    channels = next(arguments[0] for *_, arguments in document["backbone"] if arguments)  # YOLOv9e's first has none
    first_channels = make_divisible(min(channels, most[0] if most else math.inf) * width, 8)
    return Outline(len(document["backbone"]) + len(document["head"]), int(first_channels))


def weightless(architecture: str, class_count: int) -> Module:
    """A model without weights. Raises ValueError for an unknown architecture."""
    with compiler_left_out(), Weightless():
        return _build(architecture, class_count)


def weight_shapes(architecture: str, class_count: int) -> dict[str, tuple[int, ...]]:
    """Shapes of all weights. Raises ValueError for an unknown architecture."""
    return {name: tuple(tensor.shape) for name, tensor in weightless(architecture, class_count).state_dict().items()}


def _strides(template: Template) -> tuple[float, ...]:
    return tuple(float(stride) for stride in template.original.model[-1].stride)


def _build(architecture: str, class_count: int) -> DetectionModel:
    with _one_at_a_time:  # building a YOLOv6 sets the activation of all models that the process builds meanwhile
        activation = Conv.default_act
        try:
            model = DetectionModel(f"{architecture}.yaml", nc=class_count, verbose=False)
        except FileNotFoundError as error:
            raise ValueError(f"ultralytics has no model {architecture!r}") from error
        finally:
            Conv.default_act = activation
    if type(model.model[-1]) not in {Detect, v10Detect}:
        raise ValueError(f"{architecture} is not a plain YOLO detector: choose one such as yolov5m or yolo11s")
    model.end2end = False  # of two heads (YOLOv10, YOLO26) the one with suppression, as by default
    return model


def _decoded(raw_boxes: Tensor, anchors: Tensor, scale: Tensor) -> Tensor:
    """Corners in pixels, float32."""
    left_top, right_bottom = _distances(raw_boxes).split(2)
    return (torch.cat((anchors - left_top, anchors + right_bottom)) * scale).T


def _distances(raw_boxes: Tensor) -> Tensor:
    """Distances to the sides (..., 4, anchors), float32, of bins (..., 4 * bins, anchors); distances stay.

    Each is the expectation over its bins (Generalized Focal Loss, arXiv 2006.04388).
    """
    bins = raw_boxes.float().unflatten(-2, (SIDES, raw_boxes.shape[-2] // SIDES))
    weights = torch.arange(bins.shape[-2], dtype=torch.float32, device=bins.device).view(-1, 1)
    return (bins.softmax(-2) * weights).sum(-2) if len(weights) > 1 else bins.squeeze(-2)


@cache  # as many as the line has sizes
def _anchors(grids: tuple[tuple[int, int], ...], strides: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """Centres of all cells in units of their level (2, anchors), and these units in pixels (1, anchors)."""
    centres, units = [], []
    for (height, width), stride in zip(grids, strides, strict=True):
        rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        centres.append(torch.stack((columns.flatten(), rows.flatten())) + 0.5)
        units.append(torch.full((1, height * width), stride))
    return torch.cat(centres, dim=1), torch.cat(units, dim=1)
