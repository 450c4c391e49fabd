"""A folder into which a machine drops one picture of each board: cut by the layout, judged part by part."""

import json
import os
import sqlite3
from contextlib import closing, suppress

import pytest
import yaml

from agent.records.result_reader import ResultReader
from agent.subject import image_key
from experts.expert import Verdict
from tests.agent.service.fake_line import SERVED, picture
from tests.waiting import until

OK, NG, UNKNOWN = Verdict.OK, Verdict.NG, Verdict.UNKNOWN
BOARD = picture(size=(32, 16))


@pytest.fixture
def line(line):
    """Its folder shows boards of the type main, two parts each."""
    line.watch(pattern=r"(?P<board>[^_.]+)(_.*)?\.\w+", board_type="main", stale_after_s=0.5)
    return line


def judge_until(line, shelf, image=BOARD):
    with line.served() as service:
        line.drop("B1.png", image)
        until(lambda: "B1.png" in line.shelf(shelf))
    return service


def put_back(line, shelf):
    """As claimed: its agent was killed before the move."""
    (moved,) = (line.inbox / shelf).rglob("B1.png")
    identity = image_key(line.rows[0].subject.key).rpartition("@")[2]
    (work := line.inbox / ".work" / line.config.line).mkdir(parents=True)
    moved.rename(work / f"{identity}~B1.png")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (picture(size=(20, 16)), "20 x 16 pixels, and its layout is for 32 x 16"),
        (picture(size=(32, 12)), "32 x 12 pixels, and its layout is for 32 x 16"),
        (BOARD[:-20], "truncated"), (b"no image", "not an image"), (b"", "empty"),
    ],
)  # fmt: skip
def test_board_image_that_its_layout_cannot_cut_is_refused_and_its_board_unknown(line, content, why):
    judge_until(line, "failed", content)
    assert why in json.loads((line.inbox / "failed" / "B1.png.error.json").read_text())["reason"]
    assert sorted((row.subject.ref, row.verdict) for row in line.rows) == [("R1", UNKNOWN), ("R2", UNKNOWN)]
    assert line.boards == [("B1", UNKNOWN)]


def test_sidecar_of_a_board_image_gives_its_serial_but_no_part(line):
    watched = line.document["intake"]["folders"][0] | {"identity": "sidecar"}
    del watched["pattern"]
    line.document["intake"]["folders"] = [watched]
    sidecars = {
        "good": {"board": "B1"}, "typed": {"board": "B2", "type": "main"}, "part": {"board": "B3", "ref": "R1"},
        "other": {"board": "B4", "type": "side"}, "none": {},
    }  # fmt: skip
    with line.served():
        for name, said in sidecars.items():
            (line.inbox / f"{name}.json").write_text(json.dumps(said))
            line.drop(f"{name}.png", BOARD)
        until(lambda: len(line.shelf("done") + line.shelf("failed")) == 4 + 9)
    assert line.shelf("done") == ["good.json", "good.png", "typed.json", "typed.png"]
    assert {row.subject.image: row.reason for row in line.rows if row.verdict is UNKNOWN} == {
        "part.png": "its sidecar part.json gives a ref, but every image here shows a whole board",
        "other.png": "its sidecar other.json says board type 'side', but every board here is 'main'",
        "none.png": "its sidecar none.json gives no board",
    }
    assert sorted(line.boards) == [("B1", OK), ("B2", OK)]


def test_agent_killed_mid_board_judges_no_part_twice_and_loses_none(line, forks):

    def rows():
        with suppress(sqlite3.Error, OSError):  # it is not there yet
            return {row.subject.key: row.finished_at for row in line.rows}
        return {}

    line.fake(1, K_s=0.3)
    agent = forks.start(SERVED, line.write())
    for number in range(10):
        line.drop(f"B{number}.png", BOARD)
    try:
        until(lambda: len(rows()) >= 4)
    finally:
        agent.kill()
    before = rows()
    assert 4 <= len(before) < 20
    line.fake(1)
    with line.served() as service:
        until(lambda: len(line.shelf("done")) == 10, lambda: f"{line.shelf('')} {line.rows}")
        assert (service.judged, service.sources[0].status().held_bytes) == (20 - len(before), 0)
        assert service.store.statistics().duplicates == 0  # what was judged was not asked about again
    assert (len(rows()), before.items() <= rows().items()) == (20, True)
    boxes = {(row.subject.ref, row.subject.component, *row.subject.box) for row in line.rows}
    assert boxes == {("R1", "c0", 0, 0, 16, 16), ("R2", "c1", 16, 0, 32, 16)}
    assert sorted(line.boards) == [(f"B{number}", OK) for number in range(10)]


@pytest.mark.parametrize("failures", [0, 2], ids=["at once", "once the results can be read"])
def test_board_image_stored_before_a_crash_is_moved_and_not_judged_again(line, monkeypatch, failures):
    line.fake(1, label="bad")
    judge_until(line, "ng")
    put_back(line, "ng")
    line.fake(1)
    if not failures:
        layout = yaml.safe_load((line.folder / "layout.yaml").read_text())
        layout["parts"]["R3"] = layout["parts"].pop("R2")  # measured anew: it asks nothing more of what was judged
        (line.folder / "layout.yaml").write_text(yaml.safe_dump(layout))
    of_keys, asked = ResultReader.of_keys, []

    def locked(reader, beginning):
        asked.append(beginning)
        if len(asked) <= failures:
            raise sqlite3.OperationalError("database is locked")
        return of_keys(reader, beginning)

    monkeypatch.setattr(ResultReader, "of_keys", locked)
    with line.served() as service:
        until(lambda: line.shelf("ng") == ["B1.png"])
        assert service.judged == 0
    assert len(line.rows) == 2


def test_kept_board_image_is_judged_again_after_new_bytes_but_not_after_a_new_mode(line):
    line.document["intake"]["folders"][0].update(after="keep", settle_ms=100)
    first, second = (
        picture(color, (32, 16)).ljust(1000, b"-") + b"\0\0\0\0IEND\xaeB`\x82" for color in ("red", "blue")
    )
    with line.served() as service:
        for content, judged in ((first, 2), (first, 2), (second, 4)):
            received = service.sources[0].status().received
            with (line.inbox / "B1.png").open("wb") as file:
                file.write(content)
                file.flush()
                os.utime(line.inbox / "B1.png", (5, 5))
            until(lambda before=received: service.sources[0].status().received > before)
            until(lambda: service.sources[0].held == 0)
            assert service.judged == judged
    assert len({image_key(row.subject.key) for row in line.rows}) == 2


def test_part_stored_before_a_crash_counts_when_its_file_is_put_away(line):
    line.fake(0, label="bad")
    judge_until(line, "ng")
    put_back(line, "ng")
    with closing(sqlite3.connect(line.folder / "state" / "results.db")) as database:
        database.execute("DELETE FROM results WHERE ref = 'R2'")  # as if it had been killed before that was stored
        database.commit()
    line.fake(0)
    with line.served() as service:
        until(lambda: line.shelf("ng") == ["B1.png"])
        assert service.judged == 1
    assert sorted((row.subject.ref, row.verdict) for row in line.rows) == [("R1", NG), ("R2", OK)]
