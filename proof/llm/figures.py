"""One shape for the parts of ``coserve bench llm``: figures, targets and notes."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from profiler.bench.measured import Column

if TYPE_CHECKING:
    from collections.abc import Iterable

    from profiler.bench.measured import Target

TRANSFORMERS = "transformers is not there: `pip install transformers`, one of the extras for developers"
COLUMNS = (
    Column("part", "part"), Column("figure", "what"), Column("value", "value", ".4g"), Column("", "unit"),
    Column("least", "least", ".4g"), Column("most", "most", ".4g"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Figure:
    part: str
    what: str
    value: float
    unit: str = ""
    least: float | None = None  # of the runs that ``value`` is the median of
    most: float | None = None


@dataclass(frozen=True, slots=True)
class LlmFindings:
    """Findings of one part. ``notes`` also name parts that were not measured."""

    figures: tuple[Figure, ...]
    targets: tuple[Target, ...]
    notes: tuple[str, ...] = ()


def median_of(part: str, what: str, values: Iterable[float], unit: str) -> Figure:
    found = sorted(values)
    return Figure(part, what, statistics.median(found), unit, found[0], found[-1])


def not_measured(what: str) -> str:
    return f"NOT MEASURED: {what}: {TRANSFORMERS}"
