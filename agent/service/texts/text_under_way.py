"""Text under way: its requests for each reachable expert, its streamed pieces, its end.

Guarantees: the listener gets one end, after all pieces, and nothing after a cancel; prompts are tokenised once.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agent.core.request import CANCELLED
from agent.doors.desk import TextEnd
from agent.faults.errors import OrderRefused, Reason
from agent.service.texts.text_destinations import last_words
from experts.errors import CoServeError, GenerationInvalid, GrammarInvalid, PromptTooLong
from experts.llm.serving.generation import Discarding, Ending, Piece, TextRequest, check_against
from experts.llm.serving.readings import PooledPrompt, PromptScores
from experts.llm.text.text_writer import TextWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from agent.core.request import Outcome
    from agent.doors.desk import TextListener, TextOrder
    from agent.service.inspections.courses import Course
    from agent.service.texts.text_models import Speech
    from experts.llm.serving.generation import Reading
    from experts.llm.text.tokenizer import TextModel

KEY_PREFIX = "text/"
TOKEN_BYTES = 8
CHARACTER_BYTES = 4 + TOKEN_BYTES
FAILED = "failed"


@dataclass(frozen=True, slots=True)
class TextGlance:
    """Text under way, at a glance. ``expert``: None until one writes; ``waited_s``: until its first output, or now."""

    number: int
    model: str
    expert: str | None
    waited_s: float
    read_tokens: int
    written_tokens: int


@dataclass(eq=False)
class TextUnderWay:
    """Implements ``TextTicket``. ``left``: called once, with the ending. ``leave``, ``withdraw``: set before use."""

    order: TextOrder
    listener: TextListener
    speech_of: Callable[[str], Speech]
    due_s: float | None
    clock: Callable[[], float]
    left: Callable[[TextUnderWay, str], None]
    leave: Callable[[int], None] = lambda _: None
    withdraw: Callable[[], None] = lambda: None
    key: str = field(default_factory=lambda: f"{KEY_PREFIX}{uuid.uuid4().hex}")
    number: int = 0  # of those of a run, in the order of their coming
    first_s: float | None = None
    since_s: float = field(init=False)
    _writes: str | None = None  # expert that has begun to write
    _requests: dict[str, TextRequest] = field(default_factory=dict)
    _prompts: dict[tuple[str, bool], tuple[int, ...]] = field(default_factory=dict)  # by program; true: for a router
    _failures: dict[str, CoServeError] = field(default_factory=dict)  # by expert: reason why it cannot write the text
    _is_closed: bool = False  # the listener has left

    def __post_init__(self) -> None:
        self.since_s = self.clock()

    def glance(self) -> TextGlance:
        """For any thread."""
        expert, until_s = self._writes, self.clock() if self.first_s is None else self.first_s
        request = None if expert is None else self._requests.get(expert)
        writer = None if request is None else request.writer
        written = writer.written if isinstance(writer, TextWriter) else 0
        read = 0 if request is None else len(request.prompt)
        return TextGlance(self.number, self.order.model, expert, round(until_s - self.since_s, 3), read, written)

    def prepare(self, reached: Sequence[str]) -> None:
        """Make the request for each expert now, so that routing is fast. Raises as ``text_for`` of the first, and
        GrammarInvalid."""
        for expert in reached:
            if expert not in self._requests and expert not in self._failures:
                try:
                    self._requests[expert] = self._asked_of(expert)
                except GrammarInvalid:
                    raise
                except CoServeError as error:
                    self._failures[expert] = error
        self.text_for(reached[0])

    def text_for(self, expert: str) -> TextRequest:
        """Request for an expert. Raises GenerationInvalid, ExpertError."""
        if expert in self._failures:
            raise self._failures[expert]
        return self._requests[expert]

    def cancel(self) -> None:
        self._is_closed = True
        self.withdraw()

    def end_if_overdue(self, since_s: float) -> None:
        if self._is_overdue(since_s):
            self.withdraw()

    def give_up(self) -> None:
        self._fail(OrderRefused(Reason.STOPPING, "the agent is stopping, and the text ends here", 5.0))
        self.cancel()

    def end(self, outcome: Outcome, course: Course) -> None:
        """End the text; runs on the agent's thread."""
        step = outcome.steps[-1] if outcome.steps else None
        if outcome.reason == CANCELLED and self._is_overdue() and not self._is_closed:
            self.left(self, Ending.DEADLINE)
            self._send_end(self._ended_waiting(course))
        elif outcome.reason == CANCELLED:
            self.left(self, CANCELLED)
            self._fail(OrderRefused(Reason.NOT_NOW, "the text was cancelled"))
        elif outcome.label is None or step is None:
            self.left(self, FAILED)
            self._fail(self._failure(outcome.reason or "it has no answer"))
        elif step.prediction.label not in (self._requests[step.expert].choices or ()):  # not a label
            ending = Ending(step.prediction.label or Ending.DEADLINE)  # a router has no label to end with
            self._finish(step.expert)
            self.left(self, ending)
            self._send_end(self._ended(ending, step.expert, course))
        else:
            self._show(Piece(step.expert, step.prediction.label))
            self.left(self, Ending.STOP)
            self._send_end(self._ended(Ending.STOP, step.expert, course, step.prediction.label, step.prediction.score))

    def _asked_of(self, expert: str) -> TextRequest:
        speech = self.speech_of(expert)
        prompt = self._prompt_of(speech)
        if speech.labels:
            request = TextRequest(
                prompt, 0, self.order.sampling, Discarding(), self.due_s, choices=speech.labels, program=speech.program
            )
            self._check_room(len(prompt), request.most_tokens - len(prompt), expert, speech)
        else:
            self._check_room(len(prompt), 1, expert, speech)
            room = speech.most_tokens - len(prompt)
            wanted = room if self.order.most_tokens is None else self.order.most_tokens
            most = min(wanted, speech.model.context_tokens - len(prompt))
            if most > room:
                asked = f"is {most}, after {len(prompt)} tokens that are read"
                raise _no_room("max_tokens", asked, expert, speech, f"ask for at most {room}")
            sampling = speech.model.with_defaults(self.order.sampling, self.order.given)
            shows_tokens = self.order.sampling.logprobs is not None
            use = self.order.tools
            calls = None if use is None else speech.model.call_style()
            grammar = speech.model.grammar(self.order.constraint, use, prompt)
            writer = TextWriter(
                speech.model, prompt, self.order.stop, self._wrote, shows_tokens=shows_tokens, calls=calls
            )
            stops = speech.model.stop_tokens
            program = speech.program
            request = TextRequest(
                prompt, most, sampling, writer, self.due_s, stops, grammar=grammar, program=program,
                reading=self._reading(writer, speech),
            )  # fmt: skip
        check_against(request, speech.spec)
        return request

    def _reading(self, writer: TextWriter, speech: Speech) -> Reading | None:
        if self.order.echoes:
            return PromptScores(self.order.sampling.logprobs or 0, writer.echo)
        if self.order.pools:
            expert = speech.model.expert
            return PooledPrompt(speech.pooling(), lambda vector: self._wrote(Piece(expert, "", vector=vector)))
        return None

    def _prompt_of(self, speech: Speech) -> tuple[int, ...]:
        """The prompt as tokens, made once for the experts of one program."""
        key = speech.program, bool(speech.labels)
        if key not in self._prompts:
            tokens_of = _router_prompt if speech.labels else prompt_of
            self._prompts[key] = tokens_of(self.order, speech.model)
        return self._prompts[key]

    def _check_room(self, read: int, written: int, expert: str, speech: Speech) -> None:
        """Raises PromptInvalid for a prompt without room for so many output tokens."""
        if read + written > speech.most_tokens:
            field = "messages" if self.order.prompt is None else "prompt"
            raise _no_room(field, f"has {read} tokens", expert, speech, "shorten it")

    def _wrote(self, piece: Piece) -> None:
        """Stream tokens; runs on the executor's thread, or on the one that ends the text."""
        self._writes = piece.expert
        self._show(piece)

    def _show(self, piece: Piece) -> None:
        if self._is_closed:
            return
        if self.first_s is None:
            self.first_s = self.clock()
        self.listener.wrote(piece)

    def _finish(self, expert: str) -> None:
        writer = self._requests[expert].writer
        if isinstance(writer, TextWriter):
            writer.finish()

    def _ended(
        self, ending: Ending, expert: str, course: Course, label: str | None = None, score: float | None = None
    ) -> TextEnd:
        request = self._requests[expert]
        written = request.writer.written if isinstance(request.writer, TextWriter) else 0
        first_s = None if self.first_s is None else self.first_s - self.since_s
        return TextEnd(
            ending, expert, len(request.prompt), written, self.clock() - self.since_s, course.queue_s,
            first_s, label, score,
        )  # fmt: skip

    def _ended_waiting(self, course: Course) -> TextEnd:
        """End a text whose deadline passed in a queue."""
        if self._writes is not None:
            self._finish(self._writes)
            return self._ended(Ending.DEADLINE, self._writes, course)
        return TextEnd(Ending.DEADLINE, None, 0, 0, self.clock() - self.since_s, course.queue_s)

    def _is_overdue(self, since_s: float = 0.0) -> bool:
        return self.due_s is not None and self.clock() >= self.due_s + since_s

    def _failure(self, reason: str) -> OrderRefused:
        """Error of the order, if it was refused for an expert on its route."""
        for error in self._failures.values():
            if isinstance(error, GenerationInvalid) and str(error) in reason:
                return refused_for(error, reason)
        return OrderRefused(Reason.NOT_NOW, reason)

    def _fail(self, failure: OrderRefused) -> None:
        self._send_end(TextEnd(None, None, 0, 0, self.clock() - self.since_s, failure=failure))

    def _send_end(self, end: TextEnd) -> None:
        if not self._is_closed:
            self._is_closed = True
            self.listener.ended(end)


