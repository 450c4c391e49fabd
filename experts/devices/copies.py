"""Copies between host and device: an iteration's numbers go up in one, its results come down in one.

A copy from pageable memory, ``torch.tensor(..., device=...)``, ``.tolist()`` and ``.item()`` each wait until the device
has done all its work. So whatever an iteration needs on the device is added to its ``Upload`` before the pass, and all
that its texts need of the results is added to its ``Download``. Guarantees: ``copied_up`` does not wait on CUDA, and
``copied_down`` is the only wait of an iteration, and of each layer that loads its moe_experts (``tiers.offload``). On a
CPU both hand the same tensors on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor


class Upload:
    """Tensors of the host that a device gets in one copy, made when the first of them is read.

    Those that are added later go in a further copy.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._parts: list[Tensor] = []
        self._there = 0  # parts that are on the device

    def add(self, part: Tensor) -> int:
        """Number by which the part is read."""
        self._parts.append(part)
        return len(self._parts) - 1

    def __getitem__(self, number: int) -> Tensor:
        if number >= self._there and self.device.type != "cpu":
            self._parts[self._there :] = copied_up(self._parts[self._there :], self.device)
            self._there = len(self._parts)
        return self._parts[number]


class Download:
    """Tensors of a device that the host gets in one copy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._parts: list[Tensor] = []

    def add(self, part: Tensor) -> int:
        """Number by which the part is read, after ``fetch``."""
        self._parts.append(part)
        return len(self._parts) - 1

    def fetch(self) -> None:
        """Wait for the device, also for no parts: the iteration is over then."""
        if self._device.type != "cpu":
            self._parts = copied_down(self._parts, self._device)

    def __getitem__(self, number: int) -> Tensor:
        return self._parts[number]


def copied_up(parts: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The host's tensors on a device, as views of one buffer."""
    order, is_cuda = _widest_first(parts), device.type == "cuda"
    host = torch.empty(sum(map(_bytes, parts)), dtype=torch.uint8, pin_memory=is_cuda)
    torch.cat([_as_bytes(parts[n]) for n in order], out=host)
    return _parted(host.to(device, non_blocking=is_cuda), parts, order)


def copied_down(parts: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """A device's tensors on the host, as views of one buffer, once the device has done all its work."""
    order, is_cuda = _widest_first(parts), device.type == "cuda"
    host = torch.empty(sum(map(_bytes, parts)), dtype=torch.uint8, pin_memory=is_cuda)
    if parts:
        host.copy_(torch.cat([_as_bytes(parts[n]) for n in order]), non_blocking=is_cuda)
    if is_cuda:
        mark(device)()
    elif device.type == "mps":
        torch.mps.synchronize()
    return _parted(host, parts, order)


def mark(device: torch.device) -> Callable[[], None]:
    """Wait for the work that this thread has given to a CUDA device so far; any thread may call it."""
    with torch.cuda.device(device):
        done = torch.cuda.Event(blocking=True)  # a usual one keeps a core busy while it waits
        done.record()
    wait: Callable[[], None] = done.synchronize
    return wait


def _bytes(part: Tensor) -> int:
    size: int = part.numel() * part.itemsize
    return size


def _as_bytes(part: Tensor) -> Tensor:
    return part.reshape(-1).view(torch.uint8)


def _widest_first(parts: Sequence[Tensor]) -> list[int]:
    """So each part of the buffer begins at a multiple of its numbers' width."""
    return sorted(range(len(parts)), key=lambda n: -parts[n].itemsize)


def _parted(buffer: Tensor, parts: Sequence[Tensor], order: Sequence[int]) -> list[Tensor]:
    pieces = buffer.split([_bytes(parts[n]) for n in order])
    found = {n: piece.view(parts[n].dtype).view(parts[n].shape) for n, piece in zip(order, pieces, strict=True)}
    return [found[n] for n in range(len(parts))]
