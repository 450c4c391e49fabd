"""Tool calls in a model's text: their styles, the grammar that demands them, and their reading, piece by piece.

Three styles are known, by the chat template: Hermes and Qwen (`<tool_call>{...}</tool_call>`), Mistral
(`[TOOL_CALLS][{...}]`) and Llama 3 (the text is the call's JSON). Guarantees of ``CallReader``: what it gives joins to
the same calls however the text is cut into pieces; text that is no call of a known function is content.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from experts.llm.serving.generation import CallStyle
from experts.llm.text.constraints import ANSWER, THOUGHT, Constraint

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

AUTO, REQUIRED = "auto", "required"
BEGINNING = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
OTHER_STYLES = ("<function=", "<arg_key>", "[ARGS]")  # of Qwen3-Coder, GLM and later Mistrals, with the same marks
BETWEEN_CALLS = " \n\t\r[],;"


HERMES = CallStyle("<tool_call>", "</tool_call>")
MISTRAL = CallStyle("[TOOL_CALLS]", is_list=True)
LLAMA = CallStyle("<|python_tag|>", arguments="parameters", is_bare=True)


def style_of(template: str) -> CallStyle | None:
    """Style of a chat template; None if it takes no tools, or has another style."""
    if "tools" not in template or any(mark in template for mark in OTHER_STYLES):
        return None
    if MISTRAL.opening in template:
        return MISTRAL
    if HERMES.opening in template:
        return HERMES
    return LLAMA if LLAMA.opening in template or '"parameters":' in template else None


@dataclass(frozen=True, slots=True)
class Tool:
    """``function``: as it reaches the chat template. ``arguments``: their form."""

    name: str
    function: Mapping[str, Any]
    arguments: Constraint
    is_strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools of an answer. ``choice``: AUTO, REQUIRED, or a function's name. ``several``: calls may be."""

    tools: tuple[Tool, ...]
    choice: str = AUTO
    several: bool = True

    @property
    def callable(self) -> tuple[Tool, ...]:
        return tuple(tool for tool in self.tools if self.choice in (AUTO, REQUIRED, tool.name))

    @property
    def is_bound(self) -> bool:
        """The form of the calls is demanded, not only asked for."""
        return self.choice != AUTO or any(tool.is_strict for tool in self.tools)


