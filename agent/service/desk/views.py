"""Views of stored results and boards for callers of the APIs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from agent.doors.desk import AnomalyView, BoardView, VerdictView
from experts.expert import BoundingBox, LabelScore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent.records.boards import BoardRun, BoardVerdict
    from agent.records.results import KeptMap, Result


def verdict_view(
    result: Result, seq: int | None, *, queue_s: float = 0.0, compute_s: float = 0.0, maps: Sequence[KeptMap] = ()
) -> VerdictView:
    steps = result.detail.get("steps", ())
    return VerdictView(
        result.subject,
        verdict=result.verdict,
        seq=seq,
        label=result.label,
        score=result.score,
        reason=result.reason,
        experts=result.experts,
        boxes=tuple(BoundingBox(**box) for step in steps for box in step["boxes"]),
        finished_at=result.finished_at,
        seconds=result.seconds,
        queue_s=queue_s,
        compute_s=compute_s,
        anomalies=_anomalies(result, maps),
        outputs=tuple(
            LabelScore(each["label"], each["score"], each["threshold"])
            for step in steps
            for each in step.get("outputs", ())
        ),
    )


def measures_anomalies(result: Result) -> bool:
    return any("anomaly" in step for step in result.detail.get("steps", ()))


def _anomalies(result: Result, maps: Sequence[KeptMap]) -> tuple[AnomalyView, ...]:
    pictures = {each.step: each.png for each in maps}
    return tuple(
        AnomalyView(step["expert"], step["anomaly"]["score"], step["anomaly"]["threshold"], pictures.get(number))
        for number, step in enumerate(result.detail.get("steps", ()))
        if "anomaly" in step
    )


def board_view(board: BoardVerdict) -> BoardView:
    return BoardView(
        board.serial, board.board_type, board.verdict, board.opened_at, board.closed_at, board.missing, board.counts,
        is_revision=board.is_revision, reason=board.reason,
    )  # fmt: skip


def run_view(run: BoardRun) -> BoardView:
    if run.closed is not None:
        return replace(board_view(run.closed), counts=run.counts)
    return BoardView(run.serial, run.board_type, None, run.opened_at, None, run.missing, run.counts)
