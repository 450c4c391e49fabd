"""ONNX graphs without what is not asked of them: some outputs stay, and what only the others need goes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import onnx


def keep_outputs(model: onnx.ModelProto, names: Sequence[str]) -> None:
    """Leave these outputs, in this order, and the nodes and weights that they need. In place."""
    graph = model.graph
    values = {value.name: value for value in graph.output}
    outputs = [values[name] for name in names]
    graph.ClearField("output")
    graph.output.extend(outputs)
    needed = set(names)
    kept = []
    for node in reversed(graph.node):  # a graph is in the order of its execution: whoever reads comes later
        if needed.intersection(node.output):
            needed.update(_read_by(node))
            kept.append(node)
    weights = [each for each in graph.initializer if each.name in needed]
    graph.ClearField("node")
    graph.node.extend(reversed(kept))
    graph.ClearField("initializer")
    graph.initializer.extend(weights)
    graph.ClearField("value_info")


def _read_by(node: onnx.NodeProto) -> Iterator[str]:
    """Names of what a node reads, those inside its branches and bodies included."""
    yield from node.input
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            yield from (value.name for value in graph.output)
            for inner in graph.node:
                yield from _read_by(inner)
