"""Rotary positions (RoFormer, arXiv 2104.09864), with the scalings that long-context checkpoints were trained with.

Frequencies are computed in fp32 as the checkpoints' own library does: an error in the last digit would rotate far
positions by more than logits may differ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from experts.llm.config import RopeKind

if TYPE_CHECKING:
    from torch import Tensor

    from experts.llm.config import RopeSpec


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosine and sine of some tokens' angles: (tokens, 1, head size), both halves alike."""

    cosine: Tensor
    sine: Tensor

    def turn(self, heads: Tensor) -> Tensor:
        """Rotate queries or keys, (tokens, heads, head size): the first half of a head pairs with its second."""
        first, second = heads.chunk(2, dim=-1)
        return heads * self.cosine + torch.cat((-second, first), dim=-1) * self.sine


class Rope:
    def __init__(self, spec: RopeSpec, head_size: int, device: torch.device) -> None:
        self._frequencies = inverse_frequencies(spec, head_size).to(device)
        self._magnitude = spec.magnitude

    def at(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """The rotation of tokens at these positions; angles always in fp32."""
        angles = positions.to(torch.float32)[:, None, None] * self._frequencies
        angles = torch.cat((angles, angles), dim=-1)
        cosine, sine = angles.cos() * self._magnitude, angles.sin() * self._magnitude
        return Rotation(cosine.to(dtype), sine.to(dtype))


def inverse_frequencies(spec: RopeSpec, head_size: int) -> Tensor:
    """Radians per position of each pair of a head: fp32, (head size / 2), on the CPU."""
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
    trained = 1.0 / spec.theta**exponents
    if spec.kind is RopeKind.DEFAULT:
        return trained
    if spec.kind is RopeKind.LINEAR:
        return trained / spec.factor
    kept = _kept_by_turns(spec, trained) if spec.kind is RopeKind.LLAMA3 else _kept_by_index(spec, head_size)
    return kept * trained + (1 - kept) * trained / spec.factor


def _kept_by_turns(spec: RopeSpec, trained: Tensor) -> Tensor:
    """Unscaled share of each frequency, by its number of turns in the trained context (Llama 3.1)."""
    turns = spec.trained_positions * trained / (2 * math.pi)
    return ((turns - spec.slow_turns) / (spec.fast_turns - spec.slow_turns)).clamp(0, 1)


def _kept_by_index(spec: RopeSpec, head_size: int) -> Tensor:
    """Unscaled share of each frequency, by its place in the head (YaRN, arXiv 2309.00071, section 3.2)."""

    def place(turns: float) -> float:
        return head_size * math.log(spec.trained_positions / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    fast, slow = place(spec.fast_turns), place(spec.slow_turns)
    if spec.is_ramp_rounded:
        fast, slow = math.floor(fast), math.ceil(slow)
    fast, slow = max(fast, 0), min(slow, head_size - 1)
    width = slow - fast if slow != fast else 0.001  # a ramp of one place is a step
    places = torch.arange(head_size // 2, dtype=torch.float32)
    return 1 - ((places - fast) / width).clamp(0, 1)
