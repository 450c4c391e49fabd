"""Time of one form's batch by kind of operator, as oneDNN and torch report it.

Guarantees: a separate process reports, because tracing every operator is slow; the parts are fractions of an untraced
batch. oneDNN's own times count for its operators (convolutions, multiplications, and reordering of weights and images),
torch's profiler for element-wise operators, pooling and copies. The rest is other: Python, allocating, reading the
answer.

`python -m` this, FOLDER, ARCHITECTURE, HEIGHTxWIDTH, BATCH, FORM, THREADS: one line of JSON, then what oneDNN writes.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from agent.runtime.threads import lone_team, use_threads
from experts.errors import CoServeError
from experts.expert import Precision
from experts.packed.weights import SegmentStore
from profiler.workload.generated_line import removed_afterwards, write_experts
from proof.compute.alternating import one_run
from proof.compute.contestants import our_form, prepared_images

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

RUNS = 7  # without tracing
WATCHED_RUNS = 3
LIMIT_S = 300.0
CONVOLUTIONS, MULTIPLICATIONS, REORDERS = "convolutions", "multiplications", "reorders"
ELEMENT_WISE, POOLING, COPIES, OTHER = "element-wise", "pooling", "copies", "other"
KINDS = (CONVOLUTIONS, MULTIPLICATIONS, REORDERS, ELEMENT_WISE, POOLING, COPIES)
PRIMITIVES: Mapping[str, str] = MappingProxyType(
    {
        "convolution": CONVOLUTIONS,
        "deconvolution": CONVOLUTIONS,
        "inner_product": MULTIPLICATIONS,
        "matmul": MULTIPLICATIONS,
        "reorder": REORDERS,
        "eltwise": ELEMENT_WISE,
        "binary": ELEMENT_WISE,
        "sum": ELEMENT_WISE,
        "pooling": POOLING,
        "concat": COPIES,
    }
)  # of oneDNN
OPERATORS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        ELEMENT_WISE: (
            "relu", "relu_", "clamp_min", "clamp_min_", "silu", "silu_", "sigmoid", "hardtanh", "hardtanh_",
            "hardswish", "hardswish_", "hardsigmoid", "gelu", "add", "add_", "mul", "mul_", "sub", "div", "batch_norm",
            "native_batch_norm", "native_layer_norm",
        ),
        POOLING: ("max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d", "mean", "sum"),
        COPIES: ("copy_", "cat", "stack", "upsample_nearest2d"),
    }
)  # fmt: skip  # of torch; what oneDNN executes is in none of them


@dataclass(frozen=True, slots=True)
class Spending:
    """One batch. ``parts``: fractions of its time by kind, 1 in all with OTHER."""

    architecture: str
    batch: int
    form: str
    ms_per_image: float
    parts: Mapping[str, float]


def measure_spending(
    folder: Path, architecture: str, size: tuple[int, int], batch: int, form: str, threads: int
) -> Spending:
    """``folder``: where an expert is written and removed. Raises CoServeError where the form fails."""
    arguments = (folder, architecture, f"{size[0]}x{size[1]}", batch, form, threads)
    command = [sys.executable, "-m", "proof.compute.spending", *map(str, arguments)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise CoServeError(f"what {form} spends was not told within {LIMIT_S:.0f} s") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise CoServeError(f"what {form} spends is not told, its process ended with {done.returncode}: {last}")
    head, *told = done.stdout.splitlines()
    found = json.loads(head)
    executed = {kind: seconds / found["watched"] for kind, seconds in primitive_seconds(told).items()}
    if not executed:
        raise CoServeError(f"what {form} spends is not told: oneDNN does not execute it, or does not say so")
    return Spending(
        architecture, batch, form, found["batch_s"] * 1e3 / batch, parts_of(found["batch_s"], executed, found["parts"])
    )


def primitive_seconds(lines: Iterable[str]) -> dict[str, float]:
    """Seconds by kind, from oneDNN's lines; other lines are passed over.

    A line is ``onednn_verbose,...,exec,<engine>,<primitive>,...,<milliseconds>``.
    """
    seconds: defaultdict[str, float] = defaultdict(float)
    for line in lines:
        fields = line.split(",")
        if not fields[0].endswith("onednn_verbose") or "exec" not in fields:
            continue
        place = fields.index("exec") + 2
        try:
            seconds[PRIMITIVES.get(fields[place], OTHER)] += float(fields[-1]) / 1e3
        except (IndexError, ValueError):  # a line that was cut
            continue
    return dict(seconds)


def parts_of(batch_s: float, executed: Mapping[str, float], watched: Mapping[str, float]) -> dict[str, float]:
    """Fractions by kind; of their sum where tracing made the parts longer than the whole."""
    found = {kind: executed.get(kind, 0.0) + watched.get(kind, 0.0) for kind in KINDS}
    whole_s = max(batch_s, sum(found.values()))
    parts = {kind: seconds / whole_s for kind, seconds in found.items()}
    return parts | {OTHER: max(1.0 - sum(parts.values()), 0.0)}


def main(folder: Path, architecture: str, size: tuple[int, int], batch: int, form: Precision, threads: int) -> None:
    use_threads(threads)
    lone_team(threads).keep()
    with removed_afterwards(folder, "spending-") as own:
        (expert,) = write_experts(own, architecture, 1, size=size)
        store = SegmentStore(own / "packed")
        try:
            with our_form(expert, form, store, prepared_images(expert, batch)) as contestant:
                one_run(contestant.run)
                batch_s = statistics.median(one_run(contestant.run) for _ in range(RUNS))
                head = {"batch_s": batch_s, "watched": WATCHED_RUNS, "parts": _operator_seconds(contestant.run)}
                sys.stdout.write(json.dumps(head) + "\n")
                sys.stdout.flush()  # before oneDNN's, which has a buffer of its own
                with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
                    for _ in range(WATCHED_RUNS):
                        contestant.run()
        finally:
            store.close()


def _operator_seconds(run: Callable[[], object]) -> dict[str, float]:
    """Seconds of one run by kind, of torch's own operators."""
    kinds = {f"aten::{name}": kind for kind, names in OPERATORS.items() for name in names}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(WATCHED_RUNS):
            run()
    seconds: defaultdict[str, float] = defaultdict(float)
    for each in profile.key_averages():
        if each.key in kinds:
            seconds[kinds[each.key]] += each.self_cpu_time_total / 1e6 / WATCHED_RUNS
    return dict(seconds)


if __name__ == "__main__":
    height, width = map(int, sys.argv[3].split("x"))
    main(Path(sys.argv[1]), sys.argv[2], (height, width), int(sys.argv[4]), Precision(sys.argv[5]), int(sys.argv[6]))
