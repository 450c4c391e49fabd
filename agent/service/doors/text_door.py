"""Texts of the APIs' callers: let in, routed, written piece by piece, ended.

Guarantees: see ``agent.api.calls.desk``. A text that can be told to be impossible (its model, its prompt against the
context, its sampling) is refused before anything of it runs. What it was admitted with is given back when the agent has
its outcome, also of one that was cancelled: by then what it held in memory is given back as well. Texts are not
journaled: who waits for one waits on the line, and the next start knows nothing of it.
"""

from __future__ import annotations

import math
import threading
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from agent.api.calls.desk import AUTO, TextEnd, TextModelView, TextPiece, TokenView
from agent.core.request import CANCELLED
from agent.runtime.text_sources import TextSource
from agent.service.doors.durations import Durations
from agent.service.doors.text_models import TextModels
from agent.service.judging.inspector import Task
from experts.errors import CoServeError, ExpertError, GenerationInvalid, OrderRefused, Refusing, TokenizerUnusable
from experts.llm.serving.generation import Ending, Generation, TextRequest, check_against
from experts.llm.text.text_writer import TextWriter, check_stops

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from agent.api.calls.desk import TextListener, TextOrder, TextTicket
    from agent.core.request import Outcome
    from agent.deployment.build import Agent
    from agent.service.doors.admission import Admission, Pass
    from agent.service.judging.inspector import Course, Inspector
    from agent.web.readings import Distribution
    from experts.catalog import Catalog
    from experts.llm.serving.generation import Sampled, Writer
    from experts.llm.text.text_writer import Piece
    from experts.llm.text.tokenizer import TextModel

KEY_PREFIX = "text/"
TOKEN_BYTES = 8  # what a prompt's token is counted with, beside its words
FAILED = "failed"
STOP_LOOK_S = 0.01


@dataclass(frozen=True, slots=True)
class TextStatistics:
    """A snapshot. ``ended``: by why, `failed` and `cancelled` beside the endings; ``first_token_s``: until something
    was shown, of those that showed something."""

    under_way: int
    ended: Mapping[str, int]
    first_token_s: Distribution


@dataclass(frozen=True, slots=True)
class Destination:
    """Who is asked for a text: one expert, or a route whose router decides. ``reached``: whom it may come to, the
    first of them for certain."""

    expert: str | None
    route: str | None
    reached: tuple[str, ...]


