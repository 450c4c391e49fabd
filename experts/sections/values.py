"""Values of line files that several sections share: ids, paths of this box, sizes in bytes, component types."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationInfo, WithJsonSchema

from experts.sizes import SIZE, size_bytes

EXPERT_ID = re.compile(r"[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+")
ADDRESS = re.compile(r"\\\\|//|[\w.+-]+:[/\\]|[A-Za-z]:$")  # \\\\NAS\X, //nas/x, smb://nas/x, nas:/x, D:\X, D:
MOUNT = (
    "mount it, for a share of Windows or a NAS with a line of /etc/fstab such as `//NAS/SHARE /mnt/SHARE cifs "
    "credentials=FILE,uid=coserve,_netdev 0 0`, and write the mount point: /mnt/SHARE"
)
COMPONENT = re.compile(r"\w[\w.+-]*")  # letters of any script; valid in file names, metrics and addresses


def _expert_id(text: str) -> str:
    if not EXPERT_ID.fullmatch(text) or ".." in text:
        raise ValueError(f"{text!r} is not an expert id - write kind/name from letters, digits, `_`, `.` and `-`")
    return text


def _component(text: str) -> str:
    if not COMPONENT.fullmatch(text):
        raise ValueError(
            f"{text!r} is not a component type that a file name or an address can carry - "
            "use letters, digits, `_`, `.`, `+` and `-`, a letter or digit first"
        )
    return text


def path_of_this_box(path: object) -> object:
    """Raises ValueError for an address of a share or a path of Windows: here it would be an odd name of a new folder.

    No message repeats an address: it may contain a password.
    """
    if path == "":
        raise ValueError("an empty path - name a file or folder, relative to this file")
    if not isinstance(path, str):
        return path
    if path.startswith("file:"):
        raise ValueError("an address, no path - leave out file://")
    if ADDRESS.match(path):
        raise ValueError(f"an address of a share, or of a Windows disk, is no path of this box - {MOUNT}")
    if "\\" in path:
        raise ValueError(f"{path!r} has the backslashes of Windows - write {path.replace(chr(92), '/')!r}")
    return path


def _in_folder(path: Path, info: ValidationInfo) -> Path:
    folder: Path = info.context["folder"] if info.context else Path()
    return (folder / path.expanduser()).absolute()


def _size(value: object) -> int:
    bytes_ = size_bytes(str(value))
    if bytes_ < 1:
        raise ValueError(f"{value!r} is nothing at all - write a size such as 4GiB")
    return bytes_


FilePath = Annotated[
    Path, BeforeValidator(path_of_this_box), AfterValidator(_in_folder)
]  # relative to the file naming it
Size = Annotated[int, BeforeValidator(_size), WithJsonSchema({"type": "string", "pattern": f"^{SIZE.pattern}$"})]
ExpertId = Annotated[str, AfterValidator(_expert_id)]
ComponentType = Annotated[str, AfterValidator(_component)]


class Section(BaseModel):
    """Mapping of a line file: frozen; an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=False)
