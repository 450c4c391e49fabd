"""The offline commands where a path is bad or a disk refuses: told in a line, nothing lost, and never a traceback."""

import pytest

from tests.commands import coserve
from tests.profiler.lines import files_up_to

FAILED, CONFIGURATION = 1, 78
SMALL = ("--architecture", "squeezenet1_1")


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """Runs a command in a folder that holds one file, `afile`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COSERVE__DEVICE", "cpu")
    (tmp_path / "afile").write_text("mine")
    return coserve


def told(done, code):
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
def test_a_bad_path_is_told_before_anything_is_measured(words, code, said, offline, tmp_path):
    (line,) = told(offline(*words), code)
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
def test_what_would_not_count_for_a_load_is_refused(words, said, offline):
    done = offline("bench", "load", *words)
    assert done.exit_code == 2
    assert said in done.stderr


@pytest.mark.parametrize(
    "words", [["load", "--files", "1", *SMALL], ["generate", "new", "--experts", "1", "--requests", "2", *SMALL]]
)
def test_a_disk_that_takes_no_more_is_told_and_what_was_begun_is_removed(words, offline, tmp_path):
    with files_up_to(100_000):
        done = offline("bench", *words)
    (line,) = told(done, FAILED)
    assert done.stdout == ""
    assert line.endswith(
        "squeezenet1_1.safetensors: File too large - make room or correct the path, then run the command again"
    )
    assert [path for path in tmp_path.rglob("*") if path.name not in ("afile", "new")] == []
