"""`coserve doctor` on real lines: findings, remedies, and no disturbance; and `coserve config`."""

import json
import socket
from contextlib import closing

import pytest
import torch

from agent.commands.doctor import examine
from agent.config import read_line
from agent.records.database import state_held
from experts.backends.onednn import operators
from experts.backends.vision.classifier import write_random_weights
from experts.llm.kernels import products
from tests.agent.line_files import LineFile, expert, fake, route
from tests.agent.service.language_models import write_models
from tests.commands import coserve

CAMERAS = {"cameras": [{"name": "top", "url": "file:none.avi", "component": "c0"}]}


@pytest.fixture
def line(tmp_path):
    fake(tmp_path / "f0.yaml")
    made = LineFile(tmp_path, experts={"cls/f0": expert("f0.yaml", labels=["ok"])}, routes={"c0": route("cls/f0")})
    return made.write


def found(line_file):
    return {check.name: check for check in examine(read_line(line_file, {}))}


def test_servable_line_has_no_problem(line):
    checks = found(line())
    assert {check.name for check in checks.values() if check.fix is not None} <= {"disk"}
    assert checks["torchvision"].found == "works"
    assert checks["onnxruntime"].found == "works"
    assert "MB/s" in checks["disk"].found
    assert checks["agent"].found == "not running on this line"
    assert checks["capabilities cpu"].found.startswith("multiplies fp32")


def test_doctor_lists_the_forms_that_run_here_and_why_others_do_not(line, monkeypatch):
    monkeypatch.setattr(operators, "why_absent", lambda dtype: "sums are off" if dtype == torch.int8 else None)
    monkeypatch.setattr(products, "kernel", lambda: "avx2")
    checks = found(line())
    assert checks["forms"].found == (
        "fp32, bf16, fp16, onnxruntime, onednn-fp32, onednn-bf16, onnxruntime-int8, int8 by avx2, int4 by avx2 "
        "run on this CPU"
    )
    assert checks["form onednn-int8"].found == "does not run on this CPU: sums are off"
    assert checks["form onednn-int8"].fix is None
    given = found(line(precision="onednn-int8"))["form onednn-int8"]
    assert given.fix == "write `precision: auto`, or fp32: until then the agent runs fp32"


@pytest.mark.parametrize("precision", ["auto", "fp32"])
def test_doctor_names_the_faster_forms_that_a_profile_would_prove(line, tmp_path, precision):
    write_random_weights(tmp_path / "r.safetensors", "resnet18", class_count=2, seed=0)
    experts = {"cls/f0": expert("f0.yaml", labels=["ok"]), "cls/r": expert("r.safetensors", architecture="resnet18")}
    file = line(experts=experts, precision=precision, device="cpu")
    told = found(file)["device profile"].found
    proves = f"`coserve profile {file}` proves onnxruntime and onednn-fp32 without samples"
    assert (f"1 of 2 experts run in torch's fp32, as no profile has proven a faster form - {proves}" in told) is (
        precision == "auto"
    )


def test_each_problem_has_its_remedy(line, tmp_path):
    with closing(socket.create_server(("127.0.0.1", 0))) as taken, closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        nobody = free.getsockname()[1]
        checks = found(
            line(
                api={
                    "grpc": [f"127.0.0.1:{taken.getsockname()[1]}"],
                    "token": {"file": "token"},
                    "http": "127.0.0.1:0",
                },
                intake=CAMERAS,
                outbox={"mqtt": {"url": f"mqtt://127.0.0.1:{nobody}"}},
                memory={"host": "900TiB"},
                records={"keep": {"free": "900TiB"}},
            )
        )
    assert checks["camera top"].fix.startswith("check file:")
    assert "lower memory.host" in checks["memory host"].fix
    assert checks["memory images"].found.startswith("512.0 MiB")
    assert "records.keep" in checks["free space"].fix
    assert "LoadCredential" in checks["secret api.token"].fix
    assert "messages wait in the outbox" in checks["outbox.mqtt"].fix
    grpc, http = (check for name, check in checks.items() if name.startswith("address"))
    assert "use another port" in grpc.fix
    assert (http.name, http.found, http.fix) == ("address 127.0.0.1:0", "free", None)


