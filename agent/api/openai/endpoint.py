"""`/v1/models`, `/v1/completions`, `/v1/chat/completions`: requests of OpenAI's clients, answered by the desk.

Guarantees: a request is refused before its answer begins, with status and field, or it is taken. A stream that fails
later ends with an error event. A caller that disconnects, or does not read, has its text cancelled. If the line has a
token, callers at HOST:PORT send it as their API key.
"""

from __future__ import annotations

import hmac
import time
from contextlib import aclosing
from typing import TYPE_CHECKING
from urllib.parse import unquote

from agent.api.calls.desk import TextEnd
from agent.api.calls.orders import check_names
from agent.api.openai.replies import (
    EVENTS,
    TextReply,
    answer,
    error_values,
    event,
    model_values,
    plain_error,
    refused_answer,
)  # fmt: skip
from agent.api.openai.requests import chat_of, completion_of
from agent.config import read_secret
from agent.http.exchange import Terms
from experts.errors import OrderRefused, Refusing

if TYPE_CHECKING:
    from agent.api.calls.orders import Orders
    from agent.http.exchange import HttpAnswer, HttpRequest, Stream
    from agent.line_file.api import ApiSection

BEARER = "Bearer "
ROOT = "/v1/"
MODELS, COMPLETIONS, CHATS = f"{ROOT}models", f"{ROOT}completions", f"{ROOT}chat/completions"
READERS = {COMPLETIONS: completion_of, CHATS: chat_of}
TERMS = Terms(
    body_bytes=2 * 2**20,  # a context of 200,000 tokens as numbers
    longest_s=3600.0,
    stall_s=30.0,
    connections=128,  # of each address: 256 MiB with the largest bodies
    withdraws=True,
)


class OpenAiEndpoint:
    """Implements ``agent.http.exchange.Application``."""

    def __init__(self, config: ApiSection, texts: Orders, terms: Terms = TERMS) -> None:
        """Raises SecretMissing."""
        self.terms = terms
        self._texts = texts
        self._token = _token(config)
        self._created = int(time.time())

    def serves(self, path: str) -> bool:
        return path.startswith(ROOT)

    def reload(self, config: ApiSection) -> None:
        """Read the token again, for later requests. Raises SecretMissing; then the old token stays."""
        if self._token is not None:
            self._token = _token(config) or self._token

    def stop(self) -> None:
        self._texts.stop()

    def refusal(self, status: int, reason: str) -> HttpAnswer:
        return plain_error(status, reason)

    async def answer(self, request: HttpRequest, stream: Stream) -> HttpAnswer | None:
        """Implements ``Application``: checks token, method and model, then answers from the desk."""
        try:
            self._check_token(request)
            if request.path == MODELS or request.path.startswith(f"{MODELS}/"):
                return await self._models(request)
            if request.path not in READERS:
                known = ", ".join((MODELS, *READERS))
                return plain_error(404, f"nothing is served at {request.path} - there are {known}", "unknown_url")
            if wrong := _wrong_form(request, "POST"):
                return wrong
            return await self._written(request, stream)
        except OrderRefused as refused:
            return refused_answer(refused)

    def _check_token(self, request: HttpRequest) -> None:
        if self._token is None or request.is_local_user:
            return
        shown = request.headers.get("authorization", "")
        token = shown[len(BEARER) :] if shown[: len(BEARER)].lower() == BEARER.lower() else ""
        if not hmac.compare_digest(token.encode(), self._token):
            raise OrderRefused(
                Refusing.UNAUTHENTICATED, "this address wants the line's token - give it as the client's api_key"
            )

    async def _models(self, request: HttpRequest) -> HttpAnswer:
        if wrong := _wrong_form(request, "GET"):
            return wrong
        models = await self._texts.ask(self._texts.desk.text_models)
        if request.path == MODELS:
            return answer(200, {"object": "list", "data": [model_values(model, self._created) for model in models]})
        name = unquote(request.path.removeprefix(f"{MODELS}/"))
        found = next((model for model in models if model.name == name), None)
        if found is None:
            raise OrderRefused(Refusing.NOT_FOUND, f"no model {name!r} writes texts here", field="model")
        return answer(200, model_values(found, self._created))

    async def _written(self, request: HttpRequest, stream: Stream) -> HttpAnswer | None:
        call = await self._texts.ask(READERS[request.path], request.body)
        check_names(model=call.order.model)
        reply = TextReply(call, is_chat=request.path == CHATS)
        async with self._texts.written(call.order) as written, aclosing(written) as text:
            if call.is_streamed:
                await stream.begin(200, EVENTS)
                try:
                    async for one in text:
                        await stream.send(b"".join(reply.events(one)))
                except OrderRefused as refused:
                    await stream.send(event(error_values(refused)))
                return None
            async for one in text:
                if isinstance(one, TextEnd):
                    return reply.whole(one)
                reply.add(one)
        raise AssertionError("a text ends")


def _wrong_form(request: HttpRequest, method: str) -> HttpAnswer | None:
    """Refusal of another method or content type. Any web page can make a browser send JSON as another type."""
    if request.method != method:
        return plain_error(405, f"{request.path} takes {method}", "method_not_allowed", ("allow", method))
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if method == "POST" and kind != "application/json":
        return plain_error(400, "the body is wanted as JSON - send content-type: application/json", "content_type")
    return None


def _token(config: ApiSection) -> bytes | None:
    return None if config.token is None else read_secret(config.token).encode()
