"""Figures 13 to 18 of the paper beside ours: tables in Markdown, charts as PNG.

Guarantees: rows named "the paper" hold what its text says (CoServe, sections 5.2 and 5.3); the heights of its bars are
in no text and are not guessed. Every simulated row is shown, missed targets included.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

from profiler.charts import Labels, Series, bar_chart, line_chart
from profiler.tables import markdown_table
from proof.paper.devices import CPU, GPU
from proof.paper.evaluation import (
    ABLATIONS,
    CASUAL,
    COSERVE,
    COSERVE_5S,
    COSERVE_PACKED,
    PAPER,
    SAMBA,
    SAMBA_ALL_MEMORY,
    SAMBA_FIFO,
    SAMBA_PARALLEL,
    SAMBAS,
    fewer_switches,
    highest,
    short_form,
    shortfalls,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from proof.paper.evaluation import Best, Evaluation
    from proof.paper.systems import SystemRow

NAMES = {
    SAMBA: "Samba-CoE",
    SAMBA_ALL_MEMORY: "Samba-CoE, all memory for experts",
    SAMBA_FIFO: "Samba-CoE FIFO",
    SAMBA_PARALLEL: "Samba-CoE Parallel",
    CASUAL: "CoServe Casual",
    PAPER: "CoServe Best",
    COSERVE: "coserve (ours)",
    COSERVE_5S: "coserve, overtaking 5 s at most",
    COSERVE_PACKED: "coserve, packed weights",
    "none": "CoServe None",
    "em": "CoServe EM",
    "em-ra": "CoServe EM+RA",
}
BASELINES = (*SAMBAS, CASUAL, PAPER, COSERVE, COSERVE_PACKED)
OURS = (COSERVE, COSERVE_5S, COSERVE_PACKED)
SIMULATED = "simulated; constants of the paper's devices are derived from its text"
PAPER_RATIOS = {"numa": "4.5 to 10.5", "uma": "4.6 to 12"}
PAPER_SWITCHES = {("B2", "numa"): "93.87 % (1,060 to 65)", ("B1", "uma"): "78.5 % (293 to 63)"}
PAPER_EXECUTORS = {"A": "3 GPU + 1 CPU", "B": "4 GPU + 1 CPU"}
PAPER_MEMORY = {
    "A": "window 28 to 39, 35 experts chosen, 25.4 images/s, linear error 7.7 %",
    "B": "window 31 to 42, 34 experts chosen, 26.7 images/s, linear error 7.5 %",
}


@dataclass(frozen=True, slots=True)
class SystemsFigure:
    """A figure that compares systems by one quantity, ``of`` a row. ``drawn`` systems are in its charts.

    ``against``: words and figures of the paper's policy and ours against Samba-CoE's rows, where the figure has them.
    """

    number: int
    title: str
    chart: str
    unit: str
    of: Callable[[SystemRow], float]
    form: str
    drawn: Sequence[str]
    listed: Sequence[str]
    caption: str
    against: tuple[str, Callable[[SystemRow, SystemRow], str]] | None = None


SPEED, SWITCHES = attrgetter("images_per_s"), attrgetter("switches")
COMPARISONS = (
    SystemsFigure(
        13, "throughput, images/s", "Throughput", "images/s", SPEED, ".1f", BASELINES, BASELINES,
        "The paper: CoServe Casual is up to 8.5 (NUMA) and 10.6 (UMA) times Samba-CoE; on NUMA it is 5.71 % (24.5 to "
        "23.1 images/s) to 18.75 % (27.2 to 22.1) below Best.",
        (" over", lambda row, than: f"{row.images_per_s / than.images_per_s:.1f}"),
    ),
    SystemsFigure(
        14, "expert switches", "Expert switches", "switches", SWITCHES, "d", BASELINES, BASELINES,
        "A switch is a load, from the SSD or from host memory, that a request had to wait for. The paper: Best has "
        "1.28 to 18.18 % fewer than Casual on NUMA and 16.48 to 31.13 % fewer on UMA.",
        (", fewer than", lambda row, than: f"{fewer_switches(row.switches, than.switches):.1%}"),
    ),
    SystemsFigure(
        15, "throughput of the ablations, images/s", "Ablations", "images/s", SPEED, ".1f", ABLATIONS,
        (*ABLATIONS, *OURS),
        "The paper: each optimisation adds to the throughput, None < EM < EM+RA < CoServe; its text has no figures.",
    ),
    SystemsFigure(
        16, "expert switches of the ablations", "Ablations: expert switches", "switches", SWITCHES, "d", ABLATIONS,
        (*ABLATIONS, *OURS), "The paper: each optimisation reduces the number of switches; its text has no figures.",
    ),
)  # fmt: skip


def write_figures(evaluation: Evaluation, folder: Path) -> str:
    """All figures as one Markdown text; the charts it shows are written into ``folder``."""
    shortened = short_form(evaluation)
    missed = shortfalls(evaluation)
    listed = "\n".join(f"- {text}" for text in missed) if missed else "Nothing: every target is reached."
    searches = [best for best in evaluation.best if best.system.policy == PAPER]
    sections = (
        *(() if shortened is None else (f"Short form. {shortened}",)),
        *(_compared(each, evaluation, folder) for each in COMPARISONS),
        _figure_17(searches, folder),
        _figure_18([best for best in searches if best.memory], folder),
        f"## Short of its target\n\n{listed}",
    )
    return "\n\n".join(sections) + "\n"


def _compared(figure: SystemsFigure, evaluation: Evaluation, folder: Path) -> str:
    runs = evaluation.runs
    charts = []
    for device in dict.fromkeys(row.device for row in evaluation.rows):
        tasks = {f"task {task}": rows for (task, on), rows in runs.items() if on == device}
        bars = {NAMES[policy]: [figure.of(rows[policy]) for rows in tasks.values()] for policy in figure.drawn}
        charts.append(folder / f"figure-{figure.number}-{device}.png")
        bar_chart(charts[-1], Labels(f"{figure.chart} on {device}", figure.unit, note=SIMULATED), list(tasks), bars)
    lines = [
        (NAMES[policy], *(f"{figure.of(rows[policy]):{figure.form}}" for rows in runs.values()))
        for policy in figure.listed
    ]
    caption = figure.caption
    if figure.against is not None:
        lines += _against_samba(figure, runs)
    if figure.number == 13:
        caption += f"\n\n{_split(runs)}"
    header = ("system", *(f"{task} {device}" for task, device in runs))
    return _section(f"Figure {figure.number}: {figure.title}", charts, [header, *lines], caption)


def _against_samba(
    figure: SystemsFigure, runs: Mapping[tuple[str, str], Mapping[str, SystemRow]]
) -> list[tuple[str, ...]]:
    assert figure.against is not None
    over, text = figure.against
    best, ours, *all_memory = [
        (f"{name}{over} {NAMES[than]}", *(text(rows[policy], rows[than]) for rows in runs.values()))
        for than in (SAMBA, SAMBA_ALL_MEMORY)
        for name, policy in (("Best", PAPER), ("ours", COSERVE))
    ]
    papers = (
        ("the paper's, over all tasks", *(PAPER_RATIOS.get(device, "-") for _, device in runs))
        if figure.of is SPEED
        else ("the paper's", *(PAPER_SWITCHES.get(run, "78.5 to 93.87 %") for run in runs))
    )
    return [best, papers, ours, *all_memory]


def _split(runs: Mapping[tuple[str, str], Mapping[str, SystemRow]]) -> str:
    calibrated = runs.get(("B2", "numa"))
    here = "" if calibrated is None else f" ({calibrated[SAMBA].switches:,} here)"
    found = [
        "Samba-CoE's main row keeps 75 % of the memory for experts and 25 % for batches, as Casual does: with that, "
        f"and with quantities of sigma 2, it makes about the paper's 1,060 switches in task B2 on NUMA{here}. But its "
        "one executor groups no requests, nearly all of its batches have one image, and that quarter is of little use "
        'to it. "All memory for experts" is the same with room for as many of the most used experts as fit beside one '
        "image. From the one to the other:\n"
    ]
    for (task, device), rows in runs.items():
        main, other = rows[SAMBA], rows[SAMBA_ALL_MEMORY]
        best, ours = (
            " to ".join(f"{rows[policy].images_per_s / samba.images_per_s:.2f}" for samba in (main, other))
            for policy in (PAPER, COSERVE)
        )
        changes = f"{main.experts} to {other.experts} experts, {main.switches} to {other.switches} switches"
        found.append(f"- {task} {device}: {changes}, Best over it {best}, ours {ours}")
    return "\n".join(found)


def _figure_17(searches: Sequence[Best], folder: Path) -> str:
    charts = []
    for device in dict.fromkeys(best.device for best in searches):
        sweeps = {best.board: _by_executors(best) for best in searches if best.device == device}
        settings = sorted({setting for sweep in sweeps.values() for setting in sweep})
        charts.append(folder / f"figure-17-{device}.png")
        labels = Labels(f"Executors of CoServe on {device}, on a sample", "images/s", note=SIMULATED)
        bars = {f"board {board}": [sweep.get(setting) for setting in settings] for board, sweep in sweeps.items()}
        bar_chart(charts[-1], labels, [f"{gpu}G+{cpu}C" for gpu, cpu in settings], bars, unknown="not tried")
    lines: list[tuple[str, ...]] = [("board", "device", "best", "the paper's", "all that was run, images/s")]
    for best in searches:
        chosen = f"{best.system.executors[GPU]} GPU + {best.system.executors[CPU]} CPU"
        tried = ", ".join(f"{gpu}G+{cpu}C {value:.1f}" for (gpu, cpu), value in _by_executors(best).items())
        lines.append((best.board, best.device, chosen, PAPER_EXECUTORS.get(best.board, "-"), tried))
    caption = (
        "G and C are executors of the GPU and of the CPU. The simulation charges one more executor the memory of its "
        "process and its part of the processor, and nothing else that the paper's further executors may cost."
    )
    return _section("Figure 17: executors", charts, lines, caption)


def _figure_18(searches: Sequence[Best], folder: Path) -> str:
    if not searches:
        return "## Figure 18: memory for experts\n\nNo device with separate GPU memory was run."
    series = [
        Series(f"board {each.board}", [row.experts for row in each.memory], [row.images_per_s for row in each.memory])
        for each in searches
    ]
    chart = folder / "figure-18.png"
    labels = Labels("Room for experts in GPU memory, on a sample", "images/s", "experts", SIMULATED)
    line_chart(chart, labels, series)
    lines: list[tuple[str, ...]] = [
        ("board", "device", "window of the search", "best of all windows", "the paper's", "all, images/s")
    ]
    for best in searches:
        window, chosen = best.search.window if best.search else None, best.memory[highest(best.memory)]
        slid = f"{window.lower} to {window.upper}, {best.search.end}" if window and best.search else "-"
        tried = ", ".join(f"{row.experts}: {row.images_per_s:.1f}" for row in best.memory)
        ours = f"{chosen.experts} experts, {chosen.images_per_s:.1f} images/s"
        lines.append((best.board, best.device, slid, ours, PAPER_MEMORY.get(best.board, "-"), tried))
    caption = "Where the search stopped before the best window, the throughput of the sample did not rise in a line."
    return _section("Figure 18: memory for experts", [chart], lines, caption)


def _by_executors(best: Best) -> dict[tuple[int, int], float]:
    return {(row.executors.get(GPU, 0), row.executors.get(CPU, 0)): row.images_per_s for row in best.executors}


def _section(title: str, charts: Sequence[Path], lines: Sequence[Sequence[str]], caption: str) -> str:
    images = "\n".join(f"![{title}]({chart.name})" for chart in charts)
    return f"## {title}\n\n{images}\n\n{markdown_table(lines)}\n\n{caption}"
