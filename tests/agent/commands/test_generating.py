"""`coserve generate`, as it is typed, against a line in memory at real addresses."""

import json

import pytest

from agent.commands.asking import for_terminal
from agent.doors.desk import TextOrder
from experts.errors import OrderRefused, Refusing
from experts.llm.serving.generation import Sampling
from tests.agent.commands.test_asking import coserve
from tests.agent.doors.fake_desk import PROSE

TEXT = "".join(PROSE)


def test_the_text_goes_to_stdout_and_how_it_went_to_stderr(line, desk):
    done = coserve("generate", line, "llm/code", "hello")
    assert done.stdout == f"{TEXT}\n"
    assert done.stderr == "llm/code: 7 tokens read, 4 written in 0.50 s (8.0/s); the model ended the text\n"
    assert desk.text_orders == [TextOrder("llm/code", messages=({"role": "user", "content": "hello"},))]
    assert json.loads(coserve("generate", line, "llm/code", "hello", "--json").stdout) == {
        "text": TEXT, "expert": "llm/code", "ending": "stop", "read_tokens": 7, "written_tokens": 4, "seconds": 0.5,
        "queue_s": 0.125, "first_token_s": 0.25, "label": None, "score": None,
    }  # fmt: skip


def test_all_that_can_be_asked_for_is(line, desk):
    coserve(
        "generate", line, "helpdesk", "once upon", "--continue", "--max-tokens", 9, "--temperature", 0, "--top-p", 0.5,
        "--top-k", 3, "--min-p", 0.25, "--seed", 7, "--stop", "a", "--stop", "b", "--deadline", 60,
    )  # fmt: skip
    coserve("generate", line, "llm/code", "hello", "--system", "be brief")
    first, second = desk.text_orders
    given = frozenset({"temperature", "top_p", "top_k", "min_p", "seed"})
    drawn = Sampling(0.0, 0.5, 3, 0.25, seed=7)
    assert first == TextOrder("helpdesk", "once upon", (), 9, drawn, ("a", "b"), 60.0, given)
    assert second.messages == ({"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"})


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("llm/nobody", "x"), "no model 'llm/nobody'"),
        (("llm/code", "x", "--temperature", "-1"), "temperature: is -1.0"),
        (("llm/code", "x", "--top-p", "0"), "top_p: is 0.0"),
        (("llm/code", "", "--continue"), "prompt: is empty"),
    ],
)
def test_what_is_wrong_is_told_in_words(line, words, why):
    done = coserve("generate", line, *words, check=1)
    assert why in done.stderr
    assert done.stdout == ""


def test_a_text_that_fails_is_told_as_such(line, desk):
    desk.holds = True

    def fail():
        desk.wait_for(lambda desk: desk.texts)
        desk.texts[0].write("half")
        desk.texts[0].end(None, OrderRefused(Refusing.NOT_NOW, "llm/code: its weights are not there"))

    failing = desk._threads.submit(fail)
    done = coserve("generate", line, "llm/code", "x", check=1)
    failing.result()
    assert done.stdout.strip() == "half"
    assert "its weights are not there" in done.stderr


def test_what_a_model_writes_does_nothing_to_a_terminal():
    assert for_terminal("a\n\tb \x1b[2J\x07\r wörld 🙂") == "a\n\tb \\x1b[2J\\x07\\x0d wörld 🙂"
