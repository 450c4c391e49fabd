"""The Open Inference Protocol over HTTP to an unmodified tritonclient, and to callers who send whatever they like."""

import base64
import gzip
import json
import math
import shlex
import socket
import subprocess
import zlib

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers
from tritonclient import http as triton
from tritonclient.utils import InferenceServerException

from agent.doors.access import ANONYMOUS, Caller, Role
from agent.doors.http.inference.bodies import MOST_VALUES, infer_request
from agent.faults.errors import OrderRefused, Reason
from tests.agent.doors.fake_desk import MAP
from tests.agent.doors.http.inference.conftest import MESSAGE_BYTES

INFER = "/v2/models/resistor/infer"
HEADER = "inference-header-content-length"


@pytest.fixture
def client(served):
    with triton.InferenceServerClient(served.address, concurrency=4) as client:
        yield client


@pytest.fixture
def http(served):
    with httpx.Client(base_url=f"http://{served.address}", timeout=30) as http:
        yield http


def texts(name, *values, binary=True):
    tensor = triton.InferInput(name, [len(values)], "BYTES")
    tensor.set_data_from_numpy(np.array(values, dtype=object), binary_data=binary)
    return tensor


def refusal(ask, *given, **named):
    with pytest.raises(InferenceServerException) as error:
        ask(*given, **named)
    return error.value.status(), error.value.message()


def in_json(**keys):
    tensor = {"name": "IMAGE", "shape": [1], "datatype": "BYTES", "data": ["NG"]}
    return {"inputs": [tensor | keys]}


def test_unknown_model_or_version_is_not_ready(client):
    assert [client.is_model_ready("expert:cls/capacitor", version) for version in ("1", "2")] == [True, False]
    assert not client.is_model_ready("nobody")
    assert "binary_tensor_data" in client.get_server_metadata()["extensions"]


def test_repository_index_may_list_ready_models_only(http):
    everything, ready = (http.post("/v2/repository/index", json={"ready": ready}).json() for ready in (False, True))
    assert {model["name"] for model in everything} - {model["name"] for model in ready} == {"expert:det/alignment"}
    assert http.post("/v2/repository/index").json() == everything


@pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
@pytest.mark.parametrize("is_binary", [True, False])
def test_images_are_judged_as_binary_data_and_as_json(client, compression, is_binary):
    images = texts("IMAGE", b"an NG one", b"UNKNOWN", binary=is_binary)
    outputs = [triton.InferRequestedOutput(name, binary_data=is_binary) for name in ("VERDICT", "LABEL", "SCORE")]
    compressed = {f"{way}_compression_algorithm": compression for way in ("request", "response")}
    answer = client.infer("resistor", [images], outputs=outputs, request_id="q1", **compressed)
    told = answer.get_response()
    assert (told["id"], told["model_name"], told["model_version"]) == ("q1", "resistor", "1")
    assert [("data" in output) for output in told["outputs"]] == [not is_binary] * 3
    words = {name: answer.as_numpy(name).astype("S").tolist() for name in ("VERDICT", "LABEL")}
    assert words == {"VERDICT": [b"NG", b"UNKNOWN"], "LABEL": [b"bad", b""]}
    np.testing.assert_equal(answer.as_numpy("SCORE").tolist(), [0.75, math.nan])


def test_pixels_in_json_may_be_nested_or_flat(http, desk):
    rows = [[[1, 2, 3], [4, 5, 255]]]
    for data in (rows, [1, 2, 3, 4, 5, 255]):
        assert http.post(INFER, json=in_json(datatype="UINT8", shape=[1, 2, 3], data=data)).status_code == 200
    assert [order.image.tolist() for order in desk.orders] == [rows] * 2


def test_concurrent_calls_are_each_answered(client, desk):
    desk.holds = True
    waiting = [client.async_infer("resistor", [texts("IMAGE", image)]) for image in (b"1", b"NG", b"3")]
    desk.wait_for(lambda desk: len(desk.under_way) == 3)
    desk.release()
    assert [one.get_result().as_numpy("VERDICT")[0] for one in waiting] == [b"OK", b"NG", b"OK"]


