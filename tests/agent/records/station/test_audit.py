"""The audit keeps who changed what: any text, newest first, bounded, and it fails no call."""

from contextlib import closing
from datetime import UTC, datetime

from agent.records.result_writer import ResultStore
from agent.records.station.audit import KEPT_ROWS, LONGEST_TEXT, AuditEntry, AuditTrail, audit_page
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


def test_the_latest_rows_stay(tmp_path):
    path = tmp_path / "results.db"
    with closing(ResultStore(path)) as store:
        trail = AuditTrail(store, lambda: NOW)
        trail.record(**USUAL | {"subject": "old"})
        store.write_now(
            lambda database: database.execute(
                "UPDATE sqlite_sequence SET seq = ? WHERE name = 'audit'", (KEPT_ROWS,)
            ).fetchall()
        )
        trail.record(**USUAL | {"subject": "new"})
    assert [entry.subject for entry in audit_page(path)] == ["new"]


def test_after_the_store_s_end_a_deed_is_in_the_log(tmp_path, caplog):
    store = ResultStore(tmp_path / "results.db")
    store.close()
    AuditTrail(store, lambda: NOW).record(**USUAL)
    assert "audited_in_the_log_only action=review" in caplog.text
