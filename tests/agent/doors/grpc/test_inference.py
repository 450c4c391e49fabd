"""The Open Inference Protocol over gRPC alone: typed contents, streams, and tensors that contradict themselves."""

import queue
from contextlib import suppress

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient import grpc as triton

from agent.doors.proto import inference_pb2 as oip
from agent.doors.proto import inference_pb2_grpc
from agent.doors.tensors import inputs_of
from agent.faults.errors import OrderRefused, Reason

DEADLINE_S = 30.0


def texts(name, *values):
    tensor = triton.InferInput(name, [len(values)], "BYTES")
    tensor.set_data_from_numpy(np.array(values, dtype=object))
    return tensor


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


@pytest.fixture
def local(server):
    with triton.InferenceServerClient(server.addresses[1]) as client:
        yield client


def test_refused_call_of_a_stream_does_not_end_the_stream(local):
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
    assert refused.value.reason is Reason.INVALID
    assert says in str(refused.value)


def test_more_images_than_the_limit_in_one_call_are_refused_for_good():
    request = image(shape=(4,), raw=b"\x01\0\0\0x" * 4)
    assert len(inputs_of(request, 4).images) == 4
    with pytest.raises(OrderRefused, match="IMAGE holds 4 at once, where the line takes 3") as refused:
        inputs_of(request, 3)
    assert refused.value.reason is Reason.TOO_LARGE


def test_one_board_tensor_value_counts_for_all_images_and_a_wrong_number_is_refused():
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
def test_any_tensors_are_read_or_refused(inputs, raw, outputs):
    request = oip.ModelInferRequest(inputs=inputs, raw_input_contents=raw, outputs=[{"name": name} for name in outputs])
    with suppress(OrderRefused):
        found = inputs_of(request, 1000)
        assert len(found.images) == len(found.boards) == len(found.refs) >= 1
