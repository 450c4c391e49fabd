"""Normalisation of pixels: by name, or by the mean and the standard deviation that a model was trained with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Normalization:
    """``mean`` and ``std`` of pixels from 0 to ``scale``, in the order in which the model takes the ``channels``."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    scale: Literal[1, 255] = 1
    channels: Literal["rgb", "bgr"] = "rgb"

    def __str__(self) -> str:
        mean, std = (",".join(str(each) for each in values) for values in (self.mean, self.std))
        return f"mean={mean}/std={std}/{self.scale}{'' if self.channels == 'rgb' else '/bgr'}"


IMAGENET = Normalization((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
UNIT = Normalization((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
NAMED = {"imagenet": IMAGENET, "unit": UNIT}


def named(normalization: Normalization) -> str | Normalization:
    """Its name where it has one: experts that say the same in two ways share prepared images."""
    return next((name for name, known in NAMED.items() if known == normalization), normalization)
