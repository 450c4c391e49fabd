"""A GGUF file comes to a line: its entry, its file, and nothing left after a failure."""

import json

import pytest
import yaml

from tests.commands import coserve
from tests.experts.llm.gguf.words import byte_level_words
from tests.experts.llm.gguf.writing import tiny_model, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    words = byte_level_words()
    made = tiny_model("llama", vocab_size=len(words["tokenizer.ggml.tokens"]))
    return write_model(tmp_path_factory.mktemp("downloads") / "Tiny.Q8_0.gguf", made, "Q8_0", tokenizer=words)


def files_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_gguf_file_makes_a_line_that_can_be_served_of_an_empty_folder(model, tmp_path):
    line = tmp_path / "line.yaml"
    added = coserve("experts", "add", line, model)
    assert added.exit_code == 0, added.stderr
    for fact in ("llama, 2 layers", "256 tokens", "Q8_0 in", "coserve generate"):
        assert fact in added.stdout
    assert files_in(tmp_path) == ["line.yaml", "weights/llm/Tiny.Q8_0.gguf"]
    entry = {"architecture": "llm", "weights": "weights/llm/Tiny.Q8_0.gguf"}
    assert yaml.safe_load(line.read_text())["experts"] == {"llm/Tiny.Q8_0": entry}
    assert (tmp_path / entry["weights"]).read_bytes() == model.read_bytes()
    assert coserve("config", "check", line).exit_code == 0


def test_gguf_file_below_the_line_stays_where_it_is(model, tmp_path):
    (tmp_path / "models").mkdir()
    file = tmp_path / "models" / "mine.gguf"
    file.write_bytes(model.read_bytes())
    row = json.loads(coserve("experts", "add", tmp_path / "line.yaml", file, "--id", "llm/mine", "--json").stdout)
    assert (row["kind"], row["entry"]["weights"]) == ("llm", "models/mine.gguf")
    assert files_in(tmp_path) == ["line.yaml", "models/mine.gguf"]


def test_print_writes_nothing(model, tmp_path):
    printed = coserve("experts", "add", tmp_path / "line.yaml", model, "--print")
    assert "architecture: llm" in printed.stdout
    assert files_in(tmp_path) == []


@pytest.mark.parametrize(
    ("options", "named"),
    [(("--component", "coil"), "--component is for images"), (("--size", "32x32"), "--size is for images")],
)
def test_option_for_images_is_refused_by_name(model, tmp_path, options, named):
    refused = coserve("experts", "add", tmp_path / "line.yaml", model, *options)
    assert refused.exit_code != 0
    assert named in refused.stderr
    assert files_in(tmp_path) == []


def test_damaged_gguf_file_leaves_nothing_and_config_check_finds_one(model, tmp_path):
    line, file = tmp_path / "line.yaml", tmp_path / "cut.gguf"
    file.write_bytes(model.read_bytes()[:-100])
    refused = coserve("experts", "add", line, file)
    assert (refused.exit_code != 0, "truncated" in refused.stderr) == (True, True)
    assert files_in(tmp_path) == ["cut.gguf"]
    line.write_text("line: a\nstate: ./state\nexperts:\n  llm/cut: {architecture: llm, weights: cut.gguf}\n")
    (problem,) = json.loads(coserve("config", "check", line, "--json").stdout)["problems"]
    assert (problem["key"], "truncated" in problem["message"]) == ("experts.llm/cut.weights", True)
