"""Constraints: forms of an answer that a caller demands, as grammars of llguidance.

A JSON schema, a pattern, a choice of strings, or a grammar (Lark or GBNF). Blanks between JSON's parts are a line break
and an indentation at most, so a text cannot go on with blanks for ever.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from experts.errors import GrammarInvalid
from experts.llm.serving.grammar_trial import REASON_CHARACTERS, check_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

BLANKS = r"\n?[ \t]{0,24}"
ANSWER = "answer"
THOUGHT = ("thought[lazy]: /(?s:.*)<\\/think>/", "blank: /[ \\n]{0,4}/")
SLASH = re.compile(r"\\.|/", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Constraint:
    """``field``: of the request, named in a refusal. ``grammar``: `json_schema` or `lark_grammar` of llguidance."""

    field: str
    grammar: Mapping[str, Any]

    @classmethod
    def of_json(cls, field: str, schema: Mapping[str, Any] | bool, *, is_strict: bool = True) -> Constraint:
        """Demand JSON of a schema. Unless it is strict, keywords that cannot be served demand nothing."""
        options = {"whitespace_pattern": BLANKS, **({} if is_strict else {"lenient": True})}
        named = {"x-guidance": options, **schema} if not isinstance(schema, bool) else schema
        return cls(field, {"json_schema": named})

    @classmethod
    def of_regex(cls, field: str, pattern: str) -> Constraint:
        escaped = SLASH.sub(lambda found: "\\/" if found[0] == "/" else found[0], pattern)
        return cls(field, {"lark_grammar": f"start: /{escaped}/"})

    @classmethod
    def of_choice(cls, field: str, choices: Sequence[str]) -> Constraint:
        return cls(field, {"lark_grammar": "start: " + " | ".join(map(json.dumps, choices))})

    @classmethod
    def of_grammar(cls, field: str, grammar: str) -> Constraint:
        """Demand a Lark grammar of llguidance, or a GBNF grammar of llama.cpp. Raises GrammarInvalid."""
        from llguidance.gbnf_to_lark import any_to_lark

        check_size(grammar, field)
        try:
            return cls(field, {"lark_grammar": any_to_lark(grammar)})
        except Exception as error:  # the library raises nothing narrower
            raise GrammarInvalid(field, f"cannot be read: {str(error)[:REASON_CHARACTERS]}") from error


def constrained(constraint: Constraint, *, is_thought: bool) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Entries of a grammar, and the field of each. ``is_thought``: the prompt has opened a reasoning."""
    answer = {"name": ANSWER, **constraint.grammar}
    rules = (f"start: thought blank @{ANSWER}", *THOUGHT)
    entries = [{"lark_grammar": "\n".join(rules)}, answer] if is_thought else [answer]
    return entries, {ANSWER: constraint.field}
