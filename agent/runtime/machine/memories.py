"""Memories that experts are loaded into. A Memory is thread-safe, and allocates Regions: contiguous ranges of bytes.

The SSD is read directly into a region with a ``buffer``. Other regions are parts of one arena, allocated at the start,
and filled by copies from host memory: so a device never exceeds the ledger's budget. "emulated" is a split box without
an accelerator: its device is an arena in host memory. Metal's arena is untested.

Both kinds have one contract. Region: ``size_bytes`` as requested; ``tensor(device)``: one-dimensional uint8 over the
bytes, for a torch device that the memory serves; ``close``, idempotent. Memory: ``allocate`` raises MemoryExceeded;
``fill`` copies host bytes (uint8, one-dimensional) to an offset of a region, usable on return.
"""

from __future__ import annotations

import ctypes
import re
from bisect import insort
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, TypeAlias

import psutil
import torch

from agent.core.performance import DEVICE, HOST
from agent.runtime.machine.box import exclusive
from agent.runtime.machine.device_loss import DeviceContext, names_a_loss
from experts.errors import BackendUnavailable, MemoryExceeded
from experts.packed.weights import AlignedBuffer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

    from agent.runtime.machine.box import Box

ALLOCATOR_SLACK = 1.25  # arbitrary: the allocator rounds blocks up, for each executor
ALLOCATOR_LEAST_BYTES = 64 * 1024 * 1024  # arbitrary: it takes segments of 2 and 20 MiB for small tensors
_CUDA_ERROR_MEMORY_ALLOCATION = 2  # cudaErrorMemoryAllocation of the CUDA runtime
_CUDA_HOST_REGISTER_MAPPED = 2  # cudaHostRegisterMapped of the CUDA runtime
SCRATCH_BYTES = 8 * 1024 * 1024  # of slides, whose copies are at least as long
ALIGNMENT_BYTES = 4096  # a page; kernels of devices need 512 at most


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Range of bytes of an arena, taken or free."""

    offset_bytes: int
    size_bytes: int

    @property
    def end_bytes(self) -> int:
        return self.offset_bytes + self.size_bytes


class Arena:
    """Fixed range of bytes, divided into spans: offsets and sizes only, for one thread at a time.

    Spans never overlap, and start at multiples of ``ALIGNMENT_BYTES``. After all spans slide down, the free bytes form
    one gap: a ledger may count bytes only. Size classes would need no sliding, but each class would keep its peak size
    when the mix of experts changes.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._taken: list[Span] = []  # by offset

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - sum(span.size_bytes for span in self._taken)

    @property
    def taken(self) -> tuple[Span, ...]:
        return tuple(self._taken)

    def take(self, size_bytes: int) -> Span | None:
        """Span from the smallest sufficient gap, its size rounded up to the alignment; None without such a gap."""
        size_bytes = -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        fitting = [gap for gap in self._gaps() if gap.size_bytes >= size_bytes]
        if not fitting:
            return None
        best = min(fitting, key=lambda gap: (gap.size_bytes, gap.offset_bytes))
        span = Span(best.offset_bytes, size_bytes)
        insort(self._taken, span)
        return span

    def give_back(self, span: Span) -> None:
        self._taken.remove(span)

    def slide(self, span: Span) -> Span:
        """Move a span down to the end of the span below; the caller moves the bytes."""
        place = self._taken.index(span)
        offset_bytes = self._taken[place - 1].end_bytes if place else 0
        self._taken[place] = Span(offset_bytes, span.size_bytes)
        return self._taken[place]

    def _gaps(self) -> Iterator[Span]:
        start = 0
        for span in (*self._taken, Span(self.capacity_bytes, 0)):
            if span.offset_bytes > start:
                yield Span(start, span.offset_bytes - start)
            start = span.end_bytes


@dataclass(slots=True)
class HostRegion:
    """``pinned_by``: the memory that registered its pages. ``device_view``: as an integrated accelerator sees it."""

    buffer: AlignedBuffer
    size_bytes: int
    pinned_by: HostMemory | None = None
    device_view: Tensor | None = None

    def tensor(self, device: str) -> Tensor:
        if device in ("cpu", "cpu:0"):
            return self.buffer.tensor[: self.size_bytes]
        if self.device_view is None:
            raise BackendUnavailable(device, "it cannot see this host memory: run the expert on the CPU")
        return self.device_view

    def close(self) -> None:
        memory, self.pinned_by, self.device_view = self.pinned_by, None, None
        if memory is not None:
            memory.unpin(self.buffer)
        else:
            self.buffer.close()


