"""Reviewed results as ground truth: which answer was right for an expert, and two versions of it beside that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agent.records.database import read_rows
from agent.records.station.reviews import ReviewedResult, ReviewQuery, ReviewReader
from agent.records.truth.figures import figures_of, right_answer

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from agent.config import LineConfig
    from experts.expert import Verdict

HAS_REVIEWS = "SELECT 1 FROM sqlite_master WHERE name = 'reviews'"


def reviewed_results(config: LineConfig, query: ReviewQuery | None = None) -> list[ReviewedResult]:
    """Results that people reviewed, oldest review first. None without a results file, or in one that only an agent
    without reviews has written."""
    file = config.results_file
    if not file.is_file() or not read_rows(file, HAS_REVIEWS):
        return []
    return list(reversed(ReviewReader(file).page(query or ReviewQuery())))


def right_answer_of(config: LineConfig, reviewed: ReviewedResult, expert: str) -> Verdict | None:
    """Right answer of an expert to a reviewed image, see ``right_answer``."""
    review, result, experts = reviewed.review, reviewed.result, config.catalog.experts
    labels = {name: experts[name].labels for name in (expert, *result.experts) if name in experts}
    return right_answer(expert, result.experts, result.verdict, (review.verdict, review.label), labels)


def before_and_after(
    config: LineConfig,
    expert: str,
    reviewed: Iterable[ReviewedResult],
    verdicts: Mapping[str, tuple[Verdict | None, Verdict | None]],
) -> list[dict[str, Any]]:
    """A row of an expert's figures as it serves and as it would, over reviewed images that both versions judged; none
    without such. ``verdicts``: of both, by the key of the result; None where one was not asked."""
    found = []
    for each in reviewed:
        before, after = verdicts.get(each.result.subject.key, (None, None))
        if before is None or after is None:
            continue
        if (right := right_answer_of(config, each, expert)) is not None:
            found.append((before, after, right))
    if not found:
        return []
    sides = (figures_of((answers[side], answers[2]) for answers in found) for side in (0, 1))
    return [{"expert": expert} | dict(zip(("before", "after"), sides, strict=True))]
