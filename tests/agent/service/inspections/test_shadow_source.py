"""Judged images offered to shadows: which are kept and for how long, what is asked, and which rows are written."""

from datetime import UTC, datetime
from itertools import count
from types import SimpleNamespace

import pytest

from agent.core.performance import ExecutorSpec
from agent.core.request import GAVE_WAY, NO_SPARE_ROOM, Batch, Outcome, Precedence, StepResult
from agent.doors.desk import ShadowsView
from agent.runtime.images.sources import EncodedImage, Frame, FramePart, ImageFile
from agent.runtime.texts import TextSource
from agent.service.inspections import shadow_source
from agent.service.inspections.inspector import Submission
from agent.service.inspections.shadow_source import ShadowSource
from agent.subject import Subject
from experts.expert import Prediction, Verdict
from experts.graph import ExpertGraph, RouteStep
from tests.agent.service.fake_line import picture

OK, BAD = Prediction("ok", 0.9), Prediction("bad", 0.6)
ROUTES = {"c": (RouteStep("a", frozenset({"ok"})), RouteStep("b", frozenset({"ok"})))}


class Line:
    """An inspector without an agent, and a store that keeps what is written."""

    def __init__(self, monkeypatch, endings=0):
        self.graph(ExpertGraph(["a", "b", "a2", "b2"], ROUTES, {"a": "a2", "b": "b2"}))
        self.quarantined, self.entered, self.rows, self.dropped = {}, [], [], 0
        self.agent.loop = SimpleNamespace(quarantine=self.quarantined.__setitem__)
        self.numbers = count(1)
        self.attempts = lambda key: endings if key == "shadow a2 sha of a2" else 0
        self.model_of = lambda expert: f"sha of {expert}"
        self.submit_subject = self.entered.append
        monkeypatch.setattr(shadow_source, "write_answer", lambda _, row: self.rows.append(row))
        monkeypatch.setattr(shadow_source, "count_dropped", self.count)
        monkeypatch.setattr(shadow_source, "pair_sha256", lambda config, *names: f"terms of {' and '.join(names)}")
        self.source = ShadowSource(self, SimpleNamespace(write=lambda write: write(None)))

    def graph(self, graph):
        loop = getattr(getattr(self, "agent", None), "loop", None)
        setup = SimpleNamespace(graph=graph, executors=[ExecutorSpec(0, "cpu", "host"), ExecutorSpec(2, "gpu", "host")])
        config = SimpleNamespace(catalog=SimpleNamespace(sha256="0"))
        self.agent = SimpleNamespace(setup=setup, loop=loop, config=config)

    def count(self, _, pair, dropped):
        self.dropped += dropped

    def judged(self, image=b"image", experts="a", seconds=0.6, others=3):
        """An image was judged by these, each in a batch that took so long, with others in it."""
        number = next(self.numbers)
        for expert in experts:
            self.watch.ran(Batch(1, 0, expert, expert, tuple(range(number, number + others)), 0), seconds)
        subject = Subject(f"key {number}", "line", f"image {number}", datetime.now(UTC), component="c")
        steps = tuple(StepResult(expert, OK) for expert in experts)
        submission = Submission(subject, image, lambda *_: None, number=number)
        self.watch.judged(submission, Outcome(Verdict.OK, "ok", 0.9, steps))

    def answered(self, prediction=None, reason=None):
        """The shadow that was asked last ends."""
        asked = self.entered.pop()
        asked.number = next(self.numbers)
        shadow = asked.subject.expert
        if prediction is not None:
            self.watch.ran(Batch(2, 2, shadow, shadow, (asked.number,), 0), 0.25)
        steps = () if prediction is None else (StepResult(shadow, prediction),)
        self.watch.judged(asked, Outcome(Verdict.UNKNOWN, None, None, steps, reason))

    def asked(self):
        self.watch.idle()
        return [each.subject.expert for each in self.entered]


@pytest.fixture
def line(monkeypatch):
    return Line(monkeypatch)


