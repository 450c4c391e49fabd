"""Texts of a served line: tiny language models with random weights, asked at its desk."""

import json
import math
import os
import random
import shutil

import pytest

from agent.core.request import CANCELLED, Outcome
from agent.doors.desk import TextOrder
from agent.faults.errors import OrderRefused, Reason
from agent.service.inspections.courses import Course
from agent.service.texts import text_door
from agent.service.texts.text_destinations import destination_of
from agent.service.texts.text_under_way import TextUnderWay
from experts.expert import Verdict
from experts.llm.arenas.extents import ModelKeyValues
from experts.llm.model import load_model
from experts.llm.serving.generation import GREEDY, Ending, Sampling
from experts.llm.text.tokenizer import TextModel
from experts.llm.token_batch import Chunk, TokenBatch
from tests.agent.service.fake_line import PATIENCE_S, FakeLine
from tests.agent.service.language_models import CONTEXT, TEXTS, Held, Reader, with_models
from tests.waiting import until


@pytest.fixture(scope="module")
def service(tmp_path_factory, models):
    """The usual line, served for all tests."""
    with with_models(FakeLine(tmp_path_factory.mktemp("line")), models).served() as service:
        yield service


def written(service, model="llm/code", prompt="the quick", sampling=GREEDY, **given):
    reader = Reader()
    service.desk.generate(TextOrder(model, prompt, sampling=sampling, **given), reader)
    reader.wait()
    return reader


def speech_of(models, name):
    files = {path.name: path.read_bytes() for path in (models / name).iterdir() if path.suffix == ".json"}
    return TextModel.of(files, name)


def greedy(models, name, prompt, count):
    """The same without the line: the whole text anew for each token."""
    speech, model = speech_of(models, name), load_model(models / name, name)
    read = list(speech.encode(prompt))
    tokens = list(read)
    for _ in range(count):
        batch = TokenBatch.of([Chunk(0, 0, tokens)])
        token = int(model.forward(batch, ModelKeyValues(model.spec, model.dtype))[-1].argmax())
        if token in speech.stop_tokens:
            break
        tokens.append(token)
    return speech.decode(tokens[len(read) :]).rstrip("\ufffd")  # without half a character


def refusal(service, order):
    with pytest.raises(OrderRefused) as refused:
        service.desk.generate(order, Reader())
    return refused.value


def copied(line, models, folder, name="code"):
    """A copy of a model, to be changed, as the line's expert of this name."""
    copy = shutil.copytree(models / "code", folder / name)
    line.document["experts"][f"llm/{name}"] = {"architecture": "llm", "weights": str(copy)}
    return copy


class TestWriting:
    def test_text_is_the_models_own_streamed_and_counted(self, service, models):
        before = service.desk.status().texts
        reader = written(service, most_tokens=12)
        assert reader.text == greedy(models, "code", "the quick", 12)
        assert len(reader.pieces) > 1
        end, read = reader.end, len(speech_of(models, "code").encode("the quick"))
        assert (end.expert, end.ending, end.read_tokens, end.written_tokens) == ("llm/code", Ending.LENGTH, read, 12)
        assert 0 < end.first_token_s <= end.seconds
        assert reader.calls_after_end == 0
        texts = service.desk.status().texts
        assert (texts.ended, texts.shown, texts.under_way) == (before.ended + 1, before.shown + 1, 0)
        assert (texts.written_tokens, texts.read_tokens) >= (before.written_tokens + 12, before.read_tokens + read)

    def test_chat_is_formatted_by_the_models_template(self, service, models):
        reader = written(service, prompt=None, messages=({"role": "user", "content": "fox"},), most_tokens=8)
        assert reader.text == greedy(models, "code", "<|user|>fox<|end|><|assistant|>", 8)

    def test_text_ends_at_the_end_of_the_context(self, service):
        end = written(service, most_tokens=10_000).end
        assert (end.ending, end.read_tokens + end.written_tokens) == (Ending.LENGTH, CONTEXT)
        assert written(service).end.written_tokens == end.written_tokens

    def test_logprobs_are_sent_only_if_asked_for(self, service):
        reader = written(service, most_tokens=5, sampling=Sampling(temperature=0.0, logprobs=2))
        tokens = [token for piece in reader.pieces for token in piece.tokens]
        assert len(tokens) == 5
        assert b"".join(token.content for token in tokens).decode("utf-8", "replace").rstrip("\ufffd") == reader.text
        assert all(len(token.alternatives) == 2 for token in tokens)
        assert all(token.alternatives[0].logprob == token.logprob <= 0 for token in tokens)
        assert [token for piece in written(service, most_tokens=5).pieces for token in piece.tokens] == []


