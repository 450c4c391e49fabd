"""What this box has: processors, memories, libraries; and the memories that experts are loaded into.

A box is split (an RTX: host memory caches in front of the device's own) or unified (CPU-only, Jetson, Apple: one
pool named "host", nothing is held twice). "emulated" is a split box without an accelerator: a bounded device arena in
host memory behind a real copy, whose executors run on the CPU; "integrated" a unified one, whose executors do so, too.

A Memory hands out Regions, each one contiguous run of bytes. A region that has a ``buffer`` is read into straight from
the SSD; every other one is filled by a copy from host memory, complete when ``fill`` returns. A device's regions are
pieces of one arena, taken as a whole at the start: what the device holds for experts never exceeds the ledger's budget.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Protocol

import psutil
import torch

from agent.core.performance import DEVICE, HOST
from agent.runtime.machine.arena import Arena
from agent.runtime.machine.cuda_runtime import cuda_runtime
from experts.errors import BackendUnavailable, MemoryExceeded
from experts.packed.weights import AlignedBuffer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from agent.runtime.machine.arena import Span
    from agent.runtime.machine.box import Box

ALLOCATOR_SLACK = 1.25  # arbitrary: blocks that are larger than what was asked for, of several executors
ALLOCATOR_LEAST_BYTES = 64 * 1024 * 1024  # and of cuBLAS, which takes up to 32 MiB for a stream at its first use
_CUDA_HOST_REGISTER_MAPPED = 2  # cudaHostRegisterMapped of the CUDA runtime


class Region(Protocol):
    @property
    def size_bytes(self) -> int:
        """As it was asked for."""

    @property
    def buffer(self) -> AlignedBuffer | None:
        """The host memory it is, None for one that only a copy can fill."""

    def tensor(self, device: str) -> Tensor:
        """The bytes as a one-dimensional uint8 tensor of a torch device that this memory serves."""

    def close(self) -> None:
        """Give the bytes back. Idempotent."""


class Memory(Protocol):
    """One memory of the box. Safe for several threads."""

    @property
    def pool(self) -> str: ...

    @property
    def views_hold_bytes(self) -> bool:
        """Do tensors over a closed region keep its memory taken?"""

    def allocate(self, size_bytes: int) -> Region:
        """A new region. Raises MemoryExceeded when the memory has no room."""

    def fill(self, region: Region, offset_bytes: int, source: Tensor) -> None:
        """Copy host bytes (uint8, one-dimensional) to this offset; they are there, and usable, on return."""


@dataclass(slots=True)
class HostRegion:
    """Host memory; ``device_view`` is the same memory as an integrated accelerator sees it."""

    buffer: AlignedBuffer
    is_registered: bool = False
    device_view: Tensor | None = None

    @property
    def size_bytes(self) -> int:
        return self.buffer.size_bytes

    def tensor(self, device: str) -> Tensor:
        if device in ("cpu", "cpu:0"):
            return self.buffer.tensor
        if self.device_view is None:
            raise BackendUnavailable(device, "it cannot see this host memory: run the expert on the CPU")
        return self.device_view

    def close(self) -> None:
        if self.is_registered:
            self.is_registered = False
            self.device_view = None
            _check_cuda(torch.cuda.cudart().cudaHostUnregister(self.buffer.tensor.data_ptr()), "cudaHostUnregister")
        self.buffer.close()


class HostMemory:
    """Page-aligned host memory. ``pinned``: registered with CUDA, so that copies to the device run at full speed.

    ``is_shared_with_cuda``: an integrated GPU (Jetson) runs from these very bytes.
    """

    pool = HOST
    views_hold_bytes = False

    def __init__(self, *, pinned: bool = False, is_shared_with_cuda: bool = False) -> None:
        self._pinned = pinned or is_shared_with_cuda
        self._is_shared_with_cuda = is_shared_with_cuda

    def allocate(self, size_bytes: int) -> HostRegion:
        """A new buffer, pinned where there is CUDA. Raises MemoryExceeded when the system refuses."""
        try:
            region = HostRegion(AlignedBuffer(size_bytes))
        except OSError as error:
            raise MemoryExceeded(HOST, size_bytes, psutil.virtual_memory().available) from error
        if self._pinned:
            address = region.buffer.tensor.data_ptr()
            flags = _CUDA_HOST_REGISTER_MAPPED if self._is_shared_with_cuda else 0
            _check_cuda(torch.cuda.cudart().cudaHostRegister(address, size_bytes, flags), "cudaHostRegister")
            region.is_registered = True
            if self._is_shared_with_cuda:
                region.device_view = _mapped_view(address, size_bytes)
        return region

    def fill(self, region: Region, offset_bytes: int, source: Tensor) -> None:
        region.tensor("cpu")[offset_bytes : offset_bytes + source.numel()].copy_(source)


@dataclass(slots=True, eq=False)
class ArenaRegion:
    """A piece of a device's arena. It has no buffer: nothing but a copy may fill it."""

    memory: ArenaMemory
    span: Span
    size_bytes: int
    buffer: None = None
    is_open: bool = True

    def tensor(self, device: str) -> Tensor:
        """The bytes on their device; they move when the region is slid, and tensors over them then show others."""
        return self.memory.shown(self, device)

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self.memory.give_back(self)


