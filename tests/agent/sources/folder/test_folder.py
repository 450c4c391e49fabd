"""A watched folder under a virtual clock, with real files and renames."""

import errno
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from agent.sources.folder.files.inbox import Found, Inbox, is_own, lease_of
from agent.sources.folder.files.naming import Naming
from agent.sources.folder.files.readiness import Evidence, Lease, Rule, Sighting, WaitingFile
from agent.sources.folder.files.selection import FileSelection
from agent.sources.folder.folder import FolderSource
from agent.sources.folder.waiting import WaitingFiles
from agent.sources.folder.watch import FolderWatch, Hint, SourceState
from agent.subject import part_key
from experts.expert import Verdict
from tests.agent.sources.folder.lines import (
    IMAGES,
    NAMING,
    NOON,
    PATTERN,
    PNG,
    WAIT_S,
    Line,
    LiveLine,
    identity,
    identity_of,
    without_case,
)
from tests.pictures import encoded
from tests.waiting import until

FILES = 2000
TRUNCATED = "truncated: the end of the image is missing"


@pytest.fixture
def line(tmp_path):
    return Line(tmp_path / "inbox")


def test_file_name_gives_board_component_and_ref():
    assert NAMING.read("sub/b1_r_R7.png") == identity("b1", "r", "R7", "main")
    constant = Naming(re.compile(r"(?P<board>\w+)/(?P<ref>\w+)\.png"), frozenset({"r"}), component="r")
    assert constant.read("b1/R7.png") == identity("b1", "r", "R7", None)
    typed = Naming(re.compile(r"(?P<type>\w+)-" + PATTERN), frozenset({"r"}), ("one", "two"))
    assert typed.read("two-b1_r_R7.png")["board_type"] == "two"


HIDDEN = (".x.png", ".sub/x.png", ".work/demo/x.png", ".~lock.x#", "~$x.png")
UNFINISHED = ("x.png.part", "x.TMP", "up.tmp/x.png", "x.filepart", "x.crdownload", "x.png.done")
SHELVED = ("done/x.png", "ng/2026-01-01/x.png", "failed/x.png")


@pytest.mark.parametrize("relpath", [*HIDDEN, *UNFINISHED, *SHELVED])
def test_unfinished_names_and_the_agents_own_folders_are_ignored(relpath):
    assert FileSelection().ignores(relpath) or is_own(relpath)
    assert not is_own("sub/done/x.png")


