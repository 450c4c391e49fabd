"""`coserve status`, `inspect --target` and `generate` as they are typed, against a line in memory at real addresses."""

import json

import pytest

from agent.commands.asking import for_terminal
from agent.doors.desk import TextOrder
from agent.faults.errors import OrderRefused, Reason
from experts.llm.serving.generation import Sampling
from tests.agent.commands.conftest import LINE
from tests.agent.doors.fake_desk import PROSE
from tests.commands import coserve

TEXT = "".join(PROSE)


def test_status_as_json_has_every_field(line):
    row = json.loads(coserve("status", line, "--json", check=0).stdout)
    assert row["line"] == "test"
    assert row["verdicts"] == {"OK": 0, "NG": 0, "UNKNOWN": 0}
    assert row["queues"][0] == {
        "executor": 0, "processor": "cpu", "requests": 3, "running": "cls/resistor", "busy_s": 8.0, "waited_s": 2.0,
    }  # fmt: skip
    assert row["pools"] == [
        {"name": "host", "used_bytes": 52428800, "capacity_bytes": 104857600,
         "experts": ["cls/resistor", "cls/capacitor"], "lease_bytes": 1048576, "lease_capacity_bytes": 2097152}
    ]  # fmt: skip
    assert [source["state"] for source in row["sources"]] == ["ONLINE", "STALLED"]
    assert (row["switches"], row["uptime_s"], row["bytes_read"]) == (7, 3725.5, 123456789)
    assert row["shadows"] == {"waiting": 3, "running": 1, "ran": 20, "failed": 2, "dropped": 5}
    assert row["standing"] == {"det/alignment": "quarantined: its weights are not as they were packed"}


def test_status_for_people_is_a_page(line):
    page = coserve("status", line, check=0).stdout
    for words in ("line test, coserve 0.1.0, running for 1:02:05", "7 switches, 9 loads, 5 evictions, 117.7 MiB read",
                  "4 images under way for shadows; 20 shown to shadows, 2 failed, 5 dropped",
                  "cls/resistor, cls/capacitor", "50.0 MiB", "STALLED", "no frame for 10 s",
                  "alarm: the disk is nearly full", "advice: a profile proves a faster form",
                  "expert det/alignment gets no requests: quarantined"):  # fmt: skip
        assert words in page


def test_status_at_an_address_needs_no_line_file_and_sends_the_token(line, desk, tmp_path):
    assert "line test" in coserve("status", "--target", f"unix:{tmp_path}/state/coserve.sock", check=0).stdout
    assert "line test" in coserve("status", "--target", desk.tcp, "--token-file", tmp_path / "token", check=0).stdout
    assert "wants a token" in coserve("status", "--target", desk.tcp, check=1).stderr
    line.write_text(line.read_text().replace("sock']", "sock'], token: {file: token}"))
    assert "line test" in coserve("status", line, "--target", desk.tcp, check=0).stdout  # the line's own token


def test_explain_prints_sentences_by_line_file_or_address(line, desk, tmp_path):
    told = desk.explanation("cls/resistor").sentences
    assert coserve("explain", line, "cls/resistor", check=0).stdout.splitlines() == list(told)
    there = f"unix:{tmp_path}/state/coserve.sock"
    row = json.loads(coserve("explain", "cls/resistor", "--target", there, "--json", check=0).stdout)
    assert row == {"subject": "cls/resistor", "sentences": list(told)}
    assert "nothing is called 'x'" in coserve("explain", line, "x", check=1).stderr
    for words in (("cls/resistor",), (line, "cls/resistor", "more")):
        assert "SUBJECT" in coserve("explain", *words, check=2).stderr


def test_inspect_through_an_agent_answers_as_without_it(line, tmp_path, desk):
    for name, content in {"a.png": b"x", "b.png": b"NG", "d.png": b"UNKNOWN"}.items():
        (tmp_path / name).write_bytes(content)
    images = [tmp_path / name for name in ("a.png", "b.png", "absent.png", "d.png")]
    target = f"unix:{tmp_path}/state/coserve.sock"
    words = ("inspect", line, *images, "--component", "resistor", "--target", target)
    answer = json.loads(coserve(*words, "--json", check=0).stdout)
    rows = answer["results"]
    assert [row["verdict"] for row in rows] == ["OK", "NG", "UNKNOWN", "UNKNOWN"]
    assert rows[0].keys() == {
        "image", "component", "verdict", "label", "score", "experts", "seconds", "reason", "boxes", "anomalies",
        "outputs",
    }  # fmt: skip
    assert rows[1]["label"] == "bad"
    assert rows[2]["reason"].endswith("absent.png: No such file or directory")
    assert [row["image"] for row in rows] == [str(image) for image in images]
    assert len(answer["outputs_sha256"]) == 64
    page = coserve(*words, check=0).stdout.splitlines()
    assert page[0].split() == ["OK", "good", "0.750", str(images[0])]
    assert page[3].startswith("UNKNOWN  not an image")
    assert desk.results == []
    none = coserve("inspect", line, images[0], "--component", "nobody", "--target", target, check=1)
    assert "no route for 'nobody'" in none.stderr


