"""Fields of a request that bound the form of its answer: OpenAI's formats and tools, and vLLM's structured outputs.

Guarantees: a form is refused by its path. Whether a model can keep it is the desk's to say.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from agent.doors.refusals import invalid
from experts.errors import GenerationInvalid
from experts.llm.text.constraints import Constraint
from experts.llm.text.tool_calls import AUTO, REQUIRED, Tool, ToolUse

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class JsonSchema(Body):
    name: str = Field(min_length=1)
    description: str | None = None
    wanted: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    """One of vLLM's fields, in `extra_body`."""

    wanted: dict[str, Any] | bool | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1)] | None = None
    grammar: str | None = None
    json_object: Literal[True] | None = None


class Function(Body):
    name: str = Field(pattern="^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class SentTool(Body):
    type: Literal["function"]
    function: Function


class FunctionName(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


def constraint_of(form: ResponseFormat | None, ours: StructuredOutputs | None) -> Constraint | None:
    """Form that the answer must have. Raises OrderRefused for several."""
    found = [*_constraints(form, ours)]
    if len(found) > 1:
        raise invalid(found[1].field, f"is given beside {found[0].field}: give one of them")
    return found[0] if found else None


def _constraints(form: ResponseFormat | None, ours: StructuredOutputs | None) -> Iterator[Constraint]:
    if form is not None and form.type == "json_object":
        yield Constraint.of_json("response_format", ANY_OBJECT)
    if form is not None and form.type == "json_schema":
        if form.json_schema is None:
            raise invalid("response_format.json_schema", "is missing")
        wanted = ANY_OBJECT if form.json_schema.wanted is None else form.json_schema.wanted
        is_strict = bool(form.json_schema.strict)
        yield Constraint.of_json("response_format.json_schema.schema", wanted, is_strict=is_strict)
    if ours is None:
        return
    if ours.json_object:
        yield Constraint.of_json("structured_outputs.json_object", ANY_OBJECT)
    if ours.wanted is not None:
        yield Constraint.of_json("structured_outputs.json", _schema(ours.wanted))
    if ours.regex is not None:
        yield Constraint.of_regex("structured_outputs.regex", ours.regex)
    if ours.choice is not None:
        yield Constraint.of_choice("structured_outputs.choice", ours.choice)
    if ours.grammar is not None:
        try:
            yield Constraint.of_grammar("structured_outputs.grammar", ours.grammar)
        except GenerationInvalid as error:
            raise invalid(error.field, error.message) from None


def _schema(wanted: dict[str, Any] | bool | str) -> dict[str, Any] | bool:
    """Schema, also of its text."""
    try:
        found = json.loads(wanted) if isinstance(wanted, str) else wanted
    except (ValueError, RecursionError) as error:
        raise invalid("structured_outputs.json", f"is no JSON: {error}") from None
    if not isinstance(found, dict | bool):
        raise invalid("structured_outputs.json", "is no JSON schema: give an object")
    return found


def tools_of(sent: Sequence[SentTool], wanted: str | NamedTool | None, *, several: bool) -> ToolUse | None:
    """Functions that the answer may call. Raises OrderRefused for a choice of none of them."""
    named = wanted.function.name if isinstance(wanted, NamedTool) else None
    choice = named or str(wanted or AUTO)
    tools = tuple(_tool(tool.function, place) for place, tool in enumerate(sent))
    names = [tool.name for tool in tools]
    if (twice := next((place for place, name in enumerate(names) if name in names[:place]), None)) is not None:
        raise invalid(f"tools[{twice}].function.name", f"is {names[twice]!r}, as of another: rename one")
    if named is not None and named not in names:
        raise invalid("tool_choice.function.name", f"is {named!r}, which is none of tools")
    if choice == REQUIRED and not tools:
        raise invalid("tool_choice", "is required without tools")
    if not tools or wanted == "none":
        return None
    return ToolUse(tools, choice, several)


def _tool(function: Function, place: int) -> Tool:
    field, is_strict = f"tools[{place}].function.parameters", bool(function.strict)
    schema = NO_ARGUMENTS if function.parameters is None else {"type": "object", **function.parameters}
    arguments = Constraint.of_json(field, schema, is_strict=is_strict)
    shown = function.model_dump(exclude_none=True, exclude={"strict"})
    return Tool(function.name, {"type": "function", "function": shown}, arguments, is_strict)
