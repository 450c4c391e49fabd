"""What goes, as a decision; and the sweeper that carries it out on real files and a real database."""

import errno
import os
import sqlite3
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.line_file.records import ExportSection, KeepSection
from agent.records.boards import BoardVerdict
from agent.records.export import FIRST_S, ResultExport
from agent.records.result_reader import ResultReader
from agent.records.result_writer import ResultStore
from agent.records.retention import kept_images, sweeper
from agent.records.retention.archive import ImageArchive
from agent.records.retention.kept_images import Shelf, shelved
from agent.records.retention.rules import (
    DAY_S,
    LAST_TO_GO,
    STEADY_S,
    YOUNG_S,
    KeepingLimit,
    KeptImage,
    may_go,
    what_goes,
)
from agent.records.retention.sweeper import Surroundings, Sweeper
from agent.records.station.audit import AuditTrail, audit_page
from agent.sources.folder.custody import SHELF_OF
from experts.expert import Verdict
from tests.lines import result
from tests.waiting import settled

NOW_S = 1_800_000_000.0


def kept(number, verdict=Verdict.OK, age_s=DAY_S, **changes):
    made = KeptImage(f"{number:03}", verdict, NOW_S - age_s, NOW_S - age_s, 10, 0, 1)
    return replace(made, **changes)


def keep(days=None, size=None, free=None, export_required=False):
    return KeepSection.model_construct(days=days, size=size, free=free, export_required=export_required)


def gone(images, limits, free_bytes=None):
    total = sum(image.size_bytes for image in images)
    return [
        (one.image.path, str(one.reason)) for one in what_goes(images, limits, NOW_S, total, free_bytes or {1: 1000})
    ]


def test_free_space_limit_is_applied_per_disk():
    images = [kept(1, Verdict.OK), kept(2, Verdict.NG, device=2), kept(3, Verdict.OK, device=2), kept(4, device=3)]
    assert gone(images, keep(free=100), {1: 100, 2: 85, 3: 99}) == [("003", "free"), ("004", "free"), ("002", "free")]
    assert gone(images, keep(free=100), {1: 0}) == [("001", "free")], "of a disk that is not known, nothing"


def test_young_or_unexported_images_stay():
    images = [
        kept(1, changed_s=NOW_S - YOUNG_S + 1), kept(2, is_exported=False), kept(3, changed_s=NOW_S - YOUNG_S),
    ]  # fmt: skip
    assert gone(images, keep(size=1)) == [("002", "size"), ("003", "size")]
    assert gone(images, keep(size=1, export_required=True)) == [("003", "size")]
    assert gone(images, keep(days=1)) == [], "a day is not more than a day"


SOME_IMAGES = st.lists(
    st.builds(
        kept, st.integers(0, 999), st.sampled_from(list(Verdict)), st.floats(0, 10 * DAY_S),
        size_bytes=st.integers(0, 50), device=st.integers(1, 2), is_exported=st.booleans(),
    ),
    max_size=20,
    unique_by=lambda image: image.path,
)  # fmt: skip
SOME_LIMITS = st.builds(
    keep, st.none() | st.integers(1, 9), st.none() | st.integers(1, 500), st.none() | st.integers(1, 500), st.booleans()
)


@given(images=SOME_IMAGES, limits=SOME_LIMITS, free=st.integers(0, 600))
def test_no_ng_goes_before_an_ok_of_its_disk_under_any_limits(images, limits, free):
    """No NG goes for its room while an OK is left on its disk that may go; nothing unexported goes."""
    total = sum(image.size_bytes for image in images)
    going = list(what_goes(images, limits, NOW_S, total, {1: free, 2: 1000}))
    gone_paths = {one.image.path for one in going}
    assert len(gone_paths) == len(going)
    assert all(may_go(one.image, limits, NOW_S) for one in going)
    left = [image for image in images if image.path not in gone_paths and may_go(image, limits, NOW_S)]
    for one in going:
        if one.reason is KeepingLimit.AGE:
            continue
        for other in left:
            same_disk = one.reason is KeepingLimit.SIZE or other.device == one.image.device
            assert not (same_disk and LAST_TO_GO[other.verdict] < LAST_TO_GO[one.image.verdict]), (one, other)
            if same_disk and other.verdict is one.image.verdict:
                assert other.at_s >= one.image.at_s
    for other in left:
        assert limits.days is None or other.at_s >= NOW_S - limits.days * DAY_S
    if left and limits.size is not None:
        assert total - sum(one.image.size_bytes for one in going) <= limits.size
    needed = [one for one in going if one.reason is KeepingLimit.SIZE]
    if needed:  # and no more than it takes
        size = total - sum(one.image.size_bytes for one in going[: going.index(needed[-1])])
        assert limits.size is not None
        assert size > limits.size


