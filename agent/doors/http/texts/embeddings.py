"""`/v1/embeddings`: a vector of each prompt, made as its model's directory says (``experts.llm.serving.pooling``)."""

from __future__ import annotations

import base64
import math
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from agent.doors.desk import TextEnd, TextOrder
from agent.doors.http.texts.replies import answer
from agent.doors.http.texts.requests import Prompts, prompts_of, read_body
from agent.doors.http.texts.structured import Body
from agent.doors.refusals import invalid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.responses import Response

    from agent.doors.desk import TextEvent

MOST_INPUTS = 2048  # OpenAI's limit
NAMES = {"prompt(?=:)": "input"}  # of the desk's fields


class EmbeddingBody(Body):
    model: str = Field(min_length=1)
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1)


@dataclass(slots=True)
class EmbeddingReply:
    """``dimensions``: numbers that are kept of each vector, which is then brought to length 1."""

    orders: Sequence[TextOrder]
    is_base64: bool
    dimensions: int | None
    _vectors: dict[int, tuple[float, ...]] = field(default_factory=dict)
    _read: int = 0
    _model: str | None = None

    def add(self, place: int, one: TextEvent) -> None:
        if isinstance(one, TextEnd):
            self._read += one.read_tokens
        else:
            self._model, self._vectors[place] = one.expert, one.vector

    def whole(self) -> Response:
        """Raises OrderRefused for more dimensions than there are, or for a vector that did not come in time."""
        if len(self._vectors) < len(self.orders):
            raise invalid("input", "was not read before the deadline (texts.deadline_s): send fewer at once")
        found = [self._cut(self._vectors[place]) for place in range(len(self.orders))]
        data = [{"object": "embedding", "index": n, "embedding": self._coded(own)} for n, own in enumerate(found)]
        usage = {"prompt_tokens": self._read, "total_tokens": self._read}
        return answer(200, {"object": "list", "data": data, "model": self._model, "usage": usage})

    def _cut(self, vector: tuple[float, ...]) -> tuple[float, ...]:
        if self.dimensions is None:
            return vector
        if self.dimensions > len(vector):
            raise invalid("dimensions", f"is {self.dimensions}: vectors of {self._model} have {len(vector)}")
        kept = vector[: self.dimensions]
        length = math.hypot(*kept) or 1.0
        return tuple(number / length for number in kept)

    def _coded(self, vector: tuple[float, ...]) -> Any:  # noqa: ANN401 - JSON
        return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode() if self.is_base64 else vector


def embedding_of(body: bytes) -> EmbeddingReply:
    """Raises OrderRefused."""
    sent = read_body(body, EmbeddingBody, {})
    prompts = prompts_of(sent.input, "input")
    if len(prompts) > MOST_INPUTS:
        raise invalid("input", f"has {len(prompts)} texts, and {MOST_INPUTS} are the most: send fewer at once")
    orders = [TextOrder(sent.model, prompt, most_tokens=0, pools=True) for prompt in prompts]
    return EmbeddingReply(orders, sent.encoding_format == "base64", sent.dimensions)
