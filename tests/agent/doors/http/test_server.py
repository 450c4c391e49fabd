"""The pages over real sockets: what they say, and that no caller, however slow or rude, holds up anybody."""

import asyncio
import http.client
import logging
import os
import socket
import stat
import threading
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from agent.doors.access import Tokens
from agent.doors.http.listening import ARRIVALS, listener_at
from agent.doors.http.metrics.monitoring import Monitoring
from agent.doors.http.metrics.readings import Condition, Distribution, Histogram, Metric, MetricKind
from agent.faults.errors import AddressUnusable
from agent.line_file.api import ApiSection
from tests.agent.doors.http.callers import PATIENCE_S, TCP, asked, connected, hears_nothing_more, opened
from tests.waiting import until


class FakeLine:
    """A line that is as it is told to be. ``goes_on`` is cleared: no question of it comes back."""

    def __init__(self):
        self.now = Condition()
        self.told = [Metric(MetricKind.COUNTER, "verdicts", "Results stored.", {("OK",): 3, ("NG",): 1}, ("verdict",))]
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.asked = 0
        self.scraped = 0

    def condition(self):
        self.asked += 1
        assert self.goes_on.wait(PATIENCE_S)
        return self.now

    def metrics(self):
        self.scraped += 1
        assert self.goes_on.wait(PATIENCE_S)
        return self.told


@pytest.fixture
def line():
    made = FakeLine()
    yield made
    made.goes_on.set()


@contextmanager
def served(line, *addresses, **options):
    tls, token = {"certificate": "box.pem", "key": "box.key"}, {"role": "read", "file": "mes.token"}
    far = {"tls": tls, "tokens": {"mes": token}}  # for addresses of other machines
    api = ApiSection.model_validate({"http": addresses or (TCP,), **far}, context={"folder": Path()})
    with opened([Monitoring(line, **options).section()], api, tokens=Tokens(ApiSection())) as server:
        yield server.addresses


def answers(address):
    try:
        return asked(address, "/health/live")[0] == 200
    except (http.client.HTTPException, ConnectionError):
        return False


@pytest.fixture
def threads():
    before = set(threading.enumerate())
    return lambda: set(threading.enumerate()) - before


class TestPages:
    def test_metrics_are_in_the_format_that_prometheus_reads(self, line):
        buckets = Distribution({0.5: 2, float("inf"): 3}, 7.5)
        line.told.append(Histogram("verdict_seconds", "How long.", {("api",): buckets}, ("source",)))
        line.told.append(Metric(MetricKind.GAUGE, "queue_requests", "Requests.", {("0",): 4}, ("executor",)))
        with served(line) as (address,):
            status, headers, text = asked(address, "/metrics")
        assert (status, headers.get_content_type()) == (200, "text/plain")
        found = {family.name: family for family in text_string_to_metric_families(text)}
        verdicts = {sample.labels["verdict"]: sample.value for sample in found["coserve_verdicts"].samples}
        assert (verdicts, found["coserve_queue_requests"].type) == ({"OK": 3, "NG": 1}, "gauge")
        samples = found["coserve_verdict_seconds"].samples
        seconds = {sample.name.rpartition("_")[2] + sample.labels.get("le", ""): sample.value for sample in samples}
        assert seconds == {"bucket0.5": 2, "bucket+Inf": 3, "count": 3, "sum": 7.5}
        assert found["coserve_process_resident_memory_bytes"].samples[0].value > 0

    def test_health_is_answered_with_its_reason_in_one_line(self, line):
        with served(line) as (address,):
            assert asked(address, "/health/live")[::2] == (200, "alive\n")
            assert asked(address, "/health/ready?verbose=1")[::2] == (200, "ready\n")
            line.now = Condition(unready="results are not stored:\ndisk full \udcff")
            assert asked(address, "/health/live")[0] == 200
            assert asked(address, "/health/ready")[::2] == (503, "results are not stored: disk full \\udcff\n")
            line.now = Condition(dead="the agent crashed")
            for page in ("live", "ready"):
                assert asked(address, f"/health/{page}")[::2] == (503, "the agent crashed\n")

    @pytest.mark.parametrize(
        ("host", "status"),
        [
            (b"LocalHost:1", 200), (b"[::1]:80", 200), (b"127.1.2.3", 200), (b"rebound.example:80", 421),
            (b"127.0.0.1.rebound.example", 421), (b"192.168.0.4:80", 421), (b"unix:80", 421), (b"", 421),
        ],
    )  # fmt: skip
    def test_dns_rebinding_reads_nothing(self, line, tmp_path_factory, host, status):
        """DNS rebinding: the browser connects to this machine, and says the name that it was told. By a socket any name
        may be said."""
        with served(line, TCP, f"unix:{tmp_path_factory.mktemp('s')}/w.sock") as addresses:
            for address, answer in zip(addresses, (status, 200), strict=True):
                with closing(connected(address)) as browser:
                    browser.sendall(b"GET /health/live HTTP/1.1\r\nConnection: close\r\nHost: " + host + b"\r\n\r\n")
                    said = b"".join(iter(lambda: browser.recv(65536), b""))
                assert said.startswith(b"HTTP/1.1 %d " % answer)
                assert (b"is not a name of this machine" in said) == (answer == 421)

    def test_unknown_paths_are_not_served(self, line):
        with served(line) as (address,):
            for path in ("/", "/metrics/", "/favicon.ico", "/health", "/../etc/passwd"):
                status, _, text = asked(address, path)
                assert status == 404
                assert "/metrics, /health/live, /health/ready" in text
            for method in ("POST", "PUT", "DELETE", "OPTIONS", "BREW"):
                status, headers, _ = asked(address, "/metrics", method)
                assert (status, headers["Allow"]) == (405, "GET, HEAD")
            assert asked(address, "/metrics", "HEAD")[::2] == (200, "")

    def test_failing_metric_is_logged_and_breaks_no_other_page(self, line, caplog):
        line.told = [None]
        with served(line) as (address,):
            assert asked(address, "/metrics")[0] == 500
            assert asked(address, "/health/live")[0] == 200
        assert [record.message for record in caplog.records if record.levelno > logging.INFO] == [
            "web_failed path=/metrics"
        ]

    def test_hanging_line_gives_503_on_every_page_without_piling_up_threads(self, line, threads):
        with served(line, patience_s=0.05) as (address,):
            line.goes_on.clear()
            for _ in range(8):
                for page in ("/metrics", "/health/live", "/health/ready"):
                    status, _, text = asked(address, page)
                    assert (status, text) == (503, "no answer from the line within 0.05 s: it hangs\n")
            until(lambda: len(threads()) <= 3)  # the server's, and one for each kind of question
            assert line.asked == 1
            line.goes_on.set()
            until(lambda: asked(address, "/health/live")[0] == 200)


