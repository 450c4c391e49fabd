"""Stored rows as documents of `/api`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agent.service.station.views import BoardTile, MeasuredView, OutputView, ResultView, StepView
from agent.sources.folder.files.shelves import keeps_image
from experts.expert import BoundingBox

if TYPE_CHECKING:
    from collections.abc import Collection

    from agent.config import LineConfig
    from agent.records.boards import BoardRun
    from agent.records.results import BoardRow, Result
    from agent.records.station.pages import ListedResult


def result_view(listed: ListedResult, config: LineConfig) -> ResultView:
    return ResultView(**values_of(listed, config))


def values_of(listed: ListedResult, config: LineConfig) -> dict[str, Any]:
    """Fields of a ResultView, and of what is more than one."""
    result, subject = listed.row.result, listed.row.result.subject
    return {
        "seq": listed.row.seq,
        "file": listed.file,
        "key": subject.key,
        "board": subject.board,
        "board_type": subject.board_type,
        "ref": subject.ref,
        "component": subject.component,
        "image": subject.image,
        "verdict": result.verdict,
        "label": result.label,
        "score": result.score,
        "reason": result.reason,
        "experts": result.experts,
        "unproven": result.unproven,
        "arrived_at": subject.arrived_at,
        "finished_at": result.finished_at,
        "seconds": round(result.seconds, 6),
        "has_image": keeps_image(config, subject.key, result.verdict, result.kept_as),
        "has_maps": listed.has_maps,
        "review": listed.review,
    }


def steps_of(result: Result, mapped: Collection[int]) -> tuple[StepView, ...]:
    """``mapped``: steps whose map is kept."""
    return tuple(
        StepView(
            step["expert"],
            step["label"],
            step["score"],
            tuple(BoundingBox(**box) for box in step["boxes"]),
            MeasuredView(step["anomaly"]["score"], step["anomaly"]["threshold"], number in mapped)
            if "anomaly" in step
            else None,
            tuple(OutputView(**output) for output in step.get("outputs", ())),
            step.get("unproven", False),
        )
        for number, step in enumerate(result.detail.get("steps", ()))
    )


def tile_of_row(row: BoardRow) -> BoardTile:
    board = row.board
    missing = sum(board.missing.values())
    reason = board.reason or (f"missing: {missing}" if missing else None)  # None in a file of before
    return BoardTile(
        row.seq, board.serial, board.board_type, board.verdict, board.opened_at, board.closed_at, board.takt_s,
        board.counts, missing, reason,
    )  # fmt: skip


def tile_of_run(run: BoardRun) -> BoardTile:
    """An open board."""
    missing = sum(run.missing.values())
    return BoardTile(None, run.serial, run.board_type, None, run.opened_at, None, None, run.counts, missing, None)
