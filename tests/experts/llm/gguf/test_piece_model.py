"""SentencePiece models without a tokenizer.json: the tokens of the pieces, and refusals by name."""

import json

import pytest
from transformers.utils import sentencepiece_model_pb2_new as messages

from experts.errors import ModelUnsupported, WeightsCorrupt
from experts.llm.files.program import read_program
from experts.llm.text.tokenizer import TextModel
from tests.experts.llm.gguf.test_gguf_tokenizers import ODD, by_scores
from tests.experts.llm.gguf.words import pieces

WORDS = pieces()
MODERN = {"legacy": False}


def model_of(words, **settings):
    """``settings``: fields of trainer or normalizer, by their names with two underscores between."""
    made = messages.ModelProto()
    made.trainer_spec.model_type, made.normalizer_spec.remove_extra_whitespaces = 2, False
    columns = (words[f"tokenizer.ggml.{one}"] for one in ("tokens", "scores", "token_type"))
    for piece, score, kind in zip(*columns, strict=True):
        made.pieces.add(piece=piece, score=score, type=kind)
    for name, value in settings.items():
        part, _, field = name.partition("__")
        setattr(getattr(made, f"{part}_spec"), field, value)
    return made.SerializeToString()


@pytest.fixture
def read(tmp_path):
    def of(content, **settings):
        (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 64, "eos_token_id": 2}))
        (tmp_path / "tokenizer.model").write_bytes(content)
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        return TextModel.of(read_program(tmp_path, "llm/a"), "llm/a")

    return of


@pytest.mark.parametrize("settings", [{}, MODERN])
def test_tokens_are_those_of_the_pieces(read, settings):
    ours = read(model_of(WORDS), **settings)
    for text in ODD:
        if text != "<s>" and not (settings and text[:1] in (" ", "\u2581")):  # special; needs no space
            tokens = list(ours.encode(text, adds_special=False))
            assert tokens == by_scores(text, WORDS)
            assert ours.decode(tokens) == text.replace("\u2581", " ")
    assert ours.encode("fox")[0] == 1
    assert read(model_of(WORDS), add_bos_token=False, add_eos_token=True).encode("fox")[-1] == 2


def test_space_is_added_before_a_text_only_where_its_settings_say_so(read):
    behind, without = (read(model_of(WORDS), **given).encode("<s>fox", adds_special=False) for given in ({}, MODERN))
    assert behind == (1, *by_scores("fox", WORDS)) != without
    unspaced = read(model_of(WORDS, normalizer__add_dummy_prefix=False))
    assert unspaced.decode(unspaced.encode(" fox", adds_special=False)) == " fox"


def test_piece_of_the_user_is_cut_out_of_a_text_before_all_others(read):
    words = pieces([("\u2581" * 3, 0.0, 4)])
    ours = read(model_of(words, normalizer__add_dummy_prefix=False))
    space, three = words["tokenizer.ggml.tokens"].index("\u2581"), len(words["tokenizer.ggml.tokens"]) - 1
    assert ours.encode("     ", adds_special=False) == (three, space, space)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("trainer__model_type", 1), ("trainer__treat_whitespace_as_suffix", True),
        ("normalizer__precompiled_charsmap", b"x"), ("normalizer__remove_extra_whitespaces", True),
        ("normalizer__escape_whitespaces", False),
    ],
)  # fmt: skip
def test_model_of_another_kind_is_refused_by_name(read, setting, value):
    with pytest.raises(ModelUnsupported, match=setting.partition("__")[2]):
        read(model_of(WORDS, **{setting: value}))


@pytest.mark.parametrize("damage", [lambda whole: whole[:-3], lambda whole: b"\x0b" + whole, lambda whole: b"\xff" * 9])
def test_damaged_model_is_an_error_of_its_expert(read, damage):
    with pytest.raises((WeightsCorrupt, ModelUnsupported), match=r"tokenizer\.model"):
        read(damage(model_of(WORDS)))