class HostMemory:
    """Page-aligned host memory. ``pinned``: registered with CUDA, so that copies to the device run at full speed.

    ``is_shared_with_cuda``: an integrated GPU (Jetson) runs from these bytes. After a loss of ``context`` new regions
    are pageable. Pages registered before stay pinned until the process ends, and later regions use them first.
    """

    pool = HOST

    def __init__(
        self, *, pinned: bool = False, is_shared_with_cuda: bool = False, context: DeviceContext | None = None
    ) -> None:
        self._pinned = pinned or is_shared_with_cuda
        self._is_shared_with_cuda = is_shared_with_cuda
        self._context = context or DeviceContext()
        self._left: list[AlignedBuffer] = []  # pinned by the lost context
        self._lock = Lock()  # guards ``_left``

    def allocate(self, size_bytes: int) -> HostRegion:
        """Raises MemoryExceeded, also if CUDA cannot register so much, and BackendUnavailable."""
        with self._lock:
            fitting = [each for each in self._left if each.size_bytes >= size_bytes]
            if fitting:
                buffer = min(fitting, key=lambda each: each.size_bytes)
                self._left.remove(buffer)
                return HostRegion(buffer, size_bytes, pinned_by=self)
        region = HostRegion(_host_buffer(HOST, size_bytes), size_bytes)
        if self._pinned:
            try:
                self._register(region)
            except BaseException:
                region.close()
                raise
        return region

    def _register(self, region: HostRegion) -> None:
        address, size_bytes = region.buffer.tensor.data_ptr(), region.size_bytes
        flags = _CUDA_HOST_REGISTER_MAPPED if self._is_shared_with_cuda else 0
        if _is_done(self._context, "cudaHostRegister", address, size_bytes, flags):
            region.pinned_by = self
            if self._is_shared_with_cuda:
                region.device_view = _mapped_view(address, size_bytes)

    def unpin(self, buffer: AlignedBuffer) -> None:
        """Free a region's pages, or keep them for later regions if the context is lost."""
        try:
            is_free = _is_done(self._context, "cudaHostUnregister", buffer.tensor.data_ptr())
        except BackendUnavailable:
            buffer.close()
            raise
        if is_free:
            buffer.close()
        else:
            with self._lock:
                self._left.append(buffer)

    def fill(self, region: Region, offset_bytes: int, source: Tensor) -> None:
        region.tensor("cpu")[offset_bytes : offset_bytes + source.numel()].copy_(source)


@dataclass(slots=True, eq=False)
class ArenaRegion:
    """Part of a device's arena, filled by copies."""

    memory: ArenaMemory
    span: Span
    size_bytes: int
    buffer: None = None
    is_open: bool = True

    def tensor(self, device: str) -> Tensor:
        """Tensor over the bytes; invalid after a slide."""
        return self.memory.shown(self, device)

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self.memory.give_back(self)


