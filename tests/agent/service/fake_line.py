"""A line of fake experts, served in this process: by its desk or from a folder, and what breaks on the way."""

import json
import sqlite3
import threading
from contextlib import closing, contextmanager

import cv2
import numpy as np
import yaml
from PIL import Image

from agent.records.journal import JournalReader
from agent.records.result_reader import ResultReader
from agent.service.line_service import LineService
from tests.agent import line_files
from tests.pictures import encoded

PATIENCE_S = 60.0
SERVED = """
import sys
from pathlib import Path
from agent.config import read_line
from agent.service.serve import serve_line
serve_line(read_line(Path(sys.argv[1]), {}), lambda *_: None)
"""
PATTERN = r"(?P<board>[^_]+)_(?P<component>[^_]+)_(?P<ref>[^.]+)\.png"


def picture(color=(10, 200, 30), size=(8, 8)):
    """An image as a PNG's bytes; the fakes answer by its mean colour unless they are told a label."""
    return encoded(Image.new("RGB", size, color))


def write_clip(path, size=(16, 32)):
    """A clip of 5 frames, each (height, width)."""
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"MJPG"), 20.0, (size[1], size[0]))
    for number in range(5):
        writer.write(np.full((*size, 3), 40 * number, np.uint8))
    writer.release()
    return path


class Caller:
    def __init__(self):
        self.was_accepted, self.ended = threading.Event(), threading.Event()
        self.parts, self.refusal, self.answers = [], None, 0

    def accepted(self):
        self.was_accepted.set()

    def judged(self, parts):
        self.answers += 1
        self.parts = list(parts)
        self.ended.set()

    def refused(self, refusal):
        self.answers += 1
        self.refusal = refusal
        self.ended.set()

    def wait(self):
        assert self.ended.wait(PATIENCE_S), "no answer"
        return self.parts


def ordered(service, *orders):
    callers = [Caller() for _ in orders]
    for order, each in zip(orders, callers, strict=True):
        service.desk.order(order, each)
    return callers


def asked(service, *orders):
    """The answers to these orders, given together."""
    return [each.wait() for each in ordered(service, *orders)]


class FakeLine(line_files.LineFile):
    """Two fake experts, one route each; boards of one type show one image of each, and its layout cuts a frame."""

    def __init__(self, folder):
        folder.mkdir(exist_ok=True)
        boxes = {"R1": ("c0", [0, 0, 16, 16]), "R2": ("c1", [16, 0, 32, 16])}
        parts = {ref: {"component": component, "box": box} for ref, (component, box) in boxes.items()}
        (folder / "layout.yaml").write_text(yaml.safe_dump({"size": [16, 32], "parts": parts}))
        boards = {"main": {"components": {"c0": 1, "c1": 1}, "takt_s": 3600, "layout": "layout.yaml"}}
        memory = {"host": "20MiB", "workspace": "10MiB"}
        super().__init__(folder, experts={}, routes={}, boards=boards, memory=memory)
        for number in range(2):
            self.add_expert(number)

    def add_expert(self, number, *, has_route=True):
        self.document["experts"][f"cls/f{number}"] = line_files.expert(str(self.folder / f"f{number}.yaml"))
        if has_route:
            self.document["routes"][f"c{number}"] = line_files.route(f"cls/f{number}")
        self.fake(number)

    def remove_expert(self, number):
        del self.document["experts"][f"cls/f{number}"], self.document["routes"][f"c{number}"]

    def fake(self, number, **model):
        """What an expert declares; times, or another label."""
        (self.folder / f"f{number}.yaml").write_text(json.dumps({"weight_bytes": 1_000_000, "label": "ok"} | model))

    def watch(self, name="inbox", **keys):
        usual = {"path": f"./{name}", "pattern": PATTERN, "settle_ms": 0, "poll_s": 0.1}
        self.document.setdefault("intake", {}).setdefault("folders", []).append(usual | keys)
        (self.folder / name).mkdir()
        return self.document["intake"]["folders"][-1]

    @property
    def inbox(self):
        return self.folder / "inbox"

    def drop(self, name, content=None, inbox="inbox"):
        (self.folder / name).write_bytes(picture() if content is None else content)
        (self.folder / name).rename(self.folder / inbox / name)

    def shelf(self, name):
        return sorted(file.name for file in (self.inbox / name).rglob("*") if file.is_file())

    @property
    def results(self):
        return ResultReader(self.folder / "state" / "results.db")

    @property
    def rows(self):
        return list(self.results.query())

    @property
    def verdicts(self):
        return sorted((row.subject.image, row.verdict) for row in self.rows)

    @property
    def boards(self):
        return [(row.serial, row.verdict) for row in self.results.boards()]

    @property
    def unfinished(self):
        return [each.subject.key for each in JournalReader(self.folder / "state" / "results.db").unfinished()]

    @contextmanager
    def served(self, **options):
        service = LineService(self.config, lambda *_: None, **options)
        service.start()
        try:
            yield service
        finally:
            service.stop()

    @contextmanager
    def full_disk(self):
        """Nothing can be committed meanwhile."""
        with closing(sqlite3.connect(self.folder / "state" / "results.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            yield
            other.execute("ROLLBACK")
