"""Tool calls: read from any pieces of a text alike, and demanded of a random model in each style."""

import json
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from experts.errors import PromptInvalid
from experts.llm.serving.generation import Sampling
from experts.llm.serving.sampling import Sampler, sample
from experts.llm.text.constraints import Constraint
from experts.llm.text.tokenizer import TextModel
from experts.llm.text.tool_calls import HERMES, LLAMA, MISTRAL, CallReader, Tool, ToolUse, style_of
from tests.experts.llm.text.conftest import byte_level, text_files

TEMPLATES = {
    "Hermes": "{% for tool in tools %}{{ tool | tojson }}{% endfor %}<tool_call>{{ messages }}",
    "Mistral": "{{ tools }}[AVAILABLE_TOOLS] [TOOL_CALLS]{{ messages }}",
    "Llama": '{{ tools }}respond with {"name": function name, "parameters": dictionary}{{ messages }}',
}
STYLES = {"Hermes": HERMES, "Mistral": MISTRAL, "Llama": LLAMA}
MARKS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>")
CITY = {"properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"], "additionalProperties": False}
CLOSED = {"properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}


def tool(name, schema, place, **options):
    return Tool(name, {}, Constraint.of_json(f"tools[{place}]", {"type": "object"} | schema), **options)


TOOLS = (tool("weather", CITY, 0), tool("count", CLOSED, 1))
STRICT = (tool("weather", CITY, 0, is_strict=True), tool("count", CLOSED, 1))


def read(style, pieces, names=("weather", "count")):
    """Content and calls of a text in pieces."""
    reader = CallReader(style, names)
    parts = [part for piece in pieces for part in reader.add(piece)] + reader.add("", is_last=True)
    calls = {}
    for part in parts:
        if not isinstance(part, str):
            name, arguments = calls.get(part.number, ("", ""))
            calls[part.number] = name + (part.name or ""), arguments + part.arguments
    return "".join(part for part in parts if isinstance(part, str)), list(calls.values())


ROME = '{"name": "weather", "arguments": {"city": "Rome"}}'
TWO = '{"name": "count", "arguments": {"n": [1, {"a": "}\\"]"}]}}'
TEXTS = [
    (HERMES, f"<tool_call>\n{ROME}\n</tool_call>", ("", [("weather", '{"city": "Rome"}')])),
    (HERMES, f"Well. \n<tool_call>{TWO}</tool_call>\n<tool_call>{ROME}</tool_call>\n",
     ("Well.", [("count", '{"n": [1, {"a": "}\\"]"}]}'), ("weather", '{"city": "Rome"}')])),
    (HERMES, '<tool_call>{"arguments": {"n": 1}, "name": "count"}</tool_call> So.', ("So.", [("count", '{"n": 1}')])),
    (HERMES, '<tool_call>{"name": "count", "arguments": "{\\"n\\": 1}"}</tool_call>', ("", [("count", '{"n": 1}')])),
    (HERMES, '<tool_call>{"name": "count"}</tool_call>', ("", [("count", "{}")])),
    (HERMES, '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
     ('<tool_call>{"name": "other", "arguments": {}}</tool_call>', [])),
    (HERMES, "a <tool_call>b", ("a<tool_call>b", [])),
    (HERMES, '<tool_call>{"name": "count", "argu', ('<tool_call>{"name": "count", "argu', [])),
    (HERMES, '<tool_call>{"name": "count", "arguments": {"n": "}', ("", [("count", '{"n": "}')])),
    (HERMES, " 3 < 4 <tool", (" 3 < 4 <tool", [])),
    (MISTRAL, f'[TOOL_CALLS] [{ROME}, {{"name": "count", "arguments": {{}}, "id": "abcdefghi"}}]',
     ("", [("weather", '{"city": "Rome"}'), ("count", "{}")])),
    (LLAMA, '{"name": "count", "parameters": {"n": 1}}', ("", [("count", '{"n": 1}')])),
    (LLAMA, '<|python_tag|>{"type": "function", "name": "count", "parameters": {}}; {"name": "weather"}',
     ("", [("count", "{}"), ("weather", "{}")])),
    (LLAMA, '{"answer": 4}, so {"name": "count", "parameters": {}}',
     ('{"answer": 4}, so {"name": "count", "parameters": {}}', [])),
    (LLAMA, 'I say {"name": "count", "parameters": {}}', ('I say {"name": "count", "parameters": {}}', [])),
]  # fmt: skip


@pytest.mark.parametrize(("style", "text", "expected"), TEXTS)
def test_calls_are_read_and_the_rest_is_content(style, text, expected):
    assert read(style, [text]) == expected
    assert read(style, text) == expected, "letter by letter"


@given(st.sampled_from(TEXTS), st.lists(st.integers(0, 120), max_size=8))
def test_calls_do_not_depend_on_the_pieces_of_the_text(text, cuts):
    style, text, expected = text
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    assert read(style, [text[start:end] for start, end in pairwise(places)]) == expected


@given(st.sampled_from([HERMES, MISTRAL, LLAMA]), st.text('<[{tool_cal"name":}]>\\ \n', max_size=60))
def test_text_without_a_known_function_is_content_but_for_blanks(style, text):
    content, calls = read(style, text)
    assert calls == []
    assert "".join(content.split()) == "".join(text.split())


@pytest.mark.parametrize("name", STYLES)
def test_style_is_known_by_the_chat_template(name):
    assert style_of(TEMPLATES[name]) is STYLES[name]
    assert style_of(TEMPLATES[name].replace("tools", "helpers")) is None
    assert style_of(TEMPLATES[name] + "<function=") is None, "of Qwen3-Coder, with the marks of Hermes"


def model_of(name, is_special):
    tokenizer = byte_level()
    for mark in MARKS:
        (tokenizer.add_special_tokens if is_special else tokenizer.add_tokens)([AddedToken(mark, special=is_special)])
    return TextModel.of(text_files(tokenizer, settings={"chat_template": TEMPLATES[name]}), "tiny")


def random_text(model, use, answer=None, seed=0, begun=""):
    """Text that a model of random logits writes; ``begun``: its beginning."""
    style = model.call_style()
    sampler = Sampler(Sampling(seed=seed), (5,), model.grammar(answer, use, (5,)))
    generator = torch.Generator().manual_seed(seed)
    tokens = list(model.encode(begun, adds_special=False))
    for token in tokens:
        assert not sampler.grammar.banned()[token]
        sampler.wrote(token)
    while len(tokens) < 1000 and not sampler.grammar.is_complete:
        (token,) = sample(2 * torch.randn(1, model.tokens, generator=generator), [sampler])
        assert sampler.grammar.fault is None
        if token.id in model.stop_tokens:
            break
        tokens.append(token.id)
        sampler.wrote(token.id)
    return model.decode(tokens, model.marks_of(style))


def check_call(call):
    name, arguments = call
    values = json.loads(arguments)
    assert values in ([{"city": "Rome"}, {"city": "Oslo"}] if name == "weather" else [{"n": 1}, {"n": 2}])


@pytest.mark.parametrize("is_special", [False, True], ids=["plain marks", "special marks"])
@pytest.mark.parametrize("name", STYLES)
def test_demanded_calls_of_a_random_model_are_read_back(name, is_special):
    model = model_of(name, is_special)
    for seed in range(4):
        content, calls = read(STYLES[name], random_text(model, ToolUse(TOOLS, "required"), seed=seed))
        assert (content, len(calls) > 0) == ("", True)
        for call in calls:
            check_call(call)
        content, calls = read(STYLES[name], random_text(model, ToolUse(TOOLS, "count"), seed=seed))
        assert (content, [called for called, _ in calls]) == ("", ["count"])
        content, calls = read(STYLES[name], random_text(model, ToolUse(TOOLS, "required", several=False), seed=seed))
        assert (content, len(calls)) == ("", 1)


@pytest.mark.parametrize("is_special", [False, True], ids=["plain marks", "special marks"])
@pytest.mark.parametrize("name", STYLES)
def test_strict_calls_that_a_random_model_begins_have_their_schema(name, is_special):
    model, begun = model_of(name, is_special), {"Hermes": "So <tool_call>", "Mistral": "So[TOOL_CALLS]", "Llama": "{"}
    for seed in range(4):
        text = random_text(model, ToolUse(STRICT, several=False), seed=seed, begun=begun[name])
        content, calls = read(STYLES[name], text)
        assert (content[:2], len(calls)) == ("" if name == "Llama" else "So", 1)
        check_call(calls[0])


@pytest.mark.parametrize("name", STYLES)
def test_text_beside_strict_tools_keeps_the_form_of_the_answer(name):
    model, answer = model_of(name, is_special=True), Constraint.of_choice("choice", ["yes", "no"])
    for seed in range(6):
        content, calls = read(STYLES[name], random_text(model, ToolUse(STRICT), answer, seed))
        assert content in {"yes", "no"} if not calls else content == ""


def test_tools_of_a_model_without_a_known_style_are_refused():
    model = TextModel.of(text_files(byte_level(), settings={"chat_template": "{{ messages }}"}), "tiny")
    with pytest.raises(PromptInvalid, match="tiny has no chat template with tools") as refused:
        model.call_style()
    assert refused.value.field == "tools"
