"""OpenAI's own client, unmodified, against texts served over real sockets."""

import math
import threading
from functools import partial

import httpx2
import openai
import pytest

from agent.doors.desk import TextOrder
from agent.faults.errors import OrderRefused, Reason
from experts.llm.serving.generation import Ending, Piece, Sampling, Token
from experts.llm.text.tool_calls import HERMES
from tests.agent.doors.conftest import DEADLINE_S
from tests.agent.doors.fake_desk import PROSE

USER = [{"role": "user", "content": "hello"}]
TEXT = "".join(PROSE)
STOCK = {"type": "function", "function": {"name": "stock", "description": "Of a part.", "strict": True}}
CALLS_WITHOUT_JSON = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{"}}]}


def named(name):
    return {"type": "function", "function": {"name": name}}


def ask_chat(client, **given):
    return client.chat.completions.create(**{"model": "llm/code", "messages": USER} | given)


@pytest.fixture
def begun(client, desk, asking):
    """A chat that a caller waits for, streamed or whole, and its text, which the test writes."""

    def begin(stream=False, **given):
        desk.holds = True
        asked = asking.submit(
            lambda: list(ask_chat(client, stream=True, **given)) if stream else ask_chat(client, **given)
        )
        desk.wait_for(lambda desk: desk.texts)
        return asked, desk.texts[0]

    return begin


class TestAnswers:
    def test_models_are_listed_and_looked_up_by_names_with_slashes(self, client):
        assert [model.id for model in client.models.list()] == ["llm/code", "llm/maths", "helpdesk"]
        found = client.models.retrieve("llm/code")
        assert (found.id, found.object, found.owned_by, found.created > 0) == ("llm/code", "model", "coserve", True)
        with pytest.raises(openai.NotFoundError, match="no model 'llm/other'"):
            client.models.retrieve("llm/other")

    def test_chat_is_answered(self, client, desk):
        answer = ask_chat(client)
        (choice,) = answer.choices
        assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", TEXT, "stop")
        assert (answer.object, answer.model, answer.id[:9]) == ("chat.completion", "llm/code", "chatcmpl-")
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (7, 4, 11)
        assert choice.logprobs is None
        assert desk.text_orders == [TextOrder("llm/code", messages=({"role": "user", "content": "hello"},))]

    def test_chat_is_streamed(self, client):
        events = list(ask_chat(client, stream=True, stream_options={"include_usage": True}))
        *said, last, usage = events
        assert [event.choices[0].delta.content for event in said] == ["", *PROSE]
        assert said[0].choices[0].delta.role == "assistant"
        assert {event.choices[0].finish_reason for event in said} == {None}
        assert (last.choices[0].finish_reason, last.choices[0].delta.content) == ("stop", None)
        assert (usage.choices, usage.usage.total_tokens) == ([], 11)
        assert [event.usage for event in events[:-1]] == [None] * (len(events) - 1)
        assert len({event.id for event in events}) == 1

    @pytest.mark.parametrize(
        ("prompt", "asked"),
        [("hello", "hello"), (["hello"], "hello"), ([3, 1, 4], (3, 1, 4)), ([[3, 1, 4]], (3, 1, 4))],
    )
    def test_prompt_is_continued(self, client, desk, prompt, asked):
        answer = client.completions.create(model="llm/code", prompt=prompt)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (TEXT, "stop")
        assert (answer.object, answer.id[:4], answer.usage.completion_tokens) == ("text_completion", "cmpl", 4)
        assert desk.text_orders == [TextOrder("llm/code", asked, most_tokens=16)]

    def test_continued_prompt_is_streamed(self, client):
        events = list(client.completions.create(model="llm/code", prompt="hello", stream=True))
        assert [event.choices[0].text for event in events] == [*PROSE, ""]
        assert events[-1].choices[0].finish_reason == "stop"

    @pytest.mark.parametrize(
        ("ending", "reason"), [(Ending.STOP, "stop"), (Ending.LENGTH, "length"), (Ending.DEADLINE, "length")]
    )
    def test_finish_reason_names_how_the_text_ended(self, begun, ending, reason):
        asked, text = begun()
        text.end(ending)
        assert asked.result().choices[0].finish_reason == reason

    def test_pieces_are_streamed_while_the_text_is_written(self, client, desk):
        desk.holds = True
        with ask_chat(client, stream=True) as events:
            desk.wait_for(lambda desk: desk.texts)
            (text,) = desk.texts
            text.write("one")
            assert [next(events).choices[0].delta.content for _ in range(2)] == ["", "one"]
            text.write("two")
            assert next(events).choices[0].delta.content == "two"
            text.end()
            assert [event.choices[0].finish_reason for event in events] == ["stop"]


@pytest.mark.parametrize("stream", [False, True])
def test_coserve_field_of_a_request_adds_the_exact_ending(client, desk, stream):
    desk.holds = True  # the text never begins
    answer = ask_chat(client, stream=stream, extra_body={"coserve": {"deadline_s": 0.01}})
    last = list(answer)[-1] if stream else answer
    assert (last.choices[0].finish_reason, last.coserve["ending"], last.coserve["written_tokens"]) == (
        "length", "deadline", 0,
    )  # fmt: skip
    desk.wait_for(lambda desk: desk.cancelled_texts)
    desk.holds = False
    client.completions.create(model="llm/code", prompt="x", extra_body={"coserve": {}})
    assert [order.deadline_s for order in desk.text_orders] == [0.01, None]
    assert desk.text_orders[-1].most_tokens is None


class TestLogprobs:
    def test_impossible_token_has_a_finite_logprob(self, begun):
        asked, text = begun(logprobs=True)
        text.listener.wrote(Piece("llm/code", "x", (Token(0, -math.inf, content=b"x"),)))
        text.end()
        assert asked.result().choices[0].logprobs.content[0].logprob == -9999.0

    def test_chat_has_logprobs_streamed_or_not(self, client):
        events = list(ask_chat(client, logprobs=True, top_logprobs=2, stream=True))
        first = ask_chat(client, logprobs=True, top_logprobs=2).choices[0].logprobs.content[0]
        assert (first.token, first.logprob, bytes(first.bytes)) == ("Hello", -0.5, b"Hello")
        assert [(other.token, other.logprob) for other in first.top_logprobs] == [("Bye", -2.5)] * 2
        tokens = [
            token.token for event in events if event.choices[0].logprobs for token in event.choices[0].logprobs.content
        ]
        assert tokens == list(PROSE)

    @pytest.mark.parametrize("streams", [False, True])
    def test_completion_has_logprobs_of_the_drawn_token_beside_the_likeliest_streamed_or_not(self, client, streams):
        given = {"model": "llm/code", "prompt": "hello", "logprobs": 1}
        answers = (
            list(client.completions.create(**given, stream=True)) if streams else [client.completions.create(**given)]
        )
        told = [answer.choices[0].logprobs for answer in answers if answer.choices[0].logprobs]
        assert [token for one in told for token in one.tokens] == list(PROSE)
        assert [offset for one in told for offset in one.text_offset] == [0, 5, 7, 12]
        assert {logprob for one in told for logprob in one.token_logprobs} == {-0.5}
        assert told[0].top_logprobs[0] == {"Bye": -2.5, "Hello": -0.5}


def test_sampling_fields_reach_the_order(client, desk):
    ask_chat(
        client,
        temperature=0.5, top_p=0.9, presence_penalty=1, frequency_penalty=-1.5, seed=7, max_completion_tokens=9,
        stop=["a", "b"],
        extra_body={
            "top_k": 3, "min_p": 0.25, "repetition_penalty": 1.5,
            "chat_template_kwargs": {"enable_thinking": False},
        },
    )  # fmt: skip
    (order,) = desk.text_orders
    assert order.sampling == Sampling(0.5, 0.9, 3, 0.25, 1.5, 1.0, -1.5, 7)
    assert (order.most_tokens, order.stop, order.template) == (9, ("a", "b"), {"enable_thinking": False})


class TestRefusals:
    @pytest.mark.parametrize(
        ("given", "param"),
        [
            ({"n": 129}, "n"), ({"temperature": -1}, "temperature"), ({"temperature": 1e9}, "temperature"),
            ({"top_p": 0}, "top_p"), ({"presence_penalty": 3}, "presence_penalty"), ({"seed": 2**70}, "seed"),
            ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": "9"}, "max_tokens"),
            ({"max_tokens": 9, "max_completion_tokens": 9}, "max_tokens"), ({"top_logprobs": 2}, "top_logprobs"),
            ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"), ({"stop": [1]}, "stop[0]"),
            ({"messages": []}, "messages"), ({"messages": [{"role": "user"}]}, "messages[0].content"),
            ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
            ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
            ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "messages[0].content[0].text"),
            ({"messages": [{"role": "user", "content": "x", "colour": "red"}]}, "messages[0].colour"),
            ({"reasoning_effort": "high"}, "reasoning_effort"),
            ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
            ({"tools": [STOCK, STOCK]}, "tools[1].function.name"), ({"tool_choice": "required"}, "tool_choice"),
            ({"tools": [STOCK], "tool_choice": named("other")}, "tool_choice.function.name"),
            ({"tools": [STOCK], "tool_choice": "any"}, "tool_choice"),
            ({"response_format": {"type": "xml"}}, "response_format.type"),
            ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
            ({"extra_body": {"structured_outputs": {"choice": []}}}, "structured_outputs.choice"),
            ({"extra_body": {"structured_outputs": {"json": "{"}}}, "structured_outputs.json"),
            ({"extra_body": {"structured_outputs": {"grammar": "x" * 140_000}}}, "structured_outputs.grammar"),
            ({"extra_body": {"structured_outputs": {"regex": "a", "choice": ["a"]}}}, "structured_outputs.choice"),
            ({"extra_body": {"structured_outputs": {"structural_tag": "a"}}}, "structured_outputs.structural_tag"),
            ({"extra_body": {"guided_json": {}}}, "guided_json"),
            ({"logit_bias": {"5": 1}}, "logit_bias"), ({"stream_options": {"include_usage": True}}, "stream_options"),
            ({"extra_body": {"temperatur": 1}}, "temperatur"), ({"extra_body": {"top_k": -1}}, "top_k"),
            ({"extra_body": {"coserve": {"deadline_s": 0}}}, "coserve.deadline_s"),
            ({"extra_body": {"min_p": 2}}, "min_p"), ({"model": ""}, "model"),
            ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
            ({"messages": [CALLS_WITHOUT_JSON]}, "messages[0].tool_calls"), ({"prompt": ["a"] * 65, "n": 2}, "prompt"),
            ({"prompt": []}, "prompt"), ({"prompt": ""}, "prompt"), ({"prompt": "x", "echo": 1}, "echo"),
            ({"prompt": "x", "best_of": 3}, "best_of"), ({"prompt": "x", "suffix": "x"}, "suffix"),
            ({"prompt": "x", "logprobs": -1}, "logprobs"),
        ],
        ids=lambda value: value if isinstance(value, str) else None,
    )  # fmt: skip
    def test_wrong_field_is_refused_by_name(self, client, desk, given, param):
        ask = partial(client.completions.create, model="llm/code") if "prompt" in given else partial(ask_chat, client)
        with pytest.raises(openai.BadRequestError) as refused:
            ask(**given)
        assert (refused.value.param, refused.value.type) == (param, "invalid_request_error")
        assert param in refused.value.body["message"]
        assert desk.text_orders == []

    def test_text_beyond_the_context_has_the_code_that_programs_shorten_it_by(self, client, desk):
        def refuse(*_):
            raise OrderRefused(Reason.TOO_LONG, "messages: has 9 tokens", field="messages")

        desk.generate = refuse
        with pytest.raises(openai.BadRequestError) as refused:
            ask_chat(client)
        assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "messages")

    def test_refusals_of_the_desk_have_their_http_status(self, client, desk):
        desk.most = 0
        with pytest.raises(openai.RateLimitError, match="texts are under way") as refused:
            ask_chat(client)
        assert refused.value.response.headers["retry-after-ms"] == "250"
        desk.is_stopping = True
        with pytest.raises(openai.InternalServerError) as refused:
            ask_chat(client)
        assert refused.value.status_code == 503
        desk.is_stopping = False
        with pytest.raises(openai.NotFoundError) as refused:
            ask_chat(client, model="gpt-4o")
        assert (refused.value.param, refused.value.code) == ("model", "model_not_found")

    @pytest.mark.parametrize(("stream", "error"), [(False, openai.InternalServerError), (True, openai.APIError)])
    def test_failed_text_is_an_error(self, begun, stream, error):
        asked, text = begun(stream)
        text.write("half an ans")
        text.end(None, OrderRefused(Reason.NOT_NOW, "llm/code: its weights are not there"))
        with pytest.raises(error, match="its weights are not there"):
            asked.result()


