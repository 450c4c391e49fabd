"""Graphs whose convolutions ONNX Runtime computes in eight bits: uint8 values, int8 weights by output channel.

Values are brought to levels and back around each convolution (QDQ), which ONNX Runtime fuses. Weights, scales and zeros
stay inputs: experts of one architecture share the graph. The convolutions nearest to the outputs stay in float32, as
do layers that are none, so that scores keep their resolution. Source: ONNX Runtime's guide to quantization.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from experts.backends.onednn.levels import levels, quantised_weight
from experts.backends.ort.session import session_once
from experts.calibrations import CallRanges, Range

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

WIDE, NARROW = 127, 63  # greatest weights: of 8 bits, and of 7, whose products in pairs fit into 16 bits
KEPT_LEVELS = frozenset({"MaxPool"})  # answer with levels of what they read
JOINED = frozenset({"Add", "Concat", "MaxPool", "GlobalAveragePool", "Mul"})


@dataclass(frozen=True, slots=True)
class LevelledConvolution:
    weight: str
    bias: str | None
    source: str  # the value that it reads


@dataclass(frozen=True, slots=True, weakref_slot=True)
class QuantisedGraph:
    """A graph in QDQ. ``values``: those brought to levels, each with the value whose levels it shares."""

    model: onnx.ModelProto
    convolutions: tuple[LevelledConvolution, ...]
    values: Mapping[str, str]

    def copied(self) -> onnx.ModelProto:
        made = onnx.ModelProto()
        made.CopyFrom(self.model)
        return made

    def constants(self) -> dict[str, np.ndarray]:
        """Made-up values of all inputs that are neither images nor float32 weights: ONNX Runtime fuses constants."""
        shapes = {value.name: value for value in self.model.graph.input}
        found: dict[str, np.ndarray] = {}
        for number, value in enumerate(dict.fromkeys(self.values.values()), start=1):
            found |= {scale_of(value): np.array(number, np.float32), zero_of(value): np.array(0, np.uint8)}
        for each in self.convolutions:
            dims = [dimension.dim_value for dimension in shapes[each.weight].type.tensor_type.shape.dim]
            found |= {each.weight: np.ones(dims, np.int8), scale_of(each.weight): np.ones(dims[0], np.float32)}
            if each.bias is not None:  # ONNX Runtime fuses one only where its scale is the product of the others
                unit = np.full(dims[0], found[scale_of(self.values[each.source])])
                found |= {each.bias: np.ones(dims[0], np.int32), scale_of(each.bias): unit}
        return found

    def quantised(self, weights: Mapping[str, Tensor], ranges: Mapping[str, CallRanges]) -> dict[str, Tensor]:
        """One expert's inputs. Raises KeyError if a value was not observed, ValueError for NaN."""
        found = dict(weights)
        table: dict[str, tuple[float, int]] = {}
        for value in dict.fromkeys(self.values.values()):
            alike = [ranges[name].answer for name, shared in self.values.items() if shared == value]
            table[value] = levels(Range.around(alike), None)
            scale, zero = table[value]
            found |= {scale_of(value): torch.tensor(scale), zero_of(value): torch.tensor(zero, dtype=torch.uint8)}
        for each in self.convolutions:
            try:
                laid, scales = quantised_weight(weights[each.weight].detach().float(), weight_highest())
            except ValueError as error:
                raise ValueError(f"{each.weight}: {error}") from error
            found |= {each.weight: laid.contiguous(), scale_of(each.weight): scales}
            if each.bias is not None:
                unit = scales * table[self.values[each.source]][0]
                bias = (weights[each.bias].detach().double() / unit).round().clamp(-(2**31), 2**31 - 1)
                found |= {each.bias: bias.to(torch.int32), scale_of(each.bias): unit}
        return found


def quantised_graph(model: onnx.ModelProto) -> QuantisedGraph:
    """``model``: as exported, weights are inputs; it stays as it is. Raises ValueError without a convolution for it."""
    plan = _Plan(model)
    if not plan.convolutions:
        raise ValueError("it has no convolution that ONNX Runtime runs in eight bits")
    return QuantisedGraph(_rewritten(model, plan), tuple(plan.convolutions), plan.levels)


