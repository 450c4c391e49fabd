"""Fuses calls of a recording that oneDNN runs as one: a convolution with a summand and its activation, or a linear
layer with its activation. All other calls stay as they were recorded; attention reads contiguous copies.

Guarantees: a fused call takes the place of its convolution, or of the sum, and then nothing that it reads is written
in between. A summand is overwritten only after its last reader, this convolution included. A sum that writes to memory
with an earlier view stays a sum.
"""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch.fx import Node
from torch.nn import functional

from experts.backends.modules.recording import COUNTS
from experts.backends.onednn.layouts import ConvolutionShape, LinearShape

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.fx import Graph

    from experts.backends.modules.recording import RecordedGraph
    from experts.backends.onednn.layouts import Shape
    from experts.backends.onednn.levels import Quantisation, Values

    Part: TypeAlias = "str | FusedCall | Values"  # a weight's name, a fused call, or values converted to levels or back

SCALES, OFFSETS = "scales", "offsets"  # suffixes of a quantised weight's name
LEVELS = "levels"  # name of the table of scales and zeros of all values in eight bits
LINEAR_LEAST_BYTES = 64 * 1024  # of a weight; torch runs a smaller layer faster than oneDNN is called


@dataclass(frozen=True, slots=True)
class Activation:
    """An activation of oneDNN's, as torch's operators name it."""

    name: str = "none"
    scalars: tuple[float, ...] = ()
    algorithm: str = ""

    @property
    def arguments(self) -> tuple[str, list[float], str]:
        return self.name, list(self.scalars), self.algorithm


@dataclass(frozen=True, slots=True)
class FusedCall:
    """A convolution or a linear layer with its bias, summand and activation; tensors by name."""

    shape: Shape
    weight: str
    bias: str | None
    activation: Activation
    adds: bool = False  # a summand of the output's shape, before the activation
    overwrites: bool = False  # the summand, with the output
    owns_weight: bool = True  # no other call reads the weight
    quantisation: Quantisation | None = None  # None: the weight is not in eight bits

    @property
    def reads(self) -> tuple[str, ...]:
        if self.quantisation is not None:
            return self.weight, f"{self.weight} {SCALES}", f"{self.weight} {OFFSETS}", LEVELS
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Fused:
    """A graph. ``inputs``: its placeholders after the images, in order."""

    graph: Graph
    inputs: tuple[Part, ...]


def fused(recording: RecordedGraph, dtype: torch.dtype) -> Fused:
    """Fuse all calls that can be fused. Changes the recording's graph."""
    graph, weights = recording.graph, recording.weights
    calls: dict[Node, FusedCall] = {}
    found = [(node, _convolution(node, weights, dtype) or _linear(node, weights, dtype)) for node in graph.nodes]
    for node, call in found:  # after all were found: fusing one changes how many read a shared weight
        if call is not None:
            _fuse(graph, node, call, calls)
    for node in graph.nodes:
        if node.target is functional.multi_head_attention_forward:
            _read_in_order(graph, node)
    for node in reversed(graph.nodes):
        if node.op == "placeholder" and not node.users and node.target in weights:
            graph.erase_node(node)
    graph.lint()
    _, *inputs = (node for node in graph.nodes if node.op == "placeholder")
    return Fused(graph, tuple(calls[node] if node in calls else weights[node.target] for node in inputs))


