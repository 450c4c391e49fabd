"""Files of results: whole or not there, each result in exactly one, named by the range of numbers."""

import csv
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from agent.line_file.records import ExportSection
from agent.records.export import EVERY_S, FIRST_S, RESULT_COLUMNS, ResultExport, last_exported
from agent.records.result_writer import ResultStore
from agent.records.verdict import Step
from experts.expert import Verdict
from tests.lines import NOON, changed, result
from tests.waiting import settled, until

BARE = result("k", Verdict.NG, image='a "b",\nä.png', seconds=0.5)


class Line:
    """A store and its export, by clocks that are set."""

    def __init__(self, folder, output="jsonl", bom=False):
        self.folder = folder
        self.bom = bom
        self.output = output
        self.store = ResultStore(folder / "r.db")
        self.now_s = 0.0
        self.wall = NOON
        self.restart()

    def restart(self):
        section = ExportSection.model_construct(folder=self.folder / "out", format=self.output, bom=self.bom)
        self.export = ResultExport(section, "demo", self.store, lambda: self.wall, lambda: self.now_s)

    def record(self, *keys, finished_at=NOON):
        for key in keys:
            self.store.record(changed(BARE, key=key, finished_at=finished_at))
        settled(self.store)

    def steps(self, passed_s, count=12):
        self.now_s += passed_s
        for _ in range(count):
            self.export.step()
            settled(self.store)

    def exported(self):
        """The keys of each file, in the order of names."""
        found = []
        for path in sorted((self.folder / "out").glob("results-*")):
            head, *rows = map(json.loads, path.read_text("utf-8").splitlines())
            first, last = (int(number) for number in path.stem.split("-")[-2:])
            whose = {"schema": 1, "kind": "results", "line": "demo", "file": path.stem.split("-")[1]}
            assert head == whose | {"first_seq": first, "last_seq": last, "columns": list(RESULT_COLUMNS)}
            assert [row["seq"] for row in rows] == list(range(first, last + 1))
            found.append([row["key"] for row in rows])
        return found


@pytest.fixture
def line(tmp_path):
    made = Line(tmp_path)
    yield made
    made.export.stop()
    made.store.close()


def test_export_file_appears_a_minute_after_the_start_and_hourly_if_rows_are_new(line):
    line.record("a", "b")
    line.steps(FIRST_S - 1)
    assert line.exported() == []
    line.steps(1)
    line.record("c")
    line.steps(EVERY_S - 1)
    assert line.exported() == [["a", "b"]]
    line.steps(1)
    line.steps(EVERY_S)
    assert line.exported() == [["a", "b"], ["c"]]
    exported = last_exported(line.folder / "r.db")
    assert (exported.first_seq, exported.last_seq, exported.until) == (3, 3, NOON)


