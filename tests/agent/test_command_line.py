"""The commands as a line engineer types them: processes, real files, the fake backend where no model is needed.

One agent is a process from its first instruction on; the others are forks that have imported it already.
"""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import onnx
import pytest
from PIL import Image
from typer.testing import CliRunner

from agent.commands.judged_images import outputs_sha256
from agent.config import read_line
from agent.core.policy import PRESETS
from agent.deployment.build import build_agent
from coserve import app
from experts.backends.classifier import write_random_weights

ROOT = Path(__file__).parents[2]
PATTERN = r"(?P<board>[^_]+)_(?P<component>[^_]+)_(?P<ref>[^.]+)\.png"
DEADLINE_S = 90.0


def coserve(*words, check):
    """Run the command to its end in a process of its own; its outcome."""
    command = [sys.executable, str(ROOT / "coserve.py"), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == check, done.stderr
    return done


def coserve_here(*words, check):
    """Run the command to its end in this process, which has loaded torch already; its outcome."""
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == check, done.stderr
    assert done.exception is None or isinstance(done.exception, SystemExit)
    assert "Traceback" not in done.stderr
    return done


def write_line(folder, experts=3, weight_bytes=2_000_000, memory="9MiB", workspace="2MiB", K_s=0.0, stale_after_s=60.0):
    """A line of fake experts cls/f<n> with routes c<n>, one image of each on a board."""
    (folder / "weights").mkdir(parents=True, exist_ok=True)
    lines = ["line: test", "state: ./state", "experts:"]
    for number in range(experts):
        declared = {"weight_bytes": weight_bytes, "workspace_bytes": 1000, "label": "ok", "K_s": K_s}
        (folder / "weights" / f"f{number}.yaml").write_text(json.dumps(declared))
        lines += [
            f"  cls/f{number}:",
            "    architecture: fake",
            f"    weights: weights/f{number}.yaml",
            "    labels: [ok, bad]",
            "    input: {size: [8, 8]}",
        ]
    lines += ["routes:"] + [f"  c{number}: [{{expert: cls/f{number}, pass: [ok]}}]" for number in range(experts)]
    quantities = ", ".join(f"c{number}: 1" for number in range(experts))
    lines += [f"boards: {{main: {{components: {{{quantities}}}, takt_s: 60}}}}"]
    lines += [f"memory: {{host: {memory}, workspace: {workspace}}}"]
    folder_options = f"settle_ms: 0, stale_after_s: {stale_after_s}, poll_s: 0.2"
    lines += [f"intake: {{folders: [{{path: ./inbox, pattern: '{PATTERN}', {folder_options}}}]}}"]
    file = folder / "line.yaml"
    file.write_text("\n".join(lines) + "\n")
    return file


def drop(folder, name, content=None):
    """Rename a finished file into the inbox."""
    ready = folder / "ready"
    ready.mkdir(exist_ok=True)
    (folder / "inbox").mkdir(exist_ok=True)
    if content is None:
        Image.new("RGB", (8, 8), (10, 200, 30)).save(ready / name)
    else:
        (ready / name).write_bytes(content)
    (ready / name).rename(folder / "inbox" / name)


FORKED = "from coserve import main; main()"
TYPED = f"import os, sys; os.execv(sys.executable, [sys.executable, {str(ROOT / 'coserve.py')!r}, *sys.argv[1:]])"


class Serving:
    """`coserve serve` in its own process."""

    def __init__(self, line, forks, code):
        self.line = line
        self.process = forks.start(code, "serve", line, "--json")

    def rows(self):
        """What is stored, whatever the agent does meanwhile: (image, verdict, reason) in order."""
        file = self.line.parent / "state" / "results.db"
        if not file.exists():
            return []
        with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as connection:
            try:
                return connection.execute("SELECT image, verdict, reason FROM results ORDER BY seq").fetchall()
            except sqlite3.OperationalError:  # it is about to make its tables
                return []

    def wait_for(self, images):
        """Until so many images have a verdict; they are returned."""
        deadline = time.monotonic() + DEADLINE_S
        while len(rows := self.rows()) < images:
            assert self.process.poll() is None, self.process.wait(0.0).stderr
            assert time.monotonic() < deadline, f"only {rows}"
            time.sleep(0.02)
        return rows

    def wait_for_verdicts(self, images):
        """The same by image, none of which is there twice: (verdict, reason)."""
        rows = self.wait_for(images)
        verdicts = {image: (verdict, reason) for image, verdict, reason in rows}
        assert len(verdicts) == len(rows) == images, rows
        return verdicts

    def boards(self):
        """Stored board verdicts: (serial, verdict, revisions)."""
        with closing(sqlite3.connect(f"file:{self.line.parent}/state/results.db?mode=ro", uri=True)) as connection:
            return connection.execute("SELECT serial, verdict, revisions FROM boards").fetchall()

    def stop(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        ended = self.process.wait(DEADLINE_S)
        return ended.returncode, ended.stdout, ended.stderr


@pytest.fixture
def serve(forks):
    running = []

    def start(line, code=FORKED):
        running.append(Serving(line, forks, code))
        return running[-1]

    yield start
    for serving in running:
        serving.process.kill()


def test_files_dropped_while_it_runs_are_judged_and_moved_and_sigterm_ends_it_cleanly(tmp_path, serve):
    line = write_line(tmp_path)
    drop(tmp_path, "B1_c0_R1.png")
    serving = serve(line, TYPED)
    serving.wait_for(1)
    drop(tmp_path, "B1_c1_R1.png")
    drop(tmp_path, "B1_c2_R1.png")
    rows = serving.wait_for_verdicts(3)
    code, out, _ = serving.stop()
    assert code == 0
    assert {verdict for verdict, _ in rows.values()} == {"OK"}
    assert json.loads(out)["requests"] == 3
    assert len(list((tmp_path / "inbox" / "done").rglob("*.png"))) == 3
    boards = json.loads(coserve_here("results", line, "--boards", "--json", check=0).stdout)["results"]
    assert [(board["serial"], board["verdict"]) for board in boards] == [("B1", "OK")]


def test_after_kill_9_nothing_is_lost_or_counted_twice(tmp_path, serve):
    line = write_line(tmp_path, K_s=0.05)
    names = [f"B{board}_c{number}_R1.png" for board in range(20) for number in range(3)]
    serving = serve(line)
    for name in names:
        drop(tmp_path, name)
    serving.wait_for(5)
    serving.stop(signal.SIGKILL)
    assert 5 <= len(serving.rows()) < len(names)
    again = serve(line)
    again.wait_for(len(names))
    assert again.stop()[0] == 0
    assert sorted(again.rows()) == sorted((name, "OK", None) for name in names)
    moved = [file.name for file in (tmp_path / "inbox" / "done").rglob("*.png")]
    assert sorted(moved) == sorted(names)
    assert sorted(again.boards()) == sorted((f"B{board}", "OK", 0) for board in range(20))


def test_a_state_that_is_no_folder_is_told_in_one_line(tmp_path):
    line = write_line(tmp_path)
    state = read_line(line, {}).state
    state.write_text("not a folder")
    for command in (["serve", line], ["inspect", line, tmp_path / "a.png", "--component", "c0"]):
        done = coserve_here(*command, check=1)
        assert (
            done.stderr
            == f"{state}: is there, and is no folder - make room there or correct `state`, then start again\n"
        )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("memory:", "memroy:"), "memroy"),
        (("expert: cls/f0", "expert: cls/f9"), "cls/f9"),
        (("[{expert: cls/f0, pass: [ok]}]", "[{expert: cls/f0, pass: [ok]}, {expert: cls/f0, pass: [ok]}]"), "c0"),
    ],
)
def test_a_wrong_line_file_ends_with_78_naming_file_line_and_key(tmp_path, change, says):
    line = write_line(tmp_path)
    line.write_text(line.read_text().replace(*change))
    for command in (("config", "check"), ("serve",)):
        done = coserve_here(*command, line, check=78)
        assert f"{line}:" in done.stderr
        assert says in done.stderr
        assert not (tmp_path / "state").exists()


