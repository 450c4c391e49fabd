"""Parameters of an infer call over gRPC: which are known, where they stand, and what they make of a call."""

import base64
import threading

import grpc
import pytest

from agent.doors import tensors
from agent.doors.proto import inference_pb2 as oip
from agent.doors.proto import inference_pb2_grpc, inspection_pb2_grpc
from agent.doors.proto import inspection_pb2 as pb
from tests.agent.doors.conftest import DEADLINE_S, metadata, refused

PNG = b"\x89PNG\r\n\x1a\n\x00 NG"


def value_of(value):
    if isinstance(value, bool):
        return oip.InferParameter(bool_param=value)
    return oip.InferParameter(**{"int64_param" if isinstance(value, int) else "string_param": value})


def call(parameters=None, of_tensor=None, image=b"NG", **others):
    request = oip.ModelInferRequest(model_name="resistor")
    tensor = request.inputs.add(name="IMAGE", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(image)
    for name, value in others.items():
        request.inputs.add(name=name, datatype="BYTES", shape=[1]).contents.bytes_contents.append(value)
    for into, values in ((request.parameters, parameters), (tensor.parameters, of_tensor)):
        for name, value in (values or {}).items():
            into[name].CopyFrom(value_of(value))
    return request


@pytest.fixture
def infer(channel):
    stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
    return lambda request: stub.ModelInfer(request, timeout=DEADLINE_S)


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (call(of_tensor={"boad": "B1"}), "of the input IMAGE is called 'boad'"),
        (call({"board": "B1"}, {"board": "B2"}), "'B2' with IMAGE, and 'B1' besides"),
        (call(of_tensor={"content_type": "jpeg"}), "content_type is 'jpeg', where base64"),
        (call({"content_type": "jpeg"}, {"content_type": "base64"}, b"TkdORw=="), "content_type is 'jpeg'"),
        (call(image=base64.b64encode(PNG)), "IMAGE is base64 - say so"),
        (call(of_tensor={"content_type": "base64"}, image=b"no base 64"), "IMAGE is no base64"),
        (call(of_tensor={"content_type": "base64"}, image=b"data:image/png,abcd"), "data: URL"),
    ],
)  # fmt: skip
def test_contradictory_or_unknown_tensor_parameters_are_refused(infer, desk, request_, says):
    error = refused(infer, request_)
    assert metadata(error)["coserve-reason"] == "INVALID"
    assert says in error.details()
    assert desk.orders == []


def test_unknown_parameter_of_an_output_is_refused_by_name(infer, desk):
    request = call()
    request.outputs.add(name="LABEL").parameters["top_k"].int64_param = 3
    assert "of the output LABEL is called 'top_k' - they are binary_data" in refused(infer, request).details()
    assert desk.orders == []


@pytest.mark.parametrize(
    "request_",
    [
        call({"board": "B1", "ref": "R1", "key": "k", "board_type": "main"}),
        call(of_tensor={"board": "B1", "ref": "R1", "key": "k", "board_type": "main", "content_type": "np"}),
        call({"board_serial": "B1", "key": "k", "board_type": "main"}, {"ref": "R1", "board": "B1"}),
        call({"key": "k", "board_type": "main", "board": "B1"}, BOARD=b"B1", REF=b"R1"),
    ],
    ids=["the call's", "the tensor's", "both", "tensors"],
)
def test_inspection_parameters_may_stand_with_call_or_tensor(infer, desk, request_):
    infer(request_)
    (part,) = desk.results
    subject = part.subject
    assert (subject.board, subject.ref, subject.key, subject.board_type) == ("B1", "R1", "k", "main")


def test_parameters_that_clients_add_by_themselves_are_accepted(infer, desk):
    usual = {"sequence_id": 7, "sequence_start": True, "sequence_end": True, "priority": 1, "timeout": 5_000_000}
    infer(call(usual | {"triton_enable_empty_final_response": True, "content_type": "str", "headers": "x"}))
    assert [order.is_kept for order in desk.orders] == [False]


@pytest.mark.parametrize("form", ["{}", "data:image/png;base64,{}", "lines"])
@pytest.mark.parametrize("place", ["call", "tensor"])
def test_base64_may_have_line_breaks_and_be_a_data_url(infer, desk, form, place):
    text = (
        base64.encodebytes(PNG * 20).decode() if form == "lines" else form.format(base64.b64encode(PNG * 20).decode())
    )
    said = {"content_type": "base64"}
    infer(call(said, image=text.encode()) if place == "call" else call(None, said, image=text.encode()))
    assert [order.image for order in desk.orders] == [PNG * 20]


def test_conversion_of_many_typed_numbers_blocks_no_other_call(channel, server, desk, monkeypatch):
    began, may_end, convert = threading.Event(), threading.Event(), tensors._uint8

    def held(tensor):
        began.set()
        assert may_end.wait(DEADLINE_S)
        return convert(tensor)

    monkeypatch.setattr(tensors, "_uint8", held)
    request = oip.ModelInferRequest(model_name="resistor")
    tensor = request.inputs.add(name="IMAGE", datatype="UINT8", shape=[200, 100, 3])
    tensor.contents.uint_contents.extend([7] * 60_000)
    answer = inference_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer.future(request, timeout=DEADLINE_S)
    assert began.wait(DEADLINE_S)
    assert inspection_pb2_grpc.InspectionStub(channel).Status(pb.StatusRequest(), timeout=DEADLINE_S).line == "test"
    assert not answer.done()
    may_end.set()
    assert answer.result(DEADLINE_S).outputs
    assert desk.orders[0].image.shape == (200, 100, 3)


def test_typed_numbers_of_another_count_than_the_shape_are_refused_unconverted(infer, desk):
    request = oip.ModelInferRequest(model_name="resistor")
    tensor = request.inputs.add(name="IMAGE", datatype="UINT8", shape=[2, 2, 3])
    tensor.contents.uint_contents.extend([300] * 11)
    assert "has the shape [2, 2, 3], and holds 11" in refused(infer, request).details()


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"ref": "R1"}, "ref without a board"), ({"board": "B1", "ref": "R1", "is_question": True}, "in a question"),
        ({"key": "k", "is_question": True}, "key in a question"), ({"board": "  ", "ref": "R1"}, "board is blank"),
        ({"board": "B1", "ref": " "}, "ref is blank"), ({"board": "B1", "ref": "R1", "key": "\n"}, "key is blank"),
    ],
)  # fmt: skip
def test_inspection_with_blank_or_misplaced_fields_is_refused(agent, desk, keys, says):
    request = pb.InspectRequest(file=b"x", component="resistor", **keys)
    error = refused(agent.Inspect, request, timeout=DEADLINE_S)
    assert (error.code(), says in error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, True), error.details()
    assert desk.orders == []


def test_field_of_a_newer_protocol_is_refused_by_its_number(channel, desk):
    inspect = channel.unary_unary("/coserve.v1.Inspection/Inspect")
    newer = pb.InspectRequest(file=b"x", component="resistor").SerializeToString() + b"\xa0\x06\x01"
    assert "field 100 is not known here" in refused(inspect, newer, timeout=DEADLINE_S).details()
    assert desk.orders == []
