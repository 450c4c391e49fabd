"""Texts of files as rows: all tokens are in one row each, a tenth of the rows is held out, errors name the line."""

import json

import pytest
import torch

from experts.errors import ConfigError
from experts.llm.text.tokenizer import TextModel
from experts.llm.training.distil import read_texts
from tests.experts.llm.text.conftest import LINES, byte_level, text_files

END = "<|end|>"


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


def test_a_round_of_batches_has_each_row_once_and_no_more_tokens_than_asked_for(files, model):
    texts = read_texts(files, model, batch_tokens=100, seed=0)
    batches, seen = texts.batches(torch.Generator().manual_seed(0)), 0
    while seen < len(texts.rows):
        batch = next(batches)
        assert batch.token_ids.numel() <= 100
        seen += len(batch.token_ids)
    assert seen == len(texts.rows)
    assert sum(int(each.is_text.sum()) for each in texts.held_out_batches()) == sum(map(len, texts.held_out))


def test_the_seed_chooses_what_is_held_out(files, model):
    first, again, other = (read_texts(files, model, 100, seed) for seed in (0, 0, 1))
    assert first == again
    assert first.held_out != other.held_out


def test_an_end_that_is_written_is_not_doubled(tmp_path, model):
    rows = [json.dumps({"text": f"{number}{END}"}) for number in range(10)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows), "utf-8")
    texts = read_texts([tmp_path / "a.jsonl"], model, 100, 0)
    (end,) = model.stop_tokens
    assert all(row.count(end) == 1 for row in (*texts.rows, *texts.held_out))


def test_mistakes_say_what_to_do(tmp_path, model):
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
