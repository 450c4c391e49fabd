"""Ledger of a folder's files that wait to be claimed, and of handled files that stay there.

Guarantees: a call costs O(log n) per changed file, amortised. Only `see_all` visits every file.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from agent.sources.folder.files.readiness import Evidence, Rule, Sighting, WaitingFile
from agent.sources.folder.files.sidecar import sidecar_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from agent.sources.folder.files.inbox import Found

ROOTS_KEPT = 4  # an empty mount point, the share, and occasional replacements
SLACK = 64  # arbitrary: up to so many outdated entries are not worth a cleaning


class Ranking:
    """Names by rank, the lowest first, equal ranks by name. Every call is O(log n), amortised.

    A heap in which a new rank is a new entry: an outdated entry stays until it is first, or until outdated entries
    outnumber the valid ones.
    """

    def __init__(self) -> None:
        self._ranks: dict[str, float] = {}
        self._entries: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._ranks)

    @property
    def first_rank(self) -> float | None:
        return self._entries[0][0] if self._ranks else None

    def put(self, name: str, rank: float | None) -> None:
        """Set the rank of a name; None drops it."""
        if rank is None:
            self.drop(name)
        elif self._ranks.get(name) != rank:
            self._ranks[name] = rank
            heappush(self._entries, (rank, name))
            self._clean()

    def drop(self, name: str) -> None:
        if self._ranks.pop(name, None) is not None:
            self._clean()

    def first(self, limit: float = float("inf")) -> str | None:
        """First name, if its rank is at most ``limit``."""
        return self._entries[0][1] if self._ranks and self._entries[0][0] <= limit else None

    def clear(self) -> None:
        self._ranks.clear()
        self._entries.clear()

    def _clean(self) -> None:
        """Remove outdated entries at the head of the heap."""
        if len(self._entries) > 2 * len(self._ranks) + SLACK:
            self._entries = [(rank, name) for name, rank in self._ranks.items()]
            heapify(self._entries)
        while self._entries and self._ranks.get(self._entries[0][1]) != self._entries[0][0]:
            heappop(self._entries)


class WaitingFiles:
    """Candidates by path. An ignored file is a candidate again once it changes."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self._candidates: dict[str, WaitingFile] = {}
        self._passed: dict[str, Sighting] = {}
        self._passed_in: dict[int, dict[str, Sighting]] = {}  # ignored files, by the inode of an earlier folder
        self.root: int | None = None
        self._settling = Ranking()  # by time of settling
        self._settled = Ranking()  # by time of writing
        self._aging = Ranking()  # by time of becoming stale
        self._by_sidecar: dict[str, set[str]] = {}  # files that a sidecar may belong to
        self.stale: set[str] = set()  # incomplete for long

    def __len__(self) -> int:
        return len(self._candidates)

    def __contains__(self, relpath: str) -> bool:
        return relpath in self._candidates

    def __getitem__(self, relpath: str) -> WaitingFile:
        return self._candidates[relpath]

    def see(self, found: Found, now: float, evidence: Evidence = Evidence.NONE) -> None:
        """Record a sighting of one file, with the evidence of an event."""
        passed = self._passed.get(found.relpath)
        if passed is not None and passed.covers(found.sighting):
            return
        self._passed.pop(found.relpath, None)
        known = self._candidates.get(found.relpath)
        candidate = known.seen(found.sighting, now) if known else WaitingFile(found.relpath, found.sighting, now)
        if candidate is not known:
            self.stale.discard(found.relpath)
        if self.rule.needs_sidecar:
            candidate = candidate.beside(found.sidecar, now)
        is_marked = found.is_marked or (self.rule.mode == "marker" and candidate.sidecar is not None)
        self._put(candidate.shown(Evidence.MARKED if is_marked else evidence))

    def see_all(self, found: Iterable[Found], now: float) -> None:
        """Record a listing of all files of the folder; files missing in it are gone."""
        listed = {one.relpath: one for one in found}
        for one in listed.values():
            self.see(one, now)
        for relpath in [relpath for relpath in self._candidates if relpath not in listed]:
            self.forget(relpath)
        self._passed = {relpath: sighting for relpath, sighting in self._passed.items() if relpath in listed}

    def turn_to(self, root: int) -> bool:
        """Switch to the folder with this inode; True if another folder was here before.

        Drops the other folder's candidates. Its ignored files are restored when that folder returns, as with a share.
        """
        if root == self.root:
            return False
        before, self.root = self.root, root
        if before is None:
            return False
        self.clear()
        self._passed_in[before] = self._passed
        self._passed = self._passed_in.pop(root, {})
        while len(self._passed_in) > ROOTS_KEPT:
            del self._passed_in[next(iter(self._passed_in))]
        return True

    def pass_over(self, relpath: str, sighting: Sighting) -> None:
        """Ignore a handled file, which stays in its place, until it changes."""
        self.forget(relpath)
        self._passed[relpath] = sighting

    def reconsider(self, relpath: str) -> None:
        """Make the file a candidate again at its next sighting."""
        self._passed.pop(relpath, None)

    def forget(self, relpath: str) -> None:
        self._candidates.pop(relpath, None)
        sidecar = sidecar_of(relpath).casefold()
        if beside := self._by_sidecar.get(sidecar):
            beside.discard(relpath)
            if not beside:
                del self._by_sidecar[sidecar]
        for ranking in (self._settling, self._settled, self._aging):
            ranking.drop(relpath)
        self.stale.discard(relpath)

    def clear(self) -> None:
        """Drop all candidates of a missing folder; ignored files stay ignored when the folder returns."""
        self._candidates.clear()
        self._by_sidecar.clear()
        for ranking in (self._settling, self._settled, self._aging):
            ranking.clear()
        self.stale.clear()

    def beside(self, sidecar: str) -> tuple[str, ...]:
        return tuple(sorted(self._by_sidecar.get(sidecar.casefold(), ())))

    def first_due(self, now: float) -> WaitingFile | None:
        """Oldest settled file; due until it is handled."""
        while (relpath := self._settling.first(now)) is not None:
            self._settling.drop(relpath)
            self._settled.put(relpath, self._candidates[relpath].sighting.mtime_ns)
        first = self._settled.first()
        return None if first is None else self._candidates[first]

    @property
    def next_due(self) -> float | None:
        """Time at which the next file settles, -inf if one has; None if all need a further sign."""
        return float("-inf") if self._settled else self._settling.first_rank

    def postpone(self, relpath: str, until: float) -> None:
        """Do not check this file before the given time; ignored for a missing file."""
        if relpath in self._candidates:
            self._put(self._candidates[relpath].postponed(until))

    def end_turn(self, candidate: WaitingFile, until: float) -> None:
        """Postpone an undecided due file, so that it does not block others."""
        if self._candidates.get(candidate.relpath) is candidate:
            self.postpone(candidate.relpath, until)

    def find_stale(self, now: float) -> tuple[str, ...]:
        """Files that have become stale since the last call, sorted."""
        news = []
        while (relpath := self._aging.first(now)) is not None:
            self._aging.drop(relpath)
            news.append(relpath)
        self.stale.update(news)
        return tuple(sorted(news))

    def _put(self, candidate: WaitingFile) -> None:
        relpath = candidate.relpath
        if self._candidates.get(relpath) is candidate:
            return
        self._candidates[relpath] = candidate
        if self.rule.needs_sidecar:
            self._by_sidecar.setdefault(sidecar_of(relpath).casefold(), set()).add(relpath)
        self._settled.drop(relpath)
        self._settling.put(relpath, self.rule.due_at(candidate))
        if relpath not in self.stale:
            self._aging.put(relpath, self.rule.stale_at(candidate))