class ArenaMemory:
    """Memory of a device for experts: one allocation, divided by an Arena.

    ``allocate`` fails if the free bytes suffice but are scattered. SlotStore, which has the bindings, then slides
    regions together.
    """

    pool = DEVICE

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
        """Allocate a part of the arena. Raises MemoryExceeded; the error's ``free_bytes`` may be scattered."""
        with self._lock:
            span = self._arena.take(size_bytes)
            if span is None:
                raise MemoryExceeded(self.pool, size_bytes, self._arena.free_bytes)
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
        """Move a region and its bytes down. Returns the moved region, or ``region`` if it stays.

        The region must not be in use; after a move the old object must not be used. After an error ``region`` is at the
        new place, with undefined bytes.
        """
        with self._lock:
            span = self._arena.slide(region.span)
            if span == region.span:
                return region
            del self._regions[region.span]
            moved = self._regions[span] = ArenaRegion(self, span, region.size_bytes)
        region.is_open = False
        step_bytes = region.span.offset_bytes - span.offset_bytes  # copies of that length never overlap their source
        try:
            if step_bytes >= min(SCRATCH_BYTES, span.size_bytes):
                self._copy(self._pairs(region.span, span, step_bytes))
            else:
                self._copy(self._pairs_by(self._taken(SCRATCH_BYTES), region.span, span))
        except BaseException:
            with self._lock:
                self._regions[span], region.span, region.is_open = region, span, True
            raise
        return moved

    def _pairs(self, source: Span, target: Span, size_bytes: int) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, target.size_bytes, size_bytes):
            yield self._cut(target, start, size_bytes), self._cut(source, start, size_bytes)

    def _pairs_by(self, scratch: Tensor, source: Span, target: Span) -> Iterator[tuple[Tensor, Tensor]]:
        """Copies by way of a scratch memory, for a small step: few long copies instead of many short ones."""
        for to, of in self._pairs(source, target, scratch.numel()):
            kept = scratch[: of.numel()]
            yield kept, of
            yield to, kept

    def shown(self, region: ArenaRegion, device: str) -> Tensor:
        if device != self._device:
            raise BackendUnavailable(device, f"these bytes are for {self._device}")
        if not region.is_open:
            raise ValueError("the region is closed, or was moved")
        return self._cut(region.span, 0, region.size_bytes)

    def fill(self, region: Region, offset_bytes: int, source: Tensor) -> None:
        self._copy([(region.tensor(self._device)[offset_bytes : offset_bytes + source.numel()], source)])

    def close(self) -> None:
        self._bytes = None

    def _cut(self, span: Span, start: int, size_bytes: int) -> Tensor:
        if self._bytes is None:
            raise ValueError("the memory is closed")
        begin = span.offset_bytes + start
        return self._bytes[begin : min(begin + size_bytes, span.end_bytes)]

    def _taken(self, size_bytes: int) -> Tensor:
        """Allocate the bytes of the arena. Raises MemoryExceeded."""
        raise NotImplementedError

    def _copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Copy (target, source) pairs in order; complete on return."""
        for target, source in pairs:
            target.copy_(source)


class EmulatedMemory(ArenaMemory):
    """Bounded device arena in host memory, filled by real copies; its experts run on the CPU."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes, "cpu")

    def _taken(self, size_bytes: int) -> Tensor:
        return _host_buffer(DEVICE, size_bytes).tensor


class CudaMemory(ArenaMemory):
    """Memory of an NVIDIA GPU, filled over a separate copy stream, beside the executors.

    ``workspace_bytes`` bounds torch's allocator for batches beside the arena and ``beside_bytes``, see ``memory_for``;
    None: no bound. A batch that does not fit is out of memory. torch.cuda.MemPool has no bound. The bound belongs to
    the process, and ends with ``close``. CUDA contexts and code of kernels are outside it.
    """

    def __init__(
        self,
        capacity_bytes: int,
        workspace_bytes: int | None = None,
        beside_bytes: int = 0,
        context: DeviceContext | None = None,
    ) -> None:
        self._context = context or DeviceContext()
        self._stream = torch.cuda.Stream()
        self._sets_bound = workspace_bytes is not None
        if workspace_bytes is not None:
            _bound_allocator(capacity_bytes + beside_bytes, workspace_bytes)
        super().__init__(capacity_bytes, "cuda")

    def close(self) -> None:
        super().close()
        if self._context.is_lost:
            return
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
        done = torch.cuda.Event(blocking=True)  # a usual one keeps a core busy while it waits
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            done.record(self._stream)
        done.synchronize()


def _bound_allocator(held_bytes: int, workspace_bytes: int) -> None:
    """Bound torch's allocator on this process's device, of which a control group may leave the host less."""
    total_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction(allocator_fraction(held_bytes, workspace_bytes, total_bytes))


def allocator_fraction(held_bytes: int, workspace_bytes: int, total_bytes: int) -> float:
    """Fraction of a device for torch's allocator: what is held there, and workspaces with the allocator's rounding."""
    workspaces_bytes = workspace_bytes * ALLOCATOR_SLACK + ALLOCATOR_LEAST_BYTES + SCRATCH_BYTES
    return min((held_bytes + workspaces_bytes) / total_bytes, 1.0)


