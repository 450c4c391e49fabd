"""The Open Inference Protocol to an unmodified tritonclient, over TCP and over a unix socket."""

import json
import math
import queue
from contextlib import suppress

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient import grpc as triton
from tritonclient.utils import InferenceServerException

from agent.doors.proto import inference_pb2 as oip
from agent.doors.proto import inference_pb2_grpc
from agent.doors.tensors import inputs_of
from experts.errors import OrderRefused, Refusing
from tests.agent.doors.fake_desk import MAP

DEADLINE_S = 30.0


def url(address):
    return address.replace("unix:/", "unix:///")


@pytest.fixture(params=["unix", "tcp"])
def client(server, request):
    address = next(each for each in server.addresses if each.startswith("unix:") == (request.param == "unix"))
    with triton.InferenceServerClient(url(address)) as client:
        yield client


@pytest.fixture
def local(server):
    with triton.InferenceServerClient(url(server.addresses[0])) as client:
        yield client


def texts(name, *values):
    tensor = triton.InferInput(name, [len(values)], "BYTES")
    tensor.set_data_from_numpy(np.array(values, dtype=object))
    return tensor


def refusal(ask, *given, **named):
    with pytest.raises(InferenceServerException) as error:
        ask(*given, **named)
    return error.value.status()


def test_alive_ready_metadata_and_an_image_judged(client, desk):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert [client.is_model_ready(name) for name in ("resistor", "expert:det/alignment")] == [True, False]
    server = client.get_server_metadata()
    told = {"model_configuration", "model_repository", "statistics", f"max_message_bytes:{16 * 2**20}"}
    assert (server.name, told - set(server.extensions)) == ("coserve", set())
    metadata = client.get_model_metadata("resistor", as_json=True)
    assert [tensor["name"] for tensor in metadata["inputs"]] == ["IMAGE", "BOARD", "REF"]
    assert {tensor["name"]: tensor["datatype"] for tensor in metadata["outputs"]} == {
        "VERDICT": "BYTES", "LABEL": "BYTES", "SCORE": "FP32", "DETAIL": "BYTES",
    }  # fmt: skip
    result = client.infer("resistor", [texts("IMAGE", b"an NG one")], request_id="q1", client_timeout=DEADLINE_S)
    assert result.get_response().id == "q1"
    assert [result.as_numpy(name).tolist() for name in ("VERDICT", "LABEL", "SCORE")] == [[b"NG"], [b"bad"], [0.75]]
    detail = json.loads(result.as_numpy("DETAIL")[0])
    assert (detail["experts"], detail["seconds"]) == (["cls/resistor", "det/alignment"], 0.5)
    assert detail["boxes"][0]["label"] == "good"
    assert desk.results == []  # a question: nothing remains of it


def test_a_model_that_measures_anomalies_answers_with_score_and_map_where_they_are_asked_for(client, desk):
    metadata = client.get_model_metadata("solder", as_json=True)
    extra = {tensor["name"]: tensor["datatype"] for tensor in metadata["outputs"][4:]}
    assert extra == {"ANOMALY_SCORE": "FP32", "ANOMALY_MAP": "BYTES"}
    config = client.get_model_config("solder").config
    assert [each.name for each in config.output][4:] == list(extra)
    outputs = [triton.InferRequestedOutput(name) for name in ("LABEL", *extra)]
    images = texts("IMAGE", b"strange and NG", b"plain")
    answer = client.infer("solder", [images], outputs=outputs, client_timeout=DEADLINE_S)
    np.testing.assert_equal(answer.as_numpy("ANOMALY_SCORE").tolist(), [3.5, math.nan])
    assert answer.as_numpy("ANOMALY_MAP").tolist() == [MAP, b""]
    assert [order.wants_maps for order in desk.orders] == [True, True]
    plain = client.infer("solder", [texts("IMAGE", b"strange and NG")], client_timeout=DEADLINE_S)
    assert plain.as_numpy("ANOMALY_MAP") is None
    assert not desk.orders[-1].wants_maps
    detail = json.loads(plain.as_numpy("DETAIL")[0])
    assert detail["anomalies"] == [{"expert": "look/solder", "score": 3.5, "threshold": 1.25}]
    assert detail["outputs"] == [{"label": "bent", "score": 0.75, "threshold": 0.5, "holds": True}]


