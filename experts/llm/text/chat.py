"""Chat template of a model: turns messages into the text that the model was trained to answer.

Guarantees: a template may have any origin, so it runs in a bounded sandbox (``experts.llm.text.bounded_sandbox``). A
template that refuses the messages raises PromptInvalid; a broken one raises TokenizerUnusable.
"""

from __future__ import annotations

import copy
import functools
import json
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

from jinja2 import TemplateError, TemplateRuntimeError, nodes
from jinja2.ext import Extension, loopcontrols

from experts.errors import PromptInvalid, TokenizerUnusable
from experts.llm.text.bounded_sandbox import RENDER_S, BoundedSandbox

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from jinja2.parser import Parser

MISTAKES = (
    TemplateError, ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError,
)  # fmt: skip


class ChatTemplate:
    """Chat template of one model. Thread-safe."""

    def __init__(
        self, expert: str, file: str, source: str, special_tokens: Mapping[str, str], render_s: float = RENDER_S
    ) -> None:
        self._expert = expert
        self._file = file
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._sandbox = _sandbox(render_s)
        self._compiled = functools.cache(self._sandbox.compiled)

    def named(self, expert: str) -> ChatTemplate:
        other = copy.copy(self)
        other._expert = expert
        return other

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None) -> str:
        """``variables``: further ones. Raises PromptInvalid (refused by the template), TokenizerUnusable (it fails)."""
        reserved = {**self._special_tokens, "messages": list(messages), "add_generation_prompt": True}
        if taken := sorted((variables or {}).keys() & reserved.keys()):
            raise PromptInvalid("chat_template_kwargs", f"{taken[0]}: is set by the agent - leave it out")
        given = {**(variables or {}), **reserved}
        try:
            return self._sandbox.render(self._compiled(self._source), given)
        except _TemplateRefused as refused:
            raise PromptInvalid("messages", f"the chat template of {self._expert} refuses them: {refused}") from None
        except MISTAKES as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise TokenizerUnusable(
                self._expert, self._file, f"the chat template fails for these messages: {reason}"
            ) from error


class _TemplateRefused(TemplateRuntimeError):
    """The template does not accept these messages: it called raise_exception."""


class _GenerationTag(Extension):
    """`{% generation %}`: marks the part that a model is trained to write; the rendered text does not change."""

    tags = {"generation"}  # noqa: RUF012 - as the library declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _sandbox(render_s: float) -> BoundedSandbox:
    """Environment of transformers' chat templates: trimming, globals and tags."""
    sandbox = BoundedSandbox(render_s, trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag])
    sandbox.give(filters={"tojson": _json}, calls={"raise_exception": _refuse, "strftime_now": _time_now})
    return sandbox


def _json(value: Any, indent: int | None = None, **options: Any) -> str:  # noqa: ANN401 - JSON
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)  # Jinja's own escapes HTML


def _refuse(message: str) -> NoReturn:
    raise _TemplateRefused(str(message))


def _time_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)
