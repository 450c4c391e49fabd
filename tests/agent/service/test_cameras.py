"""Cameras of a served line, played from real clips: frames become requests, triggers end once, whatever happens."""

import json
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime

import pytest

from agent.faults.errors import OrderRefused, Reason
from agent.records.result_writer import ResultStore
from agent.sources.cameras.camera import FRAMES_UNDER_WAY
from agent.subject import Subject
from experts.expert import Verdict
from tests.agent.service.fake_line import picture, write_clip
from tests.waiting import until

OK, UNKNOWN = Verdict.OK, Verdict.UNKNOWN


@pytest.fixture
def line(line):
    """With a camera whose triggers are the test's."""
    url = f"file:{write_clip(line.folder / 'clip.avi')}"
    line.document["intake"] = {"cameras": [{"name": "top", "url": url, "loop": True, "mode": "triggered"}]}
    return line


def change(line, **keys):
    line.document["intake"]["cameras"][0] |= keys


@contextmanager
def streaming(line):
    with line.served() as service:
        until(lambda: all(view.state == "STREAMING" for view in service.desk.status().sources))
        yield service


@pytest.mark.parametrize("state", ["waits for its frame", "under way", "stored", "after a restart"])
def test_repeated_trigger_takes_no_second_frame(line, batches, state):
    cameras = line.document["intake"]["cameras"]
    cameras.append(cameras[0] | {"name": "side"})
    with ExitStack() as ending:
        service = ending.enter_context(streaming(line))
        if state in ("waits for its frame", "under way"):
            batches.clear()
            for number in range(FRAMES_UNDER_WAY if state == "waits for its frame" else 0):
                service.desk.trigger("top", board=f"A{number}")
        first = service.desk.trigger("top", "B1", None, "job 1")
        if state == "under way":
            until(lambda: f"{first}#R1" in line.unfinished)
        elif state != "waits for its frame":
            until(lambda: service.judged == 2)
        if state == "after a restart":
            ending.close()
            service = ending.enter_context(streaming(line))
        for other in (("top", "B2", None), ("top", None, None), ("top", "B1", "main"), ("side", "B1", None)):
            with pytest.raises(OrderRefused, match="'camera/key/job 1' was given for something else") as refused:
                service.desk.trigger(*other, "job 1")
            assert refused.value.reason is Reason.KEY_REUSED
        assert service.desk.trigger("top", "B1", None, "job 1") == first
        batches.set()
        until(lambda: len(line.results.of_keys(first)) == 2)
        assert service.desk.trigger("top", "B1", None, "job 1") == first
        other = service.desk.trigger("side", "B1", None, "job 2")
        until(lambda: len(line.results.of_keys(other)) == 2)
    keys = sorted(row.subject.key for row in line.rows if row.subject.board == "B1")
    assert keys == sorted(f"{key}#{ref}" for key in (first, other) for ref in ("R1", "R2"))


def test_refused_trigger_leaves_its_key_to_the_next(line):
    with streaming(line) as service:
        with pytest.raises(OrderRefused, match="a key with #"):
            service.desk.trigger("top", "B1", None, "k#1")
        delivery = service.sources[0]._delivery
        admit, delivery.admit = delivery.admit, lambda: False
        with pytest.raises(OrderRefused, match="triggers wait"):
            service.desk.trigger("top", "B1", None, "k")
        delivery.admit = admit
        service.desk.trigger("top", "B2", None, "k")
        until(lambda: service.judged == 2)
    assert line.boards == [("B2", OK)]


def test_frame_of_another_size_is_unknown_part_by_part(line):
    write_clip(line.folder / "clip.avi", (24, 32))
    with streaming(line) as service:
        service.desk.trigger("top", board="B1")
        until(lambda: service.judged == 2)
    assert all("32 x 24 pixels, and its layout is for 32 x 16" in row.reason for row in line.rows)
    assert line.boards == [("B1", UNKNOWN)]