def test_with_a_board_it_is_an_inspection_with_a_key_of_its_own_and_its_id_is_only_told_again(client, desk):
    """A Triton client counts its ids, and starts again at 1 with its process."""
    inspection = [texts("IMAGE", b"x"), texts("BOARD", b"B1"), texts("REF", b"R1")]
    for _ in range(2):
        answer = client.infer("resistor", inspection, request_id="1", parameters={"key": "k1"})
        assert answer.get_response().id == "1"
    (part,) = desk.results
    assert (part.subject.key, part.subject.board, part.subject.ref) == ("k1", "B1", "R1")
    client.infer("resistor", inspection, request_id="1")
    client.infer("resistor", inspection[:1], parameters={"board_serial": "B2", "ref": "R2", "board_type": "main"})
    last = desk.orders[-1].subject
    assert (last.board, last.ref, last.board_type) == ("B2", "R2", "main")
    assert ([order.subject.key for order in desk.orders], len(desk.results)) == (["k1", "k1", "", ""], 3)


def test_pixels_and_an_expert_and_only_the_outputs_that_are_asked_for(local, desk):
    image = triton.InferInput("IMAGE", [2, 3, 3], "UINT8")
    image.set_data_from_numpy(np.arange(18, dtype=np.uint8).reshape(2, 3, 3))
    outputs = [triton.InferRequestedOutput("SCORE"), triton.InferRequestedOutput("VERDICT")]
    result = local.infer("expert:cls/capacitor", [image], outputs=outputs)
    assert [output.name for output in result.get_response().outputs] == ["SCORE", "VERDICT"]
    assert desk.orders[0].subject.expert == "cls/capacitor"
    assert desk.orders[0].image.ravel().tolist() == list(range(18))


def test_several_images_are_several_orders(local, desk):
    images, boards = texts("IMAGE", b"x", b"NG", b"UNKNOWN"), texts("BOARD", b"B1", b"B3", b"B2")
    result = local.infer("resistor", [images, boards], parameters={"key": "k"})
    assert result.as_numpy("VERDICT").tolist() == [b"OK", b"NG", b"UNKNOWN"]
    assert math.isnan(result.as_numpy("SCORE")[2])
    assert json.loads(result.as_numpy("DETAIL")[2])["reason"] == "not an image"
    assert {order.subject.key: order.subject.board for order in desk.orders} == {"k/0": "B1", "k/1": "B3", "k/2": "B2"}


def test_where_one_of_several_is_refused_all_are(local, desk):
    desk.most, desk.holds = 2, True
    inputs_of = [texts("IMAGE", b"1", b"2", b"3")]
    assert refusal(local.infer, "resistor", inputs_of) == "StatusCode.RESOURCE_EXHAUSTED"
    desk.wait_for(lambda desk: not desk.under_way and len(desk.withdrawn) == 2)


def test_typed_contents_are_answered_in_kind(server):
    request = oip.ModelInferRequest(model_name="resistor")
    tensor = request.inputs.add(name="IMAGE", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(b"NG")
    with grpc.insecure_channel(server.addresses[0]) as channel:
        response = inference_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request)
    values = {output.name: output.contents for output in response.outputs}
    assert not response.raw_output_contents
    assert (list(values["VERDICT"].bytes_contents), list(values["SCORE"].fp32_contents)) == ([b"NG"], [0.75])
    pixels = oip.ModelInferRequest(model_name="resistor")
    tensor = pixels.inputs.add(name="IMAGE", datatype="UINT8", shape=[1, 1, 3])
    tensor.contents.uint_contents.extend([1, 2, 255])
    assert inputs_of(pixels, 1).images[0].tolist() == [[[1, 2, 255]]]


