"""Subject of an inspection, and status of its source.

A source makes the subject; the row, the message and the file carry it unchanged.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from dataclasses import dataclass, replace
from datetime import datetime  # noqa: TC003  # pydantic reads it
from typing import TYPE_CHECKING

from agent.faults.errors import OrderRefused, Reason

if TYPE_CHECKING:
    from agent.line_file.boards import LayoutSections

CAMERA_PREFIX = "camera/"  # of keys: a folder's begin with its digest
CALLER_PREFIX = "api/"
CALLERS = "api"  # the source of what callers order
LONGEST_NAME = 200  # of a key, a serial or a ref: longer ones are no names
PART_MARK = "#"  # between an image's key and the ref of a part of it
COPY = "(?:copy|kopie|copie|copia|cópia|kopia|kopi|копия|コピー|副本)"
COPY_MARK = re.compile(  # what file managers and browsers append to a copy's name, or put before it
    rf"\s*\((?:\d+|[^()]*\b{COPY}[^()]*)\)$|~\d+$|[\s_-]+{COPY}(?:[\s_-]*\d+)?$|^{COPY}(?: \(\d+\))? (?:of|von|de|di) "
)
SEEN = r".*@[0-9a-f]+-[0-9a-f]+--?[0-9a-f]+"  # of a folder's image: place, inode, size and mtime
KEY_OF_PART = re.compile(rf"({SEEN}(?:-[nt]-?[0-9a-f]+)?){PART_MARK}", re.DOTALL)
KEY_OF_FILE = re.compile(rf"({SEEN})(?:-n[0-9a-f]+|-t(-?[0-9a-f]+))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Subject:
    """An image, or one part of it, and the component's route or the single expert that judges it.

    ``key`` identifies it across restarts. ``source``: the folder, camera or API; of a stored result the beginning of
    its key. ``image``: the image's name, or its key where it has no other. ``board``: the serial. ``box``: the part's
    (left, top, right, bottom) in pixels; None for all of the image. ``asked_sha256``: digest of a caller's request
    under this key.
    """

    key: str
    source: str
    image: str
    arrived_at: datetime
    component: str | None = None
    expert: str | None = None
    board: str | None = None
    board_type: str | None = None
    ref: str | None = None
    box: tuple[int, int, int, int] | None = None
    asked_sha256: str | None = None

    @property
    def shows_board(self) -> bool:
        """The image shows a whole board: the layout of the board's type cuts it."""
        return self.component is None and self.expert is None and self.board_type is not None

    @property
    def is_on_board(self) -> bool:
        """A board of a configured type counts its verdict."""
        return self.board is not None and self.board_type is not None and self.ref is not None

    @property
    def name(self) -> str:
        """The name in logs and reasons."""
        return self.image if self.box is None or self.image == self.key else f"{self.image}{PART_MARK}{self.ref}"


@dataclass(frozen=True, slots=True)
class SourceStatus:
    """How a folder or a camera is doing. ``received``: images taken in; ``waiting``: images not taken yet.

    ``dropped``: frames that gave way to later ones; ``held_bytes``: images read and not judged; ``left_alone``: files
    whose ending is no image's; ``lost``: triggers without a frame; ``broken``: frames that could not be read;
    ``frame_age_s``: age of the last frame.
    """

    name: str
    kind: str
    state: str
    received: int = 0
    waiting: int = 0
    dropped: int = 0
    alarm: str | None = None
    held_bytes: int = 0
    left_alone: int = 0
    lost: int = 0
    broken: int = 0
    reconnects: int = 0
    frame_age_s: float | None = None


def pieces(subject: Subject, layout: LayoutSections | None) -> tuple[Subject, ...]:
    """Subjects that one image is judged by: itself, or with a layout each part of the board that it shows."""
    if layout is None:
        return (subject,)
    return tuple(
        replace(
            subject,
            key=part_key(subject.key, ref),
            image=part_key(subject.image, ref) if subject.image == subject.key else subject.image,
            component=part.component,
            ref=ref,
            box=part.box,
        )
        for ref, part in layout.parts.items()
    )


def part_key(key: str, ref: str) -> str:
    return f"{key}{PART_MARK}{ref}"


def image_key(key: str) -> str:
    """A folder image's key, by it or by the key of a part."""
    found = KEY_OF_PART.match(key)
    return found[1] if found else key


def seen_key(key: str) -> str:
    """A folder image's key without what tells apart two files of equal place, inode, size and mtime."""
    found = KEY_OF_FILE.fullmatch(key)
    return found[1] if found else key


def ctime_in(key: str) -> int | None:
    """ctime in ns of a folder's file that is judged where it lies; None for a claimed one, and any other image."""
    found = KEY_OF_FILE.fullmatch(key)
    return int(found[2], 16) if found and found[2] else None


def read_alike(name: str) -> str:
    """A name as people read it: equal for composed and decomposed letters, wide ones, cases, spaces, invisible ones."""
    visible = (each for each in unicodedata.normalize("NFKC", name) if unicodedata.category(each) != "Cf")
    return " ".join(unicodedata.normalize("NFKC", "".join(visible).casefold()).split())


def named_part(ref: str) -> str:
    """The ref that a part's name means: as people read it, without marks of a copy, such as ` (2)` and ` - Copy`."""
    name, before = read_alike(ref), ""
    while name != before:
        name, before = COPY_MARK.sub("", name) or name, name
    return name


def asked_sha256(*asked: object) -> str:
    """Digest of a caller's request under its key."""
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()


def checked_name(name: str | None, what: str) -> str | None:
    """The name. Raises OrderRefused for one that is too long or blank, or a key with a part's mark."""
    if name is not None and len(name) > LONGEST_NAME:
        raise OrderRefused(Reason.INVALID, f"a {what} of {len(name)} characters - at most {LONGEST_NAME}")
    if name and not name.strip():
        raise OrderRefused(Reason.INVALID, f"{what} is blank - leave it out, or scan again")
    if what == "key" and name and PART_MARK in name:
        raise OrderRefused(Reason.INVALID, f"a key with {PART_MARK} - it stands before a frame's parts: leave it out")
    return name
