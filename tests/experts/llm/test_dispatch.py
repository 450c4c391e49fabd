"""The mapping table, and every way of running the experts against one token and one expert at a time."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from experts.llm import dispatch
from experts.llm.files.config import Mlp, MoeSpec
from experts.llm.kernels import four_bits
from experts.llm.quant import Int4Tensors, Int8Tensors, matrix_of, project

HIDDEN, SIZE = 16, 8


def draw_weights(moe_experts, kind, has_bias, seed):
    generator = torch.Generator().manual_seed(seed)
    raised = SIZE * (2 if kind in {Mlp.SWIGLU, Mlp.GEGLU_TANH} else 1)

    def random(*shape):
        return torch.randn(shape, generator=generator) / 4

    biases = (random(moe_experts, raised), random(moe_experts, HIDDEN)) if has_bias else (None, None)
    return dispatch.MlpWeights(kind, random(moe_experts, raised, HIDDEN), random(moe_experts, HIDDEN, SIZE), *biases)


@st.composite
def layers(draw):
    """Tokens, their gate logits, a layer's experts. Some draws leave experts empty, or one with all tokens."""
    moe_experts = draw(st.sampled_from([1, 2, 5, 16]))
    per_token = draw(st.sampled_from(sorted({1, min(2, moe_experts), moe_experts})))
    tokens = draw(st.sampled_from([0, 1, 2, 3, 40]))
    seed = draw(st.integers(0, 1000))
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn((tokens, moe_experts), generator=generator)
    logits[:, draw(st.integers(0, moe_experts - 1))] += draw(st.sampled_from([0.0, 20.0]))
    weights = draw_weights(moe_experts, draw(st.sampled_from(Mlp)), draw(st.booleans()), seed)
    hidden = torch.randn((tokens, HIDDEN), generator=generator)
    return hidden, logits, MoeSpec(moe_experts, per_token, SIZE, draw(st.booleans())), weights


def one_by_one(tokens, logits, spec, weights):
    """Each token's sum of its experts' results, weighted by its gate."""
    sums = torch.zeros_like(tokens)
    for token, row in enumerate(logits.softmax(dim=-1)):
        chosen = row.topk(spec.per_token)
        shares = chosen.values / chosen.values.sum() if spec.is_normalised else chosen.values
        for share, expert in zip(shares, chosen.indices.tolist(), strict=True):
            sums[token] += share * dispatch.run_mlp(tokens[token : token + 1], weights.of(expert))[0]
    return sums


@given(layers())
def test_every_dispatch_gives_the_weighted_sum_of_each_tokens_experts(layer):
    tokens, logits, spec, weights = layer
    table, expected = dispatch.route(logits, spec), one_by_one(*layer)
    for run in (dispatch.run_each, dispatch.run_grouped, dispatch.run_padded, dispatch.run_tiled):
        given_back = dispatch.combine(run(dispatch.scatter(tokens, table), table, weights), table, tokens.dtype)
        torch.testing.assert_close(given_back, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(dispatch.run_moe_experts(tokens, table, weights), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("stored", "lanes"), [(Int8Tensors, 1), (Int4Tensors, 32), (Int4Tensors, 64)])
@pytest.mark.parametrize("tokens", [1, 40])
def test_devices_ways_multiply_quantised_experts_whatever_cpu_packed_them(stored, lanes, tokens, monkeypatch):
    def grouped_product(rows, matrices, ends):
        parts = enumerate(rows.tensor_split(ends[:-1].long()))
        return torch.cat([project(part, matrices[number]) for number, part in parts])

    monkeypatch.setattr(dispatch, "grouped_product", grouped_product)
    monkeypatch.setattr(four_bits, "lanes_here", lambda: lanes)
    monkeypatch.setattr(dispatch, "DEVICE_BLOCK_BYTES", 200_000)  # some tiles at once
    generator = torch.Generator().manual_seed(0)
    shapes = {"experts.up": (5, 128, 64), "experts.down": (5, 64, 128)}
    held = dict(
        stored({name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}, torch.float32)
    )
    weights = dispatch.MlpWeights(Mlp.GELU, *(matrix_of(held, name) for name in shapes))
    table = dispatch.route(torch.randn(tokens, 5, generator=generator), MoeSpec(5, 2, 128, True))
    rows = dispatch.scatter(torch.randn(tokens, 64, generator=generator), table)
    expected = dispatch.run_each(rows, table, weights)
    for run in (dispatch.run_tiled, dispatch.run_grouped):  # products of this CPU round rows to eight bits
        assert (run(rows, table, weights) - expected).norm() < 0.03 * expected.norm()


def test_combination_of_experts_is_in_fp32():
    """256 choices of 1/256 each: in bf16 the sum would stop growing long before 1."""
    table = dispatch.mapping_table(torch.arange(256)[None], torch.full((1, 256), 1 / 256), 256)
    computed = torch.full((256, HIDDEN), 1.0078125, dtype=torch.bfloat16)
    assert dispatch.combine(computed, table, torch.float32)[0, 0].item() == pytest.approx(1.0078125)


@pytest.mark.parametrize(
    ("chosen", "hidden", "way"),
    [
        ([0, 1, 2, 3] * 2, HIDDEN, dispatch.run_each),  # few pairs
        ([0, 1, 2, 3] * 100, HIDDEN, dispatch.run_padded),  # spread evenly
        ([0] * 400, HIDDEN, dispatch.run_grouped),  # spread unevenly
        ([0] * 400, 15, dispatch.run_each),  # rows that are not aligned
    ],
)
def test_dispatch_is_chosen_by_the_spread_of_the_pairs(chosen, hidden, way):
    weights = dispatch.MlpWeights(Mlp.SWIGLU, torch.randn(4, 2 * SIZE, hidden), torch.randn(4, hidden, SIZE))
    table = dispatch.mapping_table(torch.tensor(chosen)[:, None], torch.ones(len(chosen), 1), 4)
    tokens = torch.randn(len(chosen), hidden)
    assert dispatch.way_of_running(tokens, table, weights) is way
    expected = dispatch.combine(
        dispatch.run_each(dispatch.scatter(tokens, table), table, weights), table, torch.float32
    )
    torch.testing.assert_close(dispatch.run_moe_experts(tokens, table, weights), expected, atol=1e-4, rtol=1e-4)


@given(layers())
def test_pairs_of_an_expert_are_adjacent_and_in_token_order(layer):
    _, logits, spec, _ = layer
    table = dispatch.route(logits, spec)
    keys = list(zip(table.moe_expert.tolist(), table.order.tolist(), strict=True))
    assert keys == sorted(keys)
    ends = table.ends.tolist()
    starts = [0, *ends][: spec.moe_experts]
    for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
        assert set(table.moe_expert[start:end].tolist()) <= {number}
    assert ends[-1] == len(table.order)


@given(layers())
def test_experts_of_a_token_do_not_depend_on_its_neighbours(layer):
    _, logits, spec, _ = layer
    together = dispatch.route(logits, spec)
    for token in range(len(logits)):
        alone = dispatch.route(logits[token : token + 1], spec)
        assert alone.moe_expert.tolist() == together.moe_expert[together.source == token].tolist()
        torch.testing.assert_close(alone.weight[0], together.weight[token])


def test_routing_weights_are_in_fp32_for_any_model():
    logits = torch.randn((5, 4), generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    assert dispatch.route(logits, MoeSpec(4, 2, 4, True)).weight.dtype is torch.float32
