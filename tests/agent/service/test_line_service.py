"""A line served in this process: real folders, a real results file, fake experts; and what breaks on the way."""

import errno
import json
import os
import re
import signal
import sqlite3
import struct
import threading
import time
import zlib
from contextlib import closing, contextmanager
from functools import partial

import pytest
from PIL import Image

import agent.service.inspections.inspector
import agent.service.serve
from agent.deployment.build import AgentOptions, build_agent
from agent.deployment.packed_copies import packed_experts
from agent.faults.errors import AgentCrashed
from agent.runtime.loop import LoopOptions
from agent.service.line_service import LineService
from agent.sources.folder.reading import read_as_seen
from agent.subject import seen_key
from experts.expert import Verdict
from experts.packed.sources import stamp_of
from tests.agent.service.fake_line import PATIENCE_S, PATTERN, SERVED, picture
from tests.pictures import encoded
from tests.waiting import until

OK, NG, UNKNOWN = Verdict.OK, Verdict.NG, Verdict.UNKNOWN


@pytest.fixture
def line(line):
    line.watched = line.watch()
    return line


def look_again(service, steps=3):
    """Until the folder was looked after so many times more."""
    for _ in range(steps):
        before = service.sources[0]._next_scan
        until(lambda seen=before: service.sources[0]._next_scan > seen)


def judge(service, line, *names):
    """Drop these files, and wait for their verdicts."""
    before = service.judged
    for name in names:
        line.drop(name)
    until(lambda: service.judged == before + len(names))


@contextmanager
def one_in_memory(line):
    """A service whose memory holds one expert: f0 is in it, and f1 has to be loaded."""
    line.document["memory"]["host"] = "11MiB"
    with line.served() as service:
        judge(service, line, "B1_c0_R1.png")
        yield service


def packed_file(line, expert):
    folder = line.config.packed_folder
    (own,) = {each.own.sha256 for each in packed_experts(line.config, folder) if each.expert == expert}
    return folder / "segments" / f"{own}.bin"


def test_packed_weights_that_vanish_for_a_while_cost_no_image_its_verdict(line):
    with one_in_memory(line) as service:
        away = line.config.packed_folder.rename(line.folder / "unmounted")
        for number in range(10):
            line.drop(f"B2_c{number % 2}_R{number}.png")
        until(lambda: service.agent.loop.statistics().transfers.failed >= 3)
        assert not line.config.packed_folder.exists()  # nothing is written to a bare mount point
        away.rename(line.config.packed_folder)
        until(lambda: service.judged == 11)
        assert service.desk.status().standing == {}
    assert {verdict for _, verdict in line.verdicts} == {OK}


@pytest.mark.parametrize("is_removed", [False, True])
def test_damaged_or_missing_packed_file_is_packed_again_while_serving(line, is_removed):
    with one_in_memory(line) as service:
        file = packed_file(line, "cls/f1")
        sound = file.read_bytes()
        file.unlink() if is_removed else file.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
        judge(service, line, "B1_c1_R1.png")
        assert file.read_bytes() == sound
        assert service.desk.status().standing == {}
    assert line.verdicts == [("B1_c0_R1.png", OK), ("B1_c1_R1.png", OK)]


@pytest.mark.slow
def test_damaged_packed_file_with_a_workers_hard_link_is_packed_and_linked_again(line):
    """The worker's file is the agent's inode: linked again, it would stay as it is."""
    line.document["cluster"] = {"workers": [{"count": 1, "device": "cpu", "memory": {"host": "1536KiB"}}]}
    with line.served() as service:
        judge(service, line, "B1_c0_R1.png")
        file = packed_file(line, "cls/f1")
        assert file.stat().st_nlink == 2
        sound = file.read_bytes()
        file.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
        judge(service, line, "B1_c1_R1.png", "B2_c0_R1.png", "B2_c1_R1.png")
        assert file.read_bytes() == sound
        assert file.stat().st_nlink == 2
        assert service.desk.status().standing == {}
    assert {verdict for _, verdict in line.verdicts} == {OK}


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{", "f1.yaml does not declare a fake"),
        ('{"weight_bytes": 900000, "label": "ok"}', "weights file is another: reload"),
    ],
)
def test_expert_that_cannot_be_packed_again_is_quarantined_with_the_reason(line, source, reason):
    with one_in_memory(line) as service:
        packed_file(line, "cls/f1").write_bytes(b"torn")
        (line.folder / "f1.yaml").write_text(source)
        judge(service, line, "B1_c1_R1.png")
        assert re.search(reason, service.desk.status().standing["cls/f1"])
    assert line.verdicts == [("B1_c0_R1.png", OK), ("B1_c1_R1.png", UNKNOWN)]


