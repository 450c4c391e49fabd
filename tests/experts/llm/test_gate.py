"""The mapping table: who goes where, in which order, with which weight."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from experts.llm.config import MoeSpec
from experts.llm.gate import route


@st.composite
def routings(draw):
    """Gate logits of some tokens, as skewed as may be, and how they are shared out."""
    moe_experts = draw(st.sampled_from([1, 2, 3, 8, 300]))
    per_token = draw(st.integers(1, min(moe_experts, 8)))
    tokens = draw(st.sampled_from([0, 1, 2, 17]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    logits = torch.randn((tokens, moe_experts), generator=generator)
    logits[:, : draw(st.integers(0, moe_experts))] += draw(st.sampled_from([0.0, 5.0]))
    return logits, MoeSpec(moe_experts, per_token, 4, draw(st.booleans()))


@settings(deadline=None)
@given(routings())
def test_an_expert_s_pairs_are_adjacent_and_in_the_order_of_the_tokens(routing):
    logits, spec = routing
    table = route(logits, spec)
    keys = list(zip(table.moe_expert.tolist(), table.order.tolist(), strict=True))
    assert keys == sorted(keys)
    ends = table.ends.tolist()
    starts = [0, *ends][: spec.moe_experts]
    assert [set(table.moe_expert[a:b].tolist()) <= {e} for e, (a, b) in enumerate(zip(starts, ends, strict=True))] == (
        [True] * spec.moe_experts
    )
    assert ends[-1] == len(table.order)


@settings(deadline=None)
@given(routings())
def test_a_token_s_experts_do_not_depend_on_its_neighbours(routing):
    logits, spec = routing
    together = route(logits, spec)
    for token in range(len(logits)):
        alone = route(logits[token : token + 1], spec)
        assert alone.moe_expert.tolist() == together.moe_expert[together.source == token].tolist()
        torch.testing.assert_close(alone.weight[0], together.weight[token])


def test_weights_are_in_fp32_whatever_the_model_is_in():
    logits = torch.randn((5, 4), generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    assert route(logits, MoeSpec(4, 2, 4, True)).weight.dtype is torch.float32
