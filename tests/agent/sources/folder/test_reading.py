"""Reading of a folder's images under a virtual clock: real files, and a filesystem that fails on command."""

import errno
import os
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import pytest

from agent.faults.errors import FileChanged
from agent.sources.folder.claiming import ClaimedImage
from agent.sources.folder.files.identity import Claimed
from agent.sources.folder.files.readiness import Sighting
from agent.sources.folder.reading import BACKOFF, PATIENCE_S, ImageReader, ReaderCallbacks, read_as_seen
from experts.errors import ImageTooLarge
from experts.images import DEFAULT_MAX_PIXELS
from tests.lines import subject

NOON = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)
CONTENT = b"what a camera wrote"
WAIT_S = 30.0


def arrival_of(path, *, is_ours=True):
    status = path.lstat()
    seen = Sighting(status.st_ino, status.st_size, status.st_mtime_ns)
    return ClaimedImage(subject(path.name), Claimed(path.name, seen, path, is_ours))


@dataclass
class Desk:
    """A reader under a virtual clock, and its answers. ``trouble``: the error of every read."""

    budget_bytes: int = 1_000_000
    now: float = 0.0
    is_sound: bool = True
    trouble: OSError | None = None
    tries: list[float] = field(default_factory=list)
    read: list[tuple[str, bytes]] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    large: list[str] = field(default_factory=list)

    def __post_init__(self):
        answers = ReaderCallbacks(
            lambda arrival, content: self.read.append((arrival.subject.key, content)),
            lambda arrival: self.changed.append(arrival.subject.key),
            lambda _arrival, reason: self.unreadable.append(reason),
            lambda _: self.is_sound,
            self._during_large,
        )
        self.reader = ImageReader("inbox", answers, budget_bytes=self.budget_bytes)

    def read_file(self, arrival, max_pixels):
        self.tries.append(self.now)
        if self.trouble is not None:
            raise self.trouble
        return read_as_seen(arrival, max_pixels)

    @contextmanager
    def _during_large(self, arrival):
        before = len(self.tries)
        yield
        self.large.append(f"{arrival.subject.key} read {len(self.tries) - before} times")

    def run(self, seconds):
        """Turn the clock from one due step to the next."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(self.now + max(self.reader.step(self.now), 0.001), until)
        self.reader.step(self.now)


@pytest.fixture
def desk(monkeypatch):
    made = Desk()
    monkeypatch.setattr("agent.sources.folder.reading.read_as_seen", made.read_file)
    return made


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "b1_r_R1.png"
    path.write_bytes(CONTENT)
    return path


def test_file_that_alone_cannot_be_read_is_refused_after_the_patience(desk, file):
    desk.trouble = OSError(errno.EIO, "Input/output error")
    desk.reader.read_image(arrival_of(file))
    desk.run(PATIENCE_S - 1)
    assert desk.unreadable == []
    desk.run(2 * BACKOFF.longest_s)
    assert desk.unreadable == ["b1_r_R1.png: cannot be read (Input/output error), tried for 61 s"]
    tries = len(desk.tries)
    desk.run(PATIENCE_S)
    assert len(desk.tries) == tries


def test_files_of_a_vanished_folder_wait_without_limit(desk, file):
    desk.trouble, desk.is_sound = OSError(errno.EHOSTDOWN, "Host is down"), False
    desk.reader.read_image(arrival_of(file))
    desk.run(100 * PATIENCE_S)
    desk.is_sound = True  # the share is back, a moment after the file was asked for in vain
    desk.run(BACKOFF.longest_s)
    assert (desk.read, desk.changed, desk.unreadable) == ([], [], [])
    assert (desk.reader.waiting, desk.reader.alarm) == (1, "Host is down")
    desk.trouble = None
    desk.run(BACKOFF.longest_s)
    assert desk.read == [(file.name, CONTENT)]
    assert (desk.reader.waiting, desk.reader.alarm) == (0, None)


def test_program_error_in_one_read_affects_that_file_alone(desk, file):
    good = arrival_of(file)
    lost = replace(good.file, path=None)  # type: ignore[arg-type]  # stands for an error of the program
    broken = replace(good, file=lost)
    desk.reader.read_image(broken)
    desk.reader.read_image(arrival_of(file))
    desk.reader.step(0.0)
    assert desk.read == [(file.name, CONTENT)]
    assert desk.reader.waiting == 1


def test_kept_file_removed_by_its_owner_gets_no_verdict(file):
    desk = Desk()
    arrival = arrival_of(file, is_ours=False)
    file.unlink()
    desk.reader.read_image(arrival)
    desk.reader.step(0.0)
    assert (desk.changed, desk.unreadable) == ([file.name], [])


def rewritten(file):
    file.write_bytes(CONTENT.upper())
    os.utime(file, ns=(1, 1))


def replaced(file):
    other = file.with_name("other")
    other.write_bytes(CONTENT)
    status = file.stat()
    other.replace(file)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def linked(file):
    file.rename(file.with_name("elsewhere"))
    file.symlink_to("elsewhere")


def piped(file):
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize("change", [rewritten, replaced, linked, piped])
def test_file_replaced_since_it_was_seen_is_not_read(file, change):
    arrival = arrival_of(file, is_ours=False)
    change(file)
    with pytest.raises(FileChanged):
        read_as_seen(arrival, DEFAULT_MAX_PIXELS)


def test_claimed_file_may_have_another_inode(file):
    arrival = arrival_of(file)
    replaced(file)
    assert read_as_seen(arrival, DEFAULT_MAX_PIXELS) == CONTENT


def test_file_written_to_during_a_read_is_not_taken(file, monkeypatch):
    arrival, fstat, looks = arrival_of(file, is_ours=False), os.fstat, []

    def written_after_the_first_look(descriptor):
        looks.append(fstat(descriptor))
        if len(looks) == 1:
            with file.open("r+b") as writer:
                writer.write(b"WHAT")
            os.utime(file, ns=(looks[0].st_atime_ns, looks[0].st_mtime_ns))  # as a careful copy does
        return looks[-1]

    monkeypatch.setattr(os, "fstat", written_after_the_first_look)
    with pytest.raises(FileChanged):
        read_as_seen(arrival, DEFAULT_MAX_PIXELS)


def test_file_longer_than_any_image_is_refused_unread(tmp_path):
    huge = tmp_path / "huge.png"
    with huge.open("wb") as stream:
        stream.truncate(50_000_000_000)
    arrival = arrival_of(huge)
    with pytest.raises(ImageTooLarge, match="50000000000 bytes"):
        read_as_seen(arrival, DEFAULT_MAX_PIXELS)
    desk = Desk()
    desk.reader.read_image(arrival)
    desk.reader.step(0.0)
    assert desk.unreadable == [
        f"huge.png: 50000000000 bytes are more than any image of {DEFAULT_MAX_PIXELS} pixels has"
    ]


def test_large_file_is_announced_during_its_read(desk, file, monkeypatch):
    monkeypatch.setattr("agent.sources.folder.reading.LARGE_BYTES", len(CONTENT))
    larger = file.with_name("larger")
    larger.write_bytes(CONTENT + b".")
    for path in (file, larger):
        desk.reader.read_image(arrival_of(path))
    desk.reader.step(0.0)
    assert (len(desk.read), desk.large) == (2, ["larger read 1 times"])


def test_read_images_stay_within_the_byte_budget_but_for_the_last(tmp_path):
    desk = Desk(budget_bytes=25)
    for number in range(5):
        path = tmp_path / f"{number}.png"
        path.write_bytes(b"x" * 10)
        desk.reader.read_image(arrival_of(path))
    for released, count in ((0, 3), (5, 3), (5, 4)):
        desk.reader.release_bytes(released)
        desk.reader.step(0.0)
        assert [key for key, _ in desk.read] == [f"{number}.png" for number in range(count)]
