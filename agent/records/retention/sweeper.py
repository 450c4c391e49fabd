"""Sweeper: removes images and rows beyond the limits of retention, a little with each step.

Guarantees: before its removal an image is marked in the database, and its results forget its file in the same
transaction. So after a crash no result names a missing file, and the next run removes marked files. A row is removed
after its image, and never while its file is in a watched folder, where it would be judged again. Age counts only on a
steady clock, so a wrong year removes nothing. While the archive's disk is away, no row goes. A file that cannot be
removed is logged, retried in each round, and blocks no other.

A round, in many short steps: list all images, decide, remove images, remove rows, shrink results.db.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from heapq import nsmallest
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from agent.faults.housekeeping import Rounds
from agent.records.database import read_rows, utc_text
from agent.records.export import last_exported
from agent.records.retention.kept_images import FileSeen, archived, remove, shelved
from agent.records.retention.rules import KeepingLimit, KeptImage, Steadiness, going_order, may_go, what_goes
from agent.records.station.audit import IS_ORDINARY
from experts.expert import Verdict

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    from sqlite_utils import Database

    from agent.line_file.records import KeepSection
    from agent.records.export import ExportedRange
    from agent.records.result_writer import ResultStore
    from agent.records.retention.archive import ImageArchive
    from agent.records.retention.kept_images import Shelf
    from agent.records.retention.rules import Going

log = logging.getLogger(__name__)

ROUND_S = 300.0  # from the end of a round to the next one
STEP_FILES = 2000  # some 10 ms
STEP_REMOVALS = 200
STEP_ROWS = 500
STEP_PAGES = 500  # of 4 KiB
CANDIDATES = 20_000  # at most removed in a round; another round follows at once if needed
OLD_ROWS = (  # of tables beside the results
    (
        "boards",
        "seq",
        "SELECT seq FROM boards INDEXED BY boards_closed_at WHERE closed_at < ? ORDER BY closed_at LIMIT ?",
    ),
    ("reworks", "number", "SELECT number FROM reworks WHERE at < ? LIMIT ?"),
    ("audit", "number", f"SELECT number FROM audit WHERE at < ? AND {IS_ORDINARY} LIMIT ?"),
    ("alarms", "number", "SELECT number FROM alarms WHERE cleared_at < ? LIMIT ?"),
)
ORPHAN_S = 86_400.0  # an image without a result counts as exported after a day


@dataclass(slots=True)
class _Found:
    """Images of a round, and the candidates for removal."""

    size_bytes: int = 0
    candidates: list[KeptImage] = field(default_factory=list)
    has_more: bool = False


@dataclass(frozen=True, slots=True)
class Surroundings:
    """``clock``: monotonic; ``wall``: for age; ``free_bytes``: free on a folder's disk."""

    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], datetime] = lambda: datetime.now(UTC)
    free_bytes: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free


REAL = Surroundings()


