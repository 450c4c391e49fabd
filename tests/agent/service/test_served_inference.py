"""A served line asked over HTTP by clients of the Open Inference Protocol: Triton's, KServe's, and any other."""

import base64
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from tests.agent.service.fake_line import picture
from tests.waiting import until

KSERVE = Path(sys.prefix) / "kserve" / "bin" / "python"  # as `make kserve` installs it


@pytest.fixture
def socket(line, tmp_path_factory):
    """A unix socket for gRPC, beside an address for HTTP; a short path, as they have to be."""
    path = tmp_path_factory.mktemp("s") / "c.sock"
    line.document["api"] = {"grpc": f"unix:{path}", "http": "127.0.0.1:0"}
    return f"unix:{path}"


def bytes_input(kind, name, content):
    one = kind.InferInput(name, [1], "BYTES")
    one.set_data_from_numpy(np.array([content], dtype=np.object_))
    return one


def test_unmodified_tritonclient_inspects_over_http(line, socket):
    image, board = bytes_input(triton, "IMAGE", picture()), bytes_input(triton, "BOARD", b"B1")
    with line.served() as service, closing(triton.InferenceServerClient(service.web.addresses[0])) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("expert:cls/f1")
        assert client.get_model_metadata("expert:cls/f1", "1")["inputs"][0]["name"] == "IMAGE"
        assert client.infer("c0", [image], request_compression_algorithm="gzip").as_numpy("VERDICT")[0] == b"OK"
        for is_repeat in (False, True):
            whose = {"key": "one", "ref": "R1"}
            answer = client.infer("c0", [image, board], parameters=whose, request_id="1")
            assert json.loads(answer.as_numpy("DETAIL")[0])["is_repeat"] is is_repeat
        other = [bytes_input(triton, "IMAGE", picture((200, 0, 0))), board]
        for refused, status in (
            (lambda: client.infer("c0", other, parameters=whose), "409"), (lambda: client.load_model("c0"), "401"),
            (lambda: client.unload_model("c0"), "401"), (lambda: client.infer("no-such-one", [image]), "404"),
        ):  # fmt: skip
            with pytest.raises(InferenceServerException) as error:
                refused()
            assert error.value.status() == status
        with closing(tritonclient.grpc.InferenceServerClient(socket)) as over_grpc:
            over_grpc.infer("c0", [bytes_input(tritonclient.grpc, "IMAGE", picture())])
        (counted,) = client.get_inference_statistics("c0")["model_stats"]
        assert (counted["inference_stats"]["success"]["count"], counted["inference_stats"]["fail"]["count"]) == (4, 1)
    assert [(row.subject.key, row.subject.board, row.subject.ref) for row in line.rows] == [("api/one", "B1", "R1")]


def test_bare_or_base64_file_is_judged_and_a_broken_one_is_unknown(line, socket):
    tensor = {"name": "IMAGE", "shape": [1], "datatype": "BYTES", "parameters": {"content_type": "base64"}}
    with line.served() as service, httpx.Client(base_url=f"http://{service.web.addresses[0]}", timeout=60) as http:
        told = []
        for image in (picture(), b"no image"):
            alone = http.post("/v2/models/c0/infer", content=image, headers={"inference-header-content-length": "0"})
            body = {"inputs": [tensor | {"data": [base64.b64encode(image).decode()]}]}
            for answer in (alone, http.post("/v2/models/c0/versions/1/infer", json=body)):
                told += next(each["data"] for each in answer.json()["outputs"] if each["name"] == "VERDICT")
    assert told == ["OK", "OK", "UNKNOWN", "UNKNOWN"]
    assert line.rows == []


def test_owner_loads_and_unloads_at_a_unix_socket_and_is_audited(line, socket):
    path = socket.removeprefix("unix:").replace("c.sock", "w.sock")
    line.document["api"]["http"] = f"unix:{path}"
    with line.served(), httpx.Client(base_url="http://box", transport=httpx.HTTPTransport(uds=path)) as http:
        for change in ("unload", "load"):
            assert http.post(f"/v2/repository/models/expert:cls/f1/{change}").status_code == 200
        asked = http.post("/v2/models/c0/infer", content=picture(), headers={"inference-header-content-length": "0"})
        assert asked.json()["outputs"][0]["data"] == ["OK"]
        until(lambda: len(http.get("/api/audit").json()["entries"]) == 2)  # once they are committed
        found = http.get("/api/audit").json()["entries"]
    told = [(entry["who"], entry["action"], entry["subject"], entry["outcome"]) for entry in reversed(found)]
    assert told == [("owner", f"{change} model", "expert:cls/f1", "done") for change in ("unload", "load")]


def test_image_running_at_a_stop_is_answered(line, socket, batches):
    def ask(url):
        return httpx.post(url, content=picture(), headers={"inference-header-content-length": "0"}, timeout=60).json()

    def go_on_once_it_drains():
        until(lambda: service.desk.status().is_draining)
        batches.set()

    with ThreadPoolExecutor(2) as callers, line.served() as service:
        batches.clear()
        answer = callers.submit(ask, f"http://{service.web.addresses[0]}/v2/models/c0/infer")
        until(lambda: any(queue.running for queue in service.desk.status().queues))
        going_on = callers.submit(go_on_once_it_drains)
    going_on.result()
    assert answer.result()["outputs"][0]["data"] == ["OK"]


@pytest.mark.slow
@pytest.mark.skipif(not KSERVE.exists(), reason="KServe's client is not installed: make kserve")
def test_kserves_client_judges_an_image(line, socket, tmp_path):
    image = tmp_path / "image.png"
    image.write_bytes(picture())
    with line.served() as service:
        script, url = Path(__file__).with_name("asked_by_kserve.py"), f"http://{service.web.addresses[0]}"
        done = subprocess.run(
            [KSERVE, script, url, "c0", image, "B1"],
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["live"], told["ready"], told["models"]) == (True, True, [True, False])
    assert told["refused"].startswith("no ")
    assert [told[form]["VERDICT"] for form in ("json", "binary", "board")] == [["OK"]] * 3
    assert told["json"] == told["binary"] == told["board"]
    assert [row.subject.board for row in line.rows] == ["B1"]
