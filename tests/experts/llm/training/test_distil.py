"""`coserve experts distil`: rows of texts, cut depth, a student served like its teacher, losses that fall, ranks."""

import json
import os
import shutil
import signal
from itertools import pairwise

import psutil
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from experts.errors import ConfigError, RanksLost, WeightsRefused
from experts.llm.arenas.extents import ExtentArena
from experts.llm.files.config import parse_spec
from experts.llm.files.program import read_program
from experts.llm.model import LanguageModel, load_model
from experts.llm.serving.iteration import IterationLimits
from experts.llm.text.tokenizer import TextModel
from experts.llm.training.distil import DistilOptions, distil, kept_layers, read_texts, student_config, student_tensors
from experts.llm.training.staged import Schedule
from tests.commands import coserve
from tests.experts.llm.conftest import FAMILIES, ModelFiles, logits_of, tiny_config
from tests.experts.llm.serving.conftest import Desk
from tests.experts.llm.text.conftest import LINES, byte_level, text_files

FEW = ("--depth", "3", "--steps", "20", "--batch-tokens", "128", "--learning-rate", "0.01")
END = "<|end|>"


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
    return coserve("experts", "distil", folder / teacher, folder / student, "--texts", folder / texts, *words)


@pytest.fixture(scope="module")
def made(folder):
    done = run(folder, *FEW, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout), done.stderr


def test_report_has_layers_sizes_and_losses(folder, made):
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


def test_student_is_read_and_served_like_its_teacher(folder, made):
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


def test_student_has_the_teachers_number_format_and_small_files(folder, made):
    with safe_open(folder / "student" / "model.safetensors", "pt") as stored:
        assert {stored.get_tensor(name).dtype for name in stored.keys()} == {torch.bfloat16}  # noqa: SIM118
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (folder / "student" / name).read_bytes() == (folder / "teacher" / name).read_bytes()


def test_equal_seeds_make_equal_students(folder, made):
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
        ((*FEW, "--ranks", "12"), "a step of 128 tokens has as few as 9 rows, and each rank needs one"),
        pytest.param(
            (*FEW, "--learning-rate", "1e9", "--ranks", "2"), "give a lower --learning-rate", marks=pytest.mark.slow
        ),
    ],
)
def test_wrong_arguments_of_distillation_are_reported_and_leave_nothing(folder, words, told):
    before = sorted(folder.iterdir())
    failed = run(folder, *words, student="none")
    assert failed.exit_code in (1, 78)
    assert told in failed.stderr
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize(
    ("ranks", "batch_tokens"),
    [("2", "128"), pytest.param("3", "65", marks=pytest.mark.slow)],  # 36 rows: 65 tokens leave ranks without a text
)
def test_ranks_train_the_student_that_one_process_trains(folder, ranks, batch_tokens):
    words = (*FEW, "--batch-tokens", batch_tokens, "--json")
    one, several = (
        json.loads(run(folder, *words, "--ranks", count, student=f"{batch_tokens}-{count}").stdout)
        for count in ("1", ranks)
    )
    for name in ("loss", "first_loss", "teacher_loss"):
        assert several[name] == pytest.approx(one[name], abs=1e-3)
    assert several["size_bytes"] == one["size_bytes"]
    first, second = (load_file(f"{row['directory']}/model.safetensors") for row in (one, several))
    for name, tensor in first.items():  # stored in bf16: of eight bits, the last may be rounded the other way
        assert torch.allclose(second[name], tensor, rtol=2**-7, atol=1e-3), name


def test_killed_rank_ends_the_training_and_leaves_no_student(folder):
    before, killed = sorted(folder.iterdir()), []

    def kill_a_rank(step, losses, held_out):
        killed.append(next(each for each in psutil.Process().children() if "rank_process" in " ".join(each.cmdline())))
        os.kill(killed[0].pid, signal.SIGKILL)

    options = DistilOptions(3, Schedule(20, 0.01), batch_tokens=128, ranks=2)
    with pytest.raises(RanksLost, match=r"rank \d \(process \d+\) was killed by signal 9 - no student was written"):
        distil(folder / "teacher", folder / "none", [folder / "texts.jsonl"], options, kill_a_rank)
    assert len(killed) == 1
    assert sorted(folder.iterdir()) == before


def test_existing_student_is_kept(folder):
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


def test_teacher_without_a_tokenizer_is_refused(folder):
    failed = changed(folder, "wordless", lambda teacher: (teacher / "tokenizer.json").unlink())
    assert "tokenizer.json: is not there: add it to the model's directory" in failed.stderr


def test_quantised_teacher_is_refused(folder):
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
    assert "quantization_config.quant_method: is missing" in changed(folder, "named", named).stderr


def test_tokenizer_of_another_model_is_refused(folder):
    def cut(teacher):
        values = json.loads((teacher / "config.json").read_bytes()) | {"vocab_size": 300}
        (teacher / "config.json").write_text(json.dumps(values))
        stored = load_file(teacher / "model.safetensors")
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            stored[name] = stored[name][:300].clone()
        save_file(stored, teacher / "model.safetensors")

    assert "has tokens beyond the model's 300" in changed(folder, "cut", cut).stderr


