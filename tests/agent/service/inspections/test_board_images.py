"""A folder into which a machine drops one picture of each board: cut by the layout, judged part by part."""

from __future__ import annotations

import io
import json
import sqlite3
from contextlib import closing, suppress

import pytest
import yaml
from PIL import Image

from agent.records.result_reader import ResultReader
from agent.sources.folder.files.inbox import Inbox
from agent.sources.folder.files.readiness import Sighting
from experts.expert import Verdict

OK, NG, UNKNOWN = Verdict.OK, Verdict.NG, Verdict.UNKNOWN
BOXES = {"R1": [0, 0, 16, 16], "R2": [16, 0, 32, 16]}


def board(size=(32, 16), image_format="PNG"):
    buffer = io.BytesIO()
    Image.new("RGB", size, (10, 200, 30)).save(buffer, image_format)
    return buffer.getvalue()


class BoardLine:
    """A line whose folder shows boards of the type main, two parts each."""

    def __init__(self, desk_line):
        self.desk_line = desk_line
        self.folder = desk_line.folder
        self.inbox = self.folder / "inbox"
        self.inbox.mkdir()
        pattern = r"(?P<board>[^_.]+)(_.*)?\.\w+"
        self.watched = {
            "path": "./inbox", "pattern": pattern, "board_type": "main", "settle_ms": 0, "poll_s": 0.1,
            "stale_after_s": 0.5,
        }  # fmt: skip
        self.document = desk_line.document
        self.document["intake"] = {"folders": [self.watched]}
        self.served = desk_line.served

    def drop(self, name, content=None):
        (self.folder / name).write_bytes(board() if content is None else content)
        (self.folder / name).rename(self.inbox / name)

    def key(self, name):
        """What this file is known by."""
        status = (self.inbox / name).stat()
        return Inbox(self.inbox, "test").key(name, Sighting(status.st_ino, status.st_size, status.st_mtime_ns))

    @property
    def rows(self):
        with suppress(sqlite3.Error, OSError):  # it is not there yet
            return [row.result for row in self.desk_line.results.query()]
        return []

    @property
    def boards(self):
        return [(row.board.serial, row.board.verdict) for row in self.desk_line.results.boards()]

    def shelf(self, name):
        return sorted(file.name for file in (self.inbox / name).rglob("*") if file.is_file())

    @property
    def is_empty(self):
        """Nothing waits, and nothing is claimed."""
        lying = [*self.inbox.glob("*"), *(self.inbox / ".work").rglob("*")]
        return not any(file.is_file() for file in lying)


@pytest.fixture
def line(desk_line):
    return BoardLine(desk_line)


def test_an_image_of_a_board_is_cut_and_each_part_has_its_row(line, wait_until_so):
    with line.served() as service:
        line.drop("B1.png")
        wait_until_so(lambda: line.shelf("done") == ["B1.png"])
        folder = service.sources[0].reader.statistics()
        assert folder.held_bytes == 0
    rows = line.rows
    assert sorted(
        (row.subject.board, row.subject.board_type, row.subject.component, row.subject.ref, row.verdict) for row in rows
    ) == [
        ("B1", "main", "c0", "R1", OK),
        ("B1", "main", "c1", "R2", OK),
    ]
    assert {row.subject.ref: row.detail["box"] for row in rows} == BOXES
    assert {row.subject.image for row in rows} == {"B1.png"}
    assert line.boards == [("B1", OK)]


@pytest.mark.parametrize(("labels", "shelf", "verdict"), [(("ok", "bad"), "ng", NG), (("bad", "bad"), "ng", NG)])
def test_the_file_goes_where_the_worst_part_says(line, wait_until_so, labels, shelf, verdict):
    for number, label in enumerate(labels):
        line.desk_line.fake(number, label=label)
    with line.served():
        line.drop("B1.png")
        wait_until_so(lambda: line.shelf(shelf) == ["B1.png"])
    assert line.boards == [("B1", verdict)]


