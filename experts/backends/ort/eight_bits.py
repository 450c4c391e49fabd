"""ONNX Runtime's eight bits: graphs whose convolutions read uint8 values and int8 weights by output channel.

Values are converted to levels and back around each convolution (QDQ), which ONNX Runtime fuses. Weights, scales and
zeros stay inputs: experts of one architecture share the graph. The convolutions nearest to the outputs and all other
layers stay in float32, so scores keep their resolution. Source: ONNX Runtime's guide to quantization.
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

from experts.backends.base import Packable, RefusedModule
from experts.backends.made_once import MadeOnce
from experts.backends.onednn.levels import levels, quantised_weight
from experts.backends.onednn.operators import NARROW, WIDE
from experts.backends.ort.execution import KEPT, deviations, refused, synthetic
from experts.backends.ort.export import IMAGES, exported
from experts.backends.ort.layout import LaidOutGraph, laid_out
from experts.backends.ort.session import REFUSALS, one_operator, session_once
from experts.calibrations import CallRanges, Range, required_ranges
from experts.errors import WeightsMismatch

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping

    from torch import Tensor

    from experts.backends.forms.base import Form, Modules
    from experts.expert import Expert

DEVIATION_MAXIMUM = 0.5  # of an output, in parts of its largest value: rounding accumulates from layer to layer
KEPT_LEVELS = frozenset({"MaxPool"})  # operators that answer with the levels that they read
JOINED = frozenset({"Add", "Concat", "MaxPool", "GlobalAveragePool", "Mul"})


@dataclass(frozen=True, slots=True)
class LevelledConvolution:
    weight: str
    bias: str | None
    source: str  # the value that it reads


@dataclass(frozen=True, slots=True, weakref_slot=True)
class QuantisedGraph:
    """A graph in QDQ, laid out. ``values``: values converted to levels, each with the value whose levels it shares."""

    plain: onnx.ModelProto  # in float32: its values are observed
    graph: LaidOutGraph
    convolutions: tuple[LevelledConvolution, ...]
    values: Mapping[str, str]

    def tensors(self, weights: Mapping[str, Tensor], ranges: Mapping[str, CallRanges]) -> dict[str, Tensor]:
        """One expert's inputs. Raises KeyError if a value was not observed, ValueError for NaN."""
        found = dict(weights)
        table: dict[str, tuple[float, int]] = {}
        for value in dict.fromkeys(self.values.values()):
            alike = [ranges[name].answer for name, shared in self.values.items() if shared == value]
            scale, zero = table[value] = levels(Range.around(alike), None)
            found |= {_scale(value): torch.tensor(scale), _zero(value): torch.tensor(zero, dtype=torch.uint8)}
        for each in self.convolutions:
            laid, scales = quantised_weight(each.weight, weights[each.weight], weight_highest())
            found |= {each.weight: laid.contiguous(), _scale(each.weight): scales}
            if each.bias is not None:
                unit = scales * table[self.values[each.source]][0]
                bias = (weights[each.bias].detach().double() / unit).round().clamp(-(2**31), 2**31 - 1)
                found |= {each.bias: bias.to(torch.int32), _scale(each.bias): unit}
        return self.graph.tensors(found)

    def ranges(self, weights: Mapping[str, Tensor], batches: Iterable[Tensor]) -> dict[str, CallRanges]:
        """Ranges of the float32 graph's values. Raises ValueError, naming the value, for NaN and infinity."""
        watched = _copy(self.plain)
        names = [name for name in self.values if name != IMAGES]
        outputs = {value.name for value in watched.graph.output}
        watched.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in outputs)
        session = session_once(watched.SerializeToString())
        inputs = [value.name for value in self.plain.graph.input if value.name != IMAGES]
        feeds = {name: weights[name].contiguous().numpy() for name in inputs}
        found: dict[str, Range] = {}
        for batch in batches:
            answers = session.run(names, {IMAGES: batch.contiguous().numpy(), **feeds})
            for name, values in zip((IMAGES, *names), (batch.numpy(), *answers), strict=True):
                try:
                    seen = Range(float(values.min()), float(values.max()))
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from error
                found[name] = Range.around((seen, *([found[name]] if name in found else [])))
        return {name: CallRanges(each, each) for name, each in found.items()}


