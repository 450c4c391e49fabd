"""Operations of `/v1`, for the OpenAPI document. Their answers have OpenAI's formats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agent.web.operations import Asked, Operation, Short
from agent.web.texts.requests import ChatBody, CompletionBody

EVENTS = ("text/event-stream",)
Plain = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TextRefusal:
    """``error``: message, type, param and code."""

    error: Mapping[str, Any]


class OfModel(Asked):
    name: Short


OPERATIONS = (
    Operation("GET", "/v1/models", "Models that write texts", Plain, error=TextRefusal),
    Operation("GET", "/v1/models/{name}", "A model", Plain, OfModel, failures=(404,), error=TextRefusal),
    Operation(
        "POST", "/v1/completions", "Continue a prompt", Plain, body=CompletionBody, failures=(404,), error=TextRefusal,
        media=EVENTS,
    ),
    Operation(
        "POST", "/v1/chat/completions", "Write the next message of a chat", Plain, body=ChatBody, failures=(404,),
        error=TextRefusal, media=EVENTS,
    ),
)  # fmt: skip
