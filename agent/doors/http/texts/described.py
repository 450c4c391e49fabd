"""Operations of `/v1`, for the OpenAPI document: whole answers in OpenAI's formats, as of ``replies``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from agent.doors.http.operations import Asked, Operation, Short
from agent.doors.http.texts.embeddings import EmbeddingBody
from agent.doors.http.texts.requests import ChatBody, CompletionBody
from agent.doors.http.texts.responses import ResponseBody

EVENTS = ("text/event-stream",)


@dataclass(frozen=True, slots=True)
class TextFault:
    message: str
    type: str
    param: str | None
    code: str | None


@dataclass(frozen=True, slots=True)
class TextRefusal:
    error: TextFault


@dataclass(frozen=True, slots=True)
class WritingModel:
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    parent: str | None
    context_length: int | None
    ready: bool
    embedding: str | None


@dataclass(frozen=True, slots=True)
class WritingModels:
    object: Literal["list"]
    data: list[WritingModel]


@dataclass(frozen=True, slots=True)
class CalledFunction:
    """``arguments``: JSON."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    type: Literal["function"]
    function: CalledFunction


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """``content``: null beside ``tool_calls`` if the model said nothing else."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str = ""
    tool_calls: list[ToolCall] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """``text``: a completion's; ``message``: a chat's."""

    index: int
    text: str = ""
    message: ChatMessage | None = None
    logprobs: Mapping[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class TokenUsage:
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


@dataclass(frozen=True, slots=True)
class TextAnswer:
    """``coserve``: the end of the text as the desk tells it, for a request with `coserve`; a list for several."""

    id: str
    object: Literal["text_completion", "chat.completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: TokenUsage
    coserve: Mapping[str, Any] | list[Mapping[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class PromptVector:
    """``embedding``: base64 of little-endian fp32 where that was asked for."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


@dataclass(frozen=True, slots=True)
class PromptVectors:
    object: Literal["list"]
    data: list[PromptVector]
    model: str
    usage: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ResponseAnswer:
    """``output``: reasoning, messages and calls of functions. Fields of the request come back as well."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    model: str
    output: list[Mapping[str, Any]]
    usage: Mapping[str, Any]


class OfModel(Asked):
    name: Short


OPERATIONS = (
    Operation("GET", "/v1/models", "Models that write texts", WritingModels, error=TextRefusal),
    Operation("GET", "/v1/models/{name}", "A model", WritingModel, OfModel, failures=(404,), error=TextRefusal),
    Operation(
        "POST", "/v1/completions", "Continue a prompt", TextAnswer, body=CompletionBody, failures=(404,),
        error=TextRefusal, media=EVENTS,
    ),
    Operation(
        "POST", "/v1/chat/completions", "Write the next message of a chat", TextAnswer, body=ChatBody,
        failures=(404,), error=TextRefusal, media=EVENTS,
    ),
    Operation(
        "POST", "/v1/responses", "Answer items of a conversation", ResponseAnswer, body=ResponseBody,
        failures=(404,), error=TextRefusal, media=EVENTS,
    ),
    Operation(
        "POST", "/v1/embeddings", "A vector of each text", PromptVectors, body=EmbeddingBody, failures=(404,),
        error=TextRefusal,
    ),
)  # fmt: skip