def apply(call: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    return call(*tensors)


def _convolution(node: Node, weights: Mapping[str, str], dtype: torch.dtype) -> FusedCall | None:
    """A convolution of images by a weight, not fused yet."""
    if node.target is not torch.conv2d or len(node.args) != 7 or node.kwargs:
        return None
    images, weight, bias, stride, padding, dilation, groups = node.args
    is_plain = all(isinstance(each, tuple) for each in (stride, padding, dilation))
    if not is_plain or not _is_weight(weight, weights) or not (bias is None or _is_weight(bias, weights)):
        return None
    height, width = images.meta["shape"][-2:]
    shape = ConvolutionShape(weight.meta["shape"], stride, padding, dilation, groups, height, width, dtype)
    return _call(shape, weight, bias, weights)


def _linear(node: Node, weights: Mapping[str, str], dtype: torch.dtype) -> FusedCall | None:
    """A linear layer, not fused yet."""
    if node.target is not functional.linear or len(node.args) != 3 or node.kwargs:
        return None
    rows, weight, bias = node.args
    if not _is_weight(weight, weights) or not (bias is None or _is_weight(bias, weights)):
        return None
    outputs, inputs = weight.meta["shape"]
    per_image, rest = divmod(prod(rows.meta["shape"][:-1]), COUNTS[0])
    if rest or outputs * inputs * dtype.itemsize < LINEAR_LEAST_BYTES:
        return None
    return _call(LinearShape((outputs, inputs), per_image, dtype), weight, bias, weights)


def _call(shape: Shape, weight: Node, bias: Node | None, weights: Mapping[str, str]) -> FusedCall:
    name = None if bias is None else weights[bias.target]
    return FusedCall(shape, weights[weight.target], name, Activation(), owns_weight=len(weight.users) == 1)


def _is_weight(node: object, weights: Mapping[str, str]) -> bool:
    return isinstance(node, Node) and node.op == "placeholder" and node.target in weights


def _fuse(graph: Graph, node: Node, call: FusedCall, calls: dict[Node, FusedCall]) -> None:
    """Replace a convolution or linear layer, and the nodes after it that fit into the same call. In place."""
    source = node.args[0]
    assert isinstance(source, Node), "it is applied to something"
    nodes, operands = [node], [source]
    other = _added(graph, node) if isinstance(call.shape, ConvolutionShape) else None
    if other is not None:
        nodes.append(next(iter(node.users)))
        operands.append(other)
        is_apart = other.meta["storage"] != source.meta["storage"]  # else it would be overwritten while it is read
        call = replace(call, adds=True, overwrites=is_apart and _is_last_read(graph, other, nodes[-1]))
    found = _activation_after(nodes[-1])
    if found is not None and (other is None or found.name in SUMMED_ACTIVATIONS):
        nodes.append(next(iter(nodes[-1].users)))
        call = replace(call, activation=found)
    last_input = [each for each in graph.nodes if each.op == "placeholder"][-1]
    with graph.inserting_after(last_input):
        placeholder = graph.placeholder(f"call_{len(calls)}")
    calls[placeholder] = call
    with graph.inserting_before(nodes[1] if call.adds else node):
        made = graph.call_function(apply, (placeholder, *operands))
    last = nodes[-1]
    written = {operands[1].meta["storage"]} if call.overwrites else set()
    made.meta |= {"shape": last.meta["shape"], "storage": last.meta["storage"], "writes": frozenset(written)}
    last.replace_all_uses_with(made)
    for each in reversed(nodes):
        graph.erase_node(each)


def _read_in_order(graph: Graph, attention: Node) -> None:
    """Make attention read contiguous copies: torch multiplies transposed bf16 rows forty times as slowly."""
    for source in dict.fromkeys(attention.args[:3]):
        assert isinstance(source, Node), "query, key and value are given by place"
        with graph.inserting_before(attention):
            in_order = graph.call_method("contiguous", (source,))
        in_order.meta |= {**source.meta, "writes": frozenset()}
        attention.replace_input_with(source, in_order)


def _added(graph: Graph, node: Node) -> Node | None:
    """Summand of a convolution's only reader, of the same shape; None where it cannot be added in the same call."""
    follower = _only_user(node)
    if follower is None or not _is_sum(follower):
        return None
    others = [each for each in follower.args if each is not node]
    if len(others) != 1 or not isinstance(others[0], Node) or others[0].meta.get("shape") != node.meta["shape"]:
        return None
    source = node.args[0]
    assert isinstance(source, Node), "it is applied to something"
    between = _between(graph, node, follower)
    is_written = any(source.meta["storage"] in each.meta.get("writes", ()) for each in between)
    return None if is_written or _is_writing_seen(graph, follower) else others[0]


def _is_sum(node: Node) -> bool:
    is_add = (node.op == "call_method" and node.target in {"add", "add_"}) or node.target in {torch.add, operator.add}
    return is_add and len(node.args) == 2 and not node.kwargs


def _is_writing_seen(graph: Graph, node: Node) -> bool:
    """True where bytes that a node writes are read later through an earlier value."""
    written = node.meta.get("writes", frozenset())
    before = set(itertools.takewhile(lambda each: each is not node, graph.nodes))
    read = {each for reader in _between(graph, node, None) for each in reader.all_input_nodes}
    return any(each.meta.get("storage") in written for each in read & before)


def _is_last_read(graph: Graph, other: Node, reader: Node) -> bool:
    """True where ``reader`` is the last to read the bytes of ``other``, and ``other`` is no part of them."""
    storage = other.meta["storage"]
    makers = [node for node in graph.nodes if node.meta.get("storage") == storage]
    after = _between(graph, reader, None)
    is_read = any(each.meta.get("storage") == storage for node in after for each in node.all_input_nodes)
    is_whole = makers[0].op != "placeholder" and makers[0].meta["shape"] == other.meta["shape"]
    return is_whole and not is_read


def _between(graph: Graph, one: Node, other: Node | None) -> Sequence[Node]:
    nodes = list(graph.nodes)
    return nodes[nodes.index(one) + 1 : None if other is None else nodes.index(other)]


def _only_user(node: Node) -> Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 else None


def _activation_after(node: Node) -> Activation | None:
    """Activation by a node's only reader; None where oneDNN has none."""
    follower = _only_user(node)
    if follower is None or follower.args[:1] != (node,):
        return None
    read = _ACTIVATIONS.get(follower.target)
    if read is None:
        return None
    _, *arguments = follower.args
    return read(*arguments, **{key: value for key, value in follower.kwargs.items() if key != "inplace"})


def _leaky_relu(negative_slope: float = 0.01, inplace: bool = False) -> Activation:
    return Activation("leaky_relu", (negative_slope,))


def _hardtanh(min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Activation:
    return Activation("hardtanh", (min_val, max_val))


def _gelu(approximate: str = "none") -> Activation:
    return Activation("gelu", (), approximate)


def _named(name: str, *scalars: float) -> Callable[..., Activation]:
    return lambda inplace=False: Activation(name, scalars)


SUMMED_ACTIVATIONS = frozenset({"relu"})  # torch's operators pass oneDNN no other after a sum
_ACTIVATIONS: Mapping[object, Callable[..., Activation]] = {
    **dict.fromkeys((functional.relu, torch.relu, torch.relu_, "relu", "relu_"), _named("relu")),
    **dict.fromkeys((functional.sigmoid, torch.sigmoid, "sigmoid", "sigmoid_"), _named("sigmoid")),
    **dict.fromkeys((functional.tanh, torch.tanh, "tanh", "tanh_"), _named("tanh")),
    functional.relu6: _named("hardtanh", 0.0, 6.0),
    functional.silu: _named("swish"),
    functional.hardswish: _named("hardswish"),
    functional.hardsigmoid: _named("hardsigmoid"),
    functional.hardtanh: _hardtanh,
    functional.leaky_relu: _leaky_relu,
    functional.gelu: _gelu,
}