class Line:
    """A store, an archive, the shelves of one folder, and a sweeper under clocks that are set."""

    def __init__(self, folder, limits, **settings):
        self.folder = folder
        self.store = ResultStore(folder / "r.db")
        self.archive = ImageArchive(folder / "images", "all")
        self.shelves = [
            Shelf(folder / "inbox" / name, verdict, is_dated=verdict is not Verdict.UNKNOWN)
            for verdict, name in SHELF_OF.items()
        ]
        self.monotonic_s = 0.0
        self.began = datetime.now(UTC)
        self.ahead_s = 2 * YOUNG_S
        self.free_bytes = 10**12
        surroundings = Surroundings(lambda: self.monotonic_s, self.now, self.free)
        self.sweeper = Sweeper(limits, self.archive, self.shelves, self.store, surroundings=surroundings, **settings)

    def free(self, folder):
        assert folder.is_dir()
        return self.free_bytes - sum(path.stat().st_size for path in self.archive.folder.rglob("*~*"))

    def now(self):
        return self.began + timedelta(seconds=self.ahead_s + self.monotonic_s)

    def sweep(self, after_s=STEADY_S):
        self.sweeper.step()
        for _ in range(2):
            self.monotonic_s += max(after_s / 2, sweeper.ROUND_S)
            for _ in range(60):
                self.sweeper.step()
                settled(self.store)

    def result(self, key, verdict, age_days=0.0, **changes):
        at = self.began - timedelta(days=age_days)
        return result(key, verdict, image=f"{key}.png", arrived_at=at, **changes)

    def archived(self, key, verdict, size_bytes=1000, age_days=0.5):
        relpath = self.archive.keep(key.encode().ljust(size_bytes, b"."), key, self.began - timedelta(days=age_days))
        self.aged(self.archive.folder / relpath, age_days)
        self.store.record(self.result(key, verdict, age_days, kept_as=relpath))
        settled(self.store)
        return self.archive.folder / relpath

    def shelved(self, name, verdict, size_bytes=1000, age_days=0.5):
        at = self.began.astimezone() - timedelta(days=age_days)
        day = "" if verdict is Verdict.UNKNOWN else f"{at:%Y-%m-%d}"
        path = self.folder / "inbox" / SHELF_OF[verdict] / day / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(size_bytes))
        if verdict is Verdict.UNKNOWN:
            path.with_name(f"{path.name}.error.json").write_text("{}")
        self.aged(path, age_days)
        return path

    def aged(self, path, age_days):
        at_s = self.began.timestamp() - age_days * DAY_S
        os.utime(path, (at_s, at_s))

    def asked(self, sql):
        with closing(sqlite3.connect(self.folder / "r.db")) as connection:
            return connection.execute(sql).fetchone()[0]

    def kept_as(self):
        return {row.subject.key: row.kept_as for row in self.store.query()}


@pytest.fixture
def line(tmp_path, request):
    def make(limits, **settings):
        made = Line(tmp_path, limits, **settings)
        request.addfinalizer(made.store.close)
        return made

    return make


def test_images_go_by_size_wherever_they_lie_and_ng_last(line):
    """Retention by size keeps NG longer than OK."""
    one = line(keep(size=3500))
    ng = [one.archived("ng", Verdict.NG, age_days=9.0), one.shelved("ng.png", Verdict.NG, age_days=8.0)]
    unknown = [one.archived("u", Verdict.UNKNOWN), one.shelved("u.png", Verdict.UNKNOWN)]
    ok = [one.archived("ok", Verdict.OK), one.shelved("sub/ok.png", Verdict.OK)]
    one.sweep()
    assert ([path.exists() for path in ok], [path.exists() for path in ng]) == ([False, False], [True, True])
    assert sorted(path.exists() for path in unknown) == [False, True]
    assert {key: relpath is not None for key, relpath in one.kept_as().items() if key != "u"} == {
        "ng": True,
        "ok": False,
    }
    assert not [path for path in one.archive.folder.rglob("*") if path.is_dir() and not any(path.iterdir())]
    assert one.sweeper.alarm is None