@settings(max_examples=15, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(acts=st.lists(st.sampled_from(["record", "pass", "step", "restart", "clock ahead", "clock back"]), max_size=30))
def test_each_result_is_in_exactly_one_export_file_despite_clock_steps(acts, tmp_path_factory):
    line = Line(tmp_path_factory.mktemp("line"))
    number = 0
    for act in acts:
        if act == "record":
            line.record(str(number), finished_at=line.wall)
            number += 1
        elif act == "restart":
            line.export.stop()
            line.restart()
        elif act.startswith("clock"):
            line.wall += timedelta(days=300) * (1 if act == "clock ahead" else -1)
        else:
            line.steps(EVERY_S if act == "pass" else 0.0, count=1)
    line.steps(EVERY_S)
    line.steps(EVERY_S)
    assert [key for found in line.exported() for key in found] == [str(each) for each in range(number)]
    line.store.close()


SERIALS = (
    "0012345", "1E5", "=cmd|' -C calc'!A0", "+49-17", "-1", "@SUM(1+1)", "A#17", "# 1", "Müller,GmbH", 'q"uote', "a;b",
    "line\nbreak", "\tx", "'quoted", "''=1", "\uff13\uff14", "\uff1d1",
)  # fmt: skip


def test_csv_of_any_serial_holds_no_formula_and_gives_back_each_text(tmp_path):
    line = Line(tmp_path, "csv")
    for number, serial in enumerate((*SERIALS, "a\r\nb\rc")):
        line.store.record(changed(BARE, key=str(number), board=serial))
    settled(line.store)
    line.steps(FIRST_S)
    (file,) = (tmp_path / "out").glob("*.csv")
    assert b"\r" not in file.read_bytes()
    with file.open(encoding="utf-8", newline="") as opened:
        boards = [row["board"] for row in csv.DictReader(opened)]
    assert [board for board in boards if board[0] in "=+-@\t\r\n\uff1d\uff0b\uff0d\uff20"] == []
    assert [board.removeprefix("'") for board in boards] == [*SERIALS, "a\nb\nc"]
    line.store.close()


def test_csv_has_a_header_a_schema_and_the_stored_values(tmp_path):
    line = Line(tmp_path, "csv")
    judged = changed(
        BARE, experts=("cls/a", "det/b"), steps=(Step("cls/a"), Step("det/b", unproven=True)),
        kept_as="2026-05-01/x.png",
    )  # fmt: skip
    line.store.record(judged)
    settled(line.store)
    line.steps(FIRST_S)
    file, beside = sorted((tmp_path / "out").iterdir())
    identity = file.name.split("-")[1]
    assert file.name == f"results-{identity}-000000001-000000001.csv"
    assert beside.name == f"{file.stem}.schema.json"
    assert json.loads(beside.read_text("utf-8")) == {
        "schema": 2, "kind": "results", "line": "demo", "file": identity, "first_seq": 1, "last_seq": 1,
        "columns": list(RESULT_COLUMNS),
    }  # fmt: skip
    (row,) = csv.DictReader(file.read_text("utf-8").splitlines(keepends=True))
    assert tuple(row) == RESULT_COLUMNS
    assert (row["seq"], row["key"], row["image"], row["kept_as"]) == ("1", "k", BARE.subject.image, "2026-05-01/x.png")
    assert row["unproven"] == "True"
    assert [json.loads(row[name]) for name in ("experts", "detail")] == [["cls/a", "det/b"], judged.detail]
    assert [datetime.fromisoformat(row[name]) for name in ("arrived_at", "finished_at")] == [NOON, NOON]
    line.store.close()


def test_csv_with_bom_begins_with_it_once(tmp_path):
    line = Line(tmp_path, "csv", bom=True)
    line.record("a", "b")
    line.steps(FIRST_S)
    (file,) = (tmp_path / "out").glob("*.csv")
    assert file.read_bytes().startswith(b"\xef\xbb\xbfseq,key,")
    assert file.read_bytes().count(b"\xef\xbb\xbf") == 1
    line.store.close()


def test_export_of_many_rows_appears_only_when_complete(line):
    keys = [str(number) for number in range(1200)]
    line.record(*keys)
    line.steps(FIRST_S, 4)
    assert line.exported() == []
    line.export.stop()
    assert os.listdir(line.folder / "out") == []
    line.record("later")
    line.steps(0.0, 5)
    assert line.exported() == [keys], "the range that was begun stays as it was"


def test_export_refused_by_the_disk_raises_and_is_retried(line):
    line.record("a")
    (line.folder / "out").write_text("in the way")
    line.now_s += FIRST_S
    refusals = 0
    for _ in range(20):
        try:
            line.export.step()
        except OSError:
            refusals += 1
        settled(line.store)
    assert refusals > 1
    (line.folder / "out").unlink()
    line.steps(0.0)
    assert line.exported() == [["a"]]


def test_vanished_export_folder_is_waited_for_also_after_a_restart(line):
    line.record("a")
    line.steps(FIRST_S)
    (line.folder / "out").rename(line.folder / "share")
    line.record("b")
    for _ in range(2):
        line.now_s += EVERY_S
        with pytest.raises(OSError, match="OFFLINE: it was there and is gone"):
            line.export.step()
        assert not (line.folder / "out").exists()
        assert last_exported(line.folder / "r.db").last_seq == 1
        line.restart()
    (line.folder / "share").rename(line.folder / "out")
    line.steps(EVERY_S)
    assert line.exported() == [["a"], ["b"]]


def test_export_folder_below_an_empty_folder_is_not_created(line):
    (line.folder / "mes").mkdir()
    line.export = ResultExport(
        ExportSection.model_construct(folder=line.folder / "mes" / "line1", format="jsonl"), "demo", line.store,
        lambda: line.wall, lambda: line.now_s,
    )  # fmt: skip
    line.record("a")
    line.now_s += FIRST_S
    with pytest.raises(OSError, match="mes is empty, as where a share is not mounted - mount its share, or make"):
        line.export.step()
    assert last_exported(line.folder / "r.db") is None
    (line.folder / "mes" / "line1").mkdir()
    line.steps(0.0)
    assert last_exported(line.folder / "r.db").last_seq == 1


MOUNTED = """
import subprocess, sys
from pathlib import Path
from tests.agent.records.test_export import EVERY_S, FIRST_S, Line, last_exported

folder = Path(sys.argv[1])
share = folder / "out"

def mount():
    if subprocess.run(["mount", "-t", "tmpfs", "share", share], capture_output=True).returncode:
        sys.exit(77)

mount()
line = Line(folder)
line.record("a")
line.steps(FIRST_S)
print(line.exported())
subprocess.run(["umount", share], check=True)
line.record("b")
line.restart()  # as after a reboot
line.now_s += FIRST_S
try:
    line.export.step()
except OSError as error:
    print(error.strerror.replace(str(folder), ""), list(share.iterdir()), last_exported(folder / "r.db").last_seq)
mount()
line.steps(0.0)
print(line.exported(), last_exported(folder / "r.db").last_seq)
line.store.close()
"""


def test_bare_mount_point_of_an_export_share_gets_no_file(tmp_path):
    (tmp_path / "out").mkdir()
    apart = ["unshare", "--mount", "--propagation", "private"]
    if shutil.which("unshare") is None or subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip("a mount namespace is not permitted here")
    command = [*apart, sys.executable, "-c", MOUNTED, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    if ended.returncode == 77:
        pytest.skip("mounting is not permitted here")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [
        "[['a']]", "OFFLINE: nothing is mounted at /out - mount its share or disk there [] 1", "[['b']] 2",
    ]  # fmt: skip


def test_restored_results_file_overwrites_no_earlier_export(line):
    line.record("a")
    line.store.close()
    shutil.copy(line.folder / "r.db", line.folder / "saved.db")
    line.store = ResultStore(line.folder / "r.db")
    line.restart()
    line.record("lost with the disk")
    line.steps(FIRST_S)
    line.store.close()
    with closing(sqlite3.connect(line.folder / "saved.db")) as connection, connection:
        connection.execute("UPDATE identity SET id = 'restored'")
    (line.folder / "saved.db").replace(line.folder / "r.db")
    line.store = ResultStore(line.folder / "r.db")
    line.restart()
    line.record("b")
    line.steps(FIRST_S)
    assert sorted(line.exported()) == [["a", "b"], ["a", "lost with the disk"]]


EXPORTS = """
import sys
from datetime import UTC, datetime
from pathlib import Path
from agent.line_file.records import ExportSection
from agent.records.export import ResultExport
from agent.records.result_writer import ResultStore
from agent.records.verdict import Step

folder = Path(sys.argv[1])
store = ResultStore(folder / "r.db")
section = ExportSection.model_construct(folder=folder / "out", format=sys.argv[2])
now_s = 0.0
export = ResultExport(section, "demo", store, lambda: datetime.now(UTC), lambda: now_s)
now_s = 60.0
print("ready", flush=True)
while not list((folder / "out").glob(f"results-*.{sys.argv[2]}")):
    export.step()
    print("step", flush=True)
store.close()
"""


@pytest.mark.parametrize(("output", "steps"), [("csv", 1), ("jsonl", 4), ("csv", 7), ("jsonl", 40)])
def test_export_killed_at_any_moment_leaves_no_partial_file_and_resumes(tmp_path, forks, output, steps):
    """Files appear only complete, never half lines after kill -9."""
    with closing(ResultStore(tmp_path / "r.db")) as store:
        for number in range(3000):
            store.record(changed(BARE, key=str(number), image="i" * 300))
        settled(store)
    process = forks.start(EXPORTS, tmp_path, output)
    until(lambda: process.report.count("step") >= steps or process.poll() is not None)
    process.kill()
    there = list((tmp_path / "out").glob(f"results-*.{output}")) if (tmp_path / "out").is_dir() else []
    assert forks.run(EXPORTS, tmp_path, output).returncode == 0
    (file,) = (tmp_path / "out").glob(f"*.{output}")
    assert len(list((tmp_path / "out").iterdir())) == (2 if output == "csv" else 1)
    assert len(file.read_text("utf-8").splitlines()) == 3001
    assert there in ([], [file])
