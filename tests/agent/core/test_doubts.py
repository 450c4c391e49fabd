"""Verdicts that rest on experts that are not trusted."""

import pytest

from agent.core.request import Doubts, Outcome, StepResult
from experts.expert import Prediction, Verdict

OK, NG, UNKNOWN = Verdict.OK, Verdict.NG, Verdict.UNKNOWN
STEPS = tuple(StepResult(name, Prediction("ok", 0.9)) for name in ("cls/a", "det/b"))


@pytest.mark.parametrize(
    ("verdict", "doubted", "without_doubt", "passing_doubted"),
    [
        (OK, "cls/a", UNKNOWN, UNKNOWN),
        (OK, "det/b", UNKNOWN, UNKNOWN),
        (OK, "det/c", OK, OK),
        (NG, "cls/a", NG, NG),  # it let the image pass, and the next one found the defect
        (NG, "det/b", UNKNOWN, NG),
        (UNKNOWN, "det/b", UNKNOWN, UNKNOWN),
    ],
)
def test_no_verdict_and_no_ok_rests_on_a_doubted_expert(verdict, doubted, without_doubt, passing_doubted):
    outcome = Outcome(verdict, "ok", 0.9, STEPS, "why it is UNKNOWN" if verdict is UNKNOWN else None)
    for doubts, expected in (
        (Doubts({doubted: "unproven"}), without_doubt),
        (Doubts({}, {doubted: "x"}), passing_doubted),
    ):
        found = doubts.applied(outcome)
        assert (found.verdict, found.steps, found.label) == (expected, STEPS, "ok")
        assert (found == outcome) is (expected is verdict)
        assert bool(found.reason) is (expected is UNKNOWN)