def test_an_onnx_file_that_is_not_served_is_named_by_config_check_alone(tmp_path):
    """An agent goes on without one expert."""
    line = write_line(tmp_path)
    images = onnx.helper.make_tensor_value_info("images", onnx.TensorProto.FLOAT, [1, 3, 64, 64])
    answers = onnx.helper.make_tensor_value_info("output0", onnx.TensorProto.FLOAT, [1, 6, 84])
    model = onnx.helper.make_model(onnx.helper.make_graph([], "graph", [images], [answers]))
    onnx.helper.set_model_props(model, {"task": "pose"})
    onnx.save_model(model, tmp_path / "pose.onnx")
    expert = "det/p: {architecture: onnx, weights: pose.onnx, labels: [ok, bad], input: {size: [64, 64]}}"
    line.write_text(line.read_text().replace("experts:\n", f"experts:\n  {expert}\n"))
    done = coserve_here("config", "check", line, check=78)
    assert f"{line}:4:" in done.stderr
    assert "pose.onnx is exported for the task pose, which is not served: detect and segment are" in done.stderr
    told = json.loads(coserve_here("config", "check", line, "--json", check=78).stdout)
    assert [problem["key"] for problem in told["problems"]] == ["experts.det/p.weights"]
    assert read_line(line).catalog.experts["det/p"].architecture == "onnx"


