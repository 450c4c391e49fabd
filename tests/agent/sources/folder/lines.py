"""Watched folders for tests: one under a virtual clock, one with a thread and real events."""

import os
import queue
import re
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import dedent
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from agent.line_file.intake import FolderSection
from agent.sources.folder.files.naming import Naming
from agent.sources.folder.folder import FolderSource
from agent.subject import Subject
from experts.expert import Verdict
from tests.pictures import encoded

PATTERN = r"(?P<board>[^_]+)_(?P<component>[^_]+)_(?P<ref>[^.]+)\.\w+"
NAMING = Naming(re.compile(PATTERN), frozenset({"r", "c"}), ("main",))
SIDECARS = replace(NAMING, pattern=None)
NOON = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)
PIXELS = np.random.default_rng(3).integers(1, 255, (80, 80, 3), dtype=np.uint8)
WAIT_S = 30.0
ROOT = Path(__file__).parents[4]


PNG = encoded(PIXELS)
IMAGES = {
    "png": PNG, "jpg": encoded(PIXELS, "JPEG", quality=95), "bmp": encoded(PIXELS, "BMP"),
    "tiff": encoded(PIXELS, "TIFF"),
}  # fmt: skip


class Refusal(NamedTuple):
    subject: Subject
    reason: str


class Unread:
    """Stands for the reader: a claimed image is handed to a test, and its file is not read."""

    waiting, held_bytes, alarm = 0, 0, None

    def __init__(self, read_image):
        self.read_image = read_image

    def start(self): ...

    def release_bytes(self, size_bytes): ...


@contextmanager
def without_case(monkeypatch, root):
    """Below ``root``, files are found as on a disk that keeps names and compares them without case."""
    listdir = os.listdir

    def spelled(name, names):
        return next((each for each in names if each.casefold() == name.casefold()), name)

    def found(path, folder=None):
        text = os.fspath(path)
        if isinstance(folder, int):
            return spelled(text, listdir(folder))
        place = root
        if not isinstance(text, str) or not text.startswith(f"{root}/"):
            return path
        for part in text.removeprefix(f"{root}/").split("/"):
            place = place / (spelled(part, listdir(place)) if place.is_dir() else part)
        return str(place)

    def patched(act):
        def acting(path, *rest, dir_fd=None, **options):
            given = {} if dir_fd is None else {"dir_fd": dir_fd}
            return act(found(path, dir_fd), *rest, **given, **options)

        return acting

    def renamed(old, new, *, src_dir_fd=None, dst_dir_fd=None):
        rename(found(old, src_dir_fd), found(new, dst_dir_fd), src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    def linked(old, new, *, src_dir_fd, dst_dir_fd, **options):
        link(found(old, src_dir_fd), found(new, dst_dir_fd), src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd, **options)

    rename, link = os.rename, os.link
    with monkeypatch.context() as patching:
        for name in ("stat", "lstat", "open", "mkdir", "unlink"):
            patching.setattr(os, name, patched(getattr(os, name)))
        patching.setattr(os, "rename", renamed)
        patching.setattr(os, "link", linked)
        yield


class Line:
    """A folder under a virtual clock, and the images that it claimed and refused."""

    def __init__(self, root, owner="demo", **keys):
        self.root = root
        self.now = 0.0
        self.room = 10_000
        self.config = SimpleNamespace(state=root.parent / "state")
        self.has_room = lambda _: len(self.arrivals) < self.room
        self.stores_refusals = True
        self.arrivals = []
        self.refusals = []
        usual = {} if keys.get("identity") == "sidecar" else {"pattern": PATTERN}
        section = FolderSection.model_validate({"path": str(root), **usual, **keys}, context={"folder": root.parent})
        self.naming = SIDECARS if section.has_sidecars else NAMING
        root.mkdir(exist_ok=True)
        self.source = FolderSource(section, self.naming, self, owner=owner, wall=lambda: NOON)
        self.source._clock = lambda: self.now
        self.source._reader = Unread(self.arrivals.append)

    def expects(self, subject, source):
        return True

    def refuse_subject(self, subject, reason, source):
        self.refusals.append(Refusal(subject, reason))
        if self.stores_refusals:
            source.verdict_committed(subject, Verdict.UNKNOWN, reason)

    def name_by(self, naming):
        self.source._claimer.naming = naming

    def run(self, seconds):
        """Turn the clock, with a step each tenth of a second."""
        for _ in range(round(seconds * 10) + 1):
            self.source.step(self.now)
            self.now = round(self.now + 0.1, 3)

    def write(self, *names):
        for name in names:
            (self.root / name).write_bytes(PNG)

    def arrive(self, *names):
        self.write(*names)
        self.run(5)
        return self.arrivals[-1]

    def settle(self, verdict=Verdict.OK, seconds=5):
        for arrival in self.arrivals:
            self.source.verdict_committed(arrival.subject, verdict, None)
        self.run(seconds)

    @property
    def offered(self):
        return [arrival.subject.image for arrival in self.arrivals]

    @property
    def refused(self):
        return {refusal.subject.image: refusal.reason for refusal in self.refusals}

    def files(self):
        return {str(path.relative_to(self.root)) for path in self.root.rglob("*") if not path.is_dir()}


class LiveLine(Line):
    """The same with its thread, real events and a real clock."""

    def __enter__(self):
        self.came = queue.Queue()
        self.source._clock = time.monotonic
        self.source._reader = Unread(self.came.put)
        self.source.start()
        return self

    def __exit__(self, *_):
        self.source.close(WAIT_S)

    def next(self):
        return self.came.get(timeout=WAIT_S)


def identity(board, component, ref, board_type):
    """Fields that a name or a sidecar gives."""
    return {"board": board, "component": component, "ref": ref, "board_type": board_type}


def identity_of(subject):
    return identity(subject.board, subject.component, subject.ref, subject.board_type)


ANOTHER_USER = """
import os, sys
from pathlib import Path
from tests.agent.sources.folder.lines import PNG, Line
if os.geteuid() == 0:
    os.chown(sys.argv[1], 65534, 65534)
    os.seteuid(65534)
"""


def printed_by_another_user(steps, **config):
    """Lines printed by these steps on a ``line``, under a user whom permissions bind."""
    script = f"{ANOTHER_USER}line = Line(Path(sys.argv[1]), **{config})\n{dedent(steps)}"
    with TemporaryDirectory(dir="/tmp") as folder:  # each start of pytest closes its own folders to other users
        command = [sys.executable, "-c", script, f"{folder}/inbox"]
        os.chmod(folder, 0o755)
        os.mkdir(f"{folder}/inbox")
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()
