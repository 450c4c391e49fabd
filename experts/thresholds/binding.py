"""Binds what was learned or proven to the expert that it was learned with; with another one it is void."""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from experts.expert import Expert

UNSET = re.compile(r", (\w+)=None")
FIRST = (
    "resize",
    "stem",
    "precision",
    "moe_cache_bytes",
    "parallel",
    "task",
    "threshold",
    "threshold_of",
    "calibration",
)
DIGITS = 16  # hex digits of the digest: enough to tell a line's experts apart


def threshold_of(expert: Expert, weights_sha256: str) -> str:
    """Digest of weights and input, stored beside a threshold."""
    return hashlib.sha256(f"{weights_sha256} {expert.pixels.text}".encode()).hexdigest()[:DIGITS]


def entry_text(expert: Expert) -> str:
    """Part of an expert's entry that its answers depend on, beside its weights and its calibration. Digests of it are
    stored: a key that came after FIRST is left out if it is None."""
    text = repr(replace(expert, weights=Path(), calibration=None, pin=False))
    return UNSET.sub(lambda found: found[0] if found[1] in FIRST else "", text)


def is_bound_elsewhere(expert: Expert, weights_sha256: str) -> bool:
    return expert.threshold_of is not None and expert.threshold_of != threshold_of(expert, weights_sha256)