def test_an_expert_larger_than_the_budget_ends_with_78_naming_it(tmp_path):
    line = write_line(tmp_path, weight_bytes=20_000_000)
    drop(tmp_path, "B1_c0_R1.png")
    done = coserve_here("serve", line, check=78)
    assert "cls/f0" in done.stderr
    assert f"{line}:" in done.stderr
    assert "memory.host" in done.stderr
    assert (tmp_path / "inbox" / "B1_c0_R1.png").exists()


def test_wrong_words_end_with_2():
    coserve("inspect", check=2)
    coserve_here("no-such-command", check=2)


def write_real_line(folder):
    """Four real SqueezeNets that their memory does not hold at once, so that requests for them in any order evict."""
    (folder / "weights").mkdir(parents=True)
    lines = ["line: real", "state: ./state", "experts:"]
    for number in range(4):
        write_random_weights(folder / "weights" / f"r{number}.safetensors", "squeezenet1_1", 3, number, image_size=64)
        lines += [
            f"  cls/r{number}:",
            "    architecture: squeezenet1_1",
            f"    weights: weights/r{number}.safetensors",
            "    labels: [ok, missing, bent]",
            "    input: {size: [64, 64]}",
        ]
    passing = "pass: [ok, missing, bent]"
    lines += ["routes:", *(f"  c{number}: [{{expert: cls/r{number}, {passing}}}]" for number in range(2))]
    lines += [f"  c2: [{{expert: cls/r2, {passing}}}, {{expert: cls/r3, pass: [ok]}}]"]
    lines += ["memory: {host: 10MiB, device: 12MiB, workspace: 4MiB}"]
    file = folder / "line.yaml"
    file.write_text("\n".join(lines) + "\n")
    return file


def coloured_images(folder, count):
    """Images that the experts of `write_real_line` tell apart: a colour each, under noise."""
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


def test_every_preset_and_the_three_tier_path_give_the_same_answers_in_fp32(tmp_path):
    line = write_real_line(tmp_path)
    images = coloured_images(tmp_path, 8)
    labels = {}
    for device in ("cpu", "emulated"):
        for policy in PRESETS if device == "cpu" else ("coserve", "samba"):
            config = read_line(line, {"COSERVE__POLICY": policy, "COSERVE__DEVICE": device})
            labels[policy, device], evictions = judged_labels(config, images)
            assert evictions > 0, (policy, device)
    assert len(set(labels["coserve", "cpu"])) > 3
    assert len({outputs_sha256(each) for each in labels.values()}) == 1, labels