def test_source_with_other_bytes_but_the_same_stamp_is_found_in_the_background(line):
    """As in a system's image that gives every file one time and the inodes of the image before."""
    with line.served():
        pass
    manifests = line.config.packed_folder / "manifests"
    files = [manifests / "cls" / f"f{number}.fp32.json" for number in range(2)]
    line.fake(0, label="bad")
    manifest = json.loads(files[0].read_text())
    manifest["source"]["stamp"] = stamp_of(line.config.catalog.experts["cls/f0"])
    files[0].write_text(json.dumps(manifest))
    for file in files:
        os.utime(file, (0, 0))  # of a boot before
    with line.served() as service:
        until(lambda: "cls/f0" in service.desk.status().standing)
        until(lambda: files[1].stat().st_mtime > 0)  # sound, and looked at in this boot
        assert "other bytes than it was packed from: reload" in service.desk.status().standing["cls/f0"]
        assert [alarm for alarm in service.desk.status().alarms if alarm.startswith("expert cls/f0: its weights file")]
        judge(service, line, "B1_c0_R1.png", "B1_c1_R1.png")
        assert service.desk.reload().replaced == ("cls/f0",)
        judge(service, line, "B2_c0_R1.png")
        assert not service.desk.status().standing
    assert line.verdicts == [("B1_c0_R1.png", UNKNOWN), ("B1_c1_R1.png", OK), ("B2_c0_R1.png", NG)]


def test_refused_file_stored_before_a_crash_is_moved_and_not_counted_again(line):
    (line.inbox / "failed").touch()  # a file where the shelf belongs: the refused file stays
    with line.served() as service:
        judge(service, line, "misnamed.png")
    (line.inbox / "failed").unlink()
    with line.served():
        until((line.inbox / "failed" / "misnamed.png").exists)
    assert line.verdicts == [("misnamed.png", UNKNOWN)]


class Retest:
    """Images of one part: equal in name, inode, size and mtime, as by a camera without clock on a disk that uses an
    inode again."""

    def __init__(self, line, after):
        line.watched.update(after=after, settle_ms=100)
        line.fake(0, label=None)
        self.file, self.spare, self.beside = line.inbox / "B1_c0_R1.png", line.folder / "spare", line.folder / "beside"

    def write(self, color):
        self.spare.touch()
        with self.spare.open("r+b") as file:
            file.write(encoded(Image.new("RGB", (8, 8), color), "BMP"))
            file.flush()
            os.utime(self.spare, (315532800, 315532800))
        if not self.file.exists():
            os.link(self.spare, self.beside)
            self.beside.rename(self.file)


GOOD, DEFECT = (10, 200, 30), (0, 0, 0)


@pytest.mark.parametrize(
    "after", ["keep", *(pytest.param(each, marks=pytest.mark.slow) for each in ("delete", "move"))]
)
def test_image_with_the_name_inode_size_and_time_of_an_earlier_one_is_judged(line, after):
    retest = Retest(line, after)
    with line.served() as service:
        for count, color in enumerate((GOOD, DEFECT, GOOD), 1):
            retest.write(color)
            until(lambda count=count: service.judged == count)
            until(lambda: service.sources[0].held == 0)
    assert [row.verdict for row in line.rows] == [OK, NG, OK]
    assert len({seen_key(row.subject.key) for row in line.rows}) == 1, "they did not look alike"


@pytest.mark.parametrize("is_restarted", [False, True])
def test_kept_image_whose_mode_or_links_change_is_not_judged_again(line, is_restarted):
    line.watched["after"] = "keep"
    with line.served() as service:
        judge(service, line, "misnamed.png", "B1_c0_R1.png")
        first = line.rows
        if not is_restarted:
            _change_modes(service, line)
    with line.served() as service:
        if is_restarted:
            _change_modes(service, line)
    assert line.rows == first


