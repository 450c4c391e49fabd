"""Values that the offline commands take as text, and refusals of bad paths and full disks that say what to do."""

from functools import partial

import pytest

from agent.line_file.machine import MAX_EXECUTORS
from experts.errors import ConfigError
from experts.expert import Precision
from profiler.cli.arguments import (
    batch_sizes,
    bytes_per_s,
    executor_counts,
    given_precision,
    given_precisions,
    image_size,
    memory_bytes,
    precision_without_profile,
    precisions_in_turn,
)
from tests.commands import coserve
from tests.profiler.lines import files_up_to

GIB = 2**30
of_one_memory, of_two_memories = (partial(memory_bytes, is_split=is_split) for is_split in (False, True))
FAILED, CONFIGURATION = 1, 78
SMALL = ("--architecture", "squeezenet1_1")


@pytest.mark.parametrize(
    ("read", "text", "meant"),
    [
        (of_one_memory, "2GiB", {"host": 2 * GIB}),  # a bare size is where experts run from
        (of_two_memories, "2GiB", {"device": 2 * GIB}),
        (of_one_memory, "500MB", {"host": 500_000_000}),
        (of_two_memories, "host=2GiB,device=1GiB", {"host": 2 * GIB, "device": GIB}),
        (of_one_memory, " host = 2GiB , workspace = 512MiB ", {"host": 2 * GIB, "workspace": GIB // 2}),
        (bytes_per_s, None, None),
        (bytes_per_s, "530MB/s", 530e6),
        (bytes_per_s, "530MB", 530e6),
        (given_precision, None, None),
        (given_precision, "auto", "auto"),
        (given_precision, "bf16", Precision.BF16),
        (precision_without_profile, "auto", Precision.FP32),
        (precision_without_profile, Precision.FP16, Precision.FP16),
        (given_precisions, (), ()),  # which stands for all, as auto does
        (given_precisions, ("bf16", "auto"), ()),
        (given_precisions, ("bf16, fp32", "bf16"), (Precision.BF16, Precision.FP32)),
        (precisions_in_turn, None, ()),
        (precisions_in_turn, "auto,bf16, auto", ("auto", Precision.BF16)),
        (image_size, "224x640", (224, 640)),
        (batch_sizes, "1, 8,16", (1, 8, 16)),
    ],
)
def test_argument_text_is_parsed(read, text, meant):
    assert read(text) == meant


@pytest.mark.parametrize(
    ("read", "text", "said"),
    [
        (of_one_memory, "much", "--memory: 'much' is not understood - write a number and a unit, as in 2GiB"),
        (of_one_memory, "-1GiB", "--memory: '-1GiB' is not understood"),
        (of_one_memory, "0GiB", "--memory: '0GiB' is no memory at all - write a size such as 2GiB"),
        (of_one_memory, "host=0B", "--memory host: '0B' is no memory at all"),
        (of_one_memory, "hots=2GiB", "--memory: no memory 'hots' - did you mean 'host'"),
        (of_one_memory, "host=2GiB,", "--memory: '' is not NAME=VALUE - write it as in host=2GiB,device=1GiB"),
        (of_one_memory, "=2GiB", "--memory: '=2GiB' is not NAME=VALUE"),
        (of_one_memory, "host=2GiB,host=1GiB", "--memory: host is there twice - keep one"),
        (of_one_memory, "device=1GiB", "--memory device: this box has one memory for all its processors - write host="),
        (executor_counts, "4", "--executors: '4' is not NAME=VALUE - write it as in cuda=3,cpu=1"),
        (executor_counts, "cdua=3", "--executors: no processor 'cdua' - did you mean 'cuda'"),
        (executor_counts, "cuda=three", f"--executors cuda: 'three' is not a count from 0 to {MAX_EXECUTORS}"),
        (executor_counts, "cuda=-1", "--executors cuda: '-1' is not a count"),
        (executor_counts, "cuda=²", "--executors cuda: '²' is not a count"),
        (executor_counts, f"cpu={MAX_EXECUTORS + 1}", f"--executors cpu: '{MAX_EXECUTORS + 1}' is not a count"),
        (executor_counts, "cuda=0,cpu=0", "--executors: no executor at all - give one processor at least 1"),
        (bytes_per_s, "fast", "--ssd-bandwidth: 'fast' is not understood - write a number and a"),
        (bytes_per_s, "0MB/s", "--ssd-bandwidth: '0MB/s' lets nothing through - write a rate such"),
        (given_precision, "AUTO", "--precision: no precision 'AUTO'"),
        (precisions_in_turn, "bf16,", "--precision: no precision ''"),
        (image_size, "0x3", "--size: '0x3' is not HEIGHTxWIDTH - write it as in 224x224"),
        (image_size, "1x2x3", "--size: '1x2x3' is not HEIGHTxWIDTH"),
        (batch_sizes, "1,", "--batches: '1,' are not numbers of images from 1 - write them as in 1,8"),
        (batch_sizes, "0", "--batches: '0' are not numbers of images from 1"),
    ],
)
def test_argument_text_without_meaning_is_refused_with_what_to_write(read, text, said):
    with pytest.raises(ConfigError) as refused:
        read(text)
    assert str(refused.value).startswith(said)


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """Runs a command in a folder that holds one file, `afile`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COSERVE__DEVICE", "cpu")
    (tmp_path / "afile").write_text("mine")
    return coserve


def error_lines(done, code):
    """Lines on stderr of a command that ends with this code, without its progress."""
    assert done.exit_code == code, done.stderr
    assert isinstance(done.exception, SystemExit)
    return [line for line in done.stderr.splitlines() if " after " not in line]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["bench", "load", "--dir", "none"], CONFIGURATION, "none: no such folder - name one on the SSD to measure"),
        (["bench", "start", "--dir", "afile"], CONFIGURATION, "afile: no such folder - name one on the SSD to measure"),
        (["bench", "report", "--dir", "none"], CONFIGURATION, "none: no such folder - name one on the SSD to measure"),
        (["bench", "report", "--out", "afile"], CONFIGURATION, "afile: is a file - name a folder, it is made where"),
        (["bench", "tasks", "--out", "afile/x"], FAILED, "afile/x: Not a directory - make room or correct the path"),
        (["bench", "generate", "afile"], CONFIGURATION, "afile is a file: name a new folder, nothing is overwritten"),
        (["bench", "generate", "afile/x"], FAILED, "afile/x: Not a directory - make room or correct the path"),
        (["bench", "generate", "/proc/x"], FAILED, "/proc/x: No such file or directory - make room or correct the"),
        (["bench", "load", "--precision", "bf61"], CONFIGURATION, "--precision: no precision 'bf61' - did you mean"),
        (["bench", "generate", "x", "--precision", "8"], CONFIGURATION, "--precision: no precision '8' - known here:"),
        (["bench", "load", "--architecture", "foo"], CONFIGURATION, "foo: torchvision has no classifier 'foo'"),
    ],
)
def test_bad_path_is_refused_before_anything_is_measured(words, code, said, offline, tmp_path):
    (line,) = error_lines(offline(*words), code)
    assert line.startswith(said)
    assert "it resumes" not in line
    assert [path.name for path in tmp_path.iterdir()] == ["afile"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--expert", "cls/a"], "--expert: names experts of a line - give --line"),
        (["--line", "line.yaml", "--files", "2"], "--files: the experts are the line's"),
        (["--onnx", "anomaly", "--architecture", "resnet18"], "--architecture: an ONNX graph has its own"),
    ],
)
def test_option_without_effect_on_a_load_is_refused(words, said, offline):
    done = offline("bench", "load", *words)
    assert done.exit_code == 2
    assert said in done.stderr


@pytest.mark.parametrize(
    "words", [["load", "--files", "1", *SMALL], ["generate", "new", "--experts", "1", "--requests", "2", *SMALL]]
)
def test_full_disk_is_reported_and_begun_files_are_removed(words, offline, tmp_path):
    with files_up_to(100_000):
        done = offline("bench", *words)
    (line,) = error_lines(done, FAILED)
    assert done.stdout == ""
    assert line.endswith(
        "squeezenet1_1.safetensors: File too large - make room or correct the path, then run the command again"
    )
    assert [path for path in tmp_path.rglob("*") if path.name not in ("afile", "new")] == []
