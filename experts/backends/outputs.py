"""What an expert answered with, before anything is made of it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from experts.errors import OutputInvalid

if TYPE_CHECKING:
    from torch import Tensor

    from experts.expert import Expert


def require_numbers(expert: Expert, *outputs: Tensor) -> None:
    """Raises OutputInvalid unless every value is a finite number.

    To be asked of raw outputs: an infinite one becomes a score of 0 or 1 like any other.
    """
    if not all(_is_finite(output) for output in outputs):
        raise OutputInvalid(expert.id, "its output is not a number: check its weights, or use precision fp32")


def _is_finite(output: Tensor) -> bool:
    """By its extremes, which are no numbers where any value is none: asking each value reads all of them five times."""
    return not output.numel() or all(math.isfinite(extreme) for extreme in torch.stack(torch.aminmax(output)).tolist())
