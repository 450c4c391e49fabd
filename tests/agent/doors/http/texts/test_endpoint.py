"""What no well-behaved client sends: the endpoint answers, or closes, and serves the next."""

import json
import socket
from contextlib import closing, suppress

import httpx2
import pytest

from agent.doors.http.texts.endpoint import BODY_BYTES
from tests.agent.doors.conftest import DEADLINE_S

CHAT = {"model": "llm/code", "messages": [{"role": "user", "content": "hello"}]}
JSON = {"Content-Type": "application/json"}


def asked(address, path="/v1/chat/completions", body=None, method="POST", headers=JSON):
    content = json.dumps(CHAT) if body is None else body
    answer = httpx2.request(method, f"http://{address}{path}", content=content, headers=headers, timeout=DEADLINE_S)
    return answer.status_code, answer.json()


def connected(address):
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), DEADLINE_S)


def head(length, path="/v1/chat/completions", **headers):
    given = {"Host": "localhost", "Content-Type": "application/json", "Content-Length": str(length)} | headers
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items()), "", ""]
    return "\r\n".join(lines).encode()


def rest(connection):
    received = b""
    with suppress(ConnectionError):
        while more := connection.recv(65536):
            received += more
    return received


@pytest.fixture
def address(serve_texts):
    return serve_texts()[0]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("", "body: is no JSON"), ("{", "body: is no JSON"), ("[]", "body: is no JSON object"),
        (b"\xff\xfe\x00", "body: is no JSON"), ("[" * 100_000, "body: is no JSON"),
        ('{"model": "llm/code"}', "messages: is missing"),
        ('{"model": 1, "messages": []}', "model: input should be a valid string"),
    ],
)  # fmt: skip
def test_invalid_text_body_is_refused_with_the_reason(address, desk, body, why):
    status, values = asked(address, body=body)
    assert (status, values["error"]["type"], desk.text_orders) == (400, "invalid_request_error", [])
    assert why in values["error"]["message"]


@pytest.mark.parametrize(
    ("sent", "read"), [(r"a\ud83d", "a\ufffd"), (r"\ude00b", "\ufffdb"), (r"\ud83d\ude00", "\U0001f600")]
)
def test_half_of_a_surrogate_pair_is_read_as_a_replacement_character(address, desk, sent, read):
    assert asked(address, body=json.dumps(CHAT).replace("hello", sent))[0] == 200
    assert desk.text_orders[0].messages[0]["content"] == read


def test_null_leaves_any_optional_field_of_openai_unset(address, desk):
    names = "audio functions logit_bias n parallel_tool_calls prediction reasoning_effort response_format seed store"
    names += " stop stream_options temperature tool_choice tools top_p user verbosity web_search_options metadata"
    assert asked(address, body=json.dumps(CHAT | dict.fromkeys(names.split())))[0] == 200
    assert desk.text_orders[0].given == frozenset()


def test_silent_stream_has_its_role_at_once_and_then_comments(serve_texts, desk, monkeypatch):
    monkeypatch.setattr("agent.doors.http.texts.endpoint.SILENT_S", 0.01)
    (address, *_) = serve_texts()
    desk.holds = True
    body = json.dumps(CHAT | {"stream": True}).encode()
    with closing(connected(address)) as caller:
        caller.sendall(head(len(body)) + body)
        received = b""
        while received.count(b": the prompt is being read\n\n") < 2:
            received += caller.recv(65536)
        assert b'"role":"assistant"' in received.partition(b": the prompt")[0]
        desk.texts[0].write("so")
        while b'"content":"so"' not in received:
            received += caller.recv(65536)


@pytest.mark.parametrize("asking", [{"prompt": "hé"}, {"messages": [{"role": "user", "content": "hé"}]}])
def test_prompt_is_tokenised_and_back(address, asking):
    body = json.dumps({"model": "llm/code", **asking})
    status, values = asked(address, "/tokenize", body)
    assert (status, values) == (200, {"count": 3, "max_model_len": 64, "tokens": list("hé".encode())})
    back = json.dumps({"model": "llm/code", "tokens": values["tokens"]})
    assert asked(address, "/detokenize", back) == (200, {"prompt": "hé"})
    assert asked(address, "/tokenize", json.dumps({"model": "llm/code", "prompt": 1}))[1]["error"]["param"] == "prompt"


@pytest.mark.parametrize("sent", ["announced", "in chunks"])
def test_text_body_above_the_limit_is_refused_before_it_is_held(address, sent):
    most = BODY_BYTES
    with closing(connected(address)) as caller:
        if sent == "announced":
            caller.sendall(head(most + 1))
        else:
            caller.sendall(head(0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked"))
            for _ in range(most // 65536 + 1):
                caller.sendall(b"10000\r\n" + b"x" * 65536 + b"\r\n")
        assert rest(caller).startswith(b"HTTP/1.1 413 ")
    assert asked(address)[0] == 200


@pytest.mark.parametrize(
    ("path", "method", "headers", "status", "code"),
    [
        ("/v1/audio/speech", "POST", JSON, 404, "unknown_url"),
        ("/v1/", "GET", JSON, 404, "unknown_url"),
        ("/v1/chat/completions", "GET", JSON, 405, "method_not_allowed"),
        ("/v1/models", "POST", JSON, 405, "method_not_allowed"),
        ("/v1/models/resistor:predict", "POST", JSON, 404, "unknown_url"),
        ("/v1/models", "DELETE", JSON, 405, "method_not_allowed"),
        ("/v1/chat/completions", "POST", {"Content-Type": "text/plain"}, 400, "content_type"),
        ("/v1/completions", "POST", {"Content-Type": "multipart/form-data"}, 400, "content_type"),
    ],
)
def test_unsupported_path_method_or_content_type_is_an_openai_error(address, desk, path, method, headers, status, code):
    found, values = asked(address, path, method=method, headers=headers)
    assert (found, values["error"]["code"], desk.text_orders) == (status, code, [])


def test_internal_error_is_logged_and_breaks_no_other_text(address, desk, caplog):
    desk.text_models = lambda: 1 / 0
    status, values = asked(address, "/v1/models", method="GET")
    assert (status, values["error"]["type"]) == (500, "server_error")
    assert asked(address)[0] == 200
    assert [record.message for record in caplog.records] == ["web_failed path=/v1/models"]


def test_stream_that_is_not_read_has_its_text_cancelled(serve_texts, desk, monkeypatch):
    monkeypatch.setattr("agent.doors.http.texts.endpoint.STALL_S", 0.2)
    (address, *_) = serve_texts()
    desk.holds = True
    body = json.dumps(CHAT | {"stream": True}).encode()
    with closing(connected(address)) as slow:
        slow.sendall(head(len(body)) + body)
        desk.wait_for(lambda desk: desk.texts)
        (text,) = desk.texts
        for _ in range(200):
            text.write("x" * 100_000)  # more than sockets hold
        desk.wait_for(lambda desk: desk.cancelled_texts)
        desk.holds = False
        assert asked(address)[0] == 200


def test_caller_that_sends_on_during_its_answer_is_cut_off(address, desk):
    desk.holds = True
    body = json.dumps(CHAT).encode()
    with closing(connected(address)) as rude:
        rude.sendall(head(len(body)) + body)
        desk.wait_for(lambda desk: desk.texts)
        with suppress(ConnectionError):
            for _ in range(1000):
                rude.sendall(b"x" * 65536)
        desk.wait_for(lambda desk: desk.cancelled_texts)
