"""Where it answers, how it starts and stops, and what it tells of itself."""

from __future__ import annotations

import socket
import stat
import subprocess
import sys
import threading
from contextlib import closing, suppress
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from agent.api.proto import inspection_pb2 as pb
from agent.api.proto import inspection_pb2_grpc
from agent.api.server import SERVICES, ApiServer
from agent.line_file.api import ApiSection
from experts.errors import AddressUnusable
from tests.agent.api.conftest import section

ROOT = Path(__file__).parents[3]
DEADLINE_S = 30.0
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
IMAGE = pb.InspectRequest(file=b"x", component="resistor")


def status_at(address):
    with grpc.insecure_channel(address) as channel:
        return inspection_pb2_grpc.InspectionStub(channel).Status(pb.StatusRequest(), timeout=DEADLINE_S)


def path_of(address):
    return Path(address.removeprefix("unix:"))


def test_a_unix_socket_is_its_owner_s_and_its_group_s(server):
    mode = path_of(server.addresses[0]).stat().st_mode
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o660


def test_the_local_door_is_its_owner_s_alone(tmp_path, desk):
    server = ApiServer(ApiSection().with_local_door(tmp_path), desk)
    server.start()
    try:
        assert stat.S_IMODE((tmp_path / "coserve.sock").stat().st_mode) == 0o600
        assert status_at(server.addresses[0]).line == "test"
    finally:
        server.stop(0.0)


def test_a_port_is_not_shared_and_who_is_refused_leaves_nothing_behind(server, tmp_path, desk):
    """AC20, over TCP."""
    taken = server.addresses[1]
    second = ApiServer(section(tmp_path, grpc=["unix:./b.sock", taken]), desk)
    with pytest.raises(AddressUnusable, match=f"{taken}: Address already in use"):
        second.start()
    assert not (tmp_path / "b.sock").exists()
    assert status_at(taken).line == "test"
    third = ApiServer(section(tmp_path, grpc="unix:./b.sock"), desk)
    third.start()
    assert third.stop(0.0)


SERVING_PROCESS = """
import sys, time
from pathlib import Path
from agent.api.server import ApiServer
from tests.agent.api.conftest import section
from tests.agent.api.fake_desk import FakeDesk
server = ApiServer(section(Path(sys.argv[1]), grpc="unix:./a.sock"), FakeDesk())
server.start()
print("serving", flush=True)
time.sleep(600)
"""


def test_another_process_keeps_its_socket_until_it_is_killed(tmp_path, desk):
    """AC20: what kill -9 leaves behind keeps nobody from starting."""
    command = [sys.executable, "-c", SERVING_PROCESS, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as first:
        try:
            assert first.stdout.readline() == "serving\n"
            with pytest.raises(AddressUnusable, match="another agent answers there"):
                ApiServer(section(tmp_path, grpc="unix:./a.sock"), desk).start()
            assert status_at(f"unix:{tmp_path}/a.sock").line == "test"
        finally:
            first.kill()
    assert (tmp_path / "a.sock").is_socket()
    second = ApiServer(section(tmp_path, grpc="unix:./a.sock"), desk)
    second.start()
    assert status_at(second.addresses[0]).line == "test"
    assert second.stop(DEADLINE_S)


def test_what_is_no_socket_is_left_alone(tmp_path, serve):
    (tmp_path / "a.sock").write_text("mine")
    with pytest.raises(AddressUnusable, match="no socket"):
        serve()
    assert (tmp_path / "a.sock").read_text() == "mine"


@pytest.mark.parametrize(
    ("address", "says"),
    [
        (f"unix:./{'x' * 110}", "bytes of path"),
        ("unix:./file/a.sock", "file/a.sock: .*file: "),
        ("unix:./locked", "locked: .*locked.lock: Is a directory"),
        ("192.0.2.1:8461", "192.0.2.1:8461: Cannot assign requested address"),
        ("no-such-host.invalid:8461", "no-such-host.invalid:8461: "),
    ],
)
def test_an_address_that_cannot_be_served_is_named(tmp_path, desk, address, says):
    (tmp_path / "file").write_text("")
    (tmp_path / "locked.lock").mkdir()
    server = ApiServer(section(tmp_path, grpc=address, insecure_ok=True), desk)
    with pytest.raises(AddressUnusable, match=says):
        server.start()


def test_when_it_has_stopped_the_socket_is_gone_and_may_be_taken_again(tmp_path, desk):
    for _ in range(2):
        server = ApiServer(section(tmp_path, grpc="unix:./a.sock"), desk)
        server.start()
        assert status_at(server.addresses[0]).line == "test"
        assert server.stop(DEADLINE_S)
        assert not (tmp_path / "a.sock").exists()


class TestHealth:
    @pytest.fixture
    def health(self, channel):
        return health_pb2_grpc.HealthStub(channel)

    def test_a_service_that_there_is_none_of_is_not_found(self, health):
        with pytest.raises(grpc.RpcError) as error:
            health.Check(health_pb2.HealthCheckRequest(service="x"))
        assert error.value.code() is grpc.StatusCode.NOT_FOUND
        watched = health.Watch(health_pb2.HealthCheckRequest(service="x"), timeout=DEADLINE_S)
        assert next(watched).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        watched.cancel()

    def test_thousands_of_watchers_take_no_endless_memory_and_nobody_s_place(self, health, agent, server, monkeypatch):
        monkeypatch.setitem(server._door._at_most, "health check", 3)
        watchers = [health.Watch(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S) for _ in range(3)]
        assert [next(watcher).status for watcher in watchers] == [SERVING] * 3
        with pytest.raises(grpc.RpcError) as error:
            next(health.Watch(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S))
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert agent.Inspect(IMAGE, timeout=DEADLINE_S).parts
        for watcher in watchers:
            watcher.cancel()


class Stopping:
    """A server that stops on a thread, so that a test can look at it meanwhile."""

    def __init__(self, server, grace_s):
        self.answered_all = None
        self._server, self._grace_s = server, grace_s
        self._thread = threading.Thread(target=self._stop)
        self._thread.start()

    def _stop(self):
        self.answered_all = self._server.stop(self._grace_s)
        self._server.addresses = ()

    @property
    def is_under_way(self):
        return self._thread.is_alive()

    def wait(self):
        self._thread.join(DEADLINE_S)
        assert not self.is_under_way


def test_stopping_is_told_first_then_what_is_under_way_ends_and_new_calls_are_unavailable(agent, channel, desk, server):
    """AC19."""
    desk.holds = True
    under_way = agent.Inspect.future(IMAGE, timeout=DEADLINE_S)
    streamed = agent.InspectStream(
        iter([pb.StreamOrder(id="a", order=IMAGE)]), timeout=DEADLINE_S
    )  # its caller sends no more
    assert next(streamed).WhichOneof("answer") == "accepted"
    idle = agent.InspectStream(iter_until(idle_end := threading.Event()), timeout=DEADLINE_S)
    results = agent.WatchResults(pb.WatchResultsRequest(), timeout=DEADLINE_S)
    desk.wait_for(lambda desk: len(desk.under_way) == 2 and desk.watchers)
    watched = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
    assert next(watched).status == SERVING
    stopping = Stopping(server, DEADLINE_S)
    assert next(watched).status == NOT_SERVING
    checked = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
    assert checked.status == NOT_SERVING
    with pytest.raises(grpc.RpcError) as error:
        agent.Inspect(IMAGE, timeout=DEADLINE_S)
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert dict(error.value.trailing_metadata())["coserve-reason"] == "STOPPING"
    for stream in (idle, results):
        with pytest.raises(grpc.RpcError) as error:
            next(stream)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert stopping.is_under_way
    desk.release()
    assert under_way.result(DEADLINE_S).parts
    assert next(streamed).WhichOneof("answer") == "judged"
    stopping.wait()
    assert stopping.answered_all is True
    with pytest.raises(grpc.RpcError) as error:
        agent.Inspect(IMAGE, timeout=DEADLINE_S)
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    idle_end.set()


def iter_until(end):
    """A caller's side of a stream that sends nothing."""
    end.wait(DEADLINE_S)
    yield from ()


def test_who_is_not_answered_in_time_is_cut_off_and_withdrawn(agent, desk, server):
    desk.holds = True
    call = agent.Inspect.future(IMAGE, timeout=DEADLINE_S)
    desk.wait_for(lambda desk: desk.under_way)
    assert server.stop(0.01) is False
    server.addresses = ()
    assert call.exception(DEADLINE_S).code() in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}
    desk.wait_for(lambda desk: desk.withdrawn)