class TestCallersThatLeave:
    def test_caller_that_leaves_mid_stream_has_its_text_cancelled(self, client, desk):
        desk.holds = True
        with ask_chat(client, stream=True) as events:
            desk.wait_for(lambda desk: desk.texts)
            desk.texts[0].write("one")
            next(events)
        desk.wait_for(lambda desk: desk.cancelled_texts)
        assert desk.texts == []

    def test_caller_that_leaves_before_the_first_token_has_its_text_cancelled(self, client, desk):
        desk.holds = True
        with pytest.raises(openai.APITimeoutError):
            ask_chat(client.with_options(timeout=httpx2.Timeout(60.0, read=0.2)))
        desk.wait_for(lambda desk: desk.cancelled_texts)
        assert desk.texts == []


def test_token_is_the_clients_api_key(serve_texts, client_of, tmp_path):
    (tmp_path / "token").write_text("s3cret\n")
    address, socket = serve_texts(token={"file": "./token"})
    with pytest.raises(openai.AuthenticationError) as refused:
        ask_chat(client_of(address, "wrong"))
    assert refused.value.code == "invalid_api_key"
    assert ask_chat(client_of(address, "s3cret")).choices[0].message.content == TEXT
    assert ask_chat(client_of(socket, "any")).choices[0].message.content == TEXT, "at a unix socket none is asked"


