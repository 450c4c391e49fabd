"""The whole proof as one Markdown report with charts: what this project set itself, and what this box made of it.

Guarantees: every figure is from a run of this command, with the machine it ran on; a target that is missed stands in
the table as SHORT. ``full`` runs the traces and tasks that the targets are stated for, which takes half an hour
on two cores; the short form runs smaller ones in under five minutes, and says what it shortens.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from experts.errors import ConfigError
from profiler.bench import rows
from profiler.charts import Labels, bar_chart
from profiler.profiling.profile_line import KIND_LIMIT_S
from profiler.tables import markdown_table
from profiler.targets import Target, targets_table
from profiler.workload.graph_kinds import GraphKind
from proof.compute import table as compute_table
from proof.compute.measure import ComputeOptions, measure_compute_forms
from proof.engine import FULL, NAIVE, OURS, SHORT, SHORT_KIND_LIMIT_S, measure_proof
from proof.paper.evaluation import FULL_FORM, SAMBA, SHORT_FORM, evaluate
from proof.paper.figures import write_figures
from proof.paper.task_devices import DEVICE_FILES, task_devices
from proof.parts import decisions, loading, starting
from proof.parts.decisions import decision_targets
from proof.parts.loading import measure_graph_loading, measure_loading
from proof.parts.starting import measure_start
from proof.scheduling.cost import figure_19

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from profiler.replay.player import Progress
    from proof.compute.table import ComputeTable
    from proof.engine import Proof
    from proof.paper.evaluation import Evaluation
    from proof.parts.decisions import DecisionTimes
    from proof.parts.loading import LoadingTimes
    from proof.parts.starting import StartTimes

REPORT = "report.md"
SHORT_FILES, FULL_FILES = 4, 8  # experts that are loaded for the loading benchmark
SHORT_REPEATS, FULL_REPEATS = 1, 3
SHORT_COMPUTE = ComputeOptions(("resnet18",), rounds=7, tells_spending=False)
FULL_COMPUTE = ComputeOptions(("resnet18", "resnet50", "resnet101", "yolov5n", "yolov5m"))


@dataclass(frozen=True, slots=True)
class Findings:
    """Contents of a report. ``rounds``: of each median; ``seconds``: of the whole."""

    proof: Proof
    loads: Sequence[LoadingTimes]
    start: StartTimes
    decisions: Sequence[DecisionTimes]
    evaluation: Evaluation
    compute: ComputeTable
    is_full: bool
    rounds: int
    seconds: float

    @property
    def targets(self) -> tuple[Target, ...]:
        return (
            *self.proof.targets,
            *(target for times in self.loads for target in times.targets),
            *decision_targets(self.decisions),
            *self.start.targets,
            *self.evaluation.targets,
            *self.compute.targets,
        )


def prepare_folder(folder: Path) -> None:
    """Make a folder to write to, and prove that it takes a file: to be done before anything is measured.

    Raises ConfigError for a file in its place, OSError for what the disk refuses.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder}: is a file - name a folder, it is made where it is not there")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\0")
    except OSError as error:  # a full disk's does not say where
        raise OSError(error.errno, error.strerror, str(folder)) from error


def measure_report(scratch: Path, progress: Progress, *, full: bool = False, repeats: int | None = None) -> Findings:
    """Measure everything, what takes longest last. ``scratch``: a folder on the SSD to measure.

    What is generated there (4 GB, 24 GB in full) is removed afterwards. Raises ConfigError without room for it, and
    OSError for what the disk refuses.
    """
    started = time.monotonic()
    rounds = repeats or (FULL_REPEATS if full else SHORT_REPEATS)
    limit_s = KIND_LIMIT_S if full else SHORT_KIND_LIMIT_S
    start = measure_start(scratch, starts=3 if full else 1)
    progress("load", 0, 1)
    loads = [measure_loading(scratch, files=FULL_FILES if full else SHORT_FILES)]
    if full:  # an export and its packing take half a minute
        loads += [measure_graph_loading(scratch, kind, FULL_FILES) for kind in GraphKind]
    progress("load", 1, 1)
    decided = decisions.measure_growth()
    evaluation = evaluate(task_devices(tuple(DEVICE_FILES)), progress, *(FULL_FORM if full else SHORT_FORM))
    proof = measure_proof(scratch, FULL if full else SHORT, rounds, progress, limit_s)
    compute = measure_compute_forms(scratch, FULL_COMPUTE if full else SHORT_COMPUTE, progress)
    return Findings(proof, loads, start, decided, evaluation, compute, full, rounds, time.monotonic() - started)


