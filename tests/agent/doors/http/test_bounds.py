"""Bounds of the door of HTTP: no caller takes more than its share, and each is told what happened."""

import asyncio
import json
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, closing, suppress

import pytest
from starlette.responses import JSONResponse, Response

from agent.doors.access import Role, Tokens
from agent.doors.http.door import DoorSection
from agent.doors.http.routes import Pieces, RouteRule, json_refused, route
from agent.line_file.api import ApiSection
from tests.agent.doors.http.callers import TCP, asked, connected, hears_nothing_more, opened
from tests.waiting import until

BODY_BYTES, MUCH = 2**20, 32 * 2**20


class Slow:
    """A part whose answers take as long as the test wants. ``ended``: of answers, cancelled or not."""

    def __init__(self):
        self.begun, self.goes_on = [], Future()
        self.ended, self.audited = [], []

    async def wait(self, call):
        self.begun.append(call.request.url.path)
        try:
            await asyncio.shield(asyncio.wrap_future(self.goes_on))
        except asyncio.CancelledError:
            self.ended.append("cancelled")
            raise
        self.ended.append("done")
        return JSONResponse(len(call.body))

    async def size(self, call):
        self.begun.append(call.request.url.path)
        return JSONResponse(len(call.body))

    async def much(self, call):
        self.begun.append(call.request.url.path)
        return Response(b"x" * MUCH)

    async def pieces(self, call):
        async def endless():
            while True:
                yield b"x" * 100_000

        leaving = AsyncExitStack()
        leaving.callback(self.ended.append, "left")
        return Pieces(endless(), {"content-type": "text/plain"}, leaving)

    def audit(self, caller, action, subject, outcome):
        self.audited.append((action, outcome))

    def section(self):
        large = RouteRule(json_refused, body_bytes=BODY_BYTES)
        return DoorSection(("/",), [
            route("POST", "/wait", self.wait, large), route("POST", "/size", self.size, large),
            route("GET", "/pieces", self.pieces, RouteRule(json_refused)),
            route("GET", "/short", self.size, RouteRule(json_refused)),
            route("GET", "/much", self.much, RouteRule(json_refused)),
            route("POST", "/do", self.wait, RouteRule(json_refused, Role.OPERATE, "do", BODY_BYTES)),
        ], requests=4)  # fmt: skip


class Owned(Tokens):
    """Every caller is the owner."""

    def caller(self, authorization, where, *, is_required=False):
        return super().caller(authorization, type(where).OWNER)


@pytest.fixture
def slow():
    made = Slow()
    yield made
    made.goes_on.cancel()


@pytest.fixture
def server(slow):
    api = ApiSection(http=[TCP], limits={"memory": "2MiB"})
    with opened([slow.section()], api, audit=slow.audit, tokens=Owned(api)) as server:
        yield server


@pytest.fixture
def address(server):
    return server.addresses[0]


def head(path, length=0, method="POST", more=""):
    return f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n{more}\r\n".encode()


def answer_of(connection):
    """Status and body of an answer that has both in few bytes."""
    received = b""
    while b"\r\n\r\n" not in received or not received.endswith((b"}", b"0", b"6")):
        more = connection.recv(65536)
        if not more:
            break
        received += more
    first, _, rest = received.partition(b"\r\n")
    return int(first.split()[1]), rest.rpartition(b"\r\n\r\n")[2]


