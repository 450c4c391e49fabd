"""Time of a batch by kind of operator: oneDNN's lines are read, and the parts come to the whole."""

from __future__ import annotations

import os
from contextlib import closing

import pytest

from experts.errors import CoServeError
from experts.expert import Precision
from experts.packed.weights import SegmentStore
from profiler.workload.generated_line import write_experts
from proof.compute.contestants import Contestant, our_form, prepared_images
from proof.compute.spending import (
    CONVOLUTIONS,
    ELEMENT_WISE,
    KINDS,
    MULTIPLICATIONS,
    OTHER,
    REORDERS,
    captured_stdout,
    measure_spending,
    parts_of,
    primitive_seconds,
)

EXECUTED = "onednn_verbose,v1,primitive,exec,cpu"
LINES = (
    "onednn_verbose,v1,info,oneDNN v3.11.0 (commit 0)",
    f"{EXECUTED},convolution,brg_conv_fwd:avx512,forward_inference,src:f32,,alg:convolution_direct,mb1_ic3oc64,0.5",
    f"{EXECUTED},reorder,jit:uni,undef,src:f32::blocked:abcd::f0 dst:f32:a:blocked:Acdb64a::f0,,,64x3x7x7,0.25",
    "onednn_verbose,primitive,exec,cpu,matmul,brg:avx512,undef,src:f32,attr-scratchpad:user,,1x512:512x3,0.125",
    "onednn_verbose,v1,primitive,create:cache_miss,cpu,convolution,brg_conv_fwd,forward_inference,x,,y,z,9.0",
    f"{EXECUTED},layer_normalization,simple,forward_inference,x,,,1x2,1.0",
    f"{EXECUTED},convolution,brg_conv_fwd:avx512,forward_inf",
    "onednn_verbose,v1,primitive,exec",
    "something else,exec,cpu,convolution,3.0",
)


def test_only_what_was_executed_counts_by_its_kind():
    assert primitive_seconds(LINES) == pytest.approx(
        {CONVOLUTIONS: 0.5e-3, REORDERS: 0.25e-3, MULTIPLICATIONS: 0.125e-3, OTHER: 1e-3}
    )


def test_parts_come_to_the_whole():
    parts = parts_of(1.0, {CONVOLUTIONS: 0.5, REORDERS: 0.2}, {ELEMENT_WISE: 0.1})
    assert set(parts) == {*KINDS, OTHER}
    assert sum(parts.values()) == pytest.approx(1.0)
    assert (parts[CONVOLUTIONS], parts[ELEMENT_WISE], parts[OTHER]) == pytest.approx((0.5, 0.1, 0.2))


def test_where_watching_takes_longer_than_the_whole_parts_are_of_their_sum():
    parts = parts_of(0.5, {CONVOLUTIONS: 0.6, REORDERS: 0.4}, {})
    assert (parts[CONVOLUTIONS], parts[REORDERS], parts[OTHER]) == pytest.approx((0.6, 0.4, 0.0))


def test_a_batch_that_oneDNN_executes_is_told_by_kind(tmp_path):
    (expert,) = write_experts(tmp_path, "squeezenet1_1", 1, size=(32, 32))
    images = prepared_images(expert, 2)
    with closing(SegmentStore(tmp_path / "packed")) as store, our_form(expert, Precision.FP32, store, images) as ours:
        found = measure_spending("squeezenet1_1", 2, ours)
    assert (found.architecture, found.batch, found.form) == ("squeezenet1_1", 2, "fp32")
    assert sum(found.parts.values()) == pytest.approx(1.0)
    assert found.parts[CONVOLUTIONS] > 0
    assert str(found).startswith("spent: squeezenet1_1, batch 2, fp32: convolutions ")


def test_a_form_that_oneDNN_does_not_execute_is_refused():
    with pytest.raises(CoServeError, match="what mine spends is not told: oneDNN does not execute it"):
        measure_spending("squeezenet1_1", 1, Contestant("mine", None, True, lambda: []))


def test_what_libraries_print_is_captured_and_the_rest_is_not(capfd):
    os.write(1, b"before\n")
    with captured_stdout() as lines:
        os.write(1, b"meanwhile\n")
    os.write(1, b"after\n")
    assert lines == ["meanwhile"]
    assert capfd.readouterr().out == "before\nafter\n"
