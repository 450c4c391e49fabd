"""What an expert is packed from: one file, or of a language model the files of a directory that its bytes depend on.

Guarantees: whatever of these files is replaced, added, removed or written to shows in ``stamp_of`` without reading any
of them; what a directory holds beside them (a README, a pickle, another format of the same weights) shows in neither.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from experts.errors import LoadError, WeightsMissing
from experts.llm.program import PROGRAM_FILES

if TYPE_CHECKING:
    from pathlib import Path

    from experts.expert import Expert

WHOLE_WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class SourceStamp:
    """How a source lies on its drive. ``listing``: of a directory, the digest of its files' names, sizes and times."""

    size_bytes: int
    mtime_ns: int
    listing: str = ""


def stamp_of(expert: Expert) -> SourceStamp:
    """How its source lies there now. Raises WeightsMissing, LoadError."""
    try:
        if not expert.takes_texts:
            status = expert.weights.stat()
            return SourceStamp(status.st_size, status.st_mtime_ns)
        found = [(path.name, path.stat()) for path in _files(expert)]
    except FileNotFoundError as error:
        raise WeightsMissing(
            expert.id, f"{expert.weights} is not there: copy it there, or correct `weights`"
        ) from error
    except OSError as error:
        raise LoadError(expert.id, f"{expert.weights} cannot be read: {error.strerror}") from error
    lines = [f"{name} {status.st_size} {status.st_mtime_ns}\n" for name, status in found]
    return SourceStamp(
        sum(status.st_size for _, status in found),
        max((status.st_mtime_ns for _, status in found), default=0),
        hashlib.sha256("".join(lines).encode()).hexdigest(),
    )


def sha256_of(expert: Expert) -> str:
    """The digest of its source's bytes, of a directory's with their names. Raises LoadError, WeightsMissing."""
    try:
        if not expert.takes_texts:
            return _digest(expert.weights)
        lines = [f"{path.name} {_digest(path)}\n" for path in _files(expert)]
    except FileNotFoundError as error:
        raise WeightsMissing(expert.id, f"{error.filename} is not there: copy it there") from error
    except OSError as error:
        raise LoadError(expert.id, f"{error.filename} cannot be read: {error.strerror}") from error
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def is_there(expert: Expert) -> bool:
    """Whether anything of the kind that its weights are lies where they should."""
    return expert.weights.is_dir() if expert.takes_texts else expert.weights.is_file()


def _files(expert: Expert) -> list[Path]:
    """A directory's files that decide on what is packed, by name. Raises LoadError, OSError."""
    folder = expert.weights
    if folder.exists() and not folder.is_dir():
        raise LoadError(expert.id, f"{folder} is a file: name the Hugging Face directory that holds config.json")
    names = {path.name for path in folder.iterdir()}
    weights = {WHOLE_WEIGHTS} if WHOLE_WEIGHTS in names else {name for name in names if name.endswith(".safetensors")}
    return [folder / name for name in sorted(names & {*PROGRAM_FILES, *weights, INDEX})]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
