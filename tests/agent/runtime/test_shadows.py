"""What is kept of a judged image for a shadow, for how long, and what whoever watches is told."""

from __future__ import annotations

import io
from dataclasses import replace
from itertools import count
from queue import SimpleQueue

import numpy as np
import pytest
from PIL import Image

from agent.core import events
from agent.core.background import DROPPED
from agent.core.engine import Engine
from agent.core.performance import SSD, ExecutorSpec, ExpertProfile, Limits, PerformanceMatrix, PoolSpec
from agent.core.policy import PRESETS
from agent.core.request import CANCELLED, Batch, Outcome, StepResult
from agent.runtime.expert_copy import footprint_of
from agent.runtime.image_sources import EncodedImage, Frame, FramePart, ImageFile
from agent.runtime.loop import LoopOptions, assemble
from agent.runtime.machine.detection import detect
from agent.runtime.shadows import Said, ShadowAnswer, Shadows, ShadowWatch
from agent.runtime.text_sources import TextSource
from experts.expert import Prediction, Verdict
from experts.graph import ExpertGraph, RouteStep
from tests.agent.runtime.test_loop import ANY, PATIENCE_S, PERFORMANCE

OK = Prediction("ok", 0.9)
BAD = Prediction("bad", 0.6)
PAIRS = {"a": "a2", "b": "b2"}


class Watched:
    """Shadows, and all that was told of them."""

    def __init__(self, most_bytes=100):
        self.told, self.ran = [], []
        self.shadows = Shadows(PAIRS, most_bytes)
        self.shadows.watch = ShadowWatch(
            self.told.append, lambda shadow: self.ran.append(("begun", shadow)), lambda s: self.ran.append(("ended", s))
        )
        self._numbers = count(1000)

    def judged(self, request, source, *experts, seconds=0.5, others=1):
        """A request was judged by these, each in a batch that took so long, with others in it."""
        for expert in experts:
            batch = Batch(request, 0, expert, expert, tuple(range(request, request + others)), 0)
            self.shadows.batch_begun(batch, 10.0)
            self.shadows.batch_ended(batch, 10.0 + seconds)
        steps = tuple(StepResult(expert, OK) for expert in experts)
        outcome = Outcome(Verdict.OK, "ok", 0.9, steps)
        return self.shadows.show(request, source, outcome, f"about {request}", lambda: next(self._numbers))

    def ends(self, request, prediction=None, reason=None, seconds=0.25):
        shadow = "a2"
        batch = Batch(request, 2, shadow, shadow, (request,), 0)
        self.shadows.batch_begun(batch, 20.0)
        self.shadows.batch_ended(batch, 20.0 + seconds)
        steps = (StepResult(shadow, prediction),) if prediction else ()
        self.shadows.end(request, Outcome(Verdict.UNKNOWN, None, None, steps, reason))


def test_a_judged_image_is_offered_to_the_shadow_of_each_of_its_experts():
    watched = Watched()
    assert watched.judged(1, b"image", "a", "x", "b") == [events.Offered(1000, "a2"), events.Offered(1001, "b2")]
    assert watched.shadows.image(1000) == b"image"
    assert watched.shadows.held_bytes == 10


def test_who_watches_is_told_what_both_said_and_how_long_each_took():
    watched = Watched()
    watched.judged(1, b"image", "a", seconds=0.6, others=3)
    watched.ends(1000, BAD, "asked in the shadow of another expert")
    (answer,) = watched.told
    assert answer == ShadowAnswer(
        "about 1", "a", "a2", Said(OK, pytest.approx(0.2), 0), Said(BAD, pytest.approx(0.25), 2)
    )
    assert watched.ran == [("begun", "a2"), ("ended", "a2")]
    assert watched.shadows.held_bytes == 0
    assert 1000 not in watched.shadows


@pytest.mark.parametrize(
    ("reason", "is_dropped"), [(DROPPED, True), (CANCELLED, True), ("a2 is in quarantine: broken", False)]
)
def test_one_that_said_nothing_is_told_with_its_reason(reason, is_dropped):
    watched = Watched()
    watched.judged(1, b"image", "a")
    watched.shadows.end(1000, Outcome(Verdict.UNKNOWN, None, None, (), reason))
    (answer,) = watched.told
    assert (answer.shadow_said, answer.reason, answer.is_dropped) == (None, reason, is_dropped)


