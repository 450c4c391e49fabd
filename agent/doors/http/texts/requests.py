"""Conversion of OpenAI's request bodies to replies, which hold the orders for their texts.

Guarantees: a field that would change the answer and is not served (biases, say) is refused by name, never
ignored. Fields without effect on the answer (a user's name, metadata) are ignored. Types are
strict: a number in quotes is refused.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import Field, ValidationError

from agent.doors.desk import TextOrder
from agent.doors.http.texts.replies import TextReply
from agent.doors.http.texts.structured import (
    Body,
    NamedTool,
    ResponseFormat,
    SentTool,
    StructuredOutputs,
    constraint_of,
    tools_of,
)
from agent.doors.refusals import invalid
from experts.errors import GenerationInvalid
from experts.llm.serving.generation import MOST_WHOLE, Sampling

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LONE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # as JavaScript's slice makes of an emoji, or a pair
MOST_TEXTS = 128  # of a request: OpenAI's limit of `n`
USUAL_COMPLETION_TOKENS = 16  # default of a completion, as with OpenAI; a chat may use the whole context
PASSED_OVER = frozenset({
    "metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user",
})  # fmt: skip
# Fields that are served with these values only.
ONLY: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,), "suffix": ("",), "logit_bias": ({},), "functions": ([],),
    "function_call": ("none", "auto"), "modalities": (["text"],), "audio": (), "prediction": (),
    "reasoning_effort": (), "verbosity": (), "web_search_options": (),
}  # fmt: skip


PASSED_ON = ("name", "tool_call_id", "reasoning_content")  # to the chat template


class _StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding against eavesdroppers: ignored


class _Ours(Body):
    """Field of our own, in `extra_body`: then the end of the answer has more than OpenAI's. ``deadline_s``: from now
    on; the text written so far is the answer."""

    deadline_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


class TextBody(Body):
    """Fields of both endpoints; ``structured_outputs``, ``top_k``, ``min_p`` and ``repetition_penalty`` come in
    `extra_body`."""

    model: str = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    n: int | None = Field(None, ge=1, le=MOST_TEXTS)
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    coserve: _Ours | None = None


Prompts: TypeAlias = str | list[str] | list[int] | list[list[int]]


class CompletionBody(TextBody):
    prompt: Prompts
    max_tokens: int | None = Field(None, ge=0)
    logprobs: int | None = None
    echo: bool | None = None


class _ContentPart(Body):
    type: Literal["text"]
    text: str


class _Called(Body):
    name: str
    arguments: str


class _ToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: _Called
    index: int | None = None


class _Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[_ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[_ToolCall] | None = None
    function_call: None = None
    audio: None = None
    annotations: list[Any] | None = None  # of an earlier answer that a client sends back
    reasoning_content: str | None = None


class ChatBody(TextBody):
    messages: list[_Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[SentTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # in `extra_body`, as for vLLM and SGLang


class _PromptBody(Body):
    model: str = Field(min_length=1)
    prompt: str | None = None
    messages: list[_Message] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class _TokensBody(Body):
    model: str = Field(min_length=1)
    tokens: list[int]


Kind = TypeVar("Kind", bound=Body)


def prompt_of(body: bytes) -> TextOrder:
    """A body of /tokenize: a prompt, or a chat. Raises OrderRefused."""
    sent = read_body(body, _PromptBody)
    messages = tuple(message_of(message, place) for place, message in enumerate(sent.messages or ()))
    return TextOrder(sent.model, sent.prompt, messages, template=sent.chat_template_kwargs or {})


def tokens_of(body: bytes) -> tuple[str, tuple[int, ...]]:
    """A body of /detokenize: model and tokens. Raises OrderRefused."""
    sent = read_body(body, _TokensBody)
    return sent.model, tuple(sent.tokens)


def completion_of(body: bytes) -> TextReply:
    """A body of /v1/completions. Raises OrderRefused."""
    sent = read_body(body, CompletionBody)
    most_tokens = USUAL_COMPLETION_TOKENS if sent.max_tokens is None and sent.coserve is None else sent.max_tokens
    prompts = [{"prompt": prompt} for prompt in prompts_of(sent.prompt, "prompt")]
    return _reply(sent, sent.logprobs, prompts, most_tokens=most_tokens, echoes=bool(sent.echo))


def chat_of(body: bytes) -> TextReply:
    """A body of /v1/chat/completions. Raises OrderRefused."""
    sent = read_body(body, ChatBody)
    if sent.top_logprobs is not None and not sent.logprobs:
        raise invalid("top_logprobs", "is given without logprobs: true")
    if sent.max_tokens is not None and sent.max_completion_tokens is not None:
        raise invalid("max_tokens", "is given beside max_completion_tokens, its later name: give one of them")
    return _reply(
        sent,
        (sent.top_logprobs or 0) if sent.logprobs else None,
        [{"messages": tuple(message_of(message, place) for place, message in enumerate(sent.messages))}],
        most_tokens=sent.max_completion_tokens or sent.max_tokens,
        template=sent.chat_template_kwargs or {},
        tools=tools_of(sent.tools or (), sent.tool_choice, several=sent.parallel_tool_calls is not False),
    )


def _reply(
    sent: TextBody,
    logprobs: int | None,
    prompts: Sequence[Mapping[str, Any]],
    **fields: Any,  # noqa: ANN401
) -> TextReply:
    return TextReply(
        orders_of(sent, logprobs, prompts, **fields),
        is_chat=isinstance(sent, ChatBody),
        is_streamed=bool(sent.stream),
        includes_usage=bool(sent.stream_options and sent.stream_options.include_usage),
        shows_logprobs=logprobs is not None,
        tells_more=sent.coserve is not None,
        choices=sent.n or 1,
    )


def orders_of(
    sent: TextBody,
    logprobs: int | None,
    prompts: Sequence[Mapping[str, Any]],
    **fields: Any,  # noqa: ANN401
) -> list[TextOrder]:
    """Orders of all choices of each prompt in turn; ``prompts``, ``fields``: of TextOrder. Raises OrderRefused."""
    sampling, choices = _sampling(sent, logprobs), sent.n or 1
    if sent.stream_options is not None and not sent.stream:
        raise invalid("stream_options", "is given without stream: true")
    if len(prompts) * choices > MOST_TEXTS:
        raise invalid("prompt", f"{len(prompts)} times {choices} texts are more than {MOST_TEXTS}: send fewer at once")
    stop = (sent.stop,) if isinstance(sent.stop, str) else tuple(sent.stop or ())
    constraint = constraint_of(sent.response_format, sent.structured_outputs)
    deadline_s = None if sent.coserve is None else sent.coserve.deadline_s
    given = {"stop": stop, "given": _given(sent), "constraint": constraint, "deadline_s": deadline_s, **fields}
    drawn = [sampling if not place else replace(sampling, seed=_seed(sampling.seed, place)) for place in range(choices)]
    return [TextOrder(sent.model, sampling=own, **given, **prompt) for prompt in prompts for own in drawn]


def _seed(seed: int | None, place: int) -> int | None:
    """Seed of a choice: the first one's is the caller's, of which the sign does not count."""
    return None if seed is None else (abs(seed) + place) % (MOST_WHOLE + 1)


def read_body(body: bytes, kind: type[Kind], only: Mapping[str, tuple[Any, ...]] = ONLY) -> Kind:
    """``only``: fields that are served with these values alone. Raises OrderRefused."""
    try:
        values = json.loads(body)
        if LONE_SURROGATE.search(body):
            values = _readable(values)
    except (ValueError, RecursionError) as error:
        raise invalid("body", f"is no JSON: {error}") from None
    if not isinstance(values, dict):
        raise invalid("body", "is no JSON object")
    try:
        return kind.model_validate(_served(values, kind, only))
    except ValidationError as error:
        found = error.errors(include_url=False)
        about = [each for each in found if each["loc"][:1] == found[0]["loc"][:1]]
        # of a union the branch that fits best, and of its faults the kind that is not served
        wrong = max(about, key=lambda each: (len(each["loc"]), each["type"] == "literal_error"))
        raise invalid(_path(wrong["loc"]), _words(wrong["type"], wrong["msg"])) from None


def _served(values: dict[str, Any], kind: type[Body], only: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Drop ignored fields. Raises OrderRefused for values that are not served."""
    for name, value in values.items():
        if name in only and value is not None and value not in only[name]:
            served = " or ".join(json.dumps(one) for one in only[name])
            raise invalid(name, f"is not served{served and ' but as '}{served}: leave it out")
    left_out = (PASSED_OVER | only.keys()) - kind.model_fields.keys()
    return {name: value for name, value in values.items() if name not in left_out}


