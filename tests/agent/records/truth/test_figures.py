"""Figures of experts beside people's verdicts: what counts for whom, and how sure a share is."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.records.truth.figures import Z_95, Rate, figures_of, right_answer, verdict_by
from experts.expert import Verdict

OK, NG, UNKNOWN = Verdict.OK, Verdict.NG, Verdict.UNKNOWN
LABELS = {"cls": ("ok", "missing"), "det": ("aligned", "shifted"), "ano": ("ok", "anomalous")}
RATES = st.integers(0, 400).flatmap(lambda of: st.tuples(st.integers(0, of), st.just(of)))


@given(RATES)
def test_confidence_interval_contains_its_share_and_satisfies_wilsons_equation(counts):
    rate = Rate(*counts)
    low, high = rate.interval
    assert 0.0 <= low <= high <= 1.0
    if not rate.of:
        assert (low, high, rate.share) == (0.0, 1.0, None)
        return
    assert low - 1e-12 <= rate.share <= high + 1e-12
    for end in {low, high} - {0.0, 1.0}:
        assert abs(rate.share - end) == pytest.approx(Z_95 * math.sqrt(end * (1 - end) / rate.of))


@given(RATES, st.integers(2, 10))
def test_more_reviews_of_the_same_share_narrow_the_interval(counts, times):
    (low, high), (surer_low, surer_high) = Rate(*counts).interval, Rate(*(count * times for count in counts)).interval
    assert surer_high - surer_low <= high - low + 1e-12


@given(st.lists(st.tuples(st.sampled_from(Verdict), st.sampled_from([OK, NG]))))
def test_every_image_is_counted_once(pairs):
    told = figures_of(pairs)
    judged = [pair for pair in pairs if pair[0] is not UNKNOWN]
    assert (told["images"], told["unknown"]) == (len(pairs), len(pairs) - len(judged))
    assert told["recall"]["count"] + told["escapes"]["count"] == sum(right is NG for _, right in judged)
    assert told["precision"]["count"] + told["false_calls"]["count"] == sum(said is NG for said, _ in judged)
    assert told["recall"]["of"] + told["false_calls"]["of"] == len(judged)


def test_figures_are_shown_with_their_counts():
    told = figures_of([(NG, NG)] * 8 + [(OK, NG)] * 2 + [(NG, OK)] * 4 + [(OK, OK)] * 6 + [(UNKNOWN, NG)])
    assert (told["images"], told["unknown"]) == (21, 1)
    assert {name: (told[name]["count"], told[name]["of"]) for name in ("precision", "recall", "escapes")} == {
        "precision": (8, 12), "recall": (8, 10), "escapes": (2, 10),
    }  # fmt: skip
    low, high = pytest.approx(0.1682, abs=1e-4), pytest.approx(0.6873, abs=1e-4)
    assert told["false_calls"] == {"count": 4, "of": 10, "share": 0.4, "low": low, "high": high}


@pytest.mark.parametrize(
    ("answered", "said"),
    [
        ((("cls", "det"), NG), {"cls": OK, "det": NG, "ano": None}),
        ((("cls", "det"), UNKNOWN), {"cls": OK, "det": UNKNOWN}),
        (((), UNKNOWN), {"cls": None}),
    ],
)
def test_expert_that_let_an_image_pass_answered_ok(answered, said):
    assert {expert: verdict_by(expert, *answered) for expert in said} == said


BOTH_NG, BOTH_OK = (("cls", "det"), NG), (("cls", "det"), OK)


@pytest.mark.parametrize(
    ("answered", "truth", "right"),
    [
        (BOTH_NG, (OK, None), {"cls": OK, "det": OK}),  # a false call of det, and cls was right
        (BOTH_NG, (OK, "shifted"), {"cls": OK, "det": OK}),
        (BOTH_NG, (NG, None), {"cls": None, "det": NG}),  # det's find says nothing of cls
        (BOTH_NG, (NG, "missing"), {"cls": NG, "det": None}),  # cls missed what det found for another reason
        (BOTH_NG, (NG, "scratch"), {"cls": None, "det": NG}),
        (BOTH_OK, (NG, None), {"cls": NG, "det": NG}),
        (BOTH_OK, (NG, "shifted"), {"cls": None, "det": NG}),
        (BOTH_OK, (NG, "scratch"), {"cls": NG, "det": NG}),
        (((), UNKNOWN), (NG, None), {"cls": NG}),
        ((("ano",), UNKNOWN), (NG, "anomalous"), {"ano": NG, "cls": None}),
    ],
)
def test_review_counts_for_the_experts_it_concerns(answered, truth, right):
    assert {expert: right_answer(expert, *answered, truth, LABELS) for expert in right} == right