class TestMisbehavingCallers:
    def test_scrape_that_is_not_read_is_cut_off(self, line, monkeypatch):
        monkeypatch.setattr("agent.doors.http.metrics.monitoring.REQUESTS", 1)
        many = {(f"{number:0100d}",): 1 for number in range(60_000)}  # more bytes than sockets hold
        line.told = [Metric(MetricKind.GAUGE, "many", "Many.", many, ("one",))]
        monkeypatch.setattr("agent.doors.http.protocol.STALL_S", 0.5)
        with served(line) as (address,), closing(connected(address)) as slow:
            slow.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
            until(lambda: line.scraped)
            until(lambda: answers(address))  # as soon as it is cut off, and its place free
            received = 0
            with suppress(ConnectionError):
                while more := slow.recv(65536):
                    received += len(more)
            assert received < 60_000 * 100

    def test_connection_beyond_the_limit_ends_the_longest_silent_one(self, line, monkeypatch):
        monkeypatch.setattr("agent.doors.http.protocol.HEAD_S", 10 * PATIENCE_S)
        with served(line) as (address,):
            held = [connected(address) for _ in range(ARRIVALS)]
            with closing(connected(address)) as one_more:
                assert hears_nothing_more(held[0])
                for each in (one_more, held[1]):
                    each.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
                    assert each.recv(100).startswith(b"HTTP/1.1 200")
            for each in held:
                each.close()

    @pytest.mark.parametrize(
        ("sent", "status", "told"),
        [
            (b"\x16\x03\x01\x02\x00\x01\x00", 400, "TLS came, and this address is not encrypted - use http://"),
            (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505, "HTTP/2 came, and HTTP/1.1 is spoken here - switch HTTP/2 off"),
            (b"OPTIONS / HTTP/1.1\r\n\r\n", 400, "HTTP/1.1 wants the header Host - send it, or HTTP/1.0"),
            (b"GET / HTTP/9.9\r\n\r\n", 505, "another version of HTTP - send one, as GET / HTTP/1.1"),
            (b"GET /health/live HTTP/1.0\r\n\r\n", 200, "alive"),
            (b"OPTIONS /health/live HTTP/1.0\r\n\r\n", 405, "OPTIONS is not answered here - send GET, HEAD"),
            (b"\x05\x01\x00\r\n\r\n", 400, "this is no request of HTTP/1.1: "),
        ],
    )  # fmt: skip
    def test_bytes_that_are_no_request_are_answered_with_what_to_do(self, line, sent, status, told):
        with served(line) as (address,), closing(connected(address)) as caller:
            caller.sendall(sent)
            answer = b"".join(iter(lambda: caller.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert told.encode() in answer.partition(b"\r\n\r\n")[2]

    def test_garbage_is_refused_and_logs_nothing(self, line, caplog, capfd, monkeypatch):
        garbage = {
            "TLS": b"\x16\x03\x01\x02\x00\x01\x00",
            "version": b"GET / HTTP/9.9\r\n\r\n",
            "long line": b"GET " + b"a" * 100_000,
            "many headers": b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 1000 + b"\r\n",
            "bytes": b"GET / HTTP/1.1\r\n\xff\xfe: \x00\r\n\r\n",
            "huge body": b"POST /metrics HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\nabc",
        }
        monkeypatch.setattr("agent.doors.http.protocol.HEAD_S", 2.0)
        with served(line) as (address,):
            for kind, sent in garbage.items():
                with closing(connected(address)) as rude:
                    with suppress(OSError):  # it may have heard enough before the end
                        rude.sendall(sent)
                        rude.shutdown(socket.SHUT_WR)
                    assert hears_nothing_more(rude), kind
                assert asked(address, "/health/live")[0] == 200
        assert [record for record in caplog.records if record.levelno > logging.INFO] == []
        assert capfd.readouterr().err == ""

    @pytest.mark.parametrize("address", [TCP, "unix"])
    @pytest.mark.parametrize("sent", [b"", b"GET /metr", b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n"])
    def test_unfinished_request_is_cut_off(self, line, tmp_path_factory, monkeypatch, address, sent):
        if address == "unix":
            address = f"unix:{tmp_path_factory.mktemp('s')}/w.sock"
        monkeypatch.setattr("agent.doors.http.protocol.HEAD_S", 0.2)
        with served(line, address) as (address,), closing(connected(address)) as slow:
            slow.sendall(sent)
            assert asked(address, "/health/live")[0] == 200
            assert hears_nothing_more(slow)

    def test_requests_beyond_the_limit_are_refused(self, line, monkeypatch):
        monkeypatch.setattr("agent.doors.http.metrics.monitoring.REQUESTS", 1)
        with served(line) as (address,), closing(connected(address)) as first:
            line.goes_on.clear()
            first.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
            until(lambda: line.scraped)
            status, _, text = asked(address, "/health/live")
            assert (status, text) == (503, "1 requests are under way - try again later\n")
            line.goes_on.set()
            until(lambda: answers(address))


class TestAddresses:
    def test_loopback_addresses_and_a_unix_socket_for_owner_and_group_are_served(self, line, tmp_path):
        path, has_ipv6 = tmp_path / "w.sock", os.path.exists("/proc/net/if_inet6")
        with served(line, TCP, "localhost:0", f"unix:{path}", *(["[::1]:0"] if has_ipv6 else [])) as addresses:
            assert {asked(address, "/health/ready")[0] for address in addresses} == {200}
            assert stat.S_IMODE(path.stat().st_mode) == 0o660
            with pytest.raises(AddressUnusable, match="another agent"), served(line, f"unix:{path}"):
                pass
            assert asked(f"unix:{path}", "/health/live")[0] == 200
        assert not path.exists()

    @pytest.mark.parametrize("host", ["127.0.0.1", "192.0.2.1"], ids=["taken", "not this machine's"])
    def test_unusable_address_is_named_and_nothing_is_served(self, line, tmp_path, threads, host):
        with closing(socket.create_server(("127.0.0.1", 0))) as other:
            address = f"{host}:{other.getsockname()[1]}"
            first = f"unix:{tmp_path}/w.sock"
            with pytest.raises(AddressUnusable, match="line file") as refused, served(line, first, address):
                pass
        assert (refused.value.address, threads()) == (address, set())
        assert not (tmp_path / "w.sock").exists()

    def test_stop_leaves_no_thread_and_no_connection(self, line, threads, monkeypatch):
        monkeypatch.setattr("agent.doors.http.protocol.HEAD_S", 10 * PATIENCE_S)
        with served(line) as (address,):
            idle = connected(address)
            assert asked(address, "/health/live")[0] == 200
            assert asked(address, "/metrics")[0] == 200
        with closing(idle):
            assert hears_nothing_more(idle)
        until(lambda: threads() == set())
        with pytest.raises(ConnectionRefusedError):
            connected(address)


@pytest.mark.parametrize("address", [TCP, "[::1]:0"])
def test_body_of_an_answer_does_not_wait_for_the_receipt_of_its_head(address):
    async def is_without_delay():
        loop = asyncio.get_running_loop()
        connection, _ = await loop.sock_accept(listener.socket)
        transport, _ = await loop.connect_accepted_socket(asyncio.Protocol, connection)
        option = transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        transport.abort()
        return option

    listener = listener_at(address, ApiSection())
    with closing(listener), closing(socket.create_connection(listener.socket.getsockname()[:2])):
        assert asyncio.run(is_without_delay())
