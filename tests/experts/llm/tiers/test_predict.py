"""What is done ahead: gates on tokens that are still on their way, and what is moved to what."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from experts.llm.config import MoeSpec
from experts.llm.gate import route
from experts.llm.tiers.predict import GateAhead, MoveCosts, RowsTime, Way, cheaper_way

COSTS = MoveCosts(1e9, 1e-5, 4096, device=RowsTime(1e-7, 1e-5), cpu=RowsTime(1e-4, 1e-4))
BLOCK_BYTES = 10_000_000


@pytest.mark.parametrize(("rows", "way"), [(1, Way.ACTIVATIONS), (64, Way.ACTIVATIONS), (128, Way.WEIGHTS)])
def test_few_rows_go_to_the_weights_and_weights_to_many_rows(rows, way):
    assert cheaper_way(BLOCK_BYTES, rows, COSTS) is way


def test_a_tie_moves_weights():
    costs = MoveCosts(1.0, 0.0, 4, device=RowsTime(0.0, 0.0), cpu=RowsTime(0.0, 0.0))
    assert cheaper_way(8, 1, costs) is Way.WEIGHTS
    assert cheaper_way(9, 1, costs) is Way.ACTIVATIONS


@given(st.integers(1, 10**9), st.integers(1, 10_000))
def test_the_way_is_that_which_is_predicted_to_take_less(block_bytes, rows):
    weights_s = 1e-5 + block_bytes / 1e9 + 1e-7 * rows + 1e-5
    activations_s = 2 * (1e-5 + rows * 4096 / 1e9) + 1e-4 * rows + 1e-4
    assert COSTS.weights_s(block_bytes, rows) == pytest.approx(weights_s)
    assert COSTS.activations_s(rows) == pytest.approx(activations_s)
    moved = {Way.WEIGHTS: weights_s, Way.ACTIVATIONS: activations_s}
    assert moved[cheaper_way(block_bytes, rows, COSTS)] <= min(moved.values()) * (1 + 1e-9)


@given(st.integers(1, 20), st.integers(1, 3), st.booleans(), st.integers(0, 100))
def test_a_gate_ahead_names_those_that_the_gate_behind_its_own_norm_chooses(tokens, per_token, has_bias, seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    normalised, gate = draw(tokens, 8), draw(6, 8)
    here, there = ((1 + draw(8).abs(), draw(8) if has_bias else None) for _ in range(2))
    spec = MoeSpec(6, per_token, 4, is_normalised=False)
    predicted = GateAhead.between(spec, gate, here, there).likely(under(normalised, here))
    counts = torch.bincount(route(under(normalised, there) @ gate.T, spec).moe_expert, minlength=6)
    assert set(predicted) == set(counts.nonzero().flatten().tolist())
    assert [int(counts[one]) for one in predicted] == sorted((int(one) for one in counts if one), reverse=True)


def under(normalised, norm):
    scale, bias = norm
    return normalised * scale if bias is None else normalised * scale + bias


def test_a_channel_that_the_norm_here_drops_is_left_out():
    gate, scale = torch.ones((2, 2)), torch.tensor([0.0, 1.0])
    ahead = GateAhead.between(MoeSpec(2, 1, 4, is_normalised=False), gate, (scale, None), (torch.ones(2), None))
    assert ahead.gate.tolist() == [[0.0, 1.0], [0.0, 1.0]]
