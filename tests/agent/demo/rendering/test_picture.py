"""The picture of a judged board: marks where the parts lie, in the verdict's colour."""

from __future__ import annotations

import numpy as np
import pytest

from agent.demo.rendering.picture import COLOURS, PartVerdict, draw_verdicts
from agent.demo.rendering.render import render_board
from experts.expert import Verdict


@pytest.fixture(scope="module")
def board():
    return render_board(seed=9, defect_rate=0.0)


def colour_at_edge(picture, placement):
    left, top, _, bottom = placement.window
    return tuple(np.asarray(picture)[(top + bottom) // 2, left + 1])


def test_each_verdict_is_drawn_around_its_part(board):
    good, bad, unknown, silent = board.placements[10], board.placements[20], board.placements[30], board.placements[40]
    verdicts = {placement.ref: PartVerdict(Verdict.OK, "ok") for placement in board.placements}
    verdicts[bad.ref] = PartVerdict(Verdict.NG, "missing")
    verdicts[unknown.ref] = PartVerdict(Verdict.UNKNOWN, "unreadable")
    del verdicts[silent.ref]
    picture = draw_verdicts(board, verdicts)
    assert picture.width == board.image.width
    assert colour_at_edge(picture, bad) == COLOURS[Verdict.NG]
    assert colour_at_edge(picture, unknown) == COLOURS[Verdict.UNKNOWN]
    assert colour_at_edge(picture, silent) == COLOURS[Verdict.UNKNOWN]
    assert colour_at_edge(picture, good) not in {COLOURS[Verdict.NG], COLOURS[Verdict.UNKNOWN]}


def test_the_board_itself_is_left_as_it_was(board):
    before = board.image.tobytes()
    draw_verdicts(board, {})
    assert board.image.tobytes() == before
