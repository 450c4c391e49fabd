"""Matrices of four bits in safetensors files, as AWQ (arXiv 2306.00978) and GPTQ (arXiv 2210.17323) write them.

Guarantees: numbers are exactly (level - zero point) * scale, in fp32. A matrix is (in, out) in the file, and an int32
has eight neighbours: AWQ's of a row, GPTQ's of a column. A group of inputs shares scale and zero point; GPTQ lists the
group of each input, as ``desc_act`` gives them another order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from experts.errors import WeightsCorrupt
from experts.llm.files.config import Quantiser

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

LEVELS = ".qweight"
PARTS = (LEVELS, ".qzeros", ".scales", ".g_idx")
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # of an int32's levels


@dataclass(frozen=True, slots=True)
class FourBitMatrices:
    """Reads as safetensors' ``safe_open`` does. ``files``: of each stored tensor, opened."""

    expert: str
    quantiser: Quantiser
    zero_offset: int  # which GPTQ's first format leaves out
    files: Mapping[str, Any]

    def shapes(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """Names of the dequantised matrices, and (out, in)."""
        for name in self.files:
            if name.endswith(LEVELS):
                rows, columns = self.files[name].get_slice(name).get_shape()
                is_awq = self.quantiser is Quantiser.AWQ
                yield f"{name.removesuffix(LEVELS)}.weight", (columns * 8, rows) if is_awq else (columns, rows * 8)

    def get_tensor(self, name: str) -> Tensor:
        """Raises WeightsCorrupt for parts that do not fit each other."""
        if name in self.files:
            return self.files[name].get_tensor(name)
        found = (f"{name.removesuffix('.weight')}{part}" for part in PARTS)
        levels, zeros, scales, groups = (
            self.files[one].get_tensor(one) if one in self.files else None for one in found
        )
        if levels is None or zeros is None or scales is None:
            raise WeightsCorrupt(self.expert, f"{name} lacks one of {', '.join(PARTS[:3])}")
        is_awq = self.quantiser is Quantiser.AWQ
        matrix = _levels(levels, is_awq=is_awq) if is_awq else _levels(levels.t().contiguous()).t()
        middles = (_levels(zeros, is_awq=is_awq) + self.zero_offset) & 15
        inputs, count = len(matrix), len(scales)
        if groups is None and count and inputs % count == 0:
            groups = torch.arange(inputs) // (inputs // count)
        fits = middles.shape == scales.shape == (count, matrix.shape[1])
        if not fits or groups is None or len(groups) != inputs or not 0 <= groups.min() <= groups.max() < count:
            raise WeightsCorrupt(
                self.expert, f"{name} is {tuple(matrix.shape)}, which its scales and groups do not fit"
            )
        return ((matrix - middles[groups]).float() * scales[groups].float()).t().contiguous()

    def is_needless(self, name: str) -> bool:
        """True for a bias of zeros beside a matrix: GPTQ's tools write one where the model has none."""
        stem, _, kind = name.rpartition(".")
        return kind == "bias" and f"{stem}{LEVELS}" in self.files and not self.get_tensor(name).any()


def _levels(packed: Tensor, *, is_awq: bool = False) -> Tensor:
    """Eight numbers of each int32, along the last dimension."""
    levels = (packed.unsqueeze(-1) >> torch.arange(0, 32, 4, dtype=torch.int32)) & 15
    return (levels[..., AWQ_ORDER] if is_awq else levels).flatten(-2)
