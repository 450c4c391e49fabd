"""Texts of a running agent, for people and scripts: `coserve generate`.

Guarantees: what a model writes cannot act on a terminal: there, control characters are shown as such.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agent.api.calls.desk import TextEnd, TextOrder
from agent.commands.asking import ask_to_write
from experts.errors import GenerationInvalid, OrderRefused, Refusing
from experts.llm.serving.generation import Ending, Sampling

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent.commands.asking import AccessFiles
    from agent.config import LineConfig

KEPT = frozenset("\n\t")
ENDINGS = {
    Ending.STOP: "it had no more to say",
    Ending.LENGTH: "it is as long as it may be",
    Ending.DEADLINE: "its time was over",
}


def order_for(
    model: str, words: str, *, is_prompt: bool, system: str | None, most_tokens: int | None, deadline_s: float | None,
    stop: tuple[str, ...], sampling: dict[str, Any],
) -> TextOrder:  # fmt: skip
    """What is asked for: the answer to a message, or, as a prompt, what follows it. Raises OrderRefused."""
    try:
        given = frozenset(name for name, value in sampling.items() if value is not None)
        drawn = Sampling(**{name: value for name, value in sampling.items() if value is not None})
    except GenerationInvalid as error:
        raise OrderRefused(Refusing.INVALID, str(error), field=error.field) from error
    said = [("system", system)] if system is not None else []
    messages = tuple({"role": role, "content": content} for role, content in (*said, ("user", words)))
    return TextOrder(
        model, words if is_prompt else None, () if is_prompt else messages, most_tokens, drawn, stop, deadline_s, given
    )


def generated(
    config: LineConfig | None, target: str | None, files: AccessFiles, order: TextOrder, show: Callable[[str], None]
) -> dict[str, Any]:
    """End and whole text; ``show`` is given each piece as it comes. Raises as ``ask_to_write``."""
    text = ""
    for told in ask_to_write(config, target, files, order):
        if isinstance(told, TextEnd):
            return _row(text, told)
        text += told.text
        show(told.text)
    raise OrderRefused(Refusing.NOT_NOW, "the agent ended in the middle of the text - ask again")


def for_terminal(text: str) -> str:
    """Control characters are shown escaped: they would act on the terminal."""
    return "".join(each if each.isprintable() or each in KEPT else f"\\x{ord(each):02x}" for each in text)


def closing_line(row: dict[str, Any]) -> str:
    rate = row["written_tokens"] / row["seconds"] if row["seconds"] else 0.0
    why = "it ended" if row["ending"] is None else ENDINGS[Ending(row["ending"])]
    return (
        f"{row['expert']}: {row['read_tokens']} tokens read, {row['written_tokens']} written in "
        f"{row['seconds']:.2f} s ({rate:.1f}/s); {why}"
    )


def _row(text: str, end: TextEnd) -> dict[str, Any]:
    return {
        "text": text,
        "expert": end.expert,
        "ending": None if end.ending is None else str(end.ending),
        "read_tokens": end.read_tokens,
        "written_tokens": end.written_tokens,
        "seconds": round(end.seconds, 6),
        "queue_s": round(end.queue_s, 6),
        "first_token_s": None if end.first_token_s is None else round(end.first_token_s, 6),
        "label": end.label,
        "score": end.score,
    }
