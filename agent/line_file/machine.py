"""Sections of the box: memories, precision, device, executors, policy, bounds of the scheduler."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import BeforeValidator, Field, WithJsonSchema

from agent.line_file.values import AUTO, OptionalSize, Seconds
from experts.catalog import Section
from experts.document import suggestion
from experts.expert import Precision

PROCESSORS = ("cuda", "cpu", "mps", "emulated", "integrated")
MAX_EXECUTORS = 64
PolicyName = Literal["coserve", "paper", "samba", "samba-fifo", "samba-parallel", "none", "em", "em-ra"]
Device = Literal["auto", "cpu", "cuda", "mps", "emulated", "integrated"]
GivenPrecision: TypeAlias = Precision | Literal["auto"]  # auto: what the agent would run


def _optional_precision(value: object) -> object:
    return None if value == AUTO else value


def _executors(value: object) -> object:
    if value == AUTO:
        return None
    if not isinstance(value, dict) or not value:
        raise ValueError(f"{value!r} is neither auto nor counts - write auto, or {{cuda: 3, cpu: 1}}")
    for processor, count in value.items():
        if processor not in PROCESSORS:
            raise ValueError(f"no processor {processor!r} - {suggestion(processor, PROCESSORS)}")
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MAX_EXECUTORS:
            raise ValueError(f"{processor}: {count!r} is not a count from 0 to {MAX_EXECUTORS} - correct it")
    if not any(value.values()):
        raise ValueError("no executor at all - give one processor at least 1")
    return value


OptionalPrecision = Annotated[
    Precision | None,
    BeforeValidator(_optional_precision),
    WithJsonSchema({"enum": [AUTO, *Precision], "default": AUTO}),
]
COUNT_SCHEMA = {"type": "integer", "minimum": 0, "maximum": MAX_EXECUTORS}
COUNTS_SCHEMA = {"type": "object", "properties": dict.fromkeys(PROCESSORS, COUNT_SCHEMA), "additionalProperties": False}
ExecutorCounts = Annotated[
    dict[str, int] | None,
    BeforeValidator(_executors),
    WithJsonSchema({"anyOf": [{"const": AUTO}, COUNTS_SCHEMA], "default": AUTO}),
]


class MemorySection(Section):
    """Budgets in bytes; None = as the device allows."""

    host: OptionalSize = Field(None, description="host memory for experts: auto or a size (4GiB); default auto")
    device: OptionalSize = Field(None, description="device memory for experts: auto or a size (4GiB); default auto")
    workspace: OptionalSize = Field(
        None,
        description="memory kept for running batches, of each: auto (the device profile's; without one what batches "
        "can use, a quarter at most) or a size (1GiB); default auto",
    )
    images: OptionalSize = Field(
        None,
        description="host memory for images that are prepared ahead of their batches, beside host: auto (a twentieth "
        "of host, 512 MiB at most) or a size (256MiB); default auto",
    )


class SchedulingSection(Section):
    """Bounds of the scheduler."""

    max_overtake_s: Seconds = Field(
        5.0, description="longest that a request may be overtaken by requests of other experts, seconds; default 5"
    )
