"""One caller holds what others want: calls, streams, watchers, bytes and connections."""

import socket
import struct
import threading
from contextlib import ExitStack
from itertools import chain

import grpc
import pytest

from agent.doors.grpc import door
from agent.doors.grpc import server as api_server
from agent.doors.proto import inspection_pb2 as pb
from agent.doors.proto import inspection_pb2_grpc
from tests.agent.doors.conftest import DEADLINE_S, metadata, refused, silent
from tests.waiting import until

IMAGE = pb.InspectRequest(file=b"x", component="resistor", is_question=True)
PING, GOAWAY, SETTINGS = 6, 7, 4  # HTTP/2's frames


@pytest.fixture
def connect():
    """Connect to a server at its port: each channel is a peer of its own."""
    with ExitStack() as open_:
        end = threading.Event()

        def channel(server):
            options = (("grpc.use_local_subchannel_pool", 1),)
            return open_.enter_context(grpc.insecure_channel(server.addresses[1], options))

        channel.end = end
        open_.callback(end.set)
        yield channel


def silent_calls(channel, connect, count):
    inspect = channel.stream_unary("/coserve.v1.Inspection/Inspect")
    return [inspect.future(silent(connect.end), timeout=DEADLINE_S) for _ in range(count)]


def ended(calls):
    return [call for call in calls if call.done()]


def queue_full_details(call):
    error = call.exception(DEADLINE_S)
    told = metadata(error)
    assert (error.code(), told["coserve-reason"]) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    assert int(told["grpc-retry-pushback-ms"]) > 0
    return error.details()


def test_caller_with_only_silent_calls_yields_one_to_another_caller(serve, connect):
    server = serve(limits={"requests": 20})
    hoarder, other = connect(server), inspection_pb2_grpc.InspectionStub(connect(server))
    calls = silent_calls(hoarder, connect, 20)
    until(lambda: server.calls == 20)
    assert other.Inspect(IMAGE, timeout=DEADLINE_S).parts
    until(lambda: ended(calls))
    (yielded,) = ended(calls)
    assert "other callers came" in queue_full_details(yielded)


def test_bytes_of_silent_calls_are_yielded_to_another_callers_image(serve, connect):
    server = serve(limits={"memory": "1MiB", "message": "1MiB"})
    hoarder, other = connect(server), inspection_pb2_grpc.InspectionStub(connect(server))
    calls = silent_calls(hoarder, connect, 30)
    until(lambda: server.calls == 30)
    assert [other.Inspect(IMAGE, timeout=DEADLINE_S).parts for _ in range(3)]
    yielded = ended(calls)
    assert {queue_full_details(call) for call in yielded}
    assert len(yielded) <= 3


def test_silent_streams_of_one_caller_yield_to_another_caller(serve, connect):
    server = serve()
    most = server._door._shares["stream"].size
    hoarder, other = (inspection_pb2_grpc.InspectionStub(connect(server)) for _ in range(2))
    streams = [hoarder.InspectStream(silent(connect.end), timeout=DEADLINE_S) for _ in range(most)]
    until(lambda: server.calls == most)
    answers = other.InspectStream(iter([pb.StreamOrder(id="a", order=IMAGE)]), timeout=DEADLINE_S)
    assert [answer.WhichOneof("answer") for answer in answers] == ["judged"]
    until(lambda: ended(streams))
    assert "other callers came" in queue_full_details(ended(streams)[0])


def test_long_silent_stream_yields_to_its_own_caller_too(serve, connect, monkeypatch):
    monkeypatch.setattr(door, "SILENT_S", 0.0)
    server = serve()
    most = server._door._shares["stream"].size
    agent = inspection_pb2_grpc.InspectionStub(connect(server))
    streams = [agent.InspectStream(silent(connect.end), timeout=DEADLINE_S) for _ in range(most)]
    until(lambda: server.calls == most)
    (answer,) = agent.InspectStream(iter([pb.StreamOrder(id="a", order=IMAGE)]), timeout=DEADLINE_S)
    assert answer.judged.parts
    until(lambda: ended(streams))