class TextDoor:
    """Keeps what of ``agent.api.calls.desk.Desk`` is about texts. For any thread."""

    def __init__(self, inspector: Inspector, admission: Admission, clock: Callable[[], float] = time.monotonic) -> None:
        self._inspector = inspector
        self._admission = admission
        self._clock = clock
        self._models = TextModels()
        self._lock = threading.Lock()  # over all below
        self._under_way: set[_Text] = set()
        self._ended: Counter[str] = Counter()
        self._first_tokens = Durations()
        self._is_stopping = False

    def generate(self, order: TextOrder, listener: TextListener) -> TextTicket:
        """See ``agent.api.calls.desk.Desk``."""
        if self._is_stopping or not self._inspector.takes:
            raise OrderRefused(Refusing.STOPPING, "the agent is stopping - the next one will take it", 5.0)
        agent = self._inspector.agent
        text = _Text(order, listener, self._models, agent, self._due_s(order, agent), self._clock, self._left)
        try:
            _check(order)
            destination = destination_of(order, agent.config.catalog)
            text.prepare(destination.reached)
        except GenerationInvalid as error:
            raise OrderRefused(Refusing.INVALID, str(error), field=error.field) from error
        except TokenizerUnusable as error:
            raise OrderRefused(Refusing.INVALID, str(error), field="model") from error
        except ExpertError as error:
            raise OrderRefused(Refusing.NOT_NOW, str(error), field="model") from error
        text.entered = self._admission.enter(1, text.size_bytes)
        with self._lock:
            self._under_way.add(text)
        task = Task(
            text.key, text.key, TextSource(text.text_for), text.end, destination.route, destination.expert,
            is_counted=False,
        )  # fmt: skip
        text.withdraw = partial(self._inspector.cancel, task)
        self._inspector.enter(task)
        return text

    def models(self) -> list[TextModelView]:
        """See ``agent.api.calls.desk.Desk.text_models``."""
        agent = self._inspector.agent
        catalog, engine = agent.config.catalog, agent.loop.statistics().engine
        reasons = engine.on_probation | engine.quarantined
        asked: dict[str, tuple[str, ...]] = {
            name: (name,) for name, expert in catalog.experts.items() if expert.takes_texts
        }
        asked |= {name: route.experts for name, route in catalog.texts.items()}
        return [self._view(name, experts, agent, reasons) for name, experts in asked.items()]

    def statistics(self) -> TextStatistics:
        """A frozen snapshot."""
        with self._lock:
            ended = {name: self._ended[name] for name in (*Ending, FAILED, CANCELLED)}
            return TextStatistics(len(self._under_way), ended, self._first_tokens.distribution())

    def stop(self, timeout_s: float) -> None:
        """Take no more; those that have not ended by then are told so, and cancelled."""
        self._is_stopping = True
        deadline_s = time.monotonic() + timeout_s
        while self._under_way and time.monotonic() < deadline_s:
            time.sleep(STOP_LOOK_S)
        with self._lock:
            left = tuple(self._under_way)
        for text in left:
            text.give_up()

    def _due_s(self, order: TextOrder, agent: Agent) -> float | None:
        """By the order, else by the line. Raises OrderRefused."""
        wanted_s = agent.config.texts.deadline_s if order.deadline_s is None else order.deadline_s
        if wanted_s is None:
            return None
        if not 0 < wanted_s < math.inf:
            raise OrderRefused(
                Refusing.INVALID, f"deadline_s: is {wanted_s}: give seconds, above 0", field="deadline_s"
            )
        return self._clock() + wanted_s

    def _view(self, name: str, experts: tuple[str, ...], agent: Agent, reasons: Mapping[str, str]) -> TextModelView:
        found = [f"{expert}: {reasons[own]}" for expert in experts if (own := agent.expert(expert)) in reasons]
        contexts = []
        for expert in experts:
            try:
                contexts.append(self._models.context_tokens(expert, agent))
            except ExpertError as error:
                found.append(str(error))
        return TextModelView(name, experts, min(contexts, default=None), not found, next(iter(found), None))

    def _left(self, text: _Text, how: str) -> None:
        """A text has its outcome."""
        if text.entered is not None:
            self._admission.leave(text.entered)
        with self._lock:
            self._under_way.discard(text)
            self._ended[how] += 1
            if text.first_s is not None:
                self._first_tokens.add(text.first_s - text.since_s)