def test_trigger_whose_layout_a_reload_removed_is_stored_as_unknown(line, batches):
    change(line, board_type="main")
    line.document["boards"]["other"] = line.document["boards"]["main"]
    with streaming(line) as service:
        batches.clear()
        ahead = [service.desk.trigger("top", board=f"A{number}") for number in range(FRAMES_UNDER_WAY)]
        until(lambda: {key.rpartition("#")[0] for key in line.unfinished} >= set(ahead))
        key = service.desk.trigger("top", board="B1", board_type="other")
        del line.document["boards"]["other"]
        line.write()
        assert service.desk.reload().is_applied
        batches.set()
        until(lambda: line.results.find(key) is not None)
    lost = line.results.find(key)
    assert (lost.verdict, lost.subject.board) == (UNKNOWN, "B1")
    assert "no layout of board type 'other' any more" in lost.reason


def test_camera_of_one_component_counts_on_a_board_only_with_its_type(line):
    change(line, component="c0")
    del line.document["boards"]["main"]["layout"]  # it would list the refs
    with streaming(line) as service:
        service.desk.trigger("top")
        until(lambda: service.judged == 1)
        service.desk.trigger("top", board="B1", board_type="main")
        until(lambda: service.judged == 2)
        assert [dict(board.missing) for board in service.desk.boards("B1")] == [{"c1": 1}]
    assert [row.subject.board_type for row in line.rows] == [None, "main"]


def test_trigger_without_a_layout_is_refused_and_a_running_cameras_layout_stays(line):
    change(line, board_type="main")
    line.document["boards"]["other"] = {"components": {"c0": 1}}
    with streaming(line) as service:
        for camera, board_type, reason in (
            ("side", None, "no camera 'side'"),
            ("top", "none", "no board type 'none'"),
            ("top", "other", "board type 'other' has no layout"),
        ):
            with pytest.raises(OrderRefused, match=reason):
                service.desk.trigger(camera, None, board_type)
        with pytest.raises(OrderRefused, match="board is blank"):
            service.desk.trigger("top", "  ", "main")
        del line.document["boards"]["main"], line.document["intake"]
        line.write()
        done = service.desk.reload()
        assert not done.is_applied
        assert "the layout of board type 'main' cuts the frames of camera top" in done.problems[0]
        service.desk.trigger("top", board="B1")
        until(lambda: service.judged == 2)
    assert line.boards == [("B1", OK)]


def leave_frame(line, content):
    """A frame that an earlier run accepted and did not judge; the keys of its parts."""
    with line.served():
        pass
    at = datetime(2026, 5, 1, tzinfo=UTC)
    entries = [
        Subject(f"camera/top@1#1#{ref}", "top", f"top {ref}", at, part, None, "B1", "main", ref, box)
        for ref, part, box in (("R1", "c0", (0, 0, 16, 16)), ("R2", "c1", (16, 0, 32, 16)))
    ]
    store = ResultStore(line.folder / "state" / "results.db")
    store.accept(entries, content, lambda _: None)
    assert store.close()
    return [entry.key for entry in entries]


def judged_left_overs(line, keys):
    with line.served() as service:
        until(lambda: service.judged == 2)
    return [line.results.find(key) for key in keys]


@pytest.mark.parametrize(
    ("attempts", "max_pixels", "reason"),
    [
        ((2, 1), 10_000, "ended the agent: its frame was being judged each of the 2 times"),
        ((0, 0), 100, "more than max_pixels 100"),
    ],
)
def test_left_over_frame_that_ended_the_agent_twice_or_is_too_large_is_unknown(line, attempts, max_pixels, reason):
    keys = leave_frame(line, picture(size=(32, 16)))
    counts = dict(zip(keys, attempts, strict=True))
    (line.folder / "state" / "attempts.log").write_text(json.dumps({"counts": counts}) + "\n")
    change(line, max_pixels=max_pixels)
    assert [reason in row.reason for row in judged_left_overs(line, keys)] == [True, True]


def test_part_partly_outside_its_frame_is_unknown(line):
    keys = leave_frame(line, picture(size=(31, 16)))
    del line.document["boards"]["main"]["layout"], line.document["intake"]
    rows = judged_left_overs(line, keys)
    assert [row.verdict for row in rows] == [OK, UNKNOWN]
    assert "its box [16, 0, 32, 16] leaves the frame of 31 x 16" in rows[1].reason
