"""Plan of the tensors that several experts share bit for bit: they are stored, read and held once.

Tensors are grouped by the set of experts that hold them with the same name, form and bytes. A group that is large
enough for a file becomes a shared segment; other tensors stay in their expert's own segment. Pure: digests in, a plan
out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from experts.packed.weights import DTYPE_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from experts.packed.weights import TensorSpec

SHARED_MINIMUM_BYTES = 1024 * 1024  # below this a second file costs more to open than it saves to store


@dataclass(frozen=True, slots=True)
class TensorKey:
    """Key of a tensor: two experts with equal keys share it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    sha256: str

    @classmethod
    def of(cls, spec: TensorSpec, sha256: str) -> TensorKey:
        return cls(spec.name, spec.dtype, spec.shape, spec.stride, sha256)

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Partition:
    """Division of one expert's tensors over segments; within each, in the expert's own order."""

    own: tuple[TensorKey, ...]
    shared: tuple[tuple[TensorKey, ...], ...]


def plan_sharing(tensors: Mapping[str, Sequence[TensorKey]]) -> dict[str, Partition]:
    """Partition of every expert, from the tensors of each. Independent of the experts' order."""
    holders: defaultdict[TensorKey, set[str]] = defaultdict(set)
    for expert, keys in tensors.items():
        for key in keys:
            holders[key].add(expert)
    groups = _groups(tensors, {key: frozenset(experts) for key, experts in holders.items()})
    partitions: dict[str, Partition] = {}
    for expert, keys in tensors.items():
        shared = dict.fromkeys(groups[key] for key in keys if key in groups)  # a set that keeps its order
        partitions[expert] = Partition(tuple(key for key in keys if key not in groups), tuple(shared))
    return partitions


def _groups(
    tensors: Mapping[str, Sequence[TensorKey]], holders: Mapping[TensorKey, frozenset[str]]
) -> dict[TensorKey, tuple[TensorKey, ...]]:
    """Group of each shared tensor, in the order of the alphabetically first expert that has it."""
    members: defaultdict[frozenset[str], list[TensorKey]] = defaultdict(list)
    for expert in sorted(tensors):
        for key in tensors[expert]:
            if len(holders[key]) > 1 and min(holders[key]) == expert:
                members[holders[key]].append(key)
    worthy = [tuple(keys) for keys in members.values() if sum(key.size_bytes for key in keys) >= SHARED_MINIMUM_BYTES]
    return {key: group for group in worthy for key in group}