class TestRoutes:
    def test_rule_routes_a_text_without_a_router(self, service):
        asked = (("helpdesk", "write Python"), ("plain", "1 + 1"), ("plain", "fox"))
        found = [written(service, *each, most_tokens=3).end.expert for each in asked]
        assert found == ["llm/code", "llm/maths", "llm/code"]
        said = (("user", "1"), ("assistant", "2"), ("user", "fox"))  # the last words of the user's count
        messages = tuple({"role": role, "content": content} for role, content in said)
        assert written(service, "plain", None, messages=messages, most_tokens=2).end.expert == "llm/code"

    def test_router_sends_a_text_to_the_expert_of_its_label(self, service):
        reader = written(service, "llm/router", "the fox")
        label = reader.end.label
        assert (reader.text, reader.end.ending, label in {"code", "maths"}) == (label, Ending.STOP, True)
        assert 0.5 <= reader.end.score <= 1
        reader = written(service, "helpdesk", "the fox", most_tokens=6)
        assert reader.end.expert == f"llm/{label}"
        assert reader.text == written(service, f"llm/{label}", "the fox", most_tokens=6).text

    def test_route_whose_router_names_an_unusable_expert_fails_with_the_reason(self, text_line):
        route = TEXTS["helpdesk"] | {"experts": {"code": "llm/mute", "maths": "llm/mute"}}
        text_line.document["texts"]["routes"] = {"helpdesk": route}
        with text_line.served() as service:
            failure = written(service, "helpdesk", "the fox").end.failure
            assert failure.reason is Reason.NOT_NOW
            assert "llm/mute: tokenizer.json: is not there" in str(failure)
            assert written(service, "auto", "Python", most_tokens=2).end.expert == "llm/code"  # auto: the only route

    def test_text_models_are_listed_with_their_contexts(self, service):
        views = {view.name: view for view in service.desk.text_models()}
        names = {"llm/router", "llm/code", "llm/maths", "llm/mute", "helpdesk", "plain"}
        assert {name: view.is_ready for name, view in views.items()} == {name: name != "llm/mute" for name in names}
        assert views["llm/code"].context_tokens == views["helpdesk"].context_tokens == CONTEXT
        assert "tokenizer.json: is not there" in views["llm/mute"].reason


IMPOSSIBLE = (
    (TextOrder("llm/code", ""), Reason.INVALID, "prompt"),
    (TextOrder("llm/code", ()), Reason.INVALID, "prompt"),
    (TextOrder("llm/code"), Reason.INVALID, "prompt"),
    (TextOrder("llm/code", "x", ({"role": "user", "content": "x"},)), Reason.INVALID, "prompt"),
    (TextOrder("llm/code", "x " * CONTEXT), Reason.TOO_LONG, "prompt"),
    (TextOrder("llm/code", None, ({"role": "user", "content": "x " * CONTEXT},)), Reason.TOO_LONG, "messages"),
    (TextOrder("llm/code", (10**6,)), Reason.INVALID, "prompt"),
    (TextOrder("llm/code", (-1,)), Reason.INVALID, "prompt"),
    (TextOrder("llm/code", "x", most_tokens=0), Reason.INVALID, "max_tokens"),
    (TextOrder("llm/code", "x", stop=("",)), Reason.INVALID, "stop"),
    (TextOrder("llm/code", "x", deadline_s=0.0), Reason.INVALID, "deadline_s"),
    (TextOrder("llm/code", "x", deadline_s=math.nan), Reason.INVALID, "deadline_s"),
    (TextOrder("helpdesk", (1, 2)), Reason.INVALID, "prompt"),
    (TextOrder("llm/mute", "x"), Reason.INVALID, "model"),
    (TextOrder("cls/f0", "x"), Reason.INVALID, "model"),
    (TextOrder("llm/nobody", "x"), Reason.NOT_FOUND, "model"),
    (TextOrder("c0", "x"), Reason.NOT_FOUND, "model"),
    (TextOrder("auto", "x"), Reason.NOT_FOUND, "model"),  # could be several
)


