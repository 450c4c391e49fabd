"""Device profile: measurements of the offline phase about a box and a line, in one SQLite file on a local disk.

Guarantees: a finished profile appears whole or not at all, and is only ever replaced; what is being measured lies in
``PATH.partial``, survives a kill or a power cut, and is resumed; reading writes nothing.
"""

from __future__ import annotations

import fcntl
import logging
import os
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from agent.device_profile import rows
from agent.device_profile.identity import differences
from agent.device_profile.records import Agreement, ImageDecoding, LinkSpeed, SearchTrial
from agent.device_profile.schema import closed_on_error, copy_in_memory, open_for_writing
from agent.device_profile.tables import TABLES
from agent.sqlite_files import remove_database
from experts.errors import ConfigError, ProfileDamaged
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
    if not path.exists():
        if partial_of(path).exists():
            raise ConfigError(
                f"{partial_of(path)}: profiling was not finished - `coserve profile LINE.yaml` resumes it"
            )
        raise ConfigError(f"{path}: no device profile - run `coserve profile LINE.yaml`")
    return _read_back(path)


def replace_usage(path: Path, usage: UsageProfile) -> None:
    """Replace the usage of a finished profile; the file is replaced whole. Raises ConfigError as ``read_profile``."""
    _rewrite(path, lambda database: rows.put_usage(database, usage))


def replace_proofs(path: Path, proven: StoredProfile, new_kinds: Sequence[KindProfile] = ()) -> None:
    """Replace the proofs of a finished profile, and add kinds. Raises ConfigError as ``read_profile``."""

    def write(database: Database) -> None:
        TABLES["packed"].replace_mapping(database, proven.packed)
        TABLES["decodings"].replace(database, proven.decodings)
        TABLES["forms"].replace(database, proven.forms.values())
        TABLES["agreements"].replace(database, proven.agreements)
        for kind in new_kinds:
            rows.put_kind(database, kind)
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
    """Profile in the making. Each save is on the disk when it returns.

    The reading methods return measurements of an earlier run, which need no repeat. A processor's speedups are dropped
    once one of its kinds is measured again or runs in another precision.
    """

    def __init__(self, path: Path, database: Database) -> None:
        self.path = path
        self._database = database

    @classmethod
    @contextmanager
    def open(cls, path: Path, line: str, box: BoxIdentity, *, fresh: bool = False) -> Iterator[ProfileDraft]:
        """Take up the partial profile of this box, or begin one from a finished profile of the same box and libraries.

        ``fresh``: from nothing. The finished profile stays as it is until ``finish``. Raises ConfigError while another
        process has this profile open, and on a network share.
        """
        path = path.absolute()
        path.parent.mkdir(parents=True, exist_ok=True)
        with _one_writer(path):
            if fresh:
                remove_database(partial_of(path))
            with closing(_resumed(path, line, box) or _begun(path, line, box, fresh=fresh)) as database:
                yield cls(path, database)

    def kinds(self) -> tuple[KindProfile, ...]:
        return rows.kinds_in(self._database)

    def agreements(self) -> tuple[Agreement, ...]:
        return TABLES["agreements"].records(self._database, Agreement)

    def speedups(self) -> dict[str, tuple[float, ...]]:
        return TABLES["speedups"].mapping(self._database)

    def links(self) -> tuple[LinkSpeed, ...]:
        return TABLES["links"].records(self._database, LinkSpeed)

    def decodings(self) -> tuple[ImageDecoding, ...]:
        return TABLES["decodings"].records(self._database, ImageDecoding)

    def packed(self) -> dict[tuple[str, str], str]:
        """As saved last, by this run or the one it resumes."""
        return TABLES["packed"].mapping(self._database)

    def trials(self, search: str) -> tuple[SearchTrial, ...]:
        return tuple(trial for trial in TABLES["trials"].records(self._database, SearchTrial) if trial.search == search)

    def save_kind(self, kind: KindProfile) -> None:
        """Save a kind on a processor in a precision; drops the processor's speedups."""
        with self._database.atomic():
            rows.put_kind(self._database, kind)
            TABLES["speedups"].delete(self._database, processor=kind.processor)

    def save_agreement(self, agreement: Agreement) -> None:
        with self._database.atomic():
            TABLES["agreements"].put(self._database, agreement)

    def save_speedups(self, processor: str, speedups: Sequence[float]) -> None:
        with self._database.atomic():
            rows.put_speedups(self._database, processor, speedups)

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
            rows.put_usage(self._database, usage)

    def save_allocation(self, allocation: Allocation) -> None:
        with self._part("allocation"):
            rows.put_allocation(self._database, allocation)

    def save_trials(self, search: str, trials: Sequence[SearchTrial]) -> None:
        with self._database.atomic():
            TABLES["trials"].delete(self._database, search=search)
            TABLES["trials"].put(self._database, *trials)

    def finish(self) -> StoredProfile:
        """Publish the profile, and close the draft. Raises ConfigError for missing parts; then it stays partial."""
        missing = rows.missing_parts(self._database)
        partial = partial_of(self.path)
        if missing:
            lacking = ", ".join(missing)
            raise ConfigError(f"{partial} lacks {lacking} - `coserve profile LINE.yaml` measures what is missing")
        with self._database.atomic():
            now = datetime.now(UTC).isoformat(timespec="seconds")
            self._database.execute("UPDATE profile SET finished_at = ?", (now,))
        self._database.close()
        profile = _read_back(partial)
        take_name(partial, self.path)
        return profile

    @contextmanager
    def _part(self, part: str) -> Iterator[None]:
        with self._database.atomic():
            yield
            TABLES["parts"].put(self._database, {"part": part})


