"""Families: language models on one backbone, whose texts may run in one quantum.

Copies of one family have the same kind and precision, and share a segment of weights; of several segments the largest.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from agent.core.performance import PerformanceMatrix
from agent.runtime.expert_copy import SHORT_SHA256

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from agent.runtime.expert_copy import ExpertCopy


def families(copies: Iterable[ExpertCopy]) -> dict[str, str]:
    """Name of the family, by copy, of copies that have one. Independent of their order."""
    texts = {copy.name: copy for copy in copies if copy.expert.takes_texts}
    holders: defaultdict[tuple[str, str, str], set[str]] = defaultdict(set)
    for copy in texts.values():
        for segment in copy.packed.shared:
            holders[_key(copy, segment.sha256)].add(copy.name)
    found = {}
    for name, copy in texts.items():
        common = [segment for segment in copy.packed.shared if len(holders[_key(copy, segment.sha256)]) > 1]
        if common:
            largest = max(common, key=lambda segment: (segment.size_bytes, segment.sha256))
            found[name] = " ".join((copy.kind, copy.packed.precision, largest.sha256[:SHORT_SHA256]))
    return found


def with_families(matrix: PerformanceMatrix, copies: Iterable[ExpertCopy]) -> PerformanceMatrix:
    named: Mapping[str, str] = families(copies)
    experts = {
        processor: {expert: replace(row, family=named.get(row.copy)) for expert, row in column.items()}
        for processor, column in matrix.experts.items()
    }
    return PerformanceMatrix(experts, matrix.usage)


def _key(copy: ExpertCopy, segment: str) -> tuple[str, str, str]:
    return copy.kind, copy.packed.precision, segment
