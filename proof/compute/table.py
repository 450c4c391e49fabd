"""Rows of the compute table, and what the forms should reach in them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from profiler.bench.measured import Column, Target, at_least
from proof.compute.contestants import EAGER, INT8_SESSION

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

EARLIER = frozenset({"fp32", "bf16", "fp16", "onnxruntime"})  # forms of ours that later ones are to beat
LEAST_GAIN_ALONE, LEAST_GAIN, LEAST_GAIN_FP32 = 1.5, 1.4, 1.1  # of a single image, of more, and in fp32
LEAST_OVER_OPENVINO = 0.9  # of its throughput, in the same numbers
LEAST_OVER_ONNXRUNTIME = 1.0  # of its throughput, both in eight bits
LEGEND = (
    f"x eager: how many times as fast as {EAGER}. of the floor: the floor's time over the row's, where the floor is "
    "the arithmetic alone at the rate of the fastest matrix multiplication in the same numbers, torch's or oneDNN's."
)
COLUMNS = (
    Column("architecture", "architecture"),
    Column("batch", "batch", "d"),
    Column("form", "form"),
    Column("ms/image", "ms_per_image", ".2f"),
    Column("least", "least_ms_per_image", ".2f"),
    Column("x eager", "times_fp32_eager", ".2f"),
    Column("of the floor", "of_floor", ".0%"),
    Column("", "mark"),
)


@dataclass(frozen=True, slots=True)
class ComputeRow:
    """One way to run a batch. ``numbers``: of its arithmetic. ``least_ms_per_image``: the fastest of ``rounds``.

    ``times_fp32_eager``: how many times as fast as the plain module in fp32, by medians. ``of_floor``: time of the
    arithmetic alone in the same numbers, over the row's; 1 of the floor itself. ``is_fastest_of_ours``: among the forms
    that an agent can run.
    """

    architecture: str
    size: str
    batch: int
    form: str
    numbers: str
    is_ours: bool
    rounds: int
    ms_per_image: float
    least_ms_per_image: float
    times_fp32_eager: float
    of_floor: float
    is_fastest_of_ours: bool = False

    @property
    def mark(self) -> str:
        return "fastest of ours" if self.is_fastest_of_ours else ""


def targets_of(rows: Sequence[ComputeRow]) -> tuple[Target, ...]:
    """Targets of the forms, for each measured architecture and batch size."""
    groups = groupby(rows, lambda row: (row.architecture, row.batch))
    return tuple(
        target
        for (architecture, batch), each in groups
        for target in _targets(list(each), f"{architecture}, batch {batch}")
    )


def _targets(rows: Sequence[ComputeRow], where: str) -> Iterator[Target]:
    """Targets of one architecture and batch size. bf16 counts where the processor multiplies it faster than fp32.

    Eight bits are compared with ONNX Runtime's alone: only samples tell whether an expert can run in them.
    """
    took = {row.form: row.ms_per_image for row in rows}
    ours = {
        numbers: {row.form for row in rows if row.is_ours and row.numbers == numbers}
        for numbers in ("fp32", "bf16", "int8")
    }

    def over(what: str, others: Collection[str], forms: Collection[str], least: float) -> Iterator[Target]:
        theirs, own = (min((took[form] for form in listed if form in took), default=None) for listed in (others, forms))
        if theirs is not None and own is not None:
            yield at_least(f"{where}: {what}", theirs / own, least)

    if "floor-bf16" in took and ours["bf16"]:
        everything = {row.form for row in rows if row.is_ours} - ours["int8"]
        least = LEAST_GAIN_ALONE if rows[0].batch == 1 else LEAST_GAIN
        yield from over("the fastest form over the earlier ones", everything & EARLIER, everything, least)
    yield from over("in fp32 over the earlier ones", ours["fp32"] & EARLIER, ours["fp32"], LEAST_GAIN_FP32)
    for numbers in ("fp32", "bf16"):
        yield from over(f"in {numbers} over OpenVINO", {f"openvino-{numbers}"}, ours[numbers], LEAST_OVER_OPENVINO)
    yield from over("in int8 over ONNX Runtime", {INT8_SESSION}, ours["int8"], LEAST_OVER_ONNXRUNTIME)