def _change_modes(service, line):
    received = service.sources[0].status().received
    for name in ("misnamed.png", "B1_c0_R1.png"):
        (line.inbox / name).chmod(0o640)
    os.link(line.inbox / "B1_c0_R1.png", line.folder / "backup")
    until(lambda: service.sources[0].status().received > received)
    look_again(service)


@pytest.mark.parametrize("after", ["move", "keep"])
def test_files_and_rows_of_an_earlier_version_are_found_after_an_upgrade(line, after):
    line.watched["after"] = after
    names = [f"B{number}_c0_R1.png" for number in range(3)]
    with line.served() as service:
        judge(service, line, *names, "misnamed.png")
    with closing(sqlite3.connect(line.folder / "state" / "results.db")) as results, results:
        for key in [row.subject.key for row in line.rows]:
            results.execute("UPDATE results SET key = ? WHERE key = ?", (seen_key(key), key))
    first = line.rows
    if after == "move":  # claimed, and judged, when the agent of before was killed
        (work := line.inbox / ".work" / line.config.line).mkdir(parents=True)
        keys = {row.subject.image: row.subject.key for row in first}
        for name in names:
            (done,) = line.inbox.glob(f"done/*/{name}")
            done.rename(work / f"{keys[name].rpartition('@')[2]}~{name}")
    with line.served() as service:
        until(lambda: service.sources[0].status().received >= len(names))
        until(lambda: service.sources[0].held == 0)
        look_again(service)
        assert service.judged == 0
        if after == "keep":
            os.utime(line.inbox / names[0])  # a change of the file is none of the earlier verdict's
            until(lambda: service.judged == 1)
    assert line.rows[: len(first)] == first
    assert len(line.shelf("done")) == (3 if after == "move" else 0)


def test_kept_files_add_no_row_at_a_restart(line):
    line.watched["after"] = "keep"
    with line.served() as service:
        judge(service, line, "misnamed.png", "B1_c0_R1.png")
    first = line.rows
    with line.served() as service:
        until(lambda: service.sources[0].status().received == 2)
        look_again(service)
        assert service.judged == 0
    assert line.rows == first


def test_full_disk_makes_files_wait_in_the_folder_and_not_in_memory(line):
    with line.served(in_flight_limit=3) as service:
        until(lambda: service.store.statistics().pending == 0)  # what is written at the start counts as well
        with line.full_disk():
            for number in range(8):
                line.drop(f"B{number}_c0_R1.png")
            until(lambda: service.store.statistics().pending == 3)
            until(lambda: service.agent.loop.requests_in_flight == 0)
            look_again(service)
            assert service.sources[0].held == 3
            assert len(list(line.inbox.glob("*.png"))) == 5
        until(lambda: service.judged == 8)
    assert len(line.rows) == 8


def test_share_that_drops_for_a_while_costs_no_image_its_verdict(line, monkeypatch):
    refusals = [OSError(code, "the share is gone") for code in (errno.EIO, errno.ESTALE, errno.ENOENT) * 4]

    def dropping(arrival, max_pixels):
        if refusals:
            raise refusals.pop()
        return read_as_seen(arrival, max_pixels)

    monkeypatch.setattr("agent.sources.folder.reading.read_as_seen", dropping)
    names = [f"B{number}_c0_R1.png" for number in range(6)]
    with line.served() as service:
        judge(service, line, *names)
        assert service.sources[0].status().alarm is None
    assert line.verdicts == [(name, OK) for name in names]


def test_folder_on_a_hanging_filesystem_delays_no_other_folder(line, monkeypatch):
    line.watch("share")
    hangs, answers = threading.Event(), threading.Event()

    def hanging(arrival, max_pixels):
        if not answers.is_set() and arrival.file.path.is_relative_to(line.folder / "share"):
            hangs.set()
            answers.wait(PATIENCE_S)
            raise OSError(errno.EIO, "the server came back and gave up")
        return read_as_seen(arrival, max_pixels)

    monkeypatch.setattr("agent.sources.folder.reading.read_as_seen", hanging)
    with line.served() as service:
        line.drop("B0_c0_R1.png", inbox="share")
        assert hangs.wait(PATIENCE_S)
        judge(service, line, *(f"B{number}_c0_R1.png" for number in range(1, 4)))
    (claimed,) = (line.folder / "share" / ".work").rglob("*~*")
    assert claimed.name.partition("~")[2] == "B0_c0_R1.png"
    answers.set()
    with line.served() as service:
        until(lambda: service.judged == 1)
    assert [verdict for _, verdict in line.verdicts] == [OK] * 4


