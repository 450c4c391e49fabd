"""The commands as a line engineer types them: real files, the fake backend where no model is needed."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from PIL import Image

from agent.commands.judged_images import outputs_sha256
from agent.config import read_line
from agent.core.policy import PRESETS
from agent.deployment.build import build_agent
from experts.backends.vision.classifier import write_random_weights
from experts.expert import Verdict
from tests.agent import line_files
from tests.agent.service.fake_line import FakeLine
from tests.commands import coserve
from tests.waiting import until

ROOT = Path(__file__).parents[2]
DEADLINE_S = 90.0


@pytest.fixture
def line(tmp_path):
    """Two fake experts behind a folder, one image of each on a board."""
    line = FakeLine(tmp_path)
    line.watch()
    return line


def test_serve_judges_and_moves_dropped_files_and_ends_cleanly_on_sigterm(line):
    names = ["B1_c0_R1.png", "B1_c1_R2.png"]
    command = [sys.executable, ROOT / "coserve.py", "serve", line.write(), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        for count, name in enumerate(names, 1):
            line.drop(name)
            until(lambda count=count: len(line.shelf("done")) == count or process.poll() is not None)
        process.terminate()
        out, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, json.loads(out)["requests"]) == (0, 2), err
    assert line.verdicts == [(name, Verdict.OK) for name in names]
    boards = json.loads(coserve("results", line.write(), "--boards", "--json", check=0).stdout)["results"]
    assert [(board["serial"], board["verdict"]) for board in boards] == [("B1", "OK")]


def test_state_that_is_no_folder_is_reported_in_one_line(line):
    file = line.write()
    state = read_line(file, {}).state
    state.write_text("not a folder")
    says = f"{state}: exists, and is not a folder - make room there or correct `state`, then start again\n"
    for command in (["serve", file], ["inspect", file, line.folder / "a.png", "--component", "c0"]):
        assert coserve(*command, check=1).stderr == says


def test_wrong_line_file_ends_with_78_and_names_file_line_and_key(line):
    line.document["memroy"] = line.document.pop("memory")
    file = line.write()
    for command in (("config", "check"), ("serve",)):
        done = coserve(*command, file, check=78)
        assert f"{file}:" in done.stderr
        assert "memroy" in done.stderr
        assert not (line.folder / "state").exists()


def test_unsupported_onnx_file_is_named_by_config_check_alone(line):
    images = onnx.helper.make_tensor_value_info("images", onnx.TensorProto.FLOAT, [1, 3, 64, 64])
    answers = onnx.helper.make_tensor_value_info("output0", onnx.TensorProto.FLOAT, [1, 6, 84])
    model = onnx.helper.make_model(onnx.helper.make_graph([], "graph", [images], [answers]))
    onnx.helper.set_model_props(model, {"task": "pose"})
    onnx.save_model(model, line.folder / "pose.onnx")
    line.document["experts"]["det/p"] = line_files.expert("pose.onnx", "onnx", 64)
    file = line.write()
    told = json.loads(coserve("config", "check", file, "--json", check=78).stdout)
    (problem,) = told["problems"]
    assert problem["key"] == "experts.det/p.weights"
    assert "pose.onnx is exported for the task pose, which is not served: detect and segment are" in problem["message"]
    assert read_line(file).catalog.experts["det/p"].architecture == "onnx"


def test_expert_larger_than_the_budget_ends_with_78_and_its_name(line):
    line.fake(0, weight_bytes=200_000_000)
    line.drop("B1_c0_R1.png")
    file = line.write()
    done = coserve("serve", file, check=78)
    for told in ("cls/f0", f"{file}:", "memory.host"):
        assert told in done.stderr
    assert (line.inbox / "B1_c0_R1.png").exists()


def test_wrong_options_end_with_2():
    done = subprocess.run([sys.executable, ROOT / "coserve.py", "inspect"], capture_output=True, timeout=DEADLINE_S)
    assert done.returncode == 2
    coserve("no-such-command", check=2)


@pytest.fixture
def real_line(tmp_path):
    """Four real SqueezeNets that their memory does not hold at once, so that requests for them in any order evict."""
    line = FakeLine(tmp_path)
    for number in range(4):
        write_random_weights(tmp_path / f"r{number}.safetensors", "squeezenet1_1", 3, number, image_size=64)
    labels = ["ok", "missing", "bent"]
    line.document |= {
        "experts": {
            f"cls/r{number}": line_files.expert(f"r{number}.safetensors", "squeezenet1_1", 64, labels=labels)
            for number in range(4)
        },
        "routes": {f"c{number}": line_files.route(f"cls/r{number}", passing=labels) for number in range(3)},
        "boards": {},
        "memory": {"host": "10MiB", "device": "12MiB", "workspace": "4MiB"},
    }
    line.document["routes"]["c2"] += line_files.route("cls/r3")
    return line.write()


def coloured_images(folder, count):
    """Images that the experts of ``real_line`` tell apart: a colour each, under noise."""
    images = []
    for number in range(count):
        random = np.random.default_rng(number)
        pixels = random.integers(0, 256, 3) + random.integers(-60, 60, (40, 40, 3))
        images.append(folder / f"{number}.png")
        Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(images[-1])
    return images


def judged_labels(config, images):
    """Label and score of every image on every route, mixed, and how often an expert had to go."""
    outcomes = {}
    agent = build_agent(config, outcomes.__setitem__, lambda *_: None)
    agent.start()
    try:
        numbers = [agent.loop.submit(image, component=f"c{number}") for image in images for number in range(3)]
        assert agent.loop.wait_until_idle(DEADLINE_S)
        evictions = agent.loop.statistics().engine.evictions
    finally:
        agent.stop()
    return [f"{outcomes[number].label} {outcomes[number].score:.2f}" for number in numbers], evictions


def test_every_preset_and_device_answers_equally_in_fp32(real_line, tmp_path):
    images = coloured_images(tmp_path, 8)
    labels = {}
    for device in ("cpu", "emulated"):
        for policy in PRESETS if device == "cpu" else ("coserve", "samba"):
            config = read_line(real_line, {"COSERVE__POLICY": policy, "COSERVE__DEVICE": device})
            labels[policy, device], evictions = judged_labels(config, images)
            assert evictions > 0, (policy, device)
    assert len(set(labels["coserve", "cpu"])) > 3
    assert len({outputs_sha256(each) for each in labels.values()}) == 1, labels
