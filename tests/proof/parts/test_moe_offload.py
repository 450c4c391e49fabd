"""Half of a model's experts in memory: what is measured is what was run, and both ways say the same."""

from dataclasses import replace

import pytest
import torch

from experts.expert import Precision
from proof.parts.moe_offload import TINY, measure_moe_offload, report


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.INT8])
def test_a_tiny_model_is_measured_whole(tmp_path, precision):
    times = measure_moe_offload(tmp_path, replace(TINY, precision=precision), repeats=2)
    assert (times.moe_experts, times.places) == (16, 8)
    assert times.ratio > 0
    assert 0 < times.hit_rate < 1
    assert 0.5 < times.popular_share <= 1
    assert times.bytes_loaded > 0
    text = report(times)
    assert "8 of 16 moe_experts" in text
    assert f"{times.ratio:.3g}, at least 0.5" in text
    if precision is Precision.FP32:
        assert times.largest_difference < 1e-3


def test_a_stronger_skew_sends_more_to_the_popular_half(tmp_path):
    found = [
        measure_moe_offload(tmp_path / str(zipf), replace(TINY, zipf=zipf), repeats=1).popular_share
        for zipf in (0.0, 2.0)
    ]
    assert found[0] < 0.75 < found[1]
