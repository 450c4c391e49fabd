"""ONNX graphs as they are asked: outputs that count stay, what only others need goes, and images come in batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from onnx import helper, numpy_helper

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import onnx


def take_batches(model: onnx.ModelProto, images: onnx.ValueInfoProto) -> None:
    """Let a graph that takes one image (3, height, width) take a batch of one; others stay as they are. In place."""
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