def observed_values(
    model: onnx.ModelProto, names: Iterable[str], weights: Mapping[str, Tensor], batches: Iterable[Tensor], images: str
) -> dict[str, CallRanges]:
    """Ranges of a float32 graph's values. Raises ValueError, naming the value, for NaN and infinity."""
    watched = onnx.ModelProto()
    watched.CopyFrom(model)
    asked = [name for name in names if name != images]
    told = {value.name for value in watched.graph.output}
    watched.graph.output.extend(onnx.ValueInfoProto(name=name) for name in asked if name not in told)
    session = session_once(watched.SerializeToString())
    feeds = {
        value.name: weights[value.name].contiguous().numpy() for value in model.graph.input if value.name != images
    }
    found: dict[str, Range] = {}
    for batch in batches:
        answers = session.run(asked, {images: batch.contiguous().numpy(), **feeds})
        for name, values in zip((images, *asked), (batch.numpy(), *answers), strict=True):
            try:
                seen = Range(float(values.min()), float(values.max()))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
            found[name] = Range.around((seen, *([found[name]] if name in found else [])))
    return {name: CallRanges(each, each) for name, each in found.items()}


def scale_of(name: str) -> str:
    return f"{name} scale"


def zero_of(name: str) -> str:
    return f"{name} zero"


@cache
def weight_highest() -> int:
    """Greatest weight whose products this CPU sums exactly: without VNNI, pairs of 8-bit products saturate."""
    return next((highest for highest in (WIDE, NARROW) if sums_exactly(highest)), 0)


