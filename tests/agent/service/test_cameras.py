"""Cameras of a served line, played from real clips: frames become requests, triggers end once, whatever happens."""

from __future__ import annotations

import json
from contextlib import ExitStack, suppress
from datetime import UTC, datetime

import cv2
import numpy as np
import pytest
import yaml

from agent.records.result_writer import ResultStore
from agent.sources.cameras.camera_source import FRAMES_UNDER_WAY
from agent.subject import Subject
from experts.errors import OrderRefused, Refusing
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
    assert {(row.subject.component, row.subject.ref) for row in rows} == {("c0", "R1"), ("c1", "R2")}
    assert {row.board.verdict for row in desk_line.results.boards()} == {OK}
    judged = {row.subject.key for row in rows}
    assert judged.isdisjoint(desk_line.unfinished)  # a frame that was under way at the stop is left to the next start


def test_each_trigger_ends_with_its_board(desk_line, clip, wait_until_so):
    camera(desk_line, clip(), mode="triggered")
    with desk_line.served() as service:
        wait_until_so(lambda: service.desk.status().sources[0].state == "STREAMING")
        keys = [service.desk.trigger("top", board=f"B{number}") for number in range(3)]
        wait_until_so(lambda: service.judged == 6)
    rows = [row.result for row in desk_line.results.query()]
    assert sorted({row.subject.key.rpartition("#")[0] for row in rows}) == sorted(keys)
    assert sorted((row.board.serial, row.board.verdict) for row in desk_line.results.boards()) == [
        ("B0", OK),
        ("B1", OK),
        ("B2", OK),
    ]


@pytest.mark.parametrize("state", ["waits for its frame", "under way", "stored", "after a restart"])
def test_the_same_trigger_again_takes_no_other_frame(desk_line, clip, wait_until_so, batches, state):
    """Whose PLC repeats a trigger that was not answered in time has one frame judged, and two under one key never."""
    camera(desk_line, clip(), mode="triggered")
    cameras = desk_line.document["intake"]["cameras"]
    cameras.append(cameras[0] | {"name": "side"})
    with ExitStack() as ending:

        def begin():
            service = ending.enter_context(desk_line.served())
            wait_until_so(lambda: all(view.state == "STREAMING" for view in service.desk.status().sources))
            return service

        service = begin()
        if state in ("waits for its frame", "under way"):
            batches.clear()
            for number in range(FRAMES_UNDER_WAY if state == "waits for its frame" else 0):
                service.desk.trigger("top", board=f"A{number}")
        first = service.desk.trigger("top", "B1", None, "job 1")
        if state == "under way":
            wait_until_so(lambda: f"{first}#R1" in desk_line.unfinished)
        elif state != "waits for its frame":
            wait_until_so(lambda: service.judged == 2)
        if state == "after a restart":
            ending.close()
            service = begin()
        for other in (("top", "B2", None), ("top", None, None), ("top", "B1", "main"), ("side", "B1", None)):
            with pytest.raises(OrderRefused, match="'camera/key/job 1' was given for something else") as refused:
                service.desk.trigger(*other, "job 1")
            assert refused.value.reason is Refusing.KEY_REUSED
        assert service.desk.trigger("top", "B1", None, "job 1") == first
        batches.set()
        wait_until_so(lambda: len(desk_line.results.of_keys(first)) == 2)
        assert service.desk.trigger("top", "B1", None, "job 1") == first
        other = service.desk.trigger("side", "B1", None, "job 2")
        wait_until_so(lambda: len(desk_line.results.of_keys(other)) == 2)
    rows = [row.result for row in desk_line.results.query() if row.result.subject.board == "B1"]
    assert sorted(row.subject.key for row in rows) == sorted(
        f"{key}#{ref}" for key in (first, other) for ref in ("R1", "R2")
    )


