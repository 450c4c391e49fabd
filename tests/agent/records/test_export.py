"""The daily file: whole or not there, each result in exactly one, each day once."""

from __future__ import annotations

import csv
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from agent.line_file.records import ExportSection
from agent.records.export import DailyExport, beginning, last_exported
from agent.records.result_writer import ResultStore
from agent.records.results import Result
from agent.records.rows import RESULT_COLUMNS
from experts.expert import Verdict

if TYPE_CHECKING:
    from pathlib import Path

FIRST = date(2026, 5, 1)
BARE = Result(
    "k",
    "demo",
    "r",
    'a "b",\nä.png',
    Verdict.NG,
    datetime(2026, 5, 1, tzinfo=UTC),
    datetime(2026, 5, 1, tzinfo=UTC),
    0.5,
    "ab",
)


@pytest.fixture(
    params=["UTC0", "NZST-12NZDT,M9.5.0,M4.1.0/3", "EST5EDT,M3.2.0,M11.1.0"], ids=["UTC", "Auckland", "New York"]
)
def anywhere(request, monkeypatch):
    """Boxes stand all over the world, and some of their days have 23 or 25 hours."""
    with monkeypatch.context() as patched:
        patched.setenv("TZ", request.param)
        time.tzset()
        yield
    time.tzset()


def at(day: int, hour: float = 12.0) -> datetime:
    return beginning(FIRST + timedelta(days=day)) + timedelta(hours=hour)


class Line:
    """A store, and its export under a clock that is set."""

    def __init__(self, folder: Path, output: str = "jsonl") -> None:
        self.folder = folder
        self.store = ResultStore(folder / "r.db")
        self.now = at(0, 0.0)
        self.run_s = 0.0  # how much more has passed than the wall clock shows
        self.output = output
        self.export = self.restarted()

    def restarted(self) -> DailyExport:
        self.export = DailyExport(
            ExportSection.model_construct(folder=self.folder / "out", format=self.output),
            "demo", self.store, lambda: self.now, lambda: self.run_s + (self.now - at(0, 0.0)).total_seconds(),
        )  # fmt: skip
        return self.export

    def record(self, key: str, finished_at: datetime) -> None:
        self.store.record(replace(BARE, key=key, arrived_at=finished_at, finished_at=finished_at))
        self.settle()

    def settle(self) -> None:
        while self.store.statistics().pending:
            time.sleep(0.001)

    def set_clock(self, now: datetime, passed: timedelta) -> None:
        """Somebody sets the wall clock; ``passed``: what really went by."""
        self.run_s += (self.now - now + passed).total_seconds()
        self.now = now
        self.export.step()

    def steps(self, now: datetime, count: int = 60) -> None:
        self.now = now
        for _ in range(count):
            self.export.step()
        self.settle()

    def files(self) -> dict[str, list[str]]:
        """The keys in each file that is there."""
        found = {}
        for path in sorted((self.folder / "out").glob("results-*")):
            head, *rows = path.read_text("utf-8").splitlines()
            assert json.loads(head)["schema"] == 1
            found[path.name.removeprefix("results-").removesuffix(".jsonl")] = [json.loads(row)["key"] for row in rows]
        return found


@pytest.fixture
def line(tmp_path: Path):
    made = Line(tmp_path)
    yield made
    made.export.stop()
    made.store.close()


@pytest.mark.usefixtures("anywhere")
def test_a_day_has_its_file_once_it_is_over_and_not_before(line: Line) -> None:
    line.record("first", at(0, 0.0))
    line.record("last", at(1, 0.0) - timedelta(microseconds=1))
    line.record("next", at(1, 0.0))
    line.steps(at(1, 0.0))
    assert line.files() == {}
    line.steps(at(1, 0.1))
    assert line.files() == {"2026-05-01": ["first", "last"]}
    line.steps(at(2, 1.0))
    assert line.files() == {"2026-05-01": ["first", "last"], "2026-05-02": ["next"]}


@pytest.mark.usefixtures("anywhere")
def test_days_that_passed_are_caught_up_each_once_also_those_without_results(line: Line) -> None:
    line.record("a", at(0))
    line.record("b", at(3))
    line.steps(at(4, 1.0))
    assert line.files() == {"2026-05-01": ["a"], "2026-05-02": [], "2026-05-03": [], "2026-05-04": ["b"]}
    before = {path.name: path.stat().st_mtime_ns for path in (line.folder / "out").iterdir()}
    line.restarted()
    line.steps(at(4, 2.0))
    assert {path.name: path.stat().st_mtime_ns for path in (line.folder / "out").iterdir()} == before
    exported = last_exported(line.folder / "r.db")
    assert exported is not None
    assert (exported.day, exported.last_seq) == (FIRST + timedelta(days=3), 2)


