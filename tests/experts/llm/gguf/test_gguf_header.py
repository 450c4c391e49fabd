"""Damaged, truncated and lying files: an error with its place, and nothing else."""

import json
import math
import struct
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experts.errors import ExpertError, ModelUnsupported, WeightsCorrupt, WeightsError, WeightsMissing
from experts.llm.files.checkpoint import open_checkpoint
from experts.llm.files.config import parse_spec, read_spec
from experts.llm.files.program import read_program
from experts.llm.gguf import metadata, tokenizer
from experts.llm.gguf.header import read_header
from experts.llm.gguf.metadata import FIELDS, SCALING, config_of
from experts.llm.gguf.tokenizer import tokenizer_files
from experts.llm.text.tokenizer import TextModel
from tests.experts.llm.gguf.words import byte_level_words
from tests.experts.llm.gguf.writing import LLAMA3, tiny_model, write_model

ENDLESS = 2**60


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    path, words = tmp_path_factory.mktemp("whole") / "m.gguf", byte_level_words()
    scaled = tiny_model("llama", rope_parameters=LLAMA3, vocab_size=len(words["tokenizer.ggml.tokens"]))
    trained = {".rope.scaling.original_context_length": 64}
    write_model(path, scaled, "Q8_0", tokenizer=words, keys=trained)
    return path.read_bytes()


@pytest.fixture(scope="module")
def file(content, tmp_path_factory):
    return tmp_path_factory.mktemp("damaged") / "m.gguf"


def read(path):
    read_program(path, "tiny")
    return open_checkpoint(path, "tiny", read_spec(path, "tiny")).read_all()


def test_file_cut_anywhere_is_refused_with_the_byte(content, file):
    for end in (0, 3, 4, 20, 30, 1000, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:end])
        with pytest.raises(WeightsCorrupt, match=r"m\.gguf .*byte \d+"):
            read(file)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_damage_to_the_header_is_an_error_of_the_expert_or_harmless(content, file, data):
    damaged, length = bytearray(content), content.index(b"blk.1.ffn_down.weight")
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, length))] = data.draw(st.integers(0, 255))
    file.write_bytes(damaged)
    with suppress(ExpertError):
        read(file)


@pytest.mark.parametrize(
    ("place", "lie"),
    [
        (8, struct.pack("<Q", ENDLESS)),  # tensors
        (16, struct.pack("<Q", ENDLESS)),  # keys
        (24, struct.pack("<Q", ENDLESS)),  # characters of the first key
        (b"tokenizer.ggml.tokens", struct.pack("<IIQ", 9, 8, ENDLESS)),
        (b"tokenizer.ggml.token_type", struct.pack("<IIQ", 9, 5, ENDLESS)),
        (b"output_norm.weight", struct.pack("<IQ", 1, ENDLESS)),
        (b"output_norm.weight", struct.pack("<I", ENDLESS % 2**31 + 7)),
    ],
)
def test_promise_of_more_than_the_file_holds_takes_no_memory(content, file, place, lie):
    damaged = bytearray(content)
    at = place if isinstance(place, int) else content.index(place) + len(place)
    damaged[at : at + len(lie)] = lie
    file.write_bytes(damaged)
    with pytest.raises(WeightsCorrupt):
        read_header(file, "tiny")


def test_file_of_another_kind_version_or_byte_order_is_refused(content, file):
    file.write_bytes(b"PK\x03\x04" + content[4:])
    with pytest.raises(WeightsCorrupt, match="does not begin as a GGUF file"):
        read(file)
    for version, named in ((b"\x01\0\0\0", "version: 1"), (b"\0\0\0\x03", "big endian")):
        file.write_bytes(content[:4] + version + content[8:])
        with pytest.raises(ModelUnsupported, match=named):
            read(file)
    file.unlink()
    with pytest.raises(WeightsMissing):
        read(file)


def test_spec_of_a_replaced_file_is_that_of_the_new_one(tmp_path):
    path, new = tmp_path / "m.gguf", tmp_path / "new.gguf"
    for layers in (2, 3):
        write_model(new, tiny_model("llama", num_hidden_layers=layers), "F32")
        new.replace(path)
        assert len(read_spec(path, "tiny").layers) == layers
    path.unlink()
    with pytest.raises(WeightsMissing):
        read_spec(path, "tiny")


def test_file_cut_after_it_was_opened_gives_an_error(content, file):
    file.write_bytes(content)
    checkpoint = open_checkpoint(file, "tiny", read_spec(file, "tiny"))
    with file.open("r+b") as writer:
        writer.truncate(len(content) // 2)
    with pytest.raises(WeightsError, match="truncated"):
        checkpoint.read_all()


WRONG = (-1, 0, 3, 2**40, 0.0, -1.5, math.nan, math.inf, True, "", "x", (), (1, 2), (-1.5,), ("a", "b"), (True,))


def test_value_of_any_type_in_any_key_is_an_error_of_the_expert_or_harmless(content, file):
    file.write_bytes(content)
    whole = read_header(file, "tiny")
    optional = [f"llama.{key}" for key in (*FIELDS, *SCALING, *metadata.WITHOUT_EFFECT)]
    optional += [f"tokenizer.ggml.{key}" for key in tokenizer.WITHOUT_EFFECT] + ["general.alignment", "split.count"]
    optional += [f"general.sampling.{key}" for key in tokenizer.SAMPLING]
    for kind in ("gpt2", "llama"):
        scores = tuple(-float(number) for number in range(len(whole.metadata["tokenizer.ggml.tokens"])))
        words = whole.metadata | {"tokenizer.ggml.model": kind, "tokenizer.ggml.scores": scores}
        for key in dict.fromkeys((*words, *optional)):
            for value in WRONG:
                header = replace(whole, metadata=words | {key: value})
                with suppress(ExpertError):
                    config = config_of(header, "tiny")
                    parse_spec(config, "tiny")
                    files = {"config.json": config, **tokenizer_files(header, "tiny")}
                    if "tokenizer.json" in files:
                        TextModel.of({name: json.dumps(each).encode() for name, each in files.items()}, "tiny")
