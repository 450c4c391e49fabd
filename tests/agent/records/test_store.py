"""The results store on known cases: what it counts, what it logs, how long it waits, and what its reader finds."""

import itertools
import logging
import queue
import sqlite3
import threading
from contextlib import closing
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace

import pytest

from agent.records.boards import BoardVerdict
from agent.records.group_commit import StoreStatistics
from agent.records.result_reader import READ_ROWS
from agent.records.result_writer import Recorded, ResultStore
from agent.records.verdict import AnomalyScore, Step
from experts.expert import BoundingBox, LabelScore, Verdict
from tests.lines import NOON, changed, result
from tests.waiting import settled, until

BARE = result("k", Verdict.UNKNOWN, image="r.png", seconds=0.5)
STEPS = (
    Step("cls/a", "ok", 0.5, outputs=(LabelScore("bent", 0.5, 0.5, holds=False),), unproven=True),
    Step("det/b", "burr", 0.5, (BoundingBox("burr", 0.5, 1.0, 2.0, 3.0, 4.5),), "c1"),
    Step("ano/c", "anomalous", 0.9, model_sha256="d1", anomaly=AnomalyScore(4.0, 2.0)),
)
DETAIL = (
    '{"steps": [{"expert": "cls/a", "label": "ok", "score": 0.5, "boxes": [], "model_sha256": null, "outputs": '
    '[{"label": "bent", "score": 0.5, "threshold": 0.5, "holds": false}], "unproven": true}, {"expert": "det/b", '
    '"label": "burr", "score": 0.5, "boxes": [{"label": "burr", "score": 0.5, "left": 1.0, "top": 2.0, "right": 3.0, '
    '"bottom": 4.5}], "model_sha256": "c1"}, {"expert": "ano/c", "label": "anomalous", "score": 0.9, "boxes": [], '
    '"model_sha256": "d1", "anomaly": {"score": 4.0, "threshold": 2.0}}], "box": [1, 2, 30, 40], "course": '
    '{"x": null}, "duplicate_of": "i", "image_sha256": "ab", "parts": 3, "place": "done/r.png"}'
)
BOARD = BoardVerdict("b1", "main", Verdict.NG, NOON, NOON, {"r": 1, "a": 2}, {Verdict.OK: 3, Verdict.NG: 1})


@pytest.fixture
def store(tmp_path):
    store = ResultStore(tmp_path / "r.sqlite", busy_timeout_s=0.0)
    yield store
    store.close(0.0 if store.statistics().alarm else 10.0)


def number(count):
    return changed(BARE, key=f"k{count}", finished_at=NOON + timedelta(seconds=count))


def test_store_counts_rows_duplicates_and_pending_ones(store):
    assert store.statistics() == StoreStatistics(0, 0, 0, 0, None)
    for count in (1, 2, 3, 2, 1):
        store.record(number(count))
    store.record_board(BOARD)
    store.record_board(BOARD)
    assert settled(store).statistics() == StoreStatistics(
        pending=0, committed=4, duplicates=3, failed_commits=0, alarm=None
    )


def test_every_field_of_a_result_comes_back(store):
    early = datetime.fromisoformat("2026-05-01T09:00:00.000005+09:00")
    full = result(
        "k", Verdict.NG, image="r.png", finished_at=NOON + timedelta(seconds=1), seconds=0.5, board="b1",
        board_type="main", ref="R1", label="burnt", score=0.25, reason="why", experts=("cls/a", "det/b"),
        steps=STEPS, course={"x": None}, duplicate_of="i", image_sha256="ab", parts=3, place="done/r.png",
        box=(1, 2, 30, 40), arrived_at=early,
    )  # fmt: skip
    store.record(full)
    store.record(changed(BARE, key="bare"))
    settled(store)
    assert [(row.seq, row) for row in store.query()] == [(1, full), (2, changed(BARE, key="bare"))]
    assert (store.find("k"), store.find("nobody")) == (full, None)
    with closing(sqlite3.connect(store.path)) as connection:
        stored, detail = connection.execute("SELECT arrived_at, detail FROM results WHERE key = 'k'").fetchone()
    assert stored == "2026-05-01T00:00:00.000005+00:00", "text in UTC sorts as time does"
    assert detail == DETAIL


def test_query_is_read_in_pages_to_its_end_and_no_further(store):
    rows = READ_ROWS + 2
    for count in range(rows):
        store.record(replace(number(count), verdict=Verdict.NG if count % 2 else Verdict.OK))
    settled(store)

    def numbers(**wanted):
        return [row.seq for row in itertools.islice(store.query(**wanted), rows + 1)]

    assert (numbers(), numbers(limit=0), numbers(limit=1)) == (list(range(1, rows + 1)), [], [1])
    assert numbers(limit=READ_ROWS) == list(range(1, READ_ROWS + 1))
    assert numbers(limit=READ_ROWS + 1) == list(range(1, READ_ROWS + 2))
    assert numbers(since=NOON + timedelta(seconds=rows - 2)) == [rows - 1, rows]
    assert numbers(since=(NOON + timedelta(seconds=rows - 1)).astimezone(timezone(timedelta(hours=9)))) == [rows]
    assert (numbers(since=NOON + timedelta(days=1)), numbers(verdict=Verdict.NG, limit=2)) == ([], [2, 4])


