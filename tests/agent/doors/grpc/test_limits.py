"""How much is taken at once, and what becomes of the rest; and what is no message at all."""

import json
import re
import subprocess
import sys
import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent.doors.grpc import door
from agent.doors.proto import inference_pb2 as oip
from agent.doors.proto import inference_pb2_grpc, inspection_pb2_grpc
from agent.doors.proto import inspection_pb2 as pb
from agent.doors.shares import Shares
from tests.agent.doors.conftest import metadata, refused, silent
from tests.lines import order as order_of
from tests.waiting import until

ROOT = Path(__file__).parents[4]
DEADLINE_S = 60.0
MEBIBYTE = 2**20


def test_large_image_is_judged_and_one_above_the_limit_is_refused_as_too_large(agent, channel, desk):
    (part,) = agent.Inspect(pb.InspectRequest(file=bytes(12_000_000), component="resistor"), timeout=DEADLINE_S).parts
    assert part.verdict == pb.VERDICT_OK
    request = pb.InspectRequest(file=bytes(16 * MEBIBYTE), component="resistor")
    large = refused(agent.Inspect, request, timeout=DEADLINE_S)
    assert large.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert metadata(large) == {"coserve-reason": "MESSAGE_TOO_LARGE"}
    raw = oip.ModelInferRequest(model_name="resistor", raw_input_contents=[request.file])
    large = refused(inference_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer, raw, timeout=DEADLINE_S)
    assert metadata(large) == {"coserve-reason": "MESSAGE_TOO_LARGE"}
    large = refused(agent.Explain, pb.ExplainRequest(subject="x" * MEBIBYTE), timeout=DEADLINE_S)
    assert metadata(large) == {"coserve-reason": "MESSAGE_TOO_LARGE"}
    (answer,) = agent.InspectStream(iter([pb.StreamOrder(id="a", order=request)]), timeout=DEADLINE_S)
    assert (answer.id, answer.refused.reason, answer.refused.HasField("retry_ms")) == ("a", "MESSAGE_TOO_LARGE", False)
    desk.most = 0
    small = pb.InspectRequest(file=b"x", component="resistor")
    (answer,) = agent.InspectStream(iter([pb.StreamOrder(id="b", order=small)]), timeout=DEADLINE_S)
    assert (answer.refused.reason, answer.refused.retry_ms) == ("QUEUE_FULL", 250)
    full = refused(agent.Inspect, small)
    assert full.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert metadata(full) == {"coserve-reason": "QUEUE_FULL", "grpc-retry-pushback-ms": "250"}


def test_message_far_above_the_limit_is_refused_by_grpc_without_coserve_reason(agent, caplog):
    """A message far above the limit is never received, so that it is told by gRPC alone, and without a hint."""
    request = pb.InspectRequest(file=bytes(18 * MEBIBYTE), component="resistor")
    large = refused(agent.Inspect, request, timeout=DEADLINE_S)
    assert large.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "larger than max" in large.details()
    assert not {"coserve-reason", "grpc-retry-pushback-ms"} & metadata(large).keys()
    assert "api_failed" not in caplog.text


def outcome(call):
    error = call.exception(DEADLINE_S)
    return "judged" if error is None else metadata(error)["coserve-reason"]


def test_thousand_concurrent_calls_all_end_within_the_limit_of_requests(agent, desk, server):
    """Those that there is no room for are told at once, while the others still wait, with when to try again."""
    desk.most, desk.holds = 50, True
    request = pb.InspectRequest(file=bytes(100_000), component="resistor")
    calls = [agent.Inspect.future(request, timeout=DEADLINE_S) for _ in range(1000)]
    until(lambda: sum(not call.done() for call in calls) == 50)  # although nothing is judged meanwhile
    desk.release()
    assert Counter(map(outcome, calls)) == {"judged": 50, "QUEUE_FULL": 950}
    hints = {metadata(call.exception()).get("grpc-retry-pushback-ms") for call in calls if call.exception()}
    assert (hints, desk.most_under_way, server.orders_under_way) == ({"250"}, 50, 0)


