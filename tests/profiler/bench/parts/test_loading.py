"""The measurement of loading: it runs, cleans up behind itself, and says so when the target is missed."""

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from experts.errors import ConfigError
from profiler.bench.parts.loading import LoadingTimes, measure_loading, report

ROOT = Path(__file__).parents[4]
TIMES = LoadingTimes("resnet101", 8, 3, 178_700_000, raw_s=0.05, load_s=0.055, first_load_s=0.15, bind_s=0.004)


def test_it_measures_real_files_and_removes_them(tmp_path):
    times = measure_loading(tmp_path, "squeezenet1_1", files=2, repeats=1)
    assert times.file_bytes > 2_000_000
    assert min(times.raw_s, times.load_s, times.first_load_s, times.bind_s) > 0
    assert list(tmp_path.iterdir()) == []


def test_a_detector_is_loaded_like_a_classifier(tmp_path):
    times = measure_loading(tmp_path, "yolov5n", files=1, repeats=1)
    assert times.file_bytes > 2_000_000
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("architecture", "said"),
    [
        ("resnet1O1", "resnet1O1: torchvision has no classifier 'resnet1O1'"),
        ("onnx", "classifiers and YOLO detectors only"),
    ],
)
def test_an_architecture_that_is_none_is_refused(tmp_path, architecture, said):
    with pytest.raises(ConfigError, match=said):
        measure_loading(tmp_path, architecture, files=1, repeats=1)
    assert list(tmp_path.iterdir()) == []


def test_the_report_names_both_times_and_the_ratio():
    text = report(TIMES)
    for part in ("50.0 ms", "55.0 ms", "3574 MB/s", "178.7 MB", "1.100: reaches its target of 1.15"):
        assert part in text


def test_the_report_says_when_the_target_is_missed():
    missed = replace(TIMES, load_s=0.06)
    assert missed.ratio == pytest.approx(1.2)
    assert "1.200: is short of its target of 1.15" in report(missed)


def test_nothing_is_left_when_the_command_is_ended_half_way(tmp_path):
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
