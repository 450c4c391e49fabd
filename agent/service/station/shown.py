"""Stored rows as documents of `/api`."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from agent.service.station.views import BoardTile, MeasuredView, OutputView, ResultView, StepView
from agent.sources.folder.files.shelves import keeps_image

if TYPE_CHECKING:
    from collections.abc import Collection

    from agent.config import LineConfig
    from agent.records.boards import BoardRun, BoardVerdict
    from agent.records.station.pages import ListedResult
    from agent.records.verdict import Result

OF_RESULT = [each.name for each in fields(ResultView) if each.name not in ("file", "has_image", "has_maps", "review")]


def result_view(listed: ListedResult, config: LineConfig) -> ResultView:
    return ResultView(**values_of(listed, config))


def values_of(listed: ListedResult, config: LineConfig) -> dict[str, Any]:
    """Fields of a ResultView, and of what is more than one."""
    result = listed.result
    return result.flat(OF_RESULT) | {
        "file": listed.file,
        "seconds": round(result.seconds, 6),
        "has_image": keeps_image(config, result.subject.key, result.verdict, result.kept_as),
        "has_maps": listed.has_maps,
        "review": listed.review,
    }


def steps_of(result: Result, mapped: Collection[int]) -> tuple[StepView, ...]:
    """``mapped``: steps whose map is kept."""
    return tuple(
        StepView(
            step.expert,
            step.label,
            step.score,
            step.boxes,
            None
            if step.anomaly is None
            else MeasuredView(step.anomaly.score, step.anomaly.threshold, number in mapped),
            tuple(OutputView(each.label, each.score, each.threshold, each.holds) for each in step.outputs),
            step.unproven,
        )
        for number, step in enumerate(result.steps)
    )


def tile_of_row(board: BoardVerdict) -> BoardTile:
    missing = sum(board.missing.values())
    reason = board.reason or (f"missing: {missing}" if missing else None)  # None in a file of before
    return BoardTile(
        board.seq, board.serial, board.board_type, board.verdict, board.opened_at, board.closed_at, board.takt_s,
        board.counts, missing, reason,
    )  # fmt: skip


def tile_of_run(run: BoardRun) -> BoardTile:
    """An open board."""
    missing = sum(run.missing.values())
    return BoardTile(None, run.serial, run.board_type, None, run.opened_at, None, None, run.counts, missing, None)
