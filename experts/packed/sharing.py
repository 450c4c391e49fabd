"""Which tensors several experts hold in common, bit for bit: those are stored, read and held once.

Tensors of the same name, form and bytes that exactly the same experts hold make one shared segment, if together they
are worth a file of their own; everything else stays in each expert's own segment. Pure: digests in, a plan out.
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
    """Key of a tensor: equal keys are one tensor to two experts."""

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
    """The partition of every expert, from the tensors that each holds. Independent of the experts' order."""
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
    """Each shared tensor's whole group. Its order is that of the alphabetically first expert that holds it."""
    members: defaultdict[frozenset[str], list[TensorKey]] = defaultdict(list)
    for expert in sorted(tensors):
        for key in tensors[expert]:
            if len(holders[key]) > 1 and min(holders[key]) == expert:
                members[holders[key]].append(key)
    worthy = [tuple(keys) for keys in members.values() if sum(key.size_bytes for key in keys) >= SHARED_MINIMUM_BYTES]
    return {key: group for group in worthy for key in group}
