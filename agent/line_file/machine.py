"""Sections of the box: memories, precision, device, executors, policy, bounds of the scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from pydantic import BeforeValidator, Field, WithJsonSchema

from agent.line_file.values import AUTO, OptionalSize, Seconds
from experts.backends.forms import FORMS, form_of
from experts.document import suggestion
from experts.expert import Precision
from experts.sections.experts import is_llm
from experts.sections.values import Section

if TYPE_CHECKING:
    from collections.abc import Iterator

    from experts.document import Document
    from experts.errors import ConfigError
    from experts.sections.experts import CatalogSections

PROCESSORS = ("cuda", "cpu", "mps", "emulated", "integrated")
MAX_EXECUTORS = 64
PolicyName = Literal["coserve", "paper", "samba", "samba-fifo", "samba-parallel", "none", "em", "em-ra"]
Device = Literal["auto", "cpu", "cuda", "mps", "emulated", "integrated"]
GivenPrecision: TypeAlias = Precision | Literal["auto"]  # auto: the agent's choice


def _optional_precision(value: object) -> object:
    return None if value == AUTO else value


def _executors(value: object) -> object:
    if value == AUTO:
        return None
    if not isinstance(value, dict) or not value:
        raise ValueError(f"{value!r} is not auto or counts - write auto, or {{cuda: 3, cpu: 1}}")
    for processor, count in value.items():
        if processor not in PROCESSORS:
            raise ValueError(f"no processor {processor!r} - {suggestion(processor, PROCESSORS)}")
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MAX_EXECUTORS:
            raise ValueError(f"{processor}: {count!r} is not a count from 0 to {MAX_EXECUTORS} - correct it")
    if not any(value.values()):
        raise ValueError("there is no executor - give one processor at least 1")
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
    """Budgets in bytes; None: auto."""

    host: OptionalSize = Field(None, description="host memory for experts: auto or a size (4GiB)")
    device: OptionalSize = Field(None, description="device memory for experts: auto or a size (4GiB)")
    workspace: OptionalSize = Field(
        None,
        description="part of each memory for running batches: auto (the device profile's; without one their need, at "
        "most a quarter) or a size (1GiB)",
    )
    images: OptionalSize = Field(
        None,
        description="host memory for images prepared ahead of their batches, beside host: auto (a twentieth of host, "
        "at most 512 MiB) or a size (256MiB)",
    )


class SchedulingSection(Section):
    """Bounds of the scheduler."""

    max_overtake_s: Seconds = Field(5.0, description="seconds that other experts' requests may overtake a request")


def precision_problems(given: Precision | None, sections: CatalogSections, document: Document) -> Iterator[ConfigError]:
    images = next((name for name, section in sections.experts.items() if not is_llm(section)), None)
    if given is not None and not form_of(given).packs_modules and images is not None:
        others = " and ".join(name for name, form in FORMS.items() if form.needs_calibration)
        yield document.error(
            f"{given} is for language models alone, and {images} takes images - write precision: {given} at each "
            f"language model; eight bits for experts of images are {others}",
            "precision",
        )