class TestBodies:
    @pytest.mark.parametrize("sent", ["announced", "in chunks"])
    def test_body_above_the_limit_is_refused_before_it_is_held(self, address, sent):
        with closing(connected(address)) as caller:
            if sent == "announced":
                caller.sendall(head("/size", BODY_BYTES + 1))
            else:
                caller.sendall(head("/size").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked"))
                for _ in range(BODY_BYTES // 65536 + 1):
                    caller.sendall(b"10000\r\n" + b"x" * 65536 + b"\r\n")
            status, told = answer_of(caller)
            assert (status, json.loads(told)["error"]["reason"]) == (413, "MESSAGE_TOO_LARGE")
            assert hears_nothing_more(caller)  # the rest is not waited for
        assert asked(address, "/size", "POST", b"x" * BODY_BYTES)[2] == str(BODY_BYTES)

    @pytest.mark.parametrize("path", ["/size", "/nowhere"])
    def test_body_in_tiny_pieces_is_cut_off(self, address, path):
        tiny = b"1\r\nx\r\n"
        with closing(connected(address)) as caller:
            caller.sendall(head(path).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked"))
            with pytest.raises(ConnectionError):
                caller.sendall(tiny * 4_000_000)  # more than the sockets' buffers
        with closing(connected(address)) as caller:  # a few are a body as any other
            sent = head("/size").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
            caller.sendall(sent + tiny * 6 + b"0\r\n\r\n")
            assert answer_of(caller) == (200, b"6")

    def test_body_with_a_length_and_chunks_is_refused(self, address, slow):
        with closing(connected(address)) as caller:
            both = head("/size", 4, more="Transfer-Encoding: chunked\r\n")
            caller.sendall(both + b"0\r\n\r\n" + head("/size"))
            assert caller.recv(65536).startswith(b"HTTP/1.1 400 ")
            assert hears_nothing_more(caller)
        assert slow.begun == []

    def test_malformed_chunks_are_refused_and_log_nothing(self, address, caplog):
        with closing(connected(address)) as caller:
            caller.sendall(head("/nowhere").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked") + b"zz\r\n")
            assert caller.recv(65536).startswith(b"HTTP/1.1 400 ")
            assert hears_nothing_more(caller)
        assert caplog.records == []

    def test_body_that_no_route_reads_is_not_waited_for(self, address):
        with closing(connected(address)) as caller:
            caller.sendall(head("/short", 10, method="GET"))
            assert answer_of(caller) == (200, b"0")
            assert hears_nothing_more(caller)
        with closing(connected(address)) as caller:  # one that comes is dropped, and costs no connection
            for _ in range(2):
                caller.sendall(head("/short", 10, method="GET") + b"x" * 10)
                assert answer_of(caller) == (200, b"0")

    def test_body_that_does_not_arrive_is_refused(self, address, monkeypatch):
        monkeypatch.setattr("agent.doors.http.routes.BODY_S", 0.1)
        with closing(connected(address)) as caller:
            caller.sendall(head("/size", 100) + b"x")
            status, told = answer_of(caller)
        assert (status, json.loads(told)["error"]["message"]) == (400, "the body has not come within 0.1 s")

    def test_large_bodies_are_bounded_over_all_callers_and_small_ones_go_on(self, slow, monkeypatch):
        monkeypatch.setattr("agent.doors.http.door.LARGEST_BODIES", 2)
        api = ApiSection(http=[TCP], limits={"memory": "1MiB"})
        with opened([slow.section()], api, tokens=Owned(api)) as server:
            (address,) = server.addresses
            held = [connected(address) for _ in range(2)]
            for each in held:
                each.sendall(head("/size", BODY_BYTES) + b"x" * 10)
            assert asked(address, "/size", "POST", b"x" * 1000)[0] == 200
            with monkeypatch.context() as soon:  # those that came before keep their time
                soon.setattr("agent.doors.http.routes.BODY_S", 0.05)
                status, headers, told = asked(address, "/size", "POST", b"x" * BODY_BYTES)
            assert (status, headers["retry-after"], json.loads(told)["error"]["reason"]) == (429, "1", "QUEUE_FULL")
            held.pop().close()
            until(lambda: asked(address, "/size", "POST", b"x" * BODY_BYTES)[0] == 200)
            held.pop().close()


class TestConnections:
    def test_connection_takes_many_requests_and_ends_when_idle(self, address, monkeypatch):
        with closing(connected(address)) as caller:
            for length in (0, 6, 0):
                caller.sendall(head("/size", length) + b"x" * length)
                assert answer_of(caller) == (200, str(length).encode())
            monkeypatch.setattr("agent.doors.http.protocol.HEAD_S", 0.2)
            caller.sendall(head("/size", 6) + b"x" * 6)
            assert answer_of(caller)[0] == 200
            caller.sendall(b"POST /size HTT")  # a slow head counts as idling
            assert hears_nothing_more(caller)

    def test_idle_connections_count_until_their_next_request(self, slow, monkeypatch):
        monkeypatch.setattr("agent.doors.http.listening.ARRIVALS", 2)
        monkeypatch.setattr("agent.doors.http.protocol.HEAD_S", 600.0)
        with opened([slow.section()]) as server, ExitStack() as closed:
            (address,) = server.addresses
            busy, idle, third = (closed.enter_context(closing(connected(address))) for _ in range(3))
            assert hears_nothing_more(busy)  # the third came
            busy = closed.enter_context(closing(connected(address)))
            assert hears_nothing_more(idle)
            busy.sendall(head("/wait"))  # under way, it is no arrival
            until(lambda: "/wait" in slow.begun)
            assert asked(address, "/size", "POST")[0] == 200
            third.sendall(head("/size"))
            assert answer_of(third)[0] == 200
        until(lambda: slow.ended == ["cancelled"])

    def test_pipelined_requests_are_answered_in_order_and_buffered_within_bounds(self, address, slow):
        slow.goes_on.set_result(None)
        with closing(connected(address)) as caller:
            caller.sendall(head("/wait") + head("/size", 6) + b"x" * 6)
            received = b""
            while received.count(b"HTTP/1.1 200") < 2 or not received.endswith(b"6"):
                received += caller.recv(65536)
        slow.goes_on = Future()
        with closing(connected(address)) as rude:
            rude.sendall(head("/wait"))
            until(lambda: slow.begun.count("/wait") == 2)
            with suppress(ConnectionError):
                for _ in range(1000):
                    rude.sendall(head("/size") * 100)
            assert hears_nothing_more(rude)
        until(lambda: slow.ended == ["done", "cancelled"])

    def test_head_above_the_limit_is_refused(self, address):
        with closing(connected(address)) as rude:
            rude.sendall(b"GET /size HTTP/1.1\r\nHost: localhost\r\nA: " + b"a" * 17_000)
            assert rude.recv(100).startswith(b"HTTP/1.1 431 Request Header Fields Too Large")
            assert hears_nothing_more(rude)

    def test_caller_that_reads_nothing_is_cut_off(self, address, slow, monkeypatch):
        monkeypatch.setattr("agent.doors.http.protocol.STALL_S", 0.2)
        with closing(connected(address)) as caller:
            caller.sendall(head("/pieces", method="GET"))
            until(lambda: slow.ended == ["left"])

    def test_caller_that_reads_steadily_is_served_beyond_the_stall_time(self, address, slow, monkeypatch):
        monkeypatch.setattr("agent.doors.http.protocol.STALL_S", 2.0)
        with closing(connected(address)) as caller:
            caller.sendall(head("/much", method="GET"))
            received, begun_s = len(caller.recv(4096)), time.monotonic()
            while time.monotonic() - begun_s < 3.0:
                received += len(caller.recv(4096))
                assert asked(address, "/size", "POST")[0] == 200
            while received < MUCH:
                received += len(caller.recv(2**20))
        assert slow.begun.count("/much") == 1

    def test_slow_reader_is_not_idle(self, address, slow, monkeypatch):
        """The connection is not idle while its answer is being read."""
        monkeypatch.setattr("agent.doors.http.protocol.HEAD_S", 0.2)
        with closing(connected(address)) as caller:
            caller.sendall(head("/pieces", method="GET"))
            begun = caller.recv(65536)
            assert begun.startswith(b"HTTP/1.1 200")
            until(lambda: len(caller.recv(65536)) and asked(address, "/size", "POST")[0] == 200)
            assert slow.ended == []
        until(lambda: slow.ended == ["left"])


class TestConcurrencyLimits:
    """Of a part, 4 at a time. Callers on this machine are told apart by their connections."""

    @pytest.mark.parametrize("sent", [head("/size", 100) + b"x", head("/pieces", method="GET")])
    def test_silent_caller_yields_its_place_to_a_new_one(self, address, slow, monkeypatch, sent):
        monkeypatch.setattr("agent.doors.http.door.SILENT_S", 0.1)
        monkeypatch.setattr("agent.doors.http.routes.BODY_S", 600.0)
        monkeypatch.setattr("agent.doors.http.protocol.STALL_S", 600.0)
        api = ApiSection(http=[TCP])
        with opened([slow.section()], api, tokens=Owned(api)) as server, ExitStack() as closed:
            (address,) = server.addresses
            held = [closed.enter_context(closing(connected(address))) for _ in range(4)]
            for each in held:
                each.sendall(sent)
            until(lambda: asked(address, "/size", "POST")[0] == 503)
            until(lambda: asked(address, "/size", "POST", b"x")[0] == 200)
            assert hears_nothing_more(held[0])

    def test_request_under_way_yields_its_place_to_no_caller(self, address, slow, monkeypatch):
        monkeypatch.setattr("agent.doors.http.door.SILENT_S", 0.0)
        api = ApiSection(http=[TCP])
        with opened([slow.section()], api, tokens=Owned(api)) as server, ExitStack() as closed:
            (address,) = server.addresses
            held = [closed.enter_context(closing(connected(address))) for _ in range(4)]
            for each in held:
                each.sendall(head("/wait"))
            until(lambda: len(slow.begun) == 4)
            assert asked(address, "/size", "POST")[0] == 503
            slow.goes_on.set_result(None)
            assert [answer_of(each)[0] for each in held] == [200] * 4

    def test_machine_that_holds_all_places_yields_one_to_another(self, slow, tmp_path):
        (tmp_path / "t").write_text("s3cret")
        values = {"http": [TCP], "trusted_proxy": "127.0.0.1", "tokens": {"mes": {"role": "operate", "file": "t"}}}
        api = ApiSection.model_validate(values, context={"folder": tmp_path})
        far = {
            name: f"X-Forwarded-For: {name}\r\nAuthorization: Bearer s3cret\r\n" for name in ("10.0.0.1", "10.0.0.2")
        }
        with opened([slow.section()], api) as server, ExitStack() as closed:
            (address,) = server.addresses
            first, *others = (closed.enter_context(closing(connected(address))) for _ in range(6))
            for each in (first, *others[:3]):
                each.sendall(head("/size", 100, more=far["10.0.0.1"]) + b"x")
            others[3].sendall(head("/size", 100, more=far["10.0.0.1"]))
            assert answer_of(others[3])[0] == 503
            others[4].sendall(head("/size", 6, more=far["10.0.0.2"]) + b"x" * 6)
            assert answer_of(others[4]) == (200, b"6")
            status, told = answer_of(first)
            assert (status, json.loads(told)["error"]["reason"]) == (429, "QUEUE_FULL")

    def test_unsent_bodies_yield_their_bytes(self, slow, monkeypatch):
        monkeypatch.setattr("agent.doors.http.door.LARGEST_BODIES", 2)
        monkeypatch.setattr("agent.doors.http.door.SILENT_S", 0.1)
        monkeypatch.setattr("agent.doors.http.routes.BODY_S", 600.0)
        api = ApiSection(http=[TCP], limits={"memory": "1MiB"})
        with opened([slow.section()], api, tokens=Owned(api)) as server, ExitStack() as closed:
            (address,) = server.addresses
            held = [closed.enter_context(closing(connected(address))) for _ in range(2)]
            for each in held:
                each.sendall(head("/size", BODY_BYTES) + b"x" * 10)
            assert asked(address, "/size", "POST", b"x" * BODY_BYTES)[0] == 200
            status, told = answer_of(held[0])
            assert (status, "this was silent longest" in json.loads(told)["error"]["message"]) == (429, True)


class TestCallersThatLeave:
    def test_caller_that_leaves_has_its_answer_cancelled(self, address, slow):
        with closing(connected(address)) as caller:
            caller.sendall(head("/wait"))
            until(lambda: slow.begun)
        until(lambda: slow.ended == ["cancelled"])

    def test_caller_that_leaves_mid_body_logs_nothing(self, address, slow, caplog):
        with closing(connected(address)) as caller:
            caller.sendall(head("/wait", 100) + b"x")
        until(lambda: asked(address, "/size", "POST")[0] == 200)
        assert ("/wait" in slow.begun, [each.message for each in caplog.records if each.levelname == "ERROR"]) == (
            False, [],
        )  # fmt: skip

    def test_caller_that_leaves_does_not_stop_its_change(self, address, slow):
        with closing(connected(address)) as caller:
            caller.sendall(head("/do"))
            until(lambda: slow.begun)
        assert slow.audited == []
        slow.goes_on.set_result(None)
        until(lambda: slow.audited == [("do", "done")])
        assert slow.ended == ["done"]


class TestStop:
    def test_stop_lets_answers_under_way_end_and_refuses_new_callers(self, server, address, slow, monkeypatch):
        monkeypatch.setattr("agent.doors.http.server.STOP_S", 60.0)
        with closing(connected(address)) as caller, ThreadPoolExecutor() as threads:
            caller.sendall(head("/wait", 6) + b"x" * 6)
            until(lambda: slow.begun)
            stopping = threads.submit(server.stop)
            slow.goes_on.set_result(None)
            assert answer_of(caller) == (200, b"6")
            stopping.result()

    def test_stop_cuts_off_answers_beyond_its_time(self, server, address, slow, caplog):
        with closing(connected(address)) as caller, closing(connected(address)) as changing:
            caller.sendall(head("/wait"))
            changing.sendall(head("/do"))
            until(lambda: len(slow.begun) == 2)
            server.stop()
            assert hears_nothing_more(caller)
        assert (slow.ended, slow.audited) == (["cancelled"] * 2, [("do", "cut off")])
        assert [each.message for each in caplog.records if each.levelname == "ERROR"] == []

    def test_callers_during_a_stop_are_answered_or_cut_off(self, server, address):
        def asks_on():
            with suppress(ConnectionError):
                while True:
                    with closing(connected(address)) as caller:
                        caller.sendall(head("/size"))
                        caller.recv(100)

        with ThreadPoolExecutor(8) as threads:
            asking = [threads.submit(asks_on) for _ in range(8)]
            until(lambda: asked(address, "/size", "POST")[0] == 200)
            server.stop()
            for each in asking:
                each.result()
