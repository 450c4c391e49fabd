"""The Open Inference Protocol to unmodified clients of Triton: each behaviour over each wire."""

import json
import math

import numpy as np
import pytest
from tritonclient import grpc as over_grpc
from tritonclient import http as over_http
from tritonclient.utils import InferenceServerException

from agent.doors.http.inference.bodies import plain
from agent.doors.refusals import STATUSES
from agent.faults.errors import Reason
from tests.agent.doors.fake_desk import MAP
from tests.agent.doors.http.inference.conftest import served

__all__ = ["served"]

IN_MESSAGES = {"get_model_config": "config", "get_model_repository_index": "models"}  # HTTP answers with these alone


class Wire:
    def __init__(self, triton, client):
        self.triton, self.client, self.is_http = triton, client, triton is over_http

    def texts(self, name, *values):
        tensor = self.triton.InferInput(name, [len(values)], "BYTES")
        tensor.set_data_from_numpy(np.array(values, dtype=object))
        return tensor

    def outputs(self, *names):
        return [self.triton.InferRequestedOutput(name) for name in names]

    def infer(self, model, *tensors, **named):
        return self.client.infer(model, list(tensors), **named)

    def answer(self, ask, *given):
        """An answer as JSON has it."""
        raw = getattr(self.client, ask)(*given)
        if self.is_http:
            return raw
        return plain(raw)[IN_MESSAGES[ask]] if ask in IN_MESSAGES else plain(raw)

    def refuses(self, reason, ask, *given, **named):
        """Whether it is refused for that reason, by the wire's status; the message."""
        status, name = STATUSES[reason]
        with pytest.raises(InferenceServerException) as error:
            ask(*given, **named)
        assert error.value.status() == (str(status) if self.is_http else f"StatusCode.{name}")
        return error.value.message()


@pytest.fixture(params=["unix", "tcp", "http"])
def wire(request):
    if request.param == "http":
        with over_http.InferenceServerClient(request.getfixturevalue("served").address) as client:
            yield Wire(over_http, client)
    else:
        unix, tcp = request.getfixturevalue("server").addresses
        address = unix.replace("unix:/", "unix:///") if request.param == "unix" else tcp
        with over_grpc.InferenceServerClient(address) as client:
            yield Wire(over_grpc, client)


def test_health_metadata_configuration_and_repository_are_equal_over_both_wires(wire, desk):
    client = wire.client
    assert client.is_server_live()
    assert client.is_server_ready()
    names = ("resistor", "expert:cls/capacitor", "expert:det/alignment")
    assert [client.is_model_ready(name) for name in names] == [True, True, False]
    server = wire.answer("get_server_metadata")
    extensions = {"model_configuration", "model_repository", "statistics"}
    assert (server["name"], extensions - set(server["extensions"])) == ("coserve", set())
    assert any(each.startswith("max_message_bytes:") for each in server["extensions"])
    metadata = wire.answer("get_model_metadata", "resistor")
    assert metadata["inputs"] == [{"name": n, "datatype": "BYTES", "shape": [-1]} for n in ("IMAGE", "BOARD", "REF")]
    assert {tensor["name"]: tensor["datatype"] for tensor in metadata["outputs"]} == {
        "VERDICT": "BYTES", "LABEL": "BYTES", "SCORE": "FP32", "DETAIL": "BYTES",
    }  # fmt: skip
    config = wire.answer("get_model_config", "resistor")
    assert (config["name"], config["max_batch_size"]) == ("resistor", 0)
    assert [tensor["optional"] for tensor in config["input"]] == [False, True, True]
    assert {"name": "SCORE", "data_type": "TYPE_FP32", "dims": [-1]}.items() <= config["output"][2].items()
    facts = {name: config["parameters"][name]["string_value"] for name in ("experts", "input_px")}
    assert facts == {"experts": "cls/resistor, det/alignment", "input_px": "8 x 8"}
    models = {model["name"]: (model["state"], model["reason"]) for model in wire.answer("get_model_repository_index")}
    assert (models["resistor"], models["expert:det/alignment"]) == (("READY", ""), ("UNAVAILABLE", "quarantined"))
    assert len(models) == 6
    desk.is_stopping = True
    assert (client.is_server_live(), client.is_server_ready()) == (True, False)