@pytest.mark.parametrize("after", ["keep", "move"])
def test_file_rewritten_while_it_waits_is_judged_as_the_new_one(line, monkeypatch, after):
    line.watched["after"] = after
    larger, seen = picture(size=(9, 9)), []

    def rewritten(arrival, max_pixels):
        seen.append(arrival)
        if len(seen) == 1:
            arrival.file.path.write_bytes(larger)
        return read_as_seen(arrival, max_pixels)

    monkeypatch.setattr("agent.sources.folder.reading.read_as_seen", rewritten)
    with line.served() as service:
        judge(service, line, "B1_c0_R1.png")
    old, new = seen
    assert [row.subject.key for row in line.rows] == [new.subject.key]
    assert new.subject.key != old.subject.key
    assert new.file.sighting.size_bytes == len(larger)


@pytest.fixture
def skipping(line):
    """Duplicates are skipped: B1_c0_R1-2.png shows what B1_c0_R1.png does."""
    pattern = PATTERN.replace("[^.]+", "[^.-]+").replace(r"\.png", r"(-\d+)?\.png")
    line.watched.update(pattern=pattern, duplicate="skip")
    return line


def test_duplicate_image_has_the_verdict_of_the_first_without_a_batch(skipping):
    line, larger = skipping, picture(size=(9, 9))
    line.fake(0, label="bad")
    with line.served() as service:
        judge(service, line, "B1_c0_R1.png")
        judge(service, line, "B1_c0_R1-2.png")
    with line.served() as service:
        for name in ("B1_c0_R1-3.png", "B1_c0_R2.png", "B2_c0_R1.png"):
            line.drop(name)
        line.drop("B1_c0_R1-4.png", larger)
        line.drop("B1_c0_R1.png", larger)  # an old name with new bytes, which came as -4 or will
        until(lambda: service.judged == 5)
    first = next(row for row in line.rows if row.subject.image == "B1_c0_R1.png")
    duplicates = [row for row in line.rows if row.subject.image in {"B1_c0_R1-2.png", "B1_c0_R1-3.png"}]
    assert len(duplicates) == 2
    for row in duplicates:
        assert (row.verdict, row.label, row.experts, row.subject.board_type) == (NG, "bad", (), None)
        assert (row.subject.board, row.subject.component, row.subject.ref) == ("B1", "c0", "R1")
        assert row.reason == f"the same bytes as {first.subject.key}, which was NG: not judged again"
    assert (sum(bool(row.experts) for row in line.rows), len(line.shelf("ng"))) == (4, 7)


@pytest.mark.parametrize(
    ("content", "verdict", "judged"), [(None, OK, 1), (picture()[:42] + bytes(10) + picture()[52:], UNKNOWN, 9)]
)
def test_duplicates_at_the_same_time_wait_for_the_first_and_share_no_unknown(skipping, content, verdict, judged):
    with skipping.served() as service:
        for number in range(9):
            skipping.drop(f"B1_c0_R1-{number}.png", content)
        until(lambda: service.judged == 9)
    assert [row.verdict for row in skipping.rows] == [verdict] * 9
    assert len([row for row in skipping.rows if "not judged again" not in (row.reason or "")]) == judged


def test_duplicate_image_opens_no_new_run_of_its_board(skipping):
    skipping.document["boards"]["main"] = {"components": {"c0": 1}, "takt_s": 3600, "timeout_s": 0.2}
    with skipping.served() as service:
        judge(service, skipping, "B1_c0_R1.png")
        until(lambda: service.boards.statistics().closed == 0)
        judge(service, skipping, "B1_c0_R1-2.png")
    with skipping.served() as service:
        assert service.boards.statistics().open == 0
    assert skipping.boards == [("B1", OK)]


