"""A served line asked over the wire: an unmodified tritonclient, the line's own client, and what a stop does."""

import json
import socket
from contextlib import closing

import grpc
import numpy as np
import onnx
import pytest
import tritonclient.grpc as triton

from agent.doors.grpc.client import Access, AgentClient
from agent.doors.proto import inspection_pb2 as pb
from agent.doors.proto import inspection_pb2_grpc
from agent.faults.errors import AgentUnreachable
from agent.sources.cameras.camera import CameraSource
from experts.thresholds.map_pictures import map_of
from tests.agent.service.fake_line import ordered, picture
from tests.experts.backends.onnx.anomaly_graphs import SIZE_PX, brightness
from tests.lines import order as order_of
from tests.pictures import encoded
from tests.waiting import until


@pytest.fixture
def address(line, tmp_path_factory):
    """A unix socket of the line's; a short path, as they have to be."""
    path = tmp_path_factory.mktemp("s") / "c.sock"
    line.document["api"] = {"grpc": [f"unix:{path}", "127.0.0.1:0"]}
    return f"unix:{path}"


def bytes_input(name, content):
    one = triton.InferInput(name, [1], "BYTES")
    one.set_data_from_numpy(np.array([content], dtype=np.object_))
    return one


ADMIN = {"authorization": "Bearer s3cret"}


def test_unmodified_tritonclient_inspects_over_grpc(line, address):
    image = bytes_input("IMAGE", picture())
    (line.folder / "token").write_text("s3cret")
    line.document["api"]["tokens"] = {"boss": {"role": "admin", "file": "token"}}
    with line.served() as service:
        for url in (address, service.api.addresses[1]):
            with closing(triton.InferenceServerClient(url)) as client:
                assert client.is_server_ready()
                assert client.is_model_ready("c0")
                assert client.get_model_metadata("expert:cls/f1").inputs[0].name == "IMAGE"
                assert client.infer("c0", [image]).as_numpy("VERDICT")[0] == b"OK"
        with closing(triton.InferenceServerClient(address)) as client:
            board = [bytes_input("BOARD", b"B1"), bytes_input("REF", b"R1")]
            for is_repeat in (False, True):
                answer = client.infer("c0", [image, *board], request_id="1", parameters={"key": "one"})
                assert json.loads(answer.as_numpy("DETAIL")[0])["is_repeat"] is is_repeat
            other = [bytes_input("IMAGE", picture((200, 0, 0))), *board]
            with pytest.raises(triton.InferenceServerException) as error:
                client.infer("c0", other, request_id="1", parameters={"key": "one"})
            assert error.value.status() == "StatusCode.ALREADY_EXISTS"
            client.unload_model("c0", headers=ADMIN)
            client.load_model("c0", headers=ADMIN)
            counted = client.get_inference_statistics("c0", as_json=True)["model_stats"][0]
            assert int(counted["inference_stats"]["success"]["count"]) == 4
        with grpc.insecure_channel(address) as channel:
            request = pb.GetBoardRequest(serial="B1")
            boards = inspection_pb2_grpc.InspectionStub(channel).GetBoard(request, timeout=60).boards
            assert [dict(board.missing) for board in boards] == [{"c1": 1}]
    assert [(row.subject.key, row.subject.board) for row in line.rows] == [("api/one", "B1")]


@pytest.fixture
def solder(line):
    """The line with an anomaly expert, and an image in which it finds a bright spot."""
    graph = brightness(("pred_score", "score"), ("anomaly_map", "map"))
    onnx.save_model(graph, line.folder / "solder.onnx")
    line.document["experts"]["look/solder"] = {
        "architecture": "onnx", "weights": "solder.onnx", "task": "anomaly", "threshold": 0.6,
        "input": {"size": [SIZE_PX, SIZE_PX], "normalize": "unit"},
    }  # fmt: skip
    line.document["routes"]["solder"] = [{"expert": "look/solder", "pass": ["ok"]}]
    line.document["memory"] = {"host": "60MiB", "workspace": "30MiB"}
    pixels = np.full((SIZE_PX, SIZE_PX, 3), 51, np.uint8)
    pixels[4:8, 20:24] = 255
    return encoded(pixels)


def brightest(png):
    shown = map_of(png)
    values = np.frombuffer(shown.values, np.uint8).reshape(shown.height, shown.width)
    return {(int(row), int(column)) for row, column in np.argwhere(values == 255)}


SPOT = {(row, column) for row in range(4, 8) for column in range(20, 24)}