def test_more_callers_may_wait_than_bodies_are_open(served, desk):
    """A body is closed once its images are counted."""
    desk.holds = True
    with triton.InferenceServerClient(served.address, concurrency=9) as client:
        waiting = [client.async_infer("resistor", [texts("IMAGE", b"1")]) for _ in range(9)]
        desk.wait_for(lambda desk: len(desk.under_way) == 9)
        desk.release()
        assert all(one.get_result() for one in waiting)


def test_caller_that_leaves_withdraws_its_image(served, desk):
    desk.holds = True
    host, port = served.address.split(":")
    body = json.dumps(in_json()).encode()
    with socket.create_connection((host, int(port))) as caller:
        caller.sendall(
            b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (INFER.encode(), len(body), body)
        )
        desk.wait_for(lambda desk: desk.under_way)
    desk.wait_for(lambda desk: desk.withdrawn and not desk.under_way)


def test_anomaly_map_is_base64_in_json(client):
    wanted = [triton.InferRequestedOutput("ANOMALY_MAP", binary_data=False)]
    answer = client.infer("solder", [texts("IMAGE", b"strange and NG")], outputs=wanted)
    assert base64.b64decode(answer.as_numpy("ANOMALY_MAP")[0]) == MAP
    assert answer.get_output("ANOMALY_MAP")["parameters"] == {"content_type": "base64"}


def test_image_may_be_base64_and_a_body_may_be_a_bare_file(http, desk):
    encoded = in_json(parameters={"content_type": "base64"}, data=[base64.b64encode(b"\xff\xd8 NG").decode()])
    alone = http.post(INFER, content=b"\xff\xd8 NG", headers={HEADER: "0"})
    for answer in (http.post(INFER, json=encoded), alone):
        assert [output["data"] for output in answer.json()["outputs"][:3]] == [["NG"], ["bad"], [0.75]]
    assert [order.image for order in desk.orders] == [b"\xff\xd8 NG"] * 2


