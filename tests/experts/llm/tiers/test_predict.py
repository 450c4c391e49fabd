"""Gates on tokens that are still on their way."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from experts.llm.config import MoeSpec
from experts.llm.gate import route
from experts.llm.tiers.predict import GateAhead


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
