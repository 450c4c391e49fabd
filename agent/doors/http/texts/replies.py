"""Texts and errors in OpenAI's format: whole, or as events of a stream."""

from __future__ import annotations

import json
import re
import time
import uuid
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from agent.doors.desk import TextEnd
from agent.doors.http.routes import STATUS
from agent.doors.refusals import retry_ms
from agent.faults.errors import OrderRefused, Reason
from experts.llm.serving.generation import Ending
from experts.llm.text.tool_calls import CallReader

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from agent.doors.desk import TextEvent, TextModelView, TextOrder
    from experts.llm.serving.generation import Piece, Token
    from experts.llm.text.tool_calls import CallPart

EVENTS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store"}
WORDS = "text"
ANSWER, THOUGHT, CALLS = "content", "reasoning_content", "tool_calls"  # the second as in vLLM, SGLang and llama.cpp
THINK, THOUGHT_OVER = "<think>", "</think>"
STILL_READING = b": the prompt is being read\n\n"  # a comment, which keeps proxies from closing a silent stream
DONE = b"data: [DONE]\n\n"
OWNER = "coserve"
LEAST_LOGPROB = -9999.0  # of an impossible token, as with OpenAI: JSON has no infinity
# OpenAI has no deadline: a text ended by one counts as cut by length.
FINISHES = {Ending.STOP: "stop", Ending.LENGTH: "length", Ending.DEADLINE: "length"}


@dataclass(frozen=True, slots=True)
class _Kind:
    """Error of OpenAI's clients. ``is_worth``: retrying."""

    type: str
    code: str | None = None
    is_worth: bool = False


KINDS = {
    Reason.QUEUE_FULL: _Kind("rate_limit_error", "queue_full", is_worth=True),
    Reason.TOO_LARGE: _Kind("invalid_request_error", "too_large"),
    Reason.MESSAGE_TOO_LARGE: _Kind("invalid_request_error", "too_large"),
    Reason.NOT_FOUND: _Kind("invalid_request_error", "model_not_found"),
    Reason.INVALID: _Kind("invalid_request_error"),
    Reason.TOO_LONG: _Kind("invalid_request_error", "context_length_exceeded"),
    Reason.NOT_NOW: _Kind("server_error", "not_now"),
    Reason.STOPPING: _Kind("server_error", "stopping", is_worth=True),
    Reason.UNAUTHENTICATED: _Kind("invalid_request_error", "invalid_api_key"),
    Reason.FORBIDDEN: _Kind("invalid_request_error", "forbidden"),
}


@dataclass(slots=True)
class WrittenText:
    """One text of a reply, in parts with their names: of a chat the reasoning, the answer and calls, else its words."""

    order: TextOrder
    is_chat: bool
    said: list[tuple[str, Any]] = field(default_factory=list)  # of a reply that is sent whole, as ``tokens``
    tokens: list[Token] = field(default_factory=list)
    expert: str | None = None
    end: TextEnd | None = None
    _thoughts: _Thoughts = field(default_factory=lambda: _Thoughts())
    _calls: CallReader | None = None

    def parts(self, one: TextEvent) -> list[tuple[str, Any]]:
        """Parts that are certain by now."""
        if isinstance(one, TextEnd):
            self.end = one
            return self._parts("", is_last=True) if self.is_chat else []
        self.expert = one.expert
        self._thoughts.begin(one)
        if self._calls is None and one.calls is not None and self.order.tools is not None:
            self._calls = CallReader(one.calls, {tool.name for tool in self.order.tools.callable})
        return self._parts(one.text) if self.is_chat else [(WORDS, one.text)]

    def add(self, one: TextEvent) -> None:
        self.said += self.parts(one)
        self.tokens += () if isinstance(one, TextEnd) else one.tokens

    def content(self) -> dict[str, Any]:
        """What was added, as a choice has it."""
        joined: dict[str, Any] = {ANSWER: ""} if self.is_chat else {WORDS: ""}
        calls: list[dict[str, Any]] = []
        for name, part in self.said:
            if name != CALLS:
                joined[name] = joined.get(name, "") + part
            elif "id" in part[0]:
                calls.append({key: value for key, value in part[0].items() if key != "index"})
            else:
                calls[-1]["function"]["arguments"] += part[0]["function"]["arguments"]
        if calls:
            joined |= {ANSWER: joined[ANSWER] or None, CALLS: calls}
        return {"message": {"role": "assistant", "refusal": None, **joined}} if self.is_chat else joined

    def finish(self) -> str | None:
        assert self.end is not None, "it has ended"
        is_call = self._calls is not None and self._calls.calls > 0 and self.end.ending is Ending.STOP
        return CALLS if is_call else None if self.end.ending is None else FINISHES[self.end.ending]

    def _parts(self, text: str, *, is_last: bool = False) -> list[tuple[str, Any]]:
        parts = self._thoughts.add(text, is_last=is_last)
        if self._calls is None:
            return list(parts)
        found: list[tuple[str, Any]] = [part for part in parts if part[0] != ANSWER]
        answer = "".join(text for name, text in parts if name == ANSWER)
        read = self._calls.add(answer, is_last=is_last)
        return found + [(ANSWER, part) if isinstance(part, str) else (CALLS, [_call(part)]) for part in read]