@pytest.mark.parametrize("exchanged", ["done", "day", "sub", "archive"])
def test_folder_exchanged_for_a_link_before_a_removal_costs_no_file_behind_the_link(line, exchanged):
    one = line(keep(days=30))
    foreign = one.folder / "foreign"
    path = one.archived("a", Verdict.OK) if exchanged == "archive" else one.shelved("sub/a.png", Verdict.OK)
    link = {"done": path.parents[2], "day": path.parents[1]}.get(exchanged, path.parent)
    marked = (os.fsencode(path), path.stat().st_mtime_ns, "old")
    one.store.write(lambda database: database.execute("INSERT INTO leaving VALUES (?, ?, ?)", marked))
    link.rename(foreign)  # with the image in it
    link.symlink_to(foreign)
    one.sweep()
    assert path.exists()
    assert path.resolve().is_relative_to(foreign)


def test_absent_archive_disk_loses_no_row_and_gets_no_image_in_its_place(line):
    one = line(keep(days=3))
    old = one.archived("old", Verdict.NG, age_days=9.0)
    one.archive.folder.rename(one.folder / "disk")
    with pytest.raises(OSError, match="OFFLINE: it was there and is gone"):
        one.sweep()
    with pytest.raises(OSError, match="OFFLINE: it was there and is gone"):
        one.archive.keep(b"x", "a", one.began)
    assert not one.archive.folder.exists()
    assert list(one.kept_as()) == ["old"]
    (one.folder / "disk").rename(one.archive.folder)
    one.sweep()
    assert not old.exists()


def test_image_of_several_parts_is_kept_by_its_worst_verdict(line):
    one = line(keep(size=1000))
    shared = one.archived("a", Verdict.OK, age_days=5.0)
    one.store.record(one.result("b", Verdict.NG, kept_as=str(shared.relative_to(one.archive.folder))))
    other = one.archived("c", Verdict.OK, age_days=1.0)
    one.sweep()
    assert (shared.exists(), other.exists()) == (True, False)


def test_files_that_are_not_the_agents_are_never_removed(line):
    one = line(keep(size=1, days=1))
    inbox = one.folder / "inbox"
    ours = one.shelved("a.png", Verdict.OK, age_days=5.0)
    names = "new.png done/loose.png done/notes/a.png done/2026-99-99/a.png failed/unexplained.png ng/x.txt"
    others = [inbox / name for name in names.split()]
    others += [one.archive.folder / name for name in ("readme.txt", "2026-01-01/my own.png")]
    for path in others:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"mine")
        one.aged(path, 9.0)
    outside = one.folder / "outside"
    outside.mkdir()
    (outside / "a.png").write_bytes(b"mine")
    one.aged(outside / "a.png", 9.0)
    (inbox / "done" / "2026-01-02").symlink_to(outside)
    (ours.parent / "link.png").symlink_to(outside / "a.png")
    one.sweep()
    assert not ours.exists()
    assert all(path.exists() for path in others)
    assert (outside / "a.png").exists()
    assert (ours.parent / "link.png").is_symlink()


def test_explanation_and_empty_day_folders_are_removed_with_their_file(line):
    one = line(keep(size=1))
    failed, ok = one.shelved("sub/u.png", Verdict.UNKNOWN), one.shelved("sub/deep/ok.png", Verdict.OK)
    one.sweep()
    assert not failed.exists()
    assert not ok.exists()
    assert sorted(path.name for path in (one.folder / "inbox").rglob("*")) == ["done", "failed"]


def test_file_replaced_since_it_was_listed_stays(line):
    one = line(keep(size=1))
    path = one.shelved("a.png", Verdict.OK)
    (seen,) = shelved(one.shelves[0])
    path.write_bytes(b"another one")
    assert not kept_images.remove(path, seen.mtime_ns, one.shelves[0].folder)
    assert path.exists()
    assert kept_images.remove(path, path.stat().st_mtime_ns, one.shelves[0].folder)


