"""Sizes in bytes, as people read them."""

from __future__ import annotations

import math

MEBIBYTE, GIBIBYTE = 2**20, 2**30


def mib(size_bytes: float, form: str = ".1f") -> str:
    """A size in MiB: `85.0 MiB`. ``form``: of the number, such as ``,.0f``: thousands apart, no decimals."""
    return f"{size_bytes / MEBIBYTE:{form}} MiB"


def size_text(size_bytes: float) -> str:
    """A memory's size in the unit that suits it, rounded up to a tenth: `5.1 GiB`."""
    unit, name = (GIBIBYTE, "GiB") if size_bytes >= GIBIBYTE else (MEBIBYTE, "MiB")
    return f"{math.ceil(size_bytes / unit * 10) / 10:.1f} {name}"
