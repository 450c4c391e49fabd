"""The line's SQLite file and its lock: how it is opened, what is refused, and what the kernel holds for one agent."""

import os
import sqlite3
from contextlib import closing

import pytest
from sqlite_utils import Migrations

from agent.faults.errors import AlreadyRunning, StateOfAnother, StateUnusable
from agent.records.database import JOURNAL_LIMIT_BYTES, open_for_reading, open_for_writing, state_held
from experts.errors import ConfigError


def pragma(database, name):
    return database.execute(f"PRAGMA {name}").fetchone()[0]


def test_new_database_is_durable_with_a_bounded_log_and_returns_its_room(tmp_path):
    with closing(open_for_writing(tmp_path / "a" / "b" / "r.sqlite")) as database:
        names = ("journal_mode", "synchronous", "auto_vacuum", "journal_size_limit")
        full = incremental = 2
        assert [pragma(database, name) for name in names] == ["wal", full, incremental, JOURNAL_LIMIT_BYTES]
    with closing(open_for_writing(tmp_path / "a" / "b" / "r.sqlite", busy_timeout_s=0.25)) as database:
        assert pragma(database, "busy_timeout") == 250
    with closing(open_for_reading(tmp_path / "a" / "b" / "r.sqlite", busy_timeout_s=0.5)) as connection:
        assert pragma(connection, "busy_timeout") == 500


def test_database_of_another_version_is_refused_by_its_name(tmp_path):
    with closing(open_for_writing(tmp_path / "r.sqlite")) as database:
        later = Migrations("records")
        later(name="records_of_2031")(lambda _: None)
        later.apply(database)
    with pytest.raises(ConfigError, match=r"written by another version of CoServe \(records_of_2031\) - install it"):
        open_for_writing(tmp_path / "r.sqlite")


def test_reader_neither_writes_nor_creates_a_file(tmp_path):
    file = tmp_path / "r.sqlite"
    with pytest.raises(FileNotFoundError) as missing:
        open_for_reading(file)
    assert str(missing.value) == f"{file}: no results yet - the agent writes this file when it first runs"
    assert not file.exists()
    with closing(open_for_writing(tmp_path / "r.sqlite")) as database:
        database["leaving"].insert({"path": b"a.png", "mtime_ns": 1, "reason": "age"})
    with closing(open_for_reading(tmp_path / "r.sqlite")) as connection:
        assert connection.execute("SELECT * FROM leaving").fetchone()["reason"] == "age"
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            connection.execute("DELETE FROM leaving")


def test_shared_filesystem_is_refused_by_its_kind_and_nothing_is_created(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("agent.places.sqlite_files.filesystem_type", lambda path: asked.append(path) or "cifs")
    file = tmp_path / "state" / "r.sqlite"
    with pytest.raises(ConfigError) as refused:
        open_for_writing(file)
    expected = f"{file} is on a shared filesystem (cifs) - set `state:` to a folder on a local disk"
    assert (str(refused.value), asked, file.parent.exists()) == (expected, [file], False)


def test_state_lock_names_its_process_and_the_refused_second_one_names_its_path(tmp_path):
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    (folder / "agent.lock").write_text("a longer text of an earlier process\n")
    lock = folder / "agent.lock"
    with state_held(folder):
        assert lock.read_text() == f"{os.getpid()}\n"
        with pytest.raises(AlreadyRunning, match=str(lock)), state_held(folder):
            pass
        assert lock.read_text() == f"{os.getpid()}\n"
    assert lock.exists()
    with state_held(folder), state_held(tmp_path / "new" / "state"):
        pass
    with pytest.raises(StateUnusable, match="exists, and is not a folder"), state_held(lock):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_root_writes_nothing_into_the_state_of_another_user(tmp_path):
    state = tmp_path / "state"
    state.mkdir()
    os.chown(state, 65534, 65534)
    told = r"belongs to the user nobody, .*sudo -u nobody coserve"
    with pytest.raises(StateOfAnother, match=told), state_held(state):
        pass
    assert list(state.iterdir()) == []
    os.chown(state, 64999, 64999)
    with pytest.raises(StateOfAnother, match="the user #64999"), state_held(state):
        pass
