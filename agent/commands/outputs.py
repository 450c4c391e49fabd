"""What many images were judged, as one number that two runs can be compared by."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def outputs_sha256(labels: Iterable[str | None]) -> str:
    """A digest over (request number, label): two policies that judge the same images must agree on it in fp32."""
    digest = hashlib.sha256()
    for number, label in enumerate(labels):
        digest.update(f"{number} {label}\n".encode())
    return digest.hexdigest()