def _resumed(path: Path, line: str, box: BoxIdentity) -> Database | None:
    """The partial profile of this box; a damaged one, or another box's, is removed. Raises ConfigError or
    sqlite3.OperationalError where the disk refuses; the file stays then."""
    partial = partial_of(path)
    if not partial.exists():
        remove_database(partial)  # a journal that was left without its file
        return None
    try:
        database = open_for_writing(partial)
        with closed_on_error(database):
            rows.check(database, partial)
            then = rows.box_in(database)
            reason = "it was never begun" if then is None else "; ".join(differences(then, box))
            if not reason:
                with database.atomic():
                    rows.put_head(database, line, box)
                log.info("profile_resumed path=%s kinds=%d", partial, len(rows.kinds_in(database)))
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
        rows.put_head(database, line, box)
        if earlier is not None:
            _take_over(database, earlier)
    return database


def _earlier(path: Path, box: BoxIdentity) -> StoredProfile | None:
    """The finished profile, if it is of this box and these libraries."""
    if not path.exists():
        return None
    try:
        profile = read_profile(path)
    except ConfigError as error:
        log.warning("profile_measured_anew reason=%s", error)
        return None
    reason = "; ".join(differences(profile.box, box))
    if reason:
        log.info("profile_measured_anew path=%s reason=%s", path, reason)
        return None
    return profile


def _take_over(database: Database, earlier: StoredProfile) -> None:
    for kind in earlier.kinds:
        rows.put_kind(database, kind)
    TABLES["agreements"].put(database, *earlier.agreements)
    for processor, speedups in earlier.speedups.items():
        rows.put_speedups(database, processor, speedups)
    TABLES["links"].put(database, *earlier.links)
    TABLES["parts"].put(database, {"part": "links"})
    TABLES["decodings"].put(database, *earlier.decodings)
    TABLES["forms"].put(database, *earlier.forms.values())
    TABLES["precisions"].replace_mapping(
        database, earlier.precisions
    )  # tells what the speedups are of; no part of the new one yet
    TABLES["packed"].replace_mapping(database, earlier.packed)  # tells what the agreements are of; no part yet, either


def _read_back(path: Path) -> StoredProfile:
    with closing(copy_in_memory(path)) as database:
        return rows.profile_in(database, path)


@contextmanager
def _one_writer(path: Path) -> Iterator[None]:
    """Lock on the profile's folder; the kernel drops it when the process ends."""
    descriptor = os.open(path.absolute().parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            told = f"{path}: another `coserve profile` is at work there - wait for its end, or stop it"
            raise ConfigError(told) from error
        yield
    finally:
        os.close(descriptor)
