"""A SentencePiece model, tokenizer.model, as the tokenizer.json that it stands for.

Guarantees: tokens are those of the model, and special tokens are cut out of a text first, as transformers does. Served
are models of BPE without a normalisation of their own, as Llama's, Mistral's and Gemma's; others are refused by name.
Format: a message of Protocol Buffers, src/sentencepiece_model.proto of github.com/google/sentencepiece.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from experts.errors import ModelUnsupported, WeightsCorrupt
from experts.llm.gguf.header import Header
from experts.llm.gguf.tokenizer import WORD_START, TokenKind, tokenizer_files

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

PIECES, TRAINER, NORMALIZER = 1, 2, 3  # fields of the message, and of their messages:
PIECE, SCORE, KIND, NORMAL = 1, 2, 3, 1
IDS = {"unknown": (40, 0), "bos": (41, 1), "eos": (42, 2), "padding": (43, -1)}  # and what they are unless stored
ADDS_SPACE = 3
SERVED = {  # message, field: its name, its value unless stored, and those that are served
    (TRAINER, 3): ("model_type", 1, (2,)), (TRAINER, 24): ("treat_whitespace_as_suffix", 0, (0,)),
    (NORMALIZER, 2): ("precompiled_charsmap", b"", (b"",)), (NORMALIZER, 4): ("remove_extra_whitespaces", 1, (0,)),
    (NORMALIZER, 5): ("escape_whitespaces", 1, (1,)),
}  # fmt: skip
WIDTHS = {1: 8, 5: 4}


def tokenizer_of(content: bytes, settings: Mapping[str, Any], path: Path, expert: str) -> dict[str, Any]:
    """Values of tokenizer.json; ``settings``: of tokenizer_config.json. Raises ModelUnsupported, WeightsCorrupt."""
    try:
        header = Header(path, _metadata(content, settings, path, expert), {})
    except (IndexError, KeyError, TypeError, ValueError, struct.error) as error:
        raise WeightsCorrupt(expert, f"{path} is no sound SentencePiece model: {error}") from error
    made = tokenizer_files(header, expert)["tokenizer.json"]
    if settings.get("legacy") is False:  # as transformers 5: no space behind special tokens, nor before a space
        scheme = "first" if header.metadata["tokenizer.ggml.add_space_prefix"] else "never"
        spaces = {"type": "Metaspace", "replacement": WORD_START, "prepend_scheme": scheme, "split": False}
        made |= {"normalizer": None, "pre_tokenizer": spaces}
    return made


def _metadata(content: bytes, settings: Mapping[str, Any], path: Path, expert: str) -> dict[str, Any]:
    """As a GGUF file has them."""
    message = list(_fields(content))
    trainer, normalizer = (dict(_fields(dict(message).get(part, b""))) for part in (TRAINER, NORMALIZER))
    for (part, number), (name, usual, served) in SERVED.items():
        value = (trainer if part == TRAINER else normalizer).get(number, usual)
        if value not in served:
            raise ModelUnsupported(expert, name, f"is {str(value)[:40]}: {served[0]!r} is served", str(path))
    adds_space = bool(normalizer.get(ADDS_SPACE, True))
    pieces = [dict(_fields(one)) for number, one in message if number == PIECES]
    roles = {f"tokenizer.ggml.{role}_token_id": _signed(trainer.get(*at)) for role, at in IDS.items()}
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tuple(_spelled(one, is_cut=not adds_space) for one in pieces),
        "tokenizer.ggml.scores": tuple(struct.unpack("<f", one.get(SCORE, bytes(4)))[0] for one in pieces),
        "tokenizer.ggml.token_type": tuple(one.get(KIND, NORMAL) for one in pieces),
        "tokenizer.ggml.add_space_prefix": adds_space,
        "tokenizer.ggml.add_bos_token": bool(settings.get("add_bos_token", True)),
        "tokenizer.ggml.add_eos_token": bool(settings.get("add_eos_token", False)),
        **{role: number for role, number in roles.items() if number >= 0},
    }


def _spelled(piece: Mapping[int, Any], *, is_cut: bool) -> str:
    """``is_cut``: a user's piece is cut out of a text as it is; else merges find it behind the space before a text."""
    spelling: str = piece[PIECE].decode("utf-8")
    is_user_s = piece.get(KIND) == TokenKind.USER_DEFINED
    return spelling.replace(WORD_START, " ") if is_user_s and is_cut else spelling


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Fields of a message, in order: numbers of variable length as int, all else as bytes."""
    at = 0
    while at < len(message):
        key, at = _number(message, at)
        kind = key & 7
        if kind == 0:
            value, at = _number(message, at)
            yield key >> 3, value
            continue
        size, at = _number(message, at) if kind == 2 else (WIDTHS[kind], at)
        if size > len(message) - at:
            raise ValueError(f"field {key >> 3} goes on behind its end")
        yield key >> 3, message[at : at + size]
        at += size


def _number(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at
