"""Loads are measured on real files, which are removed afterwards; a missed target says so."""

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from agent.config import read_line
from experts.backends.vision.classifier import write_random_weights
from experts.errors import ConfigError, WeightsMismatch
from profiler.workload import synthetic_graphs
from proof.parts.loading import LoadingTimes, measure_graph_loading, measure_line_loading, measure_loading

ROOT = Path(__file__).parents[3]
TIMES = LoadingTimes("8", "resnet101", "fp32", 8, 178_700_000, 0, 0, 0.05, 0.055, 0.15, 0.004)


@pytest.mark.parametrize("architecture", ["squeezenet1_1", "yolov5n"])
def test_loading_is_measured_on_real_files_which_are_removed(tmp_path, architecture):
    found = measure_loading(tmp_path, architecture, files=2, repeats=1)
    (times,) = found.rows
    assert (times.name, times.files) == (architecture, 2)
    assert times.file_bytes > 2_000_000
    assert min(times.raw_s, times.load_s, times.first_load_s, times.bind_s) > 0
    assert found.targets == (times.target,)
    assert list(tmp_path.iterdir()) == []


LINE = """
line: mixed
state: ./state
precision: bf16
experts:
  det/a: &detector
    architecture: onnx
    weights: a.onnx
    labels: [aligned, turned]
    input: {size: [64, 64], normalize: unit}
  det/b: {<<: *detector, weights: b.onnx}
  look/a: &anomaly
    {architecture: onnx, task: anomaly, weights: c.onnx, threshold: 1.0, input: {size: [224, 224]}}
  look/b: {<<: *anomaly, weights: d.onnx}
  cls/a: {architecture: squeezenet1_1, weights: a.safetensors, labels: [ok, missing], input: {size: [64, 64]}}
routes:
  u1: [{expert: det/a, pass: [aligned]}, {expert: det/b, pass: [aligned]}]
  u2: [{expert: look/a, pass: [ok]}, {expert: look/b, pass: [ok]}, {expert: cls/a, pass: [ok]}]
"""


@pytest.fixture(scope="module")
def mixed(made_once):
    """A line with two ONNX detectors, two anomaly experts and a classifier. Nothing is written beside it."""
    return read_line(made_once("mixed-line", write_mixed) / "line.yaml")


def write_mixed(folder):
    synthetic_graphs.write_detectors([folder / "a.onnx", folder / "b.onnx"], 0, "yolo11n", 64)
    synthetic_graphs.write_anomaly_models([folder / "c.onnx", folder / "d.onnx"], bank_rows=256)
    write_random_weights(folder / "a.safetensors", "squeezenet1_1", 2, seed=0)
    (folder / "line.yaml").write_text(LINE)


@pytest.mark.slow
def test_experts_of_a_line_are_measured_per_layout_in_their_served_form(mixed, tmp_path):
    rows = measure_line_loading(tmp_path, mixed, repeats=1).rows
    assert [(row.name, row.architecture, row.precision, row.files) for row in rows] == [
        ("det/a, det/b", "onnx", "fp32", 2),
        ("look/a, look/b", "onnx", "fp32", 2),
        ("cls/a", "squeezenet1_1", "bf16", 1),
    ]
    detectors, anomaly, classifier = rows
    assert detectors.file_bytes > 10_000_000  # a YOLO11n
    assert anomaly.file_bytes > 11_000_000  # a ResNet18 up to its third stage
    assert min(detectors.program_bytes, anomaly.program_bytes) > 0 == classifier.program_bytes
    assert [row.target.wanted for row in rows] == ["at most 1.3", "at most 1.3", "at most 1.15"]
    assert min(time for row in rows for time in (row.raw_s, row.load_s, row.first_load_s, row.bind_s)) > 0
    assert list(tmp_path.iterdir()) == []
    assert not mixed.packed_folder.exists()


def changed(mixed, folder, written, instead):
    """The line beside links to the weights, with another line file."""
    folder.mkdir()
    for path in mixed.document.file.parent.iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "line.yaml").unlink()
    (folder / "line.yaml").write_text(LINE.replace(written, instead))
    return read_line(folder / "line.yaml")


@pytest.mark.slow
def test_shared_bytes_are_read_with_each_expert_and_reported(mixed, tmp_path):
    config = changed(mixed, tmp_path / "line", "weights: b.onnx", "weights: a.onnx")
    (row,) = measure_line_loading(tmp_path, config, ["det/b", "det/a"], repeats=1).rows
    assert row.name == "det/b, det/a"
    assert row.file_bytes >= row.shared_bytes > 10_000_000


@pytest.mark.slow
def test_unknown_or_unpackable_expert_is_refused_and_leaves_nothing(mixed, tmp_path):
    with pytest.raises(ConfigError, match=r"no expert 'det/c' - did you mean 'det/"):
        measure_line_loading(tmp_path, mixed, ["det/c"])
    config = changed(mixed, tmp_path / "line", "weights: d.onnx", "weights: a.onnx")
    with pytest.raises(WeightsMismatch, match="look/b"):
        measure_line_loading(tmp_path, config, ["look/b"])
    assert [path.name for path in tmp_path.iterdir()] == ["line"]


@pytest.mark.slow
def test_anomaly_experts_of_one_program_are_generated(tmp_path, monkeypatch):
    assert synthetic_graphs.BANK_ROWS * sum(synthetic_graphs.STAGE_FEATURES) * 4 > 50_000_000
    monkeypatch.setattr(synthetic_graphs, "BANK_ROWS", 512)
    (times,) = measure_graph_loading(tmp_path, "anomaly", files=2, repeats=1).rows
    assert (times.files, times.name, times.shared_bytes) == (2, "ONNX anomaly experts", 0)
    assert times.file_bytes > 11_500_000
    assert list(tmp_path.iterdir()) == []


def test_graph_has_its_own_target():
    assert (TIMES.target.found, TIMES.target.wanted, TIMES.target.reached) == ("1.100", "at most 1.15", True)
    graph = replace(TIMES, architecture="onnx", load_s=0.064)
    assert (graph.target.found, graph.target.wanted, graph.target.reached) == ("1.280", "at most 1.3", True)
    assert not replace(TIMES, load_s=0.06).target.reached


@pytest.mark.slow
def test_interrupted_loading_command_leaves_nothing(tmp_path):
    ended_at_its_first_file = (
        "import os, signal, sys\n"
        "sent = []\n"
        "def end(event, arguments):\n"
        "    if event == 'open' and '/loading-' in str(arguments[0]) and not sent:\n"
        "        sent.append(os.listdir(sys.argv[-1]))\n"
        "        signal.raise_signal(signal.SIGTERM)\n"
        "sys.addaudithook(end)\n"
        "from coserve import app\n"
        "try:\n"
        "    app(sys.argv[1:])\n"
        "finally:\n"
        "    print(len(sent[0]))\n"
    )
    command = ["bench", "load", "--architecture", "squeezenet1_1", "--files", "1", "--dir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-c", ended_at_its_first_file, *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, "1\n"), done.stderr
    assert list(tmp_path.iterdir()) == []