@dataclass(slots=True, kw_only=True)
class TextReply:
    """Completions or messages of chats, each a choice; a place is a text's among ``orders``. ``choices``: texts in a
    row that have one prompt. ``shows_logprobs``: with each token's probability; ``tells_more``: with the end as the
    desk tells it."""

    orders: Sequence[TextOrder] = field(kw_only=False)
    is_chat: bool
    is_streamed: bool
    includes_usage: bool
    shows_logprobs: bool
    tells_more: bool
    choices: int = 1
    _texts: list[WrittenText] = field(init=False)
    _id: str = field(default_factory=lambda: uuid.uuid4().hex)
    _created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self._texts = [WrittenText(order, self.is_chat) for order in self.orders]

    def add(self, place: int, one: TextEvent) -> None:
        self._texts[place].add(one)

    def whole(self) -> Response:
        choices = [
            {"index": place, **text.content(), "logprobs": self._logprobs(text.tokens), "finish_reason": text.finish()}
            for place, text in enumerate(self._texts)
        ]
        name = "chat.completion" if self.is_chat else "text_completion"
        values = {**self._head(name, self._texts[0]), "choices": choices, "usage": self._usage()}
        return answer(200, values | self._more(self._texts))

    def first_events(self) -> Iterator[bytes]:
        for place in range(len(self._texts)) if self.is_chat else ():
            delta = {"delta": {"role": "assistant", "content": ""}}
            yield self._event(place, {**delta, "logprobs": None, "finish_reason": None})

    def events(self, place: int, one: TextEvent) -> Iterator[bytes]:
        text, tokens = self._texts[place], () if isinstance(one, TextEnd) else one.tokens
        for name, part in text.parts(one) or ([(ANSWER, "")] if tokens else []):
            more = {"delta": {name: part}} if self.is_chat else {name: part}
            yield self._event(place, {**more, "logprobs": self._logprobs(tokens), "finish_reason": None})
            tokens = ()
        if text.end is None:
            return
        nothing: dict[str, Any] = {"delta": {}} if self.is_chat else {"text": ""}
        last = {**nothing, "logprobs": None, "finish_reason": text.finish()}
        yield self._event(place, last, self._more([text]))
        if all(text.end is not None for text in self._texts):
            if self.includes_usage:
                yield event({**self._head(self._chunk, text), "choices": [], "usage": self._usage()})
            yield DONE

    def failed(self, refused: OrderRefused) -> bytes:
        return event(error_values(refused))

    @property
    def _chunk(self) -> str:
        return "chat.completion.chunk" if self.is_chat else "text_completion"

    def _event(self, place: int, choice: dict[str, Any], more: Mapping[str, Any] = MappingProxyType({})) -> bytes:
        usage = {"usage": None} if self.includes_usage else {}
        head = self._head(self._chunk, self._texts[place])
        return event({**head, "choices": [{"index": place, **choice}], **usage, **more})

    def _more(self, texts: Sequence[WrittenText]) -> dict[str, Any]:
        ends = [asdict(replace(text.end, failure=None)) for text in texts if text.end is not None]
        told = [{name: value for name, value in end.items() if name != "failure"} for end in ends]
        return {"coserve": told if len(told) > 1 else told[0]} if self.tells_more else {}

    def _head(self, name: str, text: WrittenText) -> dict[str, Any]:
        model = text.expert or (text.end and text.end.expert) or text.order.model
        begins = "chatcmpl" if self.is_chat else "cmpl"
        return {"id": f"{begins}-{self._id}", "object": name, "created": self._created, "model": model}

    def _usage(self) -> dict[str, int]:
        """A prompt counts once, however many texts continue it."""
        ends = [text.end for text in self._texts if text.end is not None]
        read, written = sum(end.read_tokens for end in ends[:: self.choices]), sum(end.written_tokens for end in ends)
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if not self.shows_logprobs:
            return None
        if self.is_chat:
            return {"content": [_chat_token(token) for token in tokens], "refusal": None}
        shown = [(*token.alternatives, token) if token.logprob is not None else None for token in tokens]
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [_logprob(token) for token in tokens],
            "top_logprobs": [of and {one.text: _logprob(one) for one in of} for of in shown],
            "text_offset": [token.offset for token in tokens],
        }


