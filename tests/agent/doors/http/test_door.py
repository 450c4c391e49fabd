"""Who is let in by the door of HTTP, what a caller may do, and what is told of it."""

import json
import os
import shutil
import socket
import ssl
import time
from contextlib import closing

import pytest
from starlette.responses import JSONResponse, Response

from agent.doors.access import Role
from agent.doors.credentials import Credentials
from agent.doors.http.door import DoorSection
from agent.doors.http.routes import RouteRule, json_refused, route
from agent.faults.errors import OrderRefused, Reason
from agent.line_file.api import ApiSection
from experts.errors import ConfigError
from tests.agent.doors.http.callers import TCP, asked, connected, hears_nothing_more, opened
from tests.authority import Authority
from tests.waiting import until

TOKENS = {role: {"role": role, "file": f"{role}.token"} for role in ("read", "inspect", "operate", "admin")}
MUCH, ENDED = 32 * 2**20, []
PATHS = {"/x/read": Role.READ, "/x/store": Role.INSPECT, "/x/do": Role.OPERATE, "/x/rule": Role.ADMIN}


async def caller_of(call):
    call.about = "a thing"
    return JSONResponse([call.caller.name, call.caller.role.name])


async def refuses(call):
    raise OrderRefused(Reason.NOT_FOUND, "no such thing")


class Much(Response):
    async def __call__(self, scope, receive, send):
        await super().__call__(scope, receive, send)
        ENDED.append(scope["path"])


async def much(call):
    return Much(b"x" * MUCH)


async def fails(call):
    return 1 / 0


def section():
    rules = {
        path: RouteRule(json_refused, least, path if least >= Role.OPERATE else None) for path, least in PATHS.items()
    }
    routes = [route("POST", path, caller_of, rule) for path, rule in rules.items()]
    routes += [route("POST", "/x/refuse", refuses, RouteRule(json_refused, Role.OPERATE, "refuse"))]
    routes += [route("POST", "/x/fail", fails, RouteRule(json_refused, Role.OPERATE, "fail"))]
    routes += [route("GET", "/x/much", much, RouteRule(json_refused, is_open=True))]
    return DoorSection(("/x/",), [*routes, route("GET", "/x/open", caller_of, RouteRule(json_refused, is_open=True))])


@pytest.fixture
def folder(tmp_path):
    for role in TOKENS:
        (tmp_path / f"{role}.token").write_text(f"{role}-s3cret\n")
    return tmp_path


@pytest.fixture
def audit():
    return []


@pytest.fixture
def door(folder, audit):
    """Open the door with these keys of `api:`; the server and its credentials."""
    running = []

    def start(**keys):
        api = ApiSection.model_validate({"http": [TCP], "tokens": TOKENS} | keys, context={"folder": folder})
        credentials = Credentials(api)
        tls = credentials.context()
        tell = lambda caller, *what: audit.append((caller.name, *what))  # noqa: E731
        running.append(opened([section()], api, audit=tell, tokens=credentials.tokens, tls=tls))
        return running[-1].__enter__(), credentials

    yield start
    for each in running:
        each.__exit__(None, None, None)


def bearer(role):
    return {} if role is None else {"authorization": f"Bearer {role}-s3cret"}


def statuses(address, role=None, **given):
    return [asked(address, path, "POST", **bearer(role), **given)[0] for path in PATHS]


def is_let_in(address, tls):
    try:
        return asked(address, "/x/open", tls=tls)[0] == 200
    except OSError:
        return False