def _path(where: tuple[int | str, ...]) -> str:
    """Path in OpenAI's notation: messages[0].content. Drops pydantic's names of union members."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in where if not _is_branch(part)]
    return "".join(parts).removeprefix(".")


def _is_branch(part: int | str) -> bool:
    return part in ("str", "bool", "NamedTool") or (
        isinstance(part, str) and part.startswith(("list[", "dict[", "literal["))
    )


def _readable(value: Any) -> Any:  # noqa: ANN401 - JSON
    """JSON without halves of surrogate pairs, which no text has: each reads as U+FFFD."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_readable(each) for each in value]
    return {_readable(name): _readable(each) for name, each in value.items()} if isinstance(value, dict) else value


def _words(kind: str, message: str) -> str:
    if kind == "extra_forbidden":
        return "is not a known field: leave it out"
    if kind == "missing":
        return "is missing"
    return f"{message[:1].lower()}{message[1:]}"


def _sampling(sent: TextBody, logprobs: int | None) -> Sampling:
    given = {name: getattr(sent, name) for name in _given(sent)}
    try:
        return Sampling(**given, logprobs=logprobs)
    except GenerationInvalid as error:
        is_top = isinstance(sent, ChatBody) and error.field == "logprobs"
        raise invalid("top_logprobs" if is_top else error.field, error.message) from None


