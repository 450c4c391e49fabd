"""What a threshold was learned with: weights and input of its expert. A threshold of others is none."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from experts.expert import Expert

DIGITS = 16  # of the digest: two of a line's experts differ by more than chance can make equal


def threshold_of(expert: Expert, weights_sha256: str) -> str:
    """The evidence that a threshold is of these weights and this input."""
    return hashlib.sha256(f"{weights_sha256} {expert.pixels.text}".encode()).hexdigest()[:DIGITS]


def is_bound_elsewhere(expert: Expert, weights_sha256: str) -> bool:
    """Whether the expert's threshold was learned with other weights, or another input, than it has."""
    return expert.threshold_of is not None and expert.threshold_of != threshold_of(expert, weights_sha256)
