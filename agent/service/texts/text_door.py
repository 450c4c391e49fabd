"""Texts of the APIs' callers: admitted, routed, streamed, ended (``agent.doors.desk``).

Guarantees: an impossible text (model, prompt, sampling) is refused before it runs. Admission is released with the
agent's outcome, also of a cancelled text, whose memory is free by then. Texts are not journaled.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

from agent.core.request import CANCELLED
from agent.doors.desk import PromptView, TextModelView, TextOrder
from agent.doors.refusals import invalid
from agent.faults.errors import OrderRefused, Reason
from agent.runtime.texts import TextSource
from agent.service.inspections.inspector import Submission
from agent.service.inspections.tally import Durations
from agent.service.texts.text_destinations import check_order, destination_of
from agent.service.texts.text_models import TextModels
from agent.service.texts.text_under_way import FAILED, TextUnderWay, prompt_bytes, prompt_of, refused_for
from agent.subject import CALLERS, Subject
from experts.errors import ExpertError, GenerationInvalid, TokenizerUnusable
from experts.llm.serving.generation import Ending

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from agent.deployment.build import Agent
    from agent.doors.desk import TextListener, TextTicket
    from agent.doors.http.metrics.readings import Distribution
    from agent.service.inspections.admission import Admission
    from agent.service.inspections.inspector import Inspector
    from agent.service.texts.text_destinations import Destination
    from agent.service.texts.text_under_way import TextGlance
    from experts.catalog import Catalog
    from experts.expert import Expert

STOP_LOOK_S = 0.01
OVERDUE_S = 0.5  # for queued texts; a running text ends at most a quantum after its deadline


@dataclass(frozen=True, slots=True)
class TextStatistics:
    """``ended``: texts by ending, `failed` and `cancelled`; ``first_token_s``: time to it, of texts with output."""

    under_way: int
    ended: Mapping[str, int]
    first_token_s: Distribution


class TextDoor:
    """Desk for texts. For any thread."""

    def __init__(self, inspector: Inspector, admission: Admission) -> None:
        self._inspector = inspector
        self._admission = admission
        self._models = TextModels()
        self._lock = threading.Lock()  # guards all fields below
        self._under_way: set[TextUnderWay] = set()
        self._ended: Counter[str] = Counter()
        self._first_tokens = Durations()
        self._is_stopping = False
        self._begun = 0

    def generate(self, order: TextOrder, listener: TextListener) -> TextTicket:
        if self._is_stopping or not self._inspector.takes:
            raise _stopping()
        agent = self._inspector.agent
        speech_of, due_s = partial(self._models.of, agent=agent), self._due_s(order, agent)
        text = TextUnderWay(order, listener, speech_of, due_s, time.monotonic, self._left)
        text.leave = self._admission.enter(1, prompt_bytes(order))  # first: tokenising takes longer the more there is
        with ExitStack() as refusing:
            refusing.callback(text.leave, 1)
            destination = self._prepared(text, agent)
            now = datetime.now(UTC)
            subject = Subject(text.key, CALLERS, text.key, now, destination.route, destination.expert)
            submission = Submission(subject, TextSource(text.text_for), text.end, is_counted=False)
            text.withdraw = partial(self._inspector.cancel_subject, submission)  # also for a text not yet admitted
            if not self._begin(text):
                raise _stopping()
            refusing.pop_all()
        self._inspector.submit_subject(submission)
        return text

    def _prepared(self, text: TextUnderWay, agent: Agent) -> Destination:
        with _refusals():
            check_order(text.order)
            destination = destination_of(text.order, agent.config.catalog)
            _check_form(text.order, destination, agent.config.catalog)
            text.prepare(destination.reached)
            return destination

    def tokenised(self, order: TextOrder) -> PromptView:
        """Raises OrderRefused."""
        agent, leave = self._inspector.agent, self._admission.enter(1, prompt_bytes(order))
        try:
            with _refusals():
                check_order(order)
                expert = destination_of(order, agent.config.catalog).reached[0]
                speech = self._models.of(expert, agent)
                return PromptView(expert, prompt_of(order, speech.model), speech.most_tokens)
        finally:
            leave(1)

    def detokenised(self, model: str, tokens: tuple[int, ...]) -> str:
        """Raises OrderRefused."""
        view = self.tokenised(TextOrder(model, tokens))
        return self._models.of(view.expert, self._inspector.agent).model.decode(view.tokens)

    def _begin(self, text: TextUnderWay) -> bool:
        """Register a text; False once `stop` may have listed the texts under way."""
        with self._lock:
            if not self._is_stopping:
                self._begun += 1
                text.number = self._begun
                self._under_way.add(text)
            return not self._is_stopping

    def models(self) -> list[TextModelView]:
        agent = self._inspector.agent
        catalog, engine = agent.config.catalog, agent.loop.statistics().engine
        reasons = engine.on_probation | engine.quarantined
        asked: dict[str, tuple[str, ...]] = {
            name: (name,) for name, expert in catalog.experts.items() if expert.takes_texts
        }
        asked |= {name: route.experts for name, route in catalog.texts.items()}
        return [self._view(name, experts, agent, reasons) for name, experts in asked.items()]

    def end_overdue(self) -> None:
        """End texts whose deadline passed in a queue; call periodically."""
        with self._lock:
            waiting = tuple(self._under_way)
        for text in waiting:
            text.end_if_overdue(OVERDUE_S)

    def statistics(self) -> TextStatistics:
        with self._lock:
            ended = {name: self._ended[name] for name in (*Ending, FAILED, CANCELLED)}
            return TextStatistics(len(self._under_way), ended, self._first_tokens.distribution())

    def glances(self) -> list[TextGlance]:
        """Texts under way, the longest first."""
        with self._lock:
            under_way = sorted(self._under_way, key=lambda text: text.number)
        return [text.glance() for text in under_way]

    def stop(self, timeout_s: float) -> None:
        """Take no more texts; cancel those that have not ended after the timeout."""
        with self._lock:
            self._is_stopping = True
        deadline_s = time.monotonic() + timeout_s
        while self._under_way and time.monotonic() < deadline_s:
            time.sleep(STOP_LOOK_S)
        with self._lock:
            left = tuple(self._under_way)
        for text in left:
            text.give_up()

    def _due_s(self, order: TextOrder, agent: Agent) -> float | None:
        """Deadline by the order, else by the line. Raises OrderRefused."""
        wanted_s = agent.config.texts.deadline_s if order.deadline_s is None else order.deadline_s
        if wanted_s is None:
            return None
        if not 0 < wanted_s < math.inf:
            raise invalid("deadline_s", f"is {wanted_s}: give seconds, above 0")
        return time.monotonic() + wanted_s

    def _view(self, name: str, experts: tuple[str, ...], agent: Agent, reasons: Mapping[str, str]) -> TextModelView:
        found = [f"{expert}: {reasons[own]}" for expert in experts if (own := agent.expert(expert)) in reasons]
        contexts = []
        for expert in experts:
            try:
                contexts.append(self._models.context_tokens(expert, agent))
            except ExpertError as error:
                found.append(str(error))
        return TextModelView(
            name,
            experts,
            min(contexts, default=None),
            not found,
            next(iter(found), None),
            self._pooling(experts, agent),
            _parent(agent.config.catalog.experts.get(name), agent.config.catalog),
        )

    def _pooling(self, experts: tuple[str, ...], agent: Agent) -> str | None:
        """In words; of a single expert without labels."""
        expert = agent.config.catalog.experts[experts[0]]
        if len(experts) > 1 or expert.labels or expert.parallel is not None:
            return None
        try:
            return str(self._models.pooling(expert.id, agent))
        except ExpertError:
            return None

    def _left(self, text: TextUnderWay, how: str) -> None:
        text.leave(1)
        with self._lock:
            self._under_way.discard(text)
            self._ended[how] += 1
            if text.first_s is not None:
                self._first_tokens.add(text.first_s - text.since_s)


@contextmanager
def _refusals() -> Iterator[None]:
    """Context in which errors of an order become refusals."""
    try:
        yield
    except GenerationInvalid as error:
        raise refused_for(error, str(error)) from error
    except TokenizerUnusable as error:
        raise OrderRefused(Reason.INVALID, str(error), field="model") from error
    except ExpertError as error:
        raise OrderRefused(Reason.NOT_NOW, str(error), field="model") from error


def _check_form(order: TextOrder, destination: Destination, catalog: Catalog) -> None:
    """Raises OrderRefused for a form or a reading that the destination would have to ignore."""
    field = order.constraint.field if order.constraint is not None else "tools" if order.tools is not None else None
    is_read = order.echoes or order.pools
    field = "model" if is_read else field
    if is_read and destination.expert is None:
        raise invalid("model", f"{order.model} is a route whose router reads the prompt: name an expert")
    if field is None or destination.expert is None:
        return
    expert = catalog.experts[destination.expert]
    if expert.labels:
        what = "name another one" if is_read else "leave it out"
        raise invalid(field, f"{expert.id} answers with one of its labels: {what}")
    if order.pools and expert.parallel is not None:
        raise invalid(field, f"{expert.id} runs over ranks, which make no vectors: name another one")


def _parent(expert: Expert | None, catalog: Catalog) -> str | None:
    if expert is None or expert.adapter is None:
        return None
    bases = (one.id for one in catalog.experts.values() if (one.weights, one.adapter) == (expert.weights, None))
    return next(bases, None)


def _stopping() -> OrderRefused:
    return OrderRefused(Reason.STOPPING, "the agent is stopping - the next one will take it", 5.0)
