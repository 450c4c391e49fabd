"""Where it answers, how it starts and stops, and what it tells of itself."""

import signal
import socket
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from agent.doors.grpc.server import SERVICES
from agent.doors.proto import inspection_pb2 as pb
from agent.doors.proto import inspection_pb2_grpc
from agent.doors.shares import Shares
from agent.faults.errors import AddressUnusable
from agent.line_file.api import ApiSection
from tests.agent.doors.conftest import metadata, refused, section, server_of, silent
from tests.waiting import until

ROOT = Path(__file__).parents[4]
DEADLINE_S = 30.0
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
IMAGE = pb.InspectRequest(file=b"x", component="resistor")


def status_at(address):
    with grpc.insecure_channel(address) as channel:
        return inspection_pb2_grpc.InspectionStub(channel).Status(pb.StatusRequest(), timeout=DEADLINE_S)


def test_unix_socket_admits_owner_and_group_and_the_local_one_its_owner(tmp_path, desk):
    (tmp_path / "state").mkdir()
    local = ApiSection().with_local_doors(tmp_path / "state")
    for api, mode in ((section(tmp_path, grpc="unix:./a.sock"), 0o660), (local, 0o600)):
        server = server_of(api, desk)
        server.start()
        try:
            assert stat.S_IMODE(Path(server.addresses[0].removeprefix("unix:")).stat().st_mode) == mode
            assert status_at(server.addresses[0]).line == "test"
        finally:
            server.stop(0.0)


def test_taken_port_is_refused_and_leaves_no_socket_behind(server, tmp_path, desk):
    taken = server.addresses[1]
    api = section(tmp_path, grpc=["unix:./b.sock", taken])
    second = server_of(api, desk)
    with pytest.raises(AddressUnusable, match=f"{taken}: Address already in use"):
        second.start()
    assert not (tmp_path / "b.sock").exists()
    assert status_at(taken).line == "test"
    third = server_of(section(tmp_path, grpc="unix:./b.sock"), desk)
    third.start()
    assert third.stop(0.0)


SERVING_PROCESS = """
import sys, time
from pathlib import Path
from tests.agent.doors.conftest import server_of
from tests.agent.doors.conftest import section
from tests.agent.doors.fake_desk import FakeDesk
server = server_of(section(Path(sys.argv[1]), grpc="unix:./a.sock"), FakeDesk())
server.start()
print("serving", flush=True)
time.sleep(600)
"""


def test_socket_is_replaced_only_if_its_process_is_dead(tmp_path, desk, forks):
    """What kill -9 leaves behind keeps nobody from starting."""
    first = forks.start(SERVING_PROCESS, tmp_path)
    until(lambda: "serving" in first.report)
    with pytest.raises(AddressUnusable, match="another agent answers there"):
        server_of(section(tmp_path, grpc="unix:./a.sock"), desk).start()
    assert status_at(f"unix:{tmp_path}/a.sock").line == "test"
    first.kill()
    assert (tmp_path / "a.sock").is_socket()
    with socket.socket(socket.AF_UNIX) as draft:
        draft.bind(str(tmp_path / "a.sock~"))  # as by one that was killed while it opened its own
    second = server_of(section(tmp_path, grpc="unix:./a.sock"), desk)
    second.start()
    assert status_at(second.addresses[0]).line == "test"
    assert second.stop(DEADLINE_S)
    assert not (tmp_path / "a.sock").exists()


@pytest.mark.parametrize(
    ("address", "says"),
    [
        (f"unix:./{'x' * 110}", "the path has .* bytes"), ("unix:./file/a.sock", "file/a.sock: .*file: "),
        ("unix:./locked", "locked: .*locked.lock: Is a directory"), ("unix:./file", "not a socket"),
        ("192.0.2.1:8461", "192.0.2.1:8461: Cannot assign requested address"),
        ("no-such-host.invalid:8461", "no-such-host.invalid:8461: "),
    ],
)  # fmt: skip
def test_unusable_address_is_named(tmp_path, desk, address, says):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "locked.lock").mkdir()
    server = server_of(section(tmp_path, grpc=address, insecure_ok=True), desk)
    with pytest.raises(AddressUnusable, match=says):
        server.start()
    assert (tmp_path / "file").read_text() == "mine"


