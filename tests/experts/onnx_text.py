"""ONNX graphs, written in ONNX's own text."""

import numpy as np
from onnx import load_model, numpy_helper, parser, save_model


def model_of(text, opset=17, **weights):
    """The model of a graph's text. ``weights``: its initializers, in float32 where they are numbers of float64."""
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]>\n{text}')
    add_weights(model.graph, **weights)
    return model


def add_weights(graph, **weights):
    for name, values in weights.items():
        values = np.asarray(values)
        values = values.astype(np.float32) if values.dtype == np.float64 else values
        graph.initializer.append(numpy_helper.from_array(values, name))


def add_nodes(graph, *nodes, **weights):
    """``nodes``: the text of each."""
    graph.node.extend(map(parser.parse_node, nodes))
    add_weights(graph, **weights)


def add_behind(graph, *nodes, **weights):
    """Nodes between the last one, whose answer is ``raw`` from now on, and the graph's output ``logits``."""
    graph.node[-1].output[0] = "raw"
    add_nodes(graph, *nodes, **weights)


def ending(expert, *nodes, **weights):
    """The expert, with these nodes behind the logits of its graph."""
    model = load_model(expert.weights)
    add_behind(model.graph, *nodes, **weights)
    save_model(model, expert.weights)
    return expert
