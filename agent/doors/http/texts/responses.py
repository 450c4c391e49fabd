"""`/v1/responses`: OpenAI's later form of a chat, mapped to a chat and back. Nothing is stored.

Guarantees: items that a client sends back as they came are read as what they were: reasoning, messages, calls and their
outputs. Items of an answer open and close one after the other, so a stream's events add up to the whole response.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from agent.doors.desk import TextEnd
from agent.doors.http.texts.replies import ANSWER, CALLS, THOUGHT, WrittenText, answer, error_values, event
from agent.doors.http.texts.requests import ONLY, TextBody, arguments_of, orders_of, read_body
from agent.doors.http.texts.structured import (
    Body,
    Function,
    FunctionName,
    JsonSchema,
    NamedTool,
    ResponseFormat,
    SentTool,
    tools_of,
)
from agent.doors.refusals import invalid
from experts.llm.serving.generation import Ending

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from starlette.responses import Response

    from agent.doors.desk import TextEvent, TextOrder
    from agent.faults.errors import OrderRefused

NAMES = {  # of fields of a chat
    r"response_format\.json_schema": "text.format", "messages": "input", r"max_tokens(?=: is \d)": "max_output_tokens",
    r"tools\[(\d+)\]\.function": r"tools[\1]", r"tool_choice\.function": "tool_choice",
}  # fmt: skip
SERVED_ONLY: Mapping[str, tuple[Any, ...]] = {
    **ONLY, "background": (False,), "include": ([],), "max_tokens": (), "n": (1,), "response_format": (),
    "reasoning": ({},), "truncation": ("disabled",), "conversation": (), "max_tool_calls": (), "prompt": (),
    "moderation": (), "context_management": ([],), "top_logprobs": (0,),
}  # fmt: skip
NEEDED = {
    "message": ("role", "content"), "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"), "reasoning": (),
}  # fmt: skip
REPEATED = {"instructions", "max_output_tokens", "temperature", "top_p", "tools", "tool_choice", "text"}
STORED = "nothing is stored here"


# Items by the names of their parts: beginning of an id, type, type of the content.
KINDS = {
    ANSWER: ("msg", "message", "output_text"), THOUGHT: ("rs", "reasoning", "reasoning_text"),
    CALLS: ("fc", "function_call", None),
}  # fmt: skip


class _Part(Body):
    type: Literal["input_text", "output_text", "reasoning_text", "summary_text", "text"]
    text: str
    annotations: list[Any] | None = None  # of an earlier answer, as ``logprobs``
    logprobs: list[Any] | None = None


class _Item(Body):
    """One of NEEDED; ``id``, ``status`` and the like of an earlier answer change nothing."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[_Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[_Part] | None = None
    summary: list[_Part] | None = None
    encrypted_content: None = None
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class _Tool(Function):
    type: Literal["function"]


class _ToolName(FunctionName):
    type: Literal["function"]


class _Format(JsonSchema):
    type: Literal["text", "json_object", "json_schema"]
    name: str = Field("", min_length=1)


class _TextConfig(Body):
    format: _Format | None = None
    verbosity: None = None


class ResponseBody(TextBody):
    input: str | list[_Item] = Field(min_length=1)
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    text: _TextConfig | None = None
    tools: list[_Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | _ToolName | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def response_of(body: bytes) -> ResponseReply:
    """Raises OrderRefused."""
    sent = read_body(body, ResponseBody, SERVED_ONLY)
    if sent.store:
        raise invalid("store", f"is true: {STORED}, so say false")
    if sent.previous_response_id is not None:
        raise invalid("previous_response_id", f"is given: {STORED}, so send the items before as input")
    tools = [
        SentTool(type="function", function=Function(**tool.model_dump(exclude={"type"}))) for tool in sent.tools or ()
    ]
    choice = sent.tool_choice
    wanted = NamedTool(type="function", function=choice) if isinstance(choice, _ToolName) else choice
    form = sent.text.format if sent.text is not None else None
    schema = form if form is not None and form.type == "json_schema" else None
    chat = {"response_format": form and ResponseFormat(type=form.type, json_schema=schema), "n": None}
    (order,) = orders_of(
        sent.model_copy(update=chat),
        None,
        [{"messages": _messages(sent)}],
        most_tokens=sent.max_output_tokens,
        template=sent.chat_template_kwargs or {},
        tools=tools_of(tools, wanted, several=sent.parallel_tool_calls is not False),
    )
    return ResponseReply(WrittenText(order, is_chat=True), bool(sent.stream), _repeated(sent))


def _messages(sent: ResponseBody) -> tuple[dict[str, Any], ...]:
    """Messages for a chat template: what an assistant thought, said and called in a row is one of them."""
    messages: list[dict[str, Any]] = []
    if sent.instructions:
        messages.append({"role": "system", "content": sent.instructions})
    items = [_Item(role="user", content=sent.input)] if isinstance(sent.input, str) else sent.input
    for place, item in enumerate(items):
        if missing := next((name for name in NEEDED[item.type] if getattr(item, name) is None), None):
            raise invalid(f"input[{place}].{missing}", "is missing")
        if item.type == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _words(item.output)})
        elif item.role not in (None, "assistant"):
            role = "system" if item.role == "developer" else item.role
            messages.append({"role": role, "content": _words(item.content)})
        else:
            is_next = not messages or messages[-1]["role"] != "assistant"
            if is_next or (item.type == "message" and (messages[-1]["content"] or "tool_calls" in messages[-1])):
                messages.append({"role": "assistant", "content": ""})
            _add_said(messages[-1], item, place)
    return tuple(messages)


