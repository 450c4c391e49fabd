"""Graphs that find bright pixels strange, and answer as anomaly models of several exporters do."""

import numpy as np
from onnx import TensorProto, helper, numpy_helper

SIZE_PX = 32


def brightness(*outputs, batch="n", size=SIZE_PX):
    """A graph that finds bright pixels strange: ``outputs`` are name -> kind, map | score | column | bool | mask."""
    nodes = [helper.make_node("ReduceMax", ["image"], ["heat"], axes=[1], keepdims=1)]
    values = []
    for name, kind in outputs:
        made, element, shape = kinds(name, kind, batch, size)
        nodes += made
        values.append(helper.make_tensor_value_info(name, element, shape))
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, [batch, 3, size, size])
    half = numpy_helper.from_array(np.array(0.5, np.float32), "half")
    graph = helper.make_graph(nodes, "brightness", [image], values, [half])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def kinds(name, kind, batch, size):
    highest = helper.make_node("ReduceMax", ["heat"], [f"{name}.top"], axes=[1, 2, 3], keepdims=0)
    if kind == "map":
        return [helper.make_node("Identity", ["heat"], [name])], TensorProto.FLOAT, [batch, 1, size, size]
    if kind == "flat map":
        axes = helper.make_node("Constant", [], [f"{name}.axes"], value=numpy_helper.from_array(np.array([1])))
        squeeze = helper.make_node("Squeeze", ["heat", f"{name}.axes"], [name])
        return [axes, squeeze], TensorProto.FLOAT, [batch, size, size]
    if kind == "score":
        return [highest, helper.make_node("Identity", [f"{name}.top"], [name])], TensorProto.FLOAT, [batch]
    if kind == "doubled":
        return [highest, helper.make_node("Add", [f"{name}.top"] * 2, [name])], TensorProto.FLOAT, [batch]
    if kind == "column":
        node = helper.make_node("ReduceMax", ["heat"], [f"{name}.4d"], axes=[2, 3], keepdims=0)
        return [node, helper.make_node("Identity", [f"{name}.4d"], [name])], TensorProto.FLOAT, [batch, 1]
    source = "heat" if kind == "mask" else f"{name}.top"
    shape = [batch, 1, size, size] if kind == "mask" else [batch]
    return (
        [*([] if kind == "mask" else [highest]), helper.make_node("Greater", [source, "half"], [name])],
        (TensorProto.BOOL),
        shape,
    )
