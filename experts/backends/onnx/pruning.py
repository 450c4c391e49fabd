"""ONNX graphs adapted to serving: unused outputs are removed, and images come in batches.

In a graph of few bits a NaN becomes a level like any other, and a plausible answer. So each value that may become NaN
or infinite before it is quantised is added to the outputs, as 0 or NaN: the answer is then refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from onnx import TensorProto, helper, numpy_helper

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import onnx

LEVELLING = frozenset({"QuantizeLinear", "DynamicQuantizeLinear"})
UNBOUNDED = frozenset(  # operators that make NaN or infinity of moderate numbers
    {"Acos", "Acosh", "Asin", "Atanh", "Cosh", "Div", "Exp", "Log", "LpNormalization", "Mod", "Pow", "Reciprocal"}
    | {"ReduceLogSum", "ReduceLogSumExp", "ReduceProd", "Sinh", "Sqrt", "Tan"}
)
FLOATS = frozenset({TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16})


def take_batches(model: onnx.ModelProto, images: onnx.ValueInfoProto) -> None:
    """Make a graph of one image (3, height, width) take a batch of one; others stay unchanged. In place."""
    shape = images.type.tensor_type.shape
    extents = [dimension.dim_value for dimension in shape.dim]
    if len(extents) != 3 or not all(extents):
        return
    one = images.name
    images.name = f"{one}.batch"
    shape.ClearField("dim")
    for extent in (1, *extents):
        shape.dim.add(dim_value=extent)
    model.graph.initializer.append(numpy_helper.from_array(np.array(extents, dtype=np.int64), f"{one}.shape"))
    model.graph.node.insert(0, helper.make_node("Reshape", [images.name, f"{one}.shape"], [one]))


def keep_outputs(model: onnx.ModelProto, names: Sequence[str]) -> None:
    """Keep these outputs, in this order, and the nodes and weights that they need. In place."""
    graph = model.graph
    values = {value.name: value for value in graph.output}
    outputs = [values[name] for name in names]
    graph.ClearField("output")
    graph.output.extend(outputs)
    needed = set(names)
    kept = []
    for node in reversed(graph.node):  # nodes are in execution order: readers come later
        if needed.intersection(node.output):
            needed.update(_read_by(node))
            kept.append(node)
    weights = [each for each in graph.initializer if each.name in needed]
    graph.ClearField("node")
    graph.node.extend(reversed(kept))
    graph.ClearField("initializer")
    graph.initializer.extend(weights)
    graph.ClearField("value_info")


def propagate_nan(model: onnx.ModelProto) -> None:
    """Make a graph of few bits answer NaN where any of its values is NaN or infinite. In place."""
    graph = model.graph
    levelled: set[str] = set()  # values that become levels, directly or not
    for node in reversed(graph.node):
        if node.op_type in LEVELLING or levelled.intersection(node.output):
            levelled.update(_read_by(node))
    doubted = [node.output[0] for node in graph.node if node.op_type in UNBOUNDED and node.output[0] in levelled]
    if not doubted:
        return
    added = []
    for number, name in enumerate(doubted):
        zero = f"no number {number}"  # NaN or infinity minus itself is NaN
        added += [
            helper.make_node("Sub", [name, name], [f"{zero} of each"]),
            helper.make_node("Cast", [f"{zero} of each"], [f"{zero} in float"], to=TensorProto.FLOAT),
            helper.make_node("ReduceSum", [f"{zero} in float"], [zero], keepdims=0),
        ]
    added.append(helper.make_node("Sum", [f"no number {number}" for number in range(len(doubted))], ["no number"]))
    made = {name for node in graph.node for name in node.output}
    for output in graph.output:
        kind = output.type.tensor_type.elem_type
        if kind in FLOATS and output.name in made:
            hidden = f"{output.name} in any case"
            for node in graph.node:
                for names in (node.input, node.output):
                    names[:] = [hidden if name == output.name else name for name in names]
            added += [
                helper.make_node("Cast", ["no number"], [f"no number for {output.name}"], to=kind),
                helper.make_node("Add", [hidden, f"no number for {output.name}"], [output.name]),
            ]
    graph.node.extend(added)


def _read_by(node: onnx.NodeProto) -> Iterator[str]:
    """Names of values that a node reads, also inside its branches and bodies."""
    yield from node.input
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            yield from (value.name for value in graph.output)
            for inner in graph.node:
                yield from _read_by(inner)
