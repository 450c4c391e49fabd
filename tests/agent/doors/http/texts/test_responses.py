"""OpenAI's client asks for responses: what reaches the desk, and what comes back of reasoning, words and calls."""

import openai
import pytest

from agent.faults.errors import OrderRefused, Reason
from experts.llm.serving.generation import Ending, Piece
from experts.llm.text.tool_calls import HERMES
from tests.agent.doors.fake_desk import PROSE

TEXT = "".join(PROSE)
STOCK = {"type": "function", "name": "stock", "parameters": {"type": "object", "properties": {}}}
CALL = '<tool_call>{"name": "stock", "arguments": {"part": "R17"}}</tool_call>'
PIECES = ("<think>why", "</think>So: ", CALL[:30], CALL[30:], CALL)
KINDS = ("reasoning", "message", "function_call", "function_call")


def respond(client, **given):
    return client.responses.create(**{"model": "llm/code", "input": "hello"} | given)


@pytest.fixture
def written(client, desk, asking):
    """The response to these pieces: whole, or a stream's events and the response that its client made of them."""

    def write(*, stream, ending=Ending.STOP, failure=None):
        def read():
            if not stream:
                return (), respond(client, tools=[STOCK])
            with client.responses.stream(model="llm/code", input="hello", tools=[STOCK]) as opened:
                events = list(opened)
            return events, events[-1].response

        desk.holds = True
        asked = asking.submit(read)
        desk.wait_for(lambda desk: desk.texts)
        (text,) = desk.texts
        for piece in PIECES:
            text.listener.wrote(Piece("llm/code", piece, calls=HERMES))
        text.end(ending, failure)
        return asked.result()

    return write


def test_words_of_a_text_are_a_message(client, desk):
    answer = respond(client, instructions="be brief", temperature=0.5, max_output_tokens=9)
    assert (answer.output_text, answer.status, answer.model, answer.id[:5]) == (TEXT, "completed", "llm/code", "resp_")
    assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens) == (7, 4, 11)
    assert (answer.instructions, answer.temperature, answer.store) == ("be brief", 0.5, False)
    (order,) = desk.text_orders
    said = ({"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"})
    assert (order.messages, order.most_tokens, order.sampling.temperature) == (said, 9, 0.5)


@pytest.mark.parametrize("stream", [True, False])
def test_items_are_reasoning_then_words_then_calls(written, stream):
    events, answer = written(stream=stream)
    reasoning, message, *calls = answer.output
    assert tuple(item.type for item in answer.output) == KINDS
    assert (reasoning.content[0].text, message.content[0].text) == ("why", "So:")
    assert [(call.name, call.arguments) for call in calls] == [("stock", '{"part": "R17"}')] * 2
    assert {item.status for item in answer.output} == {"completed"}
    assert len({call.call_id for call in calls}) == 2
    if stream:
        kinds = [event.type.removeprefix("response.") for event in events]
        assert kinds[:2] == ["created", "in_progress"]
        assert kinds.count("output_item.added") == kinds.count("output_item.done") == len(KINDS)
        assert kinds.count("content_part.added") == kinds.count("content_part.done") == 2
        assert [event.sequence_number for event in events] == list(range(len(events)))


@pytest.mark.parametrize("stream", [True, False])
def test_response_cut_by_its_length_is_incomplete(written, stream):
    _, answer = written(stream=stream, ending=Ending.LENGTH)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert [item.status for item in answer.output] == ["completed"] * 3 + ["incomplete"]


def test_response_that_fails_in_its_stream_ends_with_the_reason(written):
    _, answer = written(stream=True, ending=None, failure=OrderRefused(Reason.NOT_NOW, "its weights are not there"))
    assert (answer.status, answer.error.message) == ("failed", "its weights are not there")


def test_items_of_an_answer_come_back_as_what_they_were(client, desk, written):
    _, answer = written(stream=False)
    desk.holds = False
    shown = {name: value for name, value in STOCK.items() if name != "type"}
    assert desk.text_orders[0].tools.tools[0].function == {"type": "function", "function": shown}
    said = [{"role": "developer", "content": [{"type": "input_text", "text": "brief"}]}, *answer.output]
    said += [{"type": "function_call_output", "call_id": "c", "output": "12"}, {"role": "user", "content": "and?"}]
    respond(client, input=said)
    called = {"name": "stock", "arguments": {"part": "R17"}}
    calls = [{"type": "function", "function": called, "id": item.call_id} for item in answer.output[2:]]
    assert desk.text_orders[-1].messages == (
        {"role": "system", "content": "brief"},
        {"role": "assistant", "content": "So:", "reasoning_content": "why", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c", "content": "12"},
        {"role": "user", "content": "and?"},
    )


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"store": True}, "store"), ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"), ({"reasoning": {"effort": "low"}}, "reasoning"), ({"input": []}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"), ({"input": [{"type": "item_reference"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]}, "input[0].arguments"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"), ({"tools": [STOCK, STOCK]}, "tools[1].name"),
        ({"tools": [STOCK], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice.name"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"), ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"max_output_tokens": 0}, "max_output_tokens"), ({"extra_body": {"n": 2}}, "n"),
        ({"extra_body": {"max_tokens": 2}}, "max_tokens"), ({"extra_body": {"colour": 2}}, "colour"),
    ],
)  # fmt: skip
def test_wrong_field_of_a_response_is_refused_by_its_path(client, desk, given, param):
    with pytest.raises(openai.BadRequestError) as refused:
        respond(client, **given)
    assert (refused.value.param, desk.text_orders) == (param, [])
    assert refused.value.body["message"].startswith(f"{param}: ")