def test_statistics_grow_with_what_is_asked(local, desk):
    local.infer("resistor", [texts("IMAGE", b"1", b"2")])
    desk.most = 0
    refusal(local.infer, "resistor", [texts("IMAGE", b"1")])
    (model,) = local.get_inference_statistics("resistor").model_stats
    assert (model.inference_count, model.execution_count) == (2, 2)
    stats = model.inference_stats
    assert (stats.success.count, stats.fail.count, stats.queue.count, stats.queue.ns) == (1, 1, 2, 250_000_000)
    assert (stats.compute_infer.count, stats.compute_infer.ns) == (2, 500_000_000)
    everything = local.get_inference_statistics().model_stats
    assert ({each.name: each.inference_count for each in everything}["capacitor"], len(everything)) == (0, 6)


def test_the_repository_is_listed_loaded_and_unloaded_and_models_have_a_configuration(local, desk):
    config = local.get_model_config("resistor").config
    assert (config.name, config.max_batch_size, config.input[0].name) == ("resistor", 0, "IMAGE")
    assert [tensor.optional for tensor in config.input] == [False, True, True]
    assert config.input[0].data_type == 13  # TYPE_STRING
    parameters = {name: config.parameters[name].string_value for name in ("experts", "input_px")}
    assert parameters == {"experts": "cls/resistor, det/alignment", "input_px": "8 x 8"}
    models = {model.name: (model.state, model.reason) for model in local.get_model_repository_index().models}
    assert (models["resistor"], models["expert:det/alignment"]) == (("READY", ""), ("UNAVAILABLE", "quarantined"))
    assert len(models) == 6
    local.load_model("resistor")
    local.unload_model("expert:cls/capacitor")
    assert (desk.loaded, desk.unloaded) == (["resistor"], ["expert:cls/capacitor"])
    assert refusal(local.load_model, "resistor", config="{}") == "StatusCode.INVALID_ARGUMENT"


@pytest.mark.parametrize(
    ("name", "version"), [("", ""), ("nobody", ""), ("expert:", ""), ("expert:nobody", ""), ("resistor", "2")]
)
def test_a_model_that_is_none_is_not_found(local, name, version):
    def infer(name, version):
        local.infer(name, [texts("IMAGE", b"x")], model_version=version)

    infer("resistor", "1")
    for ask in (local.get_model_metadata, local.get_model_config, infer):
        assert refusal(ask, name, version) == "StatusCode.NOT_FOUND"


def test_what_is_not_served_says_so(local):
    for ask in (local.get_system_shared_memory_status, local.get_cuda_shared_memory_status, local.get_log_settings,
                local.get_trace_settings):  # fmt: skip
        assert refusal(ask) == "StatusCode.UNIMPLEMENTED"


def test_a_stream_answers_each_call_and_a_refusal_does_not_end_it(local):
    heard = queue.SimpleQueue()
    local.start_stream(lambda result, error: heard.put((result, error)))
    local.async_stream_infer("nobody", [texts("IMAGE", b"x")], request_id="1")
    error = heard.get(timeout=DEADLINE_S)[1]
    assert "NOT_FOUND" in error.message()
    local.async_stream_infer("resistor", [texts("IMAGE", b"NG")], request_id="2", enable_empty_final_response=True)
    result, _ = heard.get(timeout=DEADLINE_S)
    response = result.get_response()
    assert (response.id, result.as_numpy("VERDICT").tolist()) == ("2", [b"NG"])
    assert response.parameters["triton_final_response"].bool_param
    local.stop_stream()


def image(datatype="BYTES", shape=(1,), raw=b"\x01\0\0\0x", second=None, **keys):
    """A call with one image; ``second``: another input."""
    inputs = [{"name": "IMAGE", "datatype": datatype, "shape": shape} | keys.pop("tensor", {})]
    raws = [] if raw is None else [raw]
    if second is not None:
        inputs.append({"datatype": "BYTES", "shape": [1]} | second)
        raws.append(b"\x02\0\0\0\xff\xff")
    raws += keys.pop("raw_input_contents", [])
    return oip.ModelInferRequest(model_name="resistor", inputs=inputs, raw_input_contents=raws, **keys)


