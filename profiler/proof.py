"""The proof on this box: generated experts on the real engine, beside its floor, the baselines and a naive server.

Guarantees: everything is generated in a folder that is removed afterwards; policies are interleaved in one run, on the
same packed files and loader; a target that is missed is told as missed. Speeds are those of this box at this moment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from agent.config import read_line
from experts.expert import Precision
from profiler.generated import LineRecipe, generate_line, removed_afterwards
from profiler.measured import RunOptions, run_line
from profiler.prescheduled import TARGET_GAP, TARGET_MANAGEMENT_SHARE, measure_scheduling
from profiler.rows import TARGET_PREDICTION_ERROR, TARGET_ROOFLINE_FRACTION
from profiler.traces import read_trace

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from profiler.prescheduled import SchedulingCost
    from profiler.rows import Measurement

    Progress = Callable[[str, int, int], None]

OURS, SAMBA, NAIVE = "coserve", "samba", "naive"
HELD_BYTES_PER_S = 530e6  # the SSD of the paper's NUMA device (Figure 1)
LEAST_OVER_SAMBA_HELD = 4.0
LEAST_OVER_NAIVE, LEAST_OVER_NAIVE_BF16 = 6.0, 10.0
SHORT = LineRecipe(classifiers=16, requests=96, memory_for=5)
FULL = LineRecipe()


@dataclass(frozen=True, slots=True)
class Target:
    """One figure that this project set itself. ``reached``: None where there is nothing to reach."""

    what: str
    wanted: str
    found: str
    reached: bool | None


@dataclass(frozen=True, slots=True)
class Proof:
    """What was measured: fp32 and bf16 at the SSD's own speed, fp32 held to the paper's SSD, the cost of scheduling."""

    recipe: LineRecipe
    fp32: Measurement
    bf16: Measurement
    held: Measurement
    scheduling: SchedulingCost

    def targets(self) -> tuple[Target, ...]:
        """Each figure beside what it should reach."""
        ours, held, fast = self.fp32.row(OURS).medians, self.held.row(OURS).medians, self.bf16.row(OURS).medians
        samba, naive = self.fp32.row(SAMBA).medians, self.fp32.row(NAIVE).medians
        rows = [*self.fp32.rows, *self.held.rows, *self.bf16.rows]
        errors = [abs(row.medians.prediction_error) for row in rows if row.medians.prediction_error is not None]
        fraction = ours.roofline_fraction or 0.0
        over_samba = f"{ours.images_per_s / samba.images_per_s:.2f}"
        return (
            _at_least("roofline fraction, coserve, fp32", fraction, TARGET_ROOFLINE_FRACTION),
            Target("coserve over samba, the SSD at full speed", "-", over_samba, None),
            _at_least(
                "coserve over samba, loads held to 530 MB/s",
                held.images_per_s / self.held.row(SAMBA).medians.images_per_s,
                LEAST_OVER_SAMBA_HELD,
            ),
            _at_least("over a naive server, fp32", ours.images_per_s / naive.images_per_s, LEAST_OVER_NAIVE),
            _at_least("over a naive server, bf16", fast.images_per_s / naive.images_per_s, LEAST_OVER_NAIVE_BF16),
            _at_most("predicted against measured, the worst of all rows", max(errors), TARGET_PREDICTION_ERROR),
            _at_most("scheduling, against pre-scheduled requests", self.scheduling.gap, TARGET_GAP),
            _at_most("expert management, of the time", self.scheduling.management_share, TARGET_MANAGEMENT_SHARE),
        )


def measure_proof(directory: Path, recipe: LineRecipe, repeats: int, progress: Progress) -> Proof:
    """Generate a line in ``directory``, measure it, remove it.

    Raises ConfigError where the disk has no room for it, AgentCrashed.
    """
    with removed_afterwards(directory) as folder:
        progress("generate", 0, 1)
        made = generate_line(folder / "line", recipe)
        progress("generate", 1, 1)
        config = read_line(made.line)
        trace = read_trace(made.trace, config.catalog)
        fp32 = run_line(config, trace, RunOptions((OURS, SAMBA, NAIVE), repeats), progress)
        held = RunOptions((OURS, SAMBA), 1, ssd_bytes_per_s=HELD_BYTES_PER_S, with_roofline=False)
        held_rows = run_line(config, trace, held, progress)
        scheduling = measure_scheduling(config, trace, RunOptions(repeats=repeats), progress)
        bf16 = run_line(config, trace, RunOptions((OURS,), repeats, precision=Precision.BF16), progress)
        return Proof(recipe, fp32, bf16, held_rows, scheduling)


def _at_least(what: str, found: float, least: float) -> Target:
    return Target(what, f"at least {least:g}", f"{found:.3g}", found >= least)


def _at_most(what: str, found: float, most: float) -> Target:
    return Target(what, f"at most {most:.1%}", f"{found:.2%}", found <= most)
