"""A model's tokenizer files and chat templates: what is read, what is refused, and that a template harms nothing."""

import json
import threading

import pytest
from tokenizers import processors

from experts.errors import PromptInvalid, TokenizerUnusable
from experts.llm.text.bounded_sandbox import MOST_CHARACTERS, RENDER_S
from experts.llm.text.tokenizer import ChatTemplate, TextModel
from tests.experts.llm.text.conftest import CHAT, byte_level, text_files

USER = {"role": "user", "content": " hello "}


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


def test_special_tokens_are_added_to_prompts_but_not_to_chats():
    tokenizer = byte_level()
    begin = tokenizer.token_to_id("<|user|>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<|user|> $A", special_tokens=[("<|user|>", begin)])
    made = model(tokenizer, settings={"chat_template": CHAT})
    assert made.prompt_of("fox")[0] == begin
    chat = made.chat_prompt_of([{"role": "user", "content": "fox"}])
    assert (list(chat).count(begin), made.decode(chat)) == (1, "fox<|assistant|>")


def test_template_file_precedes_the_settings_and_default_other_templates(byte_level_tokenizer):
    several = [{"name": "tools", "template": "T"}, {"name": "default", "template": "D"}]
    assert model(byte_level_tokenizer, settings={"chat_template": several}).chat.render([]) == "D"
    own = {"chat_template.jinja": "F"}
    assert model(byte_level_tokenizer, settings={"chat_template": several}, **own).chat.render([]) == "F"


@pytest.mark.parametrize("file", ["added_tokens.json", "tokenizer_config.json"])
def test_tokens_that_a_directory_adds_are_read_and_a_wrong_number_is_refused(byte_level_tokenizer, file):
    first = byte_level_tokenizer.get_vocab_size()

    def read(number):
        added = {"added_tokens.json": json.dumps({"<call>": number})}
        if file != "added_tokens.json":
            decoder = {str(number): {"content": "<call>", "special": True}}
            added = {file: json.dumps({"eos_token": "<|end|>", "added_tokens_decoder": decoder})}
        return TextModel.of(text_files(byte_level_tokenizer) | {n: t.encode() for n, t in added.items()}, "llm/a")

    assert read(first).encode("<call>") == (first,)
    with pytest.raises(TokenizerUnusable, match=f"would become token {first} and not {first + 5}"):
        read(first + 5)


def test_special_tokens_map_serves_where_the_settings_have_none(byte_level_tokenizer):
    files = text_files(byte_level_tokenizer, settings={"eos_token": None})
    settings = {"chat_template": "{{ bos_token }}"}
    files["tokenizer_config.json"] = json.dumps(settings).encode()
    files["special_tokens_map.json"] = b'{"bos_token": {"content": "<|user|>"}, "eos_token": "<|end|>"}'
    read = TextModel.of(files, "llm/a")
    assert read.stop_tokens == {byte_level_tokenizer.token_to_id("<|end|>")}
    assert read.chat.render([]) == "<|user|>"


def test_template_that_tests_for_tools_finds_none(byte_level_tokenizer):
    source = "{% if tools is not none or documents is not none %}T{% else %}none{% endif %}"
    assert model(byte_level_tokenizer, settings={"chat_template": source}).chat.render([]) == "none"


@pytest.mark.parametrize(
    ("scaling", "context"), [({"type": "yarn", "factor": 4.0}, 256), ({"type": "linear", "factor": 4.0}, 64)]
)
def test_factor_of_yarn_extends_the_context(byte_level_tokenizer, scaling, context):
    assert model(byte_level_tokenizer, config={"rope_scaling": scaling}).context_tokens == context


@pytest.mark.parametrize("tokens", [64, 1000])
def test_prompt_has_tokens_of_the_model_and_leaves_room_for_one(byte_level_tokenizer, tokens):
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
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"x": 1}}', "added tokens that cannot be read"),
        ("config.json", b"{}", "max_position_embeddings: is missing"),
        ("config.json", b'{"max_position_embeddings": 0}', "max_position_embeddings: is 0"),
    ],
)
def test_missing_or_broken_tokenizer_file_is_named(byte_level_tokenizer, file, content, why):
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
def test_bytes_of_tokens_are_the_bytes_of_the_text(tokenizers, kind, text):
    made = model(tokenizers[kind])
    spelled = b"".join(made.token_bytes(token) for token in made.encode(text)).decode()
    assert spelled.removeprefix(" " if kind == "like SentencePiece" else "") == text


