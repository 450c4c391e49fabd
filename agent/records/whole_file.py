"""Files that appear under their name whole, or not at all, however their writer ends; and folders that stay."""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TextIO

from experts.filesystem import sync_folder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def whole_text_file(path: Path) -> Iterator[TextIO]:
    """What is written becomes the file when the block ends well; else the file stays as it was. Text in UTF-8."""
    draft = draft_of(path)
    try:
        with draft.open("w", encoding="utf-8", newline="") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    sync_folder(path.parent)


def draft_of(path: Path) -> Path:
    """What it is called until it is whole: hidden, so that nobody takes it, and always the same, so that none stays."""
    return path.with_name(f".{path.name}.tmp")


def make_folder(folder: Path) -> None:
    """Have a folder there, and survive a power cut with those above it, whoever made them, and however long ago."""
    folder.mkdir(parents=True, exist_ok=True)
    for above in folder.parents:
        with suppress(OSError):  # one that we may not read: it was there before us
            sync_folder(above)
