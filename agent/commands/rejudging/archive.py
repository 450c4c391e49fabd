"""Images of an archive: of kept, reviewed or all results, or a folder's. Reads only; an agent may serve meanwhile."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from agent.records.database import read_rows
from agent.records.result_reader import ResultReader
from agent.records.truth.reviewed import reviewed_results
from agent.runtime.images.sources import EncodedImage, Frame, FramePart, ImageFile, decoded
from agent.sources.folder.files.identity import sighting_of
from agent.sources.folder.files.inbox import Inbox
from agent.sources.folder.files.naming import naming_of
from agent.sources.folder.files.shelves import as_it_came, files_below, image_file, name_of
from agent.sources.folder.files.sidecar import SUFFIX
from agent.subject import Subject, image_key, pieces, seen_key
from experts.document import suggestion
from experts.errors import ConfigError, ImageError
from experts.images import LARGEST_MAX_PIXELS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from agent.config import LineConfig
    from agent.records.verdict import Result
    from experts.images import Decoded

GONE = "the image is no longer there"
STORED_SOURCES = ("kept", "results", "reviewed")
ANSWER = "SELECT results.key, verdict, label, score, finished_at FROM results JOIN json_each(?) AS asked"
STORED = f"{ANSWER} ON results.key = asked.value"
STORED_AS_SEEN = f"{ANSWER} ON results.key > asked.value || '-' AND results.key < asked.value || '.'"


class ArchivedImage(NamedTuple):
    """Subject to judge, and its file. ``size``: (height, width) that the layout requires; None: any. ``sha256``: of the
    judged bytes; other ones are refused; empty: any."""

    subject: Subject
    path: str
    size: tuple[int, int] | None = None
    sha256: str = ""

    @property
    def frame(self) -> str:
        """One file's content: a path may be used again."""
        return f"{self.path}@{self.sha256}"


class ArchiveQuery(NamedTuple):
    """Images to judge. ``source``: kept, results, reviewed, or a folder.

    Times: of the stored verdict, or of a folder's file.
    """

    source: str
    since: datetime | None = None
    until: datetime | None = None
    component: str | None = None
    expert: str | None = None

    def covers(self, at: datetime) -> bool:
        return (self.since is None or at >= self.since) and (self.until is None or at < self.until)


def find_images(config: LineConfig, query: ArchiveQuery) -> tuple[list[ArchivedImage], Counter[str]]:
    """Images of a query, in the order of their results or names; and how many cannot be judged, by reason.

    Raises ConfigError for an unknown component or expert, and for a source without any image.
    """
    graph, experts = config.catalog.graph, config.catalog.experts
    if query.component not in {None, *graph.routes}:
        known = suggestion(str(query.component), graph.routes)
        raise ConfigError(f"no route for component {query.component!r} - {known}")
    if query.expert not in {None, *experts}:
        known = suggestion(str(query.expert), experts, "`coserve experts list` shows the line's")
        raise ConfigError(f"no expert {query.expert!r} - {known}")
    images: list[ArchivedImage] = []
    left_out: Counter[str] = Counter()
    for image in (_of_results if query.source in STORED_SOURCES else _of_folder)(config, query):
        if isinstance(image, str):
            left_out[image] += 1
            continue
        component, expert = image.subject.component, image.subject.expert
        reached = (expert,) if component is None else graph.experts_of(component)
        if component is None and expert not in experts:
            left_out["its result names no component and no expert of this line"] += 1
        elif not reached:
            left_out["no route for its component"] += 1
        elif query.component in {None, component} and query.expert in {None, *reached}:
            images.append(image)
    if not images:
        reasons = "".join(f"; {count}: {reason}" for reason, count in left_out.most_common())
        raise ConfigError(f"{query.source} has no image to judge{reasons} - choose another source, time or component")
    return images, left_out


