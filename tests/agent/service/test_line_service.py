"""A line served in this process: real folders, a real results file, fake experts; and what breaks on the way."""

from __future__ import annotations

import errno
import gc
import io
import json
import os
import re
import signal
import sqlite3
import struct
import sys
import threading
import time
import zlib
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest
import yaml
from PIL import Image

import agent.service.inspections.inspector
import agent.service.serve
import agent.sources.folder.folder_source
from agent.config import read_line
from agent.deployment.build import AgentOptions, build_agent, detect_box
from agent.deployment.packed_copies import copies_of, lying_packed
from agent.device_profile.identity import identity_of, packed_sha256
from agent.device_profile.records import Allocation, KindProfile, LinkSpeed, UsageOrigin, UsageProfile
from agent.device_profile.store import ProfileDraft
from agent.records.boards import BoardVerdict
from agent.records.result_reader import ResultReader
from agent.records.result_writer import ResultStore
from agent.runtime.loop import LoopOptions
from agent.service.line_service import LineService
from agent.sources.folder.reading import ArrivalReader, read_as_seen
from experts.errors import AgentCrashed
from experts.expert import Precision, Verdict
from experts.packed.packing import pack_line
from experts.packed.sources import stamp_of
from experts.packed.weights import SegmentStore
from tests.lines import result

PATTERN = r"(?P<board>[^_]+)_(?P<component>[^_]+)_(?P<ref>[^.]+)\.png"
PATIENCE_S = 60.0
OK, UNKNOWN = Verdict.OK, Verdict.UNKNOWN


def png(side=8):
    buffer = io.BytesIO()
    Image.new("RGB", (side, side), (10, 200, 30)).save(buffer, "PNG")
    return buffer.getvalue()