def test_old_rows_are_removed_after_their_images_and_files_kept_in_place(line):
    """Where judged files are kept in place, their row is all that says that they were judged."""
    one = line(keep(days=30), is_needed=lambda key: key == "kept")
    old, young = one.archived("old", Verdict.NG, age_days=31.0), one.archived("young", Verdict.OK, age_days=29.0)
    for key, image in (("bare", None), ("kept", None), ("imaged", str(young.relative_to(one.archive.folder)))):
        one.store.record(one.result(key, Verdict.NG, 40.0, kept_as=image))
    for serial, age_days in (("B1", 31.0), ("B2", 29.0)):
        at = one.began - timedelta(days=age_days)
        one.store.record_board(BoardVerdict(serial, "main", Verdict.OK, at, at, {}, {}))
        trail = AuditTrail(one.store, lambda at=at: at)
        trail.record("ann", "admin", "reload", serial, "done", "ab")
        trail.record("ann", "admin", "reload", serial, "not applied: a mistake", "ab")
        trail.record("plc", "operate", "trigger", serial, "done", "ab")
    settled(one.store)
    one.sweep()
    one.sweep(0.0)
    assert (old.exists(), young.exists()) == (False, True)
    assert list(one.kept_as()) == ["young", "kept", "imaged"]
    assert [row.serial for row in one.store.boards()] == ["B2"]
    told = [(entry.action, entry.outcome[:3], entry.subject) for entry in audit_page(one.store.path)]
    assert told == [("trigger", "don", "B2"), ("reload", "not", "B2"), ("reload", "don", "B2"), ("reload", "don", "B1")]


def test_sequence_number_is_never_reused_and_the_file_shrinks(line):
    one = line(keep(days=30))
    for number in range(2000):
        one.store.record(one.result(f"k{number}", Verdict.OK, 40.0, reason="x" * 1000))
    settled(one.store)
    before = one.asked("PRAGMA page_count")
    one.sweep()
    one.store.record(one.result("new", Verdict.OK))
    settled(one.store)
    assert [row.seq for row in one.store.query()] == [2001]
    assert one.asked("PRAGMA page_count") < before / 4


def test_file_that_cannot_be_removed_blocks_no_other(line, monkeypatch, caplog):
    one = line(keep(size=1500))
    stuck, other, young = (one.shelved(f"{day}.png", Verdict.OK, age_days=day) for day in (3.0, 2.0, 1.0))
    refused = {stuck}

    def refusing(path, mtime_ns, shelf):
        if path in refused:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return kept_images.remove(path, mtime_ns, shelf)

    monkeypatch.setattr(sweeper, "remove", refusing)
    one.sweep()
    one.sweep()
    assert [path.exists() for path in (stuck, other, young)] == [True, False, False]
    told = {record.getMessage() for record in caplog.records}
    assert f"image_not_removed file={stuck} reason=Permission denied: others go instead of it" in told
    refused.clear()
    one.sweep()
    assert not stuck.exists(), "it was marked, and goes as soon as it can"
    assert one.asked("SELECT count(*) FROM leaving") == 0


def test_age_counts_only_once_the_clock_has_run_evenly_for_an_hour(line):
    one = line(keep(days=30))
    path = one.archived("a", Verdict.OK, age_days=1.0)
    one.sweep(STEADY_S / 4)
    one.ahead_s += 10 * 365 * DAY_S
    one.sweep(STEADY_S / 2)
    one.ahead_s -= 10 * 365 * DAY_S
    one.sweep(STEADY_S * 2)
    assert path.exists()
    assert list(one.kept_as()) == ["a"]
    one.ahead_s += 30 * DAY_S
    one.sweep(STEADY_S / 2)
    assert path.exists()
    one.sweep(STEADY_S)
    one.sweep(STEADY_S)
    assert not path.exists()


def exported(one, days_ago):
    section = ExportSection.model_construct(folder=one.folder / "out", format="csv")
    now_s, before = [0.0], set((one.folder / "out").glob("results-*.csv"))
    export = ResultExport(section, "demo", one.store, lambda: one.began - timedelta(days=days_ago), lambda: now_s[0])
    now_s[0] = FIRST_S
    while set((one.folder / "out").glob("results-*.csv")) == before:
        export.step()
    settled(one.store)


def test_unexported_rows_and_images_stay_if_export_is_required(line):
    """Never deletes unexported rows, nor their images."""
    one = line(keep(days=5, size=1, export_required=True))
    old = one.archived("old", Verdict.OK, age_days=20.0)
    put_away = one.shelved("a.png", Verdict.OK, age_days=20.0)
    orphan = one.archive.folder / one.archive.keep(b"an image without a result", "orphan", one.began)
    one.sweep()
    one.sweep(0.0)
    assert (old.exists(), put_away.exists()) == (True, True)
    assert list(one.kept_as()) == ["old"]
    assert "images take 2025 bytes, 1 are wanted" in str(one.sweeper.alarm)
    exported(one, 15.0)
    new = one.archived("new", Verdict.OK, age_days=10.0)
    one.store.record(one.result("late", Verdict.OK, 20.0))
    one.sweep()
    one.sweep(0.0)
    assert (old.exists(), new.exists(), put_away.exists()) == (False, True, True), "it was put away after that export"
    assert list(one.kept_as()) == ["new", "late"]
    exported(one, -2.0)
    one.sweep()
    assert [path.exists() for path in (new, put_away, orphan)] == [False, True, True], "its clock was ahead"
    one.sweep(2 * DAY_S + STEADY_S)
    one.sweep(0.0)
    assert (put_away.exists(), orphan.exists()) == (False, False)
    assert list(one.kept_as()) == []


