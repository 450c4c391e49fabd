"""The compute table: a row for each architecture, batch and form, as a record, as JSON and as text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from profiler.tables import text_table
from profiler.targets import Target, at_least
from proof.compute.contestants import EAGER, INT8_SESSION

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from proof.compute.spending import Spending

HEADINGS = ("architecture", "batch", "form", "ms/image", "least", "x eager", "of the floor", "")
LAYOUT = "{:<16} {:>5}  {:<24} {:>9} {:>9} {:>8} {:>13}  {}"
QUIET_FRACTION = 0.05  # of all cores: what other processes may have had before the table says so
EARLIER = frozenset({"fp32", "bf16", "fp16", "onnxruntime"})  # forms of ours that later ones are to beat
LEAST_GAIN_ALONE, LEAST_GAIN, LEAST_GAIN_FP32 = 1.5, 1.4, 1.1  # of a single image, of more, and in fp32
LEAST_OVER_OPENVINO = 0.9  # of its throughput, in the same numbers
LEAST_OVER_ONNXRUNTIME = 1.0  # of its throughput, both in eight bits
LEGEND = (
    f"x eager: how many times as fast as {EAGER}. of the floor: the floor's time over the row's, where the floor is "
    "the arithmetic alone at the rate of the fastest matrix multiplication in the same numbers, torch's or oneDNN's."
)


@dataclass(frozen=True, slots=True)
class ComputeRow:
    """One way to run a batch. ``numbers``: what is computed in. ``least_ms_per_image``: of the fastest of ``rounds``.

    ``times_fp32_eager``: how many times as fast as the plain module in fp32, by medians. ``of_floor``: what the
    arithmetic alone would take, in the same numbers, over what it takes; 1 of the floor itself.
    ``is_fastest_of_ours``: among the forms that an agent can run.
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


@dataclass(frozen=True, slots=True)
class ComputeTable:
    """Everything that was measured. ``operations``: of one image, by architecture. ``notes``: what is not in rows."""

    machine: str
    threads: int
    others_fraction: float
    operations: Mapping[str, int]
    rows: tuple[ComputeRow, ...]
    spending: tuple[Spending, ...]
    notes: tuple[str, ...]

    def row(self, architecture: str, batch: int, form: str) -> ComputeRow:
        return {(row.architecture, row.batch, row.form): row for row in self.rows}[architecture, batch, form]

    @property
    def targets(self) -> tuple[Target, ...]:
        """Targets of the forms, for each measured architecture and batch size."""
        groups = dict.fromkeys((row.architecture, row.batch) for row in self.rows)
        return tuple(
            target
            for architecture, batch in groups
            for target in _targets(
                [row for row in self.rows if (row.architecture, row.batch) == (architecture, batch)],
                f"{architecture}, batch {batch}",
            )
        )

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"targets": [asdict(target) for target in self.targets]}


def report(table: ComputeTable) -> str:
    lines = [f"machine  {table.machine}, {table.threads} threads"]
    lines += [
        f"work     {name}: {operations / 1e9:.2f} GFLOP an image" for name, operations in table.operations.items()
    ]
    lines += [text_table([HEADINGS, *_cells(table.rows)], LAYOUT), LEGEND]
    lines += [f"target   {each.what} {each.wanted}: {each.found}, {each.remark}" for each in table.targets]
    lines += [_spending_text(each) for each in table.spending]
    lines += [f"note     {note}" for note in table.notes]
    if table.others_fraction > QUIET_FRACTION:
        lines.append(f"SHARED   other processes had {table.others_fraction:.0%} of the cores: compare rows only")
    return "\n".join(lines)


def _targets(rows: Sequence[ComputeRow], where: str) -> Iterator[Target]:
    """Targets of one architecture and batch size. bf16 counts where the processor multiplies it faster than fp32.

    Eight bits are compared with ONNX Runtime's alone: only samples tell whether an expert can run in them.
    """
    ours = {
        numbers: {row.form for row in rows if row.is_ours and row.numbers == numbers}
        for numbers in ("fp32", "bf16", "int8")
    }
    took = {row.form: row.ms_per_image for row in rows}
    if "floor-bf16" in took and ours["bf16"]:
        everything = {row.form for row in rows if row.is_ours} - ours["int8"]
        least = LEAST_GAIN_ALONE if rows[0].batch == 1 else LEAST_GAIN
        yield from _over(
            f"{where}: the fastest form over the earlier ones", took, everything & EARLIER, everything, least
        )
    over_earlier = f"{where}: in fp32 over the earlier ones"
    yield from _over(over_earlier, took, ours["fp32"] & EARLIER, ours["fp32"], LEAST_GAIN_FP32)
    for numbers in ("fp32", "bf16"):
        yield from _over(
            f"{where}: in {numbers} over OpenVINO", took, {f"openvino-{numbers}"}, ours[numbers], LEAST_OVER_OPENVINO
        )
    over_onnxruntime = f"{where}: in int8 over ONNX Runtime"
    yield from _over(over_onnxruntime, took, {INT8_SESSION}, ours["int8"], LEAST_OVER_ONNXRUNTIME)


def _over(
    what: str, took: Mapping[str, float], others: Collection[str], forms: Collection[str], least: float
) -> Iterator[Target]:
    theirs, own = (min((took[form] for form in listed if form in took), default=None) for listed in (others, forms))
    if theirs is not None and own is not None:
        yield at_least(what, theirs / own, least)


def _cells(rows: Sequence[ComputeRow]) -> Iterator[tuple[str, ...]]:
    for row in rows:
        yield (
            row.architecture,
            str(row.batch),
            row.form,
            f"{row.ms_per_image:.2f}",
            f"{row.least_ms_per_image:.2f}",
            f"{row.times_fp32_eager:.2f}",
            f"{row.of_floor:.0%}",
            "fastest of ours" if row.is_fastest_of_ours else "",
        )


def _spending_text(spending: Spending) -> str:
    parts = ", ".join(f"{kind} {fraction:.0%}" for kind, fraction in spending.parts.items() if fraction >= 0.005)
    return f"spent    {spending.architecture}, batch {spending.batch}, {spending.form}: {parts}"