def test_unknown_token_has_no_bytes(byte_level_tokenizer):
    """Models may know more tokens than their tokenizers, whose number is rounded up."""
    assert model(byte_level_tokenizer).decode([10**6]) == ""
    assert model(byte_level_tokenizer).token_bytes(10**6) == b""
    assert model(byte_level_tokenizer).token_bytes(byte_level_tokenizer.token_to_id("<|end|>")) == b"<|end|>"


def test_prompt_error_names_its_expert(byte_level_tokenizer):
    with pytest.raises(TokenizerUnusable, match=r"llm/a: tokenizer_config.json: .*no chat template.*prompt"):
        model(byte_level_tokenizer).chat_prompt_of([{"role": "user", "content": "fox"}])
    other = model(byte_level_tokenizer, settings={"chat_template": "{{ raise_exception('no') }}"}).named("llm/b")
    with pytest.raises(PromptInvalid, match="llm/b is 64"):
        other.checked((0,) * 100, "prompt")
    with pytest.raises(PromptInvalid, match="chat template of llm/b"):
        other.chat_prompt_of([])


def rendered(source, *messages, render_s=RENDER_S, **special):
    return ChatTemplate("llm/a", "chat_template.jinja", source, special, render_s).render(messages or [USER])


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ messages[0].content | trim }}", "hello"),
        ("{{ messages[0]['role'] + ':' }}{% if add_generation_prompt %}>{% endif %}", "user:>"),
        ("{% for m in messages %}\n  {%- if loop.first %}first{% endif -%}\n{% endfor %}", "first"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
        ("{% macro role(m) %}<{{ m.role }}>{% endmacro %}{{ role(messages[0]) }}", "<user>"),
        ("{{ {'a': 'é<'} | tojson }}", '{"a": "é<"}'),
        ("{{ 'x' ~ 1 ~ none }}", "x1None"),
        ("{% for i in range(5) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "012"),
        ("{% generation %}{{ messages | length }}{% endgeneration %}", "1"),
        ("{{ messages | map(attribute='role') | join(',') }}", "user"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1"),
        ("{{ messages[0].content.strip().split('l')[0] }}", "he"),
        ("{{ '%s!' % 'a' }}{{ 'ab' * 2 }}{{ 'a'.replace('a', 'b') }}", "a!ababb"),
        ("{{ bos_token }}{{ missing }}{% if missing is defined %}no{% endif %}", "<s>"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ 'a\\nb' | indent(2) }}|{{ [1, {'a': 2}] | tojson(indent=1) | length }}", "a\n  b|22"),
        ("{{ ['a', 'b'] | join(', ') }}{{ '-'.join(['c', 'd']) }}", "a, bc-d"),
        ("{{ 'x'.center(3) }}{{ '%5.1f' % 2 }}{{ '{:>4}'.format('y') }}", " x   2.0   y"),
        ("{{ messages[::-1][0].role }}{{ 7 // 2 }}{{ 7 % 4 }}", "user33"),
        ("{% for n in [3] recursive %}{{ n }}{{ loop([n - 1]) if n }}{% endfor %}", "3210"),
        ("{% if true %}\nA\n  {% endif %}\nB", "A\nB"),
    ],
)  # fmt: skip
def test_features_that_templates_use_are_supported(source, text):
    assert rendered(source, bos_token="<s>") == text


