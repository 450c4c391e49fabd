"""Sources of packed experts: a file, or of a language model a GGUF file or a directory's files, and its adapter's.

Guarantees: a file replaced, added, removed or written to changes ``stamp_of`` without being read, also where size and
mtime stay, as in system images that set every time to one moment. Other files of a directory (a README, a pickle,
another format of the same weights) change neither ``stamp_of`` nor ``sha256_of``.
"""

from __future__ import annotations

import hashlib
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from experts.errors import LoadError, WeightsMissing
from experts.llm.files.program import ADAPTER_FILES, PROGRAM_FILES
from experts.llm.gguf.header import is_gguf

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator

    from experts.expert import Expert

WHOLE_WEIGHTS = "model.safetensors"
READ_BYTES = 4 * 1024 * 1024
INDEX = "model.safetensors.index.json"


def stamp_of(expert: Expert) -> str:
    """Digest of the names, sizes, times and inodes of its source's files.

    The ctime counts because no program can set it. Raises WeightsMissing, LoadError.
    """
    lines = [
        f"{name} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}\n"
        for name, status in _statuses(expert)
    ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def size_bytes_of(expert: Expert) -> int:
    return sum(status.st_size for _, status in _statuses(expert))


def _statuses(expert: Expert) -> list[tuple[str, os.stat_result]]:
    try:
        return [(name, path.stat()) for name, path in _named_files(expert)]
    except FileNotFoundError as error:
        is_adapter = expert.adapter is not None and Path(error.filename).parent == expert.adapter
        missing, key = (error.filename, "adapter") if is_adapter else (expert.weights, "weights")
        raise WeightsMissing(expert.id, f"{missing} is not there: copy it there, or correct `{key}`") from error
    except OSError as error:
        raise LoadError(expert.id, f"{error.filename} cannot be read: {error.strerror}") from error


def sha256_of(expert: Expert, pause: Callable[[], None] = lambda: None) -> str:
    """Digest of its source's bytes, of several files with the names. ``pause`` is called between two reads.

    Raises LoadError, WeightsMissing.
    """
    try:
        if not _is_directory(expert) and expert.adapter is None:
            return _digest(expert.weights, pause)
        lines = [f"{name} {_digest(path, pause)}\n" for name, path in _named_files(expert)]
    except FileNotFoundError as error:
        raise WeightsMissing(expert.id, f"{error.filename} is not there: copy it there") from error
    except OSError as error:
        raise LoadError(expert.id, f"{error.filename} cannot be read: {error.strerror}") from error
    return hashlib.sha256("".join(lines).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class SeenSource:
    stamp: str
    sha256: str


@contextmanager
def unchanged_source(expert: Expert) -> Iterator[SeenSource]:
    """Source of an expert while something is learned from its weights.

    Raises LoadError at the end where it was overwritten meanwhile: what was learned would be bound to other weights.
    """
    seen = SeenSource(stamp_of(expert), sha256_of(expert))
    yield seen
    if stamp_of(expert) != seen.stamp and sha256_of(expert) != seen.sha256:
        raise LoadError(
            expert.id,
            f"{expert.weights} was overwritten meanwhile, so nothing was written: run it again when it is whole",
        )


def is_there(expert: Expert) -> bool:
    is_whole = expert.weights.is_dir() if _is_directory(expert) else expert.weights.is_file()
    return is_whole and (expert.adapter is None or expert.adapter.is_dir())


def _is_directory(expert: Expert) -> bool:
    return expert.takes_texts and not is_gguf(expert.weights)


def _named_files(expert: Expert) -> list[tuple[str, Path]]:
    """Files that packed bytes depend on. Raises as ``_files``."""
    named = [(path.name, path) for path in (_files(expert) if _is_directory(expert) else [expert.weights])]
    folder = expert.adapter
    return named if folder is None else [*named, *((f"adapter/{name}", folder / name) for name in ADAPTER_FILES)]


def _files(expert: Expert) -> list[Path]:
    """Files of a directory that packed bytes depend on, by name. Raises LoadError, OSError."""
    folder = expert.weights
    if folder.exists() and not folder.is_dir():
        raise LoadError(
            expert.id, f"{folder} is a file: name the Hugging Face directory that holds config.json, or a .gguf file"
        )
    names = {path.name for path in folder.iterdir()}
    weights = {WHOLE_WEIGHTS} if WHOLE_WEIGHTS in names else {name for name in names if name.endswith(".safetensors")}
    deeper = {name for name in PROGRAM_FILES if "/" in name and (folder / name).is_file()}
    return [folder / name for name in sorted(deeper | (names & {*PROGRAM_FILES, *weights, INDEX}))]


def _digest(path: Path, pause: Callable[[], None]) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(READ_BYTES):
            digest.update(chunk)
            pause()
    return digest.hexdigest()
