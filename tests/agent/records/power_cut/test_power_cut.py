"""A power cut at any moment leaves every verdict that was told, and every request that was accepted.

The line runs in a process of its own, all of whose writes are written down (write_log.c); from that the disk is made
as it may be found after the power came back (disk.py): without what was not synced, or with some of it.
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pytest

from agent.records.journal import JournalReader
from agent.records.outbox import OutboxReader
from agent.records.result_writer import ResultStore
from tests.agent.records.power_cut.disk import EVERYTHING, NOTHING, Disk, Entry, built, read_log, some
from tests.agent.records.power_cut.line_process import image, verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parents[4]
REQUESTS = 300
CUTS = 24  # of each kind; a tenth of a second each


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """What is preloaded; without a compiler these tests fail, as nothing else proves what they do."""
    try:
        return built(tmp_path_factory.mktemp("library"))
    except FileNotFoundError as error:
        pytest.fail(str(error))


@dataclass(frozen=True, slots=True)
class Recording:
    """All that a line did to its folder, and what it said, in one order."""

    folder: Path
    entries: Sequence[Entry]

    def printed(self, moment):
        said = b"".join(entry.content for entry in self.entries[:moment] if entry.kind == "P")
        return [line.split() for line in said.decode().splitlines()]

    def left(self, moment, survivors, into):
        into.mkdir()
        Disk(self.folder, self.entries[:moment]).leave(survivors, into)
        return into / "line" / "state"

    @property
    def print_moments(self):
        return [number for number, entry in enumerate(self.entries, start=1) if entry.kind == "P"]


@pytest.fixture
def recorded(library, tmp_path):
    def run(requests, synchronous="-"):
        folder, log = tmp_path / "disk", tmp_path / "writes"
        folder.mkdir()
        command = [sys.executable, Path(__file__).with_name("line_process.py"), folder, str(requests), synchronous]
        preload = {"LD_PRELOAD": library, "POWER_CUT_FOLDER": folder, "POWER_CUT_LOG": log, "PYTHONPATH": ROOT}
        environment = {**os.environ, **{name: str(value) for name, value in preload.items()}}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        recording = Recording(folder, read_log(log))
        assert "".join(" ".join(words) + "\n" for words in recording.printed(len(recording.entries))) == done.stdout
        return recording

    return run


def content_below(folder):
    """By name; but not what processes share while they run, which is no file's content to anybody."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.endswith("-shm"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def faults(state, told):
    """What of that which was told is not there, and what is there that must not be."""
    file = state / "results.db"
    if not file.exists():
        return ["all is lost: there is no file of results"] if told else []
    try:
        return differences(state, told)
    except sqlite3.DatabaseError as error:
        return [f"all is lost: {error}"]


def differences(state, told):
    file = state / "results.db"
    with closing(ResultStore(file)) as store:
        rows = list(store.query())
        judged = {row.subject.key: row for row in rows}
        unfinished = {
            each.subject.key: JournalReader(file).content(each.image) for each in JournalReader(file).unfinished()
        }
        messages = OutboxReader(file).waiting("mqtt", 10**6)
    found = [f"{key} is unfinished and judged" for key in unfinished.keys() & judged.keys()]
    found += [f"the image of {key} is broken" for key, read in unfinished.items() if read != image(number_of(key))]
    found += [
        f"{key} is {result.verdict}" for key, result in judged.items() if result.verdict != verdict(number_of(key))
    ]
    found += [f"{key} has no image" for key, result in judged.items() if not is_kept(state, key, result.kept_as)]
    for what, key, *_ in told:
        if key not in judged and (what == "verdict" or key not in unfinished):
            found.append(f"{key} was {what}, and is lost")
    seqs = [row.seq for row in rows]
    if seqs != list(range(1, len(seqs) + 1)):
        found.append(f"the numbers are {seqs}")
    if [json.loads(message.payload)["seq"] for message in messages] != seqs:
        found.append("messages and results differ")
    return found


def number_of(key):
    return int(key.removeprefix("key-"))


def is_kept(state, key, kept_as):
    path = state / "images" / str(kept_as)
    return path.is_file() and path.read_bytes() == image(number_of(key))


def test_reported_rows_and_images_survive_a_power_cut_at_any_moment(recorded, tmp_path):
    """At moments of chance, and at those in which somebody has just heard something."""
    recording, chance = recorded(REQUESTS), Random(22)
    moments = chance.sample(range(1, len(recording.entries)), CUTS) + chance.sample(recording.print_moments, CUTS)
    found = {}
    for number, moment in enumerate([*moments, len(recording.entries)]):
        survivors = some(chance) if number % 2 else NOTHING
        state = recording.left(moment, survivors, tmp_path / f"cut-{number}")
        if wrong := faults(state, recording.printed(moment)):
            found[moment, survivors is NOTHING] = wrong
    assert found == {}
    assert len(recording.printed(len(recording.entries))) > REQUESTS


def test_line_with_fewer_syncs_is_detected(recorded, tmp_path):
    """The check can fail: where a commit is not synced, what was told last is lost."""
    recording = recorded(40, "NORMAL")
    moment = recording.print_moments[-1]
    state = recording.left(moment, NOTHING, tmp_path / "cut")
    assert any("lost" in fault for fault in faults(state, recording.printed(moment)))


def test_log_of_writes_is_complete(recorded, tmp_path):
    """What is made from all of it is what really lies on the disk, byte by byte."""
    recording = recorded(40)
    recording.left(len(recording.entries), EVERYTHING, tmp_path / "all")
    assert content_below(tmp_path / "all") == content_below(recording.folder)
    assert len(content_below(recording.folder)) > 30
