"""What one part of the benchmark says: figures for programs, targets and remarks for people."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from profiler.targets import Target

TRANSFORMERS = "transformers is not there: `pip install transformers`, one of the extras for developers"


@dataclass(frozen=True, slots=True)
class Part:
    """``skipped``: parts that were not measured, and why; shown, as silence would look like success."""

    name: str
    targets: tuple[Target, ...] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
