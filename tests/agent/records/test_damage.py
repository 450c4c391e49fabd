"""A damaged results file: put aside, begun anew, and what is owed taken over."""

import sqlite3
from contextlib import closing

import pytest

from agent.records.database import damage_of
from agent.records.journal import JournalReader
from agent.records.outbox import Outbox, OutboxReader
from agent.records.result_writer import ResultStore
from agent.records.station.alarms import open_alarms, raise_alarm
from agent.records.station.audit import AuditTrail, audit_page
from agent.records.verdict import Step
from experts.expert import Verdict
from tests.lines import NOON, changed, result, subject
from tests.waiting import settled

RESULT = result("k", Verdict.NG)
PAGE = 4096
LONG = (Step("cls/a", model_sha256="x" * 500),)


def opened(path):
    return ResultStore(path, followers=[Outbox("demo", ["mes"], ["result"], 10_000)])


def tables(path):
    """The first page of each table."""
    with closing(sqlite3.connect(path)) as connection:
        return dict(connection.execute("SELECT name, rootpage FROM sqlite_master WHERE rootpage > 0"))


def spoil(path, *pages):
    with path.open("r+b") as file:
        for page in pages:
            file.seek((page - 1) * PAGE)
            file.write(b"\xa5" * PAGE)


@pytest.fixture
def file(tmp_path):
    """Results that were told to nobody yet, and a request that was accepted and not judged."""
    path = tmp_path / "results.db"
    with closing(opened(path)) as store:
        for number in range(300):
            store.record(changed(RESULT, key=f"k{number}", steps=LONG))
        store.accept([subject("owed", source="api", image="owed.png")], b"pixels" * 2000, lambda _: None)
        AuditTrail(store, lambda: NOON).record("ann", "admin", "reload", "", "done", "ab")
        store.write(lambda database: raise_alarm(database, "disk", "no room", NOON))
        settled(store)
    return path


def identity(path):
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute("SELECT id FROM identity").fetchone()[0]


@pytest.mark.parametrize("table", ["results", "results_finished_at", "boards"])
def test_damaged_file_is_put_aside_at_start_and_its_unfinished_work_continues(file, table, caplog):
    before = identity(file)
    spoil(file, tables(file)[table])
    assert damage_of(file) is not None
    with closing(opened(file)) as store:
        (aside,) = [path for path in file.parent.iterdir() if ".damaged-" in path.name]
        alarm = str(store.statistics().damage_alarm)
        assert aside.name in alarm
        assert "coserve restore" in alarm
        store.record(RESULT)
        assert [row.subject.key for row in settled(store).query()] == ["k"]
        assert [each.subject.key for each in JournalReader(file).unfinished()] == ["owed"]
        assert JournalReader(file).content(JournalReader(file).unfinished()[0].image) == b"pixels" * 2000
        assert len(OutboxReader(file).waiting("mes", 1000)) == 301
        assert [entry.who for entry in audit_page(file)] == ["ann"]
        assert [row.name for row in open_alarms(file)] == ["disk"]
    assert identity(file) != before
    assert [record.getMessage().split(" ")[0] for record in caplog.records] == ["results_file_damaged"]
    with closing(opened(file)) as store:
        assert store.statistics().damage_alarm is None


def test_file_that_is_no_database_is_put_aside(file):
    spoil(file, 1)
    with closing(opened(file)) as store:
        assert "not a database" in str(store.statistics().damage_alarm)
        store.record(RESULT)
        assert sum(1 for _ in settled(store).query()) == 1


def test_unreadable_accepted_image_is_named(file, caplog):
    spoil(file, tables(file)["accepted_images"], file.read_bytes().index(b'"seq": 150,') // PAGE + 1)
    with closing(opened(file)):
        assert JournalReader(file).unfinished() == []
        numbers = [int(each.id.split("-")[2]) for each in OutboxReader(file).waiting("mes", 1000)]
        assert (numbers[0], numbers[-1], 150 in numbers) == (1, 300, False), "messages are read from both ends"
    assert "accepted_image_lost key=owed" in caplog.text


BEGINS_ANEW = """
import resource, signal, sqlite3, sys
from pathlib import Path
from agent.records.result_writer import ResultStore

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    ResultStore(Path(sys.argv[1]))
except sqlite3.Error as error:
    print("refused", error)
"""


def test_full_disk_during_recovery_loses_no_unfinished_work(file, forks):
    """As to no kill: the damaged file keeps its name until the new one holds all that is owed."""
    with closing(opened(file)) as store:
        store.accept([subject("large", source="api", image="large.png")], bytes(2_000_000), lambda _: None)
        settled(store)
    spoil(file, tables(file)["results"])
    assert forks.run(BEGINS_ANEW, file, 1_000_000).stdout.startswith("refused")
    assert [path.name for path in file.parent.iterdir() if ".damaged-" in path.name] == []
    with closing(opened(file)) as store:
        assert store.statistics().damage_alarm is not None
        assert {each.subject.key for each in JournalReader(file).unfinished()} == {"owed", "large"}


def test_damage_found_by_a_commit_costs_no_row(file):
    with closing(opened(file)) as store:
        pages = file.stat().st_size // PAGE
        kept = tables(file)["accepted"], tables(file)["accepted_images"]
        spoil(file, *(page for page in range(3, pages + 1) if page not in kept))
        for number in range(400):  # more than SQLite keeps in its cache
            store.record(changed(RESULT, key=f"k{number}", steps=LONG))
        settled(store)
        assert "malformed" in str(store.statistics().damage_alarm)
        assert (store.statistics().alarm, sum(1 for _ in store.query())) == (None, 400)
