"""Device profile: measurements of the offline phase about a box and a line, in one SQLite file on a local disk.

Guarantees: a finished profile appears whole or not at all, and is only ever replaced. A profile in the making is
``PATH.partial``: it survives a kill or a power cut, and is resumed. Reading writes nothing.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from agent.device_profile.identity import differences
from agent.device_profile.records import Agreement, ImageDecoding, LinkSpeed, SearchTrial
from agent.device_profile.schema import closed_on_error, copy_in_memory, open_for_writing
from agent.device_profile.tables import (
    TABLES,
    box_in,
    check,
    graphs_in,
    kinds_in,
    missing_parts,
    profile_in,
    put_allocation,
    put_head,
    put_kind,
    put_usage,
)
from agent.faults.errors import ProfileDamaged
from agent.places.sqlite_files import remove_database
from experts.errors import ConfigError
from experts.filesystem import take_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from sqlite_utils import Database

    from agent.device_profile.records import (
        Allocation,
        BoxIdentity,
        ExpertForm,
        KindProfile,
        StoredProfile,
        UsageProfile,
    )

log = logging.getLogger(__name__)


def partial_of(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def read_profile(path: Path) -> StoredProfile:
    """A finished profile. Raises ConfigError, naming the file and what to do, for anything else."""
    if path.exists():
        with closing(copy_in_memory(path)) as database:
            return profile_in(database, path)
    if partial_of(path).exists():
        raise ConfigError(f"{partial_of(path)}: profiling was not finished - `coserve profile LINE.yaml` resumes it")
    raise ConfigError(f"{path}: no device profile - run `coserve profile LINE.yaml`")


def replace_usage(path: Path, usage: UsageProfile) -> None:
    """Replace the usage of a finished profile, with one rename. Raises ConfigError as ``read_profile``."""
    _rewrite(path, lambda database: put_usage(database, usage))


def replace_proofs(path: Path, proven: StoredProfile, new_kinds: Sequence[KindProfile] = ()) -> None:
    """Replace the proofs of a finished profile, and add kinds, with one rename. Raises as ``read_profile``."""

    def write(database: Database) -> None:
        TABLES["packed"].replace_mapping(database, proven.packed)
        TABLES["decodings"].replace(database, proven.decodings)
        TABLES["forms"].replace(database, proven.forms.values())
        TABLES["agreements"].replace(database, proven.agreements)
        for kind in new_kinds:
            put_kind(database, kind)
        chosen = TABLES["precisions"].mapping(database)
        TABLES["precisions"].replace_mapping(database, {(k.kind, k.processor): k.precision for k in new_kinds} | chosen)

    _rewrite(path, write)


def _rewrite(path: Path, write: Callable[[Database], None]) -> None:
    read_profile(path)
    unfinished = path.with_name(path.name + ".rewritten")
    with _one_writer(path):
        remove_database(unfinished)
        try:
            with closing(copy_in_memory(path)) as copy, closing(open_for_writing(unfinished)) as database:
                copy.conn.backup(database.conn)
                with database.atomic():
                    write(database)
            take_name(unfinished, path)
        except BaseException:
            remove_database(unfinished)  # useless, and in the way on a full disk
            raise


class ProfileDraft:
    """Profile in the making. Each save is on the disk when it returns. Reading methods return the measurements so far,
    those of an earlier run included. A processor's speedups are dropped once one of its kinds is measured again or gets
    another precision."""

    def __init__(self, path: Path, database: Database) -> None:
        self.path = path
        self._database = database

    @classmethod
    @contextmanager
    def open(cls, path: Path, line: str, box: BoxIdentity, *, fresh: bool = False) -> Iterator[ProfileDraft]:
        """Resume the partial profile of this box, or begin one from a finished profile of the same box and libraries.
        ``fresh``: begin from nothing. The finished profile stays until ``finish``. Raises ConfigError while another
        process has this profile open, and on a network share."""
        path = path.absolute()
        path.parent.mkdir(parents=True, exist_ok=True)
        with _one_writer(path):
            if fresh:
                remove_database(partial_of(path))
            with closing(_resumed(path, line, box) or _begun(path, line, box, fresh=fresh)) as database:
                yield cls(path, database)

    def kinds(self) -> tuple[KindProfile, ...]:
        return kinds_in(self._database)

    def agreements(self) -> tuple[Agreement, ...]:
        return TABLES["agreements"].records(self._database, Agreement)

    def speedups(self) -> dict[str, tuple[float, ...]]:
        return TABLES["speedups"].mapping(self._database)

    def graphs(self) -> dict[str, float]:
        return graphs_in(self._database)

    def links(self) -> tuple[LinkSpeed, ...]:
        return TABLES["links"].records(self._database, LinkSpeed)

    def decodings(self) -> tuple[ImageDecoding, ...]:
        return TABLES["decodings"].records(self._database, ImageDecoding)

    def packed(self) -> dict[tuple[str, str], str]:
        return TABLES["packed"].mapping(self._database)

    def trials(self, search: str) -> tuple[SearchTrial, ...]:
        return tuple(trial for trial in TABLES["trials"].records(self._database, SearchTrial) if trial.search == search)

    def save_kind(self, kind: KindProfile) -> None:
        """Save a kind on a processor in a precision; drops the processor's speedups, and its gain by graphs."""
        with self._database.atomic():
            put_kind(self._database, kind)
            TABLES["speedups"].delete(self._database, processor=kind.processor)
            self._put_graphs({name: gain for name, gain in self.graphs().items() if name != kind.processor})

    def save_agreement(self, agreement: Agreement) -> None:
        with self._database.atomic():
            TABLES["agreements"].put(self._database, agreement)

    def save_speedups(self, processor: str, speedups: Sequence[float]) -> None:
        with self._database.atomic():
            TABLES["speedups"].put(self._database, {"processor": processor, "factors": speedups})

    def save_graphs(self, processor: str, gain: float) -> None:
        with self._database.atomic():
            self._put_graphs({**self.graphs(), processor: gain})

    def _put_graphs(self, gains: Mapping[str, float]) -> None:
        self._database.execute("UPDATE profile SET graphs = ?", (json.dumps(gains),))

    def save_links(self, links: Sequence[LinkSpeed]) -> None:
        with self._part("links"):
            TABLES["links"].replace(self._database, links)

    def save_precisions(self, precisions: Mapping[tuple[str, str], str], forms: Sequence[ExpertForm] = ()) -> None:
        """Precision of each (kind, processor), and experts' own forms; drops speedups of changed processors."""
        with self._part("precisions"):
            found = (row for name in ("precisions", "forms") for row in TABLES[name].rows(self._database))
            earlier = {(row["kind"], row["processor"], row["precision"]) for row in found}
            now = {(k, p, chosen) for (k, p), chosen in precisions.items()}
            changed = earlier ^ (now | {(each.kind, each.processor, each.precision) for each in forms})
            for processor in {each[1] for each in changed} & {each[1] for each in earlier}:
                TABLES["speedups"].delete(self._database, processor=processor)
            TABLES["precisions"].replace_mapping(self._database, precisions)
            TABLES["forms"].replace(self._database, forms)

    def save_packed(self, packed: Mapping[tuple[str, str], str]) -> None:
        """(expert, precision) -> ``packed_sha256``, and (expert, SOURCE), of all that was profiled."""
        with self._part("packed"):
            TABLES["packed"].replace_mapping(self._database, packed)

    def save_decodings(self, decodings: Sequence[ImageDecoding]) -> None:
        with self._database.atomic():
            TABLES["decodings"].replace(self._database, decodings)

    def save_usage(self, usage: UsageProfile) -> None:
        with self._part("usage"):
            put_usage(self._database, usage)

    def save_allocation(self, allocation: Allocation) -> None:
        with self._part("allocation"):
            put_allocation(self._database, allocation)

    def save_trials(self, search: str, trials: Sequence[SearchTrial]) -> None:
        with self._database.atomic():
            TABLES["trials"].delete(self._database, search=search)
            TABLES["trials"].put(self._database, *trials)

    def finish(self) -> StoredProfile:
        """Publish the profile and close the draft. Raises ConfigError for missing parts; the draft stays partial."""
        partial = partial_of(self.path)
        if missing := ", ".join(missing_parts(self._database)):
            raise ConfigError(f"{partial} lacks {missing} - `coserve profile LINE.yaml` measures what is missing")
        with self._database.atomic():
            now = datetime.now(UTC).isoformat(timespec="seconds")
            self._database.execute("UPDATE profile SET finished_at = ?", (now,))
        self._database.close()
        profile = read_profile(partial)
        take_name(partial, self.path)
        return profile

    @contextmanager
    def _part(self, part: str) -> Iterator[None]:
        """Transaction that saves a part, and marks it as saved."""
        with self._database.atomic():
            yield
            TABLES["parts"].put(self._database, {"part": part})