def test_doctor_does_not_disturb_a_running_agent(line, tmp_path):
    file = line(api={"grpc": "127.0.0.1:1"}, intake=CAMERAS)
    with state_held(tmp_path / "state"):
        checks = found(file)
    assert checks["agent"].found == "running on this line"
    assert "not tried" in checks["address 127.0.0.1:1"].found
    assert "see coserve status" in checks["camera top"].found


def test_doctor_reports_the_number_of_problems_and_their_exit_code(line):
    done = coserve("doctor", line(intake=CAMERAS))
    assert done.exit_code == 1
    assert "problems" in done.output.splitlines()[-1]
    assert "BAD camera top" in done.output
    without = coserve("doctor", line(intake=CAMERAS), "--no-cameras", "--json")
    assert "camera top" not in {check["name"] for check in json.loads(without.stdout)["checks"]}
    mistaken = coserve("doctor", line(polciy="x"))
    assert mistaken.exit_code == 78


def test_configuration_is_shown_with_the_origin_of_each_value(line, monkeypatch):
    monkeypatch.setenv("COSERVE__POLICY", "paper")
    file = line()
    done = coserve("config", "show", file, "--resolved", "--json")
    keys = {row["key"]: (row["value"], row["origin"]) for row in json.loads(done.stdout)["keys"]}
    assert keys["policy"] == ("paper", "COSERVE__POLICY")
    assert keys["memory.host"] == ("auto", "default")
    assert keys["line"] == ("test", "line.yaml:11")
    assert keys["experts.cls/f0.input.size"][0] == [8, 8]
    short = coserve("config", "show", file)
    assert "scheduling" not in short.stdout
    assert "# COSERVE__POLICY" in short.stdout


def test_check_with_probe_asks_the_cameras(line):
    """The check reports a wrong url, not a repeating log."""
    done = coserve("config", "check", "--probe", line(intake=CAMERAS))
    assert done.exit_code == 1
    assert "camera top: " in done.output
    assert coserve("config", "check", "--probe", line()).exit_code == 0


def test_unservable_language_model_is_found_by_config_check_and_doctor(line, tmp_path):
    write_models(tmp_path)
    models = {f"llm/{name}": {"architecture": "llm", "weights": str(tmp_path / name)} for name in ("code", "maths")}
    file = line(experts={"cls/f0": expert("f0.yaml", labels=["ok"]), **models})
    assert coserve("config", "check", file).exit_code == 0
    config = json.loads((tmp_path / "maths" / "config.json").read_text())
    (tmp_path / "maths" / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 1}))
    (tmp_path / "code" / "tokenizer.json").write_text("{}")
    problems = json.loads(coserve("config", "check", file, "--json").stdout)["problems"]
    assert [each["key"] for each in problems] == ["experts.llm/code.weights", "experts.llm/maths.weights"]
    weights = [check for check in examine(read_line(file, {}), cameras=False) if check.name == "weights"]
    assert ["tokenizer.json" in check.found for check in weights] == [True, False]
    assert all(check.fix for check in weights)


def test_weights_of_another_architecture_are_found_by_config_check(line, tmp_path):
    write_random_weights(tmp_path / "a.safetensors", "resnet18", 2, 0)
    entry = {
        "architecture": "resnet34",
        "weights": "a.safetensors",
        "labels": ["ok", "bad"],
        "input": {"size": [64, 64]},
    }
    file = line(experts={"cls/f0": expert("f0.yaml", labels=["ok"]), "cls/a": entry})
    done = coserve("config", "check", file)
    assert done.exit_code == 78
    assert "is not a resnet34: missing: layer1.2" in " ".join(done.stderr.split())
