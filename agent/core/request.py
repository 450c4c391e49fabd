"""The nouns that travel: work, batches, their results, outcomes. Frozen; what an image or a text is, is the shell's
business.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from experts.expert import Prediction, Verdict


@dataclass(frozen=True, slots=True)
class Work:
    """The size of a request, in tokens: to be read, expected to be written, and the most that it may ever hold.

    ``lease``: may be held for now; None: the most. ``held``: to be read again where they are lost. ``steps``: the work
    at each expert of its route, by name, where that differs. An image has none. Raises ValueError for negative numbers.
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

    def anew(self) -> Work:
        """The work once the held tokens are lost."""
        return replace(self, prompt=self.prompt + self.held, held=0) if self.held else self


IMAGE = Work()


@dataclass(frozen=True, slots=True)
class Rejected:
    """One image of a batch that no expert could be asked about; the others of its batch are not affected."""

    reason: str


@dataclass(frozen=True, slots=True)
class StepResult:
    expert: str
    prediction: Prediction


CANCELLED = "cancelled"  # the reason of an outcome that nobody wants any more, and for which something had yet to run


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended. ``label`` and ``score`` are the deciding step's; UNKNOWN carries a reason."""

    verdict: Verdict
    label: str | None
    score: float | None
    steps: tuple[StepResult, ...]
    reason: str | None = None


class Part(NamedTuple):
    expert: str
    copy: str
    requests: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests that one executor runs at once, on one expert or several of one family.

    ``quantum_s``: how long they run at most; None for images, which run to their end. ``expert`` and ``copy``: whose
    turn it is. ``parts``: all experts with their requests, in order; () for one expert.
    """

    id: int
    executor: int
    expert: str
    copy: str
    requests: tuple[int, ...]
    workspace_bytes: int
    quantum_s: float | None = None
    parts: tuple[Part, ...] = ()

    @property
    def all_parts(self) -> tuple[Part, ...]:
        return self.parts or (Part(self.expert, self.copy, self.requests),)

    @property
    def copies(self) -> tuple[str, ...]:
        return tuple(part.copy for part in self.parts) or (self.copy,)
