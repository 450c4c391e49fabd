"""The paper's tasks scaled down: all its policies on the real engine of this box, with fewer experts and requests.

Kept of section 5.1: ResNet101 classifiers, one for each component type, a few YOLOv5m and YOLOv5l detectors in the
paper's proportion that every third type shares, log-normal quantities, a request every 4 ms, and memory for a tenth of
the experts. Changed: the numbers, the processors, and that loads read packed weights in the place of a framework's.

Guarantees: every policy plays the same trace over the same packed files, each once, in one run with the floor; what
was generated is removed, however it ends; a figure below the paper's stands there as it is.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from agent.config import read_line
from agent.runtime.machine.detection import detect
from experts.errors import ConfigError
from profiler.bench import rows
from profiler.bench.policy_runs import RunOptions, run_line
from profiler.tables import text_table
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
DETECTOR_PX, CPU_DETECTOR_PX = 640, 320  # four times the pixels are four times the time, which a CPU has not
HEADINGS = ("policy", "over samba", "the paper", "switches", "fewer", "the paper", "executors")
LAYOUT = "{:<15} {:>10} {:>9} {:>8} {:>7} {:>14}  {}"
PAPER_LEAST_FEWER = 0.785  # switches, against Samba-CoE (section 5.2)


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
    """All policies once on a line generated in ``directory`` and removed afterwards; notes tell its parts.

    Raises ConfigError where the disk has no room for it, AgentCrashed.
    """
    with removed_afterwards(directory) as folder:
        progress("generate", 0, 1)
        made = generate_line(folder / "line", recipe)
        progress("generate", 1, 1)
        config = read_line(made.line)
        measured = run_line(config, read_trace(made.trace, config.catalog), RunOptions(POLICIES), progress)
    return replace(measured, notes=(*_statements(recipe), *measured.notes))


def scaled_table(measurement: Measurement) -> str:
    """The rows and what they ran on, then each against Samba-CoE, the paper's own figures beside CoServe's."""
    samba = measurement.row(SAMBA).medians
    lines = [HEADINGS]
    for row in measurement.rows:
        figures, is_paper = row.medians, row.policy == PAPER
        lines.append(
            (
                row.policy,
                f"{figures.images_per_s / samba.images_per_s:.2f}",
                f"{LEAST_RATIO} to {MOST_RATIO:g}" if is_paper else "-",
                str(figures.switches),
                "-" if row.policy == SAMBA else f"{fewer_switches(figures.switches, samba.switches):.1%}",
                f"{PAPER_LEAST_FEWER:.1%} at least" if is_paper else "-",
                ", ".join(f"{count} {name}" for name, count in row.executors.items()),
            )
        )
    return "\n".join((rows.report(measurement), "", text_table(lines, LAYOUT), *_compared(measurement)))


def scaled_json(measurement: Measurement) -> dict[str, Any]:
    found = measurement.as_json()
    named = {"task": TASK, "device": measurement.machine}
    return found | {"rows": [named | row for row in found["rows"]]}


def _compared(measurement: Measurement) -> tuple[str, str]:
    """The paper's policy beside what the paper says of it."""
    samba, paper = measurement.row(SAMBA).medians, measurement.row(PAPER).medians
    ratio, fewer = paper.images_per_s / samba.images_per_s, fewer_switches(paper.switches, samba.switches)
    reached = "below it" if ratio < LEAST_RATIO else "above it" if ratio > MOST_RATIO else "within it"
    return (
        f"the paper  {PAPER} is {ratio:.2f} times samba, {LEAST_RATIO} to {MOST_RATIO:g} there at full size: {reached}",
        f"the paper  {PAPER} has {fewer:.1%} fewer switches, {PAPER_LEAST_FEWER:.1%} at least there: "
        f"{'reached' if fewer >= PAPER_LEAST_FEWER else 'below it'}",
    )


def _statements(recipe: LineRecipe) -> tuple[str, ...]:
    """The generated line, in words, for a comparison with the paper."""
    kinds = recipe.detector_architectures
    detectors = Counter(kinds[number % len(kinds)] for number in range(recipe.detectors))
    told = [f"{recipe.classifiers} {recipe.architecture} at {recipe.classifier_px} px"]
    told += [f"{count} {name} at {recipe.detector_px} px" for name, count in detectors.items()]
    count = recipe.classifiers + recipe.detectors
    statements = [
        f"{', '.join(told)}; memory for {recipe.memory_for} of {count}",
        f"{recipe.requests} requests, one every {recipe.every_s * 1e3:g} ms; quantities log-normal, "
        f"sigma {recipe.sigma:g}; each policy once",
    ]
    if recipe.detectors:
        statements.append(
            f"one type in {EVERY_DETECTED} goes on to a detector and there its classifier passes every image, in the "
            f"paper's tasks {PASS_RATE:.0%}: weights are random, and so are all other verdicts"
        )
    else:
        statements.append("no detectors with so few experts; weights are random, and so are the verdicts")
    return tuple(statements)
