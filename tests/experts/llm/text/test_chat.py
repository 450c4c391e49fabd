"""Chat templates: what they may use, and that none of them harms whoever renders it."""

import pytest

from experts.errors import PromptInvalid, TokenizerUnusable
from experts.llm.text.bounded_sandbox import MOST_CHARACTERS, RENDER_S
from experts.llm.text.tokenizer import ChatTemplate

USER = {"role": "user", "content": " hello "}


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
def test_what_templates_use_is_there(source, text):
    assert rendered(source, bos_token="<s>") == text


def test_messages_that_a_template_refuses_are_the_callers():
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
def test_a_template_that_is_broken_is_told_with_its_file(source):
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
def test_a_template_has_no_way_to_the_program(source):
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
def test_a_template_that_would_never_end_or_fill_the_memory_is_told(source):
    with pytest.raises(TokenizerUnusable, match=r"too long|more than|left out"):
        rendered(source, render_s=0.2)


def test_a_long_chat_is_no_mistake():
    text = "word " * (MOST_CHARACTERS // 10)
    messages = [{"role": "user", "content": text}]
    template = "{% for m in messages %}{{ '<u>' ~ m.content + '</u>' }}{% endfor %}"
    assert rendered(template, *messages) == f"<u>{text}</u>"