@pytest.mark.parametrize("size", [(20, 16), (32, 12), (64, 32)])
def test_an_image_of_another_size_is_refused_with_its_reason_and_its_board_is_unknown(line, wait_until_so, size):
    with line.served():
        line.drop("B1.png", board(size))
        wait_until_so(lambda: line.shelf("failed") == ["B1.png", "B1.png.error.json"])
    reason = json.loads((line.inbox / "failed" / "B1.png.error.json").read_text())["reason"]
    assert reason.startswith("2 of 2 parts are UNKNOWN; R")
    assert f"{size[0]} x {size[1]} pixels, and its layout is for 32 x 16" in reason
    assert [row.verdict for row in line.rows] == [UNKNOWN, UNKNOWN]
    assert line.boards == [("B1", UNKNOWN)]


def test_an_image_without_a_serial_is_refused_and_touches_no_board(line, wait_until_so):
    with line.served():
        line.drop("_nobody.png")
        wait_until_so(lambda: line.shelf("failed") == ["_nobody.png", "_nobody.png.error.json"])
    (row,) = line.rows
    assert (row.verdict, row.subject.board, row.subject.component) == (UNKNOWN, None, None)
    assert "does not match the pattern" in row.reason
    assert line.boards == []


@pytest.mark.parametrize("content", [board()[:-20], board((32, 16), "JPEG")[:200], b"no image", b""])
def test_what_cannot_be_decoded_makes_its_board_unknown(line, wait_until_so, content):
    with line.served():
        line.drop("B1.png", content)
        wait_until_so(lambda: "B1.png.error.json" in line.shelf("failed"))
    assert sorted((row.subject.ref, row.verdict) for row in line.rows) == [("R1", UNKNOWN), ("R2", UNKNOWN)]
    assert line.boards == [("B1", UNKNOWN)]


def test_a_sidecar_tells_the_serial_and_nothing_of_parts(line, wait_until_so):
    del line.watched["pattern"]
    line.watched["identity"] = "sidecar"
    with line.served():
        for name, said in (
            ("good", {"board": "B1"}),
            ("typed", {"board": "B2", "type": "main"}),
            ("part", {"board": "B3", "ref": "R1"}),
            ("other", {"board": "B4", "type": "side"}),
            ("none", {}),
        ):
            (line.inbox / f"{name}.json").write_text(json.dumps(said))
            line.drop(f"{name}.png")
        wait_until_so(lambda: line.is_empty)
    assert line.shelf("done") == ["good.json", "good.png", "typed.json", "typed.png"]
    reasons = {row.subject.image: row.reason for row in line.rows if row.verdict is UNKNOWN}
    assert reasons == {
        "part.png": "its sidecar part.json gives a ref, but every image here shows a whole board",
        "other.png": "its sidecar other.json says board type 'side', but every board here is 'main'",
        "none.png": "its sidecar none.json gives no board",
    }
    assert sorted(line.boards) == [("B1", OK), ("B2", OK)]


SERVED = """
import sys, time
from pathlib import Path
from agent.config import read_line
from agent.service.line_service import LineService
LineService(read_line(Path(sys.argv[1]), {}), lambda *_: None).start()
time.sleep(600)
"""


def test_killed_in_the_middle_no_part_is_judged_twice_and_none_is_lost(line, wait_until_so, forks):
    """AC6, for images that are cut."""
    line.desk_line.fake(1, K_s=0.3)
    assert line.desk_line.config.line == "test"  # the line file is written
    agent = forks.start(SERVED, line.folder / "line.yaml")
    for number in range(10):
        line.drop(f"B{number}.png")
    try:
        wait_until_so(lambda: len(line.rows) >= 4)
    finally:
        agent.kill()
    before = {row.subject.key: row.finished_at for row in line.rows}
    assert 4 <= len(before) < 20
    line.desk_line.fake(1)
    with line.served() as service:
        wait_until_so(lambda: len(line.shelf("done")) == 10 and line.is_empty)
        assert service.judged == 20 - len(before)
        assert service.statistics().store.duplicates == 0  # what was judged was not asked about again
    after = {row.subject.key: row.finished_at for row in line.rows}
    assert len(after) == 20
    assert before.items() <= after.items()
    assert sorted(line.boards) == [(f"B{number}", OK) for number in range(10)]