def test_images_are_removed_for_free_space_and_a_missed_limit_is_logged_once(line, caplog):
    one = line(keep(free=5000))
    ok, ng = one.archived("ok", Verdict.OK), one.archived("ng", Verdict.NG)
    one.free_bytes = 6500
    one.sweep()
    assert (ok.exists(), ng.exists()) == (False, True)
    one.free_bytes = 1010
    one.sweep(0.0)
    one.sweep(0.0)
    assert not ng.exists()
    assert "bytes are free, 5000 are wanted" in str(one.sweeper.alarm)
    one.free_bytes = 10**6
    one.sweep(0.0)
    assert one.sweeper.alarm is None
    told = [record.getMessage().split(" ")[0] for record in caplog.records if record.levelname != "INFO"]
    assert told == ["retention_short", "retention_holds"]


def test_more_images_than_one_round_decides_about_go_in_the_next_at_once(line, monkeypatch):
    monkeypatch.setattr(sweeper, "CANDIDATES", 5)
    monkeypatch.setattr(sweeper, "STEP_FILES", 3)
    monkeypatch.setattr(sweeper, "STEP_REMOVALS", 2)
    one = line(keep(size=1500))
    paths = [one.archived(f"k{number:02}", Verdict.OK, age_days=1.0 - number / 100) for number in range(30)]
    ng = one.archived("ng", Verdict.NG, age_days=3.0)
    for _ in range(1000):
        one.sweeper.step()
        settled(one.store)
    assert [path.exists() for path in paths] == [False] * 30
    assert ng.exists()


KILLED = """
import os, signal, sys, time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from agent.records.retention.archive import ImageArchive
from agent.records.retention.kept_images import Shelf
from agent.records.result_writer import ResultStore
from agent.line_file.records import KeepSection
from agent.records.retention.sweeper import Surroundings, Sweeper
from experts.expert import Verdict

folder, steps, removals = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
store = ResultStore(folder / "r.db")
archive = ImageArchive(folder / "images", "all")
shelf = Shelf(folder / "inbox" / "done", Verdict.OK)
later = datetime.now(UTC) + timedelta(hours=2)
limits = KeepSection.model_construct(size=None if sys.argv[4:] else 1)
sweeper = Sweeper(limits, archive, [shelf], store, surroundings=Surroundings(wall=lambda: later))
remove = sweeper._remove_file
def counted(path, mtime_ns):
    global removals
    removals -= 1
    if removals == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return remove(path, mtime_ns)
sweeper._remove_file = counted
for _ in range(steps):
    sweeper.step()
    while store.statistics().pending:
        time.sleep(0.001)
store.close()
"""


@pytest.mark.parametrize(("removals", "without_limits"), [(1, False), (2, False), (4, False), (1, True)])
def test_killed_between_mark_and_removal_no_result_names_a_file_that_is_gone(line, forks, removals, without_limits):
    one = line(keep())
    for number in range(3):
        one.archived(f"k{number}", Verdict.OK)
    one.shelved("a.png", Verdict.OK)
    one.store.close()

    def run(steps, removals, *mode):
        return forks.run(KILLED, one.folder, steps, removals, *mode).returncode

    def images():
        return {path.name for path in one.folder.rglob("*") if path.is_file() and path.parent.name[:2] == "20"}

    assert run(60, removals) < 0
    if without_limits:
        assert run(60, 1000, "no limits") == 0
        assert len(images()) == 0, "what was marked goes, whatever the line file says by now"
        return
    assert len(images()) == 4 - (removals - 1)
    named = {row.kept_as for row in ResultReader(one.folder / "r.db").query()} - {None}
    assert all((one.folder / "images" / str(each)).exists() for each in named)
    assert (run(60, 1000), images()) == (0, set())
    assert one.asked("SELECT count(*) FROM leaving") == 0
