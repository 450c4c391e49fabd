"""The oracle: the tokenizers of transformers, made of the same files, read and write as ours do."""

import json

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from experts.llm.text.tokenizer import TextModel
from tests.experts.llm.text.conftest import text_files

MESSAGES = (
    {"role": "system", "content": "  Be brief. "},
    {"role": "user", "content": "the quick 你好 <b>&amp;</b>"},
    {"role": "assistant", "content": "fox"},
    {"role": "user", "content": "and 🙂\n\nthen?"},
)
TEMPLATES = {
    "marks": """
{%- for message in messages %}
    {{- '<|' + message['role'] + '|>\\n' + message['content'] | trim + eos_token + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>\\n' }}
{%- endif %}
""",
    "system apart": """
{% set ns = namespace(system='') %}
{% for message in messages if message.role == 'system' %}
    {% set ns.system = ns.system ~ message.content.strip() %}
{% endfor %}
{{ bos_token }}[{{ ns.system }}]
{% for message in messages | rejectattr('role', 'equalto', 'system') %}
{% if loop.index0 % 2 != (0 if message.role == 'user' else 1) %}{{ raise_exception('turns') }}{% endif %}
{{ loop.index }}/{{ loop.length }} {{ message.role | upper }}: {{ message.content }}
{%- if not loop.last %}{{ eos_token }}{% endif %}

{% endfor %}
""",
    "as JSON": "{{ messages | tojson(indent=2) }}{% generation %}{{ messages | length }}{% endgeneration %}",
}


SPECIAL = {
    "byte level": {"bos_token": "<|user|>", "eos_token": "<|end|>"},
    "like SentencePiece": {"bos_token": "<s>", "eos_token": "</s>"},
}


@pytest.fixture(scope="module", params=SPECIAL)
def both(request, tokenizers):
    """Ours, and theirs, which adds to the tokenizer that it is given."""
    tokenizer, special = tokenizers[request.param], SPECIAL[request.param]
    copied = Tokenizer.from_str(tokenizer.to_str())
    theirs = PreTrainedTokenizerFast(tokenizer_object=copied, clean_up_tokenization_spaces=False, **special)
    return text_files(tokenizer, settings=special), theirs


@pytest.mark.parametrize("template", TEMPLATES)
def test_chat_gives_the_text_and_tokens_of_transformers(both, template):
    files, theirs = both
    settings = json.loads(files["tokenizer_config.json"]) | {"chat_template": TEMPLATES[template]}
    ours = TextModel.of(files | {"tokenizer_config.json": json.dumps(settings).encode()}, "llm/a")
    given = {"chat_template": TEMPLATES[template], "add_generation_prompt": True}
    text = theirs.apply_chat_template(list(MESSAGES), tokenize=False, **given)
    assert ours.chat.render(MESSAGES) == text
    tokens = theirs(text, add_special_tokens=False)["input_ids"]
    assert list(ours.encode(text, adds_special=False)) == tokens
    assert ours.decode(tokens) == theirs.decode(tokens, skip_special_tokens=True)
