"""Program of a language model: its directory's small files as one run of bytes.

Guarantees: equal files make equal bytes, in any order, so models of one config and tokenizer share a program. Format: a
line of JSON, [[name, bytes], ...] in the order of the names, then the files, one after the other.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from experts.errors import LoadError, WeightsCorrupt, WeightsMissing
from experts.llm.files.config import CONFIG_NAME, MODULES, POOLING, TOKENIZER_FILES, parse_config
from experts.llm.gguf.header import is_gguf
from experts.llm.gguf.piece_model import tokenizer_of
from experts.llm.gguf.program import gguf_program

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from experts.llm.files.config import ArchSpec

TOKENIZER, SETTINGS, PIECES = "tokenizer.json", "tokenizer_config.json", "tokenizer.model"
PROGRAM_FILES = (CONFIG_NAME, *TOKENIZER_FILES, PIECES, MODULES, POOLING)
ADAPTER_FILES = ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # of PEFT
LARGEST_FILE_BYTES = 64 * 1024 * 1024  # a tokenizer of a million tokens has a third of that


def read_program(directory: Path, expert: str) -> dict[str, bytes]:
    """Small files of a directory, or what a GGUF file has for them; config.json at least.

    Raises WeightsMissing, WeightsCorrupt for a file that is too large, LoadError; ModelUnsupported for a GGUF file or a
    SentencePiece model that is not served.
    """
    if is_gguf(directory):
        return gguf_program(directory, expert)
    files: dict[str, bytes] = {}
    for name in PROGRAM_FILES:
        path = directory / name
        try:
            if path.stat().st_size > LARGEST_FILE_BYTES:
                raise WeightsCorrupt(expert, f"{path} has more than {LARGEST_FILE_BYTES} bytes: it is no {name}")
            files[name] = path.read_bytes()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise LoadError(expert, f"{path} cannot be read: {error.strerror}") from error
    if CONFIG_NAME not in files:
        raise WeightsMissing(expert, f"{directory / CONFIG_NAME} is not there: name a Hugging Face model directory")
    pieces = files.pop(PIECES, None)
    if pieces is not None and TOKENIZER not in files:
        files[TOKENIZER] = _tokenizer(pieces, files.get(SETTINGS, b"{}"), directory, expert)
    return files


def _tokenizer(pieces: bytes, settings: bytes, directory: Path, expert: str) -> bytes:
    try:
        values = json.loads(settings)
    except ValueError as error:
        raise WeightsCorrupt(expert, f"{directory / SETTINGS} cannot be read as JSON: {error}") from error
    return json.dumps(tokenizer_of(pieces, values, directory / PIECES, expert)).encode()


def pack_program(files: Mapping[str, bytes]) -> bytes:
    names = sorted(files)
    table = json.dumps([[name, len(files[name])] for name in names])
    return b"".join((table.encode(), b"\n", *(files[name] for name in names)))


def files_of(program: bytes) -> dict[str, bytes]:
    """The files that a program was made of."""
    head, _, content = program.partition(b"\n")
    files, start = {}, 0
    for name, size_bytes in json.loads(head):
        files[name] = content[start : start + size_bytes]
        start += size_bytes
    return files


def spec_of(program: bytes, expert: str) -> ArchSpec:
    """Spec that a program's config.json describes. Raises WeightsCorrupt, ModelUnsupported."""
    return parse_config(files_of(program)[CONFIG_NAME], expert, CONFIG_NAME)
