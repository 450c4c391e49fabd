"""A person reworks a board of a line: stored once, in the order of the results, and honoured by the next start."""

from contextlib import closing
from datetime import UTC, datetime, timedelta

import pytest

from agent.faults.errors import OrderRefused, Reason
from agent.line_file.boards import BoardSection
from agent.records.result_reader import ResultReader
from agent.records.result_writer import ResultStore
from agent.records.station.reworks import reworks_of
from agent.service.inspections.line_boards import LineBoards
from agent.service.inspections.verdicts import Verdicts
from experts.expert import Verdict
from tests import lines
from tests.waiting import settled

START = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)
OK, NG = Verdict.OK, Verdict.NG
BOARDS = {"main": BoardSection(components={"c0": 1, "c1": 1}, takt_s=3600, timeout_s=60)}


class Line:
    def __init__(self, path):
        self.elapsed_s = 0.0
        self.path = path
        self.images = 0
        self._open()

    @property
    def now(self):
        return START + timedelta(seconds=self.elapsed_s)

    def _open(self):
        self.store = ResultStore(self.path)
        self.boards = LineBoards(BOARDS, self.store, clock=lambda: self.elapsed_s, wall=lambda: self.now)
        self.verdicts = Verdicts(self.store, self.boards)
        self.boards.take_up()

    def restart(self):
        """Nothing of the ledger is stored at an end: a kill leaves as much."""
        self.store.close()
        self._open()

    def see(self, component, verdict=OK):
        self.images += 1
        self.elapsed_s += 1
        place = {"component": component, "board": "B1", "board_type": "main", "ref": "R1"}
        row = lines.result(f"k{self.images}", verdict, arrived_at=self.now, **place)
        self.verdicts.commit_result(row, lambda _: None)

    def run(self):
        """A whole board, its results stored."""
        self.see("c0")
        self.see("c1")
        settled(self.store)

    def judged(self):
        settled(self.store)
        return [row.verdict for row in ResultReader(self.path).boards()]


@pytest.fixture
def line(tmp_path):
    line = Line(tmp_path / "results.db")
    yield line
    line.store.close()


def rework(line, serial="B1", board_type="main", reason="joint soldered"):
    return line.boards.rework(serial, board_type, "ann", reason)


def refusal(call):
    with pytest.raises(OrderRefused) as refused:
        call()
    return refused.value.reason


@pytest.mark.parametrize("restarts", [(), ("before",), ("after",), ("before", "after", "within")])
def test_next_image_of_a_reworked_board_opens_a_new_run_after_any_restart(line, restarts):
    line.see("c0")
    line.see("c1", NG)
    assert line.judged() == [NG]
    for moment, step in (
        ("before", lambda: rework(line)), ("after", lambda: line.see("c0")), ("within", lambda: line.see("c1")),
    ):  # fmt: skip
        if moment in restarts:
            line.restart()
        step()
        settled(line.store)
    assert line.judged() == [NG, OK]
    assert line.boards.statistics().open == 0


def test_late_image_without_a_rework_belongs_to_the_same_run(line):
    line.see("c0")
    line.see("c1", NG)
    line.see("c1", OK)
    assert line.judged() == [NG]


def test_open_board_cannot_be_reworked(line):
    line.see("c0")
    settled(line.store)
    assert refusal(lambda: rework(line)) is Reason.NOT_NOW
    line.elapsed_s += 61
    line.boards.expire()
    assert rework(line).opened_at == START + timedelta(seconds=1)


def test_repeated_rework_is_one_and_the_next_run_can_be_reworked(line):
    line.run()
    first = rework(line)
    assert (first.after_seq, first.who, first.reason) == (2, "ann", "joint soldered")
    assert rework(line, reason="again") == first
    line.run()
    second = rework(line)
    assert reworks_of(line.path, "B1", "main") == (first, second)


def test_board_closed_long_ago_can_be_reworked_and_an_unknown_one_not(line):
    line.run()
    line.elapsed_s += 1000
    line.boards.expire()
    assert rework(line).opened_at == START + timedelta(seconds=1)
    for unknown in ({"serial": "B2"}, {"board_type": "other"}):
        assert refusal(lambda unknown=unknown: rework(line, **unknown)) is Reason.NOT_FOUND


def test_rework_committed_with_earlier_results_comes_after_them(tmp_path):
    """All in one group: the late image is of the old run, though it is counted after the rework was decided."""
    line = Line(tmp_path / "results.db")
    with closing(line.store):
        line.run()
        line.see("c1", NG)
        assert rework(line).after_seq == 3
        assert line.judged() == [NG]
        line.see("c0")
        line.see("c1")
        assert line.judged() == [NG, OK]
