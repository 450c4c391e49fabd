"""ServedLine: the line as the Engine serves it now. Frozen; a change of line puts another one in its place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agent.core.performance import ExecutorSpec, PerformanceMatrix
    from experts.graph import ExpertGraph


@dataclass(frozen=True, slots=True)
class ServedLine:
    """``homes``: where each pinned expert stays. ``retired``: those of earlier lines that a request may still need."""

    graph: ExpertGraph
    matrix: PerformanceMatrix
    homes: Mapping[str, ExecutorSpec]
    retired: frozenset[str] = frozenset()
