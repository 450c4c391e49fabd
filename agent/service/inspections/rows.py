"""Rows of a line's results, and their values for boards."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from itertools import zip_longest
from typing import TYPE_CHECKING

from agent.core.request import Outcome
from agent.records.verdict import KeptMap, Result, Step
from agent.service.inspections.courses import UNJUDGED
from experts.expert import Verdict
from experts.thresholds.map_pictures import map_png

if TYPE_CHECKING:
    from agent.config import LineConfig
    from agent.service.inspections.courses import Course
    from agent.subject import Subject


def unknown(reason: str) -> Outcome:
    return Outcome(Verdict.UNKNOWN, None, None, (), reason)


def judged_result(
    config: LineConfig,
    subject: Subject,
    outcome: Outcome,
    course: Course = UNJUDGED,
    image_sha256: str | None = None,
    parts: int | None = None,
) -> Result:
    """Row of a subject with an outcome. ``parts``: parts of its image."""
    now = datetime.now(UTC).astimezone()
    judged = zip_longest(outcome.steps, course.models, course.unproven)
    keeps_maps = outcome.verdict is Verdict.NG and config.records.images != "none"
    return Result(
        subject=subject,
        line=config.line,
        verdict=outcome.verdict,
        finished_at=now,
        seconds=(now - subject.arrived_at).total_seconds(),
        config_sha256=course.config_sha256 or config.catalog.sha256,
        label=outcome.label,
        score=outcome.score,
        reason=outcome.reason,
        experts=tuple(step.expert for step in outcome.steps),
        steps=tuple(
            Step.answered(step.expert, step.prediction, model, unproven=bool(is_unproven))
            for step, model, is_unproven in judged
        ),
        course=course.steps,
        image_sha256=image_sha256,
        parts=parts,
        maps=maps_of(outcome) if keeps_maps else (),
    )


def duplicate_result(config: LineConfig, subject: Subject, first: Result) -> Result:
    """Row of an image judged before under another key. No board type, so it opens no new run of a board."""
    now = datetime.now(UTC).astimezone()
    key = first.subject.key
    return Result(
        subject=replace(subject, board_type=None),
        line=config.line,
        verdict=first.verdict,
        finished_at=now,
        seconds=(now - subject.arrived_at).total_seconds(),
        config_sha256=first.config_sha256,
        label=first.label,
        score=first.score,
        reason=f"the same bytes as {key}, which was {first.verdict}: not judged again",
        duplicate_of=key,
        image_sha256=first.seen_sha256,
    )


def maps_of(outcome: Outcome) -> tuple[KeptMap, ...]:
    measured = ((number, step, step.prediction.anomaly) for number, step in enumerate(outcome.steps))
    return tuple(
        KeptMap(number, step.expert, map_png(anomaly.map))
        for number, step, anomaly in measured
        if anomaly is not None and anomaly.map is not None
    )
