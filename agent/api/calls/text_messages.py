"""Texts as messages of coserve.v1, and back.

Guarantees: what a message is made of comes out of it again; a value that no text may have is refused by its field's
name, which is the protocol's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agent.api.calls.desk import TextEnd, TextOrder, TextPiece, TokenView
from agent.api.calls.messages import given, text
from agent.api.calls.orders import invalid, refusal_of
from agent.api.proto import inspection_pb2 as pb
from experts.errors import GenerationInvalid
from experts.llm.serving.generation import Ending, Sampling

if TYPE_CHECKING:
    from agent.api.calls.texts import Told

ENDINGS = {Ending.STOP: pb.ENDING_STOP, Ending.LENGTH: pb.ENDING_LENGTH, Ending.DEADLINE: pb.ENDING_DEADLINE}
OF_END = ("read_tokens", "written_tokens", "seconds", "queue_s")
MAYBE_OF_END = ("expert", "first_token_s", "label", "score")
ENDING_OF = {number: ending for ending, number in ENDINGS.items()}


def text_order_of(request: pb.GenerateRequest) -> TextOrder:
    """Order of a request. Raises OrderRefused."""
    asked = [name for name in ("prompt", "prompt_tokens", "messages") if _is_given(request, name)]
    if len(asked) > 1:
        raise invalid(asked[1], f"{' and '.join(asked)} are given - say once what is to be continued")
    tokens, optional = tuple(request.prompt_tokens.ids), given(request, "max_tokens", "deadline_s")
    return TextOrder(
        model=request.model,
        prompt=tokens if "prompt_tokens" in asked else None if "messages" in asked else request.prompt,
        messages=tuple(_message_of(message) for message in request.messages),
        most_tokens=optional["max_tokens"],
        sampling=_sampling_of(request.sampling),
        stop=tuple(request.stop),
        deadline_s=optional["deadline_s"],
        given=frozenset(settled.name for settled, _ in request.sampling.ListFields()),
    )


def text_request(order: TextOrder) -> pb.GenerateRequest:
    usual, sampling = Sampling(), pb.SamplingSettings()
    for name in Sampling.__slots__:
        value = getattr(order.sampling, name)
        if value is not None and (value != getattr(usual, name) or name in order.given):
            setattr(sampling, name, value)
    request = pb.GenerateRequest(
        model=order.model,
        messages=[pb.ChatMessage(**message) for message in order.messages],
        max_tokens=order.most_tokens,
        sampling=sampling,
        stop=order.stop,
        deadline_s=order.deadline_s,
    )
    if isinstance(order.prompt, str):
        request.prompt = order.prompt
    elif order.prompt is not None:
        request.prompt_tokens.ids.extend(order.prompt)
    return request


def told_message(told: Told) -> pb.GenerateReply:
    """A piece, or the end."""
    if isinstance(told, TextPiece):
        tokens = [_token_message(token) for token in told.tokens]
        return pb.GenerateReply(piece=pb.TextPiece(expert=text(told.expert), text=text(told.text), tokens=tokens))
    ending = pb.ENDING_UNKNOWN if told.ending is None else ENDINGS[told.ending]
    return pb.GenerateReply(
        end=pb.TextEnd(ending=ending, **{name: getattr(told, name) for name in (*OF_END, *MAYBE_OF_END)})
    )


def told_of(message: pb.GenerateReply) -> Told:
    if message.HasField("piece"):
        piece = message.piece
        return TextPiece(piece.expert, piece.text, tuple(_token_of(token) for token in piece.tokens))
    end = message.end
    values = {name: getattr(end, name) for name in OF_END} | given(end, *MAYBE_OF_END)
    return TextEnd(ENDING_OF.get(end.ending), **values)


def _is_given(request: pb.GenerateRequest, name: str) -> bool:
    return request.HasField("prompt_tokens") if name == "prompt_tokens" else bool(getattr(request, name))


def _message_of(message: pb.ChatMessage) -> dict[str, str]:
    named = {"name": message.name} if message.name else {}
    return {"role": message.role, "content": message.content, **named}


def _sampling_of(settings: pb.SamplingSettings) -> Sampling:
    settled: dict[str, Any] = {field.name: value for field, value in settings.ListFields()}
    try:
        return Sampling(**settled)
    except GenerationInvalid as error:
        raise refusal_of(error) from error


def _token_message(token: TokenView) -> pb.Token:
    return pb.Token(
        text=text(token.text),
        content=token.content,
        logprob=token.logprob,
        alternatives=[_token_message(each) for each in token.alternatives],
    )


def _token_of(message: pb.Token) -> TokenView:
    return TokenView(
        message.text, message.content, message.logprob, tuple(_token_of(each) for each in message.alternatives)
    )
