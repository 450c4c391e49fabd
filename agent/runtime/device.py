"""What this box has: processors, memories, libraries; and the memories that experts are loaded into.

A box is split (an RTX: host memory caches in front of the device's own) or unified (CPU-only, Jetson, Apple: one
pool named "host", nothing is held twice). "emulated" is a split box without an accelerator: a bounded device arena in
host memory behind a real copy, whose executors run on the CPU.

A Memory hands out Regions, each one contiguous run of bytes. A region that has a ``buffer`` is read into straight from
the SSD; every other one is filled by a copy from host memory, complete when ``fill`` returns.
"""

from __future__ import annotations

import ctypes
import os
import platform
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Protocol

import psutil
import torch

from agent.runtime.cuda_runtime import cuda_runtime
from experts.errors import BackendUnavailable, MemoryExceeded
from experts.weights import AlignedBuffer

if TYPE_CHECKING:
    from torch import Tensor

HOST = "host"
DEVICE = "device"
LIBRARIES = ("torch", "torchvision", "ultralytics", "onnxruntime")
PREFERENCES = ("auto", "cpu", "cuda", "mps", "emulated")
EMULATED_FRACTION = 0.25  # arbitrary: of the host's available memory, where no size is configured
_CUDA_HOST_REGISTER_MAPPED = 2  # cudaHostRegisterMapped of the CUDA runtime


@dataclass(frozen=True, slots=True)
class MemorySize:
    """One memory's bytes: all of it, and what was free when the box was looked at."""

    total_bytes: int
    available_bytes: int


@dataclass(frozen=True, slots=True)
class Box:
    """What this box has. ``processors`` come fastest first; ``device`` is None where memory is unified."""

    name: str
    model: str
    processors: tuple[str, ...]
    cores: int
    host: MemorySize
    device: MemorySize | None
    versions: tuple[tuple[str, str], ...]

    @property
    def is_split(self) -> bool:
        """Has the accelerator memory of its own?"""
        return self.device is not None

    @property
    def pools(self) -> tuple[str, ...]:
        """The names of its memories, nearest to the SSD first."""
        return (HOST, DEVICE) if self.is_split else (HOST,)

    def pool_of(self, processor: str) -> str:
        """The memory that a processor runs from. Raises BackendUnavailable for one that this box lacks."""
        if processor not in self.processors:
            raise BackendUnavailable(processor, f"this box has {', '.join(self.processors)}: name one of these")
        return DEVICE if self.is_split and processor != "cpu" else HOST

    def size_of(self, pool: str) -> MemorySize:
        """How large a memory is."""
        return self.device if pool == DEVICE and self.device is not None else self.host


def torch_device(processor: str) -> str:
    """The torch device that an executor of this processor runs on."""
    return processor if processor in {"cuda", "mps"} else "cpu"


class Region(Protocol):
    """A run of bytes in one memory."""

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
    def pool(self) -> str:
        """Its name."""

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
        """As it was asked for."""
        return self.buffer.size_bytes

    def tensor(self, device: str) -> Tensor:
        """The bytes, as the CPU or the integrated accelerator sees them."""
        if device == "cpu":
            return self.buffer.tensor
        if self.device_view is None:
            raise BackendUnavailable(device, "it cannot see this host memory: run the expert on the CPU")
        return self.device_view

    def close(self) -> None:
        """Unpin, and give the pages back."""
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
        """A plain copy within the host."""
        region.tensor("cpu")[offset_bytes : offset_bytes + source.numel()].copy_(source)


@dataclass(slots=True)
class ArenaRegion:
    """A piece of the emulated device. It hides its buffer: nothing but a copy may fill it."""

    memory: EmulatedMemory
    bytes_: AlignedBuffer
    buffer: None = None
    is_open: bool = True

    @property
    def size_bytes(self) -> int:
        """As it was asked for."""
        return self.bytes_.size_bytes

    def tensor(self, device: str) -> Tensor:
        """The bytes; the emulated device runs on the CPU."""
        if device != "cpu":
            raise BackendUnavailable(device, "the emulated device runs on the CPU")
        return self.bytes_.tensor

    def close(self) -> None:
        """Back to the arena."""
        if self.is_open:
            self.is_open = False
            self.bytes_.close()
            self.memory.give_back(self.size_bytes)


class EmulatedMemory:
    """A bounded device arena in host memory; what comes in is really copied."""

    pool = DEVICE
    views_hold_bytes = False

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.held_bytes = 0
        self._lock = Lock()

    def allocate(self, size_bytes: int) -> ArenaRegion:
        """A new piece of the arena. Raises MemoryExceeded beyond its capacity."""
        with self._lock:
            free_bytes = self.capacity_bytes - self.held_bytes
            if size_bytes > free_bytes:
                raise MemoryExceeded(DEVICE, size_bytes, free_bytes)
            self.held_bytes += size_bytes
        return ArenaRegion(self, AlignedBuffer(size_bytes))

    def give_back(self, size_bytes: int) -> None:
        """A region was closed."""
        with self._lock:
            self.held_bytes -= size_bytes

    def fill(self, region: Region, offset_bytes: int, source: Tensor) -> None:
        """The copy that a real device would need."""
        region.tensor("cpu")[offset_bytes : offset_bytes + source.numel()].copy_(source)