def test_what_was_stored_late_is_in_the_next_file(line: Line) -> None:
    """A disk that was full over midnight, or a verdict of the day's last millisecond."""
    line.record("a", at(0))
    line.steps(at(1, 1.0))
    line.record("late", at(0, 23.9))
    line.record("b", at(1))
    line.steps(at(2, 1.0))
    assert line.files() == {"2026-05-01": ["a"], "2026-05-02": ["late", "b"]}


@settings(max_examples=25, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(
    acts=st.lists(
        st.one_of(
            st.floats(-40, 5).map(lambda hours: ("record", hours)),
            st.floats(0, 30).map(lambda hours: ("pass", hours)),
            st.integers(1, 3).map(lambda steps: ("step", steps)),
            st.just(("restart", 0)),
        ),
        max_size=30,
    )
)
def test_each_result_is_in_exactly_one_file(acts, tmp_path_factory: pytest.TempPathFactory) -> None:
    line = Line(tmp_path_factory.mktemp("line"))
    line.record("0", at(0))
    now, number = at(0), 1
    for act, value in acts:
        if act == "record":
            line.record(str(number), max(now + timedelta(hours=value), at(0)))
            number += 1
        elif act == "pass":
            now += timedelta(hours=value)
        elif act == "restart":
            line.export.stop()
            line.restarted()
        else:
            line.steps(now, int(value))
    line.steps(now + timedelta(days=3), 200)
    keys = [key for found in line.files().values() for key in found]
    assert sorted(keys, key=int) == [str(each) for each in range(number)]
    line.store.close()


def test_csv_begins_with_what_it_is_and_holds_what_was_stored(tmp_path: Path) -> None:
    line = Line(tmp_path, "csv")
    full = replace(
        BARE, key="full", arrived_at=at(0), finished_at=at(0), experts=("cls/a", "det/b"), detail={"steps": [1]},
        kept_as="2026-05-01/x.png",
    )  # fmt: skip
    line.store.record(full)
    line.settle()
    line.steps(at(1, 1.0))
    text = (tmp_path / "out" / "results-2026-05-01.csv").read_bytes().decode("utf-8")
    head, _, rest = text.partition("\n")
    assert head.startswith("# coserve results: schema 1, line demo, day 2026-05-01, file ")
    assert head.endswith(", after 0")
    (row,) = csv.DictReader(rest.splitlines(keepends=True))
    assert tuple(row) == RESULT_COLUMNS
    assert (row["seq"], row["key"], row["image"], row["verdict"]) == ("1", "full", BARE.image, "NG")
    assert (json.loads(row["experts"]), json.loads(row["detail"])) == (["cls/a", "det/b"], {"steps": [1]})
    assert row["kept_as"] == "2026-05-01/x.png"
    finished_at = datetime.fromisoformat(row["finished_at"])
    assert finished_at.tzinfo is not None
    assert finished_at == at(0)
    line.store.close()


def test_a_file_of_many_rows_takes_many_steps_and_none_of_them_shows(line: Line) -> None:
    for number in range(1200):
        line.store.record(replace(BARE, key=str(number), finished_at=at(0), arrived_at=at(0)))
    line.settle()
    line.steps(at(1, 1.0), 3)
    assert line.files() == {}
    line.export.stop()
    assert os.listdir(line.folder / "out") == []
    line.steps(at(1, 1.0), 4)
    assert line.files() == {"2026-05-01": [str(number) for number in range(1200)]}
    assert line.export.statistics().rows == 1200


def test_what_the_disk_refuses_is_raised_and_tried_again(line: Line) -> None:
    line.record("a", at(0))
    (line.folder / "out").write_text("in the way")
    line.now = at(1, 1.0)
    for _ in range(2):
        with pytest.raises(OSError, match="out"):
            line.export.step()
    (line.folder / "out").unlink()
    line.steps(at(1, 1.0))
    assert line.files() == {"2026-05-01": ["a"]}


def test_before_the_first_result_there_is_nothing_to_write(line: Line) -> None:
    line.steps(at(9))
    assert line.files() == {} if (line.folder / "out").exists() else True
    assert line.export.statistics().files == 0


def test_a_restarted_agent_waits_until_its_clock_has_run_evenly_for_an_hour(line: Line) -> None:
    line.record("a", at(0))
    line.now = at(1, 1.0)
    line.restarted()
    line.steps(at(1, 1.9))
    assert line.files() == {}
    line.steps(at(1, 2.1))
    assert line.files() == {"2026-05-01": ["a"]}


def test_a_restored_results_file_overwrites_no_day_of_the_one_before_it(line: Line) -> None:
    line.record("a", at(0))
    line.store.close()
    shutil.copy(line.folder / "r.db", line.folder / "saved.db")
    line.store = ResultStore(line.folder / "r.db")
    line.restarted()
    line.record("lost with the disk", at(1))
    line.steps(at(2, 1.0))
    before = line.files()
    line.store.close()
    with closing(sqlite3.connect(line.folder / "saved.db")) as connection, connection:
        connection.execute("UPDATE identity SET id = 'restored'")
    (line.folder / "saved.db").replace(line.folder / "r.db")
    line.store = ResultStore(line.folder / "r.db")
    line.restarted()
    line.record("b", at(2, 2.0))
    line.steps(at(3, 1.0))
    assert before == {"2026-05-01": ["a"], "2026-05-02": ["lost with the disk"]}
    assert line.files() == before | {"2026-05-01-2": ["a"], "2026-05-02-2": [], "2026-05-03": ["b"]}


def test_a_minute_of_a_wrong_clock_changes_nothing(line: Line) -> None:
    line.record("a", at(0))
    line.set_clock(at(300), passed=timedelta())
    line.record("ahead", at(300))
    line.steps(at(300, 12.1))
    line.set_clock(at(0, 13), passed=timedelta(minutes=1))
    line.record("b", at(0, 13))
    line.steps(at(1, 1.0))
    assert line.files() == {"2026-05-01": ["a", "ahead", "b"]}
    line.record("c", at(1))
    line.steps(at(2, 1.0))
    assert line.files() == {"2026-05-01": ["a", "ahead", "b"], "2026-05-02": ["c"]}


@pytest.mark.parametrize("days", [5, 300], ids=lambda days: f"{days} days")
def test_a_clock_that_was_ahead_for_hours_stops_no_later_export(line: Line, days: int) -> None:
    """The labels of the wrong days are used up; what comes after goes on under its own day."""
    line.record("a", at(0))
    line.set_clock(at(days, 1), passed=timedelta(minutes=1))
    line.steps(at(days, 4))
    line.set_clock(at(0, 15), passed=timedelta(minutes=1))
    line.record("b", at(0, 15))
    line.steps(at(0, 20))
    ahead = line.files()
    assert [key for found in ahead.values() for key in found] == ["a"]
    line.steps(at(1, 1.0))
    assert [found for label, found in line.files().items() if label not in ahead] == [["b"]]
    line.record("c", at(1))
    line.steps(at(2, 1.0))
    keys = [found for found in line.files().values() if found]
    assert sorted(keys) == [["a"], ["b"], ["c"]]
    exported = last_exported(line.folder / "r.db")
    assert exported is not None
    assert exported.day == FIRST + timedelta(days=1)


def test_a_clock_that_began_in_1970_makes_no_file_for_each_day_since(line: Line) -> None:
    line.record("early", datetime(1970, 1, 1, 12, tzinfo=UTC))
    line.record("a", at(0))
    line.steps(at(2, 1.0))
    assert line.files() == {"1970-01-01": ["early"], "2026-05-01": ["a"], "2026-05-02": []}


EXPORTS = """
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from agent.line_file.records import ExportSection
from agent.records.export import DailyExport
from agent.records.result_writer import ResultStore

folder = Path(sys.argv[1])
store = ResultStore(folder / "r.db")
section = ExportSection.model_construct(folder=folder / "out", format=sys.argv[2])
passed_s = 0.0
start = datetime(2026, 6, 1, 10, tzinfo=UTC)
export = DailyExport(section, "demo", store, lambda: start + timedelta(seconds=passed_s), lambda: passed_s)
passed_s = 7200.0
print("ready", flush=True)
while str(export.statistics().day) != "2026-05-30":
    export.step()
    print("step", flush=True)
store.close()
"""


@pytest.fixture(scope="module")
def month(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of thirty days, 300 on each."""
    path = tmp_path_factory.mktemp("month") / "r.db"
    with closing(ResultStore(path)) as store:
        for number in range(9000):
            noon = datetime(2026, 5, 1, 12, tzinfo=UTC) + timedelta(days=number // 300)
            store.record(Result(f"{number}", "demo", "r", "i" * 300, Verdict.OK, noon, noon, 0.1, "ab"))
        while store.statistics().pending:
            time.sleep(0.001)
    return path


@pytest.mark.parametrize(("output", "steps"), [("csv", 1), ("jsonl", 8), ("csv", 23), ("jsonl", 40)])
def test_killed_at_any_moment_it_leaves_no_half_file_and_goes_on_with_the_next_run(
    tmp_path: Path, month: Path, output: str, steps: int
) -> None:
    """AC27: files appear only complete, never half lines after kill -9."""
    shutil.copy(month, tmp_path)
    command = [sys.executable, "-c", EXPORTS, tmp_path, output]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(1 + steps):
        assert process.stdout.readline()
    process.kill()
    process.communicate()

    def lines() -> dict[str, int]:
        return {path.name: len(path.read_text("utf-8").splitlines()) for path in (tmp_path / "out").glob("results-*")}

    length = 302 if output == "csv" else 301
    assert set(lines().values()) <= {length}
    assert subprocess.run(command, stdout=subprocess.PIPE, timeout=120, check=False).returncode == 0
    assert len(lines()) == 30
    assert set(lines().values()) == {length}
    assert {path.name for path in (tmp_path / "out").iterdir()} == set(lines())
    with closing(ResultStore(tmp_path / "r.db")) as store:
        assert sum(1 for _ in store.query()) == 9000
