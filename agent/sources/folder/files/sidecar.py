"""Reads sidecars: `STEM.json` beside `STEM.png` gives the image's board, component, ref and type.

Guarantees: an unfinished sidecar is distinguished from a wrong one: a JSON object ends with its brace.
An unknown key, a repeated key, a value that is not printable text, or a link refuses the image.
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING, Any

from agent.faults.errors import SidecarUnfinished
from agent.line_file.intake import NAME_GROUPS, TYPE_GROUP
from experts.document import suggestion

if TYPE_CHECKING:
    from collections.abc import Mapping

SUFFIX = ".json"
LARGEST_BYTES = 64 * 1024
LONGEST_VALUE = 255  # characters, as of a file name
KEYS = (*NAME_GROUPS, TYPE_GROUP)
READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def spellings(ending: str) -> tuple[str, ...]:
    """Ways to write an ending; on a disk that compares names without case the first finds them all."""
    return ending, ending.upper(), ending.title()


def sidecar_beside(path: Path) -> Path:
    """The image's sidecar, however its ending is written; its usual place if there is none."""
    stem = os.path.splitext(path)[0]
    places = [Path(stem + ending) for ending in spellings(SUFFIX)]
    return next((place for place in places if os.path.lexists(place)), places[0])


def sidecar_of(relpath: str) -> str:
    return os.path.splitext(relpath)[0] + SUFFIX


def read_sidecar(path: Path, name: str) -> Mapping[str, str]:
    """Content of the sidecar; errors call it ``name``. Raises OSError, SidecarUnfinished, ValueError with the fault."""
    try:
        descriptor = os.open(path, READ_FLAGS)
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENXIO}:
            raise ValueError(f"{name} is not a regular file") from error
        raise
    if not S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{name} is not a regular file")
    with open(descriptor, "rb") as file:
        content = file.read(LARGEST_BYTES + 1)
    if len(content) > LARGEST_BYTES:
        raise ValueError(f"{name} has more than {LARGEST_BYTES} bytes")
    try:
        return fields_in(content, name)
    except ValueError as error:
        raise ValueError(f"{name} {error}") from error


def fields_in(content: bytes, name: str = "it") -> Mapping[str, str]:
    """Content of a sidecar by key. Raises SidecarUnfinished, or ValueError with the fault."""
    try:
        fields = json.loads(content, object_pairs_hook=_each_once)
    except _KeyTwice as error:
        raise ValueError(str(error)) from error
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error
    except ValueError as error:  # includes UnicodeDecodeError: the last character may be missing
        raise SidecarUnfinished(name, str(error)) from error
    if not isinstance(fields, dict):
        raise ValueError('is not {"board": ..., ...}')
    for key, value in fields.items():
        _check(key, value)
    return fields


class _KeyTwice(Exception):
    """A key is repeated, so its value is ambiguous."""


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise _KeyTwice("says a key twice")
    return fields


def _check(key: str, value: object) -> None:
    if key not in KEYS:
        raise ValueError(f"says {key!r}, which is unknown - {suggestion(key, KEYS)}")
    if not isinstance(value, str):
        raise ValueError(f"gives no text as {key}")  # 0402 and "0402" are different parts
    if not value.isprintable() or len(value) > LONGEST_VALUE:
        raise ValueError(f"gives a {key} that is not printable, or longer than {LONGEST_VALUE} characters")