@dataclass(slots=True)
class DeviceRegion:
    """Memory of an accelerator."""

    bytes_: Tensor | None
    size_bytes: int
    device: str
    buffer: None = None

    def tensor(self, device: str) -> Tensor:
        """The bytes on their device."""
        if device != self.device or self.bytes_ is None:
            raise BackendUnavailable(device, f"these bytes are on {self.device}")
        return self.bytes_

    def close(self) -> None:
        """Back to the device's allocator, which serves workspaces and other experts from it."""
        self.bytes_ = None


class CudaMemory:
    """An NVIDIA GPU's own memory, filled over a copy stream of its own, so that copies run beside the executors.

    Regions are allocated under that stream: the allocator then never hands out a block that a kernel of an
    executor's stream still writes to.
    """

    pool = DEVICE
    views_hold_bytes = True

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    def allocate(self, size_bytes: int) -> DeviceRegion:
        """A new region. Raises MemoryExceeded when the device is full."""
        try:
            with torch.cuda.stream(self._stream):
                return DeviceRegion(torch.empty(size_bytes, dtype=torch.uint8, device="cuda"), size_bytes, "cuda")
        except torch.OutOfMemoryError as error:
            raise MemoryExceeded(DEVICE, size_bytes, torch.cuda.mem_get_info()[0]) from error

    def fill(self, region: Region, offset_bytes: int, source: Tensor) -> None:
        """Copy from (pinned) host memory; waits for this copy's event only."""
        done = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            region.tensor("cuda")[offset_bytes : offset_bytes + source.numel()].copy_(source, non_blocking=True)
            done.record(self._stream)
        done.synchronize()


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
        """The copy into Metal's memory."""
        region.tensor("mps")[offset_bytes : offset_bytes + source.numel()].copy_(source)
        torch.mps.synchronize()


def memory_for(box: Box, pool: str, budget_bytes: int) -> Memory:
    """The memory behind one of a box's pools. ``budget_bytes`` bounds an emulated arena; others bound themselves."""
    if pool == HOST:
        if box.name == "mps":
            return MpsMemory()
        return HostMemory(pinned=box.name == "cuda", is_shared_with_cuda=box.name == "jetson")
    return CudaMemory() if box.name == "cuda" else EmulatedMemory(budget_bytes)


def detect(preference: str = "auto") -> Box:
    """What this box has, seen as ``preference`` asks: auto, cpu, cuda, mps or emulated.

    Raises BackendUnavailable, saying what to do, for a device that is asked for and not there.
    """
    if preference not in PREFERENCES:
        raise BackendUnavailable(preference, f"no such device: choose one of {', '.join(PREFERENCES)}")
    if preference == "cuda" or (preference == "auto" and torch.cuda.is_available()):
        return _cuda_box()
    if preference == "mps" or (preference == "auto" and torch.backends.mps.is_available()):
        return _mps_box()
    if preference == "emulated":
        host = host_memory()
        size = int(host.available_bytes * EMULATED_FRACTION)
        return _box("emulated", _cpu_model(), ("emulated", "cpu"), host, MemorySize(size, size))
    return _box("cpu", _cpu_model(), ("cpu",), host_memory(), None)


def host_memory(groups: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> MemorySize:
    """The host's memory; inside a control group (a systemd unit, a container), no more than its limits."""
    memory = psutil.virtual_memory()
    total_bytes, available_bytes = int(memory.total), int(memory.available)
    for group in _own_groups(groups, membership):
        limit_bytes = _read_bytes(group / "memory.max")
        if limit_bytes is None:
            continue
        used_bytes = (_read_bytes(group / "memory.current") or 0) - _reclaimable_bytes(group / "memory.stat")
        total_bytes = min(total_bytes, limit_bytes)
        available_bytes = min(available_bytes, max(limit_bytes - used_bytes, 0))
    return MemorySize(total_bytes, available_bytes)


def _own_groups(groups: Path, membership: Path) -> list[Path]:
    """The control group of this process (version 2) and those around it, up to the root of the tree."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), None)
    if own is None:
        return []
    inner = Path(own)
    return [groups / inner, *(groups / parent for parent in inner.parents)]


def _read_bytes(file: Path) -> int | None:
    """One number of bytes; None where the file is absent or says "max"."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _reclaimable_bytes(statistics: Path) -> int:
    """Page cache that the kernel drops before it refuses memory."""
    try:
        lines = statistics.read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))


def _cuda_box() -> Box:
    if not torch.cuda.is_available():
        raise BackendUnavailable(
            "cuda", "torch sees no CUDA device: check nvidia-smi and that torch is a CUDA build, or set device: cpu"
        )
    properties = torch.cuda.get_device_properties(0)
    if properties.is_integrated or Path("/etc/nv_tegra_release").exists():
        return _box("jetson", properties.name, ("cuda", "cpu"), host_memory(), None)
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return _box("cuda", properties.name, ("cuda", "cpu"), host_memory(), MemorySize(total_bytes, free_bytes))


def _mps_box() -> Box:
    """Apple silicon. No CPU executors: torch would have to hold their experts a second time."""
    if not torch.backends.mps.is_available():
        raise BackendUnavailable("mps", "torch sees no Apple GPU: set device: cpu")
    return _box("mps", _cpu_model(), ("mps",), host_memory(), None)


def _box(name: str, model: str, processors: tuple[str, ...], host: MemorySize, device: MemorySize | None) -> Box:
    return Box(name, model, processors, _cores(), host, device, _versions())


def _cores() -> int:
    """Processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_model() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _versions() -> tuple[tuple[str, str], ...]:
    found = [("python", platform.python_version())]
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            found.append((name, version(name)))
    return tuple(found)


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
