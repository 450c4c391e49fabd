"""Standings: which experts are asked, and when one that failed is tried again.

    serving   --- loads or lone batches that failed in a row ---> probation
    probation --- a load, or a batch, that went well -----------> serving
    either    --- bad weights, or the shell's word -------------> quarantine, for good

A cause that may pass, such as an SSD that was reset or memory that is fragmented for a moment, means probation: nobody
asks the expert, but for one trial after each pause. The pauses are those of ``Limits``: after failed loads the one that
the failed load has anyway, after failed batches ``probation_s``; both double with each further failure up to
``longest_pause_s``, and begin anew only after success. So an expert that fails for ever costs one trial a minute, and
one that could serve again is out for a minute at most.

Guarantees: at most one request is on trial with an expert at a time, and a trial that came to nothing (its request was
cancelled, or could not be run for want of memory) leaves the next one free to begin; O(1) for each question.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agent.core.performance import Limits


@dataclass(slots=True)
class Probation:
    """Why an expert is not asked, and from when on it may be tried again.

    ``copy``: the one whose loads failed, which the Engine loads again by itself; None where batches failed.
    """

    reason: str
    retry_s: float
    copy: str | None = None
    trial: int | None = None  # the request that was let through


class Standings:
    """The experts that are not simply serving. ``quarantined``: expert -> reason."""

    def __init__(self, limits: Limits) -> None:
        self.quarantined: dict[str, str] = {}
        self._probations: dict[str, Probation] = {}
        self._limits = limits
        self._failed_batches: dict[str, int] = {}  # lone ones, in a row
        self._pauses_s: dict[str, float] = {}  # the latest after failed batches, until one goes well
        self._trials: dict[int, str] = {}  # request -> expert

    @property
    def on_probation(self) -> dict[str, str]:
        return {expert: probation.reason for expert, probation in self._probations.items()}

    def reason(self, expert: str) -> str | None:
        if expert in self.quarantined:
            return f"{expert} is in quarantine: {self.quarantined[expert]}"
        probation = self._probations.get(expert)
        return None if probation is None else f"{expert} is on probation: {probation.reason}"

    def refusal(self, request: int, expert: str, now: float) -> str | None:
        """Why a request cannot be taken for this expert now; None when it can, be it as its trial, or as that still."""
        probation = self._probations.get(expert)
        may_begin = probation is not None and probation.trial is None and now >= probation.retry_s
        goes_on = self._trials.get(request) == expert
        return None if may_begin or goes_on else self.reason(expert)

    def may_load(self, expert: str, now: float) -> bool:
        probation = self._probations.get(expert)
        return expert not in self.quarantined and (probation is None or now >= probation.retry_s)

    def let_through(self, request: int, expert: str) -> None:
        probation = self._probations.get(expert)
        if probation is not None:
            probation.trial = request
            self._trials[request] = expert

    def is_trial(self, request: int) -> bool:
        return request in self._trials

    def request_ended(self, request: int) -> None:
        expert = self._trials.pop(request, None)
        if expert is not None:
            self._probations[expert].trial = None

    def batch_ran(self, expert: str) -> bool:
        """A batch went well; True if that releases the expert."""
        self._failed_batches.pop(expert, None)
        self._pauses_s.pop(expert, None)
        return self._release(expert)

    def lone_batch_failed(self, expert: str, reason: str, now: float, *, is_trial: bool) -> Probation | None:
        """A batch of one came to nothing, through no fault of its memory; the probation that this means, if any."""
        count = self._failed_batches[expert] = self._failed_batches.get(expert, 0) + 1
        stays = expert in self._probations and not is_trial  # others ran when it was put on probation
        if expert in self.quarantined or stays or count < self._limits.expert_failures:
            return None
        pause_s = min(self._pauses_s.get(expert, self._limits.probation_s / 2) * 2, self._limits.longest_pause_s)
        self._pauses_s[expert] = pause_s
        return self._put_on_probation(expert, Probation(f"{_in_a_row(count, 'batch')}, last: {reason}", now + pause_s))

    def load_failed(self, expert: str, copy: str, reason: str, attempts: int, retry_s: float) -> Probation | None:
        """A load came to nothing, ``attempts`` in a row now; the probation that this means, if any."""
        if expert in self.quarantined or attempts < self._limits.load_attempts:
            return None
        told = f"{_in_a_row(attempts, 'load')}, last: {reason}"
        if self.fails_in_batches(expert):  # a load that goes well would say nothing of that
            return self._put_on_probation(expert, Probation(told, max(self._probations[expert].retry_s, retry_s)))
        return self._put_on_probation(expert, Probation(told, retry_s, copy=copy))

    def loaded(self, expert: str, copy: str) -> bool:
        """A load went well; True if that releases the expert: of one whose batches failed it says nothing."""
        probation = self._probations.get(expert)
        return probation is not None and probation.copy == copy and self._release(expert)

    def quarantine(self, expert: str, reason: str) -> bool:
        """Nobody asks this expert any more; False if that is so already."""
        if expert in self.quarantined:
            return False
        self._release(expert)
        self.quarantined[expert] = reason
        return True

    def forget_all_but(self, experts: frozenset[str]) -> None:
        for told in (self.quarantined, self._failed_batches, self._pauses_s, self._probations):
            for expert in [expert for expert in told if expert not in experts]:
                del told[expert]

    def fails_in_batches(self, expert: str) -> bool:
        """Is it on probation for its batches, so that only a batch can release it?"""
        probation = self._probations.get(expert)
        return probation is not None and probation.copy is None

    def due_loads(self, after_s: float, until_s: float) -> Iterator[tuple[str, str]]:
        for expert, probation in self._probations.items():
            if probation.copy is not None and after_s < probation.retry_s <= until_s:
                yield expert, probation.copy

    def _put_on_probation(self, expert: str, probation: Probation) -> Probation:
        self._release(expert)
        self._probations[expert] = probation
        return probation

    def _release(self, expert: str) -> bool:
        probation = self._probations.pop(expert, None)
        if probation is not None and probation.trial is not None:
            del self._trials[probation.trial]
        return probation is not None


def _in_a_row(count: int, what: str) -> str:
    plural = {"batch": "batches", "load": "loads"}[what]
    return f"1 {what} failed" if count == 1 else f"{count} {plural} in a row failed"