def sums_exactly(highest: int) -> bool:
    """True where ONNX Runtime convolves the greatest levels by such weights exactly."""
    channels, uint8 = 64, TensorProto.UINT8
    weight = np.full((16, channels, 1, 1), highest, np.int8)
    scale = np.float32(channels * highest)  # 255 levels of 255 * channels * highest
    constants = {"one": np.float32(1), "zero": np.uint8(0), "w": weight, "wz": np.int8(0), "scale": scale}
    node = helper.make_node(
        "QLinearConv", ["x", "one", "zero", "w", "one", "wz", "scale", "zero"], ["y"], kernel_shape=[1, 1]
    )
    shape = [1, channels, 8, 8]
    graph = helper.make_graph(
        [node], "trial", [helper.make_tensor_value_info("x", uint8, shape)],
        [helper.make_tensor_value_info("y", uint8, [1, 16, 8, 8])],
        [numpy_helper.from_array(np.asarray(values), name) for name, values in constants.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    found = session_once(model.SerializeToString()).run(None, {"x": np.full(shape, 255, np.uint8)})[0]
    return bool((found == 255).all())


class _Plan:
    """Which convolutions and values come to levels. ``cuts``: activations that levels from zero on make needless."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._nodes = list(model.graph.node)
        self._readers: defaultdict[str, list[onnx.NodeProto]] = defaultdict(list)
        for node in self._nodes:
            for name in node.input:
                self._readers[name].append(node)
        self._outputs = {value.name for value in model.graph.output}
        given = {value.name for value in model.graph.input}
        constants = {tensor.name: tensor for tensor in model.graph.initializer}
        leading = self._leading(given)
        self.convolutions: list[LevelledConvolution] = []
        self.cuts: dict[str, str] = {}  # what a convolution or sum answers, and what is read of it instead
        self.levels: dict[str, str] = {}
        for node in self._nodes:
            if self._is_convolution(node, given) and node.output[0] in leading:
                bias = node.input[2] if len(node.input) > 2 else None
                self.convolutions.append(LevelledConvolution(node.input[1], bias, node.input[0]))
                self._take(node, [node.input[0]], constants)
            elif node.op_type in JOINED and node.output[0] in leading and len(node.output) == 1:
                values = [name for name in node.input if name not in constants and name not in given]
                if len(values) == len(node.input) and any(name in self.levels for name in values):
                    self._take(node, values, constants)

    def _take(self, node: onnx.NodeProto, sources: Iterable[str], constants: Mapping[str, TensorProto]) -> None:
        for source in sources:
            self.levels.setdefault(source, source)
        answer = self._cut(node, constants)
        self.levels[answer] = self.levels[node.input[0]] if node.op_type in KEPT_LEVELS else answer

    def _cut(self, node: onnx.NodeProto, constants: Mapping[str, TensorProto]) -> str:
        """The value that comes to levels: behind an activation that cuts at zero, where only that reads the node."""
        answer = str(node.output[0])
        readers = self._readers[answer]
        if node.op_type not in {"Conv", "Add"} or len(readers) != 1 or answer in self._outputs:
            return answer
        (reader,) = readers
        if reader.output[0] in self._outputs:
            return answer
        if reader.op_type == "Clip":
            low = constants.get(reader.input[1]) if len(reader.input) > 1 else None
            if low is None or numpy_helper.to_array(low).item() != 0:
                return answer
        elif reader.op_type != "Relu":
            return answer
        self.cuts[reader.output[0]] = answer
        return str(reader.output[0])

    def _is_convolution(self, node: onnx.NodeProto, given: set[str]) -> bool:
        weights = node.input[1:]
        return node.op_type == "Conv" and all(each in given and len(self._readers[each]) == 1 for each in weights)

    def _leading(self, given: set[str]) -> set[str]:
        """Values that a convolution reads, directly or through other layers: all others lead to outputs alone."""
        found: set[str] = set()
        for node in reversed(self._nodes):
            if self._is_convolution(node, given) or any(name in found for name in node.output):
                found.update(node.input)
        return found


def _rewritten(model: onnx.ModelProto, plan: _Plan) -> onnx.ModelProto:
    made = onnx.ModelProto()
    made.CopyFrom(model)
    graph = made.graph
    nodes: list[onnx.NodeProto] = []
    reads = {name: f"{name} back" for name in plan.levels}
    by_weight = {each.weight: each for each in plan.convolutions}
    inputs = {value.name: value for value in graph.input}

    def add(operator: str, *names: str, **attributes: int) -> None:
        nodes.append(helper.make_node(operator, names[:-1], names[-1:], **attributes))

    def to_levels(name: str, written: str) -> None:
        shared = plan.levels[name]
        add("QuantizeLinear", written, scale_of(shared), zero_of(shared), f"{name} levels")
        add("DequantizeLinear", f"{name} levels", scale_of(shared), zero_of(shared), reads[name])

    for name in plan.levels:
        if name in inputs:
            to_levels(name, name)
    for each in plan.convolutions:
        add("DequantizeLinear", each.weight, scale_of(each.weight), zero_of(each.weight), f"{each.weight} back", axis=0)
        if each.bias is not None:
            add("DequantizeLinear", each.bias, scale_of(each.bias), f"{each.bias} back", axis=0)
    for node in model.graph.node:
        if node.output[0] in plan.cuts:
            to_levels(node.output[0], plan.cuts[node.output[0]])
            continue
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        quantised = by_weight.get(node.input[1]) if node.op_type == "Conv" else None
        own = {quantised.weight, quantised.bias} if quantised is not None else set()
        copy.input[:] = [f"{name} back" if name in own else reads.get(name, name) for name in node.input]
        nodes.append(copy)
        for name in node.output:
            if name in plan.levels:
                to_levels(name, name)
    graph.ClearField("node")
    graph.node.extend(nodes)
    graph.ClearField("value_info")
    _retype_inputs(graph, plan)
    return made


def _retype_inputs(graph: onnx.GraphProto, plan: _Plan) -> None:
    """Weights of quantised convolutions become levels, and scales and zeros join the inputs. In place."""
    inputs = {value.name: value for value in graph.input}
    for each in plan.convolutions:
        inputs[each.weight].type.tensor_type.elem_type = TensorProto.INT8
        channels = inputs[each.weight].type.tensor_type.shape.dim[0].dim_value
        graph.initializer.append(numpy_helper.from_array(np.zeros(channels, np.int8), zero_of(each.weight)))
        graph.input.append(helper.make_tensor_value_info(scale_of(each.weight), TensorProto.FLOAT, [channels]))
        if each.bias is not None:
            inputs[each.bias].type.tensor_type.elem_type = TensorProto.INT32
            graph.input.append(helper.make_tensor_value_info(scale_of(each.bias), TensorProto.FLOAT, [channels]))
    for value in dict.fromkeys(plan.levels.values()):
        graph.input.append(helper.make_tensor_value_info(scale_of(value), TensorProto.FLOAT, []))
        graph.input.append(helper.make_tensor_value_info(zero_of(value), TensorProto.UINT8, []))
