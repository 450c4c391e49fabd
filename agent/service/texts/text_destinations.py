"""Routes a text: to one expert of the line, or to a route whose router decides.

Guarantees: pure; a refusal names the order's field.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from agent.doors.desk import AUTO
from agent.doors.refusals import invalid
from agent.faults.errors import OrderRefused, Reason
from experts.llm.text.text_writer import check_stops

if TYPE_CHECKING:
    from agent.doors.desk import TextOrder
    from experts.catalog import Catalog


@dataclass(frozen=True, slots=True)
class Destination:
    """Expert, or route whose router decides. ``reached``: experts that may write, the first one always reached."""

    expert: str | None
    route: str | None
    reached: tuple[str, ...]


def destination_of(order: TextOrder, catalog: Catalog) -> Destination:
    """Expert or route that writes the text. Raises OrderRefused."""
    name = _model_name(order.model, catalog)
    if name in catalog.texts:
        expert = catalog.texts[name].expert_for(last_words(order))
        router = catalog.texts[name].router
        if expert is None and router is not None:
            return Destination(None, name, (router, *catalog.texts[name].branches.values()))
        assert expert is not None, "a route without a router has an answer for every text"
        return Destination(expert, None, (expert,))
    return Destination(name, None, (name,))


def check_order(order: TextOrder) -> None:
    """Checks that need no model. Raises OrderRefused, GenerationInvalid."""
    least = 0 if order.echoes or order.pools else 1
    if order.most_tokens is not None and order.most_tokens < least:
        raise invalid("max_tokens", f"is {order.most_tokens}: give {least} or more")
    if order.prompt is not None and order.messages:
        raise invalid("prompt", "is given beside messages: give one of them")
    if not order.prompt and not order.messages:
        raise invalid("prompt", "is empty: there is nothing to continue")
    check_stops(order.stop)


def last_words(order: TextOrder) -> str:
    """Text that rules and routers decide by: the prompt, or the last user message. Raises OrderRefused."""
    if isinstance(order.prompt, tuple):
        raise invalid("prompt", "tokens are one expert's own: name an expert, or give words")
    if order.prompt is not None:
        return order.prompt
    return next((message["content"] for message in reversed(order.messages) if message["role"] == "user"), "")


def _model_name(model: str, catalog: Catalog) -> str:
    """Expert or route of the line. AUTO: a route of that name, else the only route, else the only expert."""
    writers = [name for name, expert in catalog.experts.items() if expert.takes_texts]
    if model in writers or model in catalog.texts:
        return model
    if model == AUTO:
        for known in (list(catalog.texts), writers):
            if len(known) == 1:
                return known[0]
    if model in catalog.experts:
        raise invalid("model", f"{model} takes images, not texts")
    names = ", ".join((*catalog.texts, *writers)) or "none on this line"
    why = "could be several" if model == AUTO and writers else "is not known"
    raise OrderRefused(Reason.NOT_FOUND, f"model: {model!r} {why} - texts are written by: {names}", field="model")
