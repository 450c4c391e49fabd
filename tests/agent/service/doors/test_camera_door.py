"""Cameras of a served line, played from real clips: frames become requests, triggers end once, whatever happens."""

from __future__ import annotations

from contextlib import suppress

import cv2
import numpy as np
import pytest

from experts.errors import OrderRefused
from experts.expert import Verdict

OK, NG, UNKNOWN = Verdict.OK, Verdict.NG, Verdict.UNKNOWN


@pytest.fixture
def clip(tmp_path):
    """A clip of so many frames, (height, width)."""

    def make(size=(16, 32), frames=5):
        path = tmp_path / "clip.avi"
        writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"MJPG"), 20.0, (size[1], size[0]))
        for number in range(frames):
            writer.write(np.full((*size, 3), 40 * (number % 6), np.uint8))
        writer.release()
        return path

    return make


def camera(line, clip, **keys):
    line.document["intake"] = {"cameras": [{"name": "top", "url": f"file:{clip}", "loop": True} | keys]}


def test_frames_of_a_camera_are_cut_by_the_layout_and_judged_as_boards(desk_line, clip, wait_until_so):
    camera(desk_line, clip(), frames_per_s=20.0)
    with desk_line.served() as service:
        wait_until_so(lambda: service.judged >= 4)
        (view,) = service.desk.status().sources
        assert (view.name, view.kind, view.state) == ("top", "camera", "STREAMING")
    rows = [row.result for row in desk_line.results.query()]
    assert {row.verdict for row in rows} == {OK}
    assert {(row.component, row.ref) for row in rows} == {("c0", "R1"), ("c1", "R2")}
    assert {row.board.verdict for row in desk_line.results.boards()} == {OK}
    assert desk_line.unfinished == []


def test_each_trigger_ends_with_its_board(desk_line, clip, wait_until_so):
    camera(desk_line, clip(), mode="triggered")
    with desk_line.served() as service:
        wait_until_so(lambda: service.desk.status().sources[0].state == "STREAMING")
        keys = [service.desk.trigger("top", board=f"B{number}") for number in range(3)]
        wait_until_so(lambda: service.judged == 6)
    rows = [row.result for row in desk_line.results.query()]
    assert sorted({row.key.rpartition("#")[0] for row in rows}) == sorted(keys)
    assert sorted((row.board.serial, row.board.verdict) for row in desk_line.results.boards()) == [
        ("B0", OK),
        ("B1", OK),
        ("B2", OK),
    ]


def test_a_frame_of_another_size_is_unknown_part_by_part(desk_line, clip, wait_until_so):
    camera(desk_line, clip(size=(24, 32)), mode="triggered")
    with desk_line.served() as service:
        wait_until_so(lambda: service.desk.status().sources[0].state == "STREAMING")
        service.desk.trigger("top", board="B1")
        wait_until_so(lambda: service.judged == 2)
    rows = [row.result for row in desk_line.results.query()]
    assert {row.verdict for row in rows} == {UNKNOWN}
    assert all("32 x 24 pixels, and its layout is for 32 x 16" in row.reason for row in rows)
    assert [row.board.verdict for row in desk_line.results.boards()] == [UNKNOWN]


def test_a_trigger_without_a_frame_is_unknown_and_says_why(desk_line, clip, wait_until_so):
    """AC14: an overflow or a camera that is gone is a result, not silence."""
    path = clip()
    camera(desk_line, path, mode="triggered", stall_timeout_s=0.5, loop=False, frames_per_s=1.0)
    with desk_line.served() as service:
        wait_until_so(lambda: service.desk.status().sources[0].state == "STREAMING")
        path.unlink()  # and it cannot be connected anew
        service.desk.trigger("top", board="B0")
        accepted = 1
        while service.desk.status().sources[0].state == "STREAMING":
            with suppress(OrderRefused):  # the queue is full
                service.desk.trigger("top", board=f"B{accepted}")
                accepted += 1
        wait_until_so(lambda: service.judged == 2 * accepted and desk_line.unfinished == [])
    rows = [row.result for row in desk_line.results.query()]
    assert all(row.verdict is OK or row.reason.startswith("camera top: ") for row in rows)


def test_a_camera_of_one_component_counts_on_boards_only_where_its_type_is_told(desk_line, clip, wait_until_so):
    camera(desk_line, clip(size=(8, 8)), component="c0", mode="triggered")
    with desk_line.served() as service:
        wait_until_so(lambda: service.desk.status().sources[0].state == "STREAMING")
        service.desk.trigger("top")
        wait_until_so(lambda: service.judged == 1)
        service.desk.trigger("top", board="B1", board_type="main")
        wait_until_so(lambda: service.judged == 2)
        (board,) = service.desk.boards("B1")
        assert dict(board.missing) == {"c1": 1}
    assert [row.result.board_type for row in desk_line.results.query()] == [None, "main"]


def test_what_is_no_camera_or_board_type_is_refused(desk_line, clip):
    camera(desk_line, clip(), mode="triggered")
    with desk_line.served() as service:
        with pytest.raises(OrderRefused, match="no camera 'side'"):
            service.desk.trigger("side")
        with pytest.raises(OrderRefused, match="no board type 'other'"):
            service.desk.trigger("top", board_type="other")