def stored_answers(config: LineConfig, keys: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """Stored verdict, label, score and time (``at``), by key; without keys that have no result, or might be of two."""
    if not config.results_file.is_file():
        return {}
    rows = defaultdict(list)
    for row in read_rows(config.results_file, STORED, [json.dumps(keys)]):
        rows[row["key"]].append(row)
    seen = sorted({image_key(key) for key in keys if key not in rows})
    for row in read_rows(config.results_file, STORED_AS_SEEN, [json.dumps(seen)]):
        image = image_key(row["key"])
        rows[seen_key(image) + row["key"].removeprefix(image)].append(row)
    return {
        key: {**rows[key][0], "at": datetime.fromisoformat(rows[key][0]["finished_at"])}
        for key in keys
        if len(rows[key]) == 1
    }


def _of_results(config: LineConfig, query: ArchiveQuery) -> Iterator[ArchivedImage | str]:
    if not config.results_file.is_file():
        raise ConfigError(f"{config.results_file}: no results yet - start `coserve serve` for this line first")
    rows: Iterable[Result] = ResultReader(config.results_file).query(since=query.since)
    if query.source == "reviewed":
        rows = sorted((each.result for each in reviewed_results(config)), key=lambda row: row.seq)
    for row in rows:
        if query.covers(row.finished_at) and (query.source != "kept" or row.kept_as is not None):
            yield archived_image(config, row) or GONE


def archived_image(config: LineConfig, result: Result) -> ArchivedImage | None:
    """Image of a result; None: its file is gone."""
    subject = result.subject
    if subject.component is None and result.experts:
        subject = replace(subject, expert=result.experts[0])
    path = image_file(config, subject.key, result.finished_at, result.kept_as, result.place)
    return None if path is None else ArchivedImage(subject, str(path), sha256=result.seen_sha256)


def source_of(image: ArchivedImage, max_pixels: int, frames: dict[str, Frame]) -> ImageFile | FramePart:
    """An image's pixels as its experts get them. ``frames``: images already cut; takes another one."""
    file, box = ImageFile(Path(image.path), max_pixels, image.sha256), image.subject.box
    if box is not None and image.frame not in frames:
        with suppress(ImageError):
            frames[image.frame] = Frame(EncodedImage(file.read(file.path.name), file.path.name, max_pixels), image.size)
    if box is None or image.frame not in frames:  # a file that cannot be read has its reason from its decoder
        return file
    return FramePart(frames[image.frame], box, image.subject.name)


def pixels_of(image: ArchivedImage, frames: dict[str, Frame]) -> Decoded:
    """Pixels of an image or a part. ``frames``: pixels of the image that was cut last. Raises ImageError."""
    if image.frame not in frames:
        frames.clear()
    return decoded(source_of(image, LARGEST_MAX_PIXELS, frames), image.subject.name)


def _of_folder(config: LineConfig, query: ArchiveQuery) -> Iterator[ArchivedImage | str]:
    folder = Path(query.source).absolute()
    if not folder.is_dir():
        raise ConfigError(f"{query.source} is no folder - name one, or `kept`, `results` or `reviewed`")
    if not config.intake.folders:
        raise ConfigError("the line has no intake folder to read names of images by - add one, or take `results`")
    around = [section for section in config.intake.folders if folder.is_relative_to(section.path)][:1]
    inbox = Inbox(around[0].path if around else folder, "")
    namings = [naming_of(section, config) for section in around or config.intake.folders]
    has_sidecars = any(naming.has_sidecars for naming in namings)
    for path in (folder / below for below in files_below(folder)):
        seen = sighting_of(path)
        is_sidecar = has_sidecars and path.suffix.lower() == SUFFIX
        if is_sidecar or not seen or not query.covers(datetime.fromtimestamp(seen.mtime_ns / 1e9).astimezone()):
            continue
        relpath = as_it_came(path.relative_to(inbox.root).as_posix())
        named = [name_of(naming, path, relpath) for naming in namings]
        fields = next((each for each in named if not isinstance(each, str)), None)
        if fields is None:
            yield str(named[0])
            continue
        subject = Subject(inbox.seen_key(relpath, seen), "", relpath, datetime.now().astimezone(), **fields)
        layout = config.layouts[str(subject.board_type)] if subject.shows_board else None
        for part in pieces(subject, layout):
            yield ArchivedImage(part, str(path), layout.size if layout else None)
