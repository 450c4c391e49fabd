"""The whole proof as one Markdown report with charts: the project's targets, and this box's figures.

On the real engine, generated experts run beside plan, roofline, baselines and a naive server; the line is profiled and
planned before it is measured, and comparisons (fp32, loads held to a rate, bf16 where the CPU has instructions for it)
follow one another within minutes.
Guarantees: every figure is from a run of this command, with the machine it ran on; the table marks a missed target as
SHORT; generated files are removed. ``full`` runs the traces and tasks that the targets are stated for, half an hour on
two cores; the short form takes under five minutes, and the report names its differences.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from typing import TYPE_CHECKING, get_args

from agent.config import read_line
from agent.device_profile.store import read_profile
from agent.runtime.measuring.batches import BatchOptions
from experts.backends.forms import form_of
from experts.errors import ConfigError
from experts.expert import Precision
from profiler.allocation.step import CASUAL
from profiler.bench.measured import Target, at_least, at_most, targets_table, without_target
from profiler.bench.policy_runs import RunOptions, run_line
from profiler.bench.rows import TARGET_PREDICTION_ERROR, TARGET_ROOFLINE_FRACTION, report
from profiler.charts import Labels, bar_chart
from profiler.planning.plan import LinePlan
from profiler.profiling.profile_line import KIND_LIMIT_S, ProfilingOptions, profile_line
from profiler.tables import markdown_table
from profiler.workload.generated_line import EVERY_S, LineRecipe, generate_line, removed_afterwards
from profiler.workload.synthetic_graphs import GraphKind
from profiler.workload.traces import read_trace
from proof.compute.measure import ComputeOptions, measure_compute_forms
from proof.paper.devices import paper_devices
from proof.paper.evaluation import FULL_FORM, SHORT_FORM, evaluate
from proof.paper.figures import write_figures
from proof.parts.decisions import measure_growth
from proof.parts.loading import measure_graph_loading, measure_loading
from proof.parts.starting import measure_start

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from agent.config import LineConfig
    from profiler.bench.measured import Measured
    from profiler.bench.rows import Measurement
    from profiler.replay.player import Progress
    from profiler.workload.traces import TracedArrival
    from proof.paper.evaluation import Evaluation

OURS, SAMBA, NAIVE = "coserve", "samba", "naive"
HELD_BYTES_PER_S = 530e6  # the SSD of the paper's NUMA device (Figure 1)
LEAST_OVER_SAMBA_HELD = 4.0
LEAST_OVER_NAIVE, LEAST_OVER_NAIVE_BF16 = 6.0, 10.0
OVER_NAIVE_BF16, LEFT_OUT = "over a naive server, bf16", "left out: this CPU emulates bf16"
SHORT = LineRecipe(classifiers=8, requests=32, memory_for=3)
SHORT_KIND_LIMIT_S = 8.0
FULL = LineRecipe()
REPORT = "report.md"
SHORT_FILES, FULL_FILES = 4, 8  # experts that are loaded for the loading benchmark
SHORT_REPEATS, FULL_REPEATS = 1, 3
SHORT_COMPUTE = ComputeOptions(("resnet18",), rounds=7)
FULL_COMPUTE = ComputeOptions(("resnet18", "resnet50", "resnet101", "yolov5n", "yolov5m"))
SHORTENED = "short form: smaller traces, two of the four tasks, their searches on smaller samples"


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
    bf16: PlannedRun | None  # None: this CPU emulates it

    @property
    def machine(self) -> str:
        return self.fp32.measured.machine

    @property
    def runs(self) -> tuple[PlannedRun, ...]:
        return tuple(each for each in (self.fp32, self.held, self.bf16) if each is not None)

    @property
    def targets(self) -> tuple[Target, ...]:
        ours, naive = self.fp32.images_per_s(OURS), self.fp32.images_per_s(NAIVE)
        fraction = self.fp32.measured.row(OURS).medians.roofline_fraction or 0.0
        over_samba_held = self.held.images_per_s(OURS) / self.held.images_per_s(SAMBA)
        bf16 = (
            Target(OVER_NAIVE_BF16, f"at least {LEAST_OVER_NAIVE_BF16:g}", LEFT_OUT, None)
            if self.bf16 is None
            else at_least(OVER_NAIVE_BF16, self.bf16.images_per_s(OURS) / naive, LEAST_OVER_NAIVE_BF16)
        )
        worst = max(abs(each.error(policy)) for each in self.runs for policy in each.planned)
        return (
            at_least("roofline fraction, coserve, fp32", fraction, TARGET_ROOFLINE_FRACTION),
            without_target("coserve over samba, the SSD at full speed", ours / self.fp32.images_per_s(SAMBA)),
            at_least("coserve over samba, loads held to 530 MB/s", over_samba_held, LEAST_OVER_SAMBA_HELD),
            at_least("over a naive server, fp32", ours / naive, LEAST_OVER_NAIVE),
            bf16,
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
        half = config.model_copy(update={"precision": Precision.BF16, "state": folder / "state-bf16"})
        at_full_speed = RunOptions((OURS, SAMBA, NAIVE), repeats)
        held = RunOptions((OURS, SAMBA), repeats, ssd_bytes_per_s=HELD_BYTES_PER_S, with_roofline=False)
        profiling = ProfilingOptions(allocation=CASUAL, batches=BatchOptions(limit_s=kind_limit_s))
        profile_line(config, profiling, progress)
        fp32 = _planned_run("fp32, the SSD at full speed", config, trace, at_full_speed, progress)
        at_530 = _planned_run("fp32, loads held to 530 MB/s", config, trace, held, progress)
        bf16 = None
        if not form_of(Precision.BF16).is_emulated():
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
    recipe, fp32, held, bf16 = proof.recipe, proof.fp32, proof.held, proof.bf16
    in_bf16 = None if bf16 is None else bf16.images_per_s(OURS)
    bars: dict[str, list[float | None]] = {
        "SSD at full speed": [*(fp32.images_per_s(each) for each in (NAIVE, SAMBA, OURS)), in_bf16],
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


@dataclass(frozen=True, slots=True)
class Findings:
    """Contents of a report. ``parts``: by title; ``rounds``: number for each median; ``seconds``: time of the whole."""

    engine: EngineProof
    parts: Mapping[str, Measured]
    evaluation: Evaluation
    is_full: bool
    rounds: int
    seconds: float

    @property
    def targets(self) -> tuple[Target, ...]:
        of_parts = chain.from_iterable(measured.targets for measured in self.parts.values())
        return (*self.engine.targets, *of_parts, *self.evaluation.targets)


def prepare_folder(folder: Path) -> None:
    """Make a folder to write to, and prove that it takes a file: to be done before anything is measured.

    Raises ConfigError for a file in its place, OSError.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder}: is a file - name a folder, it is made where it is not there")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\0")
    except OSError as error:  # the error of a full disk has no path
        raise OSError(error.errno, error.strerror, str(folder)) from error


