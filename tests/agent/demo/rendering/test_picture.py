"""The picture of a judged board: marks where the parts lie, in the verdict's colour."""

import numpy as np
import pytest

from agent.demo.rendering.picture import COLOURS, PartVerdict, draw_verdicts
from agent.demo.rendering.render import render_board
from experts.expert import Anomaly, AnomalyMap, Verdict


@pytest.fixture(scope="module")
def board():
    return render_board(9, "B9", 0.0, 0.0)


def colour_at_edge(picture, placement):
    left, top, _, bottom = placement.window
    return tuple(np.asarray(picture)[(top + bottom) // 2, left + 1])


def test_each_verdict_is_drawn_around_its_part(board):
    good, bad, unknown, silent = board.placements[10], board.placements[20], board.placements[30], board.placements[40]
    verdicts = {placement.ref: PartVerdict(Verdict.OK, "ok") for placement in board.placements}
    verdicts[bad.ref] = PartVerdict(Verdict.NG, "missing")
    verdicts[unknown.ref] = PartVerdict(Verdict.UNKNOWN, "unreadable")
    del verdicts[silent.ref]
    before = board.image.tobytes()
    picture = draw_verdicts(board, verdicts)
    assert board.image.tobytes() == before
    assert picture.width == board.image.width
    assert colour_at_edge(picture, bad) == COLOURS[Verdict.NG]
    assert colour_at_edge(picture, unknown) == COLOURS[Verdict.UNKNOWN]
    assert colour_at_edge(picture, silent) == COLOURS[Verdict.UNKNOWN]
    assert colour_at_edge(picture, good) not in {COLOURS[Verdict.NG], COLOURS[Verdict.UNKNOWN]}


def test_anomaly_is_coloured_where_it_lies_on_the_board(board):
    """The map is of the upright crop: its right half is strange."""
    part = next(each for each in board.placements if each.quarter_turns == 1)
    values = np.tile(np.array([0, 255], np.uint8), (2, 1)).tobytes()
    verdicts = {part.ref: PartVerdict(Verdict.NG, "anomalous", Anomaly(9.0, 5.0, AnomalyMap(2, 2, 0.0, 10.0, values)))}
    plain = {part.ref: PartVerdict(Verdict.NG, "anomalous")}
    with_map, without = (np.asarray(draw_verdicts(board, each), np.int64) for each in (verdicts, plain))
    left, top, right, bottom = part.window
    changed = np.abs(with_map - without).sum(2)
    assert changed[top:bottom, left:right].sum() == changed.sum()
    quarter = (bottom - top) // 4  # turned clockwise on the board, the crop's right is its lower side
    lower, upper = changed[bottom - quarter : bottom, left:right].sum(), changed[top : top + quarter, left:right].sum()
    assert lower > 10 * upper
