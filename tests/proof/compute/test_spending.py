"""What a batch spends its time on: oneDNN's lines read, parts that come to the whole, and a process that tells."""

from __future__ import annotations

import sys

import pytest

from experts.errors import CoServeError
from proof.compute.spending import (
    CONVOLUTIONS,
    ELEMENT_WISE,
    KINDS,
    MULTIPLICATIONS,
    OTHER,
    REORDERS,
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


@pytest.mark.slow
def test_a_process_of_its_own_tells_it_and_leaves_nothing(tmp_path):
    found = measure_spending(tmp_path, "squeezenet1_1", (32, 32), 2, "fp32", 1)
    assert (found.architecture, found.batch, found.form) == ("squeezenet1_1", 2, "fp32")
    assert found.ms_per_image > 0
    assert sum(found.parts.values()) == pytest.approx(1.0)
    assert found.parts[CONVOLUTIONS] > 0
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_fails_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(CoServeError, match="what fp32 spends is not told, its process ended with 1: it said nothing"):
        measure_spending(tmp_path, "squeezenet1_1", (32, 32), 1, "fp32", 1)