class _Thoughts:
    """Splits reasoning from the answer. Reasoning comes first, between THINK and THOUGHT_OVER. Both marks, and empty
    lines after them, are dropped."""

    def __init__(self) -> None:
        self._name: str | None = None  # of the current part; None: not known yet
        self._held = ""
        self._is_fresh = False  # no output yet after a mark

    def begin(self, piece: Piece) -> None:
        """Call before the first piece: the prompt may already open the reasoning."""
        if self._name is None and piece.is_thought:
            self._name, self._is_fresh = THOUGHT, True

    def add(self, text: str, *, is_last: bool = False) -> list[tuple[str, str]]:
        """Parts that can be sent by now, each with its name."""
        self._held += text
        if self._name is None:
            start = self._held.lstrip()
            if THINK.startswith(start) and not is_last:
                return []
            self._name, self._is_fresh = ANSWER, False
            if start.startswith(THINK):
                self._name, self._held, self._is_fresh = THOUGHT, start[len(THINK) :], True
        if self._name == ANSWER:
            return self._taken(len(self._held))
        thought, found, rest = self._held.partition(THOUGHT_OVER)
        if not found:
            may_end = (n for n in range(len(THOUGHT_OVER) - 1, 0, -1) if thought.endswith(THOUGHT_OVER[:n]))
            return self._taken(len(thought) - (0 if is_last else next(may_end, 0)))
        parts = self._taken(len(thought))
        self._name, self._held, self._is_fresh = ANSWER, rest, True
        return parts + self._taken(len(rest))

    def _taken(self, length: int) -> list[tuple[str, str]]:
        text, self._held = self._held[:length], self._held[length:]
        text = text.lstrip("\n") if self._is_fresh else text
        self._is_fresh = self._is_fresh and not text
        return [(self._name or ANSWER, text)] if text else []


def _call(part: CallPart) -> dict[str, Any]:
    """Delta of a call. Its id is of nine letters and digits, as Mistral's chat templates demand."""
    if part.name is None:
        return {"index": part.number, "function": {"arguments": part.arguments}}
    function = {"name": part.name, "arguments": part.arguments}
    return {"index": part.number, "id": uuid.uuid4().hex[:9], "type": "function", "function": function}


def _chat_token(token: Token) -> dict[str, Any]:
    return {**_one(token), "top_logprobs": [_one(other) for other in token.alternatives]}


def _one(token: Token) -> dict[str, Any]:
    return {"token": token.text, "logprob": _logprob(token), "bytes": list(token.content)}


def _logprob(token: Token) -> float | None:
    return None if token.logprob is None else max(token.logprob, LEAST_LOGPROB)


def model_values(model: TextModelView, created: int) -> dict[str, Any]:
    """Entry of a model. ``parent`` is vLLM's; ``context_length``, ``ready`` and ``embedding`` are our extensions."""
    ours = {"context_length": model.context_tokens, "ready": model.is_ready, "embedding": model.pooling}
    ours |= {"parent": model.parent}
    return {"id": model.name, "object": "model", "created": created, "owned_by": OWNER, **ours}


def refused_answer(refused: OrderRefused) -> Response:
    kind = KINDS[refused.reason]
    hint = {"x-should-retry": "true" if kind.is_worth else "false"}
    if refused.retry_s is not None:
        hint["retry-after-ms"] = str(retry_ms(refused))
    return answer(STATUS[refused.reason], error_values(refused), hint)


def renamed(refused: OrderRefused, names: Mapping[str, str]) -> OrderRefused:
    """A refusal with its field as the caller knows it; ``names``: beginnings of messages, as patterns, and new ones."""
    message = str(refused)
    if refused.field is None or not message.startswith(f"{refused.field}:"):
        return refused
    for pattern, name in names.items():
        message = re.sub(f"^{pattern}", name, message)
    return OrderRefused(refused.reason, message, refused.retry_s, field=message.partition(":")[0])


def error_values(refused: OrderRefused) -> dict[str, Any]:
    kind = KINDS[refused.reason]
    return {"error": {"message": str(refused), "type": kind.type, "param": refused.field, "code": kind.code}}


def plain_error(status: int, message: str, code: str | None = None) -> Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return answer(status, {"error": {"message": message, "type": kind, "param": None, "code": code}})


def answer(status: int, values: dict[str, Any], headers: Mapping[str, str] | None = None) -> Response:
    return Response(_json(values), status, headers, "application/json")


def event(values: dict[str, Any]) -> bytes:
    return b"data: " + _json(values) + b"\n\n"


def _json(values: dict[str, Any]) -> bytes:
    return json.dumps(values, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")