class TestHealth:
    @pytest.fixture
    def health(self, channel):
        return health_pb2_grpc.HealthStub(channel)

    def test_unknown_health_service_is_not_found(self, health):
        assert refused(health.Check, health_pb2.HealthCheckRequest(service="x")).code() is grpc.StatusCode.NOT_FOUND
        watched = health.Watch(health_pb2.HealthCheckRequest(service="x"), timeout=DEADLINE_S)
        assert next(watched).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        watched.cancel()

    def test_health_watchers_are_bounded_and_take_no_place_of_other_calls(self, health, agent, server, monkeypatch):
        monkeypatch.setitem(server._door._shares, "health check", Shares(3))
        watchers = [health.Watch(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S) for _ in range(3)]
        assert [next(watcher).status for watcher in watchers] == [SERVING] * 3
        error = refused(next, health.Watch(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert agent.Inspect(IMAGE, timeout=DEADLINE_S).parts
        for watcher in watchers:
            watcher.cancel()


def test_stop_is_announced_first_then_calls_end_and_new_ones_are_unavailable(agent, channel, desk, server):
    desk.holds = True
    under_way = agent.Inspect.future(IMAGE, timeout=DEADLINE_S)
    streamed = agent.InspectStream(iter([pb.StreamOrder(id="a", order=IMAGE)]), timeout=DEADLINE_S)  # and no more
    assert next(streamed).WhichOneof("answer") == "accepted"
    idle = agent.InspectStream(silent(idle_end := threading.Event()), timeout=DEADLINE_S)
    results = agent.WatchResults(pb.WatchResultsRequest(), timeout=DEADLINE_S)
    desk.wait_for(lambda desk: len(desk.under_way) == 2 and desk.watchers)
    watched = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
    assert next(watched).status == SERVING
    threads = ThreadPoolExecutor(1)
    stopping = threads.submit(server.stop, DEADLINE_S)
    assert next(watched).status == NOT_SERVING
    checked = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
    assert checked.status == NOT_SERVING
    error = refused(agent.Inspect, IMAGE, timeout=DEADLINE_S)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert metadata(error)["coserve-reason"] == "STOPPING"
    for stream in (idle, results):
        assert refused(next, stream).code() is grpc.StatusCode.UNAVAILABLE
    assert not stopping.done()
    desk.release()
    assert under_way.result(DEADLINE_S).parts
    assert next(streamed).WhichOneof("answer") == "judged"
    assert stopping.result(DEADLINE_S) is True
    server.addresses = ()
    assert refused(agent.Inspect, IMAGE, timeout=DEADLINE_S).code() is grpc.StatusCode.UNAVAILABLE
    idle_end.set()


def test_call_unanswered_at_the_end_of_a_stop_is_cut_off_and_withdrawn(agent, desk, server):
    desk.holds = True
    call = agent.Inspect.future(IMAGE, timeout=DEADLINE_S)
    desk.wait_for(lambda desk: desk.under_way)
    assert server.stop(0.01) is False
    server.addresses = ()
    assert call.exception(DEADLINE_S).code() in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}
    desk.wait_for(lambda desk: desk.withdrawn)


WATCHING = """
import sys
import grpc
from agent.doors.proto import inspection_pb2 as pb
from agent.doors.proto import inspection_pb2_grpc
list(inspection_pb2_grpc.InspectionStub(grpc.insecure_channel(sys.argv[1])).WatchResults(pb.WatchResultsRequest()))
"""


def test_unresponsive_caller_is_disconnected(serve, desk, forks, monkeypatch):
    monkeypatch.setattr("agent.doors.grpc.server.KEEPALIVE_MS", 100)
    monkeypatch.setattr("agent.doors.grpc.server.KEEPALIVE_ANSWER_MS", 1000)
    caller = forks.start(WATCHING, serve().addresses[1])
    desk.wait_for(lambda desk: desk.watchers)
    caller.send_signal(signal.SIGSTOP)
    desk.wait_for(lambda desk: not desk.watchers)
    caller.kill()


def test_reflection_describes_all_services_to_this_machine(server):
    for address in server.addresses:
        with grpc.insecure_channel(address) as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            assert set(database.get_services()) == {
                *SERVICES, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection",
            }  # fmt: skip
            for symbol in (*SERVICES, "coserve.v1.Part", "inference.ModelConfig"):
                assert database.FindFileContainingSymbol(symbol).package == symbol.rpartition(".")[0]


def test_reflection_is_refused_to_other_machines(serve):
    server = serve(grpc="0.0.0.0:0", insecure_ok=True)
    with grpc.insecure_channel(server.addresses[0]) as channel:
        assert inspection_pb2_grpc.InspectionStub(channel).Status(pb.StatusRequest(), timeout=DEADLINE_S)
        error = refused(ProtoReflectionDescriptorDatabase(channel).get_services)
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED
