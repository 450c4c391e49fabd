"""A line of fake experts without a folder: images come through its desk."""

from __future__ import annotations

import io
import json
import threading
import time
from contextlib import contextmanager

import pytest
import yaml
from PIL import Image

from agent.config import read_line
from agent.records.journal import JournalReader
from agent.records.result_reader import ResultReader
from agent.service.line_service import LineService
from experts.backends.fake import FakeSkeleton
from tests.agent.service.language_models import with_models, write_models

PATIENCE_S = 60.0


def picture(color=(10, 200, 30), size=(8, 8)):
    """An image as a PNG's bytes; the fakes answer by its mean colour unless they are told a label."""
    buffer = io.BytesIO()
    Image.new("RGB", size, color).save(buffer, "PNG")
    return buffer.getvalue()


class Caller:
    """A listener that remembers, and can be waited for."""

    def __init__(self):
        self.was_accepted = threading.Event()
        self.ended = threading.Event()
        self.parts = []
        self.refusal = None
        self.answers = 0

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


class DeskLine:
    """Two fake experts, one route each; boards of one type show one image of each, and its layout cuts a frame."""

    def __init__(self, folder):
        self.folder = folder
        self.folder.mkdir(exist_ok=True)
        layout = {
            "size": [16, 32],
            "parts": {
                "R1": {"component": "c0", "box": [0, 0, 16, 16]},
                "R2": {"component": "c1", "box": [16, 0, 32, 16]},
            },
        }
        (folder / "layout.yaml").write_text(yaml.safe_dump(layout))
        self.document = {
            "line": "test",
            "state": "./state",
            "experts": {f"cls/f{number}": self._expert(number) for number in range(2)},
            "routes": {f"c{number}": [{"expert": f"cls/f{number}", "pass": ["ok"]}] for number in range(2)},
            "boards": {"main": {"components": {"c0": 1, "c1": 1}, "takt_s": 3600, "layout": "layout.yaml"}},
            "memory": {"host": "20MiB", "workspace": "10MiB"},
        }

    def _expert(self, number):
        self.fake(number)
        weights = str(self.folder / f"f{number}.yaml")
        return {"architecture": "fake", "weights": weights, "labels": ["ok", "bad"], "input": {"size": [8, 8]}}

    def fake(self, number, **model):
        """What an expert declares; times, or another label."""
        (self.folder / f"f{number}.yaml").write_text(json.dumps({"weight_bytes": 1_000_000, "label": "ok"} | model))

    @property
    def config(self):
        (self.folder / "line.yaml").write_text(yaml.safe_dump(self.document))
        return read_line(self.folder / "line.yaml", {})

    @property
    def results(self):
        return ResultReader(self.folder / "state" / "results.db")

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


def until(holds):
    """Wait for a condition, for as long as it may reasonably take."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def desk_line(tmp_path):
    return DeskLine(tmp_path)


@pytest.fixture
def caller():
    return Caller


@pytest.fixture
def png():
    return picture


@pytest.fixture
def wait_until_so():
    return until


@pytest.fixture
def batches(monkeypatch):
    """While it is clear, what runs does not end. It is set until the agent has started."""
    may_end, infer = threading.Event(), FakeSkeleton.infer
    may_end.set()

    def held(*given):
        assert may_end.wait(60)
        return infer(*given)

    monkeypatch.setattr(FakeSkeleton, "infer", held)
    yield may_end
    may_end.set()


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """A folder of language models."""
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def text_line(desk_line, models):
    """The line of the images' tests, with language models and routes to them."""
    return with_models(desk_line, models)
