"""Detectors and anomaly experts as ONNX graphs with random weights, which run like trained ones.

Guarantees: all files of one call have the same graph, so that their experts share one program, and no two of them have
a layer's tensor in common; the same seed gives the same weights.
ultralytics exports the detector. The anomaly expert is a PatchCore (arXiv 2106.08265, section 3): features of two
stages of a ResNet18, smoothed over their neighbourhood, each with its distance to the nearest of a bank of features.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import onnx
import torch
from onnx import numpy_helper
from torch import nn
from torch.nn.functional import avg_pool2d, interpolate
from torchvision import models

from experts.backends.onnx.layouts import image_facts
from experts.backends.ort.export import exported
from experts.expert import ANOMALY_LABELS, Expert, InputSpec, Task
from profiler.workload.generated_line import require_disk

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from torch import Tensor

GraphKind = Literal["detector", "anomaly"]
LARGEST_BYTES = 90_000_000  # of a file of either kind
DETECTOR = "yolo11m"
DETECTOR_LABELS = ("aligned", "turned")
DETECTOR_PX, ANOMALY_PX = 640, 224
BANK_ROWS = 32_768  # of 384 features each: 50 MB
STAGE_FEATURES = (128, 256)  # of a ResNet18's second and third stage
NOISE = 0.02  # on each weight of a layer, relative: the network's values stay in their range


class NearestFeatures(nn.Module):  # type: ignore[misc]  # torch is not followed by mypy here
    """PatchCore: each place's distance from the nearest features of the bank, and the largest of these."""

    def __init__(self, bank_rows: int) -> None:
        super().__init__()
        network = models.resnet18()
        self.stem = nn.Sequential(network.conv1, network.bn1, network.relu, network.maxpool, network.layer1)
        self.second, self.third = network.layer2, network.layer3
        self.bank = nn.Parameter(torch.randn(bank_rows, sum(STAGE_FEATURES)))

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        second = self.second(self.stem(images))
        third = interpolate(self.third(second), scale_factor=2.0, mode="bilinear")
        found = avg_pool2d(torch.cat((second, third), dim=1), 3, stride=1, padding=1)
        features = found.flatten(2).transpose(1, 2)
        products = features @ self.bank.T
        squares = features.square().sum(2, keepdim=True) - 2 * products + self.bank.square().sum(1)
        nearest = squares.amin(2).clamp(min=0.0).sqrt()
        return {"pred_score": nearest.amax(1), "anomaly_map": nearest.unflatten(1, (1, *found.shape[2:]))}


def write_graph_experts(folder: Path, kind: GraphKind, count: int) -> list[Expert]:
    """Write experts of one kind, each with separate weights, below ``folder``.

    Raises ConfigError if the disk lacks room for the files and their packed form; OSError.
    """
    require_disk(folder, 2 * count * LARGEST_BYTES, f"{count} experts and their packed form")
    (folder / "weights").mkdir()
    paths = [folder / "weights" / f"{kind}-{number:03d}.onnx" for number in range(count)]
    if kind == "anomaly":
        write_anomaly_models(paths, BANK_ROWS)
        spec = InputSpec(ANOMALY_PX, ANOMALY_PX)
        return [Expert(path.stem, "onnx", path, ANOMALY_LABELS, spec, task=Task.ANOMALY) for path in paths]
    write_detectors(paths)
    spec = InputSpec(DETECTOR_PX, DETECTOR_PX, "unit")
    experts = [Expert(path.stem, "onnx", path, DETECTOR_LABELS, spec) for path in paths]
    return [replace(expert, input=image_facts(expert).applied(expert.pixels)) for expert in experts]


def write_detectors(
    paths: Sequence[Path], seed: int = 0, architecture: str = DETECTOR, side_px: int = DETECTOR_PX
) -> None:
    """A detector of DETECTOR_LABELS at each path, for square images. Raises OSError."""
    _write(_detector(architecture, side_px, seed), paths, seed)


def write_anomaly_models(paths: Sequence[Path], bank_rows: int = BANK_ROWS, seed: int = 0) -> None:
    """An anomaly expert at each path, for square images of ANOMALY_PX. Raises OSError."""
    _write(_anomaly(seed, bank_rows), paths, seed)


def _write(model: onnx.ModelProto, paths: Sequence[Path], seed: int) -> None:
    layers = list(_layers(model))
    drawn = [numpy_helper.to_array(tensor).copy() for tensor in layers]
    for number, path in enumerate(paths):
        generator = torch.Generator().manual_seed(seed + number)
        for tensor, values in zip(layers, drawn, strict=True):
            tensor.raw_data = _varied(values, generator).tobytes()
        onnx.save(model, path)


def _detector(architecture: str, side_px: int, seed: int) -> onnx.ModelProto:
    from experts.backends.vision.detector import write_onnx_export

    with tempfile.TemporaryDirectory(prefix="coserve-export-") as folder:
        path = Path(folder) / f"{architecture}.onnx"
        write_onnx_export(path, architecture, DETECTOR_LABELS, side_px, seed)
        return onnx.load(path)


def _anomaly(seed: int, bank_rows: int) -> onnx.ModelProto:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        weights = NearestFeatures(bank_rows).state_dict()
    with torch.device("meta"):
        model = exported(NearestFeatures(bank_rows).eval(), (ANOMALY_PX, ANOMALY_PX), ("pred_score", "anomaly_map"))
    graph = model.graph
    images = [value for value in graph.input if value.name not in weights]
    read = [value.name for value in graph.input if value.name in weights]
    graph.ClearField("input")
    graph.input.extend(images)
    graph.initializer.extend(numpy_helper.from_array(weights[name].numpy(), name) for name in read)
    return model


def _layers(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Weights that layers multiply with, in raw bytes, as exporters write them."""
    weights = {node.input[1] for node in model.graph.node if node.op_type in {"Conv", "Gemm", "MatMul"}}
    weights |= {node.input[0] for node in model.graph.node if node.op_type == "Transpose"}
    for tensor in model.graph.initializer:
        if tensor.name in weights and tensor.data_type == onnx.TensorProto.FLOAT and tensor.HasField("raw_data"):
            yield tensor


def _varied(values: np.ndarray, generator: torch.Generator) -> np.ndarray:
    noise = torch.randn(values.shape, generator=generator)
    varied: np.ndarray = values * (1 + NOISE * noise).numpy()
    return varied.astype(values.dtype, copy=False)