def _resumed(path: Path, line: str, box: BoxIdentity) -> Database | None:
    """The partial profile of this box. A damaged partial profile, or another box's, is removed. Raises ConfigError or
    sqlite3.OperationalError if the disk refuses; the file stays then."""
    partial = partial_of(path)
    if not partial.exists():
        remove_database(partial)  # a journal may be left without its file
        return None
    try:
        database = open_for_writing(partial)
        with closed_on_error(database):
            check(database, partial)
            then = box_in(database)
            reason = "it was never begun" if then is None else "; ".join(differences(then, box))
            if not reason:
                with database.atomic():
                    put_head(database, line, box, graphs_in(database))
                log.info("profile_resumed path=%s kinds=%d", partial, len(kinds_in(database)))
                return database
        database.close()
    except ProfileDamaged as error:
        reason = f"it {error.reason}"
    log.warning("profile_partial_discarded path=%s reason=%s", partial, reason)
    remove_database(partial)
    return None


def _begun(path: Path, line: str, box: BoxIdentity, *, fresh: bool) -> Database:
    earlier = None if fresh else _earlier(path, box)
    database = open_for_writing(partial_of(path))
    with closed_on_error(database), database.atomic():
        put_head(database, line, box, {} if earlier is None else earlier.graphs)
        if earlier is not None:
            _take_over(database, earlier)
    return database