def test_anomaly_map_is_sent_to_callers_that_ask_for_it(line, address, solder):
    with line.served(), grpc.insecure_channel(address) as channel:
        agent = inspection_pb2_grpc.InspectionStub(channel)
        request = pb.InspectRequest(file=solder, component="solder", key="one", wants_maps=True)
        question = pb.InspectRequest(file=solder, component="solder", is_question=True, wants_maps=True)
        for each in (request, request, question):
            (found,) = agent.Inspect(each, timeout=60).parts[0].anomalies
            assert (found.expert, found.score, found.threshold) == ("look/solder", pytest.approx(1.0), 0.6)
            assert brightest(found.map) == SPOT
        request.ClearField("wants_maps")
        assert not agent.Inspect(request, timeout=60).parts[0].anomalies[0].HasField("map")
        (good,) = agent.Inspect(
            pb.InspectRequest(file=picture((9, 9, 9)), component="solder", wants_maps=True), timeout=60
        ).parts
        assert (good.verdict, good.anomalies[0].HasField("map")) == (pb.VERDICT_OK, False)
        for wants_maps in (True, False):
            watched = agent.WatchResults(pb.WatchResultsRequest(after_seq=0, wants_maps=wants_maps), timeout=60)
            (stored,) = next(watched).result.anomalies
            assert (brightest(stored.map) == SPOT) if wants_maps else not stored.HasField("map")
            watched.cancel()
        with closing(triton.InferenceServerClient(address)) as caller:
            outputs = [triton.InferRequestedOutput(name) for name in ("ANOMALY_SCORE", "ANOMALY_MAP")]
            answer = caller.infer("expert:look/solder", [bytes_input("IMAGE", solder)], outputs=outputs)
        assert answer.as_numpy("ANOMALY_SCORE")[0] == pytest.approx(1.0)
        assert brightest(answer.as_numpy("ANOMALY_MAP")[0]) == SPOT


def test_expired_deadline_removes_an_inspection_from_the_queue(line, address, batches):
    line.document["executors"] = {"cpu": 1}
    request = pb.InspectRequest(file=picture(), component="c0", board="B1", ref="R1")
    with line.served() as service, grpc.insecure_channel(address) as channel:
        agent = inspection_pb2_grpc.InspectionStub(channel)
        agent.Status(pb.StatusRequest(), timeout=60)  # so that it is connected
        batches.clear()
        (running,) = ordered(service, order_of(picture(), component="c0", is_kept=False))
        until(lambda: any(queue.running for queue in service.desk.status().queues))
        call = agent.Inspect.future(request, timeout=1.0)
        until(lambda: call.done() or service.desk.status().requests_in_flight == 2)
        assert call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        until(lambda: service.desk.status().requests_in_flight == 1)
        batches.set()
        running.wait()
        until(lambda: service.desk.status().requests_in_flight == 0 and not line.unfinished)
        until(lambda: service.api.orders_under_way == service.api.calls == 0)
        assert service.judged == 0
        agent.Inspect(request, timeout=60)
        assert service.judged == 1


def test_reload_that_is_not_applied_keeps_the_token_too(line, tmp_path):
    token = tmp_path / "token"
    token.write_text("old")
    line.document["api"] = {"grpc": "127.0.0.1:0", "token": {"file": str(token)}}
    with line.served() as service:
        token.write_text("new")
        for weight_bytes, valid in ((30_000_000, "old"), (1_000_000, "new")):  # of 20 MiB of memory
            line.fake(1, weight_bytes=weight_bytes)
            assert service.desk.reload().is_applied is (valid == "new")
            with AgentClient(service.api.addresses[0], Access(token=valid)) as client:
                assert client.status().line == "test"


def test_calls_are_refused_at_a_stop_before_any_camera_is_waited_for(line, address, tmp_path, monkeypatch):
    camera = {"name": "top", "url": f"file:{tmp_path / 'none.avi'}", "component": "c0"}
    line.document["intake"] = {"cameras": [camera]}
    stop, answered = CameraSource.stop, []

    def stopped(source, timeout_s):
        if timeout_s:
            with AgentClient(address) as client, pytest.raises(AgentUnreachable):
                client.status()
            answered.append(False)
        return stop(source, timeout_s)

    monkeypatch.setattr(CameraSource, "stop", stopped)
    with line.served(), AgentClient(address) as client:
        assert client.status().sources[0].name == "top"
    assert answered == [False]


@pytest.mark.parametrize("taken", ["grpc", "http"])
def test_unusable_address_raises_an_alarm_and_is_opened_later(line, taken):
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        line.document["api"] = {"grpc": "127.0.0.1:0", "http": "127.0.0.1:0"} | {taken: address}
        with line.served() as service:
            assert [alarm for alarm in service.desk.status().alarms if address in alarm]
        with line.served() as service:
            (alarm,) = service.desk.status().alarms
            assert alarm.startswith(f"api.{taken}: AddressUnusable: {address}")
            free = service.web if taken == "grpc" else service.api
            socket.create_connection(("127.0.0.1", int(free.addresses[0].rpartition(":")[2])), 60).close()
            other.close()
            until(lambda: not service.desk.status().alarms)
            with AgentClient(service.api.addresses[0]) as client:
                assert client.status().line == "test"