def test_impossible_text_order_is_refused_with_its_field(service):
    before = service.agent.loop.statistics().engine.arrived
    for order, reason, field in IMPOSSIBLE:
        refused = refusal(service, order)
        assert (refused.reason, refused.field) == (reason, field), order
    assert service.agent.loop.statistics().engine.arrived == before
    assert service.desk.status().texts.under_way == 0


def test_text_beyond_the_limit_or_for_a_broken_model_is_refused_with_the_reason(text_line, models, tmp_path):
    os.truncate(copied(text_line, models, tmp_path, "broken") / "model.safetensors", 1000)
    text_line.document["api"] = {"limits": {"requests": 1}}
    with text_line.served() as service:
        refused = refusal(service, TextOrder("llm/broken", "x"))
        assert (refused.field, "llm/broken" in str(refused)) == ("model", True)
        reader = Held()
        service.desk.generate(TextOrder("llm/code", "x", most_tokens=3, sampling=GREEDY), reader)
        refused = refusal(service, TextOrder("llm/code", "x"))
        assert (refused.reason, refused.retry_s > 0) == (Reason.QUEUE_FULL, True)
        reader.may_go_on.set()
        reader.wait()
        assert written(service, most_tokens=2).end.ending is Ending.LENGTH


def test_text_beyond_the_memory_of_callers_is_refused_before_it_is_tokenised(text_line, models, tmp_path, monkeypatch):
    text_line.document["api"] = {"limits": {"memory": "1MiB"}}
    with text_line.served() as service:
        monkeypatch.setattr(TextModel, "encode", lambda *_: pytest.fail("it was tokenised"))
        for order in (TextOrder("helpdesk", "x" * 2**18), TextOrder("llm/code", (1,) * 2**18)):
            assert refusal(service, order).reason is Reason.TOO_LARGE
        assert service.desk.status().texts.under_way == 0


def test_prompt_is_tokenised_as_it_would_be_read(service, models):
    speech = speech_of(models, "code")
    view = service.desk.tokenised(TextOrder("llm/code", None, ({"role": "user", "content": "fox"},)))
    assert view.tokens == speech.encode("<|user|>fox<|end|><|assistant|>", adds_special=False)
    assert (view.expert, view.context_tokens) == ("llm/code", CONTEXT)
    assert service.desk.detokenised("llm/code", speech.encode("the quick")) == "the quick"
    with pytest.raises(OrderRefused) as refused:
        service.desk.detokenised("llm/code", (10**6,))
    assert (refused.value.reason, refused.value.field) == (Reason.INVALID, "prompt")


def test_text_for_several_experts_of_one_program_is_tokenised_once(service, monkeypatch):
    encode, encoded = TextModel.encode, []
    monkeypatch.setattr(TextModel, "encode", lambda *given, **more: encoded.append(given[1]) or encode(*given, **more))
    written(service, model="helpdesk", prompt="the quick brown fox", most_tokens=2)
    assert 1 <= encoded.count("the quick brown fox") <= 2  # of the writers, and of the router


def test_cancelled_text_leaves_nothing_behind_at_any_moment(service):
    chance, before = random.Random(5), service.desk.status().texts.ended
    for _ in range(60):
        model, reader = chance.choice(["llm/code", "helpdesk", "llm/router"]), Reader()
        ticket = service.desk.generate(TextOrder(model, "the quick"), reader)
        if chance.random() < 0.5:
            reader.has_read.wait(chance.random() * 0.01)
        ticket.cancel()
    until(lambda: service.desk.status().texts.under_way == 0)
    assert [pool.lease_bytes for pool in service.desk.status().pools] == [0]
    assert service.desk.status().texts.ended == before + 60


def test_text_without_a_deadline_has_that_of_the_line(text_line):
    text_line.document["texts"]["deadline_s"] = 0.001
    with text_line.served() as service:
        end = written(service).end
        assert (end.ending, end.written_tokens < CONTEXT) == (Ending.DEADLINE, True)
        assert written(service, deadline_s=60.0, most_tokens=2).end.ending is Ending.LENGTH