def _earlier(path: Path, box: BoxIdentity) -> StoredProfile | None:
    """The finished profile, if it was measured on this box with these libraries."""
    if not path.exists():
        return None
    try:
        profile = read_profile(path)
    except ConfigError as error:
        log.warning("profile_measured_anew reason=%s", error)
        return None
    if reason := "; ".join(differences(profile.box, box)):
        log.info("profile_measured_anew path=%s reason=%s", path, reason)
        return None
    return profile


def _take_over(database: Database, earlier: StoredProfile) -> None:
    for kind in earlier.kinds:
        put_kind(database, kind)
    TABLES["agreements"].put(database, *earlier.agreements)
    TABLES["speedups"].replace_mapping(database, earlier.speedups)
    TABLES["links"].put(database, *earlier.links)
    TABLES["parts"].put(database, {"part": "links"})
    TABLES["decodings"].put(database, *earlier.decodings)
    TABLES["forms"].put(database, *earlier.forms.values())
    # The speedups depend on the precisions, the agreements on the packed weights; neither is a saved part yet.
    TABLES["precisions"].replace_mapping(database, earlier.precisions)
    TABLES["packed"].replace_mapping(database, earlier.packed)


@contextmanager
def _one_writer(path: Path) -> Iterator[None]:
    """Lock on the profile's folder; the kernel drops it when the process ends."""
    descriptor = os.open(path.absolute().parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"{path}: another `coserve profile` is running - wait for its end, or stop it") from error
        yield
    finally:
        os.close(descriptor)
