"""Texts and errors in OpenAI's format: whole, or as events of a stream."""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from agent.doors.desk import TextEnd
from agent.doors.http.routes import STATUS
from agent.doors.refusals import retry_ms
from agent.faults.errors import Reason
from experts.llm.serving.generation import Ending
from experts.llm.text.tool_calls import CallReader

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from agent.doors.desk import TextEvent, TextModelView, TextOrder
    from agent.faults.errors import OrderRefused
    from experts.llm.serving.generation import Piece, Token
    from experts.llm.text.tool_calls import CallPart

EVENTS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store"}
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


@dataclass(slots=True, kw_only=True)
class TextReply:
    """Reply of one text, which names the writing expert. ``is_chat``: a message of a chat, else a completion.
    ``shows_logprobs``: with each token's probability; ``tells_more``: with the end as the desk tells it."""

    order: TextOrder = field(kw_only=False)
    is_chat: bool
    is_streamed: bool
    includes_usage: bool
    shows_logprobs: bool
    tells_more: bool
    texts: list[str] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    _length: int = 0  # characters before the next piece
    _id: str = field(default_factory=lambda: uuid.uuid4().hex)
    _created: int = field(default_factory=lambda: int(time.time()))
    _model: str | None = None
    _thoughts: _Thoughts = field(default_factory=lambda: _Thoughts())
    _calls: CallReader | None = None

    def add(self, piece: Piece) -> None:
        """Add a piece to a reply that is sent whole."""
        self._begin(piece)
        self.texts.append(piece.text)
        self.tokens += piece.tokens

    def whole(self, end: TextEnd) -> Response:
        """The whole reply, after all pieces."""
        text = "".join(self.texts)
        content: dict[str, Any] = {"text": text}
        if self.is_chat:
            content = {"message": {"role": "assistant", ANSWER: "", "refusal": None, **self._message(text)}}
        choice = {"index": 0, **content, "logprobs": self._logprobs(self.tokens), "finish_reason": self._finish(end)}
        name = "chat.completion" if self.is_chat else "text_completion"
        values = {**self._head(name, end), "choices": [choice], "usage": _usage(end)}
        return answer(200, values | self._more(end))

    def _message(self, text: str) -> dict[str, Any]:
        message: dict[str, Any] = {}
        calls: list[dict[str, Any]] = []
        for name, part in self._parts(text, is_last=True):
            if name != CALLS:
                message[name] = message.get(name, "") + part
            elif "id" in part[0]:
                calls.append(part[0])
            else:
                calls[-1]["function"]["arguments"] += part[0]["function"]["arguments"]
        for call in calls:
            del call["index"]
        return message | ({ANSWER: message.get(ANSWER), CALLS: calls} if calls else {})

    def _parts(self, text: str, *, is_last: bool = False) -> list[tuple[str, Any]]:
        """Parts of a message that are certain by now, each with its name."""
        parts = self._thoughts.add(text, is_last=is_last)
        if self._calls is None:
            return list(parts)
        found: list[tuple[str, Any]] = [part for part in parts if part[0] != ANSWER]
        answer = "".join(text for name, text in parts if name == ANSWER)
        read = self._calls.add(answer, is_last=is_last)
        return found + [(ANSWER, part) if isinstance(part, str) else (CALLS, [_call(part)]) for part in read]

    def _begin(self, piece: Piece) -> None:
        self._model = piece.expert
        self._thoughts.begin(piece)
        if self._calls is None and piece.calls is not None and self.order.tools is not None:
            self._calls = CallReader(piece.calls, {tool.name for tool in self.order.tools.callable})

    def _finish(self, end: TextEnd) -> str | None:
        is_call = self._calls is not None and self._calls.calls > 0 and end.ending is Ending.STOP
        return CALLS if is_call else _finish(end)

    def first_events(self) -> Iterator[bytes]:
        """Events of a stream before its first piece, while the prompt is read."""
        if self.is_chat:
            yield self._event({"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None})

    def events(self, one: TextEvent) -> Iterator[bytes]:
        """Events of a stream: of a piece, or of the end."""
        yield from self._last_events(one) if isinstance(one, TextEnd) else self._events(one)

    def _events(self, piece: Piece) -> Iterator[bytes]:
        self._begin(piece)
        parts = self._parts(piece.text) if self.is_chat else [("text", piece.text)]
        tokens = piece.tokens
        for name, text in parts or ([(ANSWER, "")] if piece.tokens else []):
            yield self._part(name, text, tokens)
            tokens = ()
        self._length += len(piece.text)

    def _last_events(self, end: TextEnd) -> Iterator[bytes]:
        for name, text in self._parts("", is_last=True) if self.is_chat else ():
            yield self._part(name, text, ())
        nothing: dict[str, Any] = {"delta": {}} if self.is_chat else {"text": ""}
        yield self._event({**nothing, "logprobs": None, "finish_reason": self._finish(end)}, self._more(end))
        if self.includes_usage:
            yield event({**self._head(self._chunk, end), "choices": [], "usage": _usage(end)})
        yield DONE

    def _part(self, name: str, text: Any, tokens: Sequence[Token]) -> bytes:  # noqa: ANN401 - JSON
        more: dict[str, Any] = {"delta": {name: text}} if self.is_chat else {name: text}
        return self._event({**more, "logprobs": self._logprobs(tokens), "finish_reason": None})

    @property
    def _chunk(self) -> str:
        return "chat.completion.chunk" if self.is_chat else "text_completion"

    def _event(self, choice: dict[str, Any], more: Mapping[str, Any] = MappingProxyType({})) -> bytes:
        usage = {"usage": None} if self.includes_usage else {}
        return event({**self._head(self._chunk), "choices": [{"index": 0, **choice}], **usage, **more})

    def _more(self, end: TextEnd) -> dict[str, Any]:
        details = {name: value for name, value in asdict(replace(end, failure=None)).items() if name != "failure"}
        return {"coserve": details} if self.tells_more else {}

    def _head(self, name: str, end: TextEnd | None = None) -> dict[str, Any]:
        model = self._model or (end and end.expert) or self.order.model
        begins = "chatcmpl" if self.is_chat else "cmpl"
        return {"id": f"{begins}-{self._id}", "object": name, "created": self._created, "model": model}

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if not self.shows_logprobs:
            return None
        if self.is_chat:
            return {"content": [_chat_token(token) for token in tokens], "refusal": None}
        offsets, offset = [], self._length
        for token in tokens:
            offsets.append(offset)
            offset += len(token.content.decode("utf-8", "ignore"))  # part of a character begins where that does
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [_logprob(token) for token in tokens],
            "top_logprobs": [{one.text: _logprob(one) for one in (*token.alternatives, token)} for token in tokens],
            "text_offset": offsets,
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


def _logprob(token: Token) -> float:
    return max(token.logprob, LEAST_LOGPROB)


def _finish(end: TextEnd) -> str | None:
    return None if end.ending is None else FINISHES[end.ending]


def _usage(end: TextEnd) -> dict[str, int]:
    read, written = end.read_tokens, end.written_tokens
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def model_values(model: TextModelView, created: int) -> dict[str, Any]:
    """Entry of a model. ``context_length`` and ``ready`` are our extensions."""
    ours = {"context_length": model.context_tokens, "ready": model.is_ready}
    return {"id": model.name, "object": "model", "created": created, "owned_by": OWNER, **ours}


def refused_answer(refused: OrderRefused) -> Response:
    kind = KINDS[refused.reason]
    hint = {"x-should-retry": "true" if kind.is_worth else "false"}
    if refused.retry_s is not None:
        hint["retry-after-ms"] = str(retry_ms(refused))
    return answer(STATUS[refused.reason], error_values(refused), hint)


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