def test_messages_that_a_template_refuses_are_the_callers_error():
    with pytest.raises(PromptInvalid, match="messages: the chat template of llm/a refuses them: roles must alternate"):
        rendered("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{% for %}", "{{ messages[0].content.nothing.more }}", "{{ 1 / 0 }}", "{{ 'a' + 1 }}", "{{ unheard_of() }}",
        "{{ messages | unheard_of }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{% include 'other' %}",
        "{% import 'os' as os %}",
    ],
)  # fmt: skip
def test_broken_template_is_reported_with_its_file(source):
    with pytest.raises(TokenizerUnusable, match=r"llm/a: chat_template.jinja: the chat template fails"):
        rendered(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}", "{{ messages.append({}) }}", "{{ messages[0].update(role='system') }}",
        "{{ raise_exception.__globals__ }}", "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.system('id') }}", "{{ '{0.__class__}'.format(messages) }}",
        "{{ messages | map(attribute='__class__') | list }}", "{{ lipsum(n=100000) }}",
    ],
)  # fmt: skip
def test_template_has_no_access_to_the_program(source):
    try:
        text = rendered(source)
    except TokenizerUnusable:
        return
    assert "class" not in text
    assert text in {"", "[Undefined]", "[]"}


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{{ 'x' * 10**10 }}",
        "{{ 10**10 * 'x' }}",
        "{{ [1] * 10**10 }}",
        "{{ 9 ** 9 ** 9 ** 9 ** 9 ** 9 }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ '%*d' % (10000000000, 1) }}",
        "{{ '{:>10000000000}'.format(1) }}",
        "{{ '%10000000000d' | format(1) }}",
        "{{ 'x'.ljust(10000000000) }}",
        "{{ 'x' | center(10000000000) }}",
        "{{ 'x' | indent(10000000000, true) }}",
        "{{ [1] | tojson(indent=10000000000) }}",
        "{{ strftime_now('%10000000000Y') }}",
        "{% set ns = namespace(t='x') %}{% for i in range(60) %}{% set ns.t = ns.t ~ ns.t %}{% endfor %}",
        "{% set ns = namespace(t='x') %}{% for i in range(60) %}{% set ns.t = ns.t + ns.t %}{% endfor %}",
        "{% set ns = namespace(t='x') %}{% for i in range(60) %}{% set ns.t = ns.t.replace('x', 'xxxx') %}{% endfor %}",
        "{% set ns = namespace(t='x') %}{% for i in range(60) %}{% set ns.t = ns.t | replace('x', 'xx') %}{% endfor %}",
        "{% set ns = namespace(t=[1]) %}{% for i in range(60) %}{% set ns.t = [ns.t, ns.t] %}{% endfor %}{{ ns.t }}",
        "{% set ns = namespace(t=[1]) %}{% for i in range(60) %}{% set ns.t = [ns.t, ns.t] %}{% endfor %}"
        "{{ ns.t | tojson }}",
        "{% set ns = namespace(t=[1]) %}{% for i in range(60) %}{% set ns.t = [ns.t, ns.t] %}{% endfor %}{{ ns }}",
        "{% set t = 'x' * 900000 %}{{ t.join([''] * 1000000) }}",
        "{% set t = 'x' * 900000 %}{{ ([''] * 1000000) | join(t) }}",
        "{% set t = 'x' * 900000 %}{{ t.join(t) }}",
        "{% set t = 'x' * 900000 %}{{ range(99999) | map('string') | join(t) }}",
        "{% set t = 'x' * 900000 %}{{ t.join(range(99999) | map('string')) }}",
        "{% set t = 'x' * 900000 %}{{ t }}{{ t }}",
        "{% set t = 'x' * 900000 %}{{ '%s' * 1000 % ((t,) * 1000) }}",
        "{% set t = 'x' * 900000 %}{{ ('%(a)s' * 10000) % {'a': t} }}",
        "{% set t = 'x' * 900000 %}{{ ('{a}' * 10000).format(a=t) }}",
        "{{ '{:>{w}}'.format_map({'': 1, 'w': 10000000000}) }}",
        "{{ ('\\t' * 900000).expandtabs(10000) }}",
        "{{ ('\\n' * 900000) | indent(10000) }}",
        "{{ ('x\\n' * 400000) | indent('y' * 10000) }}",
        "{{ ([1] * 900000) | tojson(indent=10000) }}",
        "{{ (1).to_bytes(10000000000, 'big') }}",
        "{% set t = 'x' * 900000 %}{{ t.translate({120: t}) }}",
        "{{ range(99999) | map('center', 10000) | list | length }}",
        "{% set ns = namespace(l=[]) %}{% for i in range(99999) %}{% set ns.l = [ns.l, 'x'.ljust(9999)] %}{% endfor %}",
        "{% set ns = namespace(l=[]) %}{% for i in range(99999) %}{% set ns.l = ns.l + ['x' * 9999] %}{% endfor %}",
    ],
)
def test_endless_or_memory_filling_template_is_refused(source):
    with pytest.raises(TokenizerUnusable, match=r"too long|more than|left out"):
        rendered(source, render_s=0.2)


def test_long_chat_is_accepted():
    text = "word " * (MOST_CHARACTERS // 10)
    messages = [{"role": "user", "content": text}]
    template = "{% for m in messages %}{{ '<u>' ~ m.content + '</u>' }}{% endfor %}"
    assert rendered(template, *messages) == f"<u>{text}</u>"


def test_other_threads_run_while_a_long_text_is_tokenised(byte_level_tokenizer):
    words, turns, is_over = model(byte_level_tokenizer), [0], threading.Event()

    def turn():
        while not is_over.is_set():
            turns[0] += 1

    other = threading.Thread(target=turn, daemon=True)
    other.start()
    before = turns[0]
    words.encode(" ".join(f"word{number}" for number in range(50_000)))
    during = turns[0] - before
    is_over.set()
    other.join()
    assert during > 1000
