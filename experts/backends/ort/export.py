"""Torch modules exported as ONNX graphs without weights: every weight is an input, named as in the state dict.

Guarantees: the same module and size give the same bytes, in any process; the number of images is open. The exporter is
torch's own, which needs the package onnxscript. It runs on the meta device: nothing is computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from onnx import helper, numpy_helper
from torch.func import functional_call

from experts.backends.modules.binding import output_list, weight_names
from experts.backends.ort.session import strip_notes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import onnx
    from torch import Tensor
    from torch.nn import Module

IMAGES = "images"  # name of the other input
OPSET = 20  # of the standard operators; the first with GELU as one of them
EXAMPLES = 2  # images in the example: torch takes a size of one for fixed


def exported(module: Module, size: tuple[int, int], outputs: Sequence[str]) -> onnx.ModelProto:
    """Export a module for images of (height, width). ``outputs``: see ``output_list``. Weights that reach no output are
    no inputs of the graph. Raises ValueError, with torch's reason."""
    names = weight_names(module)
    weights = {name: tensor for name, tensor in module.state_dict().items() if name in names}
    stateless = _Stateless(module, outputs).eval()
    try:
        program = torch.onnx.export(
            stateless,
            (torch.empty((EXAMPLES, 3, *size), device="meta"),),
            kwargs={"weights": weights},
            input_names=[IMAGES, *weights],
            output_names=list(outputs),
            dynamic_shapes={"images": {0: torch.export.Dim("n")}, "weights": dict.fromkeys(weights)},
            opset_version=OPSET,
            dynamo=True,
            verbose=False,
        )
    except (torch.onnx.OnnxExporterError, RuntimeError) as error:
        raise ValueError(f"torch cannot export it to ONNX: {_first_line(error)}") from error
    assert program is not None
    model = program.model_proto
    strip_notes(model)
    _pool_means(model)
    _drop_unread_inputs(model)
    return model


class _Stateless(torch.nn.Module):  # type: ignore[misc]  # torch is not followed by mypy here
    """A module whose weights are arguments of each call."""

    def __init__(self, module: Module, outputs: Sequence[str]) -> None:
        super().__init__()
        self._inner = (module,)  # in a tuple, so that its parameters do not become this module's
        self._outputs = tuple(outputs)

    def forward(self, images: Tensor, weights: Mapping[str, Tensor]) -> Tensor | tuple[Tensor, ...]:
        answer = functional_call(self._inner[0], weights, (images,))
        return answer if isinstance(answer, torch.Tensor) else tuple(output_list(answer, self._outputs))


def _pool_means(model: onnx.ModelProto) -> None:
    """Name means over height and width as ONNX Runtime's optimisation of convolutions expects. In place."""
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type != "ReduceMean" or len(node.input) != 2 or node.input[1] not in constants:
            continue
        keeps_axes = all(attribute.i for attribute in node.attribute if attribute.name == "keepdims")
        if keeps_axes and sorted(constants[node.input[1]].tolist()) == [-2, -1]:
            node.CopyFrom(helper.make_node("GlobalAveragePool", node.input[:1], node.output))


def _drop_unread_inputs(model: onnx.ModelProto) -> None:
    read = {name for node in model.graph.node for name in node.input}
    inputs = [value for value in model.graph.input if value.name in read]
    model.graph.ClearField("input")
    model.graph.input.extend(inputs)


def _first_line(error: BaseException) -> str:
    while error.__cause__ is not None:  # the exporter wraps it in advice to its developers
        error = error.__cause__
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
