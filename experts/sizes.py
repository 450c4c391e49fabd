"""Sizes in bytes, as people read and write them."""

from __future__ import annotations

import math
import re

SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([KMGT]i?B|B)")
UNIT_BYTES = {"B": 1} | {
    f"{prefix}{binary}B": (1024 if binary else 1000) ** power
    for power, prefix in enumerate("KMGT", start=1)
    for binary in ("", "i")
}
MEBIBYTE, GIBIBYTE = 2**20, 2**30


def mib(size_bytes: float, form: str = ".1f") -> str:
    """A size in MiB: `85.0 MiB`. ``form``: format of the number, such as ``,.0f``: thousands apart, no decimals."""
    return f"{size_bytes / MEBIBYTE:{form}} MiB"


def size_text(size_bytes: float) -> str:
    """A memory's size in the unit that suits it, rounded up to a tenth: `5.1 GiB`."""
    unit, name = (GIBIBYTE, "GiB") if size_bytes >= GIBIBYTE else (MEBIBYTE, "MiB")
    return f"{math.ceil(size_bytes / unit * 10) / 10:.1f} {name}"


def size_bytes(text: str) -> int:
    """`4GiB`, `512MiB` or `1.5GB` in bytes. Raises ValueError for anything else, a number without unit included."""
    found = SIZE.fullmatch(text)
    if not found:
        raise ValueError(f"{text!r} is not a size - write a number and a unit, such as 512MiB or 4GiB")
    return int(float(found[1]) * UNIT_BYTES[found[2]])