METHODS = {
    f"{method.containing_service.full_name}/{method.name}": method.client_streaming
    for file, services in ((pb, ("Inspection",)), (oip, ("GRPCInferenceService",)), (health_pb2, ("Health",)))
    for service in services
    for method in file.DESCRIPTOR.services_by_name[service].methods
    if method.client_streaming == method.server_streaming
}
UNARY, STREAMS = ([name for name, streams in METHODS.items() if streams is wanted] for wanted in (False, True))
OF_THE_CALLER = {
    grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION,
}  # fmt: skip
inputs = st.builds(
    oip.ModelInferRequest.InferInputTensor, name=st.sampled_from(["IMAGE", "BOARD"]),
    datatype=st.sampled_from(["BYTES", "UINT8"]), shape=st.lists(st.integers(-2, 2**63 - 1), max_size=3),
)  # fmt: skip
requests = st.builds(
    oip.ModelInferRequest, model_name=st.sampled_from(["resistor", "x"]), inputs=st.lists(inputs, max_size=4),
    raw_input_contents=st.lists(st.binary(max_size=200), max_size=4),
)  # fmt: skip
cut = st.tuples(requests, st.integers(0, 80)).map(lambda pair: pair[0].SerializeToString()[: pair[1]])
some_bytes = st.binary(max_size=60) | cut


@given(requests)
def test_counting_of_fields_matches_any_request(request):
    fields = 1 + len(request.inputs) + len(request.raw_input_contents)
    written = request.SerializeToString()
    assert [door.has_more_fields(written, most) for most in (fields, fields - 1)] == [False, True]


@given(some_bytes, st.integers(0, 50))
def test_counting_of_fields_accepts_any_bytes(message, most):
    assert door.has_more_fields(message, most) in {True, False}
    assert not door.has_more_fields(message, len(message))


def test_unterminated_varint_ends_after_the_longest_length():
    assert [door.has_more_fields(b"\xff" * 1000, most) for most in (99, 100)] == [True, False]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(method=st.sampled_from(UNARY), raw=some_bytes)
def test_any_bytes_in_a_call_are_answered_or_refused_as_the_callers_fault(channel, method, raw):
    try:
        channel.unary_unary(f"/{method}")(raw, timeout=DEADLINE_S)
    except grpc.RpcError as error:
        told = (error.code(), error.details(), error.trailing_metadata())
        assert error.code() in OF_THE_CALLER, told  # noqa: PT017  # either is right
        assert dict(error.trailing_metadata())["coserve-reason"], told  # noqa: PT017
        assert "Unexpected" not in error.details(), told  # noqa: PT017  # as gRPC begins with an exception's text


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(method=st.sampled_from(STREAMS), several=st.lists(some_bytes, max_size=4))
def test_any_bytes_in_a_stream_end_it_or_are_refused(channel, method, several):
    try:
        list(channel.stream_stream(f"/{method}")(iter(several), timeout=DEADLINE_S))
    except grpc.RpcError as error:
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT  # noqa: PT017  # either is right


@pytest.mark.parametrize(
    ("sent", "says"),
    [([b"\xff\xff\xff"], "the bytes are no message of this method's type"), ([], "the call ended without a message")],
)
def test_bytes_that_are_no_message_are_refused_in_plain_words(channel, sent, says):
    error = refused(channel.stream_unary("/coserve.v1.Inspection/Inspect"), iter(sent))
    assert (error.code(), error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, says)
    assert metadata(error) == {"coserve-reason": "INVALID"}


BUSY_PROCESS = """
import gc, json, sys
from pathlib import Path
from tests.agent.doors.conftest import server_of
from tests.agent.doors.conftest import section
from tests.agent.doors.fake_desk import FakeDesk
gc.disable()  # what is let go by the collector alone is not let go in time
desk = FakeDesk(**json.loads(sys.argv[2]))
limits = {"memory": "32MiB", "message": "16MiB"}
server = server_of(section(Path(sys.argv[1]), grpc="unix:./a.sock", limits=limits), desk)
server.start()
print("serving", flush=True)
sys.stdin.readline()
desk.release()
server.stop(60.0)
"""