def test_a_trigger_that_is_refused_leaves_its_key_to_the_next(desk_line, clip, wait_until_so):
    camera(desk_line, clip(), mode="triggered")
    with desk_line.served() as service:
        with suppress(OrderRefused):  # it has not begun to stream, or has
            service.desk.trigger("top", "B1", None, "k#1")
        with pytest.raises(OrderRefused, match="a key with #"):
            service.desk.trigger("top", "B1", None, "k#1")
        camera_ = service.sources[0].camera
        admit, camera_._delivery.admit = camera_._delivery.admit, lambda: False
        wait_until_so(lambda: service.desk.status().sources[0].state == "STREAMING")
        with pytest.raises(OrderRefused, match="triggers wait"):
            service.desk.trigger("top", "B1", None, "k")
        camera_._delivery.admit = admit
        service.desk.trigger("top", "B2", None, "k")
        wait_until_so(lambda: service.judged == 2)
    assert {row.result.subject.board for row in desk_line.results.query()} == {"B2"}


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


def test_triggered_frames_that_a_slow_line_has_no_room_for_fill_the_queue_and_then_are_told(
    desk_line, clip, wait_until_so
):
    """AC14: what waits is bounded by `queue`, not by the memory."""
    for number in range(2):
        desk_line.fake(number, B_s=0.5)
    camera(desk_line, clip(), mode="triggered", interval_s=0.1, queue=3)
    frames_at_once = []

    def is_told():
        frames_at_once.append(len({key.rpartition("#")[0] for key in desk_line.unfinished}))
        return any(row.result.reason and "3 triggers wait" in row.result.reason for row in desk_line.results.query())

    with desk_line.served():
        wait_until_so(is_told)
    assert max(frames_at_once) <= FRAMES_UNDER_WAY + 1  # one is accepted while the first one's end is being told
    keys = {row.result.subject.key for row in desk_line.results.query()} | set(
        desk_line.unfinished
    )  # left to the next agent
    numbers = {int(key.partition("#")[2].partition("#")[0]) for key in keys}
    assert numbers == set(range(1, len(numbers) + 1))
    assert len(keys) == 2 * len(numbers)


def test_a_trigger_whose_board_has_no_layout_is_refused(desk_line, clip, wait_until_so):
    desk_line.document["boards"]["other"] = {"components": {"c0": 1}, "takt_s": 3600}
    camera(desk_line, clip(), mode="triggered", board_type="main")
    with desk_line.served() as service:
        wait_until_so(lambda: service.desk.status().sources[0].state == "STREAMING")
        with pytest.raises(OrderRefused, match="board type 'other' has no layout"):
            service.desk.trigger("top", board="B1", board_type="other")


def test_a_trigger_whose_layout_goes_with_a_reload_meanwhile_is_told_as_lost(desk_line, clip, wait_until_so, batches):
    """AC14: its frame comes when nobody knows any more how to cut it."""
    camera(desk_line, clip(), mode="triggered", board_type="main")
    desk_line.document["boards"]["other"] = desk_line.document["boards"]["main"]
    with desk_line.served() as service:
        wait_until_so(lambda: service.desk.status().sources[0].state == "STREAMING")
        batches.clear()
        ahead = [service.desk.trigger("top", board=f"A{number}") for number in range(FRAMES_UNDER_WAY)]
        wait_until_so(lambda: {key.rpartition("#")[0] for key in desk_line.unfinished} >= set(ahead))
        key = service.desk.trigger("top", board="B1", board_type="other")
        del desk_line.document["boards"]["other"]
        (desk_line.folder / "line.yaml").write_text(yaml.safe_dump(desk_line.document))
        assert service.desk.reload().is_applied
        batches.set()
        wait_until_so(lambda: desk_line.results.find(key) is not None)
    lost = desk_line.results.find(key).result
    assert (lost.verdict, lost.subject.board) == (UNKNOWN, "B1")
    assert "no layout of board type 'other' any more" in lost.reason


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
    assert [row.result.subject.board_type for row in desk_line.results.query()] == [None, "main"]


