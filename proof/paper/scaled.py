"""The paper's tasks scaled down: all its policies on the real engine of this box, with fewer experts and requests.

Kept of section 5.1: ResNet101 classifiers, one for each component type, a few YOLOv5m and YOLOv5l detectors in the
paper's proportion that every third type shares, log-normal quantities, a request every 4 ms, and memory for a tenth of
the experts. Changed: the numbers, the processors, and loads, which read packed weights instead of a framework's files.
Every policy plays the same trace once over the same packed files; generated files are removed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from agent.config import read_line
from agent.runtime.machine.detection import detect
from experts.errors import ConfigError
from profiler.bench.measured import Column, table_of
from profiler.bench.policy_runs import RunOptions, run_line
from profiler.bench.rows import PolicyRow, report
from profiler.workload.generated_line import EVERY_DETECTED, LineRecipe, generate_line, removed_afterwards
from profiler.workload.traces import read_trace
from proof.paper.evaluation import (
    ABLATIONS,
    COSERVE,
    LEAST_RATIO,
    MOST_RATIO,
    PAPER,
    SAMBA,
    SAMBA_FIFO,
    SAMBA_PARALLEL,
    fewer_switches,
)
from proof.paper.tasks import BOARDS, CLASSIFIER, DETECTORS, DETECTORS_OF_EACH, INTERVAL_S, PASS_RATE, SIGMA

if TYPE_CHECKING:
    from pathlib import Path

    from profiler.bench.rows import Measurement
    from profiler.replay.player import Progress

POLICIES = (SAMBA, SAMBA_FIFO, SAMBA_PARALLEL, *ABLATIONS, COSERVE)
TASK = "scaled"  # the task's name in rows
TYPES = BOARDS["A"].types
PAPER_HELD = 35  # experts that board A does best with in GPU memory (section 5.3, figure 18)
LEAST_HELD = 2
LEAST_EXPERTS = LEAST_HELD + 1  # or all of them fit, and nothing is ever switched
DETECTED_FROM = 8  # experts: from here on one detector of each architecture at least
DETECTOR_PX, CPU_DETECTOR_PX = 640, 320  # a CPU has no time for four times the pixels
PAPER_LEAST_FEWER = 0.785  # switches, against Samba-CoE (section 5.2)
COLUMNS = (
    Column("policy", "row.policy"),
    Column("over samba", "over", ".2f"),
    Column("switches", "row.medians.switches", "d"),
    Column("fewer", "fewer", ".1%"),
    Column("executors", "executors"),
)


def scaled_recipe(experts: int, requests: int, *, is_cpu_only: bool | None = None) -> LineRecipe:
    """Recipe of a line with so many experts. ``is_cpu_only``: None asks the box. Raises ConfigError."""
    if experts < LEAST_EXPERTS:
        raise ConfigError(
            f"--experts: {experts} is too few - memory holds {LEAST_HELD} at least, take {LEAST_EXPERTS} or more"
        )
    if is_cpu_only is None:
        is_cpu_only = detect().processors == ("cpu",)
    shared = DETECTORS_OF_EACH * len(DETECTORS)
    least = len(DETECTORS) if experts >= DETECTED_FROM else 0
    detectors = max(round(experts * shared / (TYPES + shared)), least)
    return LineRecipe(
        classifiers=experts - detectors,
        architecture=CLASSIFIER,
        detectors=detectors,
        detector_architectures=DETECTORS,
        requests=requests,
        every_s=INTERVAL_S,
        sigma=SIGMA,
        memory_for=max(round(experts * PAPER_HELD / TYPES), LEAST_HELD),
        detector_px=CPU_DETECTOR_PX if is_cpu_only else DETECTOR_PX,
    )


def measure_scaled(directory: Path, recipe: LineRecipe, progress: Progress) -> Measurement:
    """Run all policies once on a line generated in ``directory`` and removed afterwards; notes tell its parts.

    Raises ConfigError where the disk has no room for it, AgentCrashed.
    """
    with removed_afterwards(directory) as folder:
        progress("generate", 0, 1)
        made = generate_line(folder / "line", recipe)
        progress("generate", 1, 1)
        config = read_line(made.line)
        measured = run_line(config, read_trace(made.trace, config.catalog), RunOptions(POLICIES), progress)
    return replace(measured, notes=(*_statements(recipe), *measured.notes))


@dataclass(frozen=True, slots=True)
class _AgainstSamba:
    row: PolicyRow
    samba: PolicyRow

    @property
    def over(self) -> float:
        return self.row.medians.images_per_s / self.samba.medians.images_per_s

    @property
    def fewer(self) -> float | None:
        if self.row is self.samba:
            return None
        return fewer_switches(self.row.medians.switches, self.samba.medians.switches)

    @property
    def executors(self) -> str:
        return ", ".join(f"{count} {name}" for name, count in self.row.executors.items())


def scaled_table(measurement: Measurement) -> str:
    """The rows and their machine, then each against Samba-CoE, and the paper's policy beside the paper's words."""
    rows = [_AgainstSamba(row, measurement.row(SAMBA)) for row in measurement.rows]
    ours = _AgainstSamba(measurement.row(PAPER), measurement.row(SAMBA))
    fewer = ours.fewer or 0.0
    reached = "below it" if ours.over < LEAST_RATIO else "above it" if ours.over > MOST_RATIO else "within it"
    return "\n".join(
        (
            f"{report(measurement)}\n\n{table_of(COLUMNS, rows)}",
            f"the paper  {PAPER} is {ours.over:.2f} times samba, {LEAST_RATIO} to {MOST_RATIO:g} there at full size: "
            f"{reached}",
            f"the paper  {PAPER} has {fewer:.1%} fewer switches, {PAPER_LEAST_FEWER:.1%} at least there: "
            f"{'reached' if fewer >= PAPER_LEAST_FEWER else 'below it'}",
        )
    )


def scaled_json(measurement: Measurement) -> dict[str, Any]:
    found = measurement.as_json()
    named = {"task": TASK, "device": measurement.machine}
    return found | {"rows": [named | row for row in found["rows"]]}


def _statements(recipe: LineRecipe) -> tuple[str, ...]:
    """The generated line, in words, for a comparison with the paper."""
    kinds = recipe.detector_architectures
    detectors = Counter(kinds[number % len(kinds)] for number in range(recipe.detectors))
    told = [f"{recipe.classifiers} {recipe.architecture} at {recipe.classifier_px} px"]
    told += [f"{count} {name} at {recipe.detector_px} px" for name, count in detectors.items()]
    verdicts = "no detectors with so few experts; weights are random, and so are the verdicts"
    if recipe.detectors:
        verdicts = (
            f"one type in {EVERY_DETECTED} goes on to a detector and there its classifier passes every image, in the "
            f"paper's tasks {PASS_RATE:.0%}: weights are random, and so are all other verdicts"
        )
    return (
        f"{', '.join(told)}; memory for {recipe.memory_for} of {recipe.classifiers + recipe.detectors}",
        f"{recipe.requests} requests, one every {recipe.every_s * 1e3:g} ms; quantities log-normal, "
        f"sigma {recipe.sigma:g}; each policy once",
        verdicts,
    )