def calls_grammar(
    use: ToolUse, style: CallStyle, mark: Callable[[str], str], answer: Constraint | None, *, is_thought: bool
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Entries of a grammar, and the field of each. ``mark``: spells the style's marks in a grammar. ``answer``: form
    of a text without calls."""
    opening, closing = mark(style.opening), mark(style.closing)
    bodies, entries, fields = [], [], {}
    for number, tool in enumerate(use.callable):
        name = f"arguments{number}"
        head = json.dumps(f'{{"name": {json.dumps(tool.name)}, "{style.arguments}": ')
        bodies.append(f'{head} @{name} "}}"')
        entries.append({"name": name, **tool.arguments.grammar})
        fields[name] = tool.arguments.field
    several = use.several and use.choice in (AUTO, REQUIRED)
    rules = [f"body: {' | '.join(bodies)}", *THOUGHT]
    text = f"TEXT: /(?s:.+)/ & ~/(?s:.*){re.escape(style.opening)}(?s:.*)/"
    space = "blank" if use.choice == AUTO else '"\\n"'
    if style.is_bare:
        calls, after, text = "body", "body", "TEXT: /[^{ \\n](?s:.*)/"
    elif style.is_list:
        after = 'blank "[" body ' + ('(", " body)* "]"' if several else '"]"')
        calls = f"{opening} {after}"
    else:
        after = f"{space} body {space} {closing}"
        calls = 'call ("\\n" call)*' if several else "call"
        rules.append(f"call: {opening} {after}")
    if use.choice != AUTO:
        start = calls
    elif answer is not None:
        start = f"{calls} | @{ANSWER}"
        entries.append({"name": ANSWER, **answer.grammar})
        fields[ANSWER] = answer.field
    elif style.is_bare:
        start = f"{calls} | TEXT"
    elif opening.startswith("<["):  # a token of its own, which no text holds
        start = f"TEXT? ({calls})?"
    else:
        rules.append(f"spoken[lazy]: /(?s:.*){re.escape(style.opening)}/")
        start = f"(spoken {after}){'*' if several and not style.is_list else '?'} TEXT?"
    rules.append(text)
    begin = "start: thought blank " if is_thought else "start: "
    return [{"lark_grammar": "\n".join((f"{begin}({start})", *rules))}, *entries], fields


@dataclass(frozen=True, slots=True)
class CallPart:
    """Part of a call: its name, then pieces of its arguments' JSON. ``name``: None after the first part."""

    number: int
    name: str | None
    arguments: str


AnswerPart: TypeAlias = "str | CallPart"


class _Object:
    """Finds the end of a JSON object, piece by piece."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._is_string = self._is_escaped = False
        self.is_over = False

    def take(self, text: str) -> int:
        """Characters of a text that are the object's."""
        for place, letter in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_string:
                self._is_escaped, self._is_string = letter == "\\", letter != '"'
            elif letter == '"':
                self._is_string = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self.is_over = True
                    return place + 1
        return len(text)


class CallReader:
    """Separates calls from content. ``names``: of known functions. ``calls``: so far."""

    def __init__(self, style: CallStyle, names: Collection[str]) -> None:
        self.calls = 0
        self._style = style
        self._names = names
        self._held = self._opened = ""  # not given yet; the opening of a call that has not begun
        self._step = self._say
        self._is_fresh = True  # nothing but blanks was said, since the beginning or the last call
        self._is_last = False
        self._object = _Object()
        self._scanned = 0

    def add(self, text: str, *, is_last: bool = False) -> list[AnswerPart]:
        """Content and parts of calls that are certain by now."""
        self._held += text
        self._is_last = is_last
        parts: list[AnswerPart] = []
        while self._step(parts):
            pass
        return parts

    def _say(self, parts: list[AnswerPart]) -> bool:
        if self._style.is_bare:
            return self._say_bare(parts)
        before, found, after = self._held.partition(self._style.opening)
        if found:
            self._give(parts, before.rstrip())
            self._held, self._opened, self._step = after, found, self._between
            return True
        kept = 0 if self._is_last else _may_begin(self._held, self._style.opening)
        said = self._held[: len(self._held) - kept]
        said = said if self._is_last else said.rstrip()  # blanks before a call are not content
        self._held = self._held[len(said) :]
        self._give(parts, said)
        return False

    def _say_bare(self, parts: list[AnswerPart]) -> bool:
        start, opening = self._held.lstrip(), self._style.opening
        if self._is_fresh and not self.calls and not self._is_last and opening.startswith(start):
            return False
        if self._is_fresh and not self.calls and start.startswith(("{", opening)):
            self._opened = opening if start.startswith(opening) else ""
            self._held, self._step = start.removeprefix(opening), self._between
            return True
        self._give(parts, self._held)
        self._held = ""
        return False

    def _give(self, parts: list[AnswerPart], text: str) -> None:
        text = text.lstrip() if self._is_fresh and self.calls else text
        if text:
            self._is_fresh = False
            parts.append(text)

    def _between(self, parts: list[AnswerPart]) -> bool:
        rest, closing = self._held.lstrip(BETWEEN_CALLS), self._style.closing
        if rest.startswith("{"):
            self._held, self._step, self._object, self._scanned = rest, self._begin, _Object(), 0
            return True
        if closing and rest.startswith(closing):
            self._held, self._opened, self._step, self._is_fresh = rest[len(closing) :], "", self._say, True
            return True
        if closing.startswith(rest) and not (self._is_last and self._opened):
            return False
        self._held = self._held if self._opened else rest
        self._fall_back(parts)
        return True

    def _begin(self, parts: list[AnswerPart]) -> bool:
        found = BEGINNING.match(self._held)
        if found and (name := _unquoted(found[1])) in self._names:
            parts.append(CallPart(self.calls, name, ""))
            self._held, self._step, self._object = self._held[found.end() :], self._arguments, _Object()
            return True
        self._scanned += self._object.take(self._held[self._scanned :])
        if self._object.is_over:
            self._give_whole(parts)
            return True
        if self._is_last:
            self._fall_back(parts, len(self._held))
        return self._is_last

    def _give_whole(self, parts: list[AnswerPart]) -> None:
        """Give a call whose keys are in another order, or other JSON as content."""
        call = _read(self._held[: self._scanned])
        if call.get("name") in self._names:
            self._held = self._held[self._scanned :]
            arguments = call.get("arguments", call.get("parameters", {}))
            spelled = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            parts.append(CallPart(self.calls, str(call["name"]), ""))
            parts.append(CallPart(self.calls, None, spelled))
            self._end_call()
        else:
            self._fall_back(parts, self._scanned)

    def _fall_back(self, parts: list[AnswerPart], length: int = 0) -> None:
        """Give as content what was no call: its opening, and ``length`` characters. The rest is read anew."""
        self._is_fresh = False
        parts.append(self._opened + self._held[:length])
        self._held, self._opened, self._step = self._held[length:], "", self._say

    def _arguments(self, parts: list[AnswerPart]) -> bool:
        if size := self._object.take(self._held):
            parts.append(CallPart(self.calls, None, self._held[:size]))
        self._held = self._held[size:]
        if not self._object.is_over:
            return False
        self._object, self._step = _Object(depth=1), self._finish
        return True

    def _finish(self, parts: list[AnswerPart]) -> bool:
        self._held = self._held[self._object.take(self._held) :]
        if self._object.is_over:
            self._end_call()
        return self._object.is_over

    def _end_call(self) -> None:
        self.calls += 1
        self._opened, self._step = "", self._between


def _may_begin(text: str, opening: str) -> int:
    """Characters at the end of a text that may begin an opening."""
    return next((size for size in range(len(opening) - 1, 0, -1) if text.endswith(opening[:size])), 0)


def _unquoted(text: str) -> str:
    try:
        return str(json.loads(text))
    except ValueError:
        return ""


def _read(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