def test_images_without_a_board_are_judged_and_not_stored(wire, desk):
    result = wire.infer("resistor", wire.texts("IMAGE", b"an NG one", b"UNKNOWN"), request_id="q1")
    response = result.get_response()
    assert (response["id"] if wire.is_http else response.id) == "q1"
    assert [result.as_numpy(name).tolist() for name in ("VERDICT", "LABEL")] == [[b"NG", b"UNKNOWN"], [b"bad", b""]]
    np.testing.assert_equal(result.as_numpy("SCORE").tolist(), [0.75, math.nan])
    first, second = map(json.loads, result.as_numpy("DETAIL"))
    assert (first["experts"], first["seconds"]) == (["cls/resistor", "det/alignment"], 0.5)
    assert (first["boxes"][0]["label"], second["reason"]) == ("good", "not an image")
    assert desk.results == []


def test_anomaly_model_answers_with_score_and_map_if_asked_for(wire, desk):
    extra = {each["name"]: each["datatype"] for each in wire.answer("get_model_metadata", "solder")["outputs"][4:]}
    assert extra == {"ANOMALY_SCORE": "FP32", "ANOMALY_MAP": "BYTES"}
    assert [each["name"] for each in wire.answer("get_model_config", "solder")["output"]][4:] == list(extra)
    images = wire.texts("IMAGE", b"strange and NG", b"plain")
    answer = wire.infer("solder", images, outputs=wire.outputs("LABEL", *extra))
    np.testing.assert_equal(answer.as_numpy("ANOMALY_SCORE").tolist(), [3.5, math.nan])
    assert answer.as_numpy("ANOMALY_MAP").tolist() == [MAP, b""]
    assert [order.wants_maps for order in desk.orders] == [True, True]
    answer = wire.infer("solder", wire.texts("IMAGE", b"strange and NG"))
    assert answer.as_numpy("ANOMALY_MAP") is None
    assert not desk.orders[-1].wants_maps
    detail = json.loads(answer.as_numpy("DETAIL")[0])
    assert detail["anomalies"] == [{"expert": "look/solder", "score": 3.5, "threshold": 1.25}]
    assert detail["outputs"] == [{"label": "bent", "score": 0.75, "threshold": 0.5, "holds": True}]


def test_inspection_has_its_own_key_and_echoes_the_request_id(wire, desk):
    """A Triton client counts its ids, and starts again at 1 with its process."""
    inspection = [wire.texts("IMAGE", b"x"), wire.texts("BOARD", b"B1"), wire.texts("REF", b"R1")]
    for _ in range(2):
        wire.infer("resistor", *inspection, request_id="1", parameters={"key": "k1"})
    (part,) = desk.results
    assert (part.subject.key, part.subject.board, part.subject.ref) == ("k1", "B1", "R1")
    wire.infer("resistor", *inspection, request_id="1")
    wire.infer("resistor", inspection[0], parameters={"board_serial": "B2", "ref": "R2", "board_type": "main"})
    last = desk.orders[-1].subject
    assert (last.board, last.ref, last.board_type) == ("B2", "R2", "main")
    assert ([order.subject.key for order in desk.orders], len(desk.results)) == (["k1", "k1", "", ""], 3)
    images, boards = wire.texts("IMAGE", b"x", b"NG", b"y"), wire.texts("BOARD", b"B1", b"B3", b"B2")
    assert wire.infer("resistor", images, boards, parameters={"key": "k"}).as_numpy("VERDICT").tolist()[1] == b"NG"
    several = {order.subject.key: order.subject.board for order in desk.orders[4:]}
    assert several == {"k/0": "B1", "k/1": "B3", "k/2": "B2"}


@pytest.mark.parametrize(
    ("parameters", "tensors", "says"),
    [
        ({"board": "", "ref": "R1", "key": "k"}, {}, "board is empty: if the scanner read nothing"),
        ({"board": " \t", "ref": "R1"}, {}, "board is empty"), ({"board_serial": ""}, {}, "board_serial is empty"),
        ({}, {"BOARD": b"", "REF": b"R1"}, "BOARD is empty"), ({"board": "B1"}, {"REF": b" "}, "REF is empty"),
        ({"board": "B1", "ref": ""}, {}, "ref is empty"), ({"board": "B1", "ref": "R1", "key": ""}, {}, "key is"),
        ({"Board": "B1", "ref": "R1"}, {}, "no parameter of the call is called 'Board' - they are board,"),
        ({"serial": "B1"}, {}, "'serial'"), ({"board": 1042, "ref": "R1"}, {}, "leading zeros"),
        ({"board": True}, {}, "true or false"), ({"key": "k", "ref": "R1"}, {}, "ref, key without a board"),
        ({}, {"REF": b"R1"}, "REF without a board"), ({"board_type": "main"}, {}, "board_type without a board"),
        ({"board": "B1", "board_serial": "B2"}, {}, "besides - send it once"),
        ({"board": "B1", "ref": "R1"}, {"BOARD": b"B2"}, "the tensor BOARD and the parameter board differ"),
    ],
)  # fmt: skip
def test_inspection_with_an_empty_or_misspelt_field_is_refused(wire, desk, parameters, tensors, says):
    sent = [wire.texts(name, value) for name, value in {"IMAGE": b"NG", **tensors}.items()]
    assert says in wire.refuses(Reason.INVALID, wire.infer, "resistor", *sent, parameters=parameters)
    assert desk.orders == []