@pytest.fixture(scope="module")
def model():
    return TextModel.of(text_files(byte_level(), config={"max_position_embeddings": 32}), "tiny")


@pytest.fixture
def files(tmp_path):
    rows = [{"text": f"{number} {LINES[number % 2]}"} for number in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows) + "\n", "utf-8")
    (tmp_path / "b.txt").write_text(LINES[0] * 30, "utf-8")
    return [tmp_path / "a.jsonl", tmp_path / "b.txt"]


def test_each_text_ends_with_the_end_token_and_fits_the_context(files, model):
    texts = read_texts(files, model, batch_tokens=100, seed=0)
    (end,) = model.stop_tokens
    rows = [*texts.rows, *texts.held_out]
    assert max(map(len, rows)) == 32
    assert sum(row[-1] == end for row in rows) == 41
    assert len(texts.held_out) == -(-len(rows) // 10)
    assert not {*texts.rows} & {*texts.held_out[:1]}


def test_epoch_has_each_row_once_within_the_token_limit(files, model):
    texts = read_texts(files, model, batch_tokens=100, seed=0)
    batches, seen = texts.batches(torch.Generator().manual_seed(0)), 0
    while seen < len(texts.rows):
        batch = next(batches)
        assert batch.token_ids.numel() <= 100
        seen += len(batch.token_ids)
    assert seen == len(texts.rows)
    assert sum(int(each.is_text.sum()) for each in texts.held_out_batches()) == sum(map(len, texts.held_out))


def test_seed_chooses_the_held_out_rows(files, model):
    first, again, other = (read_texts(files, model, 100, seed) for seed in (0, 0, 1))
    assert first == again
    assert first.held_out != other.held_out


def test_written_end_token_is_not_doubled(tmp_path, model):
    rows = [json.dumps({"text": f"{number}{END}"}) for number in range(10)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows), "utf-8")
    texts = read_texts([tmp_path / "a.jsonl"], model, 100, 0)
    (end,) = model.stop_tokens
    assert all(row.count(end) == 1 for row in (*texts.rows, *texts.held_out))


def test_unusable_training_text_is_reported_with_what_to_do(tmp_path, model):
    few, wrong, binary = tmp_path / "few.txt", tmp_path / "wrong.jsonl", tmp_path / "weights.bin"
    few.write_text("a few words", "utf-8")
    wrong.write_text('{"text": "one"}\n{"words": "two"}\n', "utf-8")
    binary.write_bytes(b"\xff\xfe\xfa")
    for files, told in (
        ([few], "make 1 rows of up to 32 tokens, and at least 10 are needed"),
        ([wrong], r"wrong.jsonl:2: is no text - write"),
        ([binary], "give files of text in UTF-8"),
        ([tmp_path / "none.txt"], "none.txt: cannot be read"),
    ):
        with pytest.raises(ConfigError, match=told):
            read_texts(files, model, 100, 0)


@pytest.mark.parametrize("layers", range(3, 30))
def test_first_and_last_layer_are_kept_and_others_at_equal_distances(layers):
    for depth in range(2, layers):
        kept = kept_layers(layers, depth, "t")
        assert (len(kept), kept[0], kept[-1]) == (depth, 0, layers - 1)
        gaps = [after - before for before, after in pairwise(kept)]
        assert 1 <= min(gaps) <= max(gaps) <= min(gaps) + 1


def test_pyramid_stays_one():
    values = tiny_config("pr_moe", num_hidden_layers=8, num_experts=[0, 2, 0, 2, 0, 4, 0, 4])
    kept = kept_layers(8, 7, "t")
    assert kept == (0, 1, 2, 3, 4, 5, 7)
    assert student_config(values, kept, "t")["num_experts"] == [0, 2, 0, 2, 0, 4, 4]


@pytest.mark.parametrize("family", FAMILIES)
def test_kept_layers_are_whole(family, model_files):
    counts = {"num_experts": [0, 2, 4, 4, 6]} if family == "pr_moe" else {}
    values = tiny_config(family, num_hidden_layers=5, **counts, layer_types=["full_attention"] * 5)
    kept = kept_layers(5, 3, "t")
    spec, tensors = model_files.read(family, **values)
    cut = parse_spec(student_config(values, kept, "t"), "t")
    assert cut.layers == tuple(spec.layers[layer] for layer in kept)
    student = student_tensors(tensors, kept)
    for number, layer in enumerate(kept):
        own = [name for name in tensors if name.startswith(f"layers.{layer}.")]
        assert own
        for name in own:
            assert torch.equal(student[name.replace(f"layers.{layer}.", f"layers.{number}.")], tensors[name])
    detached = {name: tensor.detach() for name, tensor in student.items()}
    assert logits_of(LanguageModel(cut, detached), [3, 5, 8]).isfinite().all()


@pytest.mark.parametrize("depth", [-1, 1, 8, 9])
def test_depth_out_of_range_names_the_range(depth):
    with pytest.raises(WeightsRefused, match="give --depth from 2 to 7"):
        kept_layers(8, depth, "t")
    with pytest.raises(WeightsRefused, match="cannot be made shallower"):
        kept_layers(2, depth, "t")
