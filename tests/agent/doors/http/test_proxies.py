"""A proxy that ends TLS in front of the door: what it forwards is believed, of it alone; a real nginx; frames."""

import json
import shutil
import socket
import ssl
import subprocess
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from pydantic import ValidationError

from agent.doors.access import Role, Tokens
from agent.doors.http.door import DoorSection
from agent.doors.http.pages.files import pages_section
from agent.doors.http.routes import RouteRule, json_refused, route
from agent.line_file.api import ApiSection
from tests.agent.doors.http.callers import TCP, asked, connected, opened
from tests.agent.doors.http.test_door import caller_of
from tests.authority import Authority
from tests.waiting import until

ORIGIN = "https://station.factory.local"
PROXIED = {"public_origin": ORIGIN, "trusted_proxy": "127.0.0.1"}
BEARER = {"authorization": "Bearer operate-s3cret"}
NGINX = """
worker_processes 1; daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log; events {{}}
http {{
  access_log off; client_body_temp_path {folder}/b; proxy_temp_path {folder}/p; fastcgi_temp_path {folder}/f;
  uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  {server}
}}
"""


def section():
    routes = [route("GET", "/api/read", caller_of, RouteRule(json_refused)),
              route("POST", "/api/do", caller_of, RouteRule(json_refused, Role.OPERATE, "do"))]  # fmt: skip
    return DoorSection(("/api/",), routes)


@contextmanager
def door(folder, **keys):
    (folder / "operate.token").write_text("operate-s3cret\n")
    tokens = {"op": {"role": "operate", "file": "operate.token"}}
    api = ApiSection.model_validate({"http": [TCP], "tokens": tokens} | keys, context={"folder": folder})
    with opened([section(), pages_section(api.frame_ancestors)], api, tokens=Tokens(api)) as server:
        yield server.addresses


def signed_in(address, **headers):
    """Status of a sign-in, and its cookie's attributes."""
    status, told, _ = asked(address, "/api/session", "POST", {"token": "operate-s3cret"}, **headers)
    return status, (told["set-cookie"] or "").split("; ")


FORWARDED = {"host": "station.factory.local", "x_forwarded_for": "10.1.2.3", "x_forwarded_proto": "https"}


class TestForwardedHeaders:
    def test_browser_behind_the_trusted_proxy_signs_in_with_its_role(self, tmp_path):
        with door(tmp_path, **PROXIED) as (address,):
            assert asked(address, "/", **FORWARDED)[0] == 200
            assert asked(address, "/api/read", **FORWARDED)[0] == 401
            status, cookie = signed_in(address, origin=ORIGIN, **FORWARDED)
            assert (status, "Secure" in cookie) == (200, True)
            for origin, expected in (
                (ORIGIN, 200),
                ("http://station.factory.local", 403),
                ("https://evil.example", 403),
            ):
                given = FORWARDED | {"origin": origin, "cookie": cookie[0]}
                assert asked(address, "/api/do", "POST", **given)[0] == expected, origin

    def test_proxy_without_forwarded_headers_grants_nothing_without_a_token(self, tmp_path):
        with door(tmp_path, **PROXIED) as (address,):
            assert asked(address, "/api/read")[0] == 401
            assert asked(address, "/api/do", "POST", origin=ORIGIN, **BEARER)[0] == 200
            assert "Secure" in signed_in(address, origin=ORIGIN)[1]

    def test_forwarded_headers_are_ignored_without_a_trusted_proxy(self, tmp_path):
        with door(tmp_path) as (address,):
            own = f"http://{address}"
            status, cookie = signed_in(address, origin=own, host=address, x_forwarded_proto="https")
            assert (status, "Secure" in cookie) == (200, False)
            assert asked(address, "/api/do", "POST", origin=ORIGIN, **BEARER, **FORWARDED)[0] == 403
            assert json.loads(asked(address, "/api/read", x_forwarded_for="10.1.2.3")[2]) == ["anonymous", "INSPECT"]
            status, _, told = asked(address, "/api/read", **FORWARDED)
            assert (status, "api.trusted_proxy" in told) == (421, True)

    def test_forwarded_headers_of_an_untrusted_address_are_ignored(self, tmp_path):
        with door(tmp_path, public_origin=ORIGIN, trusted_proxy=["10.9.0.0/16", "fd00::1"]) as (address,):
            assert asked(address, "/api/do", "POST", origin=ORIGIN, **BEARER, **FORWARDED)[0] == 403
            assert json.loads(asked(address, "/api/read")[2]) == ["anonymous", "INSPECT"]

    def test_proxy_at_a_unix_socket_does_not_make_its_user_an_owner(self, tmp_path):
        own, proxys = (f"unix:{tmp_path}/{name}.sock" for name in ("own", "proxy"))
        with door(tmp_path, http=[own, proxys], public_origin=ORIGIN, trusted_proxy=proxys):
            assert json.loads(asked(own, "/api/read")[2]) == ["owner", "ADMIN"]
            assert asked(proxys, "/api/read", **FORWARDED)[0] == 401
            assert json.loads(asked(proxys, "/api/do", "POST", origin=ORIGIN, **BEARER)[2]) == ["op", "OPERATE"]

    def test_forwarded_scheme_and_host_are_the_public_origin_if_none_is_set(self, tmp_path):
        with door(tmp_path, trusted_proxy="127.0.0.0/8") as (address,):
            given = FORWARDED | BEARER
            assert asked(address, "/api/do", "POST", origin=ORIGIN, **given)[0] == 200
            assert asked(address, "/api/do", "POST", origin="http://station.factory.local", **given)[0] == 403


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"public_origin": ORIGIN}, "add the proxy's own address"),
        ({"trusted_proxy": "127.0.0.1", "tokens": {}}, "add a token"),
        ({"trusted_proxy": "nginx"}, "'nginx' is no proxy - write its address"),
        ({"trusted_proxy": "0.0.0.0/0"}, "trusts every caller"),
        ({"trusted_proxy": "10.0.0.7/24"}, "is no proxy"),
        ({"trusted_proxy": "unix:./no.sock"}, "is no address of http"),
        (PROXIED | {"public_origin": f"{ORIGIN}/line1/"}, "has a path, and pages are served at / only"),
        (PROXIED | {"public_origin": "station.factory.local"}, "is no origin - write https://HOST"),
        ({"frame_ancestors": ["https://*.factory.local"]}, "is no origin"),
        ({"frame_ancestors": "https://scada.local; script-src *"}, "is no origin"),
    ],
)  # fmt: skip
def test_invalid_trusted_proxy_or_frame_ancestor_is_refused_by_name(tmp_path, keys, expected):
    tokens = {"op": {"role": "operate", "file": "t"}}
    with pytest.raises(ValidationError, match=expected.replace("*", r"\*")):
        ApiSection.model_validate({"tokens": tokens} | keys, context={"folder": tmp_path})


