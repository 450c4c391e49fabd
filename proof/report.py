"""The whole proof as one Markdown report with charts: the project's targets, and this box's figures.

Guarantees: every figure is from a run of this command, with the machine it ran on; the table marks a missed target as
SHORT. ``full`` runs the traces and tasks that the targets are stated for, half an hour on two cores; the short form
takes under five minutes, and the report names its differences.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from typing import TYPE_CHECKING, get_args

from experts.errors import ConfigError
from profiler.bench.measured import targets_table
from profiler.profiling.profile_line import KIND_LIMIT_S
from profiler.workload.made_up_graphs import GraphKind
from proof.compute.measure import ComputeOptions, measure_compute_forms
from proof.engine import FULL, SHORT, SHORT_KIND_LIMIT_S, EngineProof, engine_section, measure_engine
from proof.paper.devices import paper_devices
from proof.paper.evaluation import FULL_FORM, SHORT_FORM, evaluate
from proof.paper.figures import write_figures
from proof.parts.decisions import measure_growth
from proof.parts.loading import measure_graph_loading, measure_loading
from proof.parts.starting import measure_start

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from profiler.bench.measured import Measured, Target
    from profiler.replay.player import Progress
    from proof.paper.evaluation import Evaluation

REPORT = "report.md"
SHORT_FILES, FULL_FILES = 4, 8  # experts that are loaded for the loading benchmark
SHORT_REPEATS, FULL_REPEATS = 1, 3
SHORT_COMPUTE = ComputeOptions(("resnet18",), rounds=7)
FULL_COMPUTE = ComputeOptions(("resnet18", "resnet50", "resnet101", "yolov5n", "yolov5m"))
SHORTENED = "short form: smaller traces, two of the four tasks, their searches on smaller samples"


@dataclass(frozen=True, slots=True)
class Findings:
    """Contents of a report. ``parts``: by title; ``rounds``: of each median; ``seconds``: of the whole."""

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
    except OSError as error:  # a full disk's does not say where
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