class ArenaMemory:
    """A device's memory for experts: one allocation, taken at once, cut up by an Arena of our own.

    So nothing outside holds what the ledger does not count: an allocator that serves workspaces and slots from one heap
    keeps blocks of sizes that do not come again. Where bytes are free but scattered, ``allocate`` refuses with as many
    free as were wanted; regions are then slid together, which SlotStore does, as it knows what is bound to them.
    """

    pool = DEVICE
    views_hold_bytes = False

    def __init__(self, capacity_bytes: int, device: str) -> None:
        self.capacity_bytes = capacity_bytes
        self._device = device
        self._bytes: Tensor | None = self._taken(capacity_bytes) if capacity_bytes else None
        self._arena = Arena(capacity_bytes)
        self._regions: dict[Span, ArenaRegion] = {}
        self._lock = Lock()

    @property
    def held_bytes(self) -> int:
        with self._lock:
            return self.capacity_bytes - self._arena.free_bytes

    def allocate(self, size_bytes: int) -> ArenaRegion:
        """A new piece of the arena. Raises MemoryExceeded, with ``free_bytes`` in one piece or in several."""
        with self._lock:
            span = self._arena.take(size_bytes)
            if span is None:
                raise MemoryExceeded(DEVICE, size_bytes, self._arena.free_bytes)
            region = self._regions[span] = ArenaRegion(self, span, size_bytes)
            return region

    def give_back(self, region: ArenaRegion) -> None:
        with self._lock:
            self._arena.give_back(region.span)
            del self._regions[region.span]

    def regions(self) -> tuple[ArenaRegion, ...]:
        with self._lock:
            return tuple(self._regions[span] for span in self._arena.taken)

    def slide(self, region: ArenaRegion) -> ArenaRegion:
        """Move a region and its bytes down to the one below: the region in its new place, itself where it stays.

        Nobody may use it meanwhile, nor the old one any more.
        """
        with self._lock:
            span = self._arena.slide(region.span)
            if span == region.span:
                return region
            del self._regions[region.span]
            moved = self._regions[span] = ArenaRegion(self, span, region.size_bytes)
        region.is_open = False
        step_bytes = region.span.offset_bytes - span.offset_bytes  # steps that long never overlap what they come from
        self._copy(
            (self._cut(span, start, step_bytes), self._cut(region.span, start, step_bytes))
            for start in range(0, span.size_bytes, step_bytes)
        )
        return moved

    def shown(self, region: ArenaRegion, device: str) -> Tensor:
        if device != self._device:
            raise BackendUnavailable(device, f"these bytes are on the {DEVICE}, which runs on {self._device}")
        if not region.is_open:
            raise ValueError("the region is closed, or was moved")
        return self._cut(region.span, 0, region.size_bytes)

    def fill(self, region: Region, offset_bytes: int, source: Tensor) -> None:
        self._copy([(region.tensor(self._device)[offset_bytes : offset_bytes + source.numel()], source)])

    def close(self) -> None:
        """Give the whole arena back; no region of it may be used any more."""
        self._bytes = None

    def _cut(self, span: Span, start: int, size_bytes: int) -> Tensor:
        if self._bytes is None:
            raise ValueError("the memory is closed")
        begin = span.offset_bytes + start
        return self._bytes[begin : min(begin + size_bytes, span.end_bytes)]

    def _taken(self, size_bytes: int) -> Tensor:
        """The bytes behind the arena. Raises MemoryExceeded."""
        raise NotImplementedError

    def _copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Targets and sources, one after another; the bytes are there on return."""
        for target, source in pairs:
            target.copy_(source)


class EmulatedMemory(ArenaMemory):
    """A bounded device arena in host memory; what comes in is really copied, and runs on the CPU."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes, "cpu")

    def _taken(self, size_bytes: int) -> Tensor:
        try:
            return AlignedBuffer(size_bytes).tensor
        except OSError as error:
            raise MemoryExceeded(DEVICE, size_bytes, psutil.virtual_memory().available) from error


@dataclass(slots=True)
class DeviceRegion:
    """Memory that an accelerator's own allocator hands out."""

    bytes_: Tensor | None
    size_bytes: int
    device: str
    buffer: None = None

    def tensor(self, device: str) -> Tensor:
        if device != self.device or self.bytes_ is None:
            raise BackendUnavailable(device, f"these bytes are on {self.device}")
        return self.bytes_

    def close(self) -> None:
        self.bytes_ = None


