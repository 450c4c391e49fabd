"""The audit keeps who changed what: any text, newest first, bounded, and it fails no call."""

from contextlib import closing
from datetime import UTC, datetime

import pytest

from agent.records.database import open_for_reading, read_rows
from agent.records.result_writer import ResultStore
from agent.records.station.audit import (
    DROP_OLD,
    KEPT_ROWS,
    LONGEST_TEXT,
    ORDINARY_ROWS,
    TRIMMED_EVERY,
    AuditEntry,
    AuditTrail,
    audit_page,
)
from tests.waiting import settled

NOW = datetime(2026, 5, 1, 9, 0, tzinfo=UTC)


USUAL = {"who": "ann", "role": "operate", "action": "review", "subject": "7", "outcome": "done", "config_sha256": "ab"}


def test_deeds_are_read_newest_first_page_by_page(tmp_path):
    path = tmp_path / "results.db"
    with closing(ResultStore(path)) as store:
        for number in range(5):
            AuditTrail(store, lambda: NOW).record(**USUAL | {"subject": str(number)})
    page = audit_page(path, limit=2)
    assert page == tuple(AuditEntry(number, NOW, **USUAL | {"subject": str(number - 1)}) for number in (5, 4))
    assert [entry.number for entry in audit_page(path, before=4)] == [3, 2, 1]


def test_any_text_is_recorded_and_a_long_one_is_cut(tmp_path):
    path = tmp_path / "results.db"
    with closing(ResultStore(path)) as store:
        AuditTrail(store, lambda: NOW).record(**USUAL | {"subject": "\ud800\x00\n", "outcome": "x" * 10_000})
        settled(store)
    (entry,) = audit_page(path)
    assert entry.subject == "\\ud800\x00\n"
    assert entry.outcome == "x" * (LONGEST_TEXT - 3) + "..."


def filled(store, action, outcome, rows):
    """Earlier rows of a class, as an agent wrote them in years."""
    store.write_now(
        lambda database: database.executescript(
            "INSERT INTO audit (at, who, role, action, subject, outcome, config_sha256)"
            f" WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {rows})"
            f" SELECT '2026-05-01', 'plc', 'operate', '{action}', i, '{outcome}', 'ab' FROM n"
        )
    )


def counted(path):
    rows = read_rows(path, "SELECT action, outcome = 'done', count(*) FROM audit GROUP BY 1, 2")
    return {(action, bool(is_done)): count for action, is_done, count in rows}


@pytest.mark.parametrize(
    ("action", "outcome"), [("trigger", "done"), ("trigger", "NOT_NOW: busy"), ("review", "NOT_FOUND: no result 9")]
)
def test_triggers_and_refused_calls_never_displace_peoples_changes(tmp_path, action, outcome):
    path, many = tmp_path / "results.db", ORDINARY_ROWS + 2 * TRIMMED_EVERY
    with closing(ResultStore(path)) as store:
        trail = AuditTrail(store, lambda: NOW)
        trail.record(**USUAL)
        trail.record(**USUAL | {"action": "promote"})
        filled(store, action, outcome, many)
        trail.record(**USUAL | {"action": action, "outcome": outcome})
        settled(store)
    kept = {("review", True): 1, ("promote", True): 1, (action, outcome == "done"): ORDINARY_ROWS}
    assert counted(path) == kept


def test_latest_rows_of_an_action_stay_and_are_found_by_an_index(tmp_path):
    path = tmp_path / "results.db"
    with closing(ResultStore(path)) as store:
        filled(store, "review", "done", KEPT_ROWS)
        AuditTrail(store, lambda: NOW).record(**USUAL | {"subject": "new"})
        settled(store)
    assert counted(path) == {("review", True): KEPT_ROWS}
    assert audit_page(path)[0].subject == "new"
    with closing(open_for_reading(path)) as connection:
        plan = [row["detail"] for row in connection.execute(f"EXPLAIN QUERY PLAN {DROP_OLD}", ("review", 1, 9))]
    assert not [step for step in plan if step.startswith("SCAN") or "TEMP" in step], plan


def test_after_the_store_s_end_a_deed_is_in_the_log(tmp_path, caplog):
    store = ResultStore(tmp_path / "results.db")
    store.close()
    AuditTrail(store, lambda: NOW).record(**USUAL)
    assert "audited_in_the_log_only action=review" in caplog.text