def write_report(folder: Path, found: Findings) -> Path:
    """Write ``folder/report.md`` with its charts. Raises OSError."""
    figures = write_figures(found.evaluation, folder, figure_19(folder, found.proof.scheduling))
    parts = (
        _opening(found.proof, found.is_full, found.rounds, found.seconds),
        targets_table(found.targets),
        _proof_section(found.proof, folder),
        _verbatim("What a batch costs", compute_table.report(found.compute)),
        _verbatim("SSD to runnable", "\n\n".join(loading.report(times) for times in found.loads)),
        _verbatim("A decision", decisions.report(found.decisions)),
        _verbatim("The agent alone", starting.report(found.start)),
        "# The paper's tasks, simulated\n\nOn the paper's two boxes, whose constants are derived from its text "
        "(`configs/devices`), each with its source.",
        figures,
    )
    path = folder / REPORT
    path.write_text("\n\n".join(part.strip() for part in parts) + "\n", encoding="utf-8")
    return path


def _opening(proof: Proof, full: bool, rounds: int, seconds: float) -> str:
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    form = "full" if full else "short form: smaller traces, two of the four tasks, their searches on smaller samples"
    machine = proof.fp32.measured.machine
    return (
        f"# CoServe on this box\n\n{now}, {form}, medians of {rounds}, {seconds:.0f} s. {machine}. What was generated "
        "has random weights; speeds are those of this machine at this moment, ratios are what counts."
    )


def _proof_section(proof: Proof, folder: Path) -> str:
    recipe = proof.recipe
    fp32, held = proof.fp32, proof.held
    bars: dict[str, list[float | None]] = {
        "SSD at full speed": [
            fp32.images_per_s(NAIVE),
            fp32.images_per_s(SAMBA),
            fp32.images_per_s(OURS),
            proof.bf16.images_per_s(OURS),
        ],
        "loads held to 530 MB/s": [None, held.images_per_s(SAMBA), held.images_per_s(OURS), None],
    }
    groups = ["naive server, fp32", "samba, fp32", "coserve, fp32", "coserve, bf16"]
    chart = folder / "real-engine.png"
    trace = f"{recipe.classifiers} {recipe.architecture}, memory for {recipe.memory_for}, {recipe.requests} requests"
    bar_chart(chart, Labels(f"Real engine: {trace}", "images/s", note=fp32.measured.machine), groups, bars)
    return "\n\n".join(
        (
            f"# On the real engine\n\n{trace}, one every {recipe.every_s * 1e3:g} ms. `naive`: a general server, least "
            "recently used, first come first served, `torch.load`, its files read cold. The comparisons follow one "
            "another; the rows of one are interleaved. Memory is the same number of bytes throughout.",
            f"![{trace}]({chart.name})",
            _plan_table(proof),
            *(f"## {each.title}\n\n```\n{rows.report(each.measured)}\n```" for each in proof.comparisons),
        )
    )


def _plan_table(proof: Proof) -> str:
    lines = [
        (each.title, policy, f"{planned:.2f}", f"{each.images_per_s(policy):.2f}", f"{each.error(policy):+.1%}")
        for each in proof.comparisons
        for policy, planned in each.planned.items()
    ]
    table = markdown_table([("trace", "policy", "planned, images/s", "measured", "plan off by"), *lines])
    return f"`coserve plan`, from a profile made before, against the measurement:\n\n{table}"


def _verbatim(title: str, text: str) -> str:
    return f"# {title}\n\n```\n{text}\n```"
