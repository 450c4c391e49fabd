"""ONNX graphs adapted to serving: unused outputs are removed.

In a graph of few bits a NaN becomes a level like any other, and a plausible answer. So each value that may become NaN
or infinite before it is quantised is added to the outputs, as 0 or NaN: the answer is then refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from onnx import TensorProto, helper

from experts.backends.weight_files import read_by

if TYPE_CHECKING:
    from collections.abc import Sequence

    import onnx

LEVELLING = frozenset({"QuantizeLinear", "DynamicQuantizeLinear"})
UNBOUNDED = frozenset(  # operators that make NaN or infinity of moderate numbers
    {"Acos", "Acosh", "Asin", "Atanh", "Cosh", "Div", "Exp", "Log", "LpNormalization", "Mod", "Pow", "Reciprocal"}
    | {"ReduceLogSum", "ReduceLogSumExp", "ReduceProd", "Sinh", "Sqrt", "Tan"}
)
FLOATS = frozenset({TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16})


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
            needed.update(read_by(node))
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
            levelled.update(read_by(node))
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