def bomb():
    """A PNG of 30 000 x 30 000 black pixels in 110 kB."""

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", 30_000, 30_000, 1, 0, 0, 0, 0)
    pixels = zlib.compress(bytes(30_000 * (1 + 30_000 // 8)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def test_undecodable_file_goes_to_failed_with_its_reason_and_harms_no_other(line):
    del line.document["boards"]["main"]["layout"]  # its refs are not listed
    line.watched.update(pattern=PATTERN.replace("png", "(png|jpg)"), stale_after_s=0.5)
    broken = picture()[:45] + bytes(10) + picture()[55:]
    files = {"bomb": bomb(), "text": b"no image", "empty": b"", "broken": broken}
    with line.served() as service:
        for ref, content in files.items():
            line.drop(f"B1_c0_{ref}.png", content)
        line.drop("B1_c1_good.png")
        line.drop("B1_c1_lying.jpg")
        until(lambda: service.judged == 6)
    reasons = {row.subject.ref: row.reason for row in line.rows if row.verdict is UNKNOWN}
    assert reasons.keys() == files.keys()
    expected = {
        "bomb": "900000000 pixels",
        "text": "not an image",
        "empty": "empty",
        "broken": "a checksum of IDAT is wrong",
    }
    for ref, reason in expected.items():
        explained = json.loads((line.inbox / "failed" / f"B1_c0_{ref}.png.error.json").read_text())
        assert reason in reasons[ref]
        assert reason in explained["reason"]
        assert (line.inbox / "failed" / f"B1_c0_{ref}.png").read_bytes() == files[ref]
    assert {row.subject.ref for row in line.rows if row.verdict is OK} == {"good", "lying"}
    assert line.boards == [("B1", UNKNOWN)]


DEADLY = """
import os, signal
import agent.runtime.images.sources as image_sources
decode = image_sources.decode_image

def deadly(source, name, *rest):
    if "poison" in name:  # as a native decoder that crashes on hostile bytes
        os.kill(os.getpid(), signal.SIGKILL)
    return decode(source, name, *rest)

image_sources.decode_image = deadly
"""


def test_image_that_ends_the_agent_twice_is_unknown_and_others_are_judged(line, forks):
    names = [f"B{number}_c0_{'poison' if number == 2 else 'R1'}.png" for number in range(5)]
    for name in names:
        line.drop(name)
    for _ in range(2):
        ended = forks.run(DEADLY + SERVED, line.write(), timeout_s=2 * PATIENCE_S)
        assert ended.returncode == -signal.SIGKILL, ended.stderr
    with line.served() as service:
        until(lambda: len(line.rows) == 5)
        assert service.agent.loop.requests_in_flight == 0
    assert line.verdicts == [(name, UNKNOWN if "poison" in name else OK) for name in names]
    reason = "B2_c0_poison.png: ended the agent: it was being judged each of the 2 times that the agent was ended"
    assert [row.reason for row in line.rows if row.verdict is UNKNOWN] == [reason]
    assert json.loads((line.inbox / "failed" / "B2_c0_poison.png.error.json").read_text())["reason"] == reason
    line.drop("B2_c0_poison.png", picture(size=(9, 9)))
    with line.served() as service:  # another file of that name is another image
        until(lambda: service.judged == 1)
    assert line.rows[-1].verdict is OK


SIGNALLED = """
import signal, sys
from agent.service.line_service import LineService
start, stop = LineService.start, LineService.stop
def started(service):
    start(service)
    sys.setprofile(lambda *_: signal.raise_signal(signal.SIGTERM))
def stopped(service):
    sys.setprofile(None)
    return stop(service)
LineService.start, LineService.stop = started, stopped
"""


def test_signal_at_any_moment_of_waiting_ends_the_agent(line, forks):
    ended = forks.run(SIGNALLED + SERVED, line.write(), timeout_s=PATIENCE_S)
    assert ended.returncode == 0, ended.stderr


def test_stop_does_not_wait_for_loads_without_a_request(line, monkeypatch, caplog):
    slow = partial(build_agent, options=AgentOptions(loop=LoopOptions(ssd_bytes_per_s=1.0)))
    monkeypatch.setattr(agent.service.inspections.inspector, "build_agent", slow)
    with line.served() as service:
        until(lambda: any(pool.loading for pool in service.agent.loop.statistics().engine.pools))
    assert "not_drained" not in caplog.text


def test_crash_while_recording_is_reported_ends_the_agent_and_loses_nothing(line):
    crashed = threading.Event()
    service = LineService(line.config, lambda *_: None, on_crash=crashed.set)
    service.start()
    service.store.close()  # stands for any error of the program while an outcome is recorded
    line.drop("B1_c0_R1.png")
    assert crashed.wait(PATIENCE_S)
    line.drop("B1_c1_R1.png")
    look_again(service)
    assert (line.inbox / "B1_c1_R1.png").exists()
    assert service.inspector.crash is not None
    with pytest.raises(AgentCrashed, match="RuntimeError: the result store is closed"):
        service.stop()
    with line.served() as again:
        until(lambda: again.judged == 2)
    assert line.verdicts == [("B1_c0_R1.png", OK), ("B1_c1_R1.png", OK)]


def test_backlog_of_one_folder_delays_no_file_of_another(line):
    line.watch("beside")
    for number in range(20):
        line.drop(f"B{number}_c0_R1.png")
    with line.served(in_flight_limit=8) as service, line.full_disk():

        def in_flight():
            return [source.held for source in service.sources if source.keeps_images]

        until(lambda: in_flight() == [6, 0])
        for number in range(3):
            line.drop(f"B{number}_c1_R1.png", inbox="beside")
        until(lambda: in_flight() == [6, 2])
        look_again(service)
        assert in_flight() == [6, 2]
        assert service.sources[0].status().waiting == 14


def test_board_open_at_the_end_is_completed_after_the_restart(line):
    for name in ("B1_c0_R1.png", "B1_c1_R2.png"):
        with line.served() as service:
            assert line.boards == []
            judge(service, line, name)
    assert line.boards == [("B1", OK)]


def test_usage_drift_is_logged_with_the_command_that_learns_it(line, monkeypatch, caplog):
    monkeypatch.setattr("agent.service.inspections.drift.LEAST_STEPS", 20)
    now = [0.0]
    with line.served(clock=lambda: now[0]) as service:
        judge(service, line, *(f"B{number}_c0_R1.png" for number in range(20)))
        until(lambda: "usage_drift distance" in caplog.text)
        drift = service.inspector.drift()
        assert (drift.steps, drift.distance, drift.has_drifted) == (20, 0.5, True)
        now[0] = 3600.0
        until(lambda: caplog.text.count("usage_drift distance") == 2)

        def alarms():
            now[0] += 1.0
            return [row.name for row in service.alarms.open]

        until(lambda: alarms() == ["drift"])
    learning = f"coserve profile {line.folder / 'line.yaml'} --usage-from {line.folder / 'state' / 'results.db'}"
    assert f"experts=cls/f0,cls/f1: experts are used otherwise than expected; learn how: {learning}" in caplog.text


@pytest.mark.parametrize("duty", ["records.retention.sweeper.Sweeper", "records.export.ResultExport"])
def test_hanging_disk_delays_neither_board_timeouts_nor_the_end_of_the_agent(line, monkeypatch, duty):
    hangs, answers, running_s = threading.Event(), threading.Event(), [0.0]

    def hang(_):
        hangs.set()
        answers.wait(PATIENCE_S)

    monkeypatch.setattr(f"agent.{duty}.step", hang)
    monkeypatch.setattr("agent.service.upkeep.HANGS_S", 0.0)
    line.document["records"] = {"export": {"folder": "export"}}
    line.document["boards"]["main"]["takt_s"] = 30
    with line.served(clock=lambda: running_s[0]) as service:
        assert hangs.wait(PATIENCE_S)
        until(lambda: any("has been waiting" in each for each in service.desk.status().alarms))
        judge(service, line, "B1_c0_R1.png")
        until(lambda: service.boards.statistics().open == 1)
        running_s[0] = 61.0
        until(lambda: line.boards == [("B1", UNKNOWN)])
        began_s = time.monotonic()
    assert time.monotonic() - began_s < PATIENCE_S / 2, "the end does not wait for it"
    answers.set()
