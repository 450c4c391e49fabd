"""Comparison of the labels of a line with those of a model's file.

Words are compared folded: without case, outer spaces, and differences between equal texts of Unicode.
"""

from __future__ import annotations

import unicodedata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def folded(labels: Sequence[str]) -> tuple[str, ...]:
    """The labels as they are compared; unchanged where folding makes two of them equal."""
    plain = [unicodedata.normalize("NFC", unicodedata.normalize("NFC", each).strip().casefold()) for each in labels]
    return tuple(plain) if len(set(plain)) == len(set(labels)) else tuple(labels)


def moved(given: Sequence[str], names: Sequence[str]) -> list[str]:
    """Labels among ``given`` that ``names`` has in another place."""
    pairs = zip(given, folded(given), folded(names), strict=True)
    return [label for label, plain, name in pairs if plain != name and plain in folded(names)]


def renamed(given: Sequence[str], names: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of a name and another word for it, by place."""
    pairs = zip(names, given, folded(names), folded(given), strict=True)
    return [(name, word) for name, word, *plain in pairs if plain[0] != plain[1]]
