"""The command line's caller over HTTP: answers as they are, refusals with their reasons, errors in words."""

import os
import shutil
import socket
import ssl
import threading
from contextlib import AsyncExitStack, closing, contextmanager

import pytest
from starlette.responses import JSONResponse, Response

from agent.commands.asking import AgentAccess, web_client
from agent.doors.credentials import Credentials
from agent.doors.http.client import HttpAccess, WebClient
from agent.doors.http.door import DoorSection
from agent.doors.http.routes import Pieces, RouteRule, json_refused, route
from agent.faults.errors import AgentUnreachable, OrderRefused, Reason
from agent.line_file.api import ApiSection
from experts.errors import ConfigError
from tests.agent.doors.http.callers import TCP, opened
from tests.authority import Authority


async def repeated(call):
    return JSONResponse({"sent": call.body.decode(), "who": call.caller.name})


async def refuses(call):
    raise OrderRefused(Reason.KEY_REUSED, "the key is another's", 2.0, field="key")


async def cut(call):
    async def two():
        yield b'data: {"number": 1}\n\n'
        yield b'data: {"number": 2}\n\n'
        if call.request.query_params.get("fails"):
            yield b'data: {"error": {"message": "no more", "code": "not_now"}}\n\n'
        if call.request.query_params.get("ends"):
            yield b"data: [DONE]\n\n"

    return Pieces(two(), {"content-type": "text/event-stream"}, AsyncExitStack())


async def nothing(call):
    return Response(status_code=204)


def section():
    rule = RouteRule(json_refused, body_bytes=1024)
    routes = {"/repeat": repeated, "/refuse": refuses, "/events": cut, "/nothing": nothing}
    return DoorSection(("/",), [route("POST", path, answer, rule) for path, answer in routes.items()])


@pytest.fixture
def addresses(tmp_path):
    api = ApiSection.model_validate({"http": [TCP, "unix:./w.sock"]}, context={"folder": tmp_path})
    with opened([section()], api) as server:
        yield server.addresses


def test_http_client_is_answered_over_each_kind_of_address(addresses):
    for address, who in zip(addresses, ("anonymous", "owner"), strict=True):
        client = WebClient(address)
        assert client.call("POST", "/repeat", {"ü": 1}) == {"sent": '{"\\u00fc": 1}', "who": who}
        assert client.call("POST", "/nothing") is None
        numbers = [event["number"] for event in client.events("/events?ends=1", {})]
        assert numbers == [1, 2]


def test_http_client_raises_a_refusal_with_its_reason_and_field(addresses):
    client = WebClient(addresses[1])
    with pytest.raises(OrderRefused, match="the key is another's") as refused:
        client.call("POST", "/refuse")
    assert (refused.value.reason, refused.value.field) == (Reason.KEY_REUSED, "key")
    with pytest.raises(OrderRefused, match="nothing is served at '/x'") as refused:
        client.content("POST", "/x")
    assert refused.value.reason is Reason.NOT_FOUND


@pytest.mark.parametrize(("query", "why"), [("", "stopped in the middle"), ("?fails=1", "no more")])
def test_truncated_stream_is_an_error(addresses, query, why):
    with pytest.raises(OrderRefused, match=why) as refused:
        list(WebClient(addresses[1]).events(f"/events{query}", {}))
    assert refused.value.reason is Reason.NOT_NOW


def test_unreachable_agent_is_an_error_that_asks_whether_it_runs(tmp_path):
    for address in (f"unix:{tmp_path}/w.sock", "127.0.0.1:1"):
        with pytest.raises(AgentUnreachable, match="is the agent running") as error:
            WebClient(address).call("GET", "/api/state")
        assert str(error.value).startswith(f"{address}: no answer")


def test_forbidden_socket_is_an_error_that_names_the_permission(closed_socket):
    with pytest.raises(AgentUnreachable, match="this user may not open"):
        WebClient(closed_socket).call("GET", "/api/state")


