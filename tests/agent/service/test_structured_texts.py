"""Structured answers of a served line, asked by OpenAI's client: the model's weights are random, its grammar is not."""

import json
import re
import shutil
from typing import Literal

import openai
import pytest
from pydantic import BaseModel, Field
from safetensors.torch import save_file
from tokenizers import AddedToken

from tests.agent.service.fake_line import FakeLine
from tests.agent.service.language_models import config_of, random_tensors, with_models
from tests.experts.llm.text.conftest import byte_level

CHAT = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}<tool_call>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}<|assistant|>"
)
USER = [{"role": "user", "content": "the quick fox"}]


class Part(BaseModel):
    name: str = Field(max_length=6)
    side: Literal["top", "bottom"]
    pins: list[bool] = Field(max_length=3)


class GetStock(BaseModel):
    """Pieces of a part in stock."""

    part: Literal["R17", "C3"]


class Order(BaseModel):
    pieces: Literal[1, 2]


STOCK = openai.pydantic_function_tool(GetStock, name="get_stock")
ORDER = openai.pydantic_function_tool(Order, name="order")
BROKEN = {"type": "function", "function": {"name": "x", "parameters": {"properties": {"y": {"type": 1}}}}}


@pytest.fixture(scope="module")
def client(tmp_path_factory, models):
    """Of a line with a writer whose template has tools, and one whose template has none."""
    folder = tmp_path_factory.mktemp("tools")
    shutil.copytree(models / "code", folder / "writer")
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("<tool_call>"), AddedToken("</tool_call>")])
    config = config_of(tokenizer) | {"max_position_embeddings": 1024}
    (folder / "writer" / "config.json").write_text(json.dumps(config), "utf-8")
    (folder / "writer" / "tokenizer.json").write_text(tokenizer.to_str(), "utf-8")
    save_file(random_tensors(config, 5), folder / "writer" / "model.safetensors")
    settings = {"eos_token": "<|end|>", "chat_template": CHAT}
    (folder / "writer" / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    line = with_models(FakeLine(tmp_path_factory.mktemp("line")), models)
    line.document["experts"]["llm/writer"] = {"architecture": "llm", "weights": str(folder / "writer")}
    line.document["api"] = {"grpc": [], "http": ["127.0.0.1:0"]}
    with line.served() as service:
        url = f"http://{service.web.addresses[0]}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            yield client


def ask(client, **given):
    return client.chat.completions.create(**{"model": "llm/writer", "messages": USER, "seed": 3} | given)


def outputs(client, **wanted):
    found = client.completions.create(
        model="llm/writer", prompt="x", max_tokens=900, seed=6, extra_body={"structured_outputs": wanted}
    )
    return found.choices[0].text.strip(" "), found.choices[0].finish_reason


@pytest.mark.parametrize("temperature", [0, 1, 2])
def test_answer_in_the_form_of_a_class_is_parsed_by_openai_client(client, temperature):
    answer = client.chat.completions.parse(
        model="llm/writer", messages=USER, response_format=Part, temperature=temperature, seed=1
    )
    assert isinstance(answer.choices[0].message.parsed, Part)
    assert answer.choices[0].finish_reason == "stop"


def test_answer_in_the_form_of_a_class_is_streamed(client):
    with client.chat.completions.stream(model="llm/writer", messages=USER, response_format=Part, seed=2) as stream:
        kinds = {event.type for event in stream}
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Part)
    assert {"content.delta", "content.done"} <= kinds


def test_json_object_is_one_though_cut_by_the_greatest_length(client):
    answer = ask(client, response_format={"type": "json_object"}, max_tokens=300).choices[0]
    assert answer.message.content.startswith("{")
    if answer.finish_reason == "stop":
        assert isinstance(json.loads(answer.message.content), dict)


def test_completion_has_the_form_of_structured_outputs(client):
    assert outputs(client, choice=["good", "bad"]) in {("good", "stop"), ("bad", "stop")}
    text, reason = outputs(client, regex=r"[A-C]{2}-\d{3}")
    assert (bool(re.fullmatch(r"[A-C]{2}-\d{3}", text)), reason) == (True, "stop")
    text, reason = outputs(client, json=Part.model_json_schema())
    assert (isinstance(Part.model_validate_json(text), Part), reason) == (True, "stop")
    assert re.fullmatch("a[0-9]{2}", outputs(client, grammar='start: "a" /[0-9]{2}/')[0])


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "order"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_demanded_call_has_arguments_of_its_schema(client, choice, stream):
    asked = {"model": "llm/writer", "messages": USER, "tools": [STOCK, ORDER], "tool_choice": choice, "seed": 4}
    asked |= {"parallel_tool_calls": False}
    if stream:
        with client.chat.completions.stream(**asked) as events:
            done = [event.name for event in events if event.type == "tool_calls.function.arguments.done"]
            answer = events.get_final_completion().choices[0]
        assert done == [call.function.name for call in answer.message.tool_calls]
    else:
        answer = client.chat.completions.parse(**asked).choices[0]
    (call,) = answer.message.tool_calls
    assert (answer.finish_reason, answer.message.content or None) == ("tool_calls", None)
    assert isinstance(call.function.parsed_arguments, GetStock | Order)
    assert choice == "required" or call.function.name == "order"


