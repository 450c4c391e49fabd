"""`coserve experts distil`: a student served like its teacher, losses that fall, mistakes that say what to do."""

import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from agent.cli.app import app
from experts.llm.model import load_model
from experts.llm.program import read_program
from experts.llm.serving.extents import ExtentArena
from experts.llm.serving.iteration import IterationLimits
from experts.llm.text.tokenizer import TextModel
from tests.experts.llm.conftest import ModelFiles, logits_of, tiny_config
from tests.experts.llm.serving.conftest import Desk
from tests.experts.llm.text.conftest import LINES, byte_level, text_files

FEW = ("--depth", "3", "--steps", "20", "--batch-tokens", "128", "--learning-rate", "0.01")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A teacher of four layers with a tokenizer, in bf16, and texts."""
    folder = tmp_path_factory.mktemp("distil")
    tokenizer = byte_level()
    values = tiny_config("pr_moe", vocab_size=400, num_hidden_layers=4, num_experts=[0, 2, 4, 6])
    files = ModelFiles(folder)
    tensors = {name: tensor.bfloat16() for name, tensor in files.tensors(values).items()}
    teacher = files.write(values, tensors).rename(folder / "teacher")
    for name, content in text_files(tokenizer).items():
        if name != "config.json":
            (teacher / name).write_bytes(content)
    rows = [json.dumps({"text": f"{LINES[0]} {number}"}) for number in range(40)]
    (folder / "texts.jsonl").write_text("\n".join(rows), "utf-8")
    return folder


def run(folder, *words, teacher="teacher", student="student", texts="texts.jsonl"):
    files = map(str, (folder / teacher, folder / student))
    return CliRunner().invoke(app, ["experts", "distil", *files, "--texts", str(folder / texts), *words])


@pytest.fixture(scope="module")
def made(folder):
    done = run(folder, *FEW, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout), done.stderr


def test_the_report_has_layers_sizes_and_losses(folder, made):
    row, told = made
    assert row["kept"] == [0, 1, 3]
    assert row["moe_experts"] == [0, 2, 6]
    assert row["directory"] == str(folder / "student")
    assert row["parameters"] < row["teacher_parameters"]
    assert row["size_bytes"] > 2 * row["parameters"]
    assert row["stop_at"] == 14
    assert row["loss"] < 0.8 * row["first_loss"]
    lines = told.splitlines()
    assert len(lines) == 10
    assert "alpha 1, divergence" in lines[6]
    assert [line.endswith("alpha 0") for line in lines] == [False] * 7 + [True] * 3


def test_the_student_is_read_and_served_like_its_teacher(folder, made):
    model = load_model(folder / "student", "student", torch.float32)
    assert [layer.moe_experts for layer in model.spec.layers] == [0, 2, 6]
    text_model = TextModel.of(read_program(folder / "student", "student"), "student")
    prompt = text_model.prompt_of("the quick")
    desk = Desk(model, ExtentArena(2**20), IterationLimits())
    desk.ask("text", prompt, 8, weights="w")
    tokens = list(prompt)
    for _ in range(8):
        tokens.append(int(logits_of(model, tokens)[-1].argmax()))
    assert desk.finish()["text"] == tokens[len(prompt) :]


def test_the_student_has_the_teacher_s_number_format_and_small_files(folder, made):
    with safe_open(folder / "student" / "model.safetensors", "pt") as stored:
        assert {stored.get_tensor(name).dtype for name in stored.keys()} == {torch.bfloat16}  # noqa: SIM118
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (folder / "student" / name).read_bytes() == (folder / "teacher" / name).read_bytes()


def test_the_seed_makes_the_same_student_again(folder, made):
    assert run(folder, *FEW, student="again").exit_code == 0
    assert run(folder, *FEW, "--seed", "1", student="other").exit_code == 0
    first, again, other = (load_file(folder / name / "model.safetensors") for name in ("student", "again", "other"))
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    assert not all(torch.equal(tensor, other[name]) for name, tensor in first.items())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--depth", "4"), "give --depth from 2 to 3"),
        (("--depth", "3", "--stop-at", "2000"), "--stop-at 2000 is outside the training - give 0 to 1000"),
        (("--depth", "3", "--batch-tokens", "100000", "--texts", "none"), "none: cannot be read as text"),
        ((*FEW, "--learning-rate", "1e9"), "give a lower --learning-rate"),
    ],
)
def test_mistakes_say_what_to_do_and_leave_nothing(folder, words, told):
    before = sorted(folder.iterdir())
    failed = run(folder, *words, student="none")
    assert failed.exit_code in (1, 78)
    assert told in failed.stderr
    assert sorted(folder.iterdir()) == before


def test_a_student_that_is_there_is_kept(folder):
    taken = folder / "taken"
    taken.mkdir()
    (taken / "notes.txt").write_text("mine")
    failed = run(folder, *FEW, student="taken")
    assert (failed.exit_code, [file.name for file in taken.iterdir()]) == (1, ["notes.txt"])
    assert "taken exists already: name a new folder for the student" in failed.stderr


def changed(folder, name, change):
    teacher = folder / name
    shutil.copytree(folder / "teacher", teacher)
    change(teacher)
    return run(folder, *FEW, teacher=name, student="none")


def test_a_teacher_without_a_tokenizer_is_refused(folder):
    failed = changed(folder, "wordless", lambda teacher: (teacher / "tokenizer.json").unlink())
    assert "tokenizer.json: is not there: add it to the model's directory" in failed.stderr


def test_a_quantised_teacher_is_refused(folder):
    def to_int8(teacher):
        stored = load_file(teacher / "model.safetensors")
        stored["model.embed_tokens.weight"] = stored["model.embed_tokens.weight"].to(torch.int8)
        save_file(stored, teacher / "model.safetensors")

    def named(teacher):
        values = json.loads((teacher / "config.json").read_bytes())
        (teacher / "config.json").write_text(json.dumps({**values, "quantization_config": {"bits": 8}}))

    assert (
        "in a number format that is not served: model.embed_tokens.weight I8" in changed(folder, "i8", to_int8).stderr
    )
    assert "give the one it was made from" in changed(folder, "named", named).stderr


def test_a_tokenizer_of_another_model_is_refused(folder):
    def cut(teacher):
        values = json.loads((teacher / "config.json").read_bytes()) | {"vocab_size": 300}
        (teacher / "config.json").write_text(json.dumps(values))
        stored = load_file(teacher / "model.safetensors")
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            stored[name] = stored[name][:300].clone()
        save_file(stored, teacher / "model.safetensors")

    assert "has tokens beyond the model's 300" in changed(folder, "cut", cut).stderr