def packed(form: Form, modules: Modules, expert: Expert) -> Packable:
    """Raises WeightsMismatch where the module is refused, or the expert is not calibrated for it."""
    weights, made = modules.weights(expert, form), form.accepted(expert, _made(*_key(modules, expert)))
    ranges = required_ranges(expert, form.name_here, made.values.keys())
    try:
        return Packable(made.tensors(weights, ranges), program=made.graph.program)
    except ValueError as error:
        raise WeightsMismatch(expert.id, f"{error}: choose {form.plain}") from error


def observed_ranges(form: Form, modules: Modules, expert: Expert, batches: Iterable[Tensor]) -> dict[str, CallRanges]:
    """Raises WeightsMismatch where the module is refused, and for NaN."""
    made = form.accepted(expert, _made(*_key(modules, expert)))
    try:
        return made.ranges(modules.weights(expert, form), batches)
    except ValueError as error:
        raise WeightsMismatch(expert.id, f"it cannot be calibrated: {error}") from error


def _key(modules: Modules, expert: Expert) -> tuple[Modules, Hashable, tuple[int, int]]:
    return modules, modules.structure(expert), expert.pixels.size


def _make(modules: Modules, structure: Hashable, size: tuple[int, int]) -> QuantisedGraph | RefusedModule:
    module = modules.module(structure)
    try:
        made = quantised_graph(exported(module, size, modules.outputs))
        weights, images = synthetic(modules.sample(structure), size)
        tensors = made.tensors(weights, made.ranges(weights, [images]))
        found = deviations(module, made.graph.program, modules.outputs, (weights, tensors), images)
    except (ValueError, *REFUSALS) as error:
        return RefusedModule(str(error))
    return refused(found, DEVIATION_MAXIMUM) or made


_made = MadeOnce(_make, KEPT)


def quantised_graph(plain: onnx.ModelProto) -> QuantisedGraph:
    """``plain``: the exported graph, whose weights are inputs. Raises ValueError without a convolution for eight
    bits."""
    plan = _Plan(plain)
    if not plan.convolutions:
        raise ValueError("it has no convolution that ONNX Runtime runs in eight bits")
    model = _rewritten(plain, plan)
    graph = laid_out(model, IMAGES, _synthetic_constants(model, plan))
    return QuantisedGraph(plain, graph, tuple(plan.convolutions), plan.levels)


def _synthetic_constants(model: onnx.ModelProto, plan: _Plan) -> dict[str, np.ndarray]:
    """Synthetic values of all inputs but images and float32 weights: ONNX Runtime fuses constants only."""
    shapes = {value.name: value.type.tensor_type.shape for value in model.graph.input}
    found: dict[str, np.ndarray] = {}
    for number, value in enumerate(dict.fromkeys(plan.levels.values()), start=1):
        found |= {_scale(value): np.array(number, np.float32), _zero(value): np.array(0, np.uint8)}
    for each in plan.convolutions:
        dims = [dimension.dim_value for dimension in shapes[each.weight].dim]
        found |= {each.weight: np.ones(dims, np.int8), _scale(each.weight): np.ones(dims[0], np.float32)}
        if each.bias is not None:  # ONNX Runtime fuses one only where its scale is the product of the others
            unit = np.full(dims[0], found[_scale(plan.levels[each.source])])
            found |= {each.bias: np.ones(dims[0], np.int32), _scale(each.bias): unit}
    return found


def _scale(name: str) -> str:
    return f"{name} scale"


def _zero(name: str) -> str:
    return f"{name} zero"


