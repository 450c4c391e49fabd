"""Questions put to a running line's desk, as a caller would, and what came back."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agent.api.calls.desk import TextOrder
from experts.errors import CoServeError
from experts.llm.serving.generation import GREEDY

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from agent.api.calls.desk import TextEnd, TextPiece
    from agent.demo.texts.questions import DemoQuestion
    from agent.service.desk.line_desk import LineDesk

ANSWER_LIMIT_S = 120.0
MOST_TOKENS = 60


@dataclass(frozen=True, slots=True)
class DemoAnswer:
    """A line's answer to a question. ``first_token_s``: until something was shown; 0: nothing was."""

    question: DemoQuestion
    text: str
    expert: str
    tokens: int
    first_token_s: float

    @property
    def is_right(self) -> bool:
        return self.text == self.question.answer


@dataclass(slots=True)
class Hearing:
    """Keeps ``agent.api.calls.desk.TextListener``. ``show``: told each piece as it comes, and must return at once."""

    show: Callable[[str], None] = lambda text: None
    pieces: list[str] = field(default_factory=list)
    end: TextEnd | None = None
    has_ended: threading.Event = field(default_factory=threading.Event)
    when_ended: Callable[[], None] = lambda: None

    def wrote(self, piece: TextPiece) -> None:
        self.pieces.append(piece.text)
        self.show(piece.text)

    def ended(self, end: TextEnd) -> None:
        self.end = end
        self.has_ended.set()
        self.when_ended()

    def answer(self, question: DemoQuestion) -> DemoAnswer:
        """Once it is there. Raises CoServeError where it failed, or takes too long."""
        if not self.has_ended.wait(ANSWER_LIMIT_S) or self.end is None:
            raise CoServeError(f"{question.text!r} was not answered within {ANSWER_LIMIT_S:.0f} s")
        if self.end.failure is not None:
            raise self.end.failure
        first_s = self.end.first_token_s or 0.0
        return DemoAnswer(question, "".join(self.pieces), self.end.expert or "", self.end.written_tokens, first_s)


def ask(desk: LineDesk, model: str, question: DemoQuestion, show: Callable[[str], None]) -> DemoAnswer:
    hearing = Hearing(show)
    desk.generate(_order(model, question), hearing)
    return hearing.answer(question)


@dataclass(frozen=True, slots=True)
class Asked:
    """Answers to many questions, and the seconds of all."""

    answers: tuple[DemoAnswer, ...]
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return sum(answer.tokens for answer in self.answers) / self.seconds


def ask_all(
    desk: LineDesk, model: str, questions: Sequence[DemoQuestion], at_once: int, progress: Callable[[int], None]
) -> Asked:
    """At most so many under way at a time. ``progress`` is told how many have their answer."""
    room = threading.Semaphore(at_once)
    hearings = [Hearing(when_ended=room.release) for _ in questions]
    began_s = time.monotonic()
    for number, (question, hearing) in enumerate(zip(questions, hearings, strict=True)):
        if not room.acquire(timeout=ANSWER_LIMIT_S):
            raise CoServeError(f"none of {at_once} questions was answered within {ANSWER_LIMIT_S:.0f} s")
        desk.generate(_order(model, question), hearing)
        progress(max(number + 1 - at_once, 0))
    answers = tuple(hearing.answer(question) for question, hearing in zip(questions, hearings, strict=True))
    progress(len(questions))
    return Asked(answers, time.monotonic() - began_s)


def _order(model: str, question: DemoQuestion) -> TextOrder:
    message = {"role": "user", "content": question.text}
    return TextOrder(model, messages=(message,), most_tokens=MOST_TOKENS, sampling=GREEDY)
