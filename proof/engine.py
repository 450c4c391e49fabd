"""The proof on this box: generated experts on the real engine, beside plan, floor, baselines and a naive server.

Guarantees: everything is generated in a folder that is removed afterwards; the line is profiled and planned before
anything of it is measured, and the plan is what the measurement is held against; the policies of one comparison are
interleaved in one run, on the same packed files and loader; a target that is missed is told as missed. Comparisons
themselves (fp32, loads held to a rate, bf16) follow one another within minutes. Speeds are this box's at this moment.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from agent.config import read_line
from agent.device_profile.store import read_profile
from experts.expert import Precision
from profiler.allocation.step import CASUAL
from profiler.bench.policy_runs import RunOptions, run_line
from profiler.bench.rows import TARGET_PREDICTION_ERROR, TARGET_ROOFLINE_FRACTION
from profiler.microbench.batches import BatchOptions
from profiler.planning.plan import LinePlan
from profiler.profiling.profile_line import KIND_LIMIT_S, ProfilingOptions, profile_line
from profiler.targets import Target, at_least, at_most
from profiler.workload.generated_line import LineRecipe, generate_line, removed_afterwards
from profiler.workload.traces import read_trace
from proof.scheduling.cost import measure_scheduling

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from agent.config import LineConfig
    from profiler.bench.rows import Measurement
    from profiler.replay.player import Progress
    from profiler.workload.traces import TracedArrival
    from proof.scheduling.cost import SchedulingCost

OURS, SAMBA, NAIVE = "coserve", "samba", "naive"
HELD_BYTES_PER_S = 530e6  # the SSD of the paper's NUMA device (Figure 1)
LEAST_OVER_SAMBA_HELD = 4.0
LEAST_OVER_NAIVE, LEAST_OVER_NAIVE_BF16 = 6.0, 10.0
SHORT = LineRecipe(classifiers=8, requests=32, memory_for=3)
SHORT_KIND_LIMIT_S = 8.0
FULL = LineRecipe()
PAIRS = 2  # of a scheduled run and its playback, for each round of the rest: what they differ by is small


@dataclass(frozen=True, slots=True)
class Comparison:
    """Policies on one trace, measured, and what each was planned to do before: images/s by policy."""

    title: str
    measured: Measurement
    planned: Mapping[str, float]

    def error(self, policy: str) -> float:
        return self.planned[policy] / self.images_per_s(policy) - 1

    def images_per_s(self, policy: str) -> float:
        return self.measured.row(policy).medians.images_per_s


@dataclass(frozen=True, slots=True)
class Proof:
    """Measurements: fp32 and bf16 at the SSD's own speed, fp32 held to the paper's SSD, the cost of scheduling."""

    recipe: LineRecipe
    fp32: Comparison
    held: Comparison
    bf16: Comparison
    scheduling: SchedulingCost

    @property
    def comparisons(self) -> tuple[Comparison, ...]:
        return self.fp32, self.held, self.bf16

    @property
    def targets(self) -> tuple[Target, ...]:
        ours, naive = self.fp32.images_per_s(OURS), self.fp32.images_per_s(NAIVE)
        fraction = self.fp32.measured.row(OURS).medians.roofline_fraction or 0.0
        over_samba = f"{ours / self.fp32.images_per_s(SAMBA):.2f}"
        over_samba_held = self.held.images_per_s(OURS) / self.held.images_per_s(SAMBA)
        worst = max(abs(each.error(policy)) for each in self.comparisons for policy in each.planned)
        return (
            at_least("roofline fraction, coserve, fp32", fraction, TARGET_ROOFLINE_FRACTION),
            Target("coserve over samba, the SSD at full speed", "-", over_samba, None),
            at_least("coserve over samba, loads held to 530 MB/s", over_samba_held, LEAST_OVER_SAMBA_HELD),
            at_least("over a naive server, fp32", ours / naive, LEAST_OVER_NAIVE),
            at_least("over a naive server, bf16", self.bf16.images_per_s(OURS) / naive, LEAST_OVER_NAIVE_BF16),
            at_most("planned against measured, the worst of all rows", worst, TARGET_PREDICTION_ERROR),
            *self.scheduling.targets,
        )


def measure_proof(
    directory: Path, recipe: LineRecipe, repeats: int, progress: Progress, kind_limit_s: float = KIND_LIMIT_S
) -> Proof:
    """Generate a line in ``directory``, profile, plan and measure it, remove it.

    ``kind_limit_s``: spent on running the batches of its one kind of experts.
    Raises ConfigError where the disk has no room for it, AgentCrashed.
    """
    with removed_afterwards(directory) as folder:
        progress("generate", 0, 1)
        made = generate_line(folder / "line", recipe)
        progress("generate", 1, 1)
        config = read_line(made.line)
        trace = read_trace(made.trace, config.catalog)
        half = replace(config, precision=Precision.BF16, state=folder / "state-bf16")
        at_full_speed = RunOptions((OURS, SAMBA, NAIVE), repeats)
        held = RunOptions((OURS, SAMBA), repeats, ssd_bytes_per_s=HELD_BYTES_PER_S, with_roofline=False)
        profiling = ProfilingOptions(allocation=CASUAL, batches=BatchOptions(limit_s=kind_limit_s))
        profile_line(config, profiling, progress)
        fp32 = _compared("fp32, the SSD at full speed", config, trace, at_full_speed, progress)
        at_530 = _compared("fp32, loads held to 530 MB/s", config, trace, held, progress)
        scheduling = measure_scheduling(config, trace, RunOptions(repeats=PAIRS * repeats), progress)
        profile_line(half, profiling, progress)  # right before what was planned with it is measured
        bf16 = _compared("bf16, the SSD at full speed", half, trace, RunOptions((OURS,), repeats), progress)
        return Proof(recipe, fp32=fp32, held=at_530, bf16=bf16, scheduling=scheduling)


def _compared(
    title: str, config: LineConfig, trace: Sequence[TracedArrival], options: RunOptions, progress: Progress
) -> Comparison:
    """First the plan from the line's profile, then the measurement."""
    profile = read_profile(config.profile_file)
    policies = [policy for policy in options.policies if policy != NAIVE]
    line_plan = LinePlan(config, profile, trace, options.ssd_bytes_per_s)
    planned = {policy: line_plan.row(policy).images_per_s for policy in policies}
    return Comparison(title, run_line(config, trace, options, progress), planned)