class Line:
    """Two fake experts, one route each, and boards of one type that show one image of each."""

    def __init__(self, folder):
        self.folder = folder
        self.document = {
            "line": "test",
            "state": "./state",
            "experts": {f"cls/f{number}": self._expert(number) for number in range(2)},
            "routes": {f"c{number}": [{"expert": f"cls/f{number}", "pass": ["ok"]}] for number in range(2)},
            "boards": {"main": {"components": {"c0": 1, "c1": 1}, "takt_s": 3600}},
            "memory": {"host": "20MiB", "workspace": "10MiB"},
            "intake": {"folders": [{"path": "./inbox", "pattern": PATTERN, "settle_ms": 0, "poll_s": 0.1}]},
        }
        self.inbox = folder / "inbox"
        self.inbox.mkdir()

    def _expert(self, number):
        weights = self.folder / f"f{number}.yaml"
        weights.write_text(json.dumps({"weight_bytes": 1_000_000, "label": "ok"}))
        return {"architecture": "fake", "weights": str(weights), "labels": ["ok", "bad"], "input": {"size": [8, 8]}}

    @property
    def watched(self):
        return self.document["intake"]["folders"][0]

    @property
    def config(self):
        (self.folder / "line.yaml").write_text(yaml.safe_dump(self.document))
        return read_line(self.folder / "line.yaml", {})

    def profile(self):
        """A profile of this line and box, written by hand."""
        config = self.config
        with closing(SegmentStore(config.packed_folder)) as segments:
            packed = pack_line(config.catalog.experts.values(), lambda _: {Precision.FP32}, segments).packed
        fp32 = {"cpu": dict.fromkeys(packed, Precision.FP32)}
        kinds = {copy.kind: copy for copy in copies_of(config, fp32, packed)["cpu"]}
        with ProfileDraft.open(config.profile_file, config.line, identity_of(detect_box(config))) as draft:
            draft.save_links([LinkSpeed("ssd", 1e9)])
            for kind in kinds:
                times = {"threads": 1, "K_s": 0.001, "B_s": 0.001, "fit_error": 0.0, "max_batch": 4}
                sizes = {"weight_bytes": 1_000_000, "workspace_base_bytes": 0, "workspace_bytes": 0}
                rest = {"load_s": {"ssd": 0.001}, "batches": (), "samples": "synthetic"}
                draft.save_kind(KindProfile(kind, "fake", "cpu", "fp32", **times, **sizes, **rest))
            draft.save_precisions({(kind, "cpu"): "fp32" for kind in kinds})
            draft.save_packed(
                {(name, form): packed_sha256(packed[name][form]) for name in packed for form in packed[name]}
            )
            draft.save_usage(UsageProfile({"cls/f0": 0.5, "cls/f1": 0.5}, {}, UsageOrigin.SERVED, 100))
            draft.save_allocation(Allocation("casual", {}, (), {"cpu": 1}))
            draft.finish()

    def drop(self, name, content=None):
        (self.folder / name).write_bytes(png() if content is None else content)
        (self.folder / name).rename(self.inbox / name)

    def rows(self):
        return [row.result for row in ResultReader(self.folder / "state" / "results.db").query()]

    def boards(self):
        return ResultReader(self.folder / "state" / "results.db").boards()

    def verdicts(self):
        return sorted((row.subject.image, row.verdict) for row in self.rows())

    @contextmanager
    def served(self, **options):
        """A service of this line, stopped in the end."""
        service = LineService(self.config, lambda *_: None, **options)
        service.start()
        try:
            yield service
        finally:
            service.stop()

    @contextmanager
    def full_disk(self):
        """Nothing can be committed meanwhile, as when the disk is full."""
        with closing(sqlite3.connect(self.folder / "state" / "results.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            yield
            other.execute("ROLLBACK")


@pytest.fixture
def line(tmp_path):
    return Line(tmp_path)


def wait_until(holds):
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_for_steps(service, steps=3):
    """Until the folder was looked after so many times more."""
    for _ in range(steps):
        before = service.sources[0].intake.statistics()
        wait_until(lambda seen=before: service.sources[0].intake.statistics() is not seen)


def wait_for_housekeeping(service, steps=2):
    """Until whatever is due by time alone was done so many times more."""
    wanted = service.statistics().housekeeping.steps + steps
    wait_until(lambda: service.statistics().housekeeping.steps >= wanted)


def test_a_board_is_judged_and_its_files_are_moved(line):
    with line.served() as service:
        line.drop("B1_c0_R1.png")
        line.drop("B1_c1_R1.png")
        wait_until(lambda: service.judged == 2)
    assert line.verdicts() == [("B1_c0_R1.png", OK), ("B1_c1_R1.png", OK)]
    assert [(row.board.serial, row.board.verdict, row.revisions) for row in line.boards()] == [("B1", OK, 0)]
    assert sorted(file.name for file in (line.inbox / "done").rglob("*.png")) == ["B1_c0_R1.png", "B1_c1_R1.png"]


@contextmanager
def one_in_memory(line):
    """A service whose memory holds one expert: f0 is in it, and f1 has to be loaded."""
    line.document["memory"]["host"] = "11MiB"
    with line.served() as service:
        line.drop("B1_c0_R1.png")
        wait_until(lambda: service.judged == 1)
        yield service
    assert service.desk.status().standing == {}


def packed_file(line, expert):
    folder = line.config.packed_folder
    (own,) = {each.own.sha256 for each in lying_packed(line.config, folder) if each.expert == expert}
    return folder / "segments" / f"{own}.bin"


def test_packed_weights_that_vanish_for_a_while_cost_no_image_its_verdict(line):
    with one_in_memory(line) as service:
        away = line.config.packed_folder.rename(line.folder / "unmounted")
        for number in range(10):
            line.drop(f"B2_c{number % 2}_R{number}.png")
        wait_until(lambda: service.agent.loop.statistics().transfers.failed >= 3)
        assert not line.config.packed_folder.exists()  # nothing is written to a bare mount point
        away.rename(line.config.packed_folder)
        wait_until(lambda: service.judged == 11)
    assert {verdict for _, verdict in line.verdicts()} == {OK}


@pytest.mark.parametrize("is_removed", [False, True])
def test_a_packed_file_that_is_damaged_or_gone_is_packed_anew_beside_what_runs(line, caplog, is_removed):
    with one_in_memory(line) as service:
        file = packed_file(line, "cls/f1")
        sound = file.read_bytes()
        file.unlink() if is_removed else file.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
        line.drop("B1_c1_R1.png")
        wait_until(lambda: service.judged == 2)
        assert file.read_bytes() == sound
    assert line.verdicts() == [("B1_c0_R1.png", OK), ("B1_c1_R1.png", OK)]
    assert "packed_anew expert=cls/f1" in caplog.text


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{", "f1.yaml does not declare a fake"),
        ('{"weight_bytes": 1000000, "label": "bad"}', "weights file is another: reload"),
    ],
)
def test_what_cannot_be_packed_anew_as_it_was_is_quarantined_with_its_reason(line, source, reason):
    line.document["memory"]["host"] = "11MiB"
    with line.served() as service:
        line.drop("B1_c0_R1.png")
        wait_until(lambda: service.judged == 1)
        packed_file(line, "cls/f1").write_bytes(b"torn")
        (line.folder / "f1.yaml").write_text(source)
        line.drop("B1_c1_R1.png")
        wait_until(lambda: service.judged == 2)
        assert re.search(reason, service.desk.status().standing["cls/f1"])
    assert line.verdicts() == [("B1_c0_R1.png", OK), ("B1_c1_R1.png", UNKNOWN)]


def test_a_source_with_other_bytes_is_found_in_the_background_though_it_lies_as_it_did(line):
    """As in a system's image that gives every file one time and the inodes of the image before."""
    with line.served():
        pass
    manifests = line.config.packed_folder / "manifests"
    files = [manifests / "cls" / f"f{number}.fp32.json" for number in range(2)]
    (line.folder / "f0.yaml").write_text('{"weight_bytes": 1000000, "label": "bad"}')
    manifest = json.loads(files[0].read_text())
    manifest["source"]["stamp"] = stamp_of(line.config.catalog.experts["cls/f0"])
    files[0].write_text(json.dumps(manifest))
    for file in files:
        os.utime(file, (0, 0))  # of a boot before
    with line.served() as service:
        wait_until(lambda: "cls/f0" in service.desk.status().standing)
        wait_until(lambda: files[1].stat().st_mtime > 0)  # sound, and looked at in this boot
        assert "other bytes than it was packed from: reload" in service.desk.status().standing["cls/f0"]
        assert [alarm for alarm in service.desk.status().alarms if alarm.startswith("expert cls/f0: its weights file")]
        line.drop("B1_c0_R1.png")
        line.drop("B1_c1_R1.png")
        wait_until(lambda: service.judged == 2)
        assert service.desk.reload().replaced == ("cls/f0",)
        line.drop("B2_c0_R1.png")
        wait_until(lambda: service.judged == 3)
        assert not service.desk.status().standing
    assert line.verdicts() == [("B1_c0_R1.png", UNKNOWN), ("B1_c1_R1.png", OK), ("B2_c0_R1.png", Verdict.NG)]


def test_a_refused_file_is_moved_after_its_row_is_stored_and_not_before(line):
    with line.served() as service:
        wait_until(lambda: service.statistics().store.pending == 0)
        with line.full_disk():
            line.drop("misnamed.png")
            wait_until(lambda: service.statistics().store.pending == 1)
            wait_for_steps(service)
            assert (line.inbox / "misnamed.png").exists()
        wait_until(lambda: service.judged == 1)
    assert (line.inbox / "failed" / "misnamed.png").exists()
    assert line.verdicts() == [("misnamed.png", UNKNOWN)]


def test_a_refused_file_whose_row_was_stored_before_a_crash_is_moved_and_not_counted_again(line):
    with line.served() as service:
        line.drop("misnamed.png")
        wait_until(lambda: service.judged == 1)
    (line.inbox / "failed" / "misnamed.png").rename(line.inbox / "misnamed.png")
    with line.served():
        wait_until((line.inbox / "failed" / "misnamed.png").exists)
    assert line.verdicts() == [("misnamed.png", UNKNOWN)]


def test_files_that_are_kept_add_no_row_at_a_restart(line):
    line.watched["after"] = "keep"
    for name in ("misnamed.png", "B1_c0_R1.png"):
        line.drop(name)
    with line.served() as service:
        wait_until(lambda: service.judged == 2)
    first = line.rows()
    for _ in range(2):
        with line.served() as service:
            wait_until(
                lambda s=service: (
                    s.sources[0].intake.statistics().offered + s.sources[0].intake.statistics().refused == 2
                )
            )
            wait_for_steps(service)
            assert service.judged == 0
    assert line.rows() == first


def test_a_truncated_image_counts_on_its_board(line):
    """AC10."""
    line.watched["stale_after_s"] = 0.5
    with line.served() as service:
        line.drop("B1_c0_R1.png", png()[:-20])
        line.drop("B1_c1_R1.png")
        wait_until(lambda: service.judged == 2)
    assert line.verdicts() == [("B1_c0_R1.png", UNKNOWN), ("B1_c1_R1.png", OK)]
    assert [(row.board.serial, row.board.verdict, row.board.missing) for row in line.boards()] == [("B1", UNKNOWN, {})]
    refused = next(row for row in line.rows() if row.verdict is UNKNOWN)
    assert (refused.subject.board, refused.subject.component, refused.subject.ref, refused.subject.board_type) == (
        "B1",
        "c0",
        "R1",
        "main",
    )


def test_a_folders_limit_of_pixels_is_kept(line):
    line.watched["max_pixels"] = 64
    with line.served() as service:
        line.drop("B1_c0_small.png", png(8))
        line.drop("B1_c0_large.png", png(9))
        wait_until(lambda: service.judged == 2)
    assert line.verdicts() == [("B1_c0_large.png", UNKNOWN), ("B1_c0_small.png", OK)]
    reason = next(row.reason for row in line.rows() if row.verdict is UNKNOWN)
    assert reason == "B1_c0_large.png: 9 x 9 pixels are more than max_pixels 64"


def test_while_nothing_can_be_stored_files_wait_in_the_folder_and_not_in_memory(line):
    """AC11."""
    with line.served(in_flight_limit=3) as service:
        wait_until(lambda: service.statistics().store.pending == 0)  # what is written at the start counts as well
        with line.full_disk():
            for number in range(8):
                line.drop(f"B{number}_c0_R1.png")
            wait_until(lambda: service.statistics().store.pending == 3)
            wait_until(lambda: service.statistics().requests_in_flight == 0)
            wait_for_steps(service)
            assert service.sources[0].intake.statistics().in_flight == 3
            assert len(list(line.inbox.glob("*.png"))) == 5
        wait_until(lambda: service.judged == 8)
    assert len(line.rows()) == 8


def reading(monkeypatch, read_file):
    """Arrivals are read so from now on."""
    monkeypatch.setattr(
        agent.sources.folder.folder_source, "ArrivalReader", partial(ArrivalReader, read_file=read_file)
    )


def test_a_share_that_drops_for_a_while_costs_no_image_its_verdict(line, monkeypatch):
    refusals = [OSError(code, "the share is gone") for code in (errno.EIO, errno.ESTALE, errno.ENOENT) * 4]

    def dropping(arrival, max_pixels):
        if refusals:
            raise refusals.pop()
        return read_as_seen(arrival, max_pixels)

    reading(monkeypatch, dropping)
    names = [f"B{number}_c0_R1.png" for number in range(6)]
    with line.served() as service:
        for name in names:
            line.drop(name)
        wait_until(lambda: service.judged == 6)
        assert service.sources[0].reader.statistics().failing == 0
    assert line.verdicts() == [(name, OK) for name in names]


def test_a_folder_whose_filesystem_hangs_keeps_no_other_folder_waiting(line, monkeypatch):
    line.document["intake"]["folders"].append({**line.watched, "path": "./share"})
    (line.folder / "share").mkdir()
    hangs, answers = threading.Event(), threading.Event()

    def hanging(arrival, max_pixels):
        if arrival.file.path.is_relative_to(line.folder / "share"):
            hangs.set()
            answers.wait(PATIENCE_S)
            raise OSError(errno.EIO, "the server came back and gave up")
        return read_as_seen(arrival, max_pixels)

    reading(monkeypatch, hanging)
    try:
        with line.served() as service:
            (line.folder / "share" / "B0_c0_R1.png").write_bytes(png())
            assert hangs.wait(PATIENCE_S)
            for number in range(1, 4):
                line.drop(f"B{number}_c0_R1.png")
            wait_until(lambda: service.judged == 3)
        assert [file.name.partition("~")[2] for file in (line.folder / "share" / ".work").rglob("*~*")] == [
            "B0_c0_R1.png"
        ]
    finally:
        answers.set()
    monkeypatch.undo()
    with line.served() as service:
        wait_until(lambda: service.judged == 1)
    assert [verdict for _, verdict in line.verdicts()] == [OK] * 4


@pytest.mark.parametrize("after", ["keep", "move"])
def test_a_file_that_is_rewritten_while_it_waits_is_judged_as_the_new_one_and_under_its_key(line, monkeypatch, after):
    line.watched["after"] = after
    seen = []

    def rewritten(arrival, max_pixels):
        seen.append(arrival)
        if len(seen) == 1:
            arrival.file.path.write_bytes(png(side=9))
        return read_as_seen(arrival, max_pixels)

    reading(monkeypatch, rewritten)
    with line.served() as service:
        line.drop("B1_c0_R1.png")
        wait_until(lambda: service.judged == 1)
    old, new = seen
    assert [row.subject.key for row in line.rows()] == [new.subject.key]
    assert new.subject.key != old.subject.key
    assert new.file.sighting.size_bytes == len(png(side=9))


COPIES = r"(?P<board>[^_]+)_(?P<component>[^_]+)_(?P<ref>[^.-]+)(-\d+)?\.png"  # B1_c0_R1-2.png shows what B1_c0_R1 does


@pytest.fixture
def skipping(line):
    """Duplicates are skipped, and whatever is asked of an expert is counted."""
    line.watched.update(pattern=COPIES, duplicate="skip")
    return line


def asked(line):
    return sorted(row.subject.image for row in line.rows() if row.experts)


def test_the_same_bytes_under_another_name_are_judged_again_unless_they_are_to_be_skipped(line):
    """AC7: reinspect, the default."""
    line.watched["pattern"] = COPIES
    with line.served() as service:
        for name in ("B1_c0_R1.png", "B1_c0_R1-2.png"):
            line.drop(name)
        wait_until(lambda: service.judged == 2)
    assert asked(line) == ["B1_c0_R1-2.png", "B1_c0_R1.png"]


@pytest.mark.parametrize("label", ["ok", "bad"])
def test_a_duplicate_has_the_verdict_of_the_first_and_asks_nobody(skipping, label, caplog):
    """AC7: also after a restart; another part, or other bytes, are no duplicate."""
    line = skipping
    (line.folder / "f0.yaml").write_text(json.dumps({"weight_bytes": 1_000_000, "label": label}))
    verdict, shelf = (OK, "done") if label == "ok" else (Verdict.NG, "ng")
    caplog.set_level("INFO")
    with line.served() as service:
        line.drop("B1_c0_R1.png")
        wait_until(lambda: service.judged == 1)
        line.drop("B1_c0_R1-2.png")
        wait_until(lambda: service.judged == 2)
    with line.served() as service:
        for name in ("B1_c0_R1-3.png", "B1_c0_R2.png", "B2_c0_R1.png"):
            line.drop(name)
        line.drop("B1_c0_R1-4.png", png(side=9))
        line.drop("B1_c0_R1.png", png(side=9))  # an old name with new bytes, which came as -4 or will
        wait_until(lambda: service.judged == 5)
    first = next(row for row in line.rows() if row.subject.image == "B1_c0_R1.png")
    duplicates = [row for row in line.rows() if row.subject.image in {"B1_c0_R1-2.png", "B1_c0_R1-3.png"}]
    for row in duplicates:
        assert (row.verdict, row.label) == (verdict, label)
        assert (row.subject.board, row.subject.component, row.subject.ref) == ("B1", "c0", "R1")
        assert row.reason == f"the same bytes as {first.subject.key}, which was {verdict}: not judged again"
        assert (row.experts, row.subject.board_type) == ((), None)
    assert len(duplicates) == 2
    assert len(asked(line)) == 4
    assert caplog.text.count("image_duplicate") == 3
    assert len(list((line.inbox / shelf).rglob("*.png"))) == 7


def test_duplicates_that_come_together_wait_for_the_first(skipping):
    """AC7: none is judged twice."""
    with skipping.served() as service:
        for number in range(20):
            skipping.drop(f"B1_c0_R1-{number}.png")
        wait_until(lambda: service.judged == 20)
    assert len(asked(skipping)) == 1
    assert [row.verdict for row in skipping.rows()] == [OK] * 20


def test_a_duplicate_of_what_could_not_be_judged_is_judged(skipping):
    """AC7: it never becomes OK, or stays UNKNOWN, for another one's sake."""
    broken = png()[:40] + bytes(20) + png()[60:]
    with skipping.served() as service:
        for number in range(3):
            skipping.drop(f"B1_c0_R1-{number}.png", broken)
        wait_until(lambda: service.judged == 3)
    assert [(row.verdict, "not judged again" in row.reason) for row in skipping.rows()] == [(UNKNOWN, False)] * 3


def test_a_duplicate_of_what_another_line_file_judged_is_judged(skipping):
    with skipping.served() as service:
        skipping.drop("B1_c0_R1.png")
        wait_until(lambda: service.judged == 1)
    skipping.document["experts"]["cls/f2"] = skipping._expert(2)
    skipping.document["routes"]["c0"].append({"expert": "cls/f2", "pass": ["ok"]})
    with skipping.served() as service:
        skipping.drop("B1_c0_R1-2.png")
        wait_until(lambda: service.judged == 1)
    assert len(asked(skipping)) == 2


def test_a_duplicate_begins_no_board_anew(skipping):
    """A board that was closed long ago is not opened by pictures of then, now or after a restart."""
    skipping.document["boards"]["main"].update(components={"c0": 1}, timeout_s=0.2)
    del skipping.document["routes"]["c1"]
    with skipping.served() as service:
        skipping.drop("B1_c0_R1.png")
        wait_until(lambda: service.judged == 1)
        wait_until(lambda: service.statistics().boards.closed == 0)
        skipping.drop("B1_c0_R1-2.png")
        wait_until(lambda: service.judged == 2)
    with skipping.served() as service:
        wait_for_housekeeping(service)
        assert service.statistics().boards.open == 0
    assert [(row.board.serial, row.board.verdict) for row in skipping.boards()] == [("B1", OK)]


def test_duplicates_that_cannot_be_looked_up_are_judged(skipping, monkeypatch, caplog):
    def locked(*_):
        raise sqlite3.OperationalError("database is locked")

    monkeypatch.setattr(ResultReader, "first_judged", locked)
    with skipping.served() as service:
        for number in range(2):
            skipping.drop(f"B1_c0_R1-{number}.png")
        wait_until(lambda: service.judged == 2)
    assert len(asked(skipping)) == 2
    assert "duplicates_not_looked_up" in caplog.text


def test_images_are_known_by_their_sidecars_after_they_were_judged(line):
    """AC6: a stored verdict moves both, also after a restart, and nothing is judged again."""
    del line.watched["pattern"]
    line.watched["identity"] = "sidecar"
    with line.served() as service:
        (line.inbox / "x.json").write_text(json.dumps({"board": "B1", "component": "c0", "ref": "R1"}))
        line.drop("x.png")
        line.drop("y.png")
        (line.inbox / "y.json").write_text(json.dumps({"board": "B1", "component": "c1", "ref": "R1"}))
        wait_until(lambda: service.judged == 2)
    assert [(row.board.serial, row.board.verdict) for row in line.boards()] == [("B1", OK)]
    with line.served() as service:
        wait_for_steps(service)
        assert service.judged == 0
    assert sorted(file.name for file in (line.inbox / "done").rglob("*.*")) == ["x.json", "x.png", "y.json", "y.png"]


def bomb():
    """A PNG of 30 000 x 30 000 black pixels in 110 kB."""

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", 30_000, 30_000, 1, 0, 0, 0, 0)
    pixels = zlib.compress(bytes(30_000 * (1 + 30_000 // 8)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def test_what_cannot_be_decoded_goes_to_failed_with_its_reason_and_harms_no_other(line):
    """AC9: a bomb, no image at all, nothing at all, broken pixels; an ending that lies is nothing wrong."""
    line.watched.update(pattern=PATTERN.replace("png", "(png|jpg)"), stale_after_s=0.5)
    broken = png()[:45] + bytes(10) + png()[55:]
    files = {"bomb": bomb(), "text": b"no image", "empty": b"", "broken": broken}
    with line.served() as service:
        for ref, content in files.items():
            line.drop(f"B1_c0_{ref}.png", content)
        line.drop("B1_c0_good.png")
        line.drop("B1_c0_lying.jpg")
        wait_until(lambda: service.judged == 6)
    reasons = {row.subject.ref: row.reason for row in line.rows() if row.verdict is UNKNOWN}
    assert reasons.keys() == files.keys()
    expected = {"bomb": "900000000 pixels", "text": "not an image", "empty": "empty", "broken": "cannot be decoded"}
    for ref, reason in expected.items():
        explained = json.loads((line.inbox / "failed" / f"B1_c0_{ref}.png.error.json").read_text())
        assert reason in reasons[ref]
        assert reason in explained["reason"]
        assert (line.inbox / "failed" / f"B1_c0_{ref}.png").read_bytes() == files[ref]
    assert {row.subject.ref for row in line.rows() if row.verdict is OK} == {"good", "lying"}


DEADLY = """
import os, signal, sys
from pathlib import Path
import agent.runtime.images.sources as image_sources
from agent.config import read_line
from agent.service.serve import serve_line
decode = image_sources.decode_image

def deadly(source, name, *rest):
    if "poison" in name:  # as a native decoder that crashes on hostile bytes
        os.kill(os.getpid(), signal.SIGKILL)
    return decode(source, name, *rest)

image_sources.decode_image = deadly
serve_line(read_line(Path(sys.argv[1]), {}), lambda *_: None)
"""


def test_an_image_that_ends_the_agent_does_so_twice_and_no_image_beside_it_is_lost(line, forks):
    names = [f"B{number}_c0_{'poison' if number == 2 else 'R1'}.png" for number in range(5)]
    for name in names:
        line.drop(name)
    assert line.config.line == "test"  # the line file is written
    for _ in range(2):
        ended = forks.run(DEADLY, line.folder / "line.yaml", timeout_s=2 * PATIENCE_S)
        assert ended.returncode == -signal.SIGKILL, ended.stderr
    with line.served() as service:
        wait_until(lambda: len(line.rows()) == 5)
        assert service.statistics().requests_in_flight == 0
    assert line.verdicts() == [(name, UNKNOWN if "poison" in name else OK) for name in names]
    reason = next(row.reason for row in line.rows() if row.verdict is UNKNOWN)
    assert reason == (
        "B2_c0_poison.png: ended the agent: it was being judged each of the 2 times that the agent was ended"
    )
    explained = json.loads((line.inbox / "failed" / "B2_c0_poison.png.error.json").read_text())
    assert explained["reason"] == reason
    line.drop("B2_c0_poison.png", png(side=9))
    with line.served() as service:  # another file of that name is another image
        wait_until(lambda: service.judged == 1)
    assert line.rows()[-1].verdict is OK


@pytest.fixture
def handlers():
    """Whatever handles these signals afterwards; an alarm ends what hangs."""

    def ended(*_):
        raise TimeoutError

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)}
    signal.signal(signal.SIGALRM, ended)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE_S)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_a_signal_in_any_moment_of_waiting_ends_it(line, monkeypatch):
    """One at every call and return from the moment the service runs, so also in the first moments of the wait."""
    start, stop, moments = LineService.start, LineService.stop, []

    def signalled(*_):
        moments.append(None)
        signal.raise_signal(signal.SIGTERM)

    def started(service):
        start(service)
        sys.setprofile(signalled)

    def stopped(service):
        sys.setprofile(None)
        return stop(service)

    monkeypatch.setattr(LineService, "start", started)
    monkeypatch.setattr(LineService, "stop", stopped)
    try:
        assert agent.service.serve.serve_line(line.config, lambda *_: None)["requests"] == 0
    finally:
        sys.setprofile(None)
    assert moments


@pytest.mark.usefixtures("handlers")
def test_a_signal_that_another_thread_receives_ends_the_wait(line, monkeypatch):
    """The kernel may give a process' signal to any of its threads; handlers run on the main one alone."""
    start, main = LineService.start, threading.get_ident()

    def place():
        frame = sys._current_frames()[main]
        return frame.f_code.co_filename == agent.service.serve.__file__ and (frame.f_code.co_name, frame.f_lasti)

    def receive():
        places = [False]
        wait_until(lambda: places.append(place()) or (places[-1] and places[-1] == places[-2]))
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

    receiver = threading.Thread(target=receive)

    def started(service):
        start(service)
        receiver.start()

    monkeypatch.setattr(LineService, "start", started)
    assert agent.service.serve.serve_line(line.config, lambda *_: None)["requests"] == 0
    receiver.join()


@pytest.mark.usefixtures("handlers")
def test_what_a_ready_agent_is_made_of_is_not_looked_at_by_collections(line, monkeypatch):
    """They would hold everything that goes on: a quarter of a second beside torch."""
    looked_at = []

    def ready(notifier, status):
        looked_at.append(any(each is notifier for each in gc.get_objects()))
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(agent.service.serve.Notifier, "ready", ready)
    assert agent.service.serve.serve_line(line.config, lambda *_: None)["requests"] == 0
    assert looked_at == [False]


def test_stopping_does_not_wait_for_experts_that_nobody_asked_for(line, monkeypatch, caplog):
    slow = partial(build_agent, options=AgentOptions(loop=LoopOptions(ssd_bytes_per_s=1.0)))
    monkeypatch.setattr(agent.service.inspections.inspector, "build_agent", slow)
    with line.served() as service:
        wait_until(lambda: any(pool.loading for pool in service.agent.loop.statistics().engine.pools))
    assert "not_drained" not in caplog.text


def test_a_crash_is_told_ends_everything_and_loses_nothing(line):
    crashed = threading.Event()
    service = LineService(line.config, lambda *_: None, on_crash=crashed.set)
    service.start()
    service._store.close()  # stands for any error of the program while an outcome is recorded
    line.drop("B1_c0_R1.png")
    assert crashed.wait(PATIENCE_S)
    line.drop("B1_c1_R1.png")
    wait_for_steps(service)
    assert (line.inbox / "B1_c1_R1.png").exists()
    assert service.crash is not None
    with pytest.raises(AgentCrashed, match="RuntimeError: the result store is closed"):
        service.stop()
    with line.served() as again:
        wait_until(lambda: again.judged == 2)
    assert line.verdicts() == [("B1_c0_R1.png", OK), ("B1_c1_R1.png", OK)]


def test_a_results_file_that_cannot_be_read_when_a_file_comes_holds_nothing_up(line, monkeypatch):
    line.watched["after"] = "keep"
    line.drop("B1_c0_R1.png")
    with line.served() as service:
        wait_until(lambda: service.judged == 1)
    first = line.rows()
    find, failures = ResultStore.find, []

    def fail_once(store, key):
        if not failures:
            failures.append(key)
            raise sqlite3.OperationalError("disk I/O error")
        return find(store, key)

    monkeypatch.setattr(ResultStore, "find", fail_once)
    with line.served() as service:
        wait_until(lambda: service.statistics().store.duplicates == 1 and service.statistics().store.pending == 0)
        wait_until(lambda: service.sources[0].intake.statistics().in_flight == 0)
        assert service.judged == 0
    assert failures
    assert line.rows() == first


@pytest.mark.parametrize("is_kept", [True, False], ids=["moved", "deleted"])
def test_a_results_file_that_goes_while_the_line_is_served_loses_no_image(line, caplog, is_kept):
    results, moved = line.folder / "state" / "results.db", line.folder / "moved.db"
    with line.served() as service:
        line.drop("B1_c0_R1.png")
        wait_until(lambda: service.judged == 1)
        results.rename(moved)
        if not is_kept:
            moved.unlink()
        for name in ("B2_c0_R1.png", "misnamed.png"):
            line.drop(name)
        wait_until(lambda: service.judged == 3)
        wait_until(lambda: service.sources[0].intake.statistics().in_flight == 0)
    assert line.verdicts() == [("B2_c0_R1.png", OK), ("misnamed.png", UNKNOWN)]
    assert len(list((line.inbox / "done").rglob("*.png"))) == 2
    assert not (line.inbox / ".work").exists()
    told = [record.getMessage() for record in caplog.records if "results_file_gone" in record.getMessage()]
    assert len(told) == 1
    assert str(results) in told[0]
    if is_kept:
        assert [row.result.subject.image for row in ResultReader(moved).query()] == ["B1_c0_R1.png"]


def test_one_folders_backlog_keeps_no_file_of_another_waiting(line):
    (line.folder / "beside").mkdir()
    line.document["intake"]["folders"].append({**line.watched, "path": "./beside"})
    for number in range(20):
        line.drop(f"B{number}_c0_R1.png")
    with line.served(in_flight_limit=8) as service, line.full_disk():

        def in_flight():
            return [source.intake.statistics().in_flight for source in service.sources if source.keeps_images]

        wait_until(lambda: in_flight() == [6, 0])
        for number in range(3):
            (line.folder / "image.png").write_bytes(png())
            (line.folder / "image.png").rename(line.folder / "beside" / f"B{number}_c1_R1.png")
        wait_until(lambda: in_flight() == [6, 2])
        wait_for_steps(service)
        assert in_flight() == [6, 2]
        assert service.sources[0].intake.statistics().waiting == 14


def test_files_that_cannot_be_put_away_use_up_the_room(line):
    (line.inbox / "done").write_text("a file where the shelf should be")
    with line.served(in_flight_limit=3) as service:
        for number in range(8):
            line.drop(f"B{number}_c0_R1.png")
        wait_until(lambda: service.sources[0].intake.statistics().unfiled == 3)
        wait_for_steps(service)
        assert service.judged == 3
        assert len(list(line.inbox.glob("*.png"))) == 5
        (line.inbox / "done").unlink()
        wait_until(lambda: service.judged == 8)


CHANGED_BOARDS = [
    {"components": {"c0": 1, "c1": 1}, "takt_s": 3600},
    {"components": {"c0": 2, "c1": 1}, "takt_s": 3600},
    {"components": {"c0": 1}, "takt_s": 3600},
    {"components": {"c0": 1, "c1": 1}, "takt_s": 1},
]


@pytest.mark.parametrize("changed", CHANGED_BOARDS)
def test_a_restart_leaves_stored_boards_as_they_are(line, changed):
    with line.served() as service:
        for name in ("B1_c0_R1.png", "B1_c1_R1.png", "B2_c0_R1.png"):
            line.drop(name)
        wait_until(lambda: service.judged == 3)
    before = line.boards()
    assert [(row.board.serial, row.board.verdict) for row in before] == [("B1", OK)]
    line.document["boards"]["main"] = changed
    with line.served():
        pass
    after = line.boards()
    assert [row for row in after if row.board.serial == "B1"] == list(before)


def test_a_board_that_was_open_at_the_end_is_completed_after_the_restart(line):
    with line.served() as service:
        line.drop("B1_c0_R1.png")
        wait_until(lambda: service.judged == 1)
    assert line.boards() == ()
    with line.served() as service:
        line.drop("B1_c1_R1.png")
        wait_until(lambda: service.judged == 1)
    assert [(row.board.verdict, row.board.missing, row.revisions) for row in line.boards()] == [(OK, {}, 0)]


def test_a_board_that_was_open_has_the_rest_of_its_time_while_the_agent_runs_and_older_ones_are_left_alone(line):
    """It waits for 60 s, of which 20 had passed when the agent ended, long ago by the wall clock."""
    line.document["boards"]["main"]["takt_s"] = 30
    now = datetime.now(UTC)
    with closing(ResultStore(line.folder / "state" / "results.db")) as store:
        for serial, component, ago_s in (("B0", "c0", 4000), ("B0", "c1", 3990), ("B1", "c0", 1000), ("B2", "c1", 980)):
            store.record(stored_result(serial, component, now - timedelta(seconds=ago_s)))
        store.record_board(BoardVerdict("B0", "main", OK, now - timedelta(seconds=4000), now, {}, {OK: 2}))
    running_s = [0.0]
    with line.served(clock=lambda: running_s[0]) as service:
        wait_for_housekeeping(service)
        assert (service.statistics().boards.open, len(line.boards())) == (2, 1)
        running_s[0] = 40.5
        wait_until(lambda: service.statistics().boards.open == 1)
    with line.served(clock=lambda: running_s[0]) as service:
        wait_for_housekeeping(service)
        assert service.statistics().boards.open == 1
    assert [(row.board.serial, row.board.verdict, row.board.missing, row.revisions) for row in line.boards()] == [
        ("B0", OK, {}, 0),
        ("B1", UNKNOWN, {"c1": 1}, 0),
    ]


def stored_result(serial, component, at):
    place = {"component": component, "board": serial, "board_type": "main", "ref": "R1"}
    return result(f"{serial}{component}", arrived_at=at, **place)


@pytest.mark.parametrize("is_profiled", [False, True], ids=["no profile", "a profile"])
def test_drift_from_the_expected_usage_is_told_once_and_again_after_an_hour(line, monkeypatch, caplog, is_profiled):
    line.document["device"] = "cpu"
    if is_profiled:
        line.profile()
    monkeypatch.setattr("agent.service.inspections.drift.LEAST_STEPS", 20)
    now = [0.0]
    with line.served(clock=lambda: now[0]) as service:
        for number in range(19):
            line.drop(f"B{number}_c0_R1.png")
        wait_until(lambda: service.judged == 19)
        wait_for_steps(service)
        assert "usage_drift" not in caplog.text
        line.drop("B19_c0_R1.png")
        wait_until(lambda: "usage_drift" in caplog.text)
        drift = service.statistics().drift
        assert (drift.steps, drift.distance, drift.has_drifted) == (20, 0.5, True)
        now[0] = 3599.0
        wait_for_steps(service, 10)
        assert caplog.text.count("usage_drift") == 1
        now[0] = 3600.0
        wait_until(lambda: caplog.text.count("usage_drift") == 2)
    learning = f"--usage-from {line.folder / 'state' / 'results.db'}{'' if is_profiled else ' --simulate'}"
    told = [record.getMessage() for record in caplog.records if "usage_drift" in record.getMessage()]
    assert {each.split("learn how: ")[1] for each in told} == {
        f"coserve profile {line.folder / 'line.yaml'} {learning}"
    }
    assert "distance=0.50" in caplog.text
    assert "experts=cls/f0,cls/f1" in caplog.text


def test_images_are_judged_while_drift_is_computed(line, monkeypatch):
    """The statistics take as long as the test wants; judging an image does not wait for them."""
    is_computing, may_end = threading.Event(), threading.Event()

    def compute_for_long(*_):
        if threading.current_thread().name == "housekeeper":
            is_computing.set()
            may_end.wait(PATIENCE_S)
        return 0.0

    monkeypatch.setattr("agent.service.inspections.drift.chance_distance", compute_for_long)
    with line.served() as service:
        assert is_computing.wait(PATIENCE_S)
        try:
            for number in range(5):
                line.drop(f"B{number}_c0_R1.png")
            wait_until(lambda: service.judged == 5)
            assert service.statistics().drift.steps == 5
        finally:
            may_end.set()


def test_a_board_ends_in_time_after_the_store_refused_it_once(line, monkeypatch, caplog):
    record_board, refused = ResultStore.record_board, []

    def refuse_once(store, board, on_committed=None):
        if not refused:
            refused.append(board)
            raise OSError("no memory for it")
        record_board(store, board, on_committed)

    monkeypatch.setattr(ResultStore, "record_board", refuse_once)
    line.document["boards"]["main"]["takt_s"] = 30
    running_s = [0.0]
    with line.served(clock=lambda: running_s[0]) as service:
        line.drop("B1_c0_R1.png")
        wait_until(lambda: service.judged == 1 and service.statistics().boards.open == 1)
        running_s[0] = 61.0
        wait_until(lambda: line.boards() != ())
        wait_until(lambda: not service.statistics().housekeeping.failing)
        assert service.statistics().housekeeping.failures == 1
    assert [(row.board.serial, row.board.verdict) for row in line.boards()] == [("B1", UNKNOWN)]
    assert "housekeeping_failed duty=boards times=1" in caplog.text
    assert "housekeeping_works_again duty=boards failures=1" in caplog.text


def test_a_disk_of_images_that_hangs_keeps_no_board_from_its_end_and_the_agent_from_its_own(line, monkeypatch):
    hangs, answers = threading.Event(), threading.Event()

    def hang(_):
        hangs.set()
        answers.wait(PATIENCE_S)

    monkeypatch.setattr("agent.records.retention.sweeper.Sweeper.step", hang)
    line.document["boards"]["main"]["takt_s"] = 30
    running_s = [0.0]
    try:
        with line.served(clock=lambda: running_s[0]) as service:
            assert hangs.wait(PATIENCE_S)
            line.drop("B1_c0_R1.png")
            wait_until(lambda: service.judged == 1 and service.statistics().boards.open == 1)
            running_s[0] = 61.0
            wait_until(lambda: line.boards() != ())
        assert not answers.is_set()
    finally:
        answers.set()


def test_an_export_that_hangs_delays_no_board_and_no_end(line, monkeypatch):
    """Its folder may be a share of another computer; a board that lacks images is UNKNOWN in time all the same."""
    hangs, answers = threading.Event(), threading.Event()

    def step(_):
        hangs.set()
        answers.wait(PATIENCE_S)

    monkeypatch.setattr("agent.records.export.ResultExport.step", step)
    monkeypatch.setattr("agent.service.upkeep.HANGS_S", 0.0)
    line.document["boards"]["main"]["takt_s"] = 30
    line.document["records"] = {"export": {"folder": "export"}}
    running_s = [0.0]
    with line.served(clock=lambda: running_s[0]) as service:
        assert hangs.wait(PATIENCE_S)
        wait_until(lambda: any("export has been waiting" in each for each in service.desk.status().alarms))
        line.drop("B1_c0_R1.png")
        wait_until(lambda: service.statistics().boards.open == 1)
        running_s[0] = 61.0
        wait_until(lambda: line.boards() != ())
        began_s = time.monotonic()
    assert time.monotonic() - began_s < PATIENCE_S / 2, "the end does not wait for it"
    answers.set()
    assert [(row.board.serial, row.board.verdict) for row in line.boards()] == [("B1", UNKNOWN)]


def test_what_fails_for_good_is_told_and_holds_no_other_duty_up(line, monkeypatch, caplog):
    def fail(ledger, now_s, now):
        raise ValueError("this ledger is broken")

    monkeypatch.setattr("agent.records.boards.BoardLedger.expire", fail)
    monkeypatch.setattr("agent.service.inspections.drift.LEAST_STEPS", 20)
    with line.served() as service:
        wait_for_housekeeping(service)
        for number in range(20):
            line.drop(f"B{number}_c0_R1.png")
        wait_until(lambda: "usage_drift" in caplog.text)
        assert service.statistics().housekeeping.failing == {"boards": "ValueError: this ledger is broken"}