class TestRoles:
    @pytest.mark.parametrize(
        ("role", "expected"),
        [
            ("read", [200, 403, 403, 403]), ("inspect", [200, 200, 403, 403]), ("operate", [200, 200, 200, 403]),
            ("admin", [200, 200, 200, 200]), (None, [200, 200, 401, 401]),
        ],
    )  # fmt: skip
    def test_token_grants_its_role_only(self, door, role, expected):
        server, _ = door()
        assert statuses(server.addresses[0], role) == expected

    def test_refusal_names_the_needed_role_and_the_callers(self, door):
        (address,) = door()[0].addresses
        told = json.loads(asked(address, "/x/rule", "POST", **bearer("read"))[2])
        message = "this needs the role admin, and 'read' has read"
        assert told == {"error": {"reason": "FORBIDDEN", "message": message, "field": None}}

    def test_unknown_token_is_refused(self, door):
        (address,) = door()[0].addresses
        for shown in ("Bearer none", "Bearer read-s3cre", "Bearer read-s3crett", "bearer \xff"):
            assert asked(address, "/x/read", "POST", authorization=shown)[0] == 401
        for shown in ("Basic read-s3cret", "Bearer ", ""):
            told = json.loads(asked(address, "/x/read", "POST", authorization=shown)[2])
            assert told == ["anonymous", "INSPECT"]

    def test_two_names_need_two_tokens_also_in_a_reload(self, door, folder):
        (server, credentials), alike = door(), {"file": "read.token"}
        same = {"mes": {"role": "read"} | alike, "boss": {"role": "admin"} | alike}
        for keys in ({"tokens": same}, {"tokens": {"mes": same["mes"]}, "token": alike}):
            with pytest.raises(ConfigError, match=r"the token of .* has the same token"):
                credentials.reload(ApiSection.model_validate(keys, context={"folder": folder}))
        assert json.loads(asked(server.addresses[0], "/x/rule", "POST", **bearer("admin"))[2]) == ["admin", "ADMIN"]

    def test_single_token_of_the_line_is_an_administrators(self, door, folder):
        (address, path) = door(token={"file": "admin.token"}, tokens={}, http=[TCP, "unix:./w.sock"])[0].addresses
        assert statuses(address) == [401] * 4
        assert json.loads(asked(address, "/x/rule", "POST", **bearer("admin"))[2]) == ["token", "ADMIN"]
        assert json.loads(asked(path, "/x/rule", "POST")[2]) == ["owner", "ADMIN"]

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root may be another user")
    def test_other_user_at_the_groups_socket_is_not_its_owner(self, door, folder):
        server, _ = door(http=["unix:./w.sock"])
        folder.chmod(0o755)
        for each in folder.parents:
            each.chmod(each.stat().st_mode | 0o55)
        (folder / "w.sock").chmod(0o666)
        os.seteuid(65534)
        try:
            assert statuses(server.addresses[0]) == [200, 200, 401, 401]
            assert statuses(server.addresses[0], "admin") == [200] * 4
        finally:
            os.seteuid(0)

    def test_each_change_is_audited_with_its_outcome(self, door, audit, caplog):
        (address,) = door()[0].addresses
        for path, status in (("/x/do", 200), ("/x/refuse", 404), ("/x/fail", 500), ("/x/read", 200), ("/x/rule", 403)):
            assert asked(address, path, "POST", **bearer("operate"))[0] == status
        assert audit == [
            ("operate", "/x/do", "a thing", "done"), ("operate", "refuse", "", "NOT_FOUND: no such thing"),
            ("operate", "fail", "", "failed: ZeroDivisionError"),
        ]  # fmt: skip
        assert [record.message for record in caplog.records] == ["web_failed path=/x/fail"]

    def test_reload_takes_new_tokens_and_drops_old_ones(self, door, folder):
        server, credentials = door()
        (address,) = server.addresses
        (folder / "operate.token").write_text("another")
        tokens = {"boss": {"role": "admin", "file": "admin.token"}, "shift": TOKENS["operate"]}
        credentials.reload(ApiSection.model_validate({"tokens": tokens}, context={"folder": folder}))
        assert json.loads(asked(address, "/x/rule", "POST", **bearer("admin"))[2]) == ["boss", "ADMIN"]
        assert asked(address, "/x/do", "POST", authorization="Bearer another")[0] == 200
        for role in ("operate", "read"):
            assert asked(address, "/x/read", "POST", **bearer(role))[0] == 401


class TestOtherSites:
    def test_page_of_another_site_changes_nothing(self, door, audit):
        (address,) = door()[0].addresses
        for origin, status in ((f"http://{address}", 200), (f"https://{address}", 403), ("http://evil.example", 403),
                               ("null", 403)):  # fmt: skip
            given = {"origin": origin, "host": address} | bearer("operate")
            assert asked(address, "/x/do", "POST", **given)[0] == status
        assert len(audit) == 1
        assert asked(address, "/x/open", origin="http://evil.example")[0] == 200  # a browser keeps it from the page

    def test_host_name_of_another_site_is_refused_without_a_token(self, door):
        (address,) = door()[0].addresses
        assert statuses(address, host="rebound.example") == [421] * 4
        assert statuses(address, "read", host="box.factory") == [200, 403, 403, 403]


