"""A served line asked over the wire: an unmodified tritonclient, the line's own client, and what a stop does."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton

from agent.api.calls.desk import Order
from agent.api.client import Access, AgentClient
from agent.api.proto import inspection_pb2 as pb
from agent.api.proto import inspection_pb2_grpc
from agent.service.doors.camera_door import CameraDoor
from experts.errors import AddressUnusable, AgentUnreachable
from experts.expert import Verdict


@pytest.fixture
def address(desk_line, tmp_path_factory):
    """A unix socket of the line's; a short path, as they have to be."""
    path = tmp_path_factory.mktemp("s") / "c.sock"
    desk_line.document["api"] = {"grpc": [f"unix:{path}", "127.0.0.1:0"]}
    return f"unix:{path}"


def image_input(content):
    one = triton.InferInput("IMAGE", [1], "BYTES")
    one.set_data_from_numpy(np.array([content], dtype=np.object_))
    return one


def text_input(name, text):
    one = triton.InferInput(name, [1], "BYTES")
    one.set_data_from_numpy(np.array([text.encode()], dtype=np.object_))
    return one


def test_an_unmodified_tritonclient_inspects_on_a_served_line(desk_line, address, png):
    """AC15, on the real agent."""
    with desk_line.served() as service:
        for url in (address, service.api.addresses[1]):
            with closing(triton.InferenceServerClient(url)) as client:
                assert client.is_server_ready()
                assert client.is_model_ready("c0")
                assert client.get_model_metadata("expert:cls/f1").inputs[0].name == "IMAGE"
                answer = client.infer("c0", [image_input(png())])
                assert answer.as_numpy("VERDICT")[0] == b"OK"
        with closing(triton.InferenceServerClient(address)) as client:
            board = [image_input(png()), text_input("BOARD", "B1"), text_input("REF", "R1")]
            client.infer("c0", board, request_id="one")
            client.infer("c0", board, request_id="one")
            client.unload_model("c0")
            client.load_model("c0")
            counted = client.get_inference_statistics("c0", as_json=True)["model_stats"][0]
            assert int(counted["inference_stats"]["success"]["count"]) == 4
    assert [(row.result.key, row.result.board) for row in desk_line.results.query()] == [("api/one", "B1")]


def test_the_lines_own_client_sees_the_board_and_the_status(desk_line, address, png):
    with desk_line.served(), AgentClient(address) as client:
        assert client.status().line == "test"
        (part,) = client.inspect([png()], "c0", "B1", "R1")
        assert part.verdict is Verdict.OK
        (board,) = client.boards("B1")
        assert dict(board.missing) == {"c1": 1}


def test_a_deadline_takes_an_inspection_out_of_the_queue(desk_line, address, caller, png, wait_until_so):
    """AC17, on the real agent: what waits behind a long batch is neither run nor stored, and nothing is counted."""
    desk_line.fake(0, B_s=0.8)
    request = pb.InspectRequest(file=png(), component="c0", board="B1", ref="R1")
    with desk_line.served() as service, grpc.insecure_channel(address) as channel:
        agent = inspection_pb2_grpc.InspectionStub(channel)
        agent.Status(pb.StatusRequest(), timeout=60)  # so that it is connected
        while True:  # a slow box may end the long batch before the deadline has come through
            running = caller()
            service.desk.order(Order(png(), component="c0", is_kept=False), running)
            wait_until_so(lambda: any(queue.running for queue in service.desk.status().queues))
            call = agent.Inspect.future(request, timeout=0.3)
            wait_until_so(lambda call=call: call.done() or service.desk.status().requests_in_flight == 2)
            was_queued = not call.done()
            assert call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            wait_until_so(lambda running=running: running.answers or service.desk.status().requests_in_flight == 1)
            if was_queued and not running.answers:
                break
            wait_until_so(lambda: service.desk.status().requests_in_flight == 0)
        before = service.judged
        running.wait()
        wait_until_so(lambda: service.desk.status().requests_in_flight == 0 and not desk_line.unfinished)
        wait_until_so(lambda: service.api.orders_under_way == service.api.calls == 0)
        assert service.judged == before
        agent.Inspect(request, timeout=60)
        assert service.judged == before + 1


def test_many_callers_at_once_are_answered_or_told_to_come_again(desk_line, address, png):
    """AC18 on the real agent: a bounded line, a thousand calls, each with an end."""
    desk_line.document["api"]["limits"] = {"requests": 50}
    content = png()
    with desk_line.served(), closing(triton.InferenceServerClient(address)) as client:

        def ask(_):
            try:
                return client.infer("c0", [image_input(content)]).as_numpy("VERDICT")[0].decode()
            except triton.InferenceServerException as refused:
                return str(refused.status())

        with ThreadPoolExecutor(100) as callers:
            ends = list(callers.map(ask, range(1000)))
    assert set(ends) <= {"OK", "StatusCode.RESOURCE_EXHAUSTED"}
    assert ends.count("OK") >= 50


def test_a_reload_that_is_not_applied_keeps_the_token_too(desk_line, tmp_path):
    token = tmp_path / "token"
    token.write_text("old")
    desk_line.document["api"] = {"grpc": "127.0.0.1:0", "token": {"file": str(token)}}
    with desk_line.served() as service:
        token.write_text("new")
        desk_line.fake(1, weight_bytes=30_000_000)  # more than there is memory
        assert not service.desk.reload().is_applied
        with AgentClient(service.api.addresses[0], Access(token="old")) as client:
            assert client.status().line == "test"
        desk_line.fake(1)
        assert service.desk.reload().is_applied
        with AgentClient(service.api.addresses[0], Access(token="new")) as client:
            assert client.status().line == "test"


def test_callers_are_told_that_it_stops_before_any_camera_is_waited_for(desk_line, address, tmp_path, monkeypatch):
    """AC19: also beside a camera that hangs, nobody is let in who would have to be sent away."""
    camera = {"name": "top", "url": f"file:{tmp_path / 'none.avi'}", "component": "c0"}
    desk_line.document["intake"] = {"cameras": [camera]}
    stop, answered = CameraDoor.stop, []

    def stopped(door, timeout_s):
        if timeout_s:
            with AgentClient(address) as client, pytest.raises(AgentUnreachable):
                client.status()
            answered.append(False)
        return stop(door, timeout_s)

    monkeypatch.setattr(CameraDoor, "stop", stopped)
    with desk_line.served(), AgentClient(address) as client:
        assert client.status().sources[0].name == "top"
    assert answered == [False]


def test_a_line_whose_address_is_taken_does_not_start_and_leaves_nothing_behind(desk_line):
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        desk_line.document["api"] = {"grpc": [f"127.0.0.1:{other.getsockname()[1]}"]}
        with pytest.raises(AddressUnusable), desk_line.served():
            pass
    desk_line.document["api"] = {}
    with desk_line.served() as service:
        assert service.desk.status().verdicts[Verdict.OK] == 0