@contextmanager
def another_program(says):
    with closing(socket.create_server(("127.0.0.1", 0))) as other:

        def answer():
            connection, _ = other.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(says)

        answering = threading.Thread(target=answer)
        answering.start()
        yield f"127.0.0.1:{other.getsockname()[1]}"
        answering.join()


def test_server_other_than_an_agent_is_reported_as_such():
    told = pytest.raises(AgentUnreachable, match="another program answers there")
    with another_program(b"220 \x1b[31mmail.example ESMTP\r\n") as address, told as refused:
        WebClient(address).call("GET", "/api/state")
    assert str(refused.value).isprintable()


def test_truncated_answer_is_reported_as_such():
    told = pytest.raises(OrderRefused, match="stopped in the middle")
    with another_program(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf") as address, told:
        WebClient(address).content("GET", "/api/trace")


@pytest.mark.parametrize("content", ["", "\n", "s3cret\nanother\n", "s3cr\u00e9t"])
def test_invalid_token_file_is_named_and_not_shown(tmp_path, content):
    (tmp_path / "token").write_text(content, "utf-8")
    for target in (TCP, f"unix:{tmp_path}/w.sock"):
        with pytest.raises(ConfigError, match="token: is no token") as told:
            web_client(None, AgentAccess(target, token=tmp_path / "token"))
        assert "s3cr" not in str(told.value)


@pytest.mark.parametrize("target", ["foo", "127.0.0.1", "http://127.0.0.1:8462/", "127.0.0.1:99999"])
def test_target_without_a_port_is_no_address(target):
    with pytest.raises(ConfigError, match="is not an address"):
        web_client(None, AgentAccess(target))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may be another user")
def test_token_counts_at_the_groups_socket(tmp_path):
    (tmp_path / "token").write_text("s3cret\n")
    keys = {"http": "unix:./w.sock", "tokens": {"lead": {"role": "operate", "file": "token"}}}
    api = ApiSection.model_validate(keys, context={"folder": tmp_path})
    with opened([section()], api, tokens=Credentials(api).tokens) as server:
        for each in (tmp_path, *tmp_path.parents):
            each.chmod(each.stat().st_mode | 0o55)
        (tmp_path / "w.sock").chmod(0o666)
        (tmp_path / "token").chmod(0o644)
        os.seteuid(65534)
        try:
            access = AgentAccess(server.addresses[0], token=tmp_path / "token")
            assert web_client(None, access).call("POST", "/repeat")["who"] == "lead"
        finally:
            os.seteuid(0)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_command_line_connects_from_another_machine_with_its_tls_files(tmp_path):
    ours = Authority(tmp_path, "ours")
    ours.sign("box")
    ours.sign("caller")
    (tmp_path / "token").write_text("s3cret\n")
    tls = {"certificate": tmp_path / "box.pem", "key": tmp_path / "box.key", "client_ca": tmp_path / "ours.pem"}
    tokens = {"mes": {"role": "read", "file": "token"}}
    keys = {"http": "0.0.0.0:0", "tls": tls, "tokens": tokens}
    api = ApiSection.model_validate(keys, context={"folder": tmp_path})
    credentials = Credentials(api)
    with opened([section()], api, tokens=credentials.tokens, tls=credentials.context()) as server:
        address = server.addresses[0].replace("0.0.0.0", "localhost")
        names = {"authority": "ours.pem", "certificate": "caller.pem", "key": "caller.key"}
        files = {option: tmp_path / name for option, name in names.items()}
        access = AgentAccess(address, token=tmp_path / "token", **files)
        assert web_client(None, access).call("POST", "/repeat")["who"] == "mes"
        with pytest.raises(OrderRefused, match="--token-file") as refused:
            web_client(None, AgentAccess(address, **files)).call("POST", "/repeat")
        assert refused.value.reason is Reason.UNAUTHENTICATED
        with pytest.raises(AgentUnreachable, match="certificate"):
            WebClient(address, HttpAccess("s3cret", ssl.create_default_context())).call("POST", "/repeat")
        with pytest.raises(ConfigError, match="name files in PEM"):
            web_client(None, AgentAccess(address, authority=tmp_path / "token"))