@pytest.mark.parametrize("suffix", IMAGES)
def test_file_written_in_slow_chunks_is_offered_after_its_last_byte(line, suffix):
    content = IMAGES[suffix]
    with (line.root / f"b1_r_R7.{suffix}").open("wb") as file:
        for part in range(10):
            file.write(content[len(content) * part // 10 : len(content) * (part + 1) // 10])
            file.flush()
            line.run(5)
            assert line.arrivals == [], part
    line.run(15)
    (arrival,) = line.arrivals
    assert arrival.file.path.read_bytes() == content
    assert (arrival.subject.image, arrival.subject.arrived_at) == (f"b1_r_R7.{suffix}", NOON)
    assert identity_of(arrival.subject) == identity("b1", "r", "R7", "main")


@pytest.mark.parametrize("suffix", IMAGES)
def test_truncated_file_of_a_killed_writer_is_refused_at_last_and_never_offered(line, suffix):
    name = f"b1_r_R7.{suffix}"
    (line.root / name).write_bytes(IMAGES[suffix][: len(IMAGES[suffix]) // 2])
    line.run(59)
    assert (line.files(), line.refusals) == ({name}, [])
    line.run(10)
    assert line.refused == {name: TRUNCATED}
    assert (line.files(), line.arrivals) == ({f"failed/{name}", f"failed/{name}.error.json"}, [])


def test_incomplete_file_with_a_done_marker_is_refused_at_once(tmp_path):
    line = Line(tmp_path / "inbox", ready="rename")
    (line.root / "b1_r_R1.png").write_bytes(PNG[: len(PNG) // 2])
    (line.root / "b1_r_R2.png").touch()
    line.run(3)
    assert line.refused == {"b1_r_R1.png": TRUNCATED, "b1_r_R2.png": "the file is empty"}


@pytest.mark.parametrize("suffix", IMAGES)
@pytest.mark.parametrize("kept", [0.0, 0.3, 0.7])
def test_preallocated_file_is_not_offered_before_it_is_filled(line, suffix, kept):
    content, file = IMAGES[suffix], line.root / f"b1_r_R7.{suffix}"
    file.write_bytes(content[: int(len(content) * kept)].ljust(len(content), b"\0"))
    line.run(3)
    assert line.arrivals == []
    with file.open("r+b") as stream:
        stream.write(content)
    line.run(5)
    assert line.arrivals[0].file.path.read_bytes() == content


def test_damaged_file_closed_by_its_writer_is_offered_without_a_wait(line):
    name = "b1_r_R7.png"
    (line.root / name).write_bytes(PNG[:33] + bytes(len(PNG) - 45) + PNG[-12:])
    line.run(5)
    assert line.offered == []  # nobody saw it closed: the hole may still be filled
    line.source._note(Hint(name, Evidence.CLOSED))
    line.run(1)
    assert line.offered == [name]


def test_file_that_its_writer_holds_open_is_not_offered(line):
    with (line.root / "b1_r_R7.png").open("wb") as file:
        file.write(PNG)
        file.flush()
        if lease_of(os.open(line.root / "b1_r_R7.png", os.O_RDONLY)) is Lease.UNKNOWN:
            pytest.skip("this filesystem grants no leases")
        line.run(100)
        assert (line.arrivals, line.source._waiting.stale) == ([], {"b1_r_R7.png"})
    with (line.root / "b1_r_R7.png").open("rb"):  # a reader holds nobody up
        line.run(1)
    assert line.offered == ["b1_r_R7.png"]


def test_files_from_before_the_start_are_offered_after_claimed_ones_oldest_first(line):
    """The oldest first, however they are called."""

    def write(names, age_s):
        for number, name in enumerate(names):
            line.write(name)
            os.utime(line.root / name, (1_000_000 - number * age_s,) * 2)

    write(before := [f"b1_r_A{number:02}.png" for number in range(20)], 1)
    line.room = 5
    line.run(5)
    assert line.offered == before[:14:-1]
    write([f"b1_r_B{number}.png" for number in range(10)], 100)  # while it is stopped
    again = Line(line.root)
    again.run(5)
    assert again.offered[:5] == line.offered
    ages = [int(arrival.file.path.stat().st_mtime) for arrival in again.arrivals[5:]]
    assert (len(ages), ages) == (25, sorted(ages))


def test_files_from_before_the_start_may_be_ignored(tmp_path):
    line = Line(tmp_path / "inbox", ignore_existing=True)
    line.write(*(f"b1_r_R{number}.png" for number in (1, 2)))
    line.run(5)
    line.arrive("b1_r_R2.png", "b1_r_R3.png")
    assert sorted(line.offered) == ["b1_r_R2.png", "b1_r_R3.png"]


@pytest.mark.parametrize("after", ["move", "keep"])
def test_new_bytes_under_an_old_name_are_a_new_inspection(tmp_path, after):
    line = Line(tmp_path / "inbox", after=after)
    first, second = (line.arrive("b1_r_R1.png") for _ in range(2))
    assert first.subject.key != second.subject.key
    line.settle()
    if after == "move":
        assert sum(bool(re.fullmatch(r"done/.*/b1_r_R1(~[0-9a-fn-]+)?\.png", name)) for name in line.files()) == 2


def test_file_that_cannot_be_put_back_is_held_logged_once_and_retried(line, caplog, monkeypatch):
    first = line.arrive("b1_r_R7.png")

    def refused(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(Inbox, "unclaim", refused)
        line.source._image_changed(first)
        line.run(30)
        assert (len(line.arrivals), line.source.held) == (1, 1)
    line.run(10)
    assert caplog.text.count("intake_not_put_back") == 1
    assert line.offered == [first.subject.image] * 2


def test_file_that_cannot_be_claimed_is_logged_once_and_tried_with_backoff(line, caplog, monkeypatch):
    claim, tries = Inbox.claim, []

    def refusing(inbox, relpath, sighting):
        if relpath == "locked/b1_r_R1.png":
            tries.append(line.now)
            raise OSError(errno.EACCES, "Permission denied")
        return claim(inbox, relpath, sighting)

    monkeypatch.setattr(Inbox, "claim", refusing)
    (line.root / "locked").mkdir()
    line.write("locked/b1_r_R1.png")
    for number in range(40):
        line.write(f"b1_r_N{number}.png")
        line.run(20)
    assert len(line.arrivals) == 40
    assert caplog.text.count("intake_not_claimed") == 1
    assert 15 <= len(tries) <= 22  # of 400 polls
    assert max(later - earlier for earlier, later in pairwise(tries)) < 64


def test_files_wait_in_the_folder_while_there_is_no_room(line):
    line.room = 1
    line.write(*(f"b1_r_R{number}.png" for number in range(5)))
    line.run(90)
    assert (len(line.arrivals), line.source.status().waiting, line.source._waiting.stale) == (1, 4, set())
    line.room = 10_000
    line.run(1)
    assert len(line.arrivals) == 5


class Exhaustive:
    """What `WaitingFiles` answers, found by asking the rule about every file at every step."""

    def __init__(self, rule):
        self.rule = rule
        self.candidates = {}
        self.stale = set()

    def put(self, candidate, is_new):
        self.candidates[candidate.relpath] = candidate
        self.stale -= {candidate.relpath} if is_new else set()

    def first_due(self, now):
        due = [one for one in self.candidates.values() if self.rule.is_due(one, now)]
        return min(due, key=lambda one: (one.sighting.mtime_ns, one.relpath), default=None)

    def find_stale(self, now):
        at = {name: self.rule.stale_at(one) for name, one in self.candidates.items()}
        news = {name for name, stale_at in at.items() if stale_at is not None and stale_at <= now} - self.stale
        self.stale |= news
        return tuple(sorted(news))


STEPS = st.lists(
    st.tuples(st.sampled_from(["see", "mark", "forget", "postpone", "wait"]), st.integers(0, 4), st.integers(0, 3)),
    max_size=60,
)


@given(STEPS, st.sampled_from(["auto", "marker", "stable"]))
def test_waiting_files_equal_an_exhaustive_model(steps, mode):
    rule = Rule(mode, stale_after_s=6.0)
    waiting, exhaustive, now = WaitingFiles(rule), Exhaustive(rule), 0.0
    for what, number, amount in steps:
        name = f"{number}.png"
        known = exhaustive.candidates.get(name)
        if what in {"see", "mark"}:
            found = Found(name, Sighting(number, amount, -amount), is_marked=what == "mark")
            waiting.see(found, now)
            seen = known.seen(found.sighting, now) if known else WaitingFile(name, found.sighting, now)
            exhaustive.put(seen.shown(Evidence.MARKED if found.is_marked else Evidence.NONE), seen is not known)
        elif what == "forget":
            waiting.forget(name)
            exhaustive.candidates.pop(name, None)
            exhaustive.stale.discard(name)
        elif what == "postpone":
            waiting.postpone(name, now + amount)
            if known:
                exhaustive.put(known.postponed(now + amount), is_new=False)
        else:
            now += amount
        assert waiting.first_due(now) == exhaustive.first_due(now)
        assert len(waiting) == len(exhaustive.candidates)
        if amount % 2:
            assert waiting.find_stale(now) == exhaustive.find_stale(now)
            assert waiting.stale == exhaustive.stale


def test_slow_rescan_takes_at_most_a_tenth_of_the_time(line):
    """The clock advances by a second with each reading: each scan lasts one."""
    scans, scan = [], line.source._inbox.scan
    line.source._inbox.scan = lambda: scans.append(line.now) or scan()
    line.source._clock = lambda: setattr(line, "now", line.now + 1.0) or line.now
    line.source.step(line.now)
    scans.clear()
    while line.now < 1000.0:
        line.source._note(Hint(None))
        line.source._note(Hint("b1_r_R1.done"))
        line.source.step(line.now)
        line.now += 0.5
    assert 90 <= len(scans) <= 100


def test_done_marker_offers_its_file_without_a_rescan(tmp_path):
    line = Line(tmp_path / "inbox", ready="marker", poll_s=60)
    line.write(*(f"b1_r_R{number}.png" for number in (1, 2)))
    line.run(130)
    assert (line.arrivals, line.source._waiting.stale) == ([], {"b1_r_R1.png", "b1_r_R2.png"})
    (line.root / "b1_r_R1.png.done").touch()
    line.source._note(Hint("b1_r_R1.png.done", Evidence.CLOSED))
    line.run(1)
    assert line.offered == ["b1_r_R1.png"]
    (line.root / "b1_r_R2.done").touch()  # whose file this is only a rescan tells
    line.source._note(Hint("b1_r_R2.done", Evidence.CLOSED))
    line.run(1)
    assert line.offered == ["b1_r_R1.png", "b1_r_R2.png"]
    assert all(name.startswith(".work/") for name in line.files())


def test_unjudgeable_file_goes_to_failed_with_its_reason_and_harms_no_other(line, tmp_path):
    outside = tmp_path / "secret.png"
    outside.write_bytes(PNG)
    line.write("b1_r_R1.png", "noname.png", "b1_x_R1.png", os.fsdecode(b"b1_r_\xff.png"))
    (line.root / "b1_r_R2.png").touch()
    (line.root / "b1_r_R3.png").symlink_to(outside)
    (line.root / "sub.png").symlink_to(tmp_path)
    os.mkfifo(line.root / "b1_r_R4.png")
    line.run(70)
    assert line.offered == ["b1_r_R1.png"]
    reasons = {
        "noname.png": "the name does not match",
        "b1_x_R1.png": "no route for the component 'x'",
        "b1_r_R2.png": "the file is empty",
        "b1_r_R3.png": "a symbolic link",
        "sub.png": "a symbolic link",
        "b1_r_R4.png": "not a regular file",
        "b1_r_\\xff.png": "the name is not UTF-8",
    }
    assert line.refused.keys() == reasons.keys()
    for name, reason in reasons.items():
        assert line.refused[name].startswith(reason)
    failed = os.listdir(os.fsencode(line.root / "failed"))
    assert (len(failed), b"b1_r_\xff.png.error.json" in failed) == (2 * len(reasons), True)
    explained = json.loads((line.root / "failed/noname.png.error.json").read_text())
    assert explained["reason"].startswith("the name does not match the pattern")
    assert outside.read_bytes() == PNG
    assert line.source.status().received == 1 + len(reasons)


FOREIGN = ("Thumbs.db", "desktop.ini", "#recycle/b1_r_R2.png", "@eaDir/b1_r_R3.png", "~snapshot/h/b1_r_R4.png")
FOREIGN += ("$RECYCLE.BIN/b1_r_R5.png", "System Volume Information/b1_r_R6.png", "b1_r_R1_preview.png")
LEFT_ALONE = ("b1_r_R1.xml", "b1_r_R2.XML", "aoi.log", "index.mdb", "b1_r_R1.png.bak", "README", "b1_r_R9.png-old")


def test_foreign_files_stay_and_are_logged_once_per_ending(tmp_path, caplog):
    line = Line(tmp_path / "inbox", ignore=["*_Preview.*"], poll_s=0.5)
    for name in (*FOREIGN, *LEFT_ALONE):
        (line.root / name).parent.mkdir(parents=True, exist_ok=True)
        (line.root / name).write_bytes(PNG)
    (line.root / "link").symlink_to(tmp_path)
    line.write("b1_r_R1.png", "b1_r_R0.JPEG")
    line.run(5)
    line.settle(seconds=200)
    assert (sorted(line.offered), line.refused) == (["b1_r_R0.JPEG", "b1_r_R1.png"], {})
    assert {name for name in line.files() if not name.startswith("done/")} == {*FOREIGN, *LEFT_ALONE}
    assert (line.root / "link").is_symlink()
    assert line.source.status().left_alone == len(LEFT_ALONE) + 1
    told = re.findall(r"intake_left_alone folder=\S+ ending='(.*?)'", caplog.text)
    assert sorted(told) == ["", ".bak", ".log", ".mdb", ".png-old", ".xml"]
    assert "Thumbs" not in caplog.text


@pytest.mark.parametrize(
    ("pattern", "taken"),
    [
        (PATTERN, {"png"}),
        (PATTERN.replace(r"\.\w+", r"\.(dat|png)"), {"dat", "png"}),
        (PATTERN.replace(r"\.\w+", r"\.\d+"), {"001"}),
        (PATTERN.replace(r"[^.]+)\.\w+", "[^.]+)"), {""}),
        (PATTERN.replace(r"[^.]+)\.\w+", ".+)"), {"png"}),
    ],
)
def test_ending_of_no_image_is_taken_only_if_the_pattern_names_it(tmp_path, pattern, taken):
    line = Line(tmp_path / "inbox", pattern=pattern)
    line.name_by(replace(NAMING, pattern=re.compile(pattern)))
    for ending in ("png", "dat", "001", ""):
        line.write(f"b1_r_R{ending}.{ending}".rstrip("."))
    line.run(70)
    assert {name.partition(".")[2] for name in line.offered} == taken


def test_broken_image_is_refused_with_an_ending_in_any_case(line):
    (line.root / "b1_r_R1.PNG").write_bytes(PNG[:-20])
    line.run(70)
    assert line.refused == {"b1_r_R1.PNG": TRUNCATED}


@pytest.mark.parametrize("marker", ["b1_r_R1.png.DONE", "b1_r_R1.Done", "b1_r_R1.done"])
def test_ending_of_a_done_marker_may_have_any_case(tmp_path, marker):
    line = Line(tmp_path / "inbox", ready="marker")
    line.write("b1_r_R1.png")
    line.run(10)
    assert line.offered == []
    (line.root / marker).touch()
    line.run(5)
    assert (line.offered, line.files() - {f".work/{name}" for name in os.listdir(line.root / ".work")}) == (
        ["b1_r_R1.png"],
        {str(line.arrivals[0].file.path.relative_to(line.root))},
    )


@contextmanager
def exfat_disk(folder):
    """A real disk without case, by a loop device. Skips the test where it cannot be had."""

    def run(*command):
        if shutil.which(command[0]) is None:
            return None
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        return None if ended.returncode else ended.stdout.strip()

    folder.mkdir()
    image = folder.with_suffix(".img")
    with image.open("wb") as file:
        file.truncate(32 * 1024 * 1024)
    if run("mkfs.exfat", str(image)) is None or not (device := run("losetup", "-f", "--show", str(image))):
        pytest.skip("mkfs.exfat or a loop device is missing here")
    try:
        run("mount", "-t", "exfat", device, str(folder))
        if not folder.is_mount():
            run("mount.exfat-fuse", device, str(folder))
        if not folder.is_mount():
            pytest.skip("exFAT cannot be mounted here")
        yield
    finally:
        run("umount", str(folder))
        run("losetup", "-d", device)


class TestDiskWithoutCase:
    """exFAT, CIFS: a folder that the AOI calls `NG` is the agent's `ng`."""

    @pytest.fixture(params=["imitated", "exfat"])
    def disk(self, request, tmp_path, monkeypatch):
        with without_case(monkeypatch, tmp_path) if request.param == "imitated" else exfat_disk(tmp_path / "disk"):
            yield tmp_path if request.param == "imitated" else tmp_path / "disk"

    @pytest.fixture
    def line(self, disk):
        return Line(disk / "inbox", poll_s=0.5)

    def test_folder_that_equals_a_shelf_but_for_case_gives_no_image_and_an_alarm(self, line, caplog):
        (line.root / "NG").mkdir()
        line.write("NG/b1_r_R2.png", "b1_r_R1.png")
        line.run(5)
        line.settle(Verdict.NG, seconds=100)
        assert line.offered == ["b1_r_R1.png"]
        assert line.files() == {"NG/b1_r_R2.png", "NG/2026-05-01/b1_r_R1.png"}
        assert "NG is the agent's own folder ng" in str(line.source.status().alarm)
        assert caplog.text.count("intake_shelf_shared") == 1
        (line.root / "aoi").mkdir()
        (line.root / "NG" / "b1_r_R2.png").rename(line.root / "aoi" / "b1_r_R2.png")
        (line.root / "NG").rename(line.root / "shelf")
        (line.root / "shelf").rename(line.root / "ng")
        line.run(5)
        assert (line.source.status().alarm, line.offered) == (None, ["b1_r_R1.png", "aoi/b1_r_R2.png"])

    def test_images_written_into_a_shelf_by_another_program_raise_an_alarm(self, line):
        line.arrive("b1_r_R1.png")
        line.settle(Verdict.OK)
        assert line.source.status().alarm is None
        line.write("done/b1_r_R2.png")  # into DONE, as the writer calls it
        line.run(5)
        assert "done is the agent's own folder done" in str(line.source.status().alarm)

    def test_folder_that_differs_from_a_shelf_by_case_is_read_on_a_case_sensitive_disk(self, tmp_path):
        line = Line(tmp_path / "other")
        (line.root / "NG").mkdir()
        (line.root / "ng").mkdir()
        line.write("NG/b1_r_R1.png")
        line.run(5)
        assert (line.offered, line.source.status().alarm) == (["NG/b1_r_R1.png"], None)

    def test_sidecar_in_other_case_belongs_to_its_image(self, disk):
        line = Line(disk / "sidecars", identity="sidecar")
        line.write("A.PNG")
        (line.root / "a.json").write_text('{"board": "b1", "component": "r", "ref": "R1"}')
        line.run(5)
        line.settle()
        assert (line.offered, line.refused) == (["A.PNG"], {})
        assert line.files() == {"done/2026-05-01/A.PNG", "done/2026-05-01/A.json"}


def test_refused_file_stays_until_its_verdict_is_stored(line):
    line.stores_refusals = False
    line.write("noname.png")
    line.run(5)
    (refusal,) = line.refusals
    assert (line.files(), line.source.held) == ({"noname.png"}, 1)
    again = Line(line.root)
    again.run(5)
    assert [one.subject.key for one in again.refusals] == [refusal.subject.key]
    assert (again.files(), again.source.held) == ({"failed/noname.png", "failed/noname.png.error.json"}, 0)


def test_new_file_under_a_refused_files_name_is_examined_itself(line):
    line.stores_refusals = False
    (line.root / "b1_r_R1.png").touch()
    line.run(70)
    assert line.refused == {"b1_r_R1.png": "the file is empty"}
    (line.root / "b1_r_R1.png").write_bytes(PNG)
    line.source.verdict_committed(line.refusals[0].subject, Verdict.UNKNOWN, "empty")
    line.run(5)
    assert line.offered == ["b1_r_R1.png"]
    assert line.arrivals[0].file.path.read_bytes() == PNG


def test_refused_file_with_a_matching_name_belongs_to_its_board(line):
    line.write("b7_nobody_R1.png", os.fsdecode(b"b7_r_\xff.png"))
    (line.root / "b7_r_R1.png").write_bytes(PNG[:-20])
    line.run(70)
    names = {refusal.subject.image: identity_of(refusal.subject) for refusal in line.refusals}
    nothing = identity(None, None, None, None)
    known = identity("b7", "r", "R1", "main")
    assert names == {"b7_r_R1.png": known, "b7_nobody_R1.png": nothing, "b7_r_\\xff.png": nothing}
    assert all(refusal.subject.key.isprintable() for refusal in line.refusals)


def test_claimed_file_is_offered_again_after_a_restart_under_the_same_key(line):
    (line.root / "sub").mkdir()
    line.arrive("b1_r_R1.png", "sub/b1_r_R2.png")
    again = Line(line.root)
    again.run(1)
    known, found = ({(one.subject.key, one.file.path) for one in each.arrivals} for each in (line, again))
    assert (found, again.offered) == (known, line.offered)
    again.settle(Verdict.NG, 1)
    assert again.files() == {"ng/2026-05-01/b1_r_R1.png", "ng/2026-05-01/sub/b1_r_R2.png"}


def test_crash_between_the_two_halves_of_a_move_is_repaired(line):
    line.arrive("b1_r_R1.png")
    shelf = line.root / "done" / "2026-05-01"
    shelf.mkdir(parents=True)
    os.link(line.arrivals[0].file.path, shelf / "b1_r_R1.png")
    again = Line(line.root)
    again.run(1)
    assert again.arrivals[0].subject.key == line.arrivals[0].subject.key
    again.settle(seconds=1)
    assert again.files() == {"done/2026-05-01/b1_r_R1.png"}


def test_recovered_file_whose_name_no_longer_matches_is_refused(line):
    line.arrive("b1_r_R1.png")
    again = Line(line.root)
    again.name_by(replace(NAMING, components=frozenset({"c"})))
    again.run(1)
    assert again.refused == {"b1_r_R1.png": "no route for the component 'r'"}
    assert again.files() == {"failed/b1_r_R1.png", "failed/b1_r_R1.png.error.json"}


def test_two_agents_on_one_folder_get_each_file_once(tmp_path):
    lines = [Line(tmp_path / "inbox", owner=owner) for owner in ("one", "two")]
    names = sorted(f"b1_r_R{number}.png" for number in range(200))
    lines[0].write(*names)
    for line in lines:
        line.source.step(0.0)
    threads = [threading.Thread(target=line.source.step, args=(5.0,)) for line in lines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(name for line in lines for name in line.offered) == names
    restarted = Line(tmp_path / "inbox", owner="one")
    restarted.run(1)
    assert sorted(restarted.offered) == sorted(lines[0].offered)


def test_vanished_folder_is_offline_and_resumes(line):
    line.arrive("b1_r_R1.png")
    moved = line.root.with_name("unmounted")
    line.root.rename(moved)
    line.settle()
    status = line.source.status()
    assert (status.state, line.source.held, status.alarm) == ("offline", 1, "the folder is gone")
    assert not line.root.exists()
    moved.rename(line.root)
    line.write("b1_r_R2.png")
    line.run(40)
    status = line.source.status()
    assert (status.state, status.alarm, line.offered) == ("online", None, ["b1_r_R1.png", "b1_r_R2.png"])
    assert "done/2026-05-01/b1_r_R1.png" in line.files()


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), ValueError("of the program's own")])
def test_any_error_between_claim_and_offer_delays_the_file(line, monkeypatch, error):
    sighting, failures = Inbox.sighting, [error]

    def fail_once(inbox, claimed):
        if failures:
            raise failures.pop()
        return sighting(inbox, claimed)

    monkeypatch.setattr(Inbox, "sighting", fail_once)
    line.write(*(f"b1_r_R{number}.png" for number in (1, 2)))
    with suppress(ValueError):  # the boundary of the thread
        line.run(3)
    line.run(3)
    assert sorted(line.offered) == ["b1_r_R1.png", "b1_r_R2.png"]


def test_files_waiting_for_room_after_a_restart_are_offered_once(line):
    line.arrive(*(f"b1_r_R{number}.png" for number in range(6)))
    again = Line(line.root)
    again.room = 2
    again.run(40)
    assert (len(again.arrivals), again.source.status().waiting) == (2, 4)
    again.room = 10
    again.run(40)
    assert len(again.arrivals) == len({arrival.subject.key for arrival in again.arrivals}) == 6


def test_files_that_cannot_be_put_away_are_held_logged_and_retried(line, caplog):
    (line.root / "done").write_text("a file where the shelf should be")
    line.has_room = lambda _: line.source.held < 4
    line.write(*(f"b1_r_R{number}.png" for number in range(9)))
    line.run(5)
    line.settle(seconds=40)
    assert (len(line.arrivals), line.source.held) == (4, 4)
    assert line.source.status().alarm is not None
    assert caplog.text.count("intake_not_filed") == 1
    (line.root / "done").unlink()
    line.run(40)
    assert (len(line.arrivals), line.source.held) == (8, 4)


def test_files_arrive_once_by_write_rename_and_link(tmp_path):
    root, beside = tmp_path / "inbox", tmp_path / "beside"
    beside.mkdir()
    names = ["b1_r_R0.png", "b1_r_R1.png", "b1_r_R2.png", "new/deep/b1_r_R3.png", "b1_r_R4.png"]
    for name in names[1:3]:
        (beside / name).write_bytes(PNG)
    with LiveLine(root, settle_ms=50, poll_s=0.1) as service:
        (root / "new" / "deep").mkdir(parents=True)
        service.write(names[0], names[3], f"{names[4]}.part")
        (beside / names[1]).rename(root / names[1])
        os.link(beside / names[2], root / names[2])
        (beside / names[2]).unlink()
        (root / f"{names[4]}.part").rename(root / names[4])
        for _ in names:
            service.source.verdict_committed(service.next().subject, Verdict.OK, None)
    assert service.came.empty()
    assert service.files() == {f"done/2026-05-01/{name}" for name in names}
    assert service.source.status().state == "stopped"


def test_changes_in_the_agents_own_folders_give_no_hint(tmp_path):
    inbox, hints = Inbox(tmp_path, "demo"), queue.Queue[Hint]()
    (tmp_path / "sub").mkdir()
    watch = FolderWatch(tmp_path, hints.put)
    watch.go_online(has_thread=True)
    if watch.is_polled:
        pytest.skip("this system tells no changes")

    def next_hint():
        return hints.get(timeout=WAIT_S)

    try:
        for number, shelf in enumerate(("done/2026-05-01", "ng/2026-05-01", "failed")):
            (tmp_path / "sub" / f"{number}.png").touch()
            assert next_hint() == Hint(f"sub/{number}.png", Evidence.NONE)
            assert next_hint() == Hint(f"sub/{number}.png", Evidence.CLOSED)
            found = inbox.look(f"sub/{number}.png")
            assert found is not None
            claimed = inbox.claim(found.relpath, found.sighting)
            inbox.explain(inbox.put_away(claimed, shelf, "1-2-3"), {})
            inbox.leave()
        (tmp_path / "done" / "2026-05-01").rename(tmp_path / "done" / "archive")
        (tmp_path / "ng" / "2026-05-01").rename(tmp_path / "back")
        assert next_hint() == Hint(None)  # what was judged comes back, to be judged again
        (tmp_path / "failed" / "sub" / "2.png").rename(tmp_path / "2.png")
        while (hint := next_hint()).relpath is None or hint.relpath.startswith("back/"):  # told of what lies in it
            continue
        assert hint == Hint("2.png", Evidence.RENAMED)
        (tmp_path / "new").mkdir()
        assert next_hint() == Hint(None)
    finally:
        watch.stop(SourceState.STOPPED)


def test_files_whose_kernel_events_were_lost_all_arrive_once(tmp_path, monkeypatch):
    root, told = tmp_path / "inbox", []
    note = FolderSource._note

    def overflowing(source, hint):
        told.append(hint)
        if len(told) <= 16:
            note(source, hint)

    monkeypatch.setattr(FolderSource, "_note", overflowing)
    tiny = encoded(Image.new("L", (1, 1)))
    with LiveLine(root, poll_s=0.2) as service:
        until(lambda: service.source.status().state == "online")
        for number in range(FILES):
            (root / f"b1_r_R{number}.png").write_bytes(tiny)
        refs = [service.next().subject.ref for _ in range(FILES)]
        is_polled = service.source._watch.is_polled
    assert sorted(refs) == sorted(f"R{number}" for number in range(FILES))
    assert service.came.empty()
    assert is_polled or len(told) > FILES


MOUNTED = """
import subprocess, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from experts.expert import Verdict
from tests.agent.sources.folder.lines import PNG, Line

def run(*command):
    if subprocess.run(command, check=False).returncode:
        sys.exit(77)

folder, share = Path({folder!r}), Path({folder!r} + "-share")
share.mkdir()
run("mount", "-t", "tmpfs", "none", share)
run("mount", "--bind", share, folder)
line = Line(folder)
(folder / "b1_r_R1.png").write_bytes(PNG)
line.run(5)
run("umount", "-l", folder)
line.source.verdict_committed(line.arrivals[0].subject, Verdict.OK, None)
line.run(5)
print(line.source._watch.state, line.offered, list(folder.iterdir()))
run("mount", "--bind", share, folder)
(folder / "b1_r_R2.png").write_bytes(PNG)
line.run(40)
for arrival in line.arrivals[1:]:
    line.source.verdict_committed(arrival.subject, Verdict.OK, None)
line.run(40)
print(line.source._watch.state, line.offered, sorted(line.files()), line.refused)
"""


def test_mount_that_vanishes_mid_run_is_offline_and_resumes(tmp_path):
    (tmp_path / "inbox").mkdir()
    script = MOUNTED.format(root=str(Path(__file__).parents[4]), folder=str(tmp_path / "inbox"))
    apart = ["unshare", "--mount", "--propagation", "private"]
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not installed")
    asked = subprocess.run([*apart, "true"], capture_output=True, text=True, check=False)
    if asked.returncode != 0:  # as in a chroot
        pytest.skip(f"a mount namespace is not permitted here: {asked.stderr.strip()}")
    command = [*apart, sys.executable, "-c", script]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if ended.returncode == 77:
        pytest.skip("mounting is not permitted here")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [
        "offline ['b1_r_R1.png'] []",
        "online ['b1_r_R1.png', 'b1_r_R1.png', 'b1_r_R2.png'] "
        "['done/2026-05-01/b1_r_R1.png', 'done/2026-05-01/b1_r_R2.png'] {}",
    ]


def test_folder_absent_at_a_later_start_is_offline_and_not_created(tmp_path):
    with LiveLine(tmp_path / "inbox") as line:
        until(lambda: line.source.status().state == "online")
    later = LiveLine(tmp_path / "inbox")
    (tmp_path / "inbox").rename(tmp_path / "share")
    with later:
        until(lambda: later.source.status().state == "offline")
        assert not (tmp_path / "inbox").exists()
        (tmp_path / "share").rename(tmp_path / "inbox")
        until(lambda: later.source.status().state == "online")


def test_part_is_held_as_long_as_its_image(tmp_path):
    line = Line(tmp_path / "inbox", after="keep")
    arrival = line.arrive("b1_r_R#1@2-3-4#.png")
    keys = [arrival.subject.key, *(part_key(arrival.subject.key, ref) for ref in ("R1", "U1@a#b"))]
    assert all(line.source.holds(key) for key in keys)
    line.write("another.png")
    arrival.file.path.unlink()
    assert not any(line.source.holds(key) for key in keys)


@pytest.mark.parametrize("away", ["gone", "another folder", "a bare mount point", "a bare mount point since the start"])
def test_kept_file_on_an_absent_share_is_not_forgotten(tmp_path, away):
    line = Line(tmp_path / "inbox", after="keep")
    line.arrive("b1_r_R0.png", "b1_r_R1.png")
    key = line.arrivals[0].subject.key
    line.root.rename(tmp_path / "share")
    if away != "gone":
        line.root.mkdir()
    if away == "another folder":
        line.write("b2_r_R1.png")
    if away == "a bare mount point since the start":
        line = Line(line.root, after="keep")
        line.run(5)
        assert line.source._watch.state is SourceState.ONLINE
    assert line.source.holds(key)
    assert not line.source.holds("0ther/" + key)
    shutil.rmtree(line.root, ignore_errors=True)
    (tmp_path / "share").rename(line.root)
    line.run(20)
    assert line.source.holds(key)
    line.arrivals[0].file.path.unlink()
    assert not line.source.holds(key)
