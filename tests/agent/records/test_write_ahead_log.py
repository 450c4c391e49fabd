"""The log of a line's database: folded in when nobody reads, told when somebody keeps it from that."""

import queue
import sqlite3
import time
from contextlib import closing, contextmanager

import pytest

from agent.records.database import open_for_writing
from agent.records.result_reader import ResultReader
from agent.records.result_writer import ResultStore
from agent.records.write_ahead_log import LOG_ALARM_BYTES, fold_in
from tests.lines import result, subject
from tests.waiting import PATIENCE_S, until

MIB = 1024 * 1024


class Line:
    """A store whose requests come with images of any size."""

    def __init__(self, file):
        self.store = ResultStore(file)
        self.log = file.with_name(f"{file.name}-wal")
        self._count = 0

    def accept(self, size_bytes):
        done = queue.Queue()
        self._count += 1
        self.store.accept([subject(f"k{self._count}")], bytes(size_bytes), done.put)
        done.get(timeout=PATIENCE_S)

    @property
    def alarm(self):
        return self.store.statistics().log_alarm

    @property
    def log_bytes(self):
        return self.log.stat().st_size


@pytest.fixture
def line(tmp_path):
    line = Line(tmp_path / "r.db")
    yield line
    assert line.store.close(PATIENCE_S)


@contextmanager
def looked_at(file):
    """A program that has begun to read, and does not end."""
    with closing(sqlite3.connect(file)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM results").fetchall()
        yield


def test_log_grown_by_a_long_reader_raises_an_alarm_until_it_ends(line, monkeypatch, caplog):
    """What takes hours on a line is written at once, by images."""
    monkeypatch.setattr("agent.records.group_commit.IDLE_CHECKPOINT_S", 0.05)
    line.accept(1)
    with looked_at(line.store.path):
        while line.log_bytes <= LOG_ALARM_BYTES:
            assert line.alarm is None
            line.accept(8 * MIB)
        line.accept(8 * MIB)  # the log is a little larger than what it holds
        until(lambda: line.alarm is not None)
        assert str(line.log) in str(line.alarm)
        assert f"fuser -v {line.store.path}" in str(line.alarm)
        line.accept(1)
        assert line.store.statistics().alarm is None, "what is committed meanwhile is committed"
    until(lambda: line.alarm is None)
    assert line.log_bytes < LOG_ALARM_BYTES
    until(lambda: line.log_bytes == 0)
    until(lambda: len(caplog.records) == 2)  # it is told after the log was cut
    told = [(record.levelname, record.getMessage().split(" ")[0]) for record in caplog.records]
    assert told == [("ERROR", "results_log_grows"), ("WARNING", "results_log_folded_in")]
    log_bytes = int(caplog.records[0].getMessage().split("log_bytes=")[1].split(":")[0])
    assert LOG_ALARM_BYTES < log_bytes < 2 * LOG_ALARM_BYTES


def test_log_of_a_busy_line_is_checkpointed_too(line, monkeypatch):
    """Neither the alarm nor the end of the reader waits for a quiet moment."""
    monkeypatch.setattr("agent.records.write_ahead_log.JOURNAL_LIMIT_BYTES", MIB // 2)
    monkeypatch.setattr("agent.records.write_ahead_log.LOG_ALARM_BYTES", MIB)
    monkeypatch.setattr("agent.records.write_ahead_log.LOOK_AGAIN_S", 0.0)
    monkeypatch.setattr("agent.records.group_commit.IDLE_CHECKPOINT_S", 10 * PATIENCE_S)
    line.accept(1)
    with looked_at(line.store.path):
        for _ in range(4):
            line.accept(MIB // 2)
        until(lambda: line.alarm is not None)
    line.accept(1)
    until(lambda: line.alarm is None)
    until(lambda: line.log_bytes < MIB // 2)


def test_reader_does_not_delay_a_checkpoint(tmp_path):
    """Who wants to commit while the log is folded in would wait as long as that waits."""
    file = tmp_path / "r.db"
    with closing(open_for_writing(file, busy_timeout_s=10 * PATIENCE_S)) as database:
        database.execute("INSERT INTO leaving VALUES ('a', 1, 'age')")
        database.conn.commit()
        with looked_at(file):
            database.execute("INSERT INTO leaving VALUES ('b', 1, 'age')")
            database.conn.commit()
            began_s = time.monotonic()
            assert (fold_in(database.conn) or 0) > 0
            assert time.monotonic() - began_s < PATIENCE_S
        assert fold_in(database.conn) is None
        assert database.execute("PRAGMA busy_timeout").fetchone()[0] == 10 * PATIENCE_S * 1000


def test_results_file_moved_during_a_read_loses_no_row(tmp_path, monkeypatch):
    """Its last rows are in its log, which does not move with it: they are folded in before a new file is begun."""
    file, moved = tmp_path / "r.db", tmp_path / "moved.db"
    with closing(ResultStore(file)) as store, looked_at(file):
        store.record(result("first"))
        until(lambda: store.statistics().committed == 1)
        file.rename(moved)
        store.record(result("second"))
        until(lambda: store.statistics().alarm is not None)
        assert f"moved while a program reads it, which has to end first: '{file}'" in str(store.statistics().alarm)
    assert [row.subject.key for row in ResultReader(moved).query()] == ["first"]
    assert [row.subject.key for row in ResultReader(file).query()] == ["second"]