def streamed(events, name):
    return "".join(getattr(event.choices[0].delta, name, None) or "" for event in events)


@pytest.mark.parametrize(
    ("pieces", "is_thought", "told"),
    [
        (("<th", "ink>\nwhy", " not</th", "ink>", "\n\nyes"), False, ("why not", "yes")),
        (("why not\n</think>", "yes"), True, ("why not\n", "yes")),
        (("<think>why", " </b"), False, ("why </b", "")),
        (("<b>yes", "</think>"), False, ("", "<b>yes</think>")),
        (("\n\n<", "yes"), False, ("", "\n\n<yes")),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_reasoning_of_a_model_is_separated_from_its_answer(begun, pieces, is_thought, told, stream):
    asked, text = begun(stream)
    for piece in pieces:
        text.listener.wrote(Piece("llm/code", piece, is_thought=is_thought))
    text.end()
    if stream:
        events = asked.result()
        assert (streamed(events, "reasoning_content"), streamed(events, "content")) == told
    else:
        message = asked.result().choices[0].message
        assert (getattr(message, "reasoning_content", ""), message.content) == told


def test_form_whose_check_takes_long_holds_up_no_other_text(client, desk, asking):
    generate, checked = desk.generate, threading.Event()

    def check(order, listener):
        assert order.constraint is None or checked.wait(DEADLINE_S)
        return generate(order, listener)

    desk.generate = check
    slow = [asking.submit(ask_chat, client, response_format={"type": "json_object"}) for _ in range(3)]
    assert ask_chat(client).choices[0].message.content == TEXT
    assert not any(each.done() for each in slow)
    checked.set()
    assert [each.result().choices[0].message.content for each in slow] == [TEXT] * 3


CALL = '<tool_call>{"name": "stock", "arguments": {"part": "R17"}}</tool_call>'


@pytest.mark.parametrize(
    ("pieces", "ending", "content", "calls", "reason"),
    [
        (
            ("So: <tool", CALL.removeprefix("<tool"), "\n", CALL),
            Ending.STOP,
            "So:",
            ['{"part": "R17"}'] * 2,
            "tool_calls",
        ),
        ((CALL[:20], CALL[20 : CALL.index("R17")]), Ending.LENGTH, None, ['{"part": "'], "length"),
        (("a <tool_call>b",), Ending.STOP, "a<tool_call>b", [], "stop"),
        ((CALL.replace("stock", "other"),), Ending.STOP, CALL.replace("stock", "other"), [], "stop"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_calls_in_a_text_are_separated_from_its_content(begun, pieces, ending, content, calls, reason, stream):
    asked, text = begun(stream, tools=[STOCK])
    for piece in pieces:
        text.listener.wrote(Piece("llm/code", piece, calls=HERMES))
    text.end(ending)
    if stream:
        choices = [event.choices[0] for event in asked.result()]
        parts = [part for choice in choices for part in choice.delta.tool_calls or ()]
        found = [part for part in parts if part.id]
        told = ["".join(part.function.arguments for part in parts if part.index == n) for n in range(len(found))]
        said = "".join(choice.delta.content or "" for choice in choices) or None
    else:
        choices = asked.result().choices
        found = choices[0].message.tool_calls or []
        told, said = [call.function.arguments for call in found], choices[0].message.content
    assert (said, told, choices[-1].finish_reason) == (content, calls, reason)
    assert {(call.type, call.function.name) for call in found} <= {("function", "stock")}
    assert all(len(call.id) == 9 and call.id.isalnum() for call in found), "Mistral's templates take no others"
    assert len({call.id for call in found}) == len(found)


@pytest.mark.parametrize(
    ("choice", "names", "is_bound"),
    [("auto", ["stock", "order"], True), ("required", ["stock", "order"], True), (named("order"), ["order"], True)],
)
def test_tools_reach_the_order_without_strict_as_templates_know_none(client, desk, choice, names, is_bound):
    order = {
        "type": "function",
        "function": {"name": "order", "parameters": {"properties": {"n": {"type": "integer"}}}},
    }
    ask_chat(client, tools=[STOCK, order], tool_choice=choice, parallel_tool_calls=False)
    use = desk.text_orders[0].tools
    shown = {"type": "function", "function": {"name": "stock", "description": "Of a part."}}
    assert ([tool.function for tool in use.tools], use.several) == ([shown, order], False)
    assert ([tool.name for tool in use.callable], use.is_bound) == (names, is_bound)
    ask_chat(client, tools=[STOCK], tool_choice="none")
    assert desk.text_orders[1].tools is None


def test_messages_with_tool_calls_are_accepted(client, desk):
    call = {"id": "c1", "type": "function", "function": {"name": "stock", "arguments": '{"part": "R17"}'}}
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "12"}]},
        {"role": "assistant", "content": "12", "tool_calls": None, "function_call": None, "audio": None},
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "text", "text": each} for each in ("one ", "two")], "name": "me"},
    ]
    ask_chat(client, messages=messages)
    called = {"id": "c1", "type": "function", "function": {"name": "stock", "arguments": {"part": "R17"}}}
    assert desk.text_orders[0].messages == (
        *USER,
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c1", "content": "12"},
        {"role": "assistant", "content": "12"},
        {"role": "system", "content": "d"},
        {"role": "user", "content": "one two", "name": "me"},
    )