@dataclass(eq=False)
class _Text:
    """One under way; a ``TextTicket``. ``entered`` and ``withdraw``: set before it is let in."""

    order: TextOrder
    listener: TextListener
    models: TextModels
    agent: Agent
    due_s: float | None
    clock: Callable[[], float]
    left: Callable[[_Text, str], None]
    entered: Pass | None = None
    withdraw: Callable[[], None] = lambda: None
    key: str = field(default_factory=lambda: f"{KEY_PREFIX}{uuid.uuid4().hex}")
    first_s: float | None = None
    since_s: float = field(init=False)
    _requests: dict[str, TextRequest] = field(default_factory=dict)
    _failures: dict[str, CoServeError] = field(default_factory=dict)  # by whom it cannot be asked of
    _is_closed: bool = False  # nobody listens any more

    def __post_init__(self) -> None:
        self.since_s = self.clock()

    @property
    def size_bytes(self) -> int:
        """What it takes while it waits."""
        words = sum(len(value) for message in self.order.messages for value in message.values())
        words += len(self.order.prompt) if isinstance(self.order.prompt, str) else 0
        return 4 * words + TOKEN_BYTES * sum(len(one.generation.prompt) for one in self._requests.values())

    def prepare(self, reached: Sequence[str]) -> None:
        """What it wants of all these, so that nobody waits for that later. Raises as ``text_for`` of the first."""
        for expert in reached:
            if expert not in self._requests and expert not in self._failures:
                try:
                    self._requests[expert] = self._asked_of(expert)
                except CoServeError as error:
                    self._failures[expert] = error
        self.text_for(reached[0])

    def text_for(self, expert: str) -> TextRequest:
        """What it wants of an expert. Raises GenerationInvalid, ExpertError."""
        if expert in self._failures:
            raise self._failures[expert]
        return self._requests[expert]

    def cancel(self) -> None:
        """See ``agent.api.calls.desk.Ticket``."""
        self._is_closed = True
        self.withdraw()

    def give_up(self) -> None:
        """The agent stops, and whoever listens is told so."""
        self._fail(OrderRefused(Refusing.STOPPING, "the agent is stopping, and the text ends here", 5.0))
        self.cancel()

    def end(self, outcome: Outcome, course: Course) -> None:
        """Its outcome, on the agent's thread."""
        step = outcome.steps[-1] if outcome.steps else None
        if outcome.reason == CANCELLED:
            self.left(self, CANCELLED)
            self._fail(OrderRefused(Refusing.NOT_NOW, "the text was cancelled"))
        elif outcome.label is None or step is None:
            self.left(self, FAILED)
            self._fail(self._failure(outcome.reason or "it has no answer"))
        elif step.prediction.label in tuple(Ending):
            self._finish(step.expert)
            self.left(self, step.prediction.label)
            self._tell_end(self._ended(Ending(step.prediction.label), step.expert, course))
        else:
            self._show(TextPiece(step.expert, step.prediction.label))
            self.left(self, Ending.STOP)
            self._tell_end(self._ended(Ending.STOP, step.expert, course, step.prediction.label, step.prediction.score))

    def _asked_of(self, expert: str) -> TextRequest:
        speech = self.models.of(expert, self.agent)
        if speech.labels:
            prompt = speech.model.checked(_router_prompt(self.order, speech.model), "prompt")
            generation = Generation(prompt, 0, self.order.sampling, choices=speech.labels)
            writer: Writer = _Silent()
        else:
            prompt = _prompt(self.order, speech.model)
            room = speech.model.context_tokens - len(prompt)
            most = min(self.order.most_tokens or room, room)
            generation = Generation(prompt, most, self.order.sampling, speech.model.stop_tokens)
            writer = TextWriter(speech.model, prompt, self.order.stop, partial(self._wrote, expert, speech.model))
        check_against(generation, speech.spec)
        return TextRequest(generation, writer, self.due_s)

    def _wrote(self, expert: str, model: TextModel, piece: Piece) -> None:
        """On the executor's thread, or where the text ends."""
        tokens = piece.tokens if self.order.sampling.logprobs is not None else ()
        self._show(TextPiece(expert, piece.text, tuple(_token_view(token, model) for token in tokens)))

    def _show(self, piece: TextPiece) -> None:
        if self._is_closed:
            return
        if self.first_s is None:
            self.first_s = self.clock()
        self.listener.wrote(piece)

    def _finish(self, expert: str) -> None:
        """What was held back is shown."""
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
            ending, expert, len(request.generation.prompt), written, self.clock() - self.since_s, course.queue_s,
            first_s, label, score,
        )  # fmt: skip

    def _failure(self, reason: str) -> OrderRefused:
        """Whose fault it is: the order's, where it was refused for an expert that its route came to."""
        for error in self._failures.values():
            if isinstance(error, GenerationInvalid) and str(error) in reason:
                return OrderRefused(Refusing.INVALID, reason, field=error.field)
        return OrderRefused(Refusing.NOT_NOW, reason)

    def _fail(self, failure: OrderRefused) -> None:
        self._tell_end(TextEnd(None, None, 0, 0, self.clock() - self.since_s, failure=failure))

    def _tell_end(self, end: TextEnd) -> None:
        if not self._is_closed:
            self._is_closed = True
            self.listener.ended(end)


