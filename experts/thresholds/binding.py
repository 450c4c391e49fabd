"""Binds a threshold to the weights and the input that it was learned with; with others the threshold is void."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from experts.expert import Expert

DIGITS = 16  # hex digits of the digest: enough to tell a line's experts apart


def threshold_of(expert: Expert, weights_sha256: str) -> str:
    """Digest of weights and input, stored beside a threshold."""
    return hashlib.sha256(f"{weights_sha256} {expert.pixels.text}".encode()).hexdigest()[:DIGITS]


def is_bound_elsewhere(expert: Expert, weights_sha256: str) -> bool:
    return expert.threshold_of is not None and expert.threshold_of != threshold_of(expert, weights_sha256)
