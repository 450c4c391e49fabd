"""Both ways through a mixture-of-experts layer are timed, and give the same result."""

import pytest

from proof.parts import dispatch
from proof.parts.dispatch import LayerShape, measure_dispatch


@pytest.mark.parametrize("per_token", [1, 2])
def test_both_ways_of_the_same_layer_are_measured(per_token):
    found = measure_dispatch(LayerShape(64, 4, 16, per_token), rounds=2)
    assert [row.part for row in found.rows] == ["MoE layer", "routing"]
    assert all(row.gain == row.einsum_s / row.table_s > 0 for row in found.rows)
    assert [target.wanted for target in found.targets] == ["at least 4", "at least 6"]
    assert "64 tokens, 4 experts, 16 wide" in found.text()


def test_ways_that_differ_are_not_compared(monkeypatch):
    monkeypatch.setattr(dispatch, "run_sparse", lambda tokens, *_: tokens + 1.0)
    with pytest.raises(ValueError, match="one of them computes another layer"):
        measure_dispatch(LayerShape(8, 2, 4))
