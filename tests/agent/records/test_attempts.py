"""The count of attempts that ended the agent: real files, and runs that end without a word."""

import errno
import json
import logging
import os
import threading

import pytest

from agent.records.attempts import AttemptLog

NOT_WRITTEN = "until the next start no image is found out that ends the agent"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state" / "attempts.log"


def test_each_run_that_ends_counts_one_more_however_many_batches_it_began(path):
    for run in range(1, 4):
        log = AttemptLog(path)
        assert log.attempts("a") == run - 1
        log.begun(["a"])
        log.ended(["a"])
        log.begun(["a"])  # and whatever was to be written before is there once this returns
    log = AttemptLog(path)
    assert log.attempts("a") == 3
    log.begun(["a", "b"])
    log.ended(["a"])
    log.forgive()  # the run ends by its own fault, which is not counted against the images
    log.begun(["c"])
    again = AttemptLog(path)
    assert [again.attempts(key) for key in "abc"] == [3, 0, 1]


def test_attempt_count_survives_a_good_run_until_the_key_is_settled(path):
    AttemptLog(path).begun(["a"])
    survived = AttemptLog(path)
    survived.begun(["a"])
    survived.ended(["a"])
    survived.close()
    survived.settled("a")  # too late to be written
    survived.close()
    again = AttemptLog(path)
    assert again.attempts("a") == 1
    again.settled("a")
    assert again.attempts("a") == 0
    again.close()
    assert AttemptLog(path).attempts("a") == 0


def test_cut_or_edited_lines_of_the_attempt_log_are_skipped(path):
    log = AttemptLog(path)
    log.begun(["a\n~é"])
    log.close()
    with path.open("ab") as file:
        file.write(
            b'[]\n{"begun": 5}\n{"counts": {"x": "y"}}\n{"settled": "z"}\n\xff\n{"begun": ["c"]}\n{"begun": ["b"'
        )
    again = AttemptLog(path)
    assert [again.attempts(key) for key in ("a\n~é", "b", "x", "c")] == [1, 0, 0, 1]


def test_attempt_log_is_compacted_and_keeps_open_attempts(path, monkeypatch):
    monkeypatch.setattr("agent.records.attempts.COMPACT_BYTES", 1000)
    AttemptLog(path).begun(["suspect"])
    log = AttemptLog(path)
    log.begun(["open"])
    for number in range(500):
        log.begun([f"key {number}"])
        log.ended([f"key {number}"])
        assert path.stat().st_size < 1200
    log.close()
    again = AttemptLog(path)
    assert (again.attempts("suspect"), again.attempts("open"), again.attempts("key 499")) == (1, 1, 0)
    assert all(isinstance(json.loads(line), dict) for line in path.read_text().splitlines())


def test_unwritable_attempt_log_is_logged_once_and_stops_nothing(path, caplog):
    path.parent.write_text("a file where the state folder should be")
    log = AttemptLog(path)
    for number in range(3):
        log.begun([str(number)])
        log.ended([str(number)])
    assert logged_errors(caplog) == [
        f"attempts_not_read file={path} reason=Not a directory: nothing is counted of the run before",
        f"attempts_not_written file={path} reason=File exists: {NOT_WRITTEN}",
    ]


def logged_errors(caplog):
    assert all(record.levelno == logging.ERROR for record in caplog.records)
    return [record.getMessage() for record in caplog.records]


def test_hanging_disk_delays_the_attempt_log_once(path, caplog, monkeypatch):
    monkeypatch.setattr("agent.records.attempts.WAIT_S", 0.01)
    log, answers, waited_for_ever = AttemptLog(path), threading.Event(), threading.Event()
    log.begun(["a"])

    def hang(*_):
        if not answers.wait(10.0):
            waited_for_ever.set()
        return 0

    monkeypatch.setattr(os, "write", hang)
    try:
        for _ in range(100):  # of which one waits
            log.begun(["b"])
            log.ended(["b"])
        log.close()
    finally:
        answers.set()
    monkeypatch.undo()
    assert not waited_for_ever.is_set()
    assert logged_errors(caplog) == [f"attempts_not_written file={path} reason=the disk does not answer: {NOT_WRITTEN}"]
    assert AttemptLog(path).attempts("a") == 1


def test_attempt_log_that_cannot_be_compacted_is_kept_and_logged(path, caplog, monkeypatch):
    raised = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    monkeypatch.setattr("agent.records.attempts.COMPACT_BYTES", 100)
    log = AttemptLog(path)
    draft = path.with_name(".attempts.log.tmp")
    draft.mkdir()
    log.begun(["long" * 25])
    log.begun(["b"])
    log.close()
    assert logged_errors(caplog) == [f"attempts_not_written file={path} reason=Is a directory: {NOT_WRITTEN}"]
    assert raised == []
    draft.rmdir()
    again = AttemptLog(path)
    assert (again.attempts("long" * 25), again.attempts("b")) == (1, 0)


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


WRITE = os.write


@pytest.mark.parametrize(
    ("write", "reason"),
    [(full, "No space left on device"), (lambda fd, line: WRITE(fd, line[:5]), "the disk took a part of a line only")],
)
def test_full_disk_ends_the_attempt_log_of_this_run_and_keeps_what_was_written(
    path, caplog, monkeypatch, write, reason
):
    log = AttemptLog(path)
    log.begun(["a"])
    monkeypatch.setattr(os, "write", write)
    log.begun(["b"])
    monkeypatch.undo()
    log.ended(["a"])
    log.close()
    assert logged_errors(caplog) == [f"attempts_not_written file={path} reason={reason}: {NOT_WRITTEN}"]
    again = AttemptLog(path)
    assert (again.attempts("a"), again.attempts("b")) == (1, 0)