class _Silent:
    """The writer of a router, whose answer is a label."""

    def write(self, _: Sampled) -> bool:
        return False


def destination_of(order: TextOrder, catalog: Catalog) -> Destination:
    """Who is to write it. Raises OrderRefused."""
    name = _model_name(order.model, catalog)
    if name in catalog.texts:
        expert = catalog.texts[name].expert_for(_last_words(order))
        router = catalog.texts[name].router
        if expert is None and router is not None:
            return Destination(None, name, (router, *catalog.texts[name].branches.values()))
        assert expert is not None, "a route without a router has an answer for every text"
        return Destination(expert, None, (expert,))
    return Destination(name, None, (name,))


def _model_name(model: str, catalog: Catalog) -> str:
    """An expert or a route of the line. AUTO is a route of that name, else the only one, else the only expert."""
    writers = [name for name, expert in catalog.experts.items() if expert.takes_texts]
    if model in writers or model in catalog.texts:
        return model
    if model == AUTO:
        for known in (list(catalog.texts), writers):
            if len(known) == 1:
                return known[0]
    if model in catalog.experts:
        raise _invalid("model", f"{model} takes images, not texts")
    names = ", ".join((*catalog.texts, *writers)) or "none on this line"
    why = "could be several" if model == AUTO and writers else "is not known"
    raise OrderRefused(Refusing.NOT_FOUND, f"model: {model!r} {why} - texts are written by: {names}", field="model")


def _invalid(field: str, message: str) -> OrderRefused:
    return OrderRefused(Refusing.INVALID, f"{field}: {message}", field=field)


def _check(order: TextOrder) -> None:
    """What is wrong with an order whoever writes it. Raises OrderRefused, GenerationInvalid."""
    if order.most_tokens is not None and order.most_tokens < 1:
        raise _invalid("max_tokens", f"is {order.most_tokens}: give 1 or more")
    if order.prompt is not None and order.messages:
        raise _invalid("prompt", "is given beside messages: give one of them")
    if not order.prompt and not order.messages:
        raise _invalid("prompt", "is empty: there is nothing to continue")
    check_stops(order.stop)


def _last_words(order: TextOrder) -> str:
    """What rules and routers decide by: the prompt, or what the user of a chat said last. Raises OrderRefused."""
    if isinstance(order.prompt, tuple):
        raise _invalid("prompt", "tokens are one expert's own: name an expert, or give words")
    if order.prompt is not None:
        return order.prompt
    return next((message["content"] for message in reversed(order.messages) if message["role"] == "user"), "")


def _prompt(order: TextOrder, model: TextModel) -> tuple[int, ...]:
    if isinstance(order.prompt, tuple):
        return model.checked(order.prompt, "prompt")
    if order.prompt is not None:
        return model.prompt_of(order.prompt)
    return model.chat_prompt_of(order.messages)


def _router_prompt(order: TextOrder, model: TextModel) -> tuple[int, ...]:
    """The last words alone: as a chat's where the router has a template for that, else as they are."""
    words = _last_words(order)
    if model.chat is None:
        return model.prompt_of(words)
    return model.chat_prompt_of([{"role": "user", "content": words}])


def _token_view(sampled: Sampled, model: TextModel) -> TokenView:
    others = tuple(_one_view(token, logprob, model) for token, logprob in sampled.alternatives)
    return _one_view(sampled.token, sampled.logprob, model, others)


def _one_view(token: int, logprob: float, model: TextModel, others: Sequence[TokenView] = ()) -> TokenView:
    content = model.token_bytes(token)
    return TokenView(content.decode("utf-8", "replace"), content, logprob, tuple(others))
