"""Models as users of torch have them: built by their own constructor, nothing folded, packed or converted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from experts.backends import family

if TYPE_CHECKING:
    from torch.nn import Module

    from experts.expert import Expert


def build(expert: Expert) -> Module:
    """A fresh model of the expert's architecture, its weights initialised as the constructor does."""
    if family(expert.architecture) == "detector":
        from experts.backends import detector

        return detector.build_trainable(expert.architecture, len(expert.labels))
    from experts.backends import classifier

    return classifier.build_trainable(expert.architecture, len(expert.labels), expert.stem, expert.pixels.height)