def test_what_was_stored_before_a_crash_moves_its_file_and_is_not_judged_again(line, wait_until_so):
    line.desk_line.fake(1, label="bad")
    with line.served():
        line.drop("B1.png")
        wait_until_so(lambda: line.shelf("ng") == ["B1.png"])
    (moved,) = (line.inbox / "ng").rglob("B1.png")
    moved.rename(line.inbox / "B1.png")  # as if it had not been moved yet
    line.desk_line.fake(1)
    layout = yaml.safe_load((line.folder / "layout.yaml").read_text())
    layout["parts"]["R3"] = layout["parts"].pop("R2")  # measured anew: it asks nothing more of what was judged
    (line.folder / "layout.yaml").write_text(yaml.safe_dump(layout))
    with line.served() as service:
        wait_until_so(lambda: line.shelf("ng") == ["B1.png"])
        assert service.judged == 0


def test_a_part_that_was_stored_counts_when_the_file_is_put_away(line, wait_until_so):
    line.desk_line.fake(0, label="bad")
    with line.served():
        line.drop("B1.png")
        wait_until_so(lambda: line.shelf("ng") == ["B1.png"])
    (moved,) = (line.inbox / "ng").rglob("B1.png")
    moved.rename(line.inbox / "B1.png")
    with closing(sqlite3.connect(line.folder / "state" / "results.db")) as database:
        database.execute("DELETE FROM results WHERE ref = 'R2'")  # as if it had been killed before that was stored
        database.commit()
    line.desk_line.fake(0)
    with line.served() as service:
        wait_until_so(lambda: line.shelf("ng") == ["B1.png"])
        assert service.judged == 1
    assert sorted((row.subject.ref, row.verdict) for row in line.rows) == [("R1", NG), ("R2", OK)]


def test_an_image_that_ended_the_agent_twice_is_unknown_with_all_its_parts(line, wait_until_so):
    with line.served():
        pass
    line.drop("B1.png")
    counts = {"counts": {f"{line.key('B1.png')}#R2": 2}}
    (line.folder / "state" / "attempts.log").write_text(json.dumps(counts) + "\n")
    with line.served():
        wait_until_so(lambda: "B1.png.error.json" in line.shelf("failed"))
    assert [row.verdict for row in line.rows] == [UNKNOWN, UNKNOWN]
    assert all("ended the agent" in row.reason for row in line.rows)


def test_a_layout_that_went_with_a_reload_makes_nothing_ok(line, wait_until_so):
    with line.served() as service:
        line.document["intake"] = {}  # which waits for a restart
        del line.document["boards"]["main"]["layout"]
        (line.folder / "line.yaml").write_text(yaml.safe_dump(line.document))
        assert service.desk.reload().is_applied
        line.drop("B1.png")
        wait_until_so(lambda: "B1.png.error.json" in line.shelf("failed"))
    (row,) = line.rows
    assert row.verdict is UNKNOWN
    assert "no layout of board type 'main' any more" in row.reason


def test_results_that_cannot_be_read_for_a_while_change_no_verdict(line, wait_until_so, monkeypatch):
    line.desk_line.fake(1, label="bad")
    with line.served():
        line.drop("B1.png")
        wait_until_so(lambda: line.shelf("ng") == ["B1.png"])
    (moved,) = (line.inbox / "ng").rglob("B1.png")
    moved.rename(line.inbox / "B1.png")
    line.desk_line.fake(1)
    of_keys, asked = ResultReader.of_keys, []

    def locked(reader, beginning):
        asked.append(beginning)
        if len(asked) <= 2:
            raise sqlite3.OperationalError("database is locked")
        return of_keys(reader, beginning)

    monkeypatch.setattr(ResultReader, "of_keys", locked)
    with line.served() as service:
        wait_until_so(lambda: line.shelf("ng") == ["B1.png"])
        assert service.judged == 0
    assert len(line.rows) == 2


def test_files_that_are_kept_are_judged_once(line, wait_until_so):
    line.watched["after"] = "keep"
    line.drop("B1.png")
    with line.served() as service:
        wait_until_so(lambda: service.judged == 2)
    with line.served() as service:
        wait_until_so(lambda: service.sources[0].intake.statistics().offered == 1)
        wait_until_so(lambda: service.sources[0].intake.statistics().in_flight == 0)
        assert service.judged == 0
    assert line.boards == [("B1", OK)]
