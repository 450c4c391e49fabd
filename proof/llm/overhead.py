"""What an iteration costs beside its tensors' work: choosing rows, keeping texts, handing tokens out."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from experts.llm.model import load_model
from profiler.targets import Target
from proof.llm.our_engine import OurEngine
from proof.llm.part import Part
from proof.llm.random_models import write_random_model
from proof.llm.text_jobs import mixed_lengths

if TYPE_CHECKING:
    from pathlib import Path

    from proof.llm.random_models import QwenShape

REQUESTS = 16
TARGET_S = 1e-3


def measure_overhead(folder: Path, shape: QwenShape, rounds: int) -> Part:
    """The median over rounds of so many requests at a time; the model's size does not matter to it."""
    model = load_model(write_random_model(folder / f"overhead-{shape.name}", shape), shape.name)
    measured = []
    for number in range(rounds + 1):
        engine = OurEngine(model, REQUESTS)
        engine.continuous(mixed_lengths(REQUESTS, shape.vocabulary, seed=number))
        measured.append(engine.statistics.overhead_s)
    overhead_s = statistics.median(measured[1:])  # the first one's counts for nothing
    what, found = f"an iteration's overhead at {REQUESTS} requests", f"{overhead_s * 1e3:.2f} ms"
    target = Target(what, f"under {TARGET_S * 1e3:.0f} ms", found, overhead_s < TARGET_S)
    return Part("iteration overhead", (target,), {"overhead_s": overhead_s})
