"""Metrics and health of a line, as frozen records.

Names of metrics lack the prefix `coserve_`, and those of counters the suffix `_total`. Labels name an executor, a
memory, an expert or a camera; never a serial, a path or an image, whose number is unbounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Labels: TypeAlias = tuple[str, ...]


class MetricKind(StrEnum):
    """A counter never decreases while the agent runs."""

    COUNTER = "counter"
    GAUGE = "gauge"


@dataclass(frozen=True, slots=True)
class Metric:
    """One value for each combination of labels; key () without labels."""

    kind: MetricKind
    name: str
    help: str
    values: Mapping[Labels, float]
    labels: Labels = ()


@dataclass(frozen=True, slots=True)
class Distribution:
    """Distribution of durations. ``counts``: upper bound in seconds -> cumulative count; the last bound is inf."""

    counts: Mapping[float, int]
    sum_s: float


@dataclass(frozen=True, slots=True)
class Histogram:
    """One distribution for each combination of labels."""

    name: str
    help: str
    values: Mapping[Labels, Distribution]
    labels: Labels


@dataclass(frozen=True, slots=True)
class Condition:
    """Health. ``dead``: why only a restart helps; ``unready``: why no work is taken now; None: healthy."""

    dead: str | None = None
    unready: str | None = None


class ObservedLine(Protocol):
    """One call of each method at a time, from any thread. A call may take long, or never return."""

    def condition(self) -> Condition:
        """Returning proves that the scheduler makes progress."""

    def metrics(self) -> Sequence[Metric | Histogram]:
        """All metrics of one moment."""
