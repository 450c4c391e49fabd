"""How long texts become: the median of what ended, of those as long as a text already is."""

from hypothesis import given
from hypothesis import strategies as st

from experts.llm.serving.output_lengths import REMEMBERED, OutputLengths


def lengths_of(*ended):
    lengths = OutputLengths()
    for tokens in ended:
        lengths.ended("poet", tokens)
    return lengths


def test_the_median_is_expected_of_those_that_an_expert_s_text_may_still_become():
    lengths = lengths_of(3, 50, 10, 400, 12)
    assert lengths.left("poet", 0, 1000) == 12
    assert lengths.left("poet", 12, 1000) == 400 - 12
    assert lengths.left("poet", 20, 45) == 25
    assert lengths.left("poet", 500, 10_000) == 500
    assert lengths.left("other", 0, 400) == 100


def test_what_is_long_ago_is_forgotten():
    assert lengths_of(*[900] * REMEMBERED, *[7] * REMEMBERED).left("poet", 7, 1000) == 7


@given(st.lists(st.integers(0, 300), max_size=20), st.integers(0, 200), st.integers(1, 300))
def test_it_is_never_less_than_one_nor_more_than_may_be(ended, written, most):
    left = lengths_of(*ended).left("poet", written, most)
    assert 1 <= left <= max(most - written, 1)
