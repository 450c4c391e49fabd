"""A text under way: its deadline while it waits, by a clock that the test turns."""

from __future__ import annotations

import pytest

from agent.api.calls.desk import TextOrder
from agent.core.request import CANCELLED, Outcome
from agent.service.inspections.inspector import Course
from agent.service.texts.text_under_way import TextUnderWay
from experts.expert import Verdict
from experts.llm.serving.generation import Ending
from tests.agent.service.language_models import Reader

WITHDRAWN = Outcome(Verdict.UNKNOWN, None, None, (), CANCELLED)


class Waiting:
    """A text that was asked at 0 s and is due at 10 s, and what is told of it."""

    def __init__(self, due_s=10.0):
        self.now_s, self.withdrawn, self.left, self.reader = 0.0, [], [], Reader()
        self.text = TextUnderWay(
            TextOrder("llm/code", "x"), self.reader, None, due_s, lambda: self.now_s,
            lambda _, how: self.left.append(how),
        )  # fmt: skip
        self.text.withdraw = lambda: self.withdrawn.append(self.now_s)

    def end_if_overdue(self, now_s):
        self.now_s = now_s
        self.text.end_if_overdue(0.5)


def test_it_waits_no_longer_once_its_deadline_has_passed():
    waiting = Waiting()
    waiting.end_if_overdue(10.4)  # what runs ends by itself
    waiting.end_if_overdue(10.5)
    assert waiting.withdrawn == [10.5]
    waiting.text.end(WITHDRAWN, Course(queue_s=10.5))
    end = waiting.reader.end
    assert (end.ending, end.expert, end.failure, end.queue_s) == (Ending.DEADLINE, None, None, 10.5)
    assert waiting.left == [Ending.DEADLINE]


@pytest.mark.parametrize("due_s", [None, 10.0])
def test_without_a_deadline_it_waits_and_whoever_went_away_is_told_nothing(due_s):
    waiting = Waiting(due_s)
    if due_s is None:
        waiting.end_if_overdue(1e9)
        assert waiting.withdrawn == []
    waiting.text.cancel()
    waiting.now_s += 11.0
    waiting.text.end(WITHDRAWN, Course())
    assert (waiting.reader.end, waiting.left) == (None, [CANCELLED])