def test_reader_may_ask_but_only_an_inspector_stores(served, client, desk):
    board = [texts("IMAGE", b"x"), texts("BOARD", b"B1", binary=False), texts("REF", b"R1")]
    for caller, status in ((Caller("mes", Role.READ), "403"), (Caller(ANONYMOUS, Role.READ), "401")):
        served.who = caller
        for sent, more in ((board, {}), (board[:1], {"parameters": {"board_serial": "B2"}})):
            assert refusal(client.infer, "resistor", sent, **more)[0] == status
        assert client.infer("resistor", board[:1]).as_numpy("VERDICT")[0] == b"OK"
    served.who = Caller(ANONYMOUS, Role.INSPECT)
    client.infer("resistor", board)
    assert len(desk.results) == 1


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({"board": None, "ref": "R1"}, "board: is null - if the scanner read nothing"), ({"board": ["B1"]}, "board"),
        ({"board": "", "ref": "R1", "key": "k"}, "board is empty"), ({"serial": None}, "serial: is null"),
        ({"board": 2**64}, "board: is no text"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("place", ["call", "tensor"])
def test_malformed_inspection_parameter_is_refused_and_not_judged_as_a_question(http, desk, parameters, says, place):
    sent = in_json() | {"parameters": parameters} if place == "call" else in_json(parameters=parameters)
    answer = http.post(INFER, json=sent)
    assert (answer.status_code, says in answer.json()["error"]) == (400, True), answer.text
    assert desk.orders == []


def test_tensor_parameters_make_an_inspection_and_mlservers_nulls_are_accepted(http, desk):
    image = base64.b64encode(b"\xff\xd8 NG").decode()
    named = {"board": "B1", "ref": "R1", "content_type": "base64"}
    sent = in_json(parameters=named, data=[image]) | {"parameters": {"content_type": None, "headers": {"a": "b"}}}
    assert http.post(INFER, json=sent).status_code == 200
    (part,) = desk.results
    assert (part.subject.board, part.subject.ref, desk.orders[0].image) == ("B1", "R1", b"\xff\xd8 NG")


def test_misplaced_parameter_is_refused_by_name(http, desk):
    headers = {HEADER: "0"}
    answer = http.post(f"{INFER}?board=B1&ref=R1", content=b"NG", headers=headers)
    assert (answer.status_code, "board: is in the address" in answer.json()["error"]) == (400, True)
    for sent, says in ((in_json() | {"board": "B1"}, "they are id, model_name, parameters, inputs, outputs"),
                       (in_json(board="B1"), "they are name, parameters, datatype, shape, data")):  # fmt: skip
        assert says in http.post(INFER, json=sent).json()["error"]
    assert desk.orders == []


UPLOADS = {
    "a form": {"files": {"image": b"\x89PNG\r\n\x1a\n\0"}},
    "a form for a file alone": {"files": {"image": b"\x89PNG"}, "headers": {HEADER: "0"}},
    "a file without the header": {"content": b"\x89PNG\r\n\x1a\n\0"},
    "an image by its type": {"content": b"\xff\xd8\xff\0", "headers": {"content-type": "image/jpeg"}},
    "a PNG without its line ends": {"content": b"\x89PNG\x1a", "headers": {HEADER: "0"}},
    "text in UTF-16": {"content": '{"inputs": []}'.encode("utf-16")},
}


@pytest.mark.parametrize("sent", UPLOADS.values(), ids=UPLOADS)
def test_upload_of_another_kind_is_refused_with_a_working_curl_command(http, served, desk, tmp_path, sent):
    answer = http.post(INFER, **sent)
    assert answer.status_code == 400
    told = answer.json()["error"]
    command = shlex.split(told[told.index("curl ") :].replace("@image.png", f"@{tmp_path / 'image.png'}"))
    (tmp_path / "image.png").write_bytes(b"\xff\xd8 NG\0")
    done = subprocess.run([*command, "--silent"], capture_output=True, check=True, timeout=60)
    assert json.loads(done.stdout)["outputs"][0]["data"] == ["NG"]
    assert len(desk.orders) == 1


@pytest.mark.parametrize(
    "path", ["/resistor/1", "/infer/object_detection", "/v1/models/resistor:predict", "/v2/models"]
)
def test_paths_of_other_servers_give_404_with_the_right_path(http, path):
    answer = http.post(path, content=b"x")
    assert (answer.status_code, "POST /v2/models/NAME/infer" in answer.json()["error"]) == (404, True), answer.text


def test_json_behind_a_byte_order_mark_is_read(http):
    body = b"\xef\xbb\xbf" + json.dumps(in_json()).encode()
    for headers in ({}, {HEADER: str(len(body))}):
        assert http.post(INFER, content=body, headers=headers).status_code == 200


def test_undeclared_base64_is_no_image(http, desk):
    coded = base64.b64encode(b"\x89PNG\r\n\x1a\n")
    for sent in ({"json": in_json(data=[coded.decode()])}, {"content": coded, "headers": {HEADER: "0"}}):
        answer = http.post(INFER, **sent)
        assert (answer.status_code, "content_type: base64" in answer.json()["error"]) == (400, True), answer.text
    assert desk.orders == []


def test_only_an_administrator_loads_and_unloads_models_and_is_audited(served, client, desk):
    client.load_model("resistor")
    client.unload_model("expert:cls/capacitor")
    assert refusal(client.load_model, "resistor", config="{}")[0] == "400"
    served.who = Caller("shift", Role.OPERATE)
    for change in (client.load_model, client.unload_model):
        assert refusal(change, "resistor") == ("403", "this needs the role admin, and 'shift' has operate")
    assert (len(desk.loaded), len(desk.unloaded)) == (1, 1)
    assert [entry[1:] for entry in served.audited[:2]] == [
        ("load model", "resistor", "done"), ("unload model", "expert:cls/capacitor", "done"),
    ]  # fmt: skip
    assert served.audited[2][3].startswith("INVALID: models come from the line file")


def test_refusal_has_status_reason_and_retry_after(http, desk):
    desk.most = 0
    full = http.post(INFER, json=in_json())
    assert (full.status_code, full.headers["retry-after"]) == (429, "1")
    assert (full.headers["coserve-reason"], full.json()) == ("QUEUE_FULL", {"error": "0 images are under way"})


@pytest.mark.parametrize("name", ["nobody", "expert:nobody", "expert:", "resistor/versions/2", "a%2Fb%20c"])
def test_unknown_model_gives_404(http, name):
    asked = [http.get(f"/v2/models/{name}{what}") for what in ("", "/ready", "/config", "/stats")]
    asked.append(http.post(f"/v2/models/{name}/infer", json=in_json()))
    assert [answer.status_code for answer in asked] == [404] * 5
    assert all(answer.json()["error"] for answer in asked)


def test_model_name_may_be_percent_encoded(http):
    assert http.get("/v2/models/expert%3Acls%2Fcapacitor").json()["name"] == "expert:cls/capacitor"
    assert http.post("/v2/models/expert%3Acls%2Fcapacitor/versions/1/infer", json=in_json()).status_code == 200


def test_shared_memory_and_classification_are_refused_by_name(client):
    image = texts("IMAGE", b"x")
    image.set_shared_memory("region", 4)
    assert "shared memory" in refusal(client.infer, "resistor", [image])[1]
    labels = [triton.InferRequestedOutput("LABEL", class_count=2)]
    assert "LABEL" in refusal(client.infer, "resistor", [texts("IMAGE", b"x")], outputs=labels)[1]


BINARY = in_json(data=None, parameters={"binary_data_size": 5})


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "JSON"), (b"[]", "object"), (b"{}", "inputs"), (b"[" * 100_000, "JSON"), (b'{"inputs": [\xff]}', "JSON"),
        ({"inputs": []}, "no tensor IMAGE"), ({"inputs": [], "output": []}, "output"),
        (in_json(shape=[2**63]), "shape"),
        (in_json(shape=[2]), "shape [2], and holds 1"), (in_json(shape=["1"]), "shape"), (in_json(data="x"), "data"),
        (in_json(data=[1]), "not BYTES"), (in_json(data=[["x"], 1]), "not BYTES"), (in_json(data=[None]), "not BYTES"),
        (in_json(data=None), "no data"), (in_json(data=[]), "holds 0"), (in_json(data=[""]), "empty image"),
        (in_json(data=["\ud800"]), "JSON"), (in_json(datatype="FP32", data=[1.5]), "IMAGE is FP32"),
        (in_json(data=["é"], parameters={"content_type": "base64"}), "base64"),
        (in_json(data=["x"], parameters={"content_type": "base64"}), "base64"),
        (in_json(datatype="UINT8", shape=[1, 1, 3], data=[1, 2, 256]), "not UINT8"),
        (in_json(datatype="UINT8", shape=[1, 1, 3], data=[1, 2, 2.5]), "not UINT8"),
        (in_json(datatype="UINT8", shape=[1, 1, 3], data=[1, 2]), "1 x 1 pixels"),
        (in_json(name="MASK"), "no input"), (in_json(parameters={"binary_data_size": 1}), "data besides"),
        (BINARY, "wants 5 bytes"), (in_json(data=None, parameters={"binary_data_size": -1}), "no size"),
        (in_json(data=None, parameters={"binary_data_size": True}), "no size"),
        (in_json() | {"outputs": [{"name": "MASK"}]}, "no output"),
        (in_json() | {"parameters": {"board": {}}}, "board"),
        (in_json() | {"outputs": [{"name": "LABEL", "parameters": {"binary_data": 1}}]}, "binary_data"),
        (in_json() | {"parameters": {"binary_data_output": "yes"}}, "binary_data_output"),
        (in_json() | {"inputs": in_json()["inputs"] * 2}, "twice"), (in_json() | {"outputs": [1] * 200}, "100"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_contradictory_body_is_refused_in_words(http, body, says):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = http.post(INFER, content=content)
    assert (answer.status_code, says in answer.json()["error"]) == (400, True), answer.text
    assert len(answer.content) < 1000


@pytest.mark.parametrize("length", ["-1", "x", "", "99999999999999999999999", "100000", "5"])
def test_invalid_length_of_the_json_header_is_refused(http, length):
    assert http.post(INFER, content=json.dumps(in_json()), headers={HEADER: length}).status_code == 400


def test_bytes_behind_the_json_belong_to_a_tensor(http):
    head = json.dumps(BINARY).encode()
    sent = {"headers": {HEADER: str(len(head))}}
    assert http.post(INFER, content=head + b"\x01\0\0\0x", **sent).status_code == 200
    assert "1 bytes follow" in http.post(INFER, content=head + b"\x01\0\0\0xy", **sent).json()["error"]
    assert "ends within" in http.post(INFER, content=head + b"\x02\0\0\0x", **sent).json()["error"]


def test_inflated_bodies_have_the_same_limit_as_plain_ones(http):
    body = json.dumps(in_json()).encode()
    for encoding, content, status in (
        ("identity", body, 200), ("identity", bytes(MESSAGE_BYTES + 1), 413),
        ("gzip", gzip.compress(bytes(2 * MESSAGE_BYTES)), 413), ("deflate", zlib.compress(bytes(2**28)), 413),
        ("gzip", gzip.compress(body)[:-9], 400), ("gzip", gzip.compress(body) + b"x", 400), ("gzip", body, 400),
        ("deflate", b"", 400), ("br", body, 400),
    ):  # fmt: skip
        answer = http.post(INFER, content=content, headers={"content-encoding": encoding})
        assert answer.status_code == status, (encoding, answer.text)


@pytest.mark.parametrize(
    "text",
    [b"[" + b"0," * MOST_VALUES + b"0]", b"[" + b"{}," * 2000 + b"{}]", b'{%b"x": 1}' % (b'"y": 1,' * 2000)],
    ids=["values", "objects", "fields"],
)
def test_json_of_too_many_values_is_refused_before_it_is_parsed(text):
    with pytest.raises(OrderRefused, match="send tensors as binary data") as refused:
        infer_request(b'{"inputs": %b}' % text, Headers({}), 2**30)
    assert refused.value.reason is Reason.TOO_LARGE


value = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.lists(st.integers(), max_size=3)
)
tensor = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(["IMAGE", "BOARD", "X"]),
        "datatype": st.sampled_from(["BYTES", "UINT8", "FP32", ""]),
        "shape": st.lists(st.sampled_from([-1, 0, 1, 2, 3, 2**62]), max_size=4),
        "data": st.none() | st.lists(value, max_size=4),
        "parameters": st.dictionaries(st.sampled_from(["binary_data_size", "content_type", "x"]), value, max_size=2),
    },
)


@given(
    st.lists(tensor, max_size=3),
    st.dictionaries(st.sampled_from(["id", "parameters", "outputs", "x"]), value | st.dictionaries(st.text(), value)),
    st.binary(max_size=20),
)
def test_any_json_body_is_read_or_refused(inputs, more, behind):
    head = json.dumps({"inputs": inputs} | more).encode()
    try:
        request, is_binary = infer_request(head + behind, Headers({HEADER: str(len(head))}), 2**20)
    except OrderRefused:
        return
    assert len(request.raw_input_contents) == len(request.inputs) == len(inputs)
    assert isinstance(is_binary("SCORE"), bool)