def test_conversation_goes_on_after_the_answer_of_a_tool(client):
    first = ask(client, tools=[ORDER], tool_choice="required", parallel_tool_calls=False).choices[0].message
    messages = [*USER, first, {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "done"}]
    answer = ask(client, messages=messages, tools=[ORDER], max_tokens=8)
    alone = ask(client, messages=messages[:1], tools=[ORDER], max_tokens=8)
    assert answer.usage.prompt_tokens > alone.usage.prompt_tokens + len("done")
    without = ask(client, messages=messages[:1], tools=[ORDER], tool_choice="none", max_tokens=8)
    assert without.usage.prompt_tokens < alone.usage.prompt_tokens, "the template gets no tools"


def test_response_in_the_form_of_a_class_is_parsed_streamed_or_not(client):
    asked = {"model": "llm/writer", "input": "the quick fox", "text_format": Part, "extra_body": {"seed": 2}}
    answer = client.responses.parse(**asked)
    assert (answer.status, isinstance(answer.output_parsed, Part)) == ("completed", True)
    with client.responses.stream(**asked) as events:
        kinds = {event.type for event in events}
        assert events.get_final_response().output_parsed == answer.output_parsed
    assert {"response.created", "response.output_text.delta", "response.completed"} <= kinds


def test_conversation_of_responses_goes_on_after_the_answer_of_a_tool(client):
    tools = [openai.pydantic_function_tool(each)["function"] | {"type": "function"} for each in (Order, GetStock)]
    asked = {"model": "llm/writer", "tools": tools, "store": False, "parallel_tool_calls": False}
    said = [{"role": "user", "content": "the quick fox"}]
    first = client.responses.create(**asked, input=said, tool_choice={"type": "function", "name": tools[0]["name"]})
    (call,) = first.output
    assert (call.type, Order.model_validate_json(call.arguments).pieces in {1, 2}) == ("function_call", True)
    with client.responses.stream(**asked, input=said, tool_choice="required") as events:
        (streamed,) = events.get_final_response().output
    assert streamed.name in {"Order", "GetStock"}
    said += [*first.output, {"type": "function_call_output", "call_id": call.call_id, "output": "done"}]
    second = client.responses.create(**asked, input=said, max_output_tokens=8)
    assert second.usage.input_tokens > first.usage.input_tokens + len("done")


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objec"}}}},
         "response_format.json_schema.schema"),
        ({"extra_body": {"structured_outputs": {"regex": "a("}}}, "structured_outputs.regex"),
        ({"tools": [ORDER, BROKEN], "tool_choice": "required"}, "tools[1].function.parameters"),
        ({"model": "llm/code", "tools": [ORDER]}, "tools"),
        ({"model": "llm/router", "response_format": {"type": "json_object"}}, "response_format"),
        ({"model": "helpdesk", "extra_body": {"structured_outputs": {"regex": "a("}}}, "structured_outputs.regex"),
    ],
)  # fmt: skip
def test_form_that_cannot_be_served_is_refused_with_its_path(client, given, param):
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, **given)
    assert (refused.value.param, refused.value.type) == (param, "invalid_request_error")


def test_form_of_a_response_that_cannot_be_served_is_refused_with_its_own_path(client):
    form = {"type": "json_schema", "name": "x", "schema": {"type": "objec"}}
    tool = {**BROKEN["function"], "type": "function"}
    for given, path in (({"text": {"format": form}}, "text.format.schema"),
                        ({"tools": [tool], "tool_choice": "required"}, "tools[0].parameters")):  # fmt: skip
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(model="llm/writer", input="x", **given)
        assert (refused.value.param, refused.value.body["message"].partition(":")[0]) == (path, path)


def test_route_whose_router_decides_keeps_the_form_of_the_answer(client):
    answer = ask(client, model="helpdesk", extra_body={"structured_outputs": {"choice": ["good", "bad"]}})
    assert answer.model in {"llm/code", "llm/maths"}
    assert answer.choices[0].message.content.strip() in {"good", "bad"}