def _add_said(message: dict[str, Any], item: _Item, place: int) -> None:
    if item.type == "function_call":
        called = {"name": item.name, "arguments": arguments_of(item.arguments or "", f"input[{place}].arguments")}
        message.setdefault("tool_calls", []).append({"type": "function", "function": called, "id": item.call_id})
    elif item.type == "reasoning":
        message["reasoning_content"] = message.get("reasoning_content", "") + _words(item.content)
    else:
        message["content"] = _words(item.content)


def _words(content: str | Sequence[_Part] | None) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content or ())


def _repeated(sent: ResponseBody) -> dict[str, Any]:
    """Fields of the request that its response has as well."""
    usual = {"tools": [], "tool_choice": "auto", "text": {"format": {"type": "text"}}, "store": False}
    several = {"parallel_tool_calls": sent.parallel_tool_calls is not False}
    return usual | several | sent.model_dump(include=REPEATED, exclude_none=True, by_alias=True)


@dataclass(slots=True)
class ResponseReply:
    """One response. ``repeated``: fields of its request."""

    text: WrittenText
    is_streamed: bool
    repeated: Mapping[str, Any]
    _output: list[dict[str, Any]] = field(default_factory=list)
    _open: str | None = None  # name of the parts that the last item is of
    _events: int = 0
    _id: str = field(default_factory=lambda: f"resp_{uuid.uuid4().hex}")
    _created: int = field(default_factory=lambda: int(time.time()))

    @property
    def orders(self) -> Sequence[TextOrder]:
        return (self.text.order,)

    def add(self, place: int, one: TextEvent) -> None:
        for _ in self._told(one):
            pass

    def whole(self) -> Response:
        return answer(200, self._response())

    def first_events(self) -> Iterator[bytes]:
        for name in ("created", "in_progress"):
            yield self._event(name, {"response": self._response()})

    def events(self, place: int, one: TextEvent) -> Iterator[bytes]:
        for name, values in self._told(one):
            yield self._event(name, values)

    def failed(self, refused: OrderRefused) -> bytes:
        error = {"code": "server_error", "message": error_values(refused)["error"]["message"]}
        return self._event("failed", {"response": self._response() | {"status": "failed", "error": error}})

    def _told(self, one: TextEvent) -> Iterator[tuple[str, dict[str, Any]]]:
        """Events by their names; each is to be encoded before the next is asked for."""
        for name, part in self.text.parts(one):
            call = part[0] if name == CALLS else None
            if self._open != name or (call is not None and "id" in call):
                yield from self._closed("completed")
                yield from self._opened(name, call)
            yield from self._written(call["function"]["arguments"] if call is not None else part)
        if isinstance(one, TextEnd):
            status = self._status()
            yield from self._closed(status)
            yield status, {"response": self._response()}

    def _opened(self, name: str, call: Mapping[str, Any] | None) -> Iterator[tuple[str, dict[str, Any]]]:
        self._open, (begins, kind, part) = name, KINDS[name]
        item: dict[str, Any] = {"id": f"{begins}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress"}
        if call is not None:
            item |= {"call_id": call["id"], "name": call["function"]["name"], "arguments": ""}
        elif name == ANSWER:
            item |= {"role": "assistant", "content": []}
        else:
            item |= {"summary": [], "content": []}
        self._output.append(item)
        yield "output_item.added", {"output_index": len(self._output) - 1, "item": item}
        if call is None:
            more = self._of_answers("annotations", "logprobs")
            item["content"].append({"type": part, "text": "", **more})
            yield "content_part.added", {**self._place(), "part": item["content"][0]}

    def _written(self, words: str) -> Iterator[tuple[str, dict[str, Any]]]:
        item = self._output[-1]
        if self._open == CALLS:
            item["arguments"] += words
            yield "function_call_arguments.delta", {**self._place(), "delta": words}
        else:
            part = item["content"][0]
            part["text"] += words
            yield f"{part['type']}.delta", {**self._place(), "delta": words, **self._of_answers("logprobs")}

    def _closed(self, status: str) -> Iterator[tuple[str, dict[str, Any]]]:
        if self._open is None:
            return
        item = self._output[-1]
        if self._open == CALLS:
            told = {"name": item["name"], "arguments": item["arguments"]}
            yield "function_call_arguments.done", {**self._place(), **told}
        else:
            part = item["content"][0]
            yield f"{part['type']}.done", {**self._place(), "text": part["text"], **self._of_answers("logprobs")}
            yield "content_part.done", {**self._place(), "part": part}
        self._open, item["status"] = None, status
        yield "output_item.done", {"output_index": len(self._output) - 1, "item": item}

    def _of_answers(self, *names: str) -> dict[str, list[Any]]:
        return {name: [] for name in names} if self._open == ANSWER else {}

    def _place(self) -> dict[str, Any]:
        within = {} if self._open == CALLS else {"content_index": 0}
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1, **within}

    def _status(self) -> str:
        end = self.text.end
        return "in_progress" if end is None else "completed" if end.ending is Ending.STOP else "incomplete"

    def _response(self) -> dict[str, Any]:
        end, status = self.text.end, self._status()
        return {
            "id": self._id, "object": "response", "created_at": self._created, "status": status, "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.text.expert or (end and end.expert) or self.text.order.model, "output": self._output,
            "usage": None if end is None else _usage(end), **self.repeated,
        }  # fmt: skip

    def _event(self, name: str, values: Mapping[str, Any]) -> bytes:
        name, number = f"response.{name}", self._events
        self._events += 1
        return f"event: {name}\n".encode() + event({"type": name, "sequence_number": number, **values})


def _usage(end: TextEnd) -> dict[str, Any]:
    """What of the prompt was read before, and what was reasoning, is not counted."""
    read, written = end.read_tokens, end.written_tokens
    return {
        "input_tokens": read, "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": written, "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": read + written,
    }  # fmt: skip
