"""Frozen values between core and shell: work, precedence, batches, results, outcomes; no pixels and no texts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from experts.expert import Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping

    from experts.expert import Prediction


@dataclass(frozen=True, slots=True)
class Work:
    """Size of a request in tokens: to read, expected to write, and the maximum to hold in memory.

    ``lease``: tokens to reserve memory for now; None: the maximum. ``held``: tokens to read again after a preemption.
    ``steps``: work at single experts of the route, by name, where it differs. An image has no work.
    Raises ValueError for negative numbers.
    """

    prompt: int = 0
    output: int = 0
    most: int = 0  # the prompt and the most that may be written after it
    lease: int | None = None
    held: int = 0
    steps: tuple[tuple[str, Work], ...] = ()

    def __post_init__(self) -> None:
        if min(self.prompt, self.output, self.most, self.held, self.lease or 0) < 0:
            raise ValueError(f"{self} - give numbers of tokens, 0 or more")

    @property
    def leased(self) -> int:
        return self.most if self.lease is None else min(self.lease, self.most)

    @property
    def most_of_any(self) -> int:
        return max(self.most, *(work.most for _, work in self.steps)) if self.steps else self.most

    def at(self, expert: str) -> Work:
        return dict(self.steps).get(expert, self) if self.steps else self

    def restarted(self) -> Work:
        """Work after the held tokens are lost."""
        return replace(self, prompt=self.prompt + self.held, held=0) if self.held else self


IMAGE = Work()


class Precedence(IntEnum):
    """Precedence of a request.

    IDLE requests are served one at a time, only while no other request is in flight, in spare memory. An arriving
    request preempts the IDLE one, which ends with the reason GAVE_WAY, unless its batch runs.
    """

    IDLE = 0
    LINE = 1


@dataclass(frozen=True, slots=True)
class StepResult:
    expert: str
    prediction: Prediction


CANCELLED = "cancelled"  # reason of a request that was cancelled before its route ended
GAVE_WAY = "gave way to the line"  # reason of an IDLE request's outcome; the request may be sent again
NO_SPARE_ROOM = "no memory has room to spare for it"  # reason of an IDLE request's outcome


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a request. ``label`` and ``score`` are the deciding step's; UNKNOWN has a reason."""

    verdict: Verdict
    label: str | None
    score: float | None
    steps: tuple[StepResult, ...]
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Doubts:
    """Experts that are not trusted, with reasons: no verdict may rest on ``any``, and no OK on ``passing``."""

    any: Mapping[str, str] = field(default_factory=dict)
    passing: Mapping[str, str] = field(default_factory=dict)

    def applied(self, outcome: Outcome) -> Outcome:
        """UNKNOWN instead of a verdict that rests on a doubted expert: an OK rests on all steps, an NG on the last."""
        is_ok = outcome.verdict is Verdict.OK
        doubted = {**self.passing, **self.any} if is_ok else self.any
        steps = outcome.steps if is_ok else outcome.steps[-1:] if outcome.verdict is Verdict.NG else ()
        reason = next((doubted[step.expert] for step in steps if step.expert in doubted), None)
        return outcome if reason is None else replace(outcome, verdict=Verdict.UNKNOWN, reason=reason)


class Portion(NamedTuple):
    """Requests of a batch for one expert."""

    expert: str
    copy: str
    requests: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests that one executor runs at once, on one expert or several of one family.

    ``quantum_s``: longest duration; None for images, which run to their end. ``undisturbed_s``: longest duration until
    a request is assigned to its executor; None: others wait already. ``expert``, ``copy``: the expert whose turn it is.
    ``portions``: all experts with their requests, in order; () for one expert.
    """

    id: int
    executor: int
    expert: str
    copy: str
    requests: tuple[int, ...]
    workspace_bytes: int
    quantum_s: float | None = None
    portions: tuple[Portion, ...] = ()
    undisturbed_s: float | None = None

    @property
    def all_portions(self) -> tuple[Portion, ...]:
        return self.portions or (Portion(self.expert, self.copy, self.requests),)

    @property
    def copies(self) -> tuple[str, ...]:
        return tuple(portion.copy for portion in self.portions) or (self.copy,)