def test_what_no_layout_cuts_is_refused_and_the_layout_of_a_camera_that_runs_stays(desk_line, clip, wait_until_so):
    """AC14: no trigger is accepted of which nothing could come."""
    camera(desk_line, clip(), mode="triggered")
    desk_line.document["boards"]["other"] = {"components": {"c0": 1}}
    desk_line.document["intake"]["cameras"][0]["board_type"] = "main"
    with desk_line.served() as service:
        wait_until_so(lambda: service.desk.status().sources[0].state == "STREAMING")
        with pytest.raises(OrderRefused, match="'other' has no layout"):
            service.desk.trigger("top", board_type="other")
        del desk_line.document["boards"]["main"]
        cameras = desk_line.document.pop("intake")
        assert desk_line.config.boards.keys() == {"other"}
        done = service.desk.reload()
        assert not done.is_applied
        assert "the layout of board type 'main' cuts the frames of camera top" in done.problems[0]
        service.desk.trigger("top", board="B1")
        wait_until_so(lambda: service.judged == 2)
    desk_line.document["intake"] = cameras
    assert [row.board.verdict for row in desk_line.results.boards()] == [OK]


def test_what_is_no_camera_or_board_type_is_refused(desk_line, clip):
    camera(desk_line, clip(), mode="triggered")
    with desk_line.served() as service:
        with pytest.raises(OrderRefused, match="no camera 'side'"):
            service.desk.trigger("side")
        with pytest.raises(OrderRefused, match="no board type 'other'"):
            service.desk.trigger("top", board_type="other")


@pytest.fixture
def left_frame(desk_line):
    """A frame that an earlier run accepted and did not judge."""

    def leave(content):
        with desk_line.served():
            pass
        at = datetime(2026, 5, 1, tzinfo=UTC)
        entries = [
            Subject(f"camera/top@1#1#{ref}", "top", f"top {ref}", at, part, None, "B1", "main", ref, box)
            for ref, part, box in (("R1", "c0", (0, 0, 16, 16)), ("R2", "c1", (16, 0, 32, 16)))
        ]
        store = ResultStore(desk_line.folder / "state" / "results.db")
        store.accept(entries, content, lambda _: None)
        assert store.close()
        return [entry.key for entry in entries]

    return leave


def test_a_frame_that_ended_the_agent_twice_is_unknown_with_all_its_parts(desk_line, left_frame, png, wait_until_so):
    keys = left_frame(png(size=(32, 16)))
    (desk_line.folder / "state" / "attempts.log").write_text(json.dumps({"counts": {keys[0]: 2, keys[1]: 1}}) + "\n")
    with desk_line.served() as service:
        wait_until_so(lambda: service.judged == 2)
    rows = [desk_line.results.find(key).result for key in keys]
    assert [row.verdict for row in rows] == [UNKNOWN, UNKNOWN]
    assert all("ended the agent: its frame was being judged each of the 2 times" in row.reason for row in rows)


def test_a_part_that_lies_partly_outside_of_its_frame_is_unknown(desk_line, left_frame, png, wait_until_so):
    """Of a frame that was accepted under a layout that is not there any more, nobody knows the size that it needs."""
    keys = left_frame(png(size=(31, 16)))
    del desk_line.document["boards"]["main"]["layout"]
    with desk_line.served() as service:
        wait_until_so(lambda: service.judged == 2)
    rows = [desk_line.results.find(key).result for key in keys]
    assert [row.verdict for row in rows] == [OK, UNKNOWN]
    assert "its box [16, 0, 32, 16] leaves the frame of 31 x 16 pixels" in rows[1].reason


def test_what_is_left_of_a_camera_is_judged_within_its_own_limit_of_pixels(
    desk_line, left_frame, png, clip, wait_until_so
):
    keys = left_frame(png(size=(32, 16)))
    camera(desk_line, clip(), mode="triggered", max_pixels=100)
    with desk_line.served() as service:
        wait_until_so(lambda: service.judged == 2)
    assert all("more than max_pixels 100" in desk_line.results.find(key).result.reason for key in keys)