def test_missing_address_is_an_error_that_names_the_key(tmp_path):
    line = tmp_path / "line.yaml"
    line.write_text(LINE.replace("api: {grpc: [ADDRESS]}\n", "api: {grpc: []}\n"))
    assert "api: {grpc: ...}" in coserve("status", line, check=78).stderr
    line.write_text(LINE.replace("api: {grpc: [ADDRESS]}\n", ""))
    none = coserve("status", line, check=1).stderr
    assert none.startswith(f"unix:{tmp_path}/state/coserve.sock: no answer - is the agent running")
    coserve("status", check=2)


@pytest.mark.parametrize("option", ["--ca", "--token-file", "--certificate", "--key"])
def test_unreadable_file_is_named(line, desk, tmp_path, option):
    done = coserve("status", "--target", desk.tcp, option, tmp_path / "absent", check=78)
    assert "absent: No such file or directory" in done.stderr


def test_unserved_address_makes_commands_ask_the_other_ones_of_the_line_file(line, desk, tmp_path):
    """The line file was changed, and the agent serves the earlier one."""
    served, text = "'unix:./state/coserve.sock'", line.read_text()
    line.write_text(text.replace(served, f"'127.0.0.1:1', 'unix:./state/gone.sock', {served}"))
    assert "line test" in coserve("status", line, check=0).stdout
    line.write_text(text.replace(served, "'127.0.0.1:1', 'unix:./state/gone.sock'"))
    told = coserve("status", line, check=1).stderr
    assert told.startswith(f"127.0.0.1:1, unix:{tmp_path}/state/gone.sock: no answer at any of them - is the agent")


def test_review_goes_to_the_http_address_that_is_open(line, desk):
    door = f"'127.0.0.1:1', 'unix:./state/coserve-web.sock', {desk.http!r}"
    line.write_text(line.read_text().replace("api: {", f"api: {{http: [{door}], "))
    told = coserve("review", "add", line, "1", "--ok", check=1).stderr
    assert "/api/reviews" in told, "the door that answers has no reviews here"


def test_text_goes_to_stdout_and_its_statistics_to_stderr(line, desk):
    done = coserve("generate", line, "llm/code", "hello")
    assert done.stdout == f"{TEXT}\n"
    assert done.stderr == "llm/code: 7 tokens read, 4 written in 0.50 s (8.0/s); the model ended the text\n"
    assert desk.text_orders == [TextOrder("llm/code", messages=({"role": "user", "content": "hello"},))]
    assert json.loads(coserve("generate", line, "llm/code", "hello", "--json").stdout) == {
        "text": TEXT, "expert": "llm/code", "ending": "stop", "read_tokens": 7, "written_tokens": 4, "seconds": 0.5,
        "queue_s": 0.125, "first_token_s": 0.25, "label": None, "score": None,
    }  # fmt: skip


def test_options_of_generate_reach_the_order(line, desk):
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
def test_refused_text_is_reported_in_words(line, words, why):
    done = coserve("generate", line, *words, check=1)
    assert why in done.stderr
    assert done.stdout == ""


def test_failed_text_ends_with_an_error_after_what_was_written(line, desk):
    desk.holds = True

    def fail():
        desk.wait_for(lambda desk: desk.texts)
        desk.texts[0].write("half")
        desk.texts[0].end(None, OrderRefused(Reason.NOT_NOW, "llm/code: its weights are not there"))

    failing = desk._threads.submit(fail)
    done = coserve("generate", line, "llm/code", "x", check=1)
    failing.result()
    assert done.stdout.strip() == "half"
    assert "its weights are not there" in done.stderr


def test_control_characters_of_a_model_are_escaped_for_the_terminal():
    assert for_terminal("a\n\tb \x1b[2J\x07\r wörld 🙂") == "a\n\tb \\x1b[2J\\x07\\x0d wörld 🙂"