def test_judged_image_is_offered_to_one_shadow_at_a_time_while_the_line_idles(line):
    line.judged(experts="ab")
    assert line.entered == []
    assert line.asked() == line.asked() == ["a2"]
    (asked,) = line.entered
    assert (asked.precedence, asked.image, asked.subject.key) == (Precedence.IDLE, b"image", "shadow a2 sha of a2")
    assert line.shadow_counts() == ShadowsView(waiting=1, running=1)
    line.answered(OK)
    assert line.asked() == ["b2"]


def test_shadow_row_has_both_answers_and_times(line):
    line.judged()
    line.asked()
    line.answered(BAD)
    line.judged()
    line.asked()
    line.answered(reason="a2 is in quarantine: broken")
    row, failed = line.rows
    assert (failed.shadow_answer, failed.reason) == (None, "a2 is in quarantine: broken")
    assert (row.key, row.image, row.component, row.reason) == ("key 1", "image 1", "c", None)
    assert (row.pair.expert_sha256, row.pair.shadow_sha256) == ("sha of a", "sha of a2")
    said = [(one.label, one.passes, one.executor, one.processor) for one in (row.answer, row.shadow_answer)]
    assert said == [("ok", True, 0, "cpu"), ("bad", False, 2, "gpu")]
    assert (row.answer.seconds, row.shadow_answer.seconds) == (pytest.approx(0.2), 0.25)
    assert line.shadow_counts() == ShadowsView(ran=1, failed=1)


def test_shadow_image_that_gave_way_is_offered_again(line):
    line.judged()
    for reason in (GAVE_WAY, NO_SPARE_ROOM):
        assert line.asked() == ["a2"]
        line.answered(reason=reason)
    assert line.asked() == []
    line.judged(experts="")
    assert line.asked() == ["a2"]
    line.answered(OK)
    assert [row.key for row in line.rows] == ["key 1"]


@pytest.mark.parametrize(("name", "most"), [("WAITING_MAXIMUM", 2), ("MOST_BYTES", 130)])
def test_oldest_shadow_images_are_dropped_beyond_the_limits(line, monkeypatch, name, most):
    monkeypatch.setattr(shadow_source, name, most)
    for size in (60, 60, 60):
        line.judged(b"x" * size)
    assert line.shadow_counts() == ShadowsView(waiting=2, dropped=1)
    line.asked()
    line.answered(OK)
    assert (line.rows[0].key, line.dropped) == ("key 2", 1)  # drops are written before the row


def test_shadow_images_of_a_removed_pair_or_at_the_end_are_dropped(line):
    line.judged()
    line.graph(ExpertGraph(["a", "b", "a3"], ROUTES, {"a": "a3"}))
    assert line.asked() == []
    assert line.shadow_counts() == ShadowsView(dropped=1)
    line.judged()
    line.judged()
    line.asked()
    line.source.flush()
    assert (line.dropped, line.rows, line.shadow_counts().dropped) == (3, [], 3)


def test_shadow_keeps_the_part_of_a_frame_refers_to_files_and_skips_texts(line, monkeypatch, tmp_path):
    monkeypatch.setattr(shadow_source, "MOST_BYTES", 300)
    frame = Frame(EncodedImage(picture(size=(40, 20)), "frame.png", 10**6), None)
    line.judged(FramePart(frame, (10, 5, 20, 15), "part"))
    line.judged(ImageFile(tmp_path / "image.png", 10))
    line.judged(TextSource(lambda _: None))
    assert line.shadow_counts() == ShadowsView(waiting=2)
    line.asked()
    assert line.entered[0].image.shape == (10, 10, 3)


@pytest.mark.parametrize(("endings", "refused"), [(1, []), (2, ["a2"])])
def test_shadow_that_ended_the_agent_too_often_is_not_asked(monkeypatch, endings, refused):
    assert list(Line(monkeypatch, endings).quarantined) == refused
