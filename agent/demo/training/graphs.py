"""Modules written as ONNX graphs with their weights."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING

import onnx
from onnx import numpy_helper

from experts.backends.ort.export import exported

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn


def write_graph(module: nn.Module, input_px: int, output: str, file: Path) -> None:
    """The graph answers images (n, 3, input_px, input_px) with ``output``. Raises ValueError, OSError."""
    model = exported(deepcopy(module).to("meta"), (input_px, input_px), [output])
    weights = module.state_dict()
    images, *names = [value.name for value in model.graph.input]
    model.graph.initializer.extend(numpy_helper.from_array(weights[name].numpy(), name) for name in names)
    inputs = [value for value in model.graph.input if value.name == images]
    model.graph.ClearField("input")
    model.graph.input.extend(inputs)
    file.parent.mkdir(parents=True, exist_ok=True)
    onnx.save_model(model, file)
