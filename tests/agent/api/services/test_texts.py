"""coserve.v1.Texts over real sockets: with plain stubs as an integrator has them, and as the command line asks."""

import grpc
import pytest

from agent.api.calls.desk import TextEnd, TextOrder, TextPiece, TokenView
from agent.api.proto import inspection_pb2 as pb
from agent.api.proto import inspection_pb2_grpc
from experts.errors import OrderRefused, Refusing
from experts.llm.serving.generation import Ending, Sampling
from tests.agent.api.conftest import metadata, refused
from tests.agent.api.fake_desk import DEADLINE_S, PROSE

CHAT = [pb.ChatMessage(role="user", content="hello")]


@pytest.fixture
def texts(channel):
    return inspection_pb2_grpc.TextsStub(channel)


def generated(texts, **given):
    request = pb.GenerateRequest(**{"model": "llm/code", "prompt": "hello"} | given)
    return list(texts.Generate(request, timeout=DEADLINE_S))


def test_pieces_come_as_they_are_written_then_the_end(texts, desk):
    desk.holds = True
    replies = texts.Generate(pb.GenerateRequest(model="llm/code", messages=CHAT), timeout=DEADLINE_S)
    desk.wait_for(lambda desk: desk.texts)
    (text,) = desk.texts
    for piece in PROSE:
        text.write(piece)
        assert next(replies).piece == pb.TextPiece(expert="llm/code", text=piece)
    text.end(Ending.LENGTH)
    (last,) = replies
    assert (last.end.ending, last.end.expert, last.end.read_tokens, last.end.written_tokens) == (
        pb.ENDING_LENGTH, "llm/code", 7, 4,
    )  # fmt: skip
    assert desk.text_orders == [TextOrder("llm/code", messages=({"role": "user", "content": "hello"},))]


def test_all_that_can_be_asked_for_arrives(texts, desk):
    sampling = {
        "temperature": 0.0, "top_p": 0.5, "top_k": 3, "min_p": 0.25, "repetition_penalty": 1.5, "presence_penalty": 1.0,
        "frequency_penalty": -1.0, "seed": 0, "logprobs": 2,
    }  # fmt: skip
    settings = pb.SamplingSettings(**sampling)
    tokens = pb.Tokens(ids=[3, 1, 4])
    replies = generated(
        texts, prompt="", prompt_tokens=tokens, max_tokens=9, sampling=settings, stop=["a", "b"], deadline_s=60
    )
    assert desk.text_orders == [
        TextOrder("llm/code", (3, 1, 4), (), 9, Sampling(**sampling), ("a", "b"), 60.0, frozenset(sampling))
    ]  # fmt: skip
    first = replies[0].piece.tokens[0]
    assert (first.text, first.content, first.logprob) == ("Hello", b"Hello", -0.5)
    assert [other.text for other in first.alternatives] == ["Bye", "Bye"]


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"sampling": pb.SamplingSettings(temperature=-1)}, "temperature"),
        ({"sampling": pb.SamplingSettings(temperature=float("nan"))}, "temperature"),
        ({"sampling": pb.SamplingSettings(top_p=0)}, "top_p"), ({"sampling": pb.SamplingSettings(min_p=2)}, "min_p"),
        ({"sampling": pb.SamplingSettings(logprobs=99)}, "logprobs"), ({"messages": CHAT}, "messages"),
        ({"prompt_tokens": pb.Tokens(ids=[1])}, "prompt_tokens"), ({"prompt": ""}, "prompt"),
        ({"model": "x" * 1000}, "model"),
    ],
)  # fmt: skip
def test_a_field_that_is_wrong_is_named(texts, desk, given, field):
    error = refused(generated, texts, **given)
    assert (error.code(), metadata(error)) == (grpc.StatusCode.INVALID_ARGUMENT, {"coserve-reason": "INVALID"})
    assert field in error.details()
    assert desk.text_orders == []


def test_a_text_that_fails_ends_with_its_reason_behind_what_was_written(texts, desk):
    desk.holds = True
    replies = texts.Generate(pb.GenerateRequest(model="llm/code", prompt="x"), timeout=DEADLINE_S)
    desk.wait_for(lambda desk: desk.texts)
    desk.texts[0].write("half")
    desk.texts[0].end(None, OrderRefused(Refusing.NOT_NOW, "llm/code: its weights are not there"))
    assert next(replies).piece.text == "half"
    with pytest.raises(grpc.RpcError, match="its weights are not there") as failed:
        next(replies)
    assert failed.value.code() is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize("cancels", [True, False])
def test_who_goes_away_has_the_text_cancelled(server, desk, cancels):
    desk.holds = True
    with grpc.insecure_channel(server.addresses[0]) as channel:
        stub = inspection_pb2_grpc.TextsStub(channel)
        replies = stub.Generate(pb.GenerateRequest(model="llm/code", prompt="x"), timeout=DEADLINE_S)
        desk.wait_for(lambda desk: desk.texts)
        desk.texts[0].write("one")
        next(replies)
        if cancels:  # or the channel is closed
            replies.cancel()
            desk.wait_for(lambda desk: desk.cancelled_texts)
    desk.wait_for(lambda desk: not desk.texts)
    assert len(desk.cancelled_texts) == len(desk.text_orders)


def test_a_text_that_never_begins_ends_by_its_deadline(texts, desk):
    desk.holds = True
    (last,) = generated(texts, deadline_s=0.01)
    assert (last.end.ending, last.end.written_tokens) == (pb.ENDING_DEADLINE, 0)
    desk.wait_for(lambda desk: desk.cancelled_texts)


def test_the_client_has_the_desks_nouns(client, desk):
    order = TextOrder(
        "llm/code", None, ({"role": "user", "content": "hello", "name": "me"},), 9,
        Sampling(temperature=0.0, seed=0, logprobs=1), ("END",), 60.0, frozenset({"temperature", "seed", "logprobs"}),
    )  # fmt: skip
    *pieces, end = client.generate(order)
    assert desk.text_orders == [order]
    token = TokenView("Hello", b"Hello", -0.5, (TokenView("Bye", b"Bye", -2.5),))
    assert (pieces[0], [piece.text for piece in pieces]) == (TextPiece("llm/code", "Hello", (token,)), list(PROSE))
    assert end == TextEnd(Ending.STOP, "llm/code", 7, 4, 0.5, 0.125, 0.25)
    list(client.generate(TextOrder("llm/code", (3, 1, 4))))
    assert desk.text_orders[1] == TextOrder("llm/code", (3, 1, 4))
    with pytest.raises(OrderRefused, match="no model 'llm/nobody'"):
        list(client.generate(TextOrder("llm/nobody", "x")))
