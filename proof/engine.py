"""The proof on the real engine: generated experts beside plan, roofline, baselines and a naive server.

Guarantees: files are generated in a folder that is removed afterwards; the line is profiled and planned before anything
of it is measured; policies of one comparison take turns in one run, on the same packed files and loader. Comparisons
(fp32, loads held to a rate, bf16) follow one another within minutes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from agent.config import read_line
from agent.device_profile.store import read_profile
from experts.expert import Precision
from profiler.allocation.step import CASUAL
from profiler.bench.measured import Target, at_least, at_most, without_target
from profiler.bench.policy_runs import RunOptions, run_line
from profiler.bench.rows import TARGET_PREDICTION_ERROR, TARGET_ROOFLINE_FRACTION, report
from profiler.charts import Labels, bar_chart
from profiler.microbench.batches import BatchOptions
from profiler.planning.plan import LinePlan
from profiler.profiling.profile_line import KIND_LIMIT_S, ProfilingOptions, profile_line
from profiler.tables import markdown_table
from profiler.workload.generated_line import EVERY_S, LineRecipe, generate_line, removed_afterwards
from profiler.workload.traces import read_trace

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from agent.config import LineConfig
    from profiler.bench.rows import Measurement
    from profiler.replay.player import Progress
    from profiler.workload.traces import TracedArrival

OURS, SAMBA, NAIVE = "coserve", "samba", "naive"
HELD_BYTES_PER_S = 530e6  # the SSD of the paper's NUMA device (Figure 1)
LEAST_OVER_SAMBA_HELD = 4.0
LEAST_OVER_NAIVE, LEAST_OVER_NAIVE_BF16 = 6.0, 10.0
SHORT = LineRecipe(classifiers=8, requests=32, memory_for=3)
SHORT_KIND_LIMIT_S = 8.0
FULL = LineRecipe()


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """Policies on one trace, measured, and the images/s planned for each before."""

    title: str
    measured: Measurement
    planned: Mapping[str, float]

    def error(self, policy: str) -> float:
        return self.planned[policy] / self.images_per_s(policy) - 1

    def images_per_s(self, policy: str) -> float:
        return self.measured.row(policy).medians.images_per_s


@dataclass(frozen=True, slots=True)
class EngineProof:
    """Measurements: fp32 and bf16 at the SSD's own speed, fp32 held to the paper's SSD."""

    recipe: LineRecipe
    fp32: PlannedRun
    held: PlannedRun
    bf16: PlannedRun

    @property
    def machine(self) -> str:
        return self.fp32.measured.machine

    @property
    def runs(self) -> tuple[PlannedRun, ...]:
        return self.fp32, self.held, self.bf16

    @property
    def targets(self) -> tuple[Target, ...]:
        ours, naive = self.fp32.images_per_s(OURS), self.fp32.images_per_s(NAIVE)
        fraction = self.fp32.measured.row(OURS).medians.roofline_fraction or 0.0
        over_samba_held = self.held.images_per_s(OURS) / self.held.images_per_s(SAMBA)
        worst = max(abs(each.error(policy)) for each in self.runs for policy in each.planned)
        return (
            at_least("roofline fraction, coserve, fp32", fraction, TARGET_ROOFLINE_FRACTION),
            without_target("coserve over samba, the SSD at full speed", ours / self.fp32.images_per_s(SAMBA)),
            at_least("coserve over samba, loads held to 530 MB/s", over_samba_held, LEAST_OVER_SAMBA_HELD),
            at_least("over a naive server, fp32", ours / naive, LEAST_OVER_NAIVE),
            at_least("over a naive server, bf16", self.bf16.images_per_s(OURS) / naive, LEAST_OVER_NAIVE_BF16),
            at_most("planned against measured, the worst of all rows", worst, TARGET_PREDICTION_ERROR),
        )


def measure_engine(
    directory: Path, recipe: LineRecipe, repeats: int, progress: Progress, kind_limit_s: float = KIND_LIMIT_S
) -> EngineProof:
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
        fp32 = _planned_run("fp32, the SSD at full speed", config, trace, at_full_speed, progress)
        at_530 = _planned_run("fp32, loads held to 530 MB/s", config, trace, held, progress)
        profile_line(half, profiling, progress)  # right before what was planned with it is measured
        bf16 = _planned_run("bf16, the SSD at full speed", half, trace, RunOptions((OURS,), repeats), progress)
        return EngineProof(recipe, fp32=fp32, held=at_530, bf16=bf16)


def _planned_run(
    title: str, config: LineConfig, trace: Sequence[TracedArrival], options: RunOptions, progress: Progress
) -> PlannedRun:
    profile = read_profile(config.profile_file)
    policies = [policy for policy in options.policies if policy != NAIVE]
    line_plan = LinePlan(config, profile, trace, options.ssd_bytes_per_s)
    planned = {policy: line_plan.row(policy).images_per_s for policy in policies}
    return PlannedRun(title, run_line(config, trace, options, progress), planned)


def engine_section(proof: EngineProof, folder: Path) -> str:
    """Comparisons in Markdown; their chart is written into ``folder``."""
    recipe, fp32, held, bf16 = proof.recipe, *proof.runs
    bars: dict[str, list[float | None]] = {
        "SSD at full speed": [*(fp32.images_per_s(each) for each in (NAIVE, SAMBA, OURS)), bf16.images_per_s(OURS)],
        "loads held to 530 MB/s": [None, held.images_per_s(SAMBA), held.images_per_s(OURS), None],
    }
    groups = ["naive server, fp32", "samba, fp32", "coserve, fp32", "coserve, bf16"]
    chart = folder / "real-engine.png"
    trace = f"{recipe.classifiers} {recipe.architecture}, memory for {recipe.memory_for}, {recipe.requests} requests"
    bar_chart(chart, Labels(f"Real engine: {trace}", "images/s", note=proof.machine), groups, bars)
    lines = [
        (each.title, policy, f"{planned:.2f}", f"{each.images_per_s(policy):.2f}", f"{each.error(policy):+.1%}")
        for each in proof.runs
        for policy, planned in each.planned.items()
    ]
    table = markdown_table([("trace", "policy", "planned, images/s", "measured", "plan off by"), *lines])
    return "\n\n".join(
        (
            f"# On the real engine\n\n{trace}, one every {EVERY_S * 1e3:g} ms. `naive`: a general server, least "
            "recently used, first come first served, `torch.load`, its files read cold. The comparisons follow one "
            "another; the rows of one take turns. Memory is the same number of bytes throughout.",
            f"![{trace}]({chart.name})",
            f"`coserve plan`, from a profile made before, against the measurement:\n\n{table}",
            *(f"## {each.title}\n\n```\n{report(each.measured)}\n```" for each in proof.runs),
        )
    )
