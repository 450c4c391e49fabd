"""A person's verdict stands beside the machine's: stored once, replaced, undone in its shift, found by its filters."""

import threading
from contextlib import closing
from datetime import UTC, datetime, time, timedelta

import pytest

from agent.faults.errors import OrderRefused, Reason
from agent.records.database import open_for_reading, read_rows
from agent.records.result_reader import ResultReader
from agent.records.result_writer import ResultStore
from agent.records.station.reviews import PAGE, Finding, ReviewCounts, ReviewQuery, ReviewReader, Reviews
from agent.records.station.shifts import Shifts
from experts.expert import Verdict
from tests.lines import result
from tests.waiting import settled

MORNING = datetime(2026, 5, 1, 9, 0, tzinfo=UTC)
OK, NG, UNKNOWN = Verdict.OK, Verdict.NG, Verdict.UNKNOWN
NONE = dict.fromkeys(Finding, 0)


class Station:
    """Three results, 1 OK, 2 NG and 3 UNKNOWN, and the reviews of a shift that began at 06:00."""

    def __init__(self, path):
        self.now = MORNING
        self.store = ResultStore(path)
        self.reviews = Reviews(self.store, Shifts((time(6), time(14)), UTC), lambda: self.now)
        self.reader = ReviewReader(path)
        for number, verdict in enumerate((OK, NG, UNKNOWN), 1):
            self.store.record(result(f"k{number}", verdict, experts=("det/a", f"cls/{number}")))
        settled(self.store)

    def say(self, seq, verdict, who="ann", **said):
        return self.reviews.add(seq, verdict, who, **said)


@pytest.fixture
def station(tmp_path):
    station = Station(tmp_path / "results.db")
    with closing(station.store):
        yield station


def refusal(call):
    with pytest.raises(OrderRefused) as refused:
        call()
    return refused.value.reason


@pytest.mark.parametrize(
    ("seq", "person", "finding"),
    [
        (1, OK, Finding.AGREE), (1, NG, Finding.MISSED_DEFECT), (2, NG, Finding.AGREE), (2, OK, Finding.FALSE_CALL),
        (3, OK, Finding.DECIDED), (3, NG, Finding.DECIDED),
    ],
)  # fmt: skip
def test_finding_compares_both_verdicts_and_the_machines_stays(station, seq, person, finding):
    before = ResultReader(station.store.path).find(f"k{seq}")
    review = station.say(seq, person, label="tombstone", reason="seen")
    assert (review.finding, review.verdict, review.who, review.at) == (finding, person, "ann", MORNING)
    assert station.reader.of_result(seq) == (review,)
    assert ResultReader(station.store.path).find(f"k{seq}") == before


def test_repeated_review_is_stored_once(station):
    first = station.say(2, OK, label="ok")
    assert station.say(2, OK, label="ok") == first
    assert len(station.reader.of_result(2)) == 1