class Cable:
    """What a caller is connected by, and what can be pulled: then nothing is said any more, and nobody is told."""

    def __init__(self, port):
        self.is_pulled = threading.Event()
        self._port = port
        self._ends = [socket.create_server(("127.0.0.1", 0))]
        self.address = f"127.0.0.1:{self._ends[0].getsockname()[1]}"
        threading.Thread(target=self._connect, daemon=True).start()

    def _connect(self):
        with suppress(OSError):  # closed
            while True:
                ends = self._ends[0].accept()[0], socket.create_connection(("127.0.0.1", self._port))
                self._ends += ends
                for one, other in (ends, ends[::-1]):
                    threading.Thread(target=self._carry, args=(one, other), daemon=True).start()

    def _carry(self, one, other):
        with suppress(OSError):
            while data := one.recv(65536):
                if not self.is_pulled.is_set():
                    other.sendall(data)

    def close(self):
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def test_a_caller_that_has_vanished_is_given_up(serve, desk, monkeypatch):
    """Its calls would take the places of others', and its watchers those of the ones that come after it."""
    monkeypatch.setattr("agent.api.server.KEEPALIVE_MS", 100)
    monkeypatch.setattr("agent.api.server.KEEPALIVE_ANSWER_MS", 1000)
    server = serve(grpc="127.0.0.1:0")
    cable = Cable(int(server.addresses[0].rpartition(":")[2]))
    with closing(cable), grpc.insecure_channel(cable.address) as channel:
        events = inspection_pb2_grpc.InspectionStub(channel).WatchResults(pb.WatchResultsRequest())
        desk.wait_for(lambda desk: desk.watchers)
        cable.is_pulled.set()
        desk.wait_for(lambda desk: not desk.watchers)
        events.cancel()


def test_reflection_describes_all_services_on_this_machine(server):
    for address in server.addresses:
        with grpc.insecure_channel(address) as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            assert set(database.get_services()) == {
                *SERVICES, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection",
            }  # fmt: skip
            for symbol in (*SERVICES, "coserve.v1.Part", "inference.ModelConfig"):
                assert database.FindFileContainingSymbol(symbol).package == symbol.rpartition(".")[0]


def test_reflection_is_not_for_other_machines(serve):
    server = serve(grpc="0.0.0.0:0", insecure_ok=True)
    with grpc.insecure_channel(server.addresses[0]) as channel:
        assert inspection_pb2_grpc.InspectionStub(channel).Status(pb.StatusRequest(), timeout=DEADLINE_S)
        with pytest.raises(grpc.RpcError) as error:
            ProtoReflectionDescriptorDatabase(channel).get_services()
        assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED
