"""Products with int8 and int4 matrices on a device, which reads the bytes that a CPU packed: one file serves both.

Numbers are made of bytes in registers and summed in fp32. Torch's own packed int4 product has another order of bytes
for each device, so it is not used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from experts.llm.kernels.four_bits import GROUP, LANES, quantise_to_four_bits
from experts.llm.kernels.trial import takes_kernel

if TYPE_CHECKING:
    from torch import Tensor


class Packed(Protocol):
    """``Int8Matrix`` or ``Int4Matrix``, single or stacked."""

    @property
    def values(self) -> Tensor: ...

    @property
    def scale(self) -> Tensor: ...


def grouped_product(rows: Tensor, matrices: Packed, ends: Tensor | None = None) -> Tensor:
    """Rows (count, in), each times its matrix of several stacked: (count, out), in the rows' dtype. No synchronisation.

    Rows lie in the order of their matrices; ``ends``: where each matrix's rows end, (matrices) int32, the last at
    ``count``. Without them: one matrix of all rows. Only for what ``takes_grouped_product`` takes.
    """
    from experts.llm.kernels.triton_kernels import multiply  # needs Triton

    return multiply(rows, matrices.values, matrices.scale, ends)


def takes_grouped_product(rows: Tensor, matrices: Packed) -> bool:
    """True if a device multiplies these. The first question of a dtype waits for the device."""
    return takes_kernel(rows, trial) and matrices.values.is_contiguous() and matrices.scale.is_contiguous()


def trial(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Results of each form on this device, and exact ones: of many rows and several matrices, and of few and one."""
    from experts.llm.kernels.triton_kernels import multiply

    generator = torch.Generator().manual_seed(0)
    count, many, few, out_size, in_size = 2, 40, 3, max(LANES), 18 * GROUP
    rows = torch.randn((count, many, in_size), generator=generator).to(dtype).float()
    ends = many * torch.arange(1, count + 1, dtype=torch.int32, device=device)
    matrices = torch.randn((count, out_size, in_size), generator=generator)
    values, scale = (64 * matrices).clamp(-127, 127).to(torch.int8), matrices.abs().amax(dim=-1) / 127
    forms = [(values, scale, torch.bmm(rows, values.float().transpose(1, 2)) * scale.unsqueeze(1))]
    for lanes in LANES:
        four_bits = quantise_to_four_bits(matrices, lanes)
        forms.append((four_bits.values, four_bits.scale, four_bits.stacked_product(rows)))
    given, pairs = rows.flatten(0, 1).to(device, dtype), []
    for values, scale, exact in forms:
        packed = values.to(device), scale.to(device)
        pairs.append((multiply(given, *packed, ends), exact.flatten(0, 1)))
        pairs.append((multiply(given[:few], packed[0][0], packed[1][0], None), exact[0, :few]))
    found, expected = zip(*pairs, strict=True)
    return torch.cat(found), torch.cat(expected)