def test_stream_with_an_order_under_way_is_not_silent(serve, connect, desk, monkeypatch):
    monkeypatch.setattr(door, "SILENT_S", 0.0)
    server, desk.holds = serve(), True
    most = server._door._shares["stream"].size
    agent = inspection_pb2_grpc.InspectionStub(connect(server))
    order = pb.StreamOrder(id="a", order=IMAGE)
    streams = [agent.InspectStream(chain([order], silent(connect.end)), timeout=DEADLINE_S) for _ in range(most)]
    desk.wait_for(lambda desk: len(desk.under_way) == most)
    told = metadata(refused(next, agent.InspectStream(silent(connect.end), timeout=DEADLINE_S)))
    assert (told["coserve-reason"], ended(streams)) == ("QUEUE_FULL", [])
    desk.release()
    assert [next(stream).WhichOneof("answer") for stream in streams] == ["judged"] * most


def test_caller_of_all_watchers_yields_one_and_a_lone_watcher_keeps_its_place(serve, connect, desk):
    server = serve()
    hoarder, other, third = (inspection_pb2_grpc.InspectionStub(connect(server)) for _ in range(3))
    lone = other.WatchResults(pb.WatchResultsRequest(), timeout=DEADLINE_S)
    desk.wait_for(lambda desk: desk.watchers == 1)
    many = [hoarder.WatchResults(pb.WatchResultsRequest(), timeout=DEADLINE_S) for _ in range(door.WATCHERS - 1)]
    desk.wait_for(lambda desk: desk.watchers == door.WATCHERS)
    late = third.WatchResults(pb.WatchResultsRequest(), timeout=DEADLINE_S)
    until(lambda: ended(many))
    desk.wait_for(lambda desk: desk.watchers == door.WATCHERS)
    third.Inspect(pb.InspectRequest(file=b"x", component="resistor"), timeout=DEADLINE_S)
    assert next(lone).result.seq == next(late).result.seq == 1
    assert [queue_full_details(watcher) for watcher in ended(many)]


def test_lone_callers_silent_calls_are_not_ended(serve, connect):
    server = serve(limits={"requests": 20})
    channel = connect(server)
    calls = silent_calls(channel, connect, 20)
    until(lambda: server.calls == 20)
    told = metadata(refused(inspection_pb2_grpc.InspectionStub(channel).Inspect, IMAGE, timeout=DEADLINE_S))
    assert (told["coserve-reason"], ended(calls)) == ("QUEUE_FULL", [])


def test_connections_are_bounded_per_address_and_a_closed_one_makes_room(serve, connect, monkeypatch):
    monkeypatch.setattr(api_server, "CONNECTIONS", 2)
    server = serve()
    with Http2(server), Http2(server), connected(server) as more:
        assert more.recv(1) == b""
    agent = inspection_pb2_grpc.InspectionStub(connect(server))
    assert agent.Inspect(IMAGE, timeout=DEADLINE_S, wait_for_ready=True).parts


def connected(server):
    host, _, port = server.addresses[1].rpartition(":")
    return socket.create_connection((host, int(port)), timeout=DEADLINE_S)


class Http2:
    """A connection of HTTP/2 that is open, as its settings were answered."""

    def __init__(self, server):
        self._socket = connected(server)
        self._file = self._socket.makefile("rb")
        self._socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        self.send(SETTINGS, b"")
        assert self.kind() == SETTINGS

    def send(self, kind, payload):
        self._socket.sendall(struct.pack(">I", len(payload))[1:] + bytes((kind, 0)) + bytes(4) + payload)

    def kind(self, *wanted):
        """Kind of the next frame, or of the next one that is wanted."""
        while head := self._file.read(9):
            self._file.read(int.from_bytes(head[:3]))
            if not wanted or head[3] in wanted:
                return head[3]
        return None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._file.close()
        self._socket.close()


@pytest.mark.parametrize(("bound_ms", "end"), [(0, PING), (api_server.CALLERS_PING_MS, GOAWAY)])
def test_client_pings_without_calls_end_the_connection_only_above_the_bound(serve, monkeypatch, bound_ms, end):
    assert api_server.CALLERS_PING_MS < 10_000  # the usual setting of clients
    monkeypatch.setattr(api_server, "CALLERS_PING_MS", bound_ms)
    with Http2(serve()) as connection:
        for _ in range(4):  # the first and three too early
            connection.send(PING, bytes(8))
            assert connection.kind(PING, GOAWAY) == PING
        if end == PING:
            connection.send(PING, bytes(8))
        assert connection.kind(PING, GOAWAY) == end