def test_pixels_an_expert_and_selected_outputs_are_answered(wire, desk):
    image = wire.triton.InferInput("IMAGE", [2, 3, 3], "UINT8")
    image.set_data_from_numpy(np.arange(18, dtype=np.uint8).reshape(2, 3, 3))
    result = wire.infer("expert:cls/capacitor", image, outputs=wire.outputs("SCORE", "VERDICT"))
    response = result.get_response()
    outputs = response["outputs"] if wire.is_http else plain(response)["outputs"]
    assert [output["name"] for output in outputs] == ["SCORE", "VERDICT"]
    assert desk.orders[0].subject.expert == "cls/capacitor"
    assert desk.orders[0].image.ravel().tolist() == list(range(18))


def test_refusal_of_one_image_refuses_the_whole_call(wire, desk):
    desk.most, desk.holds = 2, True
    wire.refuses(Reason.QUEUE_FULL, wire.infer, "resistor", wire.texts("IMAGE", b"1", b"2", b"3"))
    desk.wait_for(lambda desk: not desk.under_way and len(desk.withdrawn) == 2)


def test_statistics_grow_with_the_judged_images(wire, desk):
    wire.infer("resistor", wire.texts("IMAGE", b"1", b"2"))
    desk.most = 0
    wire.refuses(Reason.QUEUE_FULL, wire.infer, "resistor", wire.texts("IMAGE", b"1"))
    (model,) = wire.answer("get_inference_statistics", "resistor")["model_stats"]
    assert (model["inference_count"], model["execution_count"]) == (2, 2)
    stats = model["inference_stats"]
    assert (stats["success"]["count"], stats["fail"]["count"]) == (1, 1)
    assert (stats["queue"], stats["compute_infer"]) == (
        {"count": 2, "ns": 250_000_000}, {"count": 2, "ns": 500_000_000},
    )  # fmt: skip
    everything = wire.answer("get_inference_statistics")["model_stats"]
    assert ({each["name"]: each["inference_count"] for each in everything}["capacitor"], len(everything)) == (0, 6)


@pytest.mark.parametrize("wire", ["unix", "http"], indirect=True)  # which their owner alone may
def test_models_are_loaded_and_unloaded_but_not_with_a_callers_configuration(wire, desk):
    wire.client.load_model("resistor")
    wire.client.unload_model("expert:cls/capacitor")
    assert (desk.loaded, desk.unloaded) == (["resistor"], ["expert:cls/capacitor"])
    wire.refuses(Reason.INVALID, wire.client.load_model, "resistor", config="{}")


@pytest.mark.parametrize(
    ("name", "version"), [("", ""), ("nobody", ""), ("expert:", ""), ("expert:nobody", ""), ("resistor", "2")]
)
def test_unknown_model_or_version_is_not_found(wire, name, version):
    def infer(name, version):
        wire.infer(name, wire.texts("IMAGE", b"x"), model_version=version)

    infer("resistor", "1")
    for ask in (wire.client.get_model_metadata, wire.client.get_model_config, infer):
        wire.refuses(Reason.NOT_FOUND, ask, name, version)


def test_unsupported_calls_are_answered_as_such(wire):
    client = wire.client
    for ask in (client.get_system_shared_memory_status, client.get_cuda_shared_memory_status, client.get_log_settings,
                client.get_trace_settings):  # fmt: skip
        with pytest.raises(InferenceServerException) as error:
            ask()
        assert error.value.status() == ("404" if wire.is_http else "StatusCode.UNIMPLEMENTED")
