"""Pages of results and boards hold what their filters say, newest first, and are found by indexes."""

import random
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.records.boards import BoardVerdict
from agent.records.database import open_for_reading
from agent.records.result_writer import ResultStore
from agent.records.station.pages import BoardQuery, ResultQuery, RunningTotals, StationReader, branches
from agent.records.station.reviews import Finding, Reviews
from agent.records.station.shifts import Shifts
from agent.records.verdict import KeptMap
from experts.expert import Verdict
from tests.lines import result
from tests.waiting import settled

NOON = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)
OK, NG, UNKNOWN = Verdict.OK, Verdict.NG, Verdict.UNKNOWN
RESULTS, BOARDS = 120, 30
CHAINS = (("det/a", "cls/r"), ("cls/r",), ("cls/c",), ())


def minutes(number):
    return NOON + timedelta(minutes=number)


def moment(number):
    """The clock is set back by an hour in the middle."""
    return minutes(number if number < RESULTS / 2 else number - 60)


def stored(number, choose):
    verdict = choose.choice((OK, OK, NG, UNKNOWN))
    return result(
        f"{choose.choice(('camera/belt@', 'api/'))}{number}",
        verdict,
        arrived_at=moment(number),
        component=choose.choice(("r", "c")),
        board=choose.choice(("B1", "B2", None)),
        board_type="main",
        ref="R1",
        label=choose.choice(("ok", "tombstone", None)),
        experts=choose.choice(CHAINS),
        maps=(KeptMap(0, "det/a", b"png"),) if number % 7 == 0 else (),
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    choose = random.Random(7)
    path = tmp_path_factory.mktemp("pages") / "results.db"
    with closing(ResultStore(path)) as store:
        for number in range(RESULTS):
            store.record(stored(number, choose))
        for number in range(BOARDS):
            at = minutes(number)
            serial, board_type = choose.choice(("B1", "B2")), choose.choice(("main", "other"))
            store.record_board(BoardVerdict(serial, board_type, choose.choice((OK, NG)), at, at, {}, {}))
        settled(store)
        reviews = Reviews(store, Shifts((NOON.time(),)), lambda: NOON)
        for seq in range(1, RESULTS, 9):
            reviews.add(seq, choose.choice((OK, NG)), "ann")
        reviews.undo(reviews.add(2, OK, "ann").number, "ann")
    return path


def all_pages(ask, query, seq):
    """Every page of a query, followed to the last; ``seq``: number of a row."""
    rows, page = [], ask(query)
    while page:
        rows += page
        assert len(page) <= query.limit
        page = ask(replace(query, before=seq(page[-1])))
    return rows


def matches(listed, query):
    subject, one, review = listed.result.subject, listed.result, listed.review
    wanted = (
        (query.component, subject.component), (query.label, one.label), (query.board, subject.board),
        (query.source, subject.source), (query.finding, review and review.finding),
    )  # fmt: skip
    return (
        one.verdict in query.verdicts
        and all(filter_ is None or filter_ == value for filter_, value in wanted)
        and (query.expert is None or query.expert in one.experts)
        and (query.since is None or one.finished_at >= query.since)
        and (query.until is None or one.finished_at < query.until)
        and (query.reviewed is None or query.reviewed is (review is not None))
        and (query.before is None or listed.result.seq < query.before)
    )


def maybe(*values):
    return st.sampled_from((None, None, *values))


TIMES = st.none() | st.integers(0, RESULTS).map(minutes)
NUMBERS = st.none() | st.integers(0, RESULTS + 2)
QUERIES = st.builds(
    ResultQuery,
    verdicts=st.sampled_from(((OK, NG, UNKNOWN), (NG,), (NG, UNKNOWN))),
    component=maybe("r", "c", "x"), expert=maybe("det/a", "cls/r", "cls/x"), label=maybe("ok", "tombstone", "x"),
    board=maybe("B1", "B9"), source=maybe("camera", "api", "x"), since=TIMES, until=TIMES,
    reviewed=maybe(True, False), finding=maybe(*Finding), before=NUMBERS, limit=st.sampled_from((1, 7, 200)),
)  # fmt: skip


@given(query=QUERIES)
def test_pages_hold_all_results_that_match_newest_first(path, query):
    reader = StationReader(path)
    every = reader.page(ResultQuery(limit=RESULTS))
    assert len(every) == RESULTS
    found = all_pages(reader.page, query, lambda listed: listed.result.seq)
    assert [each.result.seq for each in found] == [each.result.seq for each in every if matches(each, query)]


@given(
    st.builds(
        BoardQuery, serial=maybe("B1", "B9"), verdict=maybe(OK, NG), board_type=maybe("main", "x"), since=TIMES,
        until=TIMES, before=NUMBERS, limit=st.sampled_from((1, 7, 200)),
    )
)  # fmt: skip
def test_pages_of_boards_hold_all_boards_that_match_newest_first(path, query):
    reader = StationReader(path)
    found = all_pages(reader.board_page, query, lambda row: row.seq)
    assert [row.seq for row in found] == [
        row.seq
        for row in reader.board_page(BoardQuery(limit=BOARDS))
        if (query.serial is None or row.serial == query.serial)
        and (query.verdict is None or row.verdict is query.verdict)
        and (query.board_type is None or row.board_type == query.board_type)
        and (query.since is None or row.closed_at >= query.since)
        and (query.until is None or row.closed_at < query.until)
        and (query.before is None or row.seq < query.before)
    ]
    assert all(reader.board(row.seq) == row for row in found[:3])


def test_result_is_listed_with_its_maps_and_current_review(path):
    reader = StationReader(path)
    first, second = reader.listed(1), reader.listed(2)
    assert (first.has_maps, first.review.who) == (True, "ann")
    assert (second.has_maps, second.review) == (False, None)
    assert (reader.listed(RESULTS + 1), reader.board(BOARDS + 1)) == (None, None)


def test_finding_among_few_results_does_not_scan_all_reviews(path):
    with closing(open_for_reading(path)) as connection:
        for sql, _ in branches(connection, ResultQuery(finding=Finding.AGREE, board="B1")):
            assert "FROM results WHERE" in sql
        for filters in ({"board": "B1"}, {"component": "r"}):
            asked = []
            connection.set_trace_callback(asked.append)
            list(branches(connection, ResultQuery(finding=Finding.AGREE, **filters)))
            connection.set_trace_callback(None)
            for sql in asked:
                plan = [row["detail"] for row in connection.execute(f"EXPLAIN QUERY PLAN {sql}")]
                index = "results_board" if "board" in filters else "results_component"
                assert any(f"SEARCH results USING COVERING INDEX {index}" in step for step in plan), plan


@pytest.mark.parametrize(
    "filters",
    [
        {}, {"verdicts": (NG,)}, {"component": "r"}, {"label": "ok"}, {"expert": "det/a"}, {"source": "api"},
        {"board": "B1"}, {"reviewed": True}, {"reviewed": False}, {"finding": Finding.AGREE}, {"since": minutes(3)},
        {"until": minutes(3)}, {"component": "r", "label": "ok", "since": minutes(3), "before": 50},
        {"board": "B1", "label": "ok"}, {"finding": Finding.AGREE, "component": "r"},
    ],
)  # fmt: skip
def test_each_branch_is_searched_by_an_index_in_the_order_of_the_page(path, filters):
    with closing(open_for_reading(path)) as connection:
        statements = list(branches(connection, ResultQuery(**filters)))
        assert statements
        for sql, values in statements:
            plan = [row["detail"] for row in connection.execute(f"EXPLAIN QUERY PLAN {sql}", values)]
            assert any(step.startswith("SEARCH results USING") for step in plan), plan
            assert not any(step.startswith("SCAN results") for step in plan), plan
            is_sorted = any("ORDER BY" in step for step in plan)
            assert not is_sorted or "board" in filters, plan  # a board has few rows


def test_running_totals_equal_the_stored_rows_as_they_grow(tmp_path):
    path = tmp_path / "results.db"
    with closing(ResultStore(path)) as store:
        totals = RunningTotals(path)
        empty = totals.since(NOON)
        assert (empty.verdicts, empty.boards, empty.bad) == ({OK: 0, NG: 0, UNKNOWN: 0}, {}, ())
        for number in range(3):
            for verdict, label in ((NG, "tombstone"), (OK, "ok"), (UNKNOWN, None)):
                at = NOON + timedelta(hours=number)
                row = result(f"{verdict}{number}", verdict, arrived_at=at, label=label)
                store.record(row)
                store.record_board(BoardVerdict(f"B{number}", "main", NG, at, at, {}, {}))
            settled(store)
            for since, counted in ((NOON, number + 1), (NOON + timedelta(hours=1), number)):
                seen = totals.since(since)
                assert seen.verdicts == {OK: counted, NG: counted, UNKNOWN: counted}
                assert seen.boards == ({NG: counted} if counted else {})
                assert set(seen.bad) == {("r", label, counted) for label in ("tombstone", None) if counted}
        running = RunningTotals(path)
        assert running.since(NOON).verdicts[NG] == 3
        store.record(result("later", NG, arrived_at=NOON, label="tombstone"))
        store.record(result("before", NG, arrived_at=NOON - timedelta(seconds=1), label="tombstone"))
        settled(store)
        assert running.since(NOON).bad == (("r", "tombstone", 4), ("r", None, 3))