class Sweeper(Rounds):
    """``is_needed``: True if a result's file is in a watched folder. ``alarm``: why a limit cannot hold, or None."""

    def __init__(
        self,
        limits: KeepSection,
        archive: ImageArchive,
        shelves: Sequence[Shelf],
        store: ResultStore,
        *,
        is_needed: Callable[[str], bool] = lambda _: False,
        surroundings: Surroundings = REAL,
    ) -> None:
        super().__init__(surroundings.clock, surroundings.clock())
        self._store = store
        self.alarm: str | None = None
        self._limits = limits
        self._archive = archive
        self._shelves = tuple(shelves)
        self._is_needed = is_needed
        self._wall = surroundings.wall
        self._free_bytes = surroundings.free_bytes
        self._steadiness = Steadiness(self._wall().timestamp() - self._clock(), self._clock())
        self._stuck: dict[str, str] = {}  # files that could not be removed in this round, with the reason

    def step(self) -> None:
        self._is_steady()
        super().step()

    def _steps(self) -> Generator[None, None, None]:
        self._stuck = {}
        self._archive.place.find()
        yield from self._remove_marked()
        if (self._limits.days, self._limits.size, self._limits.free) == (None, None, None):
            self._due_s = math.inf
            return
        limits = self._limits if self._is_steady() else self._limits.model_copy(update={"days": None})
        exported = last_exported(self._store.path) if limits.export_required else None
        found = _Found()
        yield from self._look(limits, exported, found)
        folders = (self._archive.folder, *(shelf.folder for shelf in self._shelves))
        free_bytes = {folder.stat().st_dev: self._free_bytes(folder) for folder in folders if folder.is_dir()}
        now_s = self._wall().timestamp()
        going = list(what_goes(found.candidates, limits, now_s, found.size_bytes, free_bytes))
        for start in range(0, len(going), STEP_REMOVALS):
            yield from self._store.written(partial(self._mark, going[start : start + STEP_REMOVALS]))
            yield from self._remove_marked()
        if limits.days is not None:
            yield from self._remove_rows(limits, exported, timedelta(days=limits.days))
        is_done = bool(self._stuck) or not found.has_more or len(going) < len(found.candidates)
        self._check_limits(limits, found, free_bytes, going, is_done=is_done)
        self._due_s = self._clock() + (ROUND_S if is_done else 0.0)

    def _look(self, limits: KeepSection, exported: ExportedRange | None, found: _Found) -> Iterator[None]:
        now_s = self._wall().timestamp()

        def keep_the_first() -> None:
            found.has_more = True
            found.candidates = nsmallest(CANDIDATES, found.candidates, lambda each: going_order(each, limits, now_s))

        for images in self._all_images(exported):
            found.size_bytes += sum(image.size_bytes for image in images)
            found.candidates += [
                each for each in images if may_go(each, limits, now_s) and each.path not in self._stuck
            ]
            if len(found.candidates) >= 2 * CANDIDATES:
                keep_the_first()
            yield
        if found.has_more:
            keep_the_first()

    def _all_images(self, exported: ExportedRange | None) -> Iterator[list[KeptImage]]:
        """All images, in chunks of one step."""
        files = archived(self._archive.folder)
        while archive_files := list(islice(files, STEP_FILES)):
            yield list(self._of_archive(archive_files, exported))
        until_s = -math.inf if exported is None else exported.until_s(self._wall().timestamp())
        for shelf in self._shelves:
            images = shelved(shelf)
            while shelf_images := list(islice(images, STEP_FILES)):
                yield [replace(image, is_exported=image.changed_s < until_s) for image in shelf_images]

    def _of_archive(self, files: Sequence[FileSeen], exported: ExportedRange | None) -> Iterator[KeptImage]:
        """Archived images with the worst verdict of their results; UNKNOWN without a result."""
        now_s = self._wall().timestamp()
        by_path = {os.path.relpath(seen.path, self._archive.folder): seen for seen in files}
        verdicts: dict[str, set[Verdict]] = {}
        unexported: set[str] = set()
        sql = f"SELECT kept_as, verdict, seq FROM results WHERE kept_as IN ({', '.join('?' * len(by_path))})"
        for kept_as, verdict, seq in read_rows(self._store.path, sql, tuple(by_path)):
            verdicts.setdefault(kept_as, set()).add(Verdict(verdict))
            if exported is None or seq > exported.last_seq:
                unexported.add(kept_as)
        for kept_as, seen in by_path.items():
            given = verdicts.get(kept_as, set())
            worst = Verdict.NG if Verdict.NG in given else Verdict.OK if given == {Verdict.OK} else Verdict.UNKNOWN
            is_exported = kept_as not in unexported
            if not given:
                is_exported = exported is not None and seen.changed_s + ORPHAN_S < exported.until_s(now_s)
            yield KeptImage(
                seen.path, worst, seen.mtime_ns / 1e9, seen.mtime_ns / 1e9, seen.size_bytes, seen.mtime_ns, seen.device,
                is_exported,
            )  # fmt: skip

    def _mark(self, going: Sequence[Going], database: Database) -> None:
        for one in going:
            path = Path(one.image.path)
            marked = (os.fsencode(path), one.image.mtime_ns, one.reason)
            database.execute("INSERT OR REPLACE INTO leaving VALUES (?, ?, ?)", marked)
            if self._archive.folder in path.parents:
                kept_as = str(path.relative_to(self._archive.folder))
                database.execute("UPDATE results SET kept_as = NULL WHERE kept_as = ?", (kept_as,))

    def _remove_marked(self) -> Iterator[None]:
        """Remove files that this process or an earlier one marked."""
        rows = read_rows(self._store.path, "SELECT path, mtime_ns, reason FROM leaving")
        marked = [row for row in rows if os.fsdecode(row["path"]) not in self._stuck]
        for start in range(0, len(marked), STEP_REMOVALS):
            some = marked[start : start + STEP_REMOVALS]
            gone = Counter(
                row["reason"] for row in some if self._try_to_remove(os.fsdecode(row["path"]), row["mtime_ns"])
            )
            settled = [row["path"] for row in some if os.fsdecode(row["path"]) not in self._stuck]
            yield from self._store.written(partial(_delete, "leaving", "path", settled))
            counts = " ".join(f"{reason}={gone[reason]}" for reason in KeepingLimit if gone[reason])
            log.info("images_removed %s last=%s", counts or "none", os.fsdecode(some[-1]["path"]))

    def _try_to_remove(self, path: str, mtime_ns: int) -> bool:
        """True if the file is gone. Otherwise it stays marked for the next round."""
        try:
            return self._remove_file(Path(path), mtime_ns)
        except OSError as error:
            reason = error.strerror or str(error)
            if reason not in self._stuck.values():  # logged once per disk
                log.error("image_not_removed file=%s reason=%s: others go instead of it", path, reason)
            self._stuck[path] = reason
            return False

    def _remove_file(self, path: Path, mtime_ns: int) -> bool:
        """True if the file is gone. A changed file stays, and so does one outside archive and shelves."""
        if self._archive.folder in path.parents:
            return self._archive.discard(str(path.relative_to(self._archive.folder)), mtime_ns)
        for shelf in self._shelves:
            if shelf.folder in path.parents:
                return remove(path, mtime_ns, shelf.folder)
        return False

    def _remove_rows(self, limits: KeepSection, exported: ExportedRange | None, age: timedelta) -> Iterator[None]:
        before = self._wall() - age
        last_seq = None
        if limits.export_required:
            if exported is None:
                return
            before, last_seq = min(before, exported.until), exported.last_seq
        yield from self._remove_results(utc_text(before), last_seq)
        for table, key, old in OLD_ROWS:
            while going := [number for (number,) in read_rows(self._store.path, old, (utc_text(before), STEP_ROWS))]:
                yield from self._store.written(partial(_delete, table, key, going))
        yield from self._give_back()

    def _remove_results(self, before: str, last_seq: int | None) -> Iterator[None]:
        at: tuple[str, int] = ("", 0)
        sql = (
            "SELECT finished_at, seq, key, kept_as FROM results INDEXED BY results_finished_at"
            " WHERE finished_at < ? AND (finished_at, seq) > (?, ?) ORDER BY finished_at, seq LIMIT ?"
        )
        while rows := read_rows(self._store.path, sql, (before, *at, STEP_ROWS)):
            at = rows[-1]["finished_at"], rows[-1]["seq"]
            going = [row["seq"] for row in rows if self._row_may_go(row, last_seq)]
            yield from self._store.written(partial(_delete, "results", "seq", going))

    def _row_may_go(self, row: sqlite3.Row, last_seq: int | None) -> bool:
        if last_seq is not None and row["seq"] > last_seq:
            return False
        has_image = row["kept_as"] is not None and (self._archive.folder / row["kept_as"]).exists()
        return not has_image and not self._is_needed(row["key"])

    def _give_back(self) -> Iterator[None]:
        """Return pages of deleted rows to the filesystem, if the file was created with auto_vacuum."""
        before = math.inf
        while 0 < (free := read_rows(self._store.path, "PRAGMA freelist_count")[0][0]) < before:
            before = free
            yield from self._store.written(_vacuum)

    def _is_steady(self) -> bool:
        return self._steadiness.look(self._wall().timestamp(), self._clock())

    def _check_limits(
        self,
        limits: KeepSection,
        found: _Found,
        free_bytes: Mapping[int, int],
        going: Sequence[Going],
        *,
        is_done: bool,
    ) -> None:
        """Alarm, logged once, if a limit cannot hold because no further image is removable."""
        freed: Counter[int] = Counter()  # by disk
        for one in going:
            freed[one.image.device] += 0 if one.image.path in self._stuck else one.image.size_bytes
        kept_bytes = found.size_bytes - freed.total()
        least_free = min((free + freed[device] for device, free in free_bytes.items()), default=math.inf)
        reason = None
        if is_done and limits.size is not None and kept_bytes > limits.size:
            reason = f"images take {kept_bytes} bytes, {limits.size} are wanted"
        elif is_done and limits.free is not None and least_free < limits.free:
            reason = f"{least_free} bytes are free, {limits.free} are wanted"
        if reason is not None and self.alarm is None:
            why = f"{len(self._stuck)} files cannot be removed" if self._stuck else "too young, or not exported yet"
            log.error("retention_short reason=%s: nothing more may go (%s)", reason, why)
        elif reason is None and self.alarm is not None:
            log.warning("retention_holds")
        self.alarm = reason


def _delete(table: str, key: str, values: Sequence[object], database: Database) -> None:
    for value in values:
        database.execute(f"DELETE FROM {table} WHERE {key} = ?", (value,))


def _vacuum(database: Database) -> None:
    free = database.execute("PRAGMA freelist_count").fetchall()[0][0]
    for _ in range(min(free, STEP_PAGES)):
        database.execute("PRAGMA incremental_vacuum(1)")  # one page at a time: sqlite3 steps the statement only once
