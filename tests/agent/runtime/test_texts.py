"""What is known of each text, on whichever executor it is: work, what was written, and what is forgotten."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from agent.core.events import Progressed
from agent.core.request import Batch, Work
from agent.runtime.expert_copy import ExpertCopy
from agent.runtime.texts import RunningTexts, TextExpert, TextSource
from experts.errors import BackendUnavailable, PromptInvalid
from experts.expert import Expert, Prediction, Rejected
from experts.llm.serving.generation import GREEDY, TextRequest
from experts.llm.serving.iteration import OutputLengths
from experts.packed.weights import PackedExpert, Segment
from tests.agent.runtime.fake_text_engine import FakeTextEngine, token
from tests.agent.runtime.text_line import Reader, source

QUANTUM_S = 0.02


def copy_of(expert, name=None):
    """A packed model of which nothing is read. ``name``: what the Engine calls its expert, if other."""
    segment = Segment(f"sha of {expert}", 4096, ())
    packed = PackedExpert(expert, "llm", "fp32", "layout", "sha", segment, (), "sha of a program")
    return ExpertCopy(f"{name or expert}@fp32", Expert(expert, "llm", None, (), None), packed)


class Desk:
    """Texts over fake engines, driven by hand. ``expects_all``: no text is expected to end before it must."""

    def __init__(self, executors=1, pace=2, *, expects_all=True):
        self.engines = {number: FakeTextEngine(pace) for number in range(executors)}
        self.lengths = OutputLengths()
        if expects_all:
            for expert in "ab":
                self.lengths.ended(expert, 1000)
        self.texts = RunningTexts(self.engines, self.lengths)
        self.batches = 0

    def ask(self, request, text, *experts, rounded=lambda tokens: tokens):
        self.texts.begin(text, [TextExpert(expert, expert, rounded) for expert in experts])
        self.texts.take(request, text)
        return text.work

    def run(self, expert, *requests, executor=0, name=None):
        self.batches += 1
        copy = copy_of(expert, name)
        batch = Batch(self.batches, executor, name or expert, copy.name, requests, 0, QUANTUM_S)
        return self.texts.run(batch, [copy] * len(requests), {copy.name: None})


@pytest.fixture
def desk():
    return Desk()


def text(prompt=(1, 2, 3), count=5):
    return source(prompt, count, Reader())


def test_quantum_reports_remaining_work_and_lease_of_each_text(desk):
    desk.ask(1, text(count=3), "a")
    desk.ask(2, text(count=9), "a")
    assert desk.run("a", 1, 2) == Progressed(1, (), ((1, Work(0, 1, 6, 6, 5)), (2, Work(0, 7, 12, 12, 5))))
    assert desk.run("a", 1, 2) == Progressed(2, ((1, Prediction("length", 1.0)),), ((2, Work(0, 5, 12, 12, 7)),))


def test_text_that_filled_its_lease_asks_for_its_expected_length():
    desk = Desk(pace=30, expects_all=False)
    for length in (4, 20, 40):
        desk.lengths.ended("a", length)
    reader = Reader()
    assert desk.ask(1, source((1, 2, 3), 90, reader), "a", rounded=lambda tokens: -(-tokens // 8) * 8).lease == 24
    assert desk.run("a", 1).unfinished == ((1, Work(0, 19, 96, 48, 24)),)  # 21 are written, of 40
    assert desk.run("a", 1).unfinished == ((1, Work(0, 45, 96, 96, 48)),)  # longer than any: as much again
    assert desk.run("a", 1).unfinished[0][1].leased == 96
    assert desk.engines[0].leases == [24, 48, 96]
    assert reader.tokens == [token("a", position) for position in range(3, 78)]


def test_text_with_a_lease_but_no_room_is_logged(desk, caplog):
    desk.ask(1, text(count=9), "a")
    desk.run("a", 1)
    assert not caplog.records
    desk.engines[0].lacking = [1]
    desk.run("a", 1)
    assert "texts_lack_room executor=0 requests=[1]" in caplog.text


def test_moved_text_continues_behind_what_was_written(desk):
    desk, reader = Desk(executors=2), Reader()
    desk.ask(1, source((1, 2, 3), 6, reader), "a")
    desk.run("a", 1)
    assert desk.run("a", 1, executor=1).unfinished == ((1, Work(0, 2, 9, 9, 7)),)
    assert ("forget", 1) in desk.engines[0].log
    assert desk.run("a", 1, executor=1).finished == ((1, Prediction("length", 1.0)),)
    assert reader.tokens == [token("a", position) for position in range(3, 9)]


def test_quantum_that_comes_back_from_a_lost_device_changes_no_text_that_moved():
    desk, reader = Desk(executors=2), Reader()
    desk.ask(1, source((1, 2, 3), 6, reader), "a")
    desk.run("a", 1)
    hung = desk.engines[0]
    hung.gate, hung.entered = threading.Semaphore(0), threading.Semaphore(0)
    with ThreadPoolExecutor(1) as thread:
        late = thread.submit(desk.run, "a", 1)
        assert hung.entered.acquire(timeout=60)
        desk.texts.lose({0})
        desk.texts.preempt(1, 0)
        desk.run("a", 1, executor=1)
        assert hung.log == [("run", (1,))] * 2, "an engine that hangs is asked nothing"
        hung.gate.release()
        with pytest.raises(BackendUnavailable, match="executor 0 is lost"):
            late.result()
    assert desk.run("a", 1, executor=1).finished == ((1, Prediction("length", 1.0)),)
    assert reader.tokens == [token("a", position) for position in range(3, 9)]
    with pytest.raises(BackendUnavailable):
        desk.run("a", 2)


def test_unplanned_expert_is_asked_when_its_step_is_reached(desk):
    desk.ask(1, text(count=2), "a")
    assert desk.run("b", 1).finished == ((1, Prediction("length", 1.0)),)


@pytest.mark.parametrize(
    ("error", "reason"), [(PromptInvalid("prompt", "is odd"), "prompt: is odd"), (KeyError("x"), "KeyError: 'x'")]
)
def test_text_without_a_prompt_for_its_expert_ends_alone(desk, error, reason):
    def text_for(expert):
        if expert == "b":
            raise error
        return TextRequest((1, 2), 2, GREEDY, Reader())

    foreseen = ("a", "b") if isinstance(error, PromptInvalid) else ("a",)
    desk.ask(1, TextSource(text_for), *foreseen)
    desk.ask(2, text(count=2), "b")
    progressed = desk.run("b", 1, 2)
    (first, rejected), second = progressed.finished
    assert (first, type(rejected)) == (1, Rejected)
    assert reason in rejected.reason
    assert second == (2, Prediction("length", 1.0))


def test_text_in_the_vocabulary_of_a_replaced_model_is_rejected(desk):
    for request, program in ((1, "sha of another"), (2, "sha of a program")):
        asked = TextRequest((1, 2), 2, GREEDY, Reader(), program=program)
        desk.ask(request, TextSource(lambda _, asked=asked: asked), "a")
    (_, rejected), (_, written) = desk.run("a", 1, 2).finished
    assert "was replaced by a reload" in rejected.reason
    assert written == Prediction("length", 1.0)


def test_forgotten_text_keeps_no_memory(desk):
    desk.ask(1, text(count=9), "a")
    desk.run("a", 1)
    desk.texts.forget(1)
    desk.texts.forget(1)
    assert (desk.engines[0].texts, desk.engines[0].held, desk.engines[0].log.count(("forget", 1))) == ({}, {}, 1)
    assert isinstance(desk.run("a", 1).finished[0][1], Rejected)
