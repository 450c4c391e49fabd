"""Batches of prepared images on the device that runs them.

Guarantees: images reach CUDA in one copy from pinned memory, without a wait, and are cast there. torch's pool of pinned
memory keeps one block for each executor in steady state, and reuses it only after the copy from it has ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from experts.devices.copies import mark

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def stacked(
    images: Sequence[Tensor],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> Tensor:
    """One tensor (n, 3, height, width) of images of the host."""
    if device.type != "cuda":  # Metal copies without a wait only from its own memory
        return torch.stack(list(images)).to(device=device, dtype=dtype, memory_format=memory_format)
    pinned = torch.empty((len(images), *images[0].shape), pin_memory=True)
    torch.stack(list(images), out=pinned)
    return pinned.to(device, non_blocking=True).to(dtype=dtype, memory_format=memory_format)


def await_writes(device: torch.device) -> None:
    """Wait for torch's CUDA stream, before another stream reads its results. The waiting thread sleeps."""
    if device.type == "cuda":
        mark(device)()