@cache
def weight_highest() -> int:
    """Largest weight whose products this CPU sums exactly: without VNNI, pairs of 8-bit products saturate."""
    return next((highest for highest in (WIDE, NARROW) if sums_exactly(highest)), 0)


def sums_exactly(highest: int) -> bool:
    """True where ONNX Runtime convolves the greatest levels by such weights exactly."""
    channels, shape = 64, [1, 64, 8, 8]
    weight = np.full((16, channels, 1, 1), highest, np.int8)
    scale = np.float32(channels * highest)  # 255 levels of 255 * channels * highest
    constants = {"one": np.float32(1), "zero": np.uint8(0), "w": weight, "wz": np.int8(0), "scale": scale}
    names = ["x", "one", "zero", "w", "one", "wz", "scale", "zero"]
    node = helper.make_node("QLinearConv", names, ["y"], kernel_shape=[1, 1])
    model = one_operator(node, shape, constants, TensorProto.UINT8)
    found = session_once(model.SerializeToString()).run(None, {"x": np.full(shape, 255, np.uint8)})[0]
    return bool((found == 255).all())


class _Plan:
    """Convolutions and values in eight bits. ``cuts``: activations that levels from zero on make superfluous."""

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
        self.cuts: dict[str, str] = {}  # by an activation's answer, the convolution's or sum's that it reads
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
        """The value to convert: that of an activation which cuts at zero, where it alone reads the node."""
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
        """Values that a convolution reads, directly or through other layers."""
        found: set[str] = set()
        for node in reversed(self._nodes):
            if self._is_convolution(node, given) or any(name in found for name in node.output):
                found.update(node.input)
        return found


def _rewritten(model: onnx.ModelProto, plan: _Plan) -> onnx.ModelProto:
    made = _copy(model)
    graph = made.graph
    nodes: list[onnx.NodeProto] = []
    reads = {name: f"{name} back" for name in plan.levels}
    by_weight = {each.weight: each for each in plan.convolutions}
    inputs = {value.name: value for value in graph.input}

    def add(operator: str, *names: str, **attributes: int) -> None:
        nodes.append(helper.make_node(operator, names[:-1], names[-1:], **attributes))

    def to_levels(name: str, written: str) -> None:
        shared = plan.levels[name]
        add("QuantizeLinear", written, _scale(shared), _zero(shared), f"{name} levels")
        add("DequantizeLinear", f"{name} levels", _scale(shared), _zero(shared), reads[name])

    for name in plan.levels:
        if name in inputs:
            to_levels(name, name)
    for each in plan.convolutions:
        add("DequantizeLinear", each.weight, _scale(each.weight), _zero(each.weight), f"{each.weight} back", axis=0)
        if each.bias is not None:
            add("DequantizeLinear", each.bias, _scale(each.bias), f"{each.bias} back", axis=0)
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
    """Make inputs of quantised weights levels, and add scales and zeros to the inputs. In place."""
    inputs = {value.name: value for value in graph.input}
    for each in plan.convolutions:
        inputs[each.weight].type.tensor_type.elem_type = TensorProto.INT8
        channels = inputs[each.weight].type.tensor_type.shape.dim[0].dim_value
        graph.initializer.append(numpy_helper.from_array(np.zeros(channels, np.int8), _zero(each.weight)))
        graph.input.append(helper.make_tensor_value_info(_scale(each.weight), TensorProto.FLOAT, [channels]))
        if each.bias is not None:
            inputs[each.bias].type.tensor_type.elem_type = TensorProto.INT32
            graph.input.append(helper.make_tensor_value_info(_scale(each.bias), TensorProto.FLOAT, [channels]))
    for value in dict.fromkeys(plan.levels.values()):
        graph.input.append(helper.make_tensor_value_info(_scale(value), TensorProto.FLOAT, []))
        graph.input.append(helper.make_tensor_value_info(_zero(value), TensorProto.UINT8, []))


def _copy(model: onnx.ModelProto) -> onnx.ModelProto:
    made = onnx.ModelProto()
    made.CopyFrom(model)
    return made