def _given(sent: TextBody) -> frozenset[str]:
    names = (name for name in Sampling.__slots__ if name != "logprobs")
    return frozenset(name for name in names if getattr(sent, name) is not None)


def prompts_of(prompts: Prompts, name: str) -> list[str | tuple[int, ...]]:
    """Prompts as texts, or as tokens. Raises OrderRefused, with the field's name, for none."""
    if not prompts:
        raise invalid(name, "is empty: give a text, or several")
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts[0], int):
        return [tuple(prompts)]
    return [one if isinstance(one, str) else tuple(one) for one in prompts]


def message_of(message: _Message, place: int) -> dict[str, Any]:
    """Message for a chat template: role developer becomes system, and arguments of a tool call become an object. Raises
    OrderRefused for arguments that are not JSON."""
    content = message.content or ""
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    if message.content is None and message.role != "assistant":
        raise invalid(f"messages[{place}].content", f"is null: a message of the {message.role} has one")
    values: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": text}
    values |= {name: value for name in PASSED_ON if (value := getattr(message, name)) is not None}
    if message.tool_calls:
        values["tool_calls"] = [_tool_call(call, place) for call in message.tool_calls]
    return values


def _tool_call(call: _ToolCall, place: int) -> dict[str, Any]:
    arguments = arguments_of(call.function.arguments, f"messages[{place}].tool_calls")
    called = {"name": call.function.name, "arguments": arguments}
    return {"type": call.type, "function": called, **({} if call.id is None else {"id": call.id})}


def arguments_of(text: str, field: str) -> Any:  # noqa: ANN401 - JSON
    """Arguments of a tool call. Raises OrderRefused."""
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise invalid(field, f"has arguments that are no JSON: {error}") from None
