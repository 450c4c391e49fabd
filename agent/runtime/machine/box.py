"""Box: processors, memories, libraries. Imports no runtime."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from threading import RLock
from typing import TYPE_CHECKING

from agent.core.performance import DEVICE, HOST, tier_of
from experts.errors import BackendUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from agent.core.performance import ExecutorSpec

_METAL = RLock()


@dataclass(frozen=True, slots=True)
class MemorySize:
    """Bytes of one memory; ``available_bytes`` at the time of detection."""

    total_bytes: int
    available_bytes: int


@dataclass(frozen=True, slots=True)
class Box:
    """``processors``: fastest first; ``device``: None for unified memory.

    ``cpu``: its model, where ``model`` is a device's. ``drive``: holds the packed weights, if known. ``fault``: reason
    why an accelerator that is there does not serve.
    """

    name: str
    model: str
    processors: tuple[str, ...]
    cores: int
    host: MemorySize
    device: MemorySize | None
    versions: tuple[tuple[str, str], ...]
    cpu: str = ""
    drive: str = ""
    fault: str = ""

    @property
    def is_split(self) -> bool:
        return self.device is not None

    @property
    def pools(self) -> tuple[str, ...]:
        return (HOST, DEVICE) if self.is_split else (HOST,)

    def pool_of(self, processor: str) -> str:
        """Memory of a processor's experts. Raises BackendUnavailable for a processor that this box lacks."""
        if processor not in self.processors:
            raise BackendUnavailable(processor, f"this box has {', '.join(self.processors)}: name one of these")
        return DEVICE if self.is_split and processor != "cpu" else HOST

    def size_of(self, pool: str) -> MemorySize:
        return self.device if pool == DEVICE and self.device is not None else self.host

    def shared_by(self, processes: int) -> Box:
        """Part of one of these processes, of which each has its own device."""
        host = replace(self.host, available_bytes=self.host.available_bytes // processes)
        return replace(self, cores=max(self.cores // processes, 1), host=host)


def torch_device(processor: str) -> str:
    """Torch device of an executor. "integrated" is ``cpu:0``: the CPU for torch, but a separate device for bindings."""
    return {"cuda": "cuda", "mps": "mps", "integrated": "cpu:0"}.get(tier_of(processor), "cpu")


def exclusive(device: str) -> AbstractContextManager[object]:
    """Context of one thread's work on a device: Metal ends a process in which two threads issue work at once."""
    return _METAL if device == "mps" else nullcontext()


@contextmanager
def aside(device: str) -> Iterator[None]:
    """Context of a wait for other threads' work on a device: a thread with ``exclusive`` lends it to them."""
    is_lent = device == "mps" and _lent()
    try:
        yield
    finally:
        if is_lent:
            _METAL.acquire()


def _lent() -> bool:
    try:
        _METAL.release()
    except RuntimeError:  # this thread does not have it
        return False
    return True


def threads_per_executor(box: Box, executors: Sequence[ExecutorSpec]) -> int:
    """Threads of each CPU executor: its share of the cores that executors of devices, one thread each, leave; at least
    one."""
    on_cpu = sum(torch_device(spec.processor) == "cpu" for spec in executors)
    return max((box.cores - (len(executors) - on_cpu)) // on_cpu, 1) if on_cpu else box.cores


def products_bytes(memory: str, executors: Sequence[ExecutorSpec]) -> int:
    """Workspaces that cuBLAS takes in this memory for the stream of each executor, and keeps; and CUDA graphs."""
    on_cuda = [each for each in executors if each.pool == memory and torch_device(each.processor) == "cuda"]
    if not on_cuda:
        return 0
    from experts.backends.capabilities import capabilities_of  # loads torch

    return sum(capabilities_of(each.processor).products_bytes + each.graphs_bytes for each in on_cuda)
