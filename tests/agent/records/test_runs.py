"""A golden board of each shift: what is asked about one run reads that run alone, however many there were before."""

import json
import math
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from agent.records.boards import BoardVerdict, Rework
from agent.records.database import open_for_reading, utc_text
from agent.records.outbox import JUDGED, NOT_FOR_SQLITE, Outbox, OutboxReader
from agent.records.outbox import LATEST as LATEST_JUDGED
from agent.records.result_reader import LATEST_RUNS, NEXT_RUN, OF_RUN, OPENER, REWORKED
from agent.records.result_writer import ResultStore
from agent.records.station.reworks import LAST_RUN, OF_BOARD, write_rework
from agent.records.verdict import Step
from experts.expert import Verdict
from tests.lines import changed, result

NOON = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)
RUNS = 5
GOLDEN = BoardVerdict("GOLDEN", "main", Verdict.OK, NOON, NOON, {}, {Verdict.OK: 2})
PLACE = GOLDEN.serial, GOLDEN.board_type


def opened(run):
    return NOON + timedelta(hours=8 * run)


def part(run, number, **changes):
    """Part of a run of the golden board; the run's first one opens it."""
    one = result(f"{run}/{number}", board="GOLDEN", board_type="main", component="c0", ref=f"R{number}")
    steps = (Step("cls/a", model_sha256=f"{run:02}" * 32),)
    return changed(one, finished_at=opened(run) + timedelta(seconds=number), steps=steps, **changes)


@pytest.fixture
def store(tmp_path):
    with closing(ResultStore(tmp_path / "results.db", followers=[Outbox("demo", ["mqtt"], ["board"], 10)])) as store:
        yield store


def judge(store, run):
    for number in range(2):
        store.record(part(run, number))
    store.record_board(replace(GOLDEN, opened_at=opened(run), closed_at=opened(run) + timedelta(seconds=1)))
    settle(store)


def settle(store):
    store.write_now(lambda database: None)


def spoil_all_before(store, seq):
    """A detail that is no JSON raises wherever it is read."""
    store.write_now(lambda database: database.execute("UPDATE results SET detail = '{' WHERE seq < ?", (seq,)))


def test_one_run_of_a_serial_is_read_without_its_other_runs(store):
    for run in range(RUNS):
        judge(store, run)
    spoil_all_before(store, 5)
    rows = store.of_run(*PLACE, opened(2))
    assert [row.subject.key for row in rows] == ["2/0", "2/1"]
    assert store.run_numbers(PLACE, opened(RUNS - 1)) == [9, 10]
    assert store.run_numbers(PLACE, opened(2), limit=1) == [6], "the latest"
    assert [row.opened_at for row in store.latest_runs("GOLDEN")] == [opened(RUNS - 1)]


def test_stored_run_excludes_results_of_open_and_reworked_runs(store):
    judge(store, 0)
    store.record(part(1, 0))
    settle(store)
    assert store.run_numbers(PLACE, opened(0), [opened(1)]) == [1, 2]
    judge(store, 2)
    rework = Rework(*PLACE, opened(2), 0, "anna", None, opened(2))
    store.write_now(lambda database: write_rework(database, rework))
    store.record(part(3, 0))
    settle(store)
    assert store.run_numbers(PLACE, opened(2)) == [4, 5]


def test_latest_run_of_each_type_is_found_newest_first(store):
    judge(store, 0)
    store.record_board(replace(GOLDEN, board_type="back"))
    judge(store, 1)
    found = [(row.board_type, row.opened_at) for row in store.latest_runs("GOLDEN")]
    assert found == [("main", opened(1)), ("back", NOON)]
    assert store.latest_runs("never seen") == []


def test_message_of_a_board_reads_the_details_of_its_run_only(store):
    for run in range(RUNS - 1):
        judge(store, run)
    store.write_now(lambda database: database.execute("UPDATE results SET detail = '{'"))
    nan = (Step("cls/b", model_sha256="bb", score=math.nan),)
    store.record(part(RUNS - 1, 0))
    store.record(changed(part(RUNS - 1, 7), steps=nan))
    store.record_board(replace(GOLDEN, opened_at=opened(RUNS - 1), closed_at=opened(RUNS)))
    settle(store)
    told = json.loads(OutboxReader(store.path).waiting("mqtt", 10)[-1].payload)
    assert told["models"] == [
        {"expert": "cls/a", "sha256": f"{RUNS - 1:02}" * 32}, {"expert": "cls/b", "sha256": "bb"}
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("sql", "values"),
    [
        (OPENER, (utc_text(NOON), *PLACE)),
        (NEXT_RUN, (*PLACE, utc_text(NOON))),
        (REWORKED, (*PLACE, utc_text(NOON))),
        (OF_RUN, (*PLACE, 1, 2, 3)),
        (LATEST_RUNS, ("GOLDEN",)),
        (LAST_RUN, PLACE),
        (OF_BOARD, PLACE),
        *((sql, (utc_text(NOON), *PLACE)) for sql in (LATEST_JUDGED, JUDGED, NOT_FOR_SQLITE)),
    ],
)
def test_queries_of_a_run_scan_no_table(store, sql, values):
    judge(store, 0)
    with closing(open_for_reading(store.path)) as connection:
        plan = [row["detail"] for row in connection.execute(f"EXPLAIN QUERY PLAN {sql}", values)]
    scanned = [step for step in plan if step.startswith("SCAN") and step.split()[1] in ("results", "boards", "reworks")]
    assert not scanned, plan
    assert any("INDEX" in step for step in plan)
