"""Threshold bound to the weights and the input that it was learned with; with others it does not count."""

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
    return expert.threshold_of is not None and expert.threshold_of != threshold_of(expert, weights_sha256)
