"""Time of one form's batch by kind of operator, as oneDNN and torch report it.

oneDNN's own times count for its operators (convolutions, multiplications, and reordering of weights and images),
torch's profiler for element-wise operators, pooling and copies. The parts are fractions of an untraced batch; the rest
is other: Python, allocating, reading the answer.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import sys
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass
from tempfile import TemporaryFile
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from experts.errors import CoServeError
from profiler.bench.turns import one_turn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from proof.compute.contestants import Contestant

RUNS = 7  # without tracing
WATCHED_RUNS = 3
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
)  # fmt: skip  # of torch; none of them is executed by oneDNN


@dataclass(frozen=True, slots=True)
class Spending:
    """One batch. ``parts``: fractions of its time by kind, 1 in all with OTHER."""

    architecture: str
    batch: int
    form: str
    parts: Mapping[str, float]

    def __str__(self) -> str:
        parts = ", ".join(f"{kind} {fraction:.0%}" for kind, fraction in self.parts.items() if fraction >= 0.005)
        return f"spent: {self.architecture}, batch {self.batch}, {self.form}: {parts}"


def measure_spending(architecture: str, batch: int, contestant: Contestant) -> Spending:
    """Raises CoServeError where oneDNN does not execute the form."""
    batch_s = statistics.median(one_turn(contestant.run)[0] for _ in range(RUNS))
    watched = _operator_seconds(contestant.run)
    with captured_stdout() as lines, torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
        for _ in range(WATCHED_RUNS):
            contestant.run()
    executed = {kind: seconds / WATCHED_RUNS for kind, seconds in primitive_seconds(lines).items()}
    if not executed:
        raise CoServeError(f"what {contestant.form} spends is not told: oneDNN does not execute it, or does not say so")
    return Spending(architecture, batch, contestant.form, parts_of(batch_s, executed, watched))


@contextmanager
def captured_stdout() -> Iterator[list[str]]:
    """Lines that libraries write to the process's stdout meanwhile, complete once the context has ended."""
    lines: list[str] = []
    sys.stdout.flush()
    libc, kept = ctypes.CDLL(None), os.dup(1)
    with TemporaryFile() as file:
        libc.fflush(None)
        os.dup2(file.fileno(), 1)
        try:
            yield lines
        finally:
            libc.fflush(None)  # the C library's buffer is its own
            os.dup2(kept, 1)
            os.close(kept)
        file.seek(0)
        lines += file.read().decode(errors="replace").splitlines()


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