def prompt_bytes(order: TextOrder) -> int:
    """Bytes of a prompt as text and, estimated before it is tokenised, as a token for each character."""
    words = sum(len(str(value)) for message in order.messages for value in message.values())
    words += len(str(order.constraint or "")) + len(str(order.tools or ""))
    prompt = order.prompt or ""
    return CHARACTER_BYTES * words + (CHARACTER_BYTES if isinstance(prompt, str) else TOKEN_BYTES) * len(prompt)


def refused_for(error: GenerationInvalid, message: str) -> OrderRefused:
    reason = Reason.TOO_LONG if isinstance(error, PromptTooLong) else Reason.INVALID
    return OrderRefused(reason, message, field=error.field)


def _no_room(field: str, asked: str, expert: str, speech: Speech, advice: str) -> PromptTooLong:
    room = f"memory has room for {speech.most_tokens} tokens of a text of {expert}"
    return PromptTooLong(field, f"{asked}: {room} - {advice}, or give texts.kv more memory")


def prompt_of(order: TextOrder, model: TextModel) -> tuple[int, ...]:
    if isinstance(order.prompt, tuple):
        return model.checked(order.prompt, "prompt")
    if order.prompt is not None:
        return model.prompt_of(order.prompt)
    tools = () if order.tools is None else [tool.function for tool in order.tools.tools]
    return model.chat_prompt_of(order.messages, order.template, tools)


def _router_prompt(order: TextOrder, model: TextModel) -> tuple[int, ...]:
    """Prompt of only the last user text, as a chat if the router has a template."""
    words = last_words(order)
    if model.chat is None:
        return model.prompt_of(words)
    return model.chat_prompt_of([{"role": "user", "content": words}])
