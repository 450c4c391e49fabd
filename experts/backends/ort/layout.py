"""Graphs in ONNX Runtime's layout, with weights still as inputs.

ONNX Runtime convolves in blocks of channels and reorders constant weights for it; weights that are inputs it cannot
reorder, and convolves a third slower. So packing runs its optimisation once, on synthetic weights. Each weight is found
in the result by its values, which show the order for real weights; then the weights become inputs again. The
layout fits this version of ONNX Runtime and this CPU: programs carry both as ``runtime_identity``.

Source of the blocked orders: MLAS, ONNX Runtime's kernels (MlasReorderFilterOIHWBiBo and MlasReorderFilterOIHWBo); each
graph is checked for them, value by value.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper, numpy_helper
from onnxruntime import GraphOptimizationLevel

from experts.backends.ort.session import one_operator, optimised

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from torch import Tensor

IDENTITY_KEY = "coserve.runtime"
SIZE_MAXIMUM_BYTES = 2**31 - 2**24  # of a serialised graph with the weights of its convolutions; a limit of ONNX
DISABLED_OPTIMIZERS = (
    "ConvAddFusion", "ConvMulFusion", "ConvBNFusion",  # they change the values of weights
    "ConstantSharing",  # it changes their names, where values are equal
)  # fmt: skip


class WeightOrder(StrEnum):
    """Order of a weight: as in the state dict, or padded with zeros and in blocks of channels."""

    AS_IS = "as is"
    PADDED = "padded"
    OUT_BLOCKED = "OIHWBo"
    BLOCKED = "OIHWBiBo"


@dataclass(frozen=True, slots=True)
class WeightInput:
    """An input of the program: the weight of the module that it holds, and its order. ``shape``: with padding."""

    source: str
    order: WeightOrder
    block: int
    shape: tuple[int, ...]

    def laid(self, weight: Tensor) -> Tensor:
        """Weight in the program's layout; contiguous, of ``shape``."""
        if self.order is WeightOrder.AS_IS:
            return weight.detach().contiguous()
        padded = weight.new_zeros(self.shape)
        padded[tuple(slice(side) for side in weight.shape)] = weight.detach()
        if self.order is WeightOrder.PADDED:
            return padded
        outs, ins, height, width = padded.shape
        block = self.block
        if self.order is WeightOrder.OUT_BLOCKED:
            blocks = padded.view(outs // block, block, ins, height, width).permute(0, 2, 3, 4, 1)
        else:
            blocks = padded.view(outs // block, block, ins // block, block, height, width).permute(0, 2, 4, 5, 3, 1)
        return blocks.reshape(self.shape).contiguous()  # a reshape that need not copy keeps odd strides


@dataclass(frozen=True, slots=True, weakref_slot=True)
class LaidOutGraph:
    """A program without weights, and its inputs beside the images, in the program's order."""

    program: bytes
    inputs: Mapping[str, WeightInput]

    def tensors(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: placement.laid(weights[placement.source]) for name, placement in self.inputs.items()}


def laid_out(model: onnx.ModelProto, images: str, named: Mapping[str, np.ndarray] | None = None) -> LaidOutGraph:
    """Lay a graph out, changing ``model``. ``named``: synthetic constants that keep names and values, such as levels.

    Raises ValueError where the graph is too large or a weight is lost, and ``session.REFUSALS``.
    """
    named = named or {}
    order = [value.name for value in model.graph.input]
    probes = _probes(model)
    if sum(tensor.nbytes for tensor in (*probes.values(), *named.values())) > SIZE_MAXIMUM_BYTES:
        raise ValueError("the weights of its convolutions exceed the 2 GiB that an ONNX graph may hold")
    _settle(model, {**probes, **named})
    result = optimised(model, GraphOptimizationLevel.ORT_ENABLE_ALL, DISABLED_OPTIMIZERS)
    untouched = {value.name: _shape(value) for value in result.graph.input if value.name != images}
    placements = {name: WeightInput(name, WeightOrder.AS_IS, 1, shape) for name, shape in untouched.items()}
    placements |= _lift(result, probes, named.keys())
    weights = probes.keys() | {name for name, values in named.items() if values.dtype == np.int8}
    lost = sorted(weights - {placement.source for placement in placements.values()})
    if lost:
        raise ValueError(f"ONNX Runtime changes the values of its weights {', '.join(lost[:4])}")
    names = sorted(placements, key=lambda name: (order.index(placements[name].source), name))
    inputs = {value.name: value for value in result.graph.input}
    result.graph.ClearField("input")
    result.graph.input.extend(inputs[name] for name in (images, *names))
    _name_by_place(result)
    result.metadata_props.add(key=IDENTITY_KEY, value=runtime_identity())
    return LaidOutGraph(result.SerializeToString(deterministic=True), {name: placements[name] for name in names})


@cache
def runtime_identity() -> str:
    return f"onnxruntime {onnxruntime.__version__}, channels in blocks of {_channel_block()}"


def identity_of(program: bytes) -> str | None:
    notes = onnx.load_from_string(program).metadata_props
    return next((note.value for note in notes if note.key == IDENTITY_KEY), None)


def _channel_block() -> int:
    """Channels that ONNX Runtime's convolutions take together here; 1 where it does not block them."""
    weight = np.ones((1, 64, 1, 1), dtype=np.float32)
    model = one_operator(helper.make_node("Conv", ["x", "w"], ["y"]), [1, 64, 8, 8], {"w": weight})
    found = optimised(model, GraphOptimizationLevel.ORT_ENABLE_ALL)
    return int(found.graph.initializer[0].dims[0])  # the one output channel, filled up to a block


def _shape(value: onnx.ValueInfoProto) -> tuple[int, ...]:
    return tuple(dimension.dim_value for dimension in value.type.tensor_type.shape.dim)


def _probes(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Synthetic weights, each with another first value. A weight that other operators read too stays an input."""
    by_convolutions = (name for node in model.graph.node if node.op_type == "Conv" for name in node.input[1:3])
    by_others = {name for node in model.graph.node for name in node.input[: 1 if node.op_type == "Conv" else None]}
    shapes = {value.name: _shape(value) for value in model.graph.input if value.name not in by_others}
    random = np.random.default_rng(0)
    probes: dict[str, np.ndarray] = {}
    for number, name in enumerate(dict.fromkeys(name for name in by_convolutions if name in shapes), start=1):
        values = random.random(shapes[name], dtype=np.float32)
        values.flat[0] = number
        probes[name] = values
    return probes


def _settle(model: onnx.ModelProto, weights: Mapping[str, np.ndarray]) -> None:
    """Turn inputs into constants. In place."""
    inputs = [value for value in model.graph.input if value.name not in weights]
    model.graph.ClearField("input")
    model.graph.input.extend(inputs)
    model.graph.initializer.extend(numpy_helper.from_array(values, name) for name, values in weights.items())


def _lift(model: onnx.ModelProto, probes: Mapping[str, np.ndarray], named: Collection[str]) -> dict[str, WeightInput]:
    """Turn probes and named constants into inputs again; return the source of each. In place."""
    by_first = {float(values.flat[0]): name for name, values in probes.items()}
    placements: dict[str, WeightInput] = {}
    renamed: dict[str, str] = {}
    types: dict[str, int] = {}
    kept = []
    for tensor in model.graph.initializer:
        if tensor.name in named:
            placement: WeightInput | None = WeightInput(tensor.name, WeightOrder.AS_IS, 1, tuple(tensor.dims))
        else:
            placement = _weight_input(tensor, by_first, probes)
        if placement is None:
            kept.append(tensor)
            continue
        is_second = placement.source in placements
        name = f"{placement.source} {placement.order}" if is_second else placement.source
        renamed[tensor.name] = name
        placements[name] = placement
        types[name] = tensor.data_type
    inputs = [
        helper.make_tensor_value_info(name, types[name], placement.shape) for name, placement in placements.items()
    ]
    model.graph.ClearField("initializer")
    model.graph.initializer.extend(kept)
    model.graph.input.extend(inputs)
    for node in model.graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]
    return placements


def _name_by_place(model: onnx.ModelProto) -> None:
    """Number the names that ONNX Runtime gave, which differ from run to run. In place."""
    graph = model.graph
    graph.ClearField("value_info")
    fixed = {value.name for value in (*graph.input, *graph.output)} | {""}
    names: dict[str, str] = {}
    for number, node in enumerate(graph.node):
        node.name = f"node {number}"
        for name in (*node.input, *node.output):
            if name not in fixed:
                names.setdefault(name, f"value {len(names)}")
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    constants = sorted(graph.initializer, key=lambda tensor: list(names).index(tensor.name))
    graph.ClearField("initializer")
    graph.initializer.extend(constants)
    for tensor in graph.initializer:
        tensor.name = names[tensor.name]


def _weight_input(
    tensor: TensorProto, by_first: Mapping[float, str], probes: Mapping[str, np.ndarray]
) -> WeightInput | None:
    """Placement that made a constant of a probe; None for constants of the graph itself."""
    if tensor.data_type != TensorProto.FLOAT or not tensor.dims or not prod(tensor.dims):
        return None
    found = numpy_helper.to_array(tensor)
    source = by_first.get(float(found.flat[0]))
    if source is None:
        return None
    probe = torch.from_numpy(probes[source])
    for placement in _possible(source, tuple(tensor.dims), probe):
        if np.array_equal(placement.laid(probe).numpy(), found):
            return placement
    return None


def _possible(source: str, shape: tuple[int, ...], probe: Tensor) -> Iterable[WeightInput]:
    if shape == tuple(probe.shape):
        yield WeightInput(source, WeightOrder.AS_IS, 1, shape)
    if len(shape) == probe.dim() and all(new >= old for new, old in zip(shape, probe.shape, strict=True)):
        yield WeightInput(source, WeightOrder.PADDED, 1, shape)
        for block in (16, 8, 4) if len(shape) == 4 else ():
            if shape[0] % block == 0:
                yield WeightInput(source, WeightOrder.OUT_BLOCKED, block, shape)
            if shape[0] % block == 0 and shape[1] % block == 0:
                yield WeightInput(source, WeightOrder.BLOCKED, block, shape)
