"""The nouns that travel: batches, their results, outcomes. Frozen; what an image is, is the shell's business."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from experts.expert import Prediction, Verdict


@dataclass(frozen=True, slots=True)
class Rejected:
    """One image of a batch that no expert could be asked about; the others of its batch are not affected."""

    reason: str


@dataclass(frozen=True, slots=True)
class StepResult:
    """One expert's word on one request."""

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


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests that one executor runs on one expert, in one go."""

    id: int
    executor: int
    expert: str
    copy: str
    requests: tuple[int, ...]
    workspace_bytes: int
