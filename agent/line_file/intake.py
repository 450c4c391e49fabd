"""Intake section: watched folders and cameras."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from agent.line_file.boards import route_problems
from agent.line_file.values import Name, RegularExpression, Seconds, SecretSection
from experts.document import suggestion
from experts.images import DEFAULT_MAX_PIXELS, LARGEST_MAX_PIXELS
from experts.sections.values import ComponentType, FilePath, Section, path_of_this_box

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from agent.line_file.boards import BoardSection, LayoutSections
    from experts.document import Document, KeyPath
    from experts.errors import ConfigError

ReadyMode = Literal["auto", "rename", "marker", "stable"]
Identity = Literal["pattern", "sidecar"]
BOARD_GROUP = "board"
NAME_GROUPS = (BOARD_GROUP, "component", "ref")  # required in a pattern
TYPE_GROUP = "type"  # required too if the line has several board types
NETWORK_SCHEMES = ("rtsp", "rtsps", "http", "https")
CAMERA_SCHEMES = (*NETWORK_SCHEMES, "file", "v4l2", "genicam")


def _camera_url(text: str, info: ValidationInfo) -> str:
    """No message repeats more than the scheme: the url may contain a password."""
    scheme, colon, rest = text.partition(":")
    if not colon or scheme not in CAMERA_SCHEMES:
        kind = f"{scheme}:" if colon else "this"
        raise ValueError(
            f"{kind!r} is not a camera - write rtsp://, http:// (MJPEG), file:CLIP, v4l2:/dev/video0, or genicam:"
        )
    if not rest.strip("/"):
        raise ValueError(f"{text!r} has nothing after {scheme}: - write the camera, host or file")
    if scheme in NETWORK_SCHEMES:
        _check_address(text)
    if scheme == "file":
        folder: Path = (info.context or {})["folder"]
        return f"file:{(folder / str(path_of_this_box(rest))).absolute()}"
    return text


def _check_address(url: str) -> None:
    """Raises ValueError for an invalid address, or an address with a password."""
    try:
        parts = urlsplit(url)
        host, password, behind = parts.hostname, parts.password, f"{parts.path}{parts.query}{parts.fragment}"
        _ = parts.port
    except ValueError:  # perhaps by a password: a `/` or a `#` in it cuts the address short
        host, password, behind = None, None, url
    if password is not None or "@" in behind:
        raise ValueError(
            "the url contains a password, or a stray @ - write user: and password: {file: ...} instead, "
            "and %40 within a path"
        )
    if not host:
        raise ValueError("the url has no valid host and port - write SCHEME://HOST:PORT/PATH")


def _name_pattern(text: str) -> str:
    if not text.strip("*") or "/" in text:
        raise ValueError(f"{text!r} is no pattern of a name - write the name of a file or a folder, as *_preview.jpg")
    return text


NamePattern = Annotated[str, AfterValidator(_name_pattern)]
MaxPixels = Annotated[int, Field(strict=True, ge=1, le=LARGEST_MAX_PIXELS)]


class FolderSection(Section):
    """One watched folder."""

    path: FilePath = Field(description="folder to watch, subfolders included, relative to this file")
    identity: Identity = Field(
        "pattern",
        description="source of a file's board and part: pattern (its name), or sidecar (STEM.json beside STEM.png: "
        '{"board": ..., "component": ..., "ref": ...}, and "type" where there are several board types)',
    )
    pattern: RegularExpression | None = Field(
        None,
        validate_default=True,
        description="regular expression of whole file names (of the path below the folder, if it holds a `/`) "
        "with the groups board, component and ref, and type where there are several board types",
    )
    component: ComponentType | None = Field(
        None, description="component type of every file here; default: the pattern's group"
    )
    board_type: str | None = Field(
        None,
        description="every file here shows a whole board of this type, cut by its layout; the pattern has the group "
        "board alone; default: every file shows one part",
    )
    ready: ReadyMode = Field(
        "auto",
        description="sign that a file is complete: rename (it appears whole), marker (NAME.done beside it, or "
        "its sidecar), stable (it stops changing), or auto: any of them",
    )
    settle_ms: Annotated[int, Field(strict=True, ge=0, le=600_000)] | None = Field(
        None,
        description="how long a file must stay unchanged, in ms, 0 to 600000; default 200 once its writer closed it, "
        "2000 if the filesystem does not report that",
    )
    poll_s: Annotated[float, Field(strict=True, ge=0.05, le=3600)] = Field(
        2.0, description="seconds between two scans of the folder, 0.05 to 3600"
    )
    stale_after_s: Seconds = Field(
        60.0,
        description="seconds until an incomplete or unreadable file that no process writes is UNKNOWN",
    )
    after: Literal["keep", "move", "delete"] = Field(
        "move",
        description="fate of a judged file: keep (stays), move (to done/ or ng/), delete; "
        "UNKNOWN ones move to failed/ unless kept",
    )
    ignore_existing: bool = Field(False, strict=True, description="true: files present at the start are not judged")
    ignore: tuple[NamePattern, ...] = Field(
        (),
        description="names of files and folders to pass over, `*` for any characters, besides those of systems "
        "(Thumbs.db, #recycle, $RECYCLE.BIN, @eaDir, ...)",
    )
    duplicate: Literal["reinspect", "skip"] = Field(
        "reinspect",
        description="the same bytes again for the same board, component and ref: reinspect (judge them again) or skip "
        "(they get the verdict of the first, OK or NG, and no expert runs)",
    )
    max_pixels: MaxPixels = Field(
        DEFAULT_MAX_PIXELS,
        description=f"larger images are refused, in pixels, 1 to {LARGEST_MAX_PIXELS}",
    )

    @property
    def has_sidecars(self) -> bool:
        return self.identity == "sidecar"

    @field_validator("pattern")
    @classmethod
    def _is_one_identity(cls, pattern: str | None, info: ValidationInfo) -> str | None:
        identity = info.data.get("identity")
        if identity == "pattern" and pattern is None:
            raise PydanticCustomError("missing", "Field required")
        if identity == "sidecar" and pattern is not None:
            raise ValueError("identity: sidecar does not read file names - leave out pattern or identity")
        return pattern

    @property
    def shows_boards(self) -> bool:
        return self.board_type is not None

    @model_validator(mode="after")
    def _is_consistent(self) -> FolderSection:
        if self.shows_boards and self.component is not None:
            raise ValueError("a file shows one part or a whole board - keep component or board_type")
        if self.shows_boards and self.duplicate == "skip":
            raise ValueError("duplicate: skip is for files that show one part - leave it out, or board_type")
        if self.pattern is None:
            return self
        groups = re.compile(self.pattern).groupindex
        wanted = (BOARD_GROUP,) if self.shows_boards else NAME_GROUPS
        missing = [name for name in wanted if name not in groups and not (name == "component" and self.component)]
        if missing:
            raise ValueError(f"the pattern has no group {', '.join(missing)} - add (?P<{missing[0]}>...)")
        if self.component and "component" in groups:
            raise ValueError("component is both a key and a group of the pattern - keep one")
        known = wanted if self.shows_boards else (*NAME_GROUPS, TYPE_GROUP)
        unknown = sorted(set(groups) - set(known))
        if unknown:
            raise ValueError(f"unknown group {unknown[0]!r} - {suggestion(unknown[0], known)}")
        return self


class CameraSection(Section):
    """One camera."""

    name: Name = Field(description="its unique name in states, counts and results: letters, digits, `_`, `.`, `-`")
    url: Annotated[str, AfterValidator(_camera_url)] = Field(
        description="rtsp://HOST/..., http://HOST/... (MJPEG), file:CLIP (relative to this file), v4l2:/dev/video0, or "
        "genicam:SERIAL"
    )
    user: str | None = Field(None, description="user name for the camera")
    password: SecretSection | None = Field(None, description="that user's: {credential: NAME} or {file: PATH}")
    mode: Literal["free_run", "triggered"] = Field(
        "free_run",
        description="free_run (the latest frame, whenever there is room; others are counted as dropped) or triggered "
        "(one frame for each trigger; none is dropped silently)",
    )
    interval_s: Seconds | None = Field(
        None, description="triggered: seconds between automatic triggers; default: API only"
    )
    queue: int = Field(8, strict=True, ge=1, le=1000, description="triggered: frames that may wait for room, 1 to 1000")
    component: ComponentType | None = Field(
        None, description="component type of every frame; default: cut by its board's layout"
    )
    board_type: str | None = Field(
        None, description="board type of every frame, cut by its layout; default the only one"
    )
    open_timeout_s: Seconds = Field(10.0, description="how long connecting may take, seconds")
    stall_timeout_s: Seconds = Field(5.0, description="seconds without a frame until STALLED, and a reconnection")
    max_lag_s: Seconds = Field(
        2.0,
        description="frames later than this raise an alarm, seconds; after stall_timeout_s of it the camera is "
        "reconnected",
    )
    rtsp_transport: Literal["tcp", "udp"] | None = Field(
        None, description="rtsp: default tcp if the camera has it; rtsps is always tcp"
    )
    ca: FilePath | None = Field(
        None, description="rtsps, https: PEM file of the authority to trust; default the system's"
    )
    insecure_ok: bool = Field(False, strict=True, description="rtsps, https: accept any certificate")
    loop: bool = Field(False, strict=True, description="file: restart at its end")
    frames_per_s: Annotated[float, Field(strict=True, gt=0, le=1000)] | None = Field(
        None, description="file: playback speed; default recorded"
    )
    max_pixels: MaxPixels = Field(
        DEFAULT_MAX_PIXELS,
        description=f"larger frames are refused, in pixels, 1 to {LARGEST_MAX_PIXELS}",
    )

    @property
    def scheme(self) -> str:
        return self.url.partition(":")[0]

    @model_validator(mode="after")
    def _is_consistent(self) -> CameraSection:
        if self.password is not None and self.user is None:
            raise ValueError("a password without a user - add user:")
        if self.interval_s is not None and self.mode != "triggered":
            raise ValueError("interval_s is for mode: triggered - add that, or leave interval_s out")
        if self.scheme != "file" and (self.loop or self.frames_per_s is not None):
            raise ValueError("loop and frames_per_s are for file: - leave them out")
        if self.scheme not in {"rtsps", "https"} and (self.ca is not None or self.insecure_ok):
            raise ValueError("ca and insecure_ok are for rtsps: and https: - leave them out, or correct url")
        if self.ca is not None and self.insecure_ok:
            raise ValueError("ca names an authority to trust, insecure_ok trusts any - leave one out")
        if self.scheme != "rtsp" and self.rtsp_transport is not None:
            raise ValueError("rtsp_transport is for rtsp: - leave it out")
        return self


class IntakeSection(Section):
    """Sources of images."""

    folders: tuple[FolderSection, ...] = Field((), description="watched folders")
    cameras: tuple[CameraSection, ...] = Field((), description="cameras")


def folder_problems(
    intake: IntakeSection,
    routes: Collection[str],
    boards: Mapping[str, BoardSection],
    layouts: Mapping[str, LayoutSections],
    document: Document,
) -> Iterator[ConfigError]:
    for index, folder in enumerate(intake.folders):
        where = ("intake", "folders", index)
        yield from route_problems(folder.component, routes, document, (*where, "component"))
        if folder.board_type is not None:
            yield from _board_type_problems(folder.board_type, boards, document, (*where, "board_type"))
            if (board := boards.get(folder.board_type)) is not None and board.layout is None:
                lack = f"board type {folder.board_type!r} has no layout to cut the image by - add layout: to it"
                yield document.error(lack, *where, "board_type")
        groups = None if folder.pattern is None or folder.shows_boards else re.compile(folder.pattern).groupindex
        if len(boards) > 1 and groups is not None and TYPE_GROUP not in groups:
            lack = f"the board type of a file is unclear: {', '.join(boards)} - add a group (?P<type>...)"
            yield document.error(lack, *where, "pattern")
        others = [other.path for other in intake.folders[:index]]
        if any(folder.path.is_relative_to(other) or other.is_relative_to(folder.path) for other in others):
            yield document.error("is inside or around another watched folder - watch each file once", *where, "path")
        layout = layouts.get(folder.board_type or "")
        if layout is not None and layout.size[0] * layout.size[1] > folder.max_pixels:
            frame = f"images of {layout.size[1]} x {layout.size[0]} pixels, as in its layout,"
            yield document.error(f"{frame} are more than {folder.max_pixels} - raise max_pixels", *where, "max_pixels")


def camera_problems(
    intake: IntakeSection, routes: Collection[str], boards: Mapping[str, BoardSection], document: Document
) -> Iterator[ConfigError]:
    names = Counter(camera.name for camera in intake.cameras)
    for index, camera in enumerate(intake.cameras):
        where = ("intake", "cameras", index)
        if names[camera.name] > 1:
            yield document.error("two cameras have this name - name each differently", *where, "name")
        yield from route_problems(camera.component, routes, document, (*where, "component"))
        if camera.board_type is not None and camera.board_type not in boards:
            yield from _board_type_problems(camera.board_type, boards, document, (*where, "board_type"))
        elif camera.component is None and camera.board_type is None and len(boards) > 1:
            several = ", ".join(boards)
            yield document.error(f"the board type of its frames is unclear: {several} - add board_type:", *where)
        elif camera.component is None:
            shown = [boards[camera.board_type]] if camera.board_type else list(boards.values())
            if not shown or any(board.layout is None for board in shown):
                lack = "a frame has neither a component nor a layout to cut it by"
                yield document.error(f"{lack} - add component:, or a layout: to its board", *where)


def _board_type_problems(
    board_type: str, boards: Collection[str], document: Document, where: KeyPath
) -> Iterator[ConfigError]:
    if board_type not in boards:
        hint = suggestion(board_type, boards, "add it to boards:")
        yield document.error(f"no board type {board_type!r} - {hint}", *where)
