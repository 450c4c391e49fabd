"""The results store: what is committed, when callers hear of it, and what happens when the disk says no."""

import math
import sqlite3
import threading
from contextlib import closing
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import count, islice
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from sqlite_utils import Database

from agent.places.mounts import filesystem_type, is_shared, tells_changes
from agent.records.boards import BoardVerdict
from agent.records.result_reader import ResultReader
from agent.records.result_writer import Recorded, ResultStore
from agent.records.verdict import KeptMap, Step
from experts.expert import Verdict
from tests import lines
from tests.lines import NOON
from tests.waiting import settled, until

WAIT_S = 20.0


def result(number=0, **changes):
    made = lines.result(
        f"key-{number}", component="resistor-0402", image=f"b1_resistor-0402_R{number}.png",
        finished_at=NOON + timedelta(seconds=number), board="b1", board_type="main", ref=f"R{number}",
        steps=(Step("cls/r", "ok"),),
    )  # fmt: skip
    return lines.changed(made, **changes)


def stored(store, *results):
    reports = []
    for one in results:
        store.record(one, reports.append)
    settled(store)
    return reports


def keys(reader):
    return [row.subject.key for row in reader.query()]


def test_anomaly_maps_are_stored_and_removed_with_their_result(tmp_path):
    maps = (KeptMap(0, "anomaly/solder", b"\x89PNG one"), KeptMap(2, "anomaly/x", b"\x89PNG two"))
    with closing(ResultStore(tmp_path / "r.sqlite")) as store:
        stored(store, result(1, maps=maps), result(2), result(1, maps=maps[:1]))  # a key that is there stays as it is
        assert (store.maps(1), store.maps(2)) == (maps, ())
        assert list(store.query()) == [result(1), result(2)]
        store.write(lambda database: database.execute("DELETE FROM results WHERE seq = 1"))
        assert settled(store).maps(1) == ()


# Keys that fail are shown as they were found: each try is two files written to the disk.
@settings(max_examples=10, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(sent=st.lists(st.integers(0, 20), max_size=60))
def test_sequence_numbers_have_no_gaps_after_repeated_records(sent, tmp_path_factory):
    file = tmp_path_factory.mktemp("r") / "r.sqlite"
    for part in (sent[::2], sent[1::2]):
        store = ResultStore(file)
        for key in part:
            store.record(result(key))
        assert store.close()
    assert [row.seq for row in ResultReader(file).query()] == list(range(1, len(set(sent)) + 1))


@pytest.mark.parametrize(
    "error", [MemoryError(), sqlite3.InterfaceError("bad parameter"), OSError("input/output error")]
)
def test_commit_is_retried_after_any_error(tmp_path, monkeypatch, caplog, error):
    atomic, failed = Database.atomic, threading.Event()

    def fail_once(database):
        if not failed.is_set():
            failed.set()
            raise error
        return atomic(database)

    with closing(ResultStore(tmp_path / "r.sqlite")) as store:
        monkeypatch.setattr(Database, "atomic", fail_once)
        reports = []
        store.record(result(1), reports.append)
        until(lambda: reports == [Recorded(1, is_new=True)])
        assert (store.statistics().failed_commits, store.statistics().alarm) == (1, None)
    assert f"reason={str(error) or 'MemoryError'}: kept and retried" in caplog.text
    assert "results_committed_again" in caplog.text


def test_close_commits_pending_rows_and_refuses_more(tmp_path):
    store = ResultStore(tmp_path / "r.sqlite")
    for number in range(500):
        store.record(result(number))
    assert store.close()
    assert store.close()
    assert sum(1 for _ in store.query()) == 500
    with pytest.raises(RuntimeError, match="closed"):
        store.record(result())


def test_row_recorded_by_a_callback_during_close_is_kept(tmp_path):
    entered, leave = threading.Event(), threading.Event()
    board = BoardVerdict("b1", "main", Verdict.OK, NOON, NOON, {}, {})

    def record_the_board(_):
        entered.set()
        leave.wait(WAIT_S)
        store.record_board(board, lambda _: store.record(result(2)))

    store = ResultStore(tmp_path / "r.sqlite")
    store.record(result(1), record_the_board)
    assert entered.wait(WAIT_S)
    assert store.statistics().pending == 1, "until its callback has run"
    closer = threading.Thread(target=store.close)
    closer.start()
    with pytest.raises(RuntimeError, match="closed"):
        all(store.record(result(1)) is None for _ in count())
    leave.set()
    closer.join()
    assert (len(store.boards()), keys(store)) == (1, ["key-1", "key-2"])


def test_replay_reads_rows_newest_first_and_only_as_far_as_asked(tmp_path):
    with closing(ResultStore(tmp_path / "r.sqlite")) as store:
        assert list(store.newest_first()) == []
        stored(store, *(result(n) for n in range(1200)), result(5000), result(2000, board=None))
        newest = store.newest_first()
        assert list(islice(newest, 3)) == [
            replace(
                lines.inspection(board, "main", "resistor-0402", f"R{n}", Verdict.OK, NOON + timedelta(seconds=n)),
                seq=seq,
            )
            for board, n, seq in ((None, 2000, 1202), ("b1", 5000, 1201), ("b1", 1199, 1200))
        ]
        assert [one.at for one in newest] == [NOON + timedelta(seconds=n) for n in range(1198, -1, -1)]


@pytest.mark.parametrize(
    "wrong", [{"finished_at": datetime(2026, 1, 1)}, {"course": {"x": object()}}, {"image": "b1_\udcff.png"}]
)
def test_row_that_cannot_be_stored_raises_and_harms_no_other(tmp_path, wrong):
    with closing(ResultStore(tmp_path / "r.sqlite")) as store:
        with pytest.raises((TypeError, ValueError)):
            store.record(result(1, **wrong))
        assert (stored(store, result(2)), store.statistics().pending) == ([Recorded(1, is_new=True)], 0)


@pytest.mark.parametrize("is_kept", [True, False], ids=["moved", "deleted"])
def test_results_file_removed_while_written_is_recreated(tmp_path, caplog, is_kept):
    file, moved = tmp_path / "r.sqlite", tmp_path / "moved.sqlite"
    with closing(ResultStore(file)) as store:
        stored(store, result(1), result(2))
        file.rename(moved)
        if not is_kept:
            moved.unlink()
        with pytest.raises(FileNotFoundError):
            store.find("key-1")
        assert stored(store, result(3), result(2)) == [Recorded(1, is_new=True), Recorded(2, is_new=True)]
        assert store.find("key-1") is None
        assert (store.statistics().alarm, store.statistics().failed_commits) == (None, 0)
    assert keys(ResultReader(file)) == ["key-3", "key-2"]
    assert "results_file_gone" in caplog.text
    if is_kept:
        assert keys(ResultReader(moved)) == ["key-1", "key-2"]


@pytest.mark.parametrize("comes_back", [True, False], ids=["the old folder", "a new folder"])
def test_vanished_results_folder_is_waited_for(tmp_path, caplog, comes_back):
    folder, moved = tmp_path / "state", tmp_path / "moved"
    reports = []
    with closing(ResultStore(folder / "r.sqlite")) as store:
        stored(store, result(1))
        folder.rename(moved)
        store.record(result(2), reports.append)
        until(lambda: store.statistics().failed_commits >= 2)
        assert store.statistics().alarm == f"[Errno 2] the folder of the results is gone: '{folder}'"
        assert not folder.exists()
        if comes_back:
            moved.rename(folder)
        else:
            folder.mkdir()
        until(lambda: reports)
    assert reports[0].is_new
    expected = ["key-1", "key-2"] if comes_back else ["key-2"]
    assert keys(ResultReader(folder / "r.sqlite")) == expected
    assert [record.getMessage().partition(" ")[0] for record in caplog.records] == [
        "results_not_committed", "results_file_gone", "results_committed_again",
    ]  # fmt: skip


FULL_DISK = """
import queue, resource, sys, time
from pathlib import Path
from agent.records.result_writer import Recorded, ResultStore
from tests.lines import result
store = ResultStore(Path(sys.argv[1]), busy_timeout_s=0.01)
done = queue.Queue()
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
for number in range(2000):
    store.record(result(str(number), course={"text": "x" * 200}), done.put)
while store.statistics().alarm is None:
    time.sleep(0.01)
assert done.qsize() < 2000
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert [done.get(timeout=30).seq for _ in range(2000)] == list(range(1, 2001))
assert store.close()
print(store.statistics().failed_commits)
"""


def test_full_disk_delays_rows_and_loses_none(tmp_path, forks):
    ended = forks.run(FULL_DISK, tmp_path / "r.sqlite")
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) >= 1
    assert "results_not_committed" in ended.stderr
    assert sum(1 for _ in ResultReader(tmp_path / "r.sqlite").query()) == 2000