class MpsMemory(ArenaMemory):
    """Apple silicon's memory for Metal. Unified, but filled by copies: torch cannot wrap foreign pages."""

    pool = HOST

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes, "mps")

    def _taken(self, size_bytes: int) -> Tensor:
        try:
            with exclusive("mps"):
                return torch.empty(size_bytes, dtype=torch.uint8, device="mps")
        except RuntimeError as error:
            raise MemoryExceeded(HOST, size_bytes, psutil.virtual_memory().available) from error

    def _copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        with exclusive("mps"):
            super()._copy(pairs)
            torch.mps.synchronize()


Region: TypeAlias = HostRegion | ArenaRegion
Memory: TypeAlias = HostMemory | ArenaMemory


def memory_for(
    box: Box,
    pool: str,
    budget_bytes: int,
    workspace_bytes: int | None = None,
    beside_bytes: int = 0,
    context: DeviceContext | None = None,
) -> Memory:
    """Memory of a pool, with ``budget_bytes`` for experts; a device's arena allocates them at once.

    ``workspace_bytes``: bound for batches of a CUDA device, beside ``beside_bytes`` for its arena of keys and values
    and for its libraries; None: no bound, for measuring. Raises MemoryExceeded.
    """
    if pool == HOST:
        if box.name == "mps":
            return MpsMemory(budget_bytes)
        if box.name == "jetson" and workspace_bytes is not None:
            _bound_allocator(beside_bytes, workspace_bytes)
        return HostMemory(pinned=box.name == "cuda", is_shared_with_cuda=box.name == "jetson", context=context)
    if box.name == "cuda":
        return CudaMemory(budget_bytes, workspace_bytes, beside_bytes, context)
    return EmulatedMemory(budget_bytes)


def _host_buffer(pool: str, size_bytes: int) -> AlignedBuffer:
    try:
        return AlignedBuffer(size_bytes)
    except OSError as error:
        raise MemoryExceeded(pool, size_bytes, psutil.virtual_memory().available) from error


def _is_done(context: DeviceContext, call: str, address: int, *size_and_flags: int) -> bool:
    """Call CUDA's runtime; False if the context is lost, before or by this call.

    Raises MemoryExceeded for a shortage, BackendUnavailable for any other failure. torch would raise the status again
    at its next call in this thread, so it is cleared.
    """
    if context.is_lost:
        return False
    runtime = torch.cuda.cudart()
    status = getattr(runtime, call)(address, *size_and_flags)
    if int(status) == 0:
        return True
    with suppress(BackendUnavailable):
        cuda_runtime().cudaGetLastError()
    if size_and_flags and int(status) == _CUDA_ERROR_MEMORY_ALLOCATION:
        raise MemoryExceeded(HOST, size_and_flags[0], psutil.virtual_memory().available)
    failure = BackendUnavailable("cuda", f"CUDA error: {call}: {runtime.cudaGetErrorString(status)}")
    if not names_a_loss(failure):
        raise failure
    context.lose()
    return False


@dataclass(frozen=True, slots=True)
class _MappedBytes:
    __cuda_array_interface__: dict[str, object]


def _mapped_view(address: int, size_bytes: int) -> Tensor:
    """View of mapped host memory for the integrated GPU."""
    pointer = ctypes.c_void_p()
    status = cuda_runtime().cudaHostGetDevicePointer(ctypes.byref(pointer), ctypes.c_void_p(address), 0)
    if status != 0:
        raise BackendUnavailable("cuda", f"cudaHostGetDevicePointer failed with status {status}: see to its driver")
    described = {"shape": (size_bytes,), "typestr": "|u1", "data": (pointer.value, False), "version": 3}
    return torch.as_tensor(_MappedBytes(described), device="cuda")


def cuda_runtime() -> ctypes.CDLL:
    """CUDA runtime library of torch, for calls without a binding in torch. Raises BackendUnavailable."""
    major = (torch.version.cuda or "").partition(".")[0]
    with suppress(OSError):
        loaded = re.search(rf"/\S*/libcudart\S*\.so\.{major}\S*", Path("/proc/self/maps").read_text())
        if loaded is not None:
            return ctypes.CDLL(loaded[0])
    raise BackendUnavailable("cuda", f"torch has loaded no CUDA {major} runtime: reinstall torch, or set device: cpu")