def test_origins_are_compared_in_their_normal_form():
    api = ApiSection(frame_ancestors=["https://SCADA.local:443/", "http://[fd00::1]:8080"])
    assert api.frame_ancestors == ("https://scada.local", "http://[fd00::1]:8080")


class TestPagesOfOtherSites:
    """Headers that browsers add, and no script can."""

    @pytest.mark.parametrize("site", ["cross-site", "same-site"])
    def test_get_from_a_page_of_another_site_is_refused_before_any_work(self, tmp_path, site):
        with door(tmp_path) as (address,):
            for mode in ("no-cors", "navigate", "cors"):
                status, _, told = asked(address, "/api/read", sec_fetch_site=site, sec_fetch_mode=mode)
                assert (status, "use the pages of this address" in told) == (403, True)
            assert asked(address, "/api/read", origin="http://evil.example")[0] == 403
            assert asked(address, "/board/7", sec_fetch_site=site, sec_fetch_mode="navigate")[0] == 200
            for own in ({"sec_fetch_site": "same-origin"}, {"sec_fetch_site": "none"}, {}):
                assert asked(address, "/api/read", **own)[0] == 200

    def test_no_answer_may_be_embedded_by_another_site(self, tmp_path):
        with door(tmp_path) as (address,):
            for path in ("/", "/station.js", "/api/read", "/nowhere"):
                assert asked(address, path)[1]["cross-origin-resource-policy"] == "same-origin"
            with closing(connected(address)) as rude:
                rude.sendall(b"nonsense\r\n\r\n")
                assert b"\r\ncross-origin-resource-policy: same-origin\r\n" in rude.recv(65536)

    def test_pages_may_be_framed_only_by_the_frame_ancestors_of_the_line_file(self, tmp_path):
        for keys, expected in (
            ({}, "'none'"),
            ({"frame_ancestors": "https://scada.local"}, "'self' https://scada.local"),
        ):
            with door(tmp_path, **keys) as (address,):
                _, headers, _ = asked(address, "/")
            policy = headers["content-security-policy"].split("; ")
            assert (f"frame-ancestors {expected}" in policy, headers["x-frame-options"]) == (True, None)


@pytest.fixture
def nginx(tmp_path):
    """Nginx with the lines of docs/service.md, by the agent's address: its own port, and the authority's file."""
    program = shutil.which("nginx", path="/usr/sbin:/usr/bin")
    if program is None:
        pytest.skip("nginx is not installed")
    Authority(tmp_path, "ours").sign("box")
    running = []

    def start(address):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        page = Path("docs/service.md").read_text("utf-8")
        server = page.partition("```nginx\n")[2].partition("```")[0]
        here = {"/etc/ssl/station.pem": f"{tmp_path}/box.pem", "/etc/ssl/station.key": f"{tmp_path}/box.key",
                "listen 443": f"listen 127.0.0.1:{port}", "127.0.0.1:8080": address}  # fmt: skip
        for written, instead in here.items():
            assert written in server
            server = server.replace(written, instead)
        (tmp_path / "nginx.conf").write_text(NGINX.format(folder=tmp_path, server=server))
        running.append(subprocess.Popen([program, "-e", f"{tmp_path}/error.log", "-c", f"{tmp_path}/nginx.conf"]))
        return f"127.0.0.1:{port}"

    yield start
    for each in running:
        each.terminate()
        each.wait(60)


def is_open(address):
    try:
        connected(address).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_browser_signs_in_and_reviews_behind_nginx_configured_as_on_the_page(tmp_path, nginx):
    with door(tmp_path, **PROXIED) as (address,):
        outside = nginx(address)
        until(lambda: is_open(outside))
        tls = ssl.create_default_context(cafile=tmp_path / "ours.pem")
        shown = {"tls": tls, "host": "station.factory.local"}
        assert asked(outside, "/", **shown)[0] == 200
        assert asked(outside, "/api/read", **shown, x_forwarded_for="127.0.0.1")[0] == 401
        status, headers, _ = asked(outside, "/api/session", "POST", {"token": "operate-s3cret"}, origin=ORIGIN, **shown)
        assert (status, "Secure" in headers["set-cookie"].split("; ")) == (200, True)
        cookie = headers["set-cookie"].partition(";")[0]
        status, _, told = asked(outside, "/api/do", "POST", origin=ORIGIN, cookie=cookie, **shown)
        assert (status, json.loads(told)) == (200, ["op", "OPERATE"])
        assert asked(outside, "/api/do", "POST", origin="https://evil.example", cookie=cookie, **shown)[0] == 403
