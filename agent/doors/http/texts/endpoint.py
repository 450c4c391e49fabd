"""`/v1`: completions, chats, responses and embeddings, asked by OpenAI's clients and answered by the desk.

Guarantees: a request is refused before its answer begins, with status and field, or it is taken. A stream that fails
later ends with an error event. A caller that disconnects, or does not read, has its text cancelled.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from agent.doors.http.door import DoorSection
from agent.doors.http.routes import JSON, JSON_WANTED, Pieces, RouteRule, media_type, route
from agent.doors.http.texts import embeddings, responses
from agent.doors.http.texts.embeddings import embedding_of
from agent.doors.http.texts.replies import (
    EVENTS,
    STILL_READING,
    answer,
    model_values,
    plain_error,
    refused_answer,
    renamed,
)  # fmt: skip
from agent.doors.http.texts.requests import chat_of, completion_of, prompt_of, tokens_of
from agent.doors.http.texts.responses import response_of
from agent.doors.orders import check_names
from agent.faults.errors import OrderRefused, Reason

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence

    from starlette.responses import Response

    from agent.doors.desk import TextEvent, TextOrder
    from agent.doors.http.routes import Call
    from agent.doors.http.texts.replies import TextReply
    from agent.doors.orders import Orders

Written: TypeAlias = "tuple[int, TextEvent]"
StreamedReply: TypeAlias = "TextReply | responses.ResponseReply"
Reply: TypeAlias = "StreamedReply | embeddings.EmbeddingReply"
Taken = TypeVar("Taken", bound="Reply")

MODELS, COMPLETIONS, CHATS = "/v1/models", "/v1/completions", "/v1/chat/completions"
EMBEDDINGS, RESPONSES = "/v1/embeddings", "/v1/responses"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"  # as vLLM has them
BODY_BYTES = 2 * 2**20  # a context of 200,000 tokens as numbers
AT_ONCE = 128  # texts of a request that is answered whole
REQUESTS = 128  # of each address
STALL_S = 30.0
SILENT_S = 15.0  # a quarter of what nginx waits for by default
CODES = {401: "invalid_api_key", 403: "forbidden", 404: "unknown_url", 405: "method_not_allowed"}


class TextEndpoint:
    """The section of the door for texts."""

    def __init__(self, texts: Orders) -> None:
        self._texts = texts
        self._created = int(time.time())

    def section(self) -> DoorSection:
        asking, reading = _asking({}), RouteRule(refused_answer)
        routes = [
            route("GET", MODELS, self._models, reading),
            route("GET", MODELS + "/{name:path}", self._model, reading),
            route("POST", COMPLETIONS, lambda call: self._written(call, completion_of), asking),
            route("POST", CHATS, lambda call: self._written(call, chat_of), asking),
            route("POST", EMBEDDINGS, self._embedded, _asking(embeddings.NAMES)),
            route("POST", RESPONSES, lambda call: self._written(call, response_of), _asking(responses.NAMES)),
            route("POST", TOKENIZE, self._tokenised, asking),
            route("POST", DETOKENIZE, self._detokenised, asking),
        ]
        return DoorSection(("/v1/", TOKENIZE, DETOKENIZE), routes, _refusal, REQUESTS, STALL_S, self._texts.stop)

    async def _models(self, call: Call) -> Response:
        models = await self._texts.ask(self._texts.desk.text_models)
        return answer(200, {"object": "list", "data": [model_values(model, self._created) for model in models]})

    async def _model(self, call: Call) -> Response:
        models = await self._texts.ask(self._texts.desk.text_models)
        name = call.request.path_params["name"]
        found = next((model for model in models if model.name == name), None)
        if found is None:
            raise OrderRefused(Reason.NOT_FOUND, f"no model {name!r} writes texts here", field="model")
        return answer(200, model_values(found, self._created))

    async def _tokenised(self, call: Call) -> Response:
        if refused := _other_type(call):
            return refused
        view = await self._texts.ask(lambda: self._texts.desk.tokenised(prompt_of(call.body)))
        return answer(200, {"count": len(view.tokens), "max_model_len": view.context_tokens, "tokens": view.tokens})

    async def _detokenised(self, call: Call) -> Response:
        if refused := _other_type(call):
            return refused
        return answer(
            200, {"prompt": await self._texts.ask(lambda: self._texts.desk.detokenised(*tokens_of(call.body)))}
        )

    async def _written(self, call: Call, read: Callable[[bytes], StreamedReply]) -> Response:
        if refused := _other_type(call):
            return refused
        reply = await self._taken(call, read)
        if not reply.is_streamed:
            return await self._whole(reply)
        async with AsyncExitStack() as leaving:
            text = await leaving.enter_async_context(self._under_way(reply.orders))
            return Pieces(_events(reply, text), EVENTS, leaving.pop_all())

    async def _embedded(self, call: Call) -> Response:
        return _other_type(call) or await self._whole(await self._taken(call, embedding_of))

    async def _taken(self, call: Call, read: Callable[[bytes], Taken]) -> Taken:
        reply = await self._texts.ask(read, call.body)
        call.body = b""
        call.room.leave()
        check_names(model=reply.orders[0].model)
        return reply

    async def _whole(self, reply: Reply) -> Response:
        for first in range(0, len(reply.orders), AT_ONCE):
            async with self._under_way(reply.orders[first : first + AT_ONCE]) as text:
                async for place, one in text:
                    reply.add(first + place, one)
        return await self._texts.ask(reply.whole)  # aside: thousands of vectors take long to spell

    @asynccontextmanager
    async def _under_way(self, orders: Sequence[TextOrder]) -> AsyncIterator[AsyncGenerator[Written, None]]:
        async with self._texts.written(orders) as written, aclosing(written) as text:
            yield text


def _asking(names: Mapping[str, str]) -> RouteRule:
    """``names``: of fields that the desk knows by other ones."""
    return RouteRule(lambda refused: refused_answer(renamed(refused, names)), body_bytes=BODY_BYTES)


def _other_type(call: Call) -> Response | None:
    """Refusal of another content type: any web page can make a browser send JSON as one."""
    return None if media_type(call.request.headers) == JSON else plain_error(400, JSON_WANTED, "content_type")


async def _events(reply: StreamedReply, text: AsyncGenerator[Written, None]) -> AsyncGenerator[bytes, None]:
    yield b"".join(reply.first_events())
    coming = asyncio.ensure_future(anext(text))
    try:
        while True:
            if not (await asyncio.wait([coming], timeout=SILENT_S))[0]:
                yield STILL_READING
                continue
            yield b"".join(reply.events(*coming.result()))
            coming = asyncio.ensure_future(anext(text))
    except StopAsyncIteration:
        return
    except OrderRefused as refused:
        yield reply.failed(refused)
    finally:
        coming.cancel()
        await asyncio.wait([coming])  # the text cannot be closed meanwhile


def _refusal(status: int, reason: str) -> Response:
    if status == 404:
        reason += f" - there are {', '.join((MODELS, COMPLETIONS, CHATS, EMBEDDINGS, RESPONSES))}"
    return plain_error(status, reason, CODES.get(status))
