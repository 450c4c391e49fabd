"""Weights in the order that ONNX Runtime executes: the same answers, and every byte where it belongs."""

import os
import subprocess
import sys

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto

from experts.backends.ort.layout import WeightInput, WeightOrder, identity_of, laid_out, runtime_identity
from experts.backends.ort.session import session_once
from tests.experts.onnx_text import add_weights, model_of

SIZE = 6


def graph_of(text, weights, outs):
    """A graph whose weights are inputs; ``text``: of its nodes; ``weights``: name -> shape."""
    shapes = {"images": ("n", 3, SIZE, SIZE), **weights}
    inputs = ", ".join(f'float[{",".join(map(str, shape))}] "{name}"' for name, shape in shapes.items())
    return model_of(f"made ({inputs}) => (float[n,{outs},{SIZE},{SIZE}] answer) {{ {text} }}", opset=20)


def residual_graph(channels):
    """A stem, a convolution around which its input goes, and one with a group per channel."""
    text = f"""
        s = Conv<pads=[1, 1, 1, 1]>(images, stem, "stem.bias")
        r = Relu(s)
        i = Conv<pads=[1, 1, 1, 1]>(r, inner, "inner.bias")
        a = Add(i, r)
        d = Conv<pads=[1, 1, 1, 1], group={channels}>(a, deep)
        answer = Mul(d, scale)"""
    weights = {
        "stem": (channels, 3, 3, 3), "stem.bias": (channels,), "inner": (channels, channels, 3, 3),
        "inner.bias": (channels,), "deep": (channels, 1, 3, 3), "scale": (channels, 1, 1),
    }  # fmt: skip
    return graph_of(text, weights, channels), weights


def random_weights(shapes, seed=1):
    random = np.random.default_rng(seed)
    return {name: torch.from_numpy(random.normal(size=shape).astype(np.float32)) for name, shape in shapes.items()}


def answer(model, weights):
    images = np.random.default_rng(2).normal(size=(2, 3, SIZE, SIZE)).astype(np.float32)
    feeds = {name: tensor.numpy() for name, tensor in weights.items()}
    return session_once(model.SerializeToString()).run(None, {"images": images, **feeds})[0]


def check_same_answers(model, shapes):
    weights = random_weights(shapes)
    expected = answer(model, weights)
    graph = laid_out(model, "images")
    program = onnx.load_from_string(graph.program)
    found = answer(program, graph.tensors(weights))
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()
    return graph, program


@pytest.mark.parametrize("channels", [1, 3, 8, 16, 24, 32, 40])
def test_answers_are_equal_for_any_number_of_channels(channels):
    graph, program = check_same_answers(*residual_graph(channels))
    assert {placement.source for placement in graph.inputs.values()} == set(residual_graph(channels)[1])
    assert not [tensor for tensor in program.graph.initializer if tensor.data_type == TensorProto.FLOAT]


def test_convolutions_have_the_layout_of_this_processor():
    graph, program = check_same_answers(*residual_graph(32))
    is_blocked = any(node.domain == "com.microsoft.nchwc" for node in program.graph.node)
    assert (graph.inputs["inner"].order is WeightOrder.BLOCKED) == is_blocked
    assert (graph.inputs["stem"].order is WeightOrder.OUT_BLOCKED) == is_blocked
    assert graph.inputs["scale"].order is WeightOrder.AS_IS


def test_weight_that_is_read_twice_serves_both():
    convolved_twice = """
        first = Conv<pads=[1, 1, 1, 1]>(images, weight)
        answer = Conv<pads=[1, 1, 1, 1]>(first, weight)"""
    convolved_and_added = """
        c = Conv(images, weight)
        sum = ReduceSum<keepdims=0>(weight)
        answer = Add(c, sum)"""
    for text, shape in ((convolved_twice, (3, 3, 3, 3)), (convolved_and_added, (16, 3, 1, 1))):
        check_same_answers(graph_of(text, {"weight": shape}, shape[0]), {"weight": shape})


def test_weight_changed_by_the_optimiser_is_an_error_that_names_it():
    """It is convolved with constants alone, which is computed when the graph is optimised."""
    model = graph_of("c = Conv(table, early) answer = Add(images, c)", {"early": (3, 2, 1, 1)}, 3)
    add_weights(model.graph, table=np.ones((1, 2, SIZE, SIZE)))
    with pytest.raises(ValueError, match="changes the values of its weights early"):
        laid_out(model, "images")


def test_program_names_the_processor_it_is_laid_out_for():
    assert identity_of(laid_out(residual_graph(16)[0], "images").program) == runtime_identity()
    assert identity_of(residual_graph(16)[0].SerializeToString()) is None


@given(
    out_blocks=st.integers(1, 3), in_blocks=st.integers(1, 3), missing=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
)  # fmt: skip
def test_each_value_of_a_blocked_filter_is_where_the_kernel_reads_it(out_blocks, in_blocks, missing, kernel):
    block, (height, width) = 4, kernel
    outs, ins = out_blocks * block - missing[0], in_blocks * block - missing[1]
    weight = torch.arange(1.0, outs * ins * height * width + 1).view(outs, ins, height, width)
    placement = WeightInput("w", WeightOrder.BLOCKED, block, (out_blocks * block, in_blocks * block, height, width))
    flat = placement.laid(weight).flatten()
    for o, i, y, x in np.ndindex(outs, ins, height, width):
        outer = ((o // block * in_blocks + i // block) * height + y) * width + x
        assert flat[(outer * block + i % block) * block + o % block] == weight[o, i, y, x]
    assert int((flat == 0).sum()) == flat.numel() - weight.numel()


def test_program_made_by_another_process_is_identical():
    """Names that ONNX Runtime gives depend on addresses and hashes; programs must not."""
    script = f"from {__name__} import branching_program as made; import sys; sys.stdout.buffer.write(made())"
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.getcwd()}  # here it is another one
    ended = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == branching_program()


def branching_program():
    text = "v0 = Conv<pads=[1, 1, 1, 1]>(images, stem)"
    for n in range(20):
        text += f"""
            c{n} = Conv<pads=[1, 1, 1, 1]>(v{n}, inner)
            t{n} = Transpose<perm=[0, 1, 3, 2]>(c{n})
            v{n + 1} = Add(t{n}, c{n})"""
    weights = {"stem": (16, 3, 3, 3), "inner": (16, 16, 3, 3)}
    return laid_out(graph_of(f"{text} answer = Identity(v20)", weights, 16), "images").program