def test_result_without_board_type_or_place_is_on_no_board(store):
    placed = {"board": "b1", "board_type": "main", "ref": "R1"}
    for missing in placed:
        store.record(changed(BARE, key=missing, **placed | {missing: None}))
    settled(store)
    assert [stored.subject.is_on_board for stored in store.newest_first()] == [False] * 3


def test_each_change_of_a_board_has_a_number_that_is_never_given_again(store):
    boards = [replace(BOARD, serial=serial) for serial in ("b1", "b2")]
    for board in (*boards, replace(boards[0], verdict=Verdict.OK), boards[1]):  # the last one is known as it is
        store.record_board(board)
    settled(store)
    page = store.after(0, 0, 10)
    assert [(number, row.serial, row.verdict) for number, row in page.boards] == [
        (2, "b2", Verdict.NG), (3, "b1", Verdict.OK),
    ]  # fmt: skip
    assert [number for number, _ in store.after(0, 2, 10).boards] == [3]
    store.write(lambda database: database.execute("DELETE FROM boards"))
    store.record_board(BOARD)
    settled(store)
    page = store.after(0, 3, 10)
    assert ([number for number, _ in page.boards], page.last_board, page.last_seq) == ([4], 4, 0)


def test_boards_come_behind_the_last_result_and_all_with_the_identity_of_the_file(store):
    for number in range(3):
        store.record(changed(BARE, key=str(number)))
    store.record_board(BOARD)
    settled(store)
    first, second = store.after(0, 0, 2), store.after(2, 0, 2)
    assert ([row.seq for row in first.results], first.boards) == ([1, 2], ())
    assert ([row.seq for row in second.results], [number for number, _ in second.boards]) == ([3], [1])
    assert (first.last_seq, first.last_board) == (second.last_seq, second.last_board) == (3, 1)
    with closing(ResultStore(store.path.with_name("other.sqlite"))) as other:
        empty = other.after(0, 0, 1)
        assert (empty.last_seq, empty.last_board, first.file) == (0, 0, second.file) != (0, 0, empty.file)


def test_later_verdict_of_a_run_replaces_its_board_row(store):
    later = replace(
        BOARD, verdict=Verdict.UNKNOWN, closed_at=NOON + timedelta(seconds=5), missing={}, counts={Verdict.OK: 9}
    )
    reports = []
    store.record_board(BOARD, reports.append)
    store.record_board(replace(BOARD, missing={"a": 2, "r": 1}, counts={Verdict.NG: 1, Verdict.OK: 3}), reports.append)
    settled(store)
    assert [(row, row.seq, row.revisions) for row in store.boards()] == [(BOARD, 1, 0)]
    store.record_board(later, reports.append)
    store.record_board(replace(BOARD, board_type="back"), reports.append)
    settled(store)
    first, again, revised, other = reports
    assert (first, again, revised) == (Recorded(1, True), Recorded(1, False), Recorded(1, True))
    assert other == Recorded(2, True), "a revision uses up no number"
    assert [(row, row.seq, row.revisions) for row in store.boards()] == [
        (replace(later, is_revision=True), 1, 1), (replace(BOARD, board_type="back"), 2, 0),
    ]  # fmt: skip


def test_any_changed_field_makes_another_board(store):
    changes = [
        {"verdict": Verdict.OK}, {"missing": {"r": 1}}, {"counts": {Verdict.OK: 4}}, {"serial": "b2"},
        {"board_type": "back"}, {"opened_at": NOON + timedelta(seconds=1)},
    ]  # fmt: skip
    for change in changes:
        reports = []
        store.record_board(BOARD, reports.append)
        store.record_board(replace(BOARD, **change), reports.append)
        settled(store)
        assert reports[1].is_new, change


def test_newest_boards_are_read_in_the_order_of_closing(store):
    for count in range(4):
        store.record_board(replace(BOARD, serial=f"b{count}", closed_at=NOON + timedelta(seconds=count)))
    settled(store)

    def serials(**wanted):
        return [row.serial for row in store.boards(**wanted)]

    assert (serials(), serials(limit=2), serials(limit=0)) == (["b0", "b1", "b2", "b3"], ["b2", "b3"], [])
    assert serials(since=NOON + timedelta(seconds=2)) == ["b2", "b3"]
    assert serials(since=NOON + timedelta(seconds=1), limit=1) == ["b3"]


def test_exception_of_a_callback_is_logged_with_its_row(store, caplog):
    reports = []
    store.record(number(1), lambda recorded: reports.append(recorded) or {}[recorded])
    store.record(number(2), reports.append)
    settled(store)
    assert reports == [Recorded(1, is_new=True), Recorded(2, is_new=True)]
    (record,) = caplog.records
    assert record.getMessage() == "result_callback_failed answer=Recorded(seq=1, is_new=True)"
    assert record.exc_info is not None