def test_index_of_details_prevents_no_row_from_being_stored(tmp_path):
    """NaN is no JSON to SQLite, and not every detail has a digest."""
    nan = {"steps": (Step("cls/r", score=math.nan),)}
    details = ({}, nan, nan | {"image_sha256": "ab"}, {"image_sha256": "ab"}, {"course": {"s": math.inf}})
    with closing(ResultStore(tmp_path / "r.sqlite")) as store:
        stored(store, *(result(number, key=f"inbox/{number}", **detail) for number, detail in enumerate(details)))
        known = result(3, key="inbox/again/3")
        assert len(list(store.query())) == len(details)
        first = store.last_judged(known.subject, "ab", known.config_sha256)
        assert first.subject.key == "inbox/3", "from the same source, in whatever folder of it"
        assert store.last_judged(known.subject, "ab", "c" * 64) is None


MOUNTS = """\
22 1 8:1 / / rw - ext4 /dev/sda1 rw
30 22 0:40 / /mnt/line\\0401 rw - nfs4 server:/x rw
31 22 0:41 / /mnt/cam rw - cifs //cam/x rw
32 22 0:42 / /mnt/ssh rw - fuse.sshfs host: rw
33 22 0:43 / /mnt/disk rw - xfs /dev/sdb rw
34 33 0:44 / /mnt/disk rw - weird /dev/sdc rw
"""


@pytest.mark.parametrize(
    ("path", "kind", "shared", "tells"),
    [
        ("/var/lib/coserve/x", "ext4", False, True), ("/mnt/line 1/results.sqlite", "nfs4", True, False),
        ("/mnt/cam", "cifs", True, False), ("/mnt/camera", "ext4", False, True),
        ("/mnt/ssh/a/b", "fuse.sshfs", True, False), ("/mnt/disk/a", "weird", False, False),
        ("elsewhere", None, False, False),  # is polled, and may keep results
    ],
)  # fmt: skip
def test_filesystem_kind_is_found_by_its_mount(tmp_path, path, kind, shared, tells):
    mounts = tmp_path / "mountinfo"
    if kind is not None:
        mounts.write_text(MOUNTS)
    found = filesystem_type(Path(path), mounts)
    assert (found, is_shared(found), tells_changes(found)) == (kind, shared, tells)