@contextmanager
def busy_process(folder, **desk):
    """A channel to a server in a process of its own, and its growth: how much more it has held at a time than at its
    start. Once that was asked, the server ends what it holds."""

    def peak_bytes():  # not ru_maxrss: that begins with what the parent took
        return int(re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text())[1]) * 1024

    def grown_bytes():
        grown = peak_bytes() - before
        process.stdin.write("\n")
        process.stdin.flush()
        return grown

    command = [sys.executable, "-c", BUSY_PROCESS, str(folder), json.dumps(desk)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "serving\n"
            before = peak_bytes()
            with grpc.insecure_channel(f"unix:{folder}/a.sock") as channel:
                yield channel, grown_bytes
        finally:
            process.kill()


def test_many_large_images_at_once_take_no_more_memory_than_a_few(tmp_path):
    """480 MB are sent at once to a server that may hold 32 MiB, and as much again while it receives."""
    request = pb.InspectRequest(file=bytes(8_000_000), component="resistor")
    with busy_process(tmp_path, most=2, holds=True) as (channel, grown_bytes):
        inspect = inspection_pb2_grpc.InspectionStub(channel).Inspect
        calls = [inspect.future(request, timeout=DEADLINE_S) for _ in range(60)]
        until(lambda: sum(not call.done() for call in calls) == 2)
        assert grown_bytes() < 200 * MEBIBYTE
        assert Counter(map(outcome, calls)) == {"judged": 2, "QUEUE_FULL": 58}


@pytest.mark.slow
@pytest.mark.parametrize("is_stream", [False, True], ids=["calls", "a stream"])
def test_waiting_image_is_in_memory_once(tmp_path, is_stream):
    """240 MB are under way; what is left of their messages would be as much again."""
    request = pb.InspectRequest(file=bytes(8_000_000), component="resistor", is_question=True)
    with busy_process(tmp_path, holds=True) as (channel, grown_bytes):
        agent = inspection_pb2_grpc.InspectionStub(channel)
        if is_stream:
            orders = (pb.StreamOrder(id=str(number), order=request) for number in range(30))
            answers = agent.InspectStream(orders, timeout=DEADLINE_S)
        else:
            calls = [agent.Inspect.future(request, timeout=DEADLINE_S) for _ in range(30)]
        until(lambda: agent.Status(pb.StatusRequest(), timeout=DEADLINE_S).requests_in_flight == 30)
        assert grown_bytes() < 400_000_000
        ends = (next(answers) for _ in range(30)) if is_stream else (call.result(DEADLINE_S) for call in calls)
        assert len(list(ends)) == 30


def test_sixteen_streaming_stations_fit_the_default_limits_beside_other_calls(agent):
    end = threading.Event()
    request = pb.InspectRequest(file=bytes(5_000_000), component="resistor", is_question=True)
    order = pb.StreamOrder(id="a", order=request)
    streams = [agent.InspectStream(chain([order], silent(end)), timeout=DEADLINE_S) for _ in range(16)]
    for stream in streams:
        assert next(stream).judged.parts
    assert agent.Inspect(request, timeout=DEADLINE_S).parts
    full = refused(next, agent.InspectStream(silent(end)))
    assert metadata(full)["coserve-reason"] == "QUEUE_FULL"
    assert "a smaller limits.message" in full.details()
    end.set()


def test_watchers_and_streams_have_separate_limits(agent, desk, server, monkeypatch):
    most = {kind: server._door._shares[kind].size for kind in ("stream", "watcher")}
    monkeypatch.setitem(server._door._shares, "watcher", Shares(4))
    end = threading.Event()
    watchers = [agent.WatchResults(pb.WatchResultsRequest(), timeout=DEADLINE_S) for _ in range(4)]
    desk.wait_for(lambda desk: desk.watchers == 4)
    streams = [agent.InspectStream(silent(end), timeout=DEADLINE_S) for _ in range(most["stream"])]
    until(lambda: server.calls == 4 + most["stream"])
    more = agent.WatchResults(pb.WatchResultsRequest()), agent.InspectStream(silent(end))
    full = [refused(next, each) for each in more]
    assert [metadata(each)["coserve-reason"] for each in full] == ["QUEUE_FULL"] * 2
    assert agent.Inspect(pb.InspectRequest(file=b"x", component="resistor"), timeout=DEADLINE_S).parts
    assert all(next(watcher).result.seq == 1 for watcher in watchers)
    for stream in streams:
        stream.cancel()
    again = agent.InspectStream(iter([pb.StreamOrder(id="a")]), timeout=DEADLINE_S)
    assert next(again).refused.reason == "INVALID"
    end.set()


def test_stream_whose_answers_are_not_read_is_ended(agent, desk, server, monkeypatch):
    monkeypatch.setattr(door, "STALL_S", 0.2)
    many = desk._part(order_of(b"x", component="resistor"), "resistor")
    many = replace(many, reason="x" * 100_000)
    for _ in range(200):
        desk.commit(many)  # more than is held for a call on its way
    events = agent.WatchResults(pb.WatchResultsRequest(after_seq=0), timeout=DEADLINE_S)
    until(lambda: server.calls == 1)
    until(lambda: server.calls == 0)
    assert desk.watchers == 0
    with pytest.raises(grpc.RpcError, match="nothing was read"):
        list(events)


def test_call_of_millions_of_images_is_refused_before_any_order_is_made(channel, desk):
    """Ten megabytes of them would be gigabytes, and keep everybody waiting."""
    many = oip.ModelInferRequest(model_name="resistor", raw_input_contents=[b"\x01\0\0\0x" * 2_000_000])
    many.inputs.add(name="IMAGE", datatype="BYTES", shape=[2_000_000])
    infer = inference_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer
    large = refused(infer, many, timeout=DEADLINE_S)
    assert (large.code(), metadata(large)) == (grpc.StatusCode.INVALID_ARGUMENT, {"coserve-reason": "TOO_LARGE"})
    many.inputs[0].shape[:] = [1]
    assert (metadata(refused(infer, many, timeout=DEADLINE_S)), desk.orders) == ({"coserve-reason": "INVALID"}, [])


def test_message_of_millions_of_fields_is_refused_unparsed(tmp_path):
    """Eight million empty inputs are sixteen megabytes on the wire, and were eight hundred in memory."""
    empty = b"\x2a\x00" * 8_000_000
    with busy_process(tmp_path) as (channel, grown_bytes):
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        told = refused(infer, empty, timeout=DEADLINE_S)
        assert (told.code(), metadata(told)) == (grpc.StatusCode.INVALID_ARGUMENT, {"coserve-reason": "INVALID"})
        assert grown_bytes() < 150 * MEBIBYTE


def test_unknown_name_is_shortened_in_its_refusal(channel, agent):
    """Refusals name what they refuse; more than 16 KiB of it would reach the caller as RESOURCE_EXHAUSTED."""
    name = "x" * 5_000_000
    infer = inference_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer
    told = refused(infer, oip.ModelInferRequest(model_name=name), timeout=DEADLINE_S)
    assert metadata(told) == {"coserve-reason": "INVALID"}
    (answer,) = agent.InspectStream(iter([pb.StreamOrder(id=name)]), timeout=DEADLINE_S)
    assert (answer.refused.reason, len(answer.id)) == ("INVALID", 512)
    long = "\N{SNOWMAN}" * 100_000
    for call in (
        lambda: agent.Explain(pb.ExplainRequest(subject=long), timeout=DEADLINE_S),
        lambda: agent.Inspect(pb.InspectRequest(file=b"x", component=long[:512]), timeout=DEADLINE_S),
    ):
        told = refused(call)
        assert (told.code(), metadata(told)) == (grpc.StatusCode.NOT_FOUND, {"coserve-reason": "NOT_FOUND"})
        assert len(told.details()) == 500


@pytest.fixture
def may_go(desk):
    event, take = threading.Event(), desk.order
    desk.order = lambda order, listener: event.wait(DEADLINE_S) and take(order, listener)
    return event


def test_call_beyond_the_limit_is_refused_while_all_others_wait(serve, may_go):
    end = threading.Event()
    server = serve(limits={"requests": 20})
    request = pb.InspectRequest(file=b"x", component="resistor")
    with grpc.insecure_channel(server.addresses[0]) as channel:
        agent = inspection_pb2_grpc.InspectionStub(channel)
        stuck = [agent.Inspect.future(request, timeout=DEADLINE_S) for _ in range(10)]
        inspect = channel.stream_unary("/coserve.v1.Inspection/Inspect")
        unsent = [inspect.future(silent(end), timeout=DEADLINE_S) for _ in range(10)]
        until(lambda: server.calls == 20)
        for _ in range(20):
            full = refused(agent.Inspect, request, timeout=DEADLINE_S)
            assert metadata(full)["coserve-reason"] == "QUEUE_FULL"
        assert not any(call.done() for call in (*stuck, *unsent))
        for call in unsent:
            call.cancel()
        may_go.set()
        assert Counter(map(outcome, stuck)) == {"judged": 10}
        end.set()


def test_caller_that_never_sends_is_refused_after_a_timeout(channel, monkeypatch):
    monkeypatch.setattr("agent.doors.grpc.door.RECEIVE_S", 0.01)
    end = threading.Event()
    error = refused(channel.stream_unary("/coserve.v1.Inspection/Inspect"), silent(end), timeout=DEADLINE_S)
    assert (error.code(), metadata(error)) == (grpc.StatusCode.INVALID_ARGUMENT, {"coserve-reason": "INVALID"})
    assert "has not come" in error.details()
    end.set()


def test_orders_beyond_a_busy_desk_wait_unreceived(serve, desk, may_go):
    """A desk that takes long to count an order, as while it looks at a large image: the others wait outside."""
    server = serve(limits={"memory": "1MiB", "message": "1MiB"})
    request = pb.InspectRequest(file=bytes(MEBIBYTE - 1000), component="resistor")
    with grpc.insecure_channel(server.addresses[0]) as channel:
        agent = inspection_pb2_grpc.InspectionStub(channel)
        calls = [agent.Inspect.future(request, timeout=DEADLINE_S) for _ in range(30)]
        until(lambda: server.calls == 30 and server.orders_under_way == 4)
        assert agent.Status(pb.StatusRequest(), timeout=DEADLINE_S).line == "test"  # there is always room for it
        assert server.orders_under_way == 4
        may_go.set()
        assert (Counter(map(outcome, calls)), len(desk.orders)) == ({"judged": 30}, 30)
