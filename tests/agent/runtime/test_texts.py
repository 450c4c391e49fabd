"""What is known of each text, on whichever executor it is: work, what was written, and what is forgotten."""

from __future__ import annotations

import pytest

from agent.core.events import Progressed
from agent.core.request import Batch, Rejected, Work
from agent.runtime.expert_copy import ExpertCopy
from agent.runtime.text_sources import TextSource
from agent.runtime.texts import Reached, RunningTexts
from experts.errors import PromptInvalid
from experts.expert import Expert, Prediction
from experts.llm.serving.generation import GREEDY, Generation, TextRequest
from experts.llm.serving.output_lengths import OutputLengths
from experts.packed.weights import PackedExpert, Segment
from tests.agent.runtime.fake_text_engine import FakeTextEngine, token
from tests.agent.runtime.text_line import CHOICES, Reader, source

QUANTUM_S = 0.02


def copy_of(expert, name=None):
    """A packed model of which nothing is read. ``name``: what the Engine calls its expert, if other."""
    segment = Segment(f"sha of {expert}", 4096, ())
    packed = PackedExpert(expert, "llm", "fp32", "layout", "sha", segment, ())
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
        asked = self.texts.begin(text, [Reached(expert, rounded) for expert in experts])
        self.texts.take(request, asked)
        return asked.work

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


def test_the_work_of_a_text_is_its_prompt_what_is_expected_of_it_and_the_most_that_it_may_hold():
    desk = Desk(expects_all=False)
    for _ in range(3):
        desk.lengths.ended("a", 20)
    assert desk.ask(1, text(count=100), "a") == Work(3, 20, 103, 23)


def test_what_it_may_hold_is_rounded_as_its_arena_does():
    desk = Desk(expects_all=False)
    work = desk.ask(1, text(count=100), "a", rounded=lambda tokens: -(-tokens // 64) * 64)
    assert (work.most, work.lease) == (128, 64)


def test_a_router_reads_its_choices_and_writes_nothing(desk):
    assert desk.ask(1, text(count=100), "llm/router") == Work(3 + 3, 0, 5, 5)


def test_the_work_of_a_route_is_at_each_expert_what_it_is_there(desk):
    prompts = {"llm/router": (1,) * 9, "a": (1, 2), "b": (1, 2, 3, 4)}

    def text_for(expert):
        choices = CHOICES if expert == "llm/router" else None
        return TextRequest(Generation(prompts[expert], {"a": 40}.get(expert, 8), GREEDY, choices=choices), Reader())

    work = desk.ask(1, TextSource(text_for), "llm/router", "a", "b")
    assert work.at("llm/router") == Work(9 + 3, 0, 9 + 2, 9 + 2)  # not multiplied by what others write
    assert work.at("a") == Work(2, desk.lengths.left("a", 0, 40), 42, 2 + desk.lengths.left("a", 0, 40))
    assert work.at("b") == Work(4, desk.lengths.left("b", 0, 8), 12, 4 + desk.lengths.left("b", 0, 8))
    assert work.most_of_any == 42


def test_a_quantum_tells_what_each_has_left_and_holds(desk):
    desk.ask(1, text(count=3), "a")
    desk.ask(2, text(count=9), "a")
    assert desk.run("a", 1, 2) == Progressed(1, (), ((1, Work(0, 1, 6, 6, 5)), (2, Work(0, 7, 12, 12, 5))))
    assert desk.run("a", 1, 2) == Progressed(2, ((1, Prediction("length", 1.0)),), ((2, Work(0, 5, 12, 12, 7)),))


def test_whoever_has_filled_its_lease_asks_for_as_much_as_is_expected_then():
    desk = Desk(pace=30, expects_all=False)
    desk.engines[0].lengths = desk.lengths
    for length in (4, 20, 40):
        desk.lengths.ended("a", length)
    reader = Reader()
    assert desk.ask(1, source((1, 2, 3), 90, reader), "a", rounded=lambda tokens: -(-tokens // 8) * 8).lease == 24
    assert desk.run("a", 1).unfinished == ((1, Work(0, 19, 96, 48, 24)),)  # 21 are written, of 40
    assert desk.run("a", 1).unfinished == ((1, Work(0, 45, 96, 96, 48)),)  # longer than any: as much again
    assert desk.run("a", 1).unfinished[0][1].leased == 96
    assert desk.engines[0].leases == [24, 48, 96]
    assert reader.tokens == [token("a", position) for position in range(3, 78)]


def test_an_expert_that_may_hold_more_than_was_foreseen_says_so(desk):
    def text_for(expert):
        return TextRequest(Generation((1, 2), {"a": 2, "b": 50}[expert], GREEDY), Reader())

    assert desk.ask(1, TextSource(text_for), "a").most == 4
    assert desk.run("b", 1).unfinished[0][1].most == 52


def test_whoever_has_a_lease_and_finds_no_room_is_told_of(desk, caplog):
    desk.ask(1, text(count=9), "a")
    desk.run("a", 1)
    assert not caplog.records
    desk.engines[0].lacking = (1,)
    desk.run("a", 1)
    assert "texts_lack_room executor=0 requests=(1,)" in caplog.text


def test_whoever_lost_what_it_held_reads_it_again_and_writes_on(desk):
    reader = Reader()
    desk.ask(1, source((1, 2, 3), 6, reader), "a")
    desk.run("a", 1)
    desk.texts.preempt(1, 0)
    assert desk.run("a", 1).unfinished == ((1, Work(0, 2, 9, 9, 7)),)
    desk.run("a", 1)
    assert reader.tokens == [token("a", position) for position in range(3, 9)]


def test_on_another_executor_it_is_written_on_behind_what_was_written(desk):
    desk, reader = Desk(executors=2), Reader()
    desk.ask(1, source((1, 2, 3), 6, reader), "a")
    desk.run("a", 1)
    assert desk.run("a", 1, executor=1).unfinished == ((1, Work(0, 2, 9, 9, 7)),)
    assert ("forget", 1) in desk.engines[0].log
    assert desk.run("a", 1, executor=1).finished == ((1, Prediction("length", 1.0)),)
    assert reader.tokens == [token("a", position) for position in range(3, 9)]


def test_each_step_of_a_route_is_a_text_of_its_own(desk):
    reader = Reader()
    desk.ask(1, source((1, 2, 3), 2, reader), "llm/router", "a")
    assert desk.run("llm/router", 1).finished == ((1, Prediction("code", 0.75)),)
    assert desk.run("a", 1).finished == ((1, Prediction("length", 1.0)),)
    assert reader.tokens == [token("a", 3), token("a", 4)]


def test_an_expert_that_the_engine_calls_otherwise_is_asked_by_its_name_in_the_line(desk):
    asked = []

    def text_for(expert):
        asked.append(expert)
        return TextRequest(Generation((1, 2), 2, GREEDY), Reader())

    desk.ask(1, TextSource(text_for), "a")
    desk.run("a", 1, name="a+2")
    assert asked == ["a"]


def test_an_expert_that_nobody_foresaw_is_asked_when_it_is_reached(desk):
    desk.ask(1, text(count=2), "a")
    assert desk.run("b", 1).finished == ((1, Prediction("length", 1.0)),)


@pytest.mark.parametrize(
    ("error", "reason"), [(PromptInvalid("prompt", "is odd"), "prompt: is odd"), (KeyError("x"), "KeyError: 'x'")]
)
def test_whoever_has_no_text_for_an_expert_ends_alone(desk, error, reason):
    def text_for(expert):
        if expert == "b":
            raise error
        return TextRequest(Generation((1, 2), 2, GREEDY), Reader())

    desk.ask(1, TextSource(text_for), "a")
    desk.ask(2, text(count=2), "b")
    progressed = desk.run("b", 1, 2)
    (first, rejected), second = progressed.finished
    assert (first, type(rejected)) == (1, Rejected)
    assert reason in rejected.reason
    assert second == (2, Prediction("length", 1.0))


def test_nothing_of_it_is_kept_once_it_is_forgotten(desk):
    desk.ask(1, text(count=9), "a")
    desk.run("a", 1)
    desk.texts.forget(1)
    desk.texts.forget(1)
    assert (desk.engines[0].texts, desk.engines[0].held) == ({}, {})
    assert desk.engines[0].log.count(("forget", 1)) == 1
    assert isinstance(desk.run("a", 1).finished[0][1], Rejected)


def test_whoever_has_not_begun_is_forgotten_without_asking_anybody(desk):
    desk.ask(1, text(), "a")
    desk.texts.forget(1)
    assert desk.engines[0].log == []
