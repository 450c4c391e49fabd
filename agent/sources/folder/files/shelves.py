"""Judged files of watched folders, and kept images of a line, as other programs find them: read, never moved."""

from __future__ import annotations

import os
import re
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from agent.faults.errors import SidecarUnfinished
from agent.sources.folder.files.identity import claims_of, other_name, sighting_of
from agent.sources.folder.files.inbox import DONE, FAILED, NG, Inbox
from agent.sources.folder.files.selection import FileSelection
from agent.sources.folder.files.sidecar import sidecar_beside
from agent.subject import image_key
from experts.expert import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

    from agent.config import LineConfig
    from agent.sources.folder.files.naming import NameFields, Naming

DAY = re.compile(r"\d{4}-\d{2}-\d{2}")  # a folder below done/ and ng/
NUMBERED = re.compile("-[nt]-?[0-9a-f]+$")  # end of an identity
RENAMED = re.compile(
    r"~[0-9a-f]+-[0-9a-f]+--?[0-9a-f]+(-[nt]-?[0-9a-f]+)?(?=(\.[^.]*)?$)"
)  # suffix of a name that was taken on its shelf


def files_below(folder: Path) -> Iterator[str]:
    """Paths below a folder, sorted, of what may be a finished image; follows no link."""
    ignores = FileSelection().ignores
    for place, folders, files in os.walk(folder):
        prefix = os.path.relpath(place, folder)
        at_top = prefix == "."
        folders[:] = sorted(name for name in folders if not (ignores(name) or (at_top and name == FAILED)))
        for name in sorted(files):
            if not ignores(name):
                yield name if at_top else f"{Path(prefix).as_posix()}/{name}"


def as_it_came(relpath: str) -> str:
    """The path that a file had below its intake folder, before an agent put it on a shelf."""
    parts = relpath.split("/")
    if parts[0] in {DONE, NG}:
        parts = parts[2:] if len(parts) > 2 and DAY.fullmatch(parts[1]) else parts[1:]
        parts[-1] = RENAMED.sub("", parts[-1])
    return "/".join(parts)


def name_of(naming: Naming, path: Path, relpath: str) -> NameFields | str:
    """Fields of a file's name or its sidecar; or why there are none. ``relpath``: as it came."""
    try:
        if naming.has_sidecars:
            return naming.read_beside(sidecar_beside(path), "its sidecar")
        return naming.read(relpath)
    except (ValueError, SidecarUnfinished) as error:
        return str(error)
    except OSError as error:
        return f"its sidecar: {error.strerror}"


def image_file(
    config: LineConfig, key: str, judged_at: datetime, kept_as: str | None, place: str | None
) -> Path | None:
    """File of a result's image: kept by the line, or where its folder put it; None: gone. ``key``: the result's.
    ``place``: stored once the file was put away; without it the file is looked for."""
    if kept_as is not None:
        kept = config.state / "images" / kept_as
        return kept if kept.is_file() else None
    key = image_key(key)
    for folder in config.intake.folders:
        relpath = Inbox(folder.path, "").relpath_of(key)
        if relpath is not None:
            return judged_file(folder.path, relpath, key.rpartition("@")[2], judged_at, place)
    return None


def image_root(config: LineConfig, key: str, kept_as: str | None) -> Path:
    """Folder below which ``image_file`` looks; reads no disk."""
    key, roots = image_key(key), () if kept_as is not None else (folder.path for folder in config.intake.folders)
    return next((root for root in roots if Inbox(root, "").relpath_of(key) is not None), config.state)


def keeps_image(config: LineConfig, key: str, verdict: Verdict, kept_as: str | None) -> bool:
    """True if ``image_file`` may find a file; does not look for it."""
    if kept_as is not None:
        return True
    key = image_key(key)
    of_key = (each for each in config.intake.folders if Inbox(each.path, "").relpath_of(key) is not None)
    return any(folder.after != "delete" or verdict is Verdict.UNKNOWN for folder in of_key)


def judged_file(root: Path, relpath: str, identity: str, judged_at: datetime, place: str | None = None) -> Path | None:
    """Path of a judged file: at its stored ``place``, on the shelves of its days, kept where it came, or still claimed;
    None: gone.

    ``identity``: of its key. Another inode is the same file, brought back from a backup. Its days are those of any time
    zone, as the agent that put it away may have another one.
    """
    inode, _, rest = identity.partition("-")
    looks = NUMBERED.sub("", rest)
    another = None
    days = [f"{judged_at.astimezone() + timedelta(days=later):%Y-%m-%d}" for later in (0, 1, -1, 2)]
    shelves = (*(f"{shelf}/{day}" for day in days for shelf in (DONE, NG)), FAILED, "")
    targets = [root / shelf / relpath for shelf in shelves]
    stored = [] if place is None else [root / place]
    for path in (*stored, *(each for at in targets for each in (at, at.with_name(other_name(at, identity))))):
        seen = sighting_of(path)
        if seen is None or f"{seen.size_bytes:x}-{seen.mtime_ns:x}" != looks:
            continue
        if f"{seen.inode:x}" == inode:
            return path
        another = another or path
    return another or next((path for path in claims_of(root, relpath, identity) if sighting_of(path) is not None), None)
