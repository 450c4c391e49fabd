"""The files of a folder that wait to be taken, and those that stay there and were dealt with. Pure bookkeeping."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.intake.readiness import Candidate, Evidence, Rule, Sighting

if TYPE_CHECKING:
    from collections.abc import Iterable

    from agent.intake.inbox import Found


class Waiting:
    """Candidates by path. A file that was passed over is a candidate again once it changes."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._candidates: dict[str, Candidate] = {}
        self._passed: dict[str, Sighting] = {}
        self._stale: set[str] = set()

    def __len__(self) -> int:
        return len(self._candidates)

    def __getitem__(self, relpath: str) -> Candidate:
        return self._candidates[relpath]

    @property
    def stale(self) -> tuple[str, ...]:
        """Files that stay incomplete, sorted."""
        return tuple(sorted(self._stale))

    def see(self, found: Found, now: float, evidence: Evidence = Evidence.NONE) -> None:
        """One file as it was just looked at, with what an event said of it."""
        if self._passed.get(found.relpath) == found.sighting:
            return
        self._passed.pop(found.relpath, None)
        known = self._candidates.get(found.relpath)
        candidate = known.seen(found.sighting, now) if known else Candidate(found.relpath, found.sighting, now)
        if candidate is not known:
            self._stale.discard(found.relpath)
        self._candidates[found.relpath] = candidate.shown(Evidence.MARKED if found.is_marked else evidence)

    def see_all(self, found: Iterable[Found], now: float) -> None:
        """All files of the folder, as just listed: the others are gone."""
        listed = {one.relpath: one for one in found}
        for one in listed.values():
            self.see(one, now)
        for relpath in [relpath for relpath in self._candidates if relpath not in listed]:
            self.forget(relpath)
        self._passed = {relpath: sighting for relpath, sighting in self._passed.items() if relpath in listed}

    def pass_over(self, relpath: str, sighting: Sighting) -> None:
        """This file was dealt with, and stays where it is for now."""
        self.forget(relpath)
        self._passed[relpath] = sighting

    def reconsider(self, relpath: str) -> None:
        """What was dealt with under this name was not what lies there: it is a candidate when it is seen again."""
        self._passed.pop(relpath, None)

    def forget(self, relpath: str) -> None:
        """This file is gone."""
        self._candidates.pop(relpath, None)
        self._stale.discard(relpath)

    def clear(self) -> None:
        """The folder is gone; what was passed over still is when it comes back."""
        self._candidates.clear()
        self._stale.clear()

    def due(self, now: float) -> list[Candidate]:
        """The files that have settled, in the order in which they were written."""
        due = [candidate for candidate in self._candidates.values() if self._rule.is_due(candidate, now)]
        return sorted(due, key=lambda candidate: (candidate.sighting.mtime_ns, candidate.relpath))

    @property
    def next_due(self) -> float | None:
        """When the next file will have settled; None if none will without a further sign."""
        times = (self._rule.due_at(candidate) for candidate in self._candidates.values())
        return min((at for at in times if at is not None), default=None)

    def postpone(self, relpath: str, until: float) -> None:
        """Do not look into this file before then; nothing happens if it is gone."""
        if relpath in self._candidates:
            self._candidates[relpath] = self._candidates[relpath].postponed(until)

    def find_stale(self, now: float) -> tuple[str, ...]:
        """The files that have become stale since the last call."""
        stale = {candidate.relpath for candidate in self._candidates.values() if self._rule.is_stale(candidate, now)}
        news = stale - self._stale
        self._stale |= news
        return tuple(sorted(news))