def parameter(name):
    return {"parameters": {name: {"string_param": "x"}}}


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (oip.ModelInferRequest(model_name="resistor"), "no tensor IMAGE"),
        (image("FP32", (1, 1, 3)), "IMAGE is FP32 [1, 1, 3]"), (image("UINT8", (3, 1, 1)), "UINT8 [3, 1, 1]"),
        (image("UINT8", (2, 2, 3)), "2 x 2 pixels"), (image("UINT8", (-1, -5, 3), bytes(15)), "-1 x -5 pixels"),
        (image("UINT8", (2**40, 2**40, 3)), "pixels"), (image(shape=(2,)), "holds 1"),
        (image(shape=(1, 1)), "BYTES [1, 1]"), (image(raw=b"\x01\0\0\0x" * 3), "holds more"),
        (image(outputs=[{"name": "VERDICT"}] * 101), "101 outputs"), (image(shape=(0,), raw=b""), "BYTES [0]"),
        (image(shape=()), "BYTES []"), (image(raw=b"\xff\xff\xff\xffx"), "ends within"),
        (image(raw=b"\x01\0"), "ends within"), (image(raw=b"\0\0\0\0"), "empty image"), (image(raw=None), "holds 0"),
        (image(raw_input_contents=[b""]), "2 raw_input_contents for 1"),
        (image(tensor={"contents": {"bytes_contents": [b"x"]}}), "send it once"),
        (image(tensor=parameter("shared_memory_region")), "shared memory"),
        (image(outputs=[{"name": "VERDICT"} | parameter("shared_memory_region")]), "shared memory"),
        (image(outputs=[{"name": "VERDICT"} | parameter("classification")]), "LABEL"),
        (image(outputs=[{"name": "MASK"}]), "no output"),
        (image(parameters={"board": {"int64_param": 3}}), "leading zeros"), (image(second={"name": "IMAGE"}), "twice"),
        (image(second={"name": "MASK"}), "no input"), (image(second={"name": "BOARD"}), "UTF-8"),
        (image(second={"name": "BOARD", "datatype": "INT64"}), "BOARD is INT64"),
        (image("UINT8", (1, 1, 3), None, tensor={"contents": {"uint_contents": [1, 2, 256]}}), "above 255"),
    ],
)  # fmt: skip
def test_tensors_that_contradict_themselves_are_refused_in_words(request_, says):
    with pytest.raises(OrderRefused) as refused:
        inputs_of(request_, 1000)
    assert refused.value.reason is Refusing.INVALID
    assert says in str(refused.value)


def test_more_images_than_the_line_takes_at_once_never_fit():
    request = image(shape=(4,), raw=b"\x01\0\0\0x" * 4)
    assert len(inputs_of(request, 4).images) == 4
    with pytest.raises(OrderRefused, match="IMAGE holds 4 at once, where the line takes 3") as refused:
        inputs_of(request, 3)
    assert refused.value.reason is Refusing.TOO_LARGE


def test_one_board_is_all_images_and_two_for_three_are_none():
    request = image(shape=(3,), raw=b"\x01\0\0\0x" * 3, second={"name": "BOARD"})
    request.raw_input_contents[1] = b"\x02\0\0\0B1"
    assert inputs_of(request, 3).boards == ("B1", "B1", "B1")
    request.inputs[1].shape[:] = [2]
    request.raw_input_contents[1] = b"\x02\0\0\0B1" * 2
    with pytest.raises(OrderRefused):
        inputs_of(request, 3)


tensor = st.builds(
    dict,
    name=st.sampled_from(["IMAGE", "BOARD", "REF", "", "X"]),
    datatype=st.sampled_from(["BYTES", "UINT8", "FP32", ""]),
    shape=st.lists(st.sampled_from([-1, 0, 1, 2, 3, 2**62]), max_size=4),
)


@given(
    st.lists(tensor, max_size=3),
    st.lists(st.binary(max_size=12) | st.just(b"\x01\0\0\0x"), max_size=3),
    st.lists(st.sampled_from(["VERDICT", "SCORE", "X"]), max_size=2),
)
def test_whatever_the_tensors_are_they_are_read_or_refused(inputs, raw, outputs):
    request = oip.ModelInferRequest(inputs=inputs, raw_input_contents=raw, outputs=[{"name": name} for name in outputs])
    with suppress(OrderRefused):
        found = inputs_of(request, 1000)
        assert len(found.images) == len(found.boards) == len(found.refs) >= 1
