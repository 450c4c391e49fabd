"""Names in a watched folder: those of images, and those that are nobody's.

An ignored name is passed over silently, with all below it. A file with another ending than an image's is left alone,
and counted, unless the folder's pattern asks for just that ending.
"""

from __future__ import annotations

import os
import re
from fnmatch import translate
from typing import TYPE_CHECKING

from experts.images import ENDINGS

if TYPE_CHECKING:
    from collections.abc import Iterable

MARKER = ".done"
UNFINISHED = (".*", "*.part", "*.tmp", "*.filepart", "*.crdownload", "~$*", f"*{MARKER}")
OF_SYSTEMS = (  # Windows Explorer, macOS, and the trash and snapshots of disks, NAS and shares
    "thumbs.db", "ehthumbs*.db", "desktop.ini", "$recycle.bin", "recycler", "system volume information", "__macosx",
    "#recycle", "@recycle", "@eadir", "#snapshot", "~snapshot", "@snapshots", "lost+found",
)  # fmt: skip


class FileSelection:
    """Choice of one folder. ``ignore``: further patterns of names; ``pattern``: matches the names of its images."""

    def __init__(self, ignore: Iterable[str] = (), pattern: str | None = None) -> None:
        patterns = (*UNFINISHED, *OF_SYSTEMS, *(each.lower() for each in ignore))
        self._ignored = re.compile("|".join(map(translate, patterns)))
        self._pattern = None if pattern is None else re.compile(pattern)

    def ignores(self, relpath: str) -> bool:
        """True if the file or a folder above it has an ignored name."""
        return any(self._ignored.match(part.lower()) for part in relpath.split("/"))

    def takes(self, relpath: str) -> bool:
        """True if the file's ending is an image's, or the one that the pattern asks for."""
        name, ending = os.path.splitext(relpath)
        if ending.lower() in ENDINGS or self._pattern is None:
            return ending.lower() in ENDINGS
        of_path = "/" in self._pattern.pattern
        named, otherwise = (
            self._pattern.fullmatch(text if of_path else text.rpartition("/")[2])
            for text in (relpath, f"{name}.{'z' * max(len(ending) - 1, 3)}")
        )
        return named is not None and otherwise is None