class CudaMemory(ArenaMemory):
    """An NVIDIA GPU's own memory, filled over a copy stream of its own, so that copies run beside the executors.

    ``workspace_bytes`` bounds what torch's allocator may take for batches beside the arena; None: nothing does. The
    bound is a fraction of the device (torch.cuda.set_per_process_memory_fraction), which counts what the allocator
    holds and not only what is in use: at the bound it gives its cached blocks back first, those of one executor for
    another's, and a batch that does not fit even then is out of memory, which makes the next ones smaller. Pools of
    its own (torch.cuda.MemPool) would keep the blocks of each executor apart, but bound nothing. The bound is the
    process's, one at a time, and ends with the ``close`` of the memory that set it, not with that of one for measuring
    beside it; a CUDA context and the code of kernels are not in it.
    """

    def __init__(self, capacity_bytes: int, workspace_bytes: int | None = None) -> None:
        self._stream = torch.cuda.Stream()
        self._sets_bound = workspace_bytes is not None
        if workspace_bytes is not None:
            total_bytes = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(allocator_fraction(capacity_bytes, workspace_bytes, total_bytes))
        super().__init__(capacity_bytes, "cuda")

    def close(self) -> None:
        """See ArenaMemory; and torch's allocator is free again, if it was bound for this memory."""
        super().close()
        torch.cuda.empty_cache()
        if self._sets_bound:
            torch.cuda.set_per_process_memory_fraction(1.0)

    def _taken(self, size_bytes: int) -> Tensor:
        try:
            with torch.cuda.stream(self._stream):
                return torch.empty(size_bytes, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError as error:
            raise MemoryExceeded(DEVICE, size_bytes, torch.cuda.mem_get_info()[0]) from error

    def _copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Over the copy stream, in order; waits for the event behind them only."""
        done = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            done.record(self._stream)
        done.synchronize()


def allocator_fraction(capacity_bytes: int, workspace_bytes: int, total_bytes: int) -> float:
    """The share of a device that torch's allocator may hold: the arena, and workspaces as it rounds them."""
    workspaces_bytes = workspace_bytes * ALLOCATOR_SLACK + ALLOCATOR_LEAST_BYTES
    return min((capacity_bytes + workspaces_bytes) / total_bytes, 1.0)


class MpsMemory:
    """Apple silicon's memory as Metal sees it. Unified, but torch has no tensor over foreign pages: it takes a copy."""

    pool = HOST
    views_hold_bytes = True

    def allocate(self, size_bytes: int) -> DeviceRegion:
        """A new region. Raises MemoryExceeded when Metal refuses."""
        try:
            return DeviceRegion(torch.empty(size_bytes, dtype=torch.uint8, device="mps"), size_bytes, "mps")
        except RuntimeError as error:
            raise MemoryExceeded(HOST, size_bytes, psutil.virtual_memory().available) from error

    def fill(self, region: Region, offset_bytes: int, source: Tensor) -> None:
        region.tensor("mps")[offset_bytes : offset_bytes + source.numel()].copy_(source)
        torch.mps.synchronize()


def memory_for(box: Box, pool: str, budget_bytes: int, workspace_bytes: int | None = None) -> Memory:
    """The memory behind one of a box's pools: ``budget_bytes`` for experts, which a device's arena takes at once.

    ``workspace_bytes``: what a CUDA device's batches may take beside them; None leaves that unbounded, for measuring.
    Raises MemoryExceeded where a device has not got so much.
    """
    if pool == HOST:
        if box.name == "mps":
            return MpsMemory()
        return HostMemory(pinned=box.name == "cuda", is_shared_with_cuda=box.name == "jetson")
    return CudaMemory(budget_bytes, workspace_bytes) if box.name == "cuda" else EmulatedMemory(budget_bytes)


def _check_cuda(status: object, call: str) -> None:
    """The CUDA runtime answers with a status; anything but 0 is a failure of the host's memory."""
    if int(status) != 0:  # type: ignore[call-overload]
        raise BackendUnavailable("cuda", f"{call} failed with status {status}: raise the limit of locked memory")


@dataclass(frozen=True, slots=True)
class _MappedBytes:
    """Tells torch of device memory that somebody else owns."""

    __cuda_array_interface__: dict[str, object]


def _mapped_view(address: int, size_bytes: int) -> Tensor:
    """Host memory registered as mapped, as the integrated GPU sees it."""
    runtime = cuda_runtime()
    pointer = ctypes.c_void_p()
    _check_cuda(
        runtime.cudaHostGetDevicePointer(ctypes.byref(pointer), ctypes.c_void_p(address), 0), "cudaHostGetDevicePointer"
    )
    described = {"shape": (size_bytes,), "typestr": "|u1", "data": (pointer.value, False), "version": 3}
    return torch.as_tensor(_MappedBytes(described), device="cuda")
