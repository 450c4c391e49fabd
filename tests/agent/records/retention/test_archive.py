"""Kept images: whole or not there, once for one image, never in the place of another."""

import os
import queue
import threading
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agent.records.retention.archive import DAY, KEEP_DEADLINE_S, KEPT, ImageArchive, ImageKeeper, file_name
from experts.expert import Verdict
from tests.lines import NOON
from tests.waiting import until

PNG = b"\x89PNG\r\n\x1a\n" + bytes(100)


@pytest.mark.parametrize(("keeps", "wanted"), [("none", ""), ("ng", "NG UNKNOWN"), ("all", "OK NG UNKNOWN")])
def test_archive_keeps_the_verdicts_that_the_line_file_names(tmp_path, keeps, wanted):
    archive = ImageArchive(tmp_path, keeps)
    assert {verdict for verdict in Verdict if archive.wants(verdict)} == {Verdict(each) for each in wanted.split()}


def test_kept_image_is_a_file_of_its_day_named_by_its_key(tmp_path):
    archive = ImageArchive(tmp_path / "images", "all")
    relpath = archive.keep(PNG, "cam 1/board B1#R7", NOON)
    day, name = relpath.split("/")
    assert day == f"{NOON.astimezone():%Y-%m-%d}"
    assert name.startswith("board_B1~")
    assert name.endswith(".png")
    assert (tmp_path / "images" / relpath).read_bytes() == PNG
    assert [path.name for path in (tmp_path / "images" / day).iterdir()] == [name], "no draft is left"


@pytest.mark.parametrize(
    ("content", "suffix"),
    [(PNG, ".png"), (b"\xff\xd8\xff", ".jpg"), (b"BM....", ".bmp"), (b"II*\0", ".tif"), (b"MM\0*", ".tif"),
     (b"RIFF....WEBP", ".webp"), (b"RIFF....WAVE", ".img"), (b"", ".img")],
)  # fmt: skip
def test_suffix_of_a_kept_image_follows_its_bytes(content, suffix):
    assert Path(file_name(content, "x.anything")).suffix == suffix


@given(name=st.text(st.characters(exclude_categories=["Cs"])))
@example("inbox/.hidden")
def test_every_name_makes_a_file_name_that_is_found_again(name):
    made = file_name(b"x", name)
    assert not set("/\x00") & set(made)
    assert not made.startswith(".")
    assert len(made.encode()) < 255 - len("..tmp")
    assert KEPT.fullmatch(made)
    assert DAY.fullmatch("2026-05-01")


def test_image_that_was_kept_again_is_not_discarded(tmp_path):
    archive = ImageArchive(tmp_path, "all")
    relpath = archive.keep(PNG, "a", NOON)
    os.utime(tmp_path / relpath, ns=(1, 1))
    archive.keep(PNG, "a#part", NOON)
    assert not archive.discard(relpath, 1)
    assert (tmp_path / relpath).exists()
    assert archive.discard(relpath, (tmp_path / relpath).stat().st_mtime_ns)
    assert not (tmp_path / relpath).exists()
    assert archive.discard(relpath, 1), "gone is gone"


KEEPS_ALL = """
import sys
from datetime import UTC, datetime
from pathlib import Path
from agent.records.retention.archive import ImageArchive

archive = ImageArchive(Path(sys.argv[1]), "all")
number = 0
while True:
    archive.keep(bytes([number % 256]) * 300_000, f"image-{number}", datetime(2026, 5, 1, tzinfo=UTC))
    number += 1
    print(number, flush=True)
"""


@pytest.mark.parametrize("kept", [1, 20])
def test_killed_process_leaves_no_partial_image_under_its_name(tmp_path, forks, kept):
    process = forks.start(KEEPS_ALL, tmp_path)
    until(lambda: process.report.count("\n") > kept)
    process.kill()
    found = [path for path in tmp_path.rglob("*") if path.is_file() and not path.name.startswith(".")]
    assert all(KEPT.fullmatch(path.name) for path in tmp_path.rglob("*") if path.is_file()), "a draft can go one day"
    assert len(found) >= kept
    assert {path.stat().st_size for path in found} == {300_000}