class Patience:
    """Stands in for the writer's waiting: it takes no time, and at a given wait the obstacle goes."""

    def __init__(self, waits, give_way):
        self.waited_s = []
        self.is_over = False
        self._waits = waits
        self._give_way = give_way

    def wait(self, timeout_s):
        self.waited_s.append(timeout_s)
        if len(self.waited_s) == self._waits:
            self._give_way()

    def is_set(self):
        return self.is_over

    def set(self):
        self.is_over = True


def test_failed_commit_is_retried_with_doubling_waits_and_logged_once(store, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    with closing(sqlite3.connect(tmp_path / "r.sqlite", check_same_thread=False)) as other:
        patience = Patience(9, other.rollback)
        store._committer._abandoned = patience
        other.execute("BEGIN IMMEDIATE")
        committed = threading.Event()
        store.record(BARE, lambda _: committed.set())
        until(committed.is_set)
    assert patience.waited_s == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert settled(store).statistics() == StoreStatistics(0, 1, 0, failed_commits=9, alarm=None)
    lost = f"results_not_committed rows=1 file={tmp_path / 'r.sqlite'} reason=database is locked: kept and retried"
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("ERROR", lost),
        ("WARNING", "results_committed_again rows=1"),
    ]


def test_store_that_gives_up_reports_it_and_leaves_the_rest(tmp_path):
    store = ResultStore(tmp_path / "r.sqlite", busy_timeout_s=0.0)
    with closing(sqlite3.connect(tmp_path / "r.sqlite", check_same_thread=False)) as other:
        waiting = threading.Event()
        store._committer._abandoned = Patience(1, waiting.set)
        other.execute("BEGIN IMMEDIATE")
        store.record(BARE)
        until(waiting.is_set)
        assert store.close(timeout_s=0.0) is False
    assert not store._committer._thread.is_alive()
    assert store.statistics().pending == 1


def test_failed_checkpoint_is_logged_and_stops_nothing(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("agent.records.group_commit.IDLE_CHECKPOINT_S", 0.05)
    with closing(ResultStore(tmp_path / "r.sqlite")) as store:
        store.record(BARE, lambda _: store._committer._database.conn.close())
        until(lambda: len(caplog.records) > 0)
        assert store._committer._thread.is_alive()
    assert "reason=Cannot operate on a closed database." in caplog.text


class Arrivals:
    """Stands in for the writer's queue and its clock: each record arrives so long after the one before, in no time.

    They begin to arrive when the store is closed, which is the last of them.
    """

    def __init__(self, delays_s):
        self.events = []  # how long the writer would have waited each time, and whatever a test adds
        self.now_s = 1024.0
        self._delays_s = iter(delays_s)
        self._coming = []
        self._all_are_there = threading.Event()

    def put(self, record):
        self._coming.append([next(self._delays_s), record])
        if record is None:
            self._all_are_there.set()

    def empty(self):
        return not self._coming

    def get(self, timeout):
        self._all_are_there.wait()
        self.events.append(timeout)
        delay_s, record = self._coming[0]
        self.now_s += min(delay_s, timeout)
        if delay_s > timeout:
            self._coming[0][0] -= timeout
            raise queue.Empty
        del self._coming[0]
        return record


def test_records_in_quick_succession_share_a_commit_and_an_idle_store_checkpoints_once(tmp_path, monkeypatch):
    arrivals = Arrivals([12.0, 0.25, 0.125, 0.0, 1.0, 11.0])
    monkeypatch.setattr("agent.records.group_commit.GROUP_JOBS", 3)
    monkeypatch.setattr("agent.records.group_commit.GROUP_WAIT_S", 0.5)
    monkeypatch.setattr("agent.records.group_commit.IDLE_CHECKPOINT_S", 5.0)
    monkeypatch.setattr("agent.records.group_commit.time", SimpleNamespace(monotonic=lambda: arrivals.now_s))
    monkeypatch.setattr(
        "agent.records.group_commit.queue", SimpleNamespace(SimpleQueue=lambda: arrivals, Empty=queue.Empty)
    )
    store = ResultStore(tmp_path / "r.sqlite")
    store._committer._database.conn.set_trace_callback(
        lambda sql: "checkpoint" in sql and arrivals.events.append("folded in")
    )
    for count in range(5):
        store.record(number(count), lambda recorded: arrivals.events.append(f"row {recorded.seq}"))
    assert store.close()
    assert arrivals.events == [
        5.0, 5.0, 5.0, 0.5, 0.25, "row 1", "row 2", "row 3",  # as many as one commit takes
        5.0, 0.5, "row 4",
        5.0, 0.5, "row 5",
        5.0, "folded in", 5.0, 5.0,
    ]  # fmt: skip