def test_stopping_agent_tells_waiting_callers_and_stores_no_prompt(text_line, monkeypatch):
    soon, reader = Reader(), Held()
    with text_line.served() as service:
        service.desk.generate(TextOrder("llm/code", "a secret", most_tokens=3, sampling=GREEDY), soon)
    assert soon.wait().ending is Ending.LENGTH
    assert (text_line.rows, text_line.unfinished) == ([], [])
    kept = [path.read_bytes() for path in (text_line.folder / "state").rglob("*") if path.is_file()]
    assert not any(b"secret" in content for content in kept)
    monkeypatch.setattr("agent.service.line_service.API_STOP_S", 0.0)
    with text_line.served() as service:
        service.desk.generate(TextOrder("llm/code", "the quick", sampling=GREEDY), reader)
        assert reader.has_read.wait(PATIENCE_S)
    assert reader.wait().failure.reason is Reason.STOPPING
    assert refusal(service, TextOrder("llm/code", "x")).reason is Reason.STOPPING


def test_text_that_arrives_during_a_stop_is_refused(text_line, monkeypatch):
    with text_line.served() as service:

        def found_while_it_stops(order, catalog):
            service._texts.stop(0.0)
            return destination_of(order, catalog)

        monkeypatch.setattr(text_door, "destination_of", found_while_it_stops)
        assert refusal(service, TextOrder("llm/code", "the quick")).reason is Reason.STOPPING
        assert service.desk.status().texts.under_way == 0


class TestTextLength:
    @pytest.fixture
    def service(self, text_line, models, tmp_path):
        text_line.document["texts"] = text_line.document["texts"] | {"kv": "64KiB"}
        config = copied(text_line, models, tmp_path) / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 1024}))
        with text_line.served() as service:
            yield service

    @pytest.fixture
    def most(self, service):
        return next(each.context_tokens for each in service.desk.text_models() if each.name == "llm/code")

    def test_text_is_as_long_as_memory_allows(self, service, most):
        assert CONTEXT < most < 1024
        end = written(service).end
        assert (end.ending, end.read_tokens + end.written_tokens) == (Ending.LENGTH, most)

    def test_text_larger_than_the_memory_is_refused_with_its_field(self, service, most):
        many = refusal(service, TextOrder("llm/code", (1, 2), most_tokens=most - 1, sampling=GREEDY))
        assert (many.reason, many.field) == (Reason.TOO_LONG, "max_tokens")
        assert f"ask for at most {most - 2}" in str(many)
        long = refusal(service, TextOrder("llm/code", (1,) * most, sampling=GREEDY))
        assert (long.reason, long.field) == (Reason.TOO_LONG, "prompt")


def test_text_without_sampling_values_uses_the_models_own(text_line, models, tmp_path):
    (copied(text_line, models, tmp_path) / "generation_config.json").write_text('{"top_k": 1}')  # the likeliest
    with text_line.served() as service:

        def drawn(*given):
            drawings = (Sampling(seed=seed) for seed in range(4))
            return {written(service, most_tokens=8, sampling=each, given=frozenset(given)).text for each in drawings}

        assert drawn() == {greedy(models, "code", "the quick", 8)}
        assert len(drawn("top_k")) > 1


WITHDRAWN = Outcome(Verdict.UNKNOWN, None, None, (), CANCELLED)


@pytest.mark.parametrize(
    ("due_s", "looks", "withdrawn", "is_cancelled"),
    [(10.0, (10.4, 10.5), [10.5], False), (10.0, (), [11.0], True), (None, (1e9,), [1e9], True)],
)
def test_text_is_withdrawn_at_its_deadline_and_a_caller_that_left_gets_no_answer(due_s, looks, withdrawn, is_cancelled):
    now_s, found, left, reader = [0.0], [], [], Reader()
    order = TextOrder("llm/code", "x")
    text = TextUnderWay(order, reader, None, due_s, lambda: now_s[0], lambda _, how: left.append(how))
    text.withdraw = lambda: found.append(now_s[0])
    for now_s[0] in looks:
        text.end_if_overdue(0.5)  # what runs ends by itself
    if is_cancelled:
        now_s[0] = max(now_s[0], 11.0)
        text.cancel()
    assert found == withdrawn
    text.end(WITHDRAWN, Course(queue_s=10.5))
    if is_cancelled:
        assert (reader.end, left) == (None, [CANCELLED])
    else:
        end = reader.end
        assert (end.ending, end.expert, end.failure, end.queue_s) == (Ending.DEADLINE, None, None, 10.5)
        assert left == [Ending.DEADLINE]
