"""What is read of a model's tokenizer files, and what is told of those that cannot be used."""

import json

import pytest
from tokenizers import processors

from experts.errors import PromptInvalid, TokenizerUnusable
from experts.llm.text.tokenizer import TextModel
from tests.experts.llm.text.conftest import CHAT, byte_level, text_files


def model(tokenizer, **files):
    return TextModel.of(text_files(tokenizer, **files), "llm/a")


def test_stop_tokens_are_those_of_all_files(byte_level_tokenizer):
    end = byte_level_tokenizer.token_to_id("<|end|>")
    generation = {"generation_config.json": json.dumps({"eos_token_id": [7, 9]})}
    assert model(byte_level_tokenizer).stop_tokens == {end}
    assert model(byte_level_tokenizer, config={"eos_token_id": 5}).stop_tokens == {5, end}
    assert model(byte_level_tokenizer, config={"eos_token_id": 5}, **generation).stop_tokens == {7, 9, end}
    named = {"eos_token": {"content": "<|user|>", "lstrip": False}}
    assert model(byte_level_tokenizer, settings=named).stop_tokens == {byte_level_tokenizer.token_to_id("<|user|>")}
    assert model(byte_level_tokenizer, settings={"eos_token": None}).stop_tokens == frozenset()


def test_what_the_model_wants_around_a_text_is_added_to_prompts_and_not_to_chats():
    tokenizer = byte_level()
    begin = tokenizer.token_to_id("<|user|>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<|user|> $A", special_tokens=[("<|user|>", begin)])
    made = model(tokenizer, settings={"chat_template": CHAT})
    assert made.prompt_of("fox")[0] == begin
    chat = made.chat_prompt_of([{"role": "user", "content": "fox"}])
    assert (list(chat).count(begin), made.decode(chat)) == (1, "fox<|assistant|>")


def test_the_templates_file_stands_before_the_settings_and_default_before_others(byte_level_tokenizer):
    several = [{"name": "tools", "template": "T"}, {"name": "default", "template": "D"}]
    assert model(byte_level_tokenizer, settings={"chat_template": several}).chat.render([]) == "D"
    own = {"chat_template.jinja": "F"}
    assert model(byte_level_tokenizer, settings={"chat_template": several}, **own).chat.render([]) == "F"


@pytest.mark.parametrize("tokens", [64, 1000])
def test_a_prompt_has_tokens_of_the_model_and_leaves_room_for_one(byte_level_tokenizer, tokens):
    made = model(byte_level_tokenizer)
    assert len(made.checked((0,) * 63, "prompt")) == 63
    with pytest.raises(PromptInvalid, match=rf"prompt: has {tokens} tokens.*llm/a is 64") as refused:
        made.checked((0,) * tokens, "prompt")
    assert refused.value.field == "prompt"
    for prompt, why in [((), "prompt: is empty"), ((made.tokens,), "does not know"), ((-1,), "does not know")]:
        with pytest.raises(PromptInvalid, match=why):
            made.checked(prompt, "prompt")


@pytest.mark.parametrize(
    ("file", "content", "why"),
    [
        ("tokenizer.json", None, "is not there: add it"),
        ("config.json", None, "is not there: add it"),
        ("tokenizer.json", b"{", "cannot be read as JSON"),
        ("tokenizer.json", b"[]", "holds no JSON object"),
        ("tokenizer.json", b"{}", "describes no tokenizer"),
        ("tokenizer.json", b"\xff\xfe", "cannot be read as JSON"),
        ("tokenizer_config.json", b"nothing", "cannot be read as JSON"),
        ("generation_config.json", b"[" * 100_000, "cannot be read as JSON"),
        ("config.json", b"{}", "max_position_embeddings: is None"),
        ("config.json", b'{"max_position_embeddings": 0}', "max_position_embeddings: is 0"),
    ],
)
def test_what_a_directory_lacks_is_told_with_the_file(byte_level_tokenizer, file, content, why):
    files = text_files(byte_level_tokenizer)
    if content is None:
        del files[file]
    else:
        files[file] = content
    with pytest.raises(TokenizerUnusable, match=why) as error:
        TextModel.of(files, "llm/a")
    assert (error.value.expert, error.value.file) == ("llm/a", file)


@pytest.mark.parametrize("text", ["the 你好 fox", "🙂"])
@pytest.mark.parametrize("kind", ["byte level", "like SentencePiece"])
def test_the_bytes_of_tokens_are_the_bytes_of_the_text(tokenizers, kind, text):
    made = model(tokenizers[kind])
    spelled = b"".join(made.token_bytes(token) for token in made.encode(text)).decode()
    assert spelled.removeprefix(" " if kind == "like SentencePiece" else "") == text


def test_a_token_that_is_none_has_no_bytes(byte_level_tokenizer):
    """Models may know more tokens than their tokenizers, whose number is rounded up."""
    assert model(byte_level_tokenizer).decode([10**6]) == ""
    assert model(byte_level_tokenizer).token_bytes(10**6) == b""
    assert model(byte_level_tokenizer).token_bytes(byte_level_tokenizer.token_to_id("<|end|>")) == b"<|end|>"


def test_what_cannot_be_is_told_of_the_expert_by_its_name(byte_level_tokenizer):
    with pytest.raises(TokenizerUnusable, match=r"llm/a: tokenizer_config.json: .*no chat template.*prompt"):
        model(byte_level_tokenizer).chat_prompt_of([{"role": "user", "content": "fox"}])
    other = model(byte_level_tokenizer, settings={"chat_template": "{{ raise_exception('no') }}"}).named("llm/b")
    with pytest.raises(PromptInvalid, match="llm/b is 64"):
        other.checked((0,) * 100, "prompt")
    with pytest.raises(PromptInvalid, match="chat template of llm/b"):
        other.chat_prompt_of([])
