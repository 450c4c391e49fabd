"""Images of an archive: kept ones, those of stored results, or a folder's. Reads only; an agent may serve meanwhile."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.records.database import read_rows
from agent.records.result_reader import ResultReader
from agent.sources.folder.files.inbox import Inbox, sighting_of
from agent.sources.folder.files.naming import naming_of
from agent.sources.folder.files.shelves import as_it_came, files_below, judged_file, name_of
from agent.sources.folder.files.sidecar import SUFFIX
from agent.subject import Subject, image_key, pieces
from experts.errors import ConfigError
from experts.images import DEFAULT_MAX_PIXELS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from agent.config import LineConfig
    from agent.line_file.intake import CameraSection, FolderSection
    from agent.records.results import Result

KEPT, RESULTS = "kept", "results"
GONE = "the image is no longer there"
NO_PART = "its result names no component and no expert of this line"
NO_ROUTE = "no route for its component"


@dataclass(frozen=True, slots=True)
class ArchivedImage:
    """Image, or one part of it, to judge by its component's route, or by one expert where it has no component.

    ``key``: of its stored result, if it has one. ``box``: (left, top, right, bottom) in pixels; None: all of the image.
    ``size``: (height, width) that the layout requires; None: any.
    """

    key: str
    path: str
    component: str | None
    max_pixels: int = DEFAULT_MAX_PIXELS
    expert: str | None = None
    board: str | None = None
    ref: str | None = None
    box: tuple[int, int, int, int] | None = None
    size: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class ArchiveQuery:
    """Images to judge. ``source``: kept, results, or a folder. Times: of the stored verdict, or of a folder's file."""

    source: str
    since: datetime | None = None
    until: datetime | None = None
    component: str | None = None
    expert: str | None = None

    def covers(self, at: datetime) -> bool:
        return (self.since is None or at >= self.since) and (self.until is None or at < self.until)


@dataclass(slots=True)
class Archive:
    """Images found. ``left_out``: number of images that cannot be judged, by reason."""

    images: list[ArchivedImage] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)


def find_images(config: LineConfig, query: ArchiveQuery) -> Archive:
    """Images of a query, in the order of their results or names. Raises ConfigError for an unknown component or expert,
    and for a source without any image."""
    routes, experts = config.catalog.graph.routes, config.catalog.experts
    if query.component is not None and query.component not in routes:
        raise ConfigError(f"no route for component {query.component!r} - this line knows {', '.join(sorted(routes))}")
    if query.expert is not None and query.expert not in experts:
        raise ConfigError(f"no expert {query.expert!r} - `coserve experts list` shows the line's")
    archive = Archive()
    is_stored = query.source in {KEPT, RESULTS}
    for image in (_of_results if is_stored else _of_folder)(config, query, archive.left_out):
        if image.component is None and image.expert not in experts:
            archive.left_out[NO_PART] += 1
        elif image.component is not None and image.component not in routes:
            archive.left_out[NO_ROUTE] += 1
        elif _is_wanted(config, query, image):
            archive.images.append(image)
    if not archive.images:
        reasons = "".join(f"; {count}: {reason}" for reason, count in archive.left_out.most_common())
        raise ConfigError(f"{query.source} has no image to judge{reasons} - choose another source, time or component")
    return archive


def stored_answers(config: LineConfig, images: Sequence[ArchivedImage]) -> list[dict[str, Any] | None]:
    """Stored verdict, label, score and time of each image; None: the line has no result of it."""
    found, marks = {}, ", ".join("?" * len(images))
    if config.results_file.is_file():
        names = ("key", "verdict", "label", "score", "finished_at")
        sql = f"SELECT {', '.join(names)} FROM results WHERE key IN ({marks})"
        for row in read_rows(config.results_file, sql, [image.key for image in images]):
            found[row["key"]] = {**row, "finished_at": datetime.fromisoformat(row["finished_at"])}
    return [found.get(image.key) for image in images]


def _is_wanted(config: LineConfig, query: ArchiveQuery, image: ArchivedImage) -> bool:
    if query.component not in {None, image.component}:
        return False
    reached = config.catalog.graph.experts_of(image.component or "") or (image.expert,)
    return query.expert is None or query.expert in reached


def _of_results(config: LineConfig, query: ArchiveQuery, left_out: Counter[str]) -> Iterator[ArchivedImage]:
    if not config.results_file.is_file():
        raise ConfigError(f"{config.results_file}: no results yet - start `coserve serve` for this line first")
    most = _most_pixels(config)
    for row in ResultReader(config.results_file).query(since=query.since):
        result, subject = row.result, row.result.subject
        if not query.covers(result.finished_at) or (query.source == KEPT and result.kept_as is None):
            continue
        if (path := _place_of(config, result)) is None:
            left_out[GONE] += 1
            continue
        expert = result.experts[0] if subject.component is None and result.experts else None
        place = (expert, subject.board, subject.ref, subject.box)
        yield ArchivedImage(subject.key, str(path), subject.component, most, *place)


def _most_pixels(config: LineConfig) -> int:
    """The largest limit of the line's sources: a frame's own is not stored with its result."""
    sections: list[FolderSection | CameraSection] = [*config.intake.folders, *config.intake.cameras]
    return max((section.max_pixels for section in sections), default=DEFAULT_MAX_PIXELS)


def _place_of(config: LineConfig, result: Result) -> Path | None:
    if result.kept_as is not None:
        kept = config.state / "images" / result.kept_as
        return kept if kept.is_file() else None
    key = image_key(result.subject.key)
    for folder in config.intake.folders:
        relpath = Inbox(folder.path, "").relpath_of(key)
        if relpath is not None:
            return judged_file(folder.path, relpath, key.rpartition("@")[2], result.finished_at)
    return None


def _of_folder(config: LineConfig, query: ArchiveQuery, left_out: Counter[str]) -> Iterator[ArchivedImage]:
    folder = Path(query.source).absolute()
    if not folder.is_dir():
        raise ConfigError(f"{query.source} is no folder - name one, or `kept`, or `results`")
    sections = config.intake.folders
    if not sections:
        raise ConfigError("the line has no intake folder to read names of images by - add one, or take `results`")
    around = next((section for section in sections if folder.is_relative_to(section.path)), None)
    root = folder if around is None else around.path
    namings = [naming_of(section, config) for section in (sections if around is None else (around,))]
    most = _most_pixels(config)
    for below in files_below(folder):
        path = folder / below
        seen = sighting_of(path)
        if seen is None or not query.covers(datetime.fromtimestamp(seen.mtime_ns / 1e9).astimezone()):
            continue
        relpath = as_it_came(path.relative_to(root).as_posix())
        named = [name_of(naming, path, relpath) for naming in namings]
        fields = next((each for each in named if not isinstance(each, str)), None)
        if fields is not None:
            key = Inbox(root, "").key(relpath, seen)
            subject = Subject(key, "", relpath, datetime.now().astimezone(), **fields)
            layout = config.layouts[str(subject.board_type)] if subject.shows_board else None
            size = None if layout is None else layout.size
            for part in pieces(subject, layout):
                place = (part.board, part.ref, part.box, size)
                yield ArchivedImage(part.key, str(path), part.component, most, None, *place)
        elif not (path.name.lower().endswith(SUFFIX) and any(naming.has_sidecars for naming in namings)):
            left_out[str(named[0])] += 1