def test_reviews_at_the_same_moment_are_one(station):
    made = []
    threads = [threading.Thread(target=lambda: made.append(station.say(2, OK))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [made[0]] * 8


@pytest.mark.parametrize("other", [{"who": "bob"}, {"verdict": NG}, {"label": "x"}, {"reason": "y"}])
def test_changed_review_replaces_the_previous_one_which_stays_as_undone(station, other):
    said = {"verdict": OK, "who": "ann"}
    first, second = station.say(2, **said), station.say(2, **said | other)
    kept_second, kept_first = station.reader.of_result(2)
    assert kept_second == second
    assert (kept_first.number, kept_first.undone_at, kept_first.undone_by) == (first.number, MORNING, second.who)
    assert [each.review for each in station.reader.page(ReviewQuery())] == [second]


def test_review_is_undone_in_its_shift_only(station):
    review = station.say(2, OK)
    station.now += timedelta(hours=5)  # 14:00
    assert refusal(lambda: station.reviews.undo(review.number, "bob")) is Reason.NOT_NOW
    station.now -= timedelta(seconds=1)
    undone = station.reviews.undo(review.number, "bob")
    assert (undone.undone_by, undone.undone_at) == ("bob", station.now)
    assert station.reviews.undo(review.number, "carl") == undone
    assert station.reader.page(ReviewQuery()) == ()
    assert station.say(2, OK).number > review.number


def test_review_of_an_absent_result_is_refused(station):
    with pytest.raises(OrderRefused) as refused:
        station.say(4, OK)
    assert (refused.value.reason, refused.value.field) == (Reason.NOT_FOUND, "result")
    assert refusal(lambda: station.reviews.undo(9, "ann")) is Reason.NOT_FOUND


def test_reviews_are_found_by_their_filters_newest_first_page_by_page(station):
    station.say(1, NG)
    station.now += timedelta(minutes=1)
    station.say(2, OK, who="bob")
    station.now += timedelta(minutes=1)
    station.say(3, OK)

    def found(**filters):
        return [each.result.seq for each in station.reader.page(ReviewQuery(**filters))]

    assert found() == [3, 2, 1]
    assert found(limit=2) == [3, 2]
    assert found(before=2) == [1]
    assert found(since=MORNING + timedelta(minutes=1), until=MORNING + timedelta(minutes=2)) == [2]
    assert found(who="bob") == [2]
    assert (found(expert="cls/3"), found(expert="det/a"), found(expert="cls/9")) == ([3], [3, 2, 1], [])
    assert (found(component="r"), found(component="c")) == ([3, 2, 1], [])
    assert station.reader.counts(MORNING + timedelta(minutes=1)) == {
        "cls/2": ReviewCounts(NONE | {Finding.FALSE_CALL: 1}, machine_ng=1),
        "cls/3": ReviewCounts(NONE | {Finding.DECIDED: 1}, machine_ng=0),
    }


def test_false_calls_are_counted_beside_the_reviewed_ng_answers_and_not_beside_all_reviews(station):
    """Ten agreements with OK say nothing about false calls."""
    for number in range(4, 14):
        station.store.record(result(f"k{number}", OK, experts=("cls/2",)))
    station.store.record(result("k14", NG, experts=("cls/2",)))
    settled(station.store)
    for seq, person in [(2, OK), *((seq, OK) for seq in range(4, 14)), (14, NG)]:
        station.say(seq, person)
    counts = station.reader.counts(MORNING)["cls/2"]
    assert counts == ReviewCounts(NONE | {Finding.FALSE_CALL: 1, Finding.AGREE: 11}, machine_ng=2)


def test_closed_store_refuses_reviews(station):
    station.store.close()
    assert refusal(lambda: station.say(1, OK)) is Reason.STOPPING


def test_removed_result_takes_its_reviews(station):
    station.say(2, OK)
    station.store.write_now(lambda database: database.execute("DELETE FROM results WHERE seq = 2").fetchall())
    assert station.reader.of_result(2) == ()


def test_page_of_reviews_is_read_by_an_index_without_sorting(station):
    with closing(open_for_reading(station.store.path)) as connection:
        names = dict.fromkeys(("who", "expert", "component", "limit", "before", "since", "until"))
        plan = [row["detail"] for row in connection.execute(f"EXPLAIN QUERY PLAN {PAGE}", names)]
    assert not [step for step in plan if "TEMP B-TREE" in step]


def identity(station):
    (row,) = read_rows(station.store.path, "SELECT id FROM identity")
    return row["id"]


def test_review_of_another_results_files_number_is_refused(station):
    kept = station.say(2, OK, file=identity(station))
    assert refusal(lambda: station.say(2, NG, file="deadbeef")) is Reason.CURSOR_UNKNOWN
    assert refusal(lambda: station.reviews.undo(kept.number, "bob", "deadbeef")) is Reason.CURSOR_UNKNOWN
    assert station.reader.of_result(2) == (kept,)


def test_once_the_results_file_was_replaced_a_review_names_its_file(tmp_path):
    """The number was given by the damaged file, and is another result's now."""
    path = tmp_path / "results.db"
    with closing(Station(path).store):
        pass
    path.write_bytes(b"no database" * 1000)
    station = Station(path)
    with closing(station.store):
        assert list(tmp_path.glob("results.db.damaged-*"))
        with pytest.raises(OrderRefused, match="the results file was replaced: the line has file") as refused:
            station.say(2, OK)
        assert (refused.value.reason, refused.value.field) == (Reason.CURSOR_UNKNOWN, "file")
        assert station.say(2, OK, file=identity(station)).finding is Finding.FALSE_CALL