def test_malformed_head_is_answered_in_the_format_of_its_part(door):
    (address,) = door()[0].addresses
    with closing(connected(address)) as caller:
        caller.sendall(b"GET /x/read HTTP/1.1\r\n\r\n")
        told = b"".join(iter(lambda: caller.recv(65536), b"")).partition(b"\r\n\r\n")[2]
    message = "HTTP/1.1 wants the header Host - send it, or HTTP/1.0"
    assert json.loads(told) == {"error": {"reason": "INVALID", "message": message, "field": None}}


class TestSessions:
    def cookie(self, headers):
        return headers["set-cookie"].partition(";")[0]

    def test_token_of_a_browser_becomes_a_cookie(self, door):
        (address,) = door()[0].addresses
        status, headers, told = asked(address, "/api/session", "POST", {"token": "operate-s3cret"})
        assert (status, json.loads(told)) == (200, {"name": "operate", "role": "operate"})
        assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(headers["set-cookie"].split("; "))
        assert "s3cret" not in headers["set-cookie"]
        cookie = self.cookie(headers)
        assert json.loads(asked(address, "/api/session", cookie=cookie)[2])["name"] == "operate"
        assert asked(address, "/x/do", "POST", cookie=f"other=1; {cookie}")[0] == 200
        assert asked(address, "/x/rule", "POST", cookie=cookie)[0] == 403
        forged = cookie.replace("operate", "admin")
        assert asked(address, "/x/do", "POST", cookie=forged)[0] == 401
        status, headers, _ = asked(address, "/api/session", "DELETE", cookie=cookie)
        assert (status, self.cookie(headers)) == (204, 'coserve=""')

    @pytest.mark.parametrize(
        "body", [{"token": "no"}, {"token": "\udcff\ud800"}, {"token": 1}, {}, b"[" * 4000, b"\xff"]
    )
    def test_invalid_token_opens_no_session(self, door, body):
        (address,) = door()[0].addresses
        status, headers, told = asked(address, "/api/session", "POST", body)
        assert (status in (400, 401), headers["set-cookie"]) == (True, None)
        assert json.loads(told)["error"]["field"] in ("token", "body")

    def test_session_survives_a_restart_and_ends_with_its_token(self, door, folder):
        first, _ = door()
        cookie = self.cookie(asked(first.addresses[0], "/api/session", "POST", {"token": "operate-s3cret"})[1])
        second, credentials = door()
        assert asked(second.addresses[0], "/x/do", "POST", cookie=cookie)[0] == 200
        (folder / "operate.token").write_text("another")
        credentials.reload(ApiSection.model_validate({"tokens": TOKENS}, context={"folder": folder}))
        assert asked(second.addresses[0], "/x/do", "POST", cookie=cookie)[0] == 401


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
class TestOtherMachines:
    @pytest.fixture
    def tls(self, folder):
        for authority, name in (("ours", "box"), ("theirs", "other")):
            Authority(folder, authority).sign(name)
        return {"certificate": folder / "box.pem", "key": folder / "box.key"}

    def trusts(self, folder, authority):
        return ssl.create_default_context(cafile=folder / f"{authority}.pem")

    def test_other_machine_needs_a_token_except_for_pages_without_data(self, door, folder, tls):
        server, _ = door(http=["0.0.0.0:0"], tls=tls)
        address = server.addresses[0].replace("0.0.0.0", "127.0.0.1")
        ours = self.trusts(folder, "ours")
        assert statuses(address, tls=ours, host="box.factory") == [401] * 4
        assert statuses(address, "operate", tls=ours, host="box.factory") == [200, 200, 200, 403]
        assert asked(address, "/x/open", tls=ours, host="box.factory")[0] == 200
        assert asked(address, "/api/session", tls=ours)[0] == 401
        status, headers, _ = asked(address, "/api/session", "POST", {"token": "read-s3cret"}, ours)
        assert (status, "Secure" in headers["set-cookie"].split("; ")) == (200, True)
        with closing(connected(address)) as plain:
            plain.sendall(b"GET /x/open HTTP/1.1\r\nHost: localhost\r\n\r\n")
            told = plain.recv(1000)
        assert (told[:12], b"this address is encrypted - use https://" in told) == (b"HTTP/1.1 400", True)

    def test_reload_takes_a_new_tls_certificate(self, door, folder, tls):
        server, credentials = door(tls=tls)
        (address,) = server.addresses
        assert statuses(address, "read", tls=self.trusts(folder, "ours"))[0] == 200
        for end in ("pem", "key"):
            shutil.copy(folder / f"other.{end}", folder / f"box.{end}")
        credentials.reload(ApiSection.model_validate({"tls": tls, "tokens": TOKENS}, context={"folder": folder}))
        assert statuses(address, "read", tls=self.trusts(folder, "theirs"))[0] == 200
        with pytest.raises(ssl.SSLCertVerificationError):
            asked(address, "/x/open", tls=self.trusts(folder, "ours"))

    def test_callers_certificate_is_required_where_the_line_names_an_authority(self, door, folder, tls):
        (address,) = door(tls=tls | {"client_ca": folder / "ours.pem"})[0].addresses
        shows = self.trusts(folder, "ours")
        shows.load_cert_chain(folder / "box.pem", folder / "box.key")
        assert asked(address, "/x/open", tls=shows)[0] == 200
        with pytest.raises((ssl.SSLError, ConnectionError)):
            asked(address, "/x/open", tls=self.trusts(folder, "ours"))

    def test_unfinished_handshake_yields_its_place_and_is_cut_off(self, door, folder, tls, monkeypatch):
        monkeypatch.setattr("agent.doors.http.listening.ARRIVALS", 1)
        (address,) = door(tls=tls)[0].addresses
        ours = self.trusts(folder, "ours")
        with closing(connected(address)) as silent:
            assert is_let_in(address, ours)
            assert hears_nothing_more(silent)
        monkeypatch.setattr("agent.doors.http.server.HEAD_S", 0.1)
        with closing(connected(address)) as silent:
            silent.settimeout(60)
            assert silent.recv(1) == b""

    def test_slow_reader_over_tls_is_served_and_one_that_reads_nothing_is_cut_off(self, door, folder, tls, monkeypatch):
        """Over TLS, where what waits is not told by the transport."""
        monkeypatch.setattr("agent.doors.http.protocol.HEAD_S", 0.5)
        monkeypatch.setattr("agent.doors.http.protocol.STALL_S", 2.0)
        (address,) = door(tls=tls)[0].addresses
        ENDED.clear()
        ask, ours = b"GET /x/much HTTP/1.1\r\nHost: localhost\r\n\r\n", self.trusts(folder, "ours")
        with closing(ours.wrap_socket(connected(address), server_hostname="localhost")) as slow:
            slow.sendall(ask)
            received, begun_s = len(slow.recv(16384)), time.monotonic()
            while time.monotonic() - begun_s < 3.0:
                received += len(slow.recv(16384))
                assert asked(address, "/x/open", tls=ours)[0] == 200
            assert received + sum(map(len, iter(lambda: slow.recv(2**20), b""))) > MUCH
        with closing(ours.wrap_socket(connected(address), server_hostname="localhost")) as silent:
            silent.sendall(ask)
            until(lambda: len(ENDED) == 2)
            left = iter(lambda: silent.recv(2**20), b"")
            assert sum(map(len, left)) < MUCH

    @pytest.mark.parametrize("linger_s", [600.0, 0.01])
    def test_caller_that_stays_after_its_last_answer_yields_its_place_or_is_cut_off(
        self, door, folder, tls, monkeypatch, linger_s
    ):
        monkeypatch.setattr("agent.doors.http.listening.ARRIVALS", 1)
        monkeypatch.setattr("agent.doors.http.protocol.LINGER_S", linger_s)
        (address,) = door(tls=tls)[0].addresses
        ours = self.trusts(folder, "ours")
        with closing(ours.wrap_socket(connected(address), server_hostname="localhost")) as silent:
            silent.sendall(b"GET /x/open HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert silent.recv(1000).startswith(b"HTTP/1.1 200")
            assert linger_s < 1 or is_let_in(address, ours)
            assert hears_nothing_more(silent)


def test_unix_socket_in_the_state_folder_is_its_owners_alone(folder, audit):
    api = ApiSection.model_validate({}, context={"folder": folder}).with_local_doors(folder)
    with opened([section()], api, audit=lambda *_: None) as server:
        assert oct(os.stat(folder / "coserve-web.sock").st_mode)[-3:] == "600"
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(folder / "coserve-web.sock"))
        assert json.loads(asked(server.addresses[0], "/x/rule", "POST")[2]) == ["owner", "ADMIN"]
