"""Small files of a model's directory, made of a GGUF file's metadata. Equal files make equal ones."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING

from experts.llm.gguf.header import read_header
from experts.llm.gguf.metadata import config_of
from experts.llm.gguf.tokenizer import tokenizer_files

if TYPE_CHECKING:
    from pathlib import Path


def gguf_config(path: Path, expert: str) -> bytes:
    """config.json, kept until the file changes. Raises as ``read_header`` and ``config_of``."""
    try:
        status = path.stat()
    except OSError:
        return _config(path, expert, ())  # raises with the reason
    return _config(path, expert, (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns))


@lru_cache(maxsize=256)
def _config(path: Path, expert: str, stamp: tuple[int, ...]) -> bytes:
    """To read a header takes 40 ms for a vocabulary of 49,152 tokens, and a start asks seven times."""
    return json.dumps(config_of(read_header(path, expert), expert)).encode()


def gguf_program(path: Path, expert: str) -> dict[str, bytes]:
    """Files by name. Raises as ``read_header``, ``config_of`` and ``tokenizer_files``."""
    header = read_header(path, expert)
    files = {"config.json": config_of(header, expert), **tokenizer_files(header, expert)}
    return {name: json.dumps(values).encode() for name, values in files.items()}
