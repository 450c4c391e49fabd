"""Decides by observations when a file is complete.

No single sign can be trusted: an event may be lost, a close may precede the bytes, a size may be preallocated. A
complete file has all signs. Its writer is done: renamed in, marked, closed, or a longer wait. No process has the file
open for writing. The file is unchanged for the settling time. Its bytes end as the format requires.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum

from experts.image_files.completeness import Completeness

CLOSED_SETTLE_S = 0.2  # after an observed close
UNSEEN_SETTLE_S = 2.0  # without an observed close
ZERO_TAIL_SETTLE_S = 10.0  # zeros: black pixels of a bitmap, or damage, or preallocated


class Evidence(IntEnum):
    """Strongest sign that the writer is done with the file."""

    NONE = 0
    CLOSED = 1
    RENAMED = 2
    MARKED = 3


class Lease(StrEnum):
    """Lease of a file: held while a process has it open for writing."""

    FREE = "free"
    HELD = "held"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Probe:
    """Result of opening a file."""

    lease: Lease
    completeness: Completeness


@dataclass(frozen=True, slots=True)
class Sighting:
    """Identity of a file's content without reading it. A rename keeps all fields but ``ctime_ns``, which every change
    of the bytes moves on, as no program can set it; 0 where it does not matter."""

    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int = 0

    def is_like(self, other: Sighting | None) -> bool:
        """True if a rename, or a change of the mode, explains the difference."""
        return other is not None and replace(self, ctime_ns=other.ctime_ns) == other

    def covers(self, other: Sighting) -> bool:
        return self == other or (self.ctime_ns == 0 and self.is_like(other))


@dataclass(frozen=True, slots=True)
class WaitingFile:
    """File that waits to be claimed. Times are monotonic, in seconds.

    ``sidecar``: None without a sidecar file, and in folders without sidecars.
    """

    relpath: str
    sighting: Sighting
    unchanged_since: float
    evidence: Evidence = Evidence.NONE
    not_before: float = float("-inf")
    sidecar: Sighting | None = None
    sidecar_since: float = float("-inf")

    def seen(self, sighting: Sighting, now: float) -> WaitingFile:
        """Copy after another sighting: a change restarts the wait and voids the evidence."""
        if sighting == self.sighting:
            return self
        return WaitingFile(self.relpath, sighting, unchanged_since=now)

    def beside(self, sidecar: Sighting | None, now: float) -> WaitingFile:
        """Copy with this sidecar; a change permits a check of the file at once."""
        if sidecar == self.sidecar:
            return self
        return replace(self, sidecar=sidecar, sidecar_since=now, not_before=float("-inf"))

    def shown(self, evidence: Evidence) -> WaitingFile:
        return replace(self, evidence=evidence) if evidence > self.evidence else self

    def postponed(self, until: float) -> WaitingFile:
        return replace(self, not_before=until)


@dataclass(frozen=True, slots=True)
class Rule:
    """Signs required of one folder's complete files; ``mode`` as configured.

    ``needs_sidecar``: a file without a sidecar is due only after ``stale_after_s``, to be refused. A sidecar is no sign
    that the image is complete, except in the mode marker.
    """

    mode: str = "auto"
    closed_settle_s: float = CLOSED_SETTLE_S
    unseen_settle_s: float = UNSEEN_SETTLE_S
    stale_after_s: float = 60.0
    needs_sidecar: bool = False

    def settle_s(self, evidence: Evidence) -> float | None:
        """Seconds that the file must be unchanged; None while a required sign is missing."""
        if self.mode == "marker":
            return self.closed_settle_s if evidence is Evidence.MARKED else None
        if self.mode == "stable":
            return self.unseen_settle_s
        if self.mode == "rename" or evidence is not Evidence.NONE:
            return self.closed_settle_s
        return self.unseen_settle_s

    def due_at(self, candidate: WaitingFile) -> float | None:
        """Time at which the file has settled; None while a sign is missing."""
        if self.lacks_sidecar(candidate):
            missing_at = max(candidate.unchanged_since, candidate.sidecar_since) + self.stale_after_s
            return max(missing_at, candidate.not_before)
        settle_s = self.settle_s(candidate.evidence)
        return None if settle_s is None else max(candidate.unchanged_since + settle_s, candidate.not_before)

    def is_due(self, candidate: WaitingFile, now: float) -> bool:
        due_at = self.due_at(candidate)
        return due_at is not None and now >= due_at

    def lacks_sidecar(self, candidate: WaitingFile) -> bool:
        return self.needs_sidecar and candidate.sidecar is None

    def is_ready(self, candidate: WaitingFile, now: float, probe: Probe) -> bool:
        """True if a settled file may be claimed, by its lease and its bytes."""
        if not self.is_due(candidate, now) or probe.lease is Lease.HELD or probe.completeness is Completeness.CUT:
            return False
        if probe.completeness not in {Completeness.ZERO_TAILED, Completeness.HOLED}:
            return True
        if probe.completeness is Completeness.HOLED and candidate.evidence is Evidence.CLOSED:
            return True
        return self._is_vouched_for(candidate) or now - candidate.unchanged_since >= ZERO_TAIL_SETTLE_S

    def is_truncated(self, candidate: WaitingFile, now: float, probe: Probe) -> bool:
        """True if the file's end is missing for good: the writer is done, or has long been inactive."""
        if probe.lease is Lease.HELD or probe.completeness is not Completeness.CUT or not self.is_due(candidate, now):
            return False
        return self._is_vouched_for(candidate) or self.is_abandoned(candidate, now)

    def is_abandoned(self, candidate: WaitingFile, now: float) -> bool:
        return now - candidate.unchanged_since >= self.stale_after_s

    def _is_vouched_for(self, candidate: WaitingFile) -> bool:
        return self.mode == "rename" or candidate.evidence in {Evidence.RENAMED, Evidence.MARKED}

    def stale_at(self, candidate: WaitingFile) -> float | None:
        """Time after which the file has been incomplete for ``stale_after_s``; None before the first check."""
        was_looked_into = candidate.not_before > float("-inf") or self.due_at(candidate) is None
        return candidate.unchanged_since + self.stale_after_s if was_looked_into else None
