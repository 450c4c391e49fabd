"""What the web asks of a line: its metrics, and whether it is well. The nouns of the answers are frozen records.

A metric's name is given without `coserve_`, which stands before all of them, and a counter's without `_total`. Labels
say which part of the line a value is of: an executor, a memory, an expert, a camera's name; never a serial, a path or
an image, of which there is no end.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Labels: TypeAlias = tuple[str, ...]


class MetricKind(StrEnum):
    """How a value may change: a counter only grows while the agent lives."""

    COUNTER = "counter"
    GAUGE = "gauge"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: a value for each combination of its labels' values, () where it has no labels."""

    kind: MetricKind
    name: str
    help: str
    values: Mapping[Labels, float]
    labels: Labels = ()


@dataclass(frozen=True, slots=True)
class Distribution:
    """How often something took how long. ``counts``: upper bound in seconds -> how often up to there, inf the last."""

    counts: Mapping[float, int]
    sum_s: float


@dataclass(frozen=True, slots=True)
class Histogram:
    """A metric of durations: a distribution for each combination of its labels' values."""

    name: str
    help: str
    values: Mapping[Labels, Distribution]
    labels: Labels


@dataclass(frozen=True, slots=True)
class Condition:
    """How the line is. ``dead``: why only a new start helps; ``unready``: why it takes no work now; None where not."""

    dead: str | None = None
    unready: str | None = None


class Line(Protocol):
    """Who is asked: one call of each at a time, from any thread. Either may take long, or never come back."""

    def condition(self) -> Condition:
        """How it is. That it comes back says that what decides makes progress."""

    def metrics(self) -> Sequence[Metric | Histogram]:
        """All metrics, of one moment."""