def test_the_oldest_are_cancelled_for_the_bytes_of_the_next():
    watched = Watched(most_bytes=100)
    assert watched.judged(1, b"x" * 60, "a") == [events.Offered(1000, "a2")]
    assert watched.judged(2, b"x" * 30, "a") == [events.Offered(1001, "a2")]
    assert watched.judged(3, b"x" * 30, "a") == [events.Cancelled(1000), events.Offered(1002, "a2")]
    assert watched.judged(4, b"x" * 40, "a") == [events.Offered(1003, "a2")]  # there is room once that one has ended
    assert watched.judged(5, b"x", "a") == [events.Cancelled(1001), events.Offered(1004, "a2")]
    watched.shadows.end(1000, Outcome(Verdict.UNKNOWN, None, None, (), CANCELLED))
    assert watched.shadows.held_bytes == 101


def test_an_image_that_is_too_large_is_dropped_at_once():
    watched = Watched(most_bytes=100)
    assert watched.judged(1, np.zeros((10, 10, 3), np.uint8), "a") == []
    assert [(answer.is_dropped, answer.reason) for answer in watched.told] == [(True, "its image takes 300 bytes")]


def test_of_a_frame_the_part_alone_is_kept():
    content = io.BytesIO()
    Image.new("RGB", (40, 20)).save(content, "PNG")
    frame = Frame(EncodedImage(content.getvalue(), "frame.png", 10**6), None)
    watched = Watched(most_bytes=1000)
    watched.judged(1, FramePart(frame, (10, 5, 20, 15), "part"), "a")
    kept = watched.shadows.image(1000)
    assert isinstance(kept, np.ndarray)
    assert kept.shape == (10, 10, 3)
    assert watched.shadows.held_bytes == 300


def test_files_take_no_memory_and_texts_have_no_shadows(tmp_path):
    watched = Watched()
    watched.judged(1, ImageFile(tmp_path / "image.png", 10), "a")
    assert watched.shadows.held_bytes == 0
    assert watched.judged(2, TextSource(lambda _: None), "a") == []


def test_nothing_is_kept_while_nobody_watches_and_after_a_line_without_shadows():
    watched = Watched()
    watched.shadows.change_line({})
    assert watched.judged(1, b"image", "a") == []
    watched.shadows.change_line(PAIRS)
    watched.shadows.watch = None
    assert watched.judged(2, b"image", "a") == []


def test_a_shadow_beside_real_models_says_what_it_says_alone_and_the_memory_is_what_its_ledger_counts(line):
    """Twins share their features; a third expert takes the shadow's room again and again."""
    told, outcomes = SimpleQueue(), SimpleQueue()
    names = ("cls/twin-0", "cls/twin-1", "cls/wide")
    routes = {name.removeprefix("cls/"): (RouteStep(name, ANY),) for name in names if name != "cls/twin-1"}
    graph = ExpertGraph(names, routes, {"cls/twin-0": "cls/twin-1"})
    copies = {f"{name}@fp32": line.copies[f"{name}@fp32"] for name in names}
    rows = {
        copy.expert.id: ExpertProfile(name, PERFORMANCE, footprint_of(copy.packed), {SSD: 0.01})
        for name, copy in copies.items()
    }
    matrix, specs = PerformanceMatrix({"cpu": rows}), [ExecutorSpec(0, "cpu", "host")]
    parts = {part.id: part.size_bytes for row in rows.values() for part in row.footprint.shared}
    all_bytes = sum(row.footprint.own_bytes for row in rows.values()) + sum(parts.values())
    limits = Limits((PoolSpec("host", all_bytes - 1, 64 * 1024 * 1024),))  # of three, two fit
    engine = Engine(graph, matrix, specs, PRESETS["samba"], limits)
    loop = assemble(
        engine, replace(detect("cpu"), cores=1), specs, limits, copies, line.segments,
        lambda *_: outcomes.put(None), LoopOptions(checks_invariants=True), matrix, routes=graph,
    )  # fmt: skip
    loop.watch_shadows(ShadowWatch(told.put, lambda _: None, lambda _: None))
    loop.start()
    try:
        for number in range(4):
            image = line.pixels(number)
            loop.submit(image, component="twin-0", about=number)
            loop.unwant("cls/wide")
            answer = told.get(timeout=PATIENCE_S)
            assert (answer.about, answer.expert, answer.shadow) == (number, "cls/twin-0", "cls/twin-1")
            assert answer.said.prediction == line.predict("twin-0", image)
            assert answer.shadow_said.prediction == line.predict("twin-1", image)
            assert answer.said.seconds > 0.0
            assert answer.shadow_said.seconds > 0.0
            loop.submit(image, component="wide")
            outcomes.get(timeout=PATIENCE_S)
            assert loop.wait_until_idle(PATIENCE_S)
        statistics = loop.statistics().engine
        assert statistics.background.ran == 4
        assert statistics.evictions == 4 + 3  # the shadow each time, and what made room for it
    finally:
        loop.stop()
