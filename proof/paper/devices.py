"""The devices of the paper's evaluation, read from ``configs/devices``: every constant names its source.

Guarantees: a constant is a mapping of its value, its source and its derivation. A constant without one of them, an
unknown key, or a value that no box can have is refused with file, line and key.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from agent.core.performance import DEVICE, HOST
from experts.document import read_document

FOLDER = Path(__file__).parents[2] / "configs" / "devices"
PAPER_DEVICES = ("numa-rtx3080ti.yaml", "uma-apple-m2.yaml")
GPU, CPU = "gpu", "cpu"  # processors
Value = TypeVar("Value")
Text = Annotated[str, Field(min_length=1, strict=True)]


class DeviceSection(BaseModel):
    """Any mapping of a device file: frozen, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Constant(DeviceSection, Generic[Value]):
    """One figure, its source, its derivation, and the figure that it was fitted to, if any."""

    value: Value = Field(description="the figure, in the unit of its key")
    source: Text = Field(description='section or sentence of the paper, or "not in the paper"')
    derived: Text = Field(description="how the figure follows from the source")
    calibrated_on: Text | None = Field(None, description="the figure of the paper that it was fitted to; default none")


Bytes = Constant[Annotated[int, Field(gt=0)]]
Reserved = Constant[Annotated[int, Field(ge=0)]]  # bytes that may be none
Positive = Constant[Annotated[float, Field(gt=0)]]
Count = Constant[Annotated[int, Field(ge=1, strict=True)]]


class DeviceMemorySection(DeviceSection):
    """One memory, and what of it is never for experts."""

    size_bytes: Bytes
    system_bytes: Reserved

    @property
    def usable_bytes(self) -> int:
        return self.size_bytes.value - self.system_bytes.value


class MemoriesSection(DeviceSection):
    """Host memory, and the GPU's where the layout is split."""

    host: DeviceMemorySection
    device: DeviceMemorySection | None = None


class LinkSection(DeviceSection):
    """Bandwidths. ``host_bytes_per_s``: from host memory to the device's, where these are two."""

    ssd_bytes_per_s: Positive
    host_bytes_per_s: Positive | None = None


class ProcessorSection(DeviceSection):
    """Cost of a kind of executors, and speedups of n of them together over one."""

    executor_bytes: Reserved
    speedups: Constant[Annotated[tuple[Annotated[float, Field(gt=0)], ...], Field(min_length=1)]]


class ProcessorsSection(DeviceSection):
    gpu: ProcessorSection
    cpu: ProcessorSection


class LoadSection(DeviceSection):
    """Seconds that a framework takes to bring an expert to where it runs, from the SSD and from host memory."""

    ssd: Positive
    host: Positive | None = None


class TimesSection(DeviceSection):
    """One architecture on one processor: a batch of n takes ``K_s * n + B_s`` (section 4.2)."""

    K_s: Positive
    B_s: Positive
    max_batch: Count
    workspace_bytes: Bytes


class ArchitectureSection(DeviceSection):
    weight_bytes: Bytes
    framework_load_s: LoadSection
    gpu: TimesSection
    cpu: TimesSection


class PaperDevice(DeviceSection):
    device: Text
    name: Text
    layout: Literal["split", "unified"]
    memories: MemoriesSection
    links: LinkSection
    cores: Count
    processors: ProcessorsSection
    architectures: dict[Text, ArchitectureSection] = Field(min_length=1)

    @property
    def is_split(self) -> bool:
        return self.layout == "split"

    @property
    def pools(self) -> tuple[str, ...]:
        return (HOST, DEVICE) if self.is_split else (HOST,)

    def pool_of(self, processor: str) -> str:
        return DEVICE if self.is_split and processor == GPU else HOST

    def processor(self, name: str) -> ProcessorSection:
        return self.processors.gpu if name == GPU else self.processors.cpu

    def usable_bytes(self, pool: str) -> int:
        memory = self.memories.device if pool == DEVICE else self.memories.host
        return memory.usable_bytes if memory is not None else 0

    @model_validator(mode="after")
    def _fits_together(self) -> PaperDevice:
        if (self.memories.device is not None) != self.is_split:
            raise ValueError("memories.device: split devices alone need it - correct memories or layout")
        for pool in self.pools:
            if self.usable_bytes(pool) <= 0:
                raise ValueError(f"memories.{pool}: the system takes all of it - correct one of the two")
        if (self.links.host_bytes_per_s is not None) != self.is_split:
            raise ValueError("links.host_bytes_per_s: split devices alone need it - correct links or layout")
        for name, each in self.architectures.items():
            if (each.framework_load_s.host is not None) != self.is_split:
                raise ValueError(f"architectures.{name}.framework_load_s.host: split devices alone need it")
        return self


def read_device(file: Path) -> PaperDevice:
    """Read one device file. Raises ConfigError with every problem, each with its line and key."""
    return read_document(file.absolute()).validate(PaperDevice)


def paper_devices() -> tuple[PaperDevice, ...]:
    return tuple(read_device(FOLDER / name) for name in PAPER_DEVICES)
