"""Reviewed results as ground truth: which answer was right for an expert, and two versions of it beside that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agent.records.station.reviews import ReviewedResult, ReviewQuery, ReviewReader
from agent.records.truth.figures import Answer, Figures, figures_of, right_answer

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from agent.config import LineConfig
    from experts.expert import Verdict


@dataclass(frozen=True, slots=True)
class BeforeAfter:
    """Figures of an expert as it serves and as it would, over reviewed images that both judged."""

    expert: str
    before: Figures
    after: Figures

    def as_json(self) -> dict[str, Any]:
        return {"expert": self.expert, "before": self.before.as_json(), "after": self.after.as_json()}


def reviewed_results(config: LineConfig, query: ReviewQuery | None = None) -> list[ReviewedResult]:
    """Results that people reviewed, oldest review first; none without a results file."""
    file = config.results_file
    return list(ReviewReader(file).all(query or ReviewQuery()))[::-1] if file.is_file() else []


def answer_of(reviewed: ReviewedResult) -> Answer:
    return Answer(reviewed.row.result.experts, reviewed.row.result.verdict)


def right_answer_of(config: LineConfig, reviewed: ReviewedResult, expert: str) -> Verdict | None:
    """What an expert should have said, as ``right_answer`` tells."""
    review, answered, experts = reviewed.review, answer_of(reviewed), config.catalog.experts
    labels = {name: experts[name].labels for name in (expert, *answered.experts) if name in experts}
    return right_answer(expert, answered, (review.verdict, review.label), labels)


def before_and_after(
    config: LineConfig,
    expert: str,
    reviewed: Iterable[ReviewedResult],
    said: Mapping[str, tuple[Verdict | None, Verdict | None]],
) -> BeforeAfter | None:
    """``said``: what both versions said, by the key of the result; None where one was not asked. None: no evidence."""
    found = []
    for each in reviewed:
        before, after = said.get(each.row.result.subject.key, (None, None))
        if before is None or after is None:
            continue
        if (right := right_answer_of(config, each, expert)) is not None:
            found.append((before, after, right))
    if not found:
        return None
    sides = (figures_of((answers[side], answers[2]) for answers in found) for side in (0, 1))
    return BeforeAfter(expert, *sides)