def kept_by(keeper, content, name="a"):
    told = queue.Queue()
    keeper.keep(content, name, NOON, told.put)
    return told.get(timeout=60)


def test_image_refused_by_the_disk_is_logged_once_and_delays_no_verdict(tmp_path, caplog):
    (tmp_path / "images").write_text("in the way")
    keeper = ImageKeeper(ImageArchive(tmp_path / "images", "all"))
    assert ([kept_by(keeper, PNG), kept_by(keeper, PNG)], keeper.statistics().not_kept) == ([None, None], 2)
    assert keeper.statistics().alarm is not None
    (tmp_path / "images").unlink()
    assert kept_by(keeper, PNG) is not None
    assert keeper.stop(60.0)
    assert (keeper.statistics().kept, keeper.statistics().alarm) == (1, None)
    told = [record.getMessage().split(" ")[0] for record in caplog.records]
    assert told == ["image_not_kept", "images_kept_again"]


def test_images_wait_for_a_slow_disk_up_to_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr("agent.records.retention.archive.WAITING_BYTES", 200)
    archive = ImageArchive(tmp_path, "all")
    keeper, told, hangs = ImageKeeper(archive), queue.Queue(), threading.Event()
    monkeypatch.setattr(archive, "keep", lambda content, name, at: hangs.wait(60) and name)
    for name in ("a", "b", "c"):
        keeper.keep(bytes(100), name, NOON, told.put)
    assert told.get(timeout=60) is None, "the third one is told at once"
    hangs.set()
    assert [told.get(timeout=60), told.get(timeout=60)] == ["a", "b"]
    assert keeper.stop(60.0)
    assert keeper._waiting_bytes == 0


def test_one_image_waiting_too_long_is_not_taken_for_a_hanging_disk(tmp_path, monkeypatch):
    """Its deadline passes on the keeper's way to it: nothing of it is written, and the next one is kept."""
    archive, told, passed_s, begin = ImageArchive(tmp_path, "all"), queue.Queue(), [0.0], threading.Event()
    monkeypatch.setattr("agent.records.retention.archive.time.monotonic", lambda: passed_s[0])

    def slow(content, name, at):
        assert begin.wait(60)
        passed_s[0] += KEEP_DEADLINE_S
        return name

    monkeypatch.setattr(archive, "keep", slow)
    keeper = ImageKeeper(archive)
    keeper.keep(PNG, "a", NOON, told.put)
    keeper.keep(PNG, "b", NOON, told.put)
    begin.set()
    assert ([told.get(timeout=60), told.get(timeout=60)], kept_by(keeper, PNG, "c")) == (["a", None], "c")
    monkeypatch.undo()
    assert keeper.stop(60.0)
    assert (keeper._waiting_bytes, keeper.statistics().alarm) == (0, None)


def test_hanging_disk_delays_one_image_to_its_deadline_and_later_ones_not_at_all(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("agent.records.retention.archive.KEEP_DEADLINE_S", 0.2)
    archive = ImageArchive(tmp_path, "all")
    keeper, told, hangs, tried = ImageKeeper(archive), queue.Queue(), threading.Event(), []
    monkeypatch.setattr(archive, "keep", lambda content, name, at: (tried.append(name), hangs.wait(60)) and name)
    for name in ("a", "b"):
        keeper.keep(PNG, name, NOON, told.put)
    assert ([told.get(timeout=60), told.get(timeout=60)], kept_by(keeper, PNG, "c")) == ([None, None], None)
    assert keeper._waiting_bytes == 2 * len(PNG), "no further one waits"
    assert "does not answer within 0.2 s" in str(keeper.statistics().alarm)
    assert "image_not_kept image=a " in caplog.text
    hangs.set()
    while kept_by(keeper, PNG, "d") is None:
        pass
    assert keeper.stop(60.0)
    assert set(tried) == {"a", "d"}, "what nobody waits for any more is not written"
    assert (keeper._waiting_bytes, keeper.statistics().alarm) == (0, None)
    assert told.empty(), "each was told once"
