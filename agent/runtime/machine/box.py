"""What a box is, for all who need no more than to know it: processors, memories, libraries. No runtime is imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from agent.core.performance import DEVICE, HOST
from experts.errors import BackendUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent.core.performance import ExecutorSpec


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
        return self.device if pool == DEVICE and self.device is not None else self.host


def torch_device(processor: str) -> str:
    """The torch device that an executor of this processor runs on.

    What is integrated is emulated: to torch ``cpu:0`` is the CPU, to whoever binds copies it is a device beside it.
    """
    return {"cuda": "cuda", "mps": "mps", "integrated": "cpu:0"}.get(processor, "cpu")


def threads_per_executor(box: Box, executors: Sequence[ExecutorSpec]) -> int:
    """Each CPU executor's share of the cores, at least one; one that drives a device needs a single core."""
    on_cpu = sum(torch_device(spec.processor) == "cpu" for spec in executors)
    return max(box.cores // max(on_cpu, 1), 1)