def measure_report(scratch: Path, progress: Progress, *, full: bool = False, repeats: int | None = None) -> Findings:
    """Measure everything. ``scratch``: a folder on the SSD to measure.

    Files generated there (4 GB, 24 GB in full) are removed afterwards. Raises ConfigError without room for them, and
    OSError.
    """
    started = time.monotonic()
    rounds = repeats or (FULL_REPEATS if full else SHORT_REPEATS)
    limit_s = KIND_LIMIT_S if full else SHORT_KIND_LIMIT_S
    parts = {"The agent alone": measure_start(scratch, starts=3 if full else 1)}
    progress("load", 0, 1)
    parts["SSD to runnable"] = measure_loading(scratch, files=FULL_FILES if full else SHORT_FILES)
    for kind in get_args(GraphKind) if full else ():  # an export and its packing take half a minute
        parts[f"SSD to runnable, ONNX {kind}"] = measure_graph_loading(scratch, kind, FULL_FILES)
    progress("load", 1, 1)
    parts["A decision"] = measure_growth()
    evaluation = evaluate(paper_devices(), progress, *(FULL_FORM if full else SHORT_FORM))
    engine = measure_engine(scratch, FULL if full else SHORT, rounds, progress, limit_s)
    parts["What a batch costs"] = measure_compute_forms(scratch, FULL_COMPUTE if full else SHORT_COMPUTE, progress)
    return Findings(engine, parts, evaluation, full, rounds, time.monotonic() - started)


def write_report(folder: Path, found: Findings) -> Path:
    """Write ``folder/report.md`` with its charts. Raises OSError."""
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    sections = (
        f"# CoServe on this box\n\n{now}, {'full' if found.is_full else SHORTENED}, medians of {found.rounds}, "
        f"{found.seconds:.0f} s. {found.engine.machine}. Generated experts have random weights; speeds are those of "
        "this machine at this moment, ratios are what counts.",
        targets_table(found.targets),
        engine_section(found.engine, folder),
        *(f"# {title}\n\n```\n{measured.text()}\n```" for title, measured in found.parts.items()),
        "# The paper's tasks, simulated\n\nOn the paper's two boxes, whose constants are derived from its text "
        "(`configs/devices`), each with its source.",
        write_figures(found.evaluation, folder),
    )
    path = folder / REPORT
    path.write_text("\n\n".join(section.strip() for section in sections) + "\n", encoding="utf-8")
    return path
