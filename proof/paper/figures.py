"""Figures 13 to 19 of the paper beside ours: tables in Markdown, charts as PNG.

Guarantees: what stands under "the paper" is what its text says (CoServe, sections 5.2 and 5.3); the heights of the bars
in its figures are in no text and are not guessed. Whatever was simulated is shown, targets that are missed included.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

from profiler.charts import Labels, Series, bar_chart, line_chart
from profiler.tables import markdown_table
from proof.paper.best import highest
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
    short_form,
    shortfalls,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from proof.paper.best import Best
    from proof.paper.evaluation import Evaluation
    from proof.paper.systems import SystemRow


@dataclass(frozen=True, slots=True)
class Measure:
    """Quantity to compare systems by. ``form``: format of its figures in a table."""

    of: Callable[[SystemRow], float]
    unit: str
    form: str


SPEED = Measure(attrgetter("images_per_s"), "images/s", ".1f")
SWITCHES = Measure(attrgetter("switches"), "switches", "d")
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
FIGURE_19 = "Figure 19: what scheduling costs"
FIGURE_19_SAID = (
    "The paper: less than 3 % between scheduled and pre-scheduled inference, expert management at most 0.2 %."
)
NOT_SIMULATED = f"## {FIGURE_19}\n\n{FIGURE_19_SAID} Not part of the simulation: it is measured on the real engine."
PAPER_RATIOS = {"numa": "4.5 to 10.5", "uma": "4.6 to 12"}
PAPER_SWITCHES = {("B2", "numa"): "93.87 % (1,060 to 65)", ("B1", "uma"): "78.5 % (293 to 63)"}
PAPER_EXECUTORS = {"A": "3 GPU + 1 CPU", "B": "4 GPU + 1 CPU"}
PAPER_MEMORY = {
    "A": "window 28 to 39, 35 experts chosen, 25.4 images/s, linear error 7.7 %",
    "B": "window 31 to 42, 34 experts chosen, 26.7 images/s, linear error 7.5 %",
}


def write_figures(evaluation: Evaluation, folder: Path, figure_19: str = NOT_SIMULATED) -> str:
    """All figures as one Markdown text; the charts it shows are written into ``folder``.

    ``figure_19``: what scheduling costs, which is measured on the real engine and not simulated.
    """
    shortened = short_form(evaluation)
    sections = (
        *(() if shortened is None else (f"Short form. {shortened}",)),
        figure_13(evaluation, folder),
        figure_14(evaluation, folder),
        figure_15(evaluation, folder),
        figure_16(evaluation, folder),
        figure_17(evaluation, folder),
        figure_18(evaluation, folder),
        figure_19,
        short_of(evaluation),
    )
    return "\n\n".join(sections) + "\n"


def figure_13(evaluation: Evaluation, folder: Path) -> str:
    """Throughput of every system, and over Samba-CoE."""
    papers = ("the paper's, over all tasks", *(PAPER_RATIOS.get(device, "-") for _, device in evaluation.runs))
    lines = [*_lines(evaluation, BASELINES, SPEED), *_against_samba(evaluation, " over", papers, _ratio)]
    said = (
        "The paper: CoServe Casual is up to 8.5 (NUMA) and 10.6 (UMA) times Samba-CoE; on NUMA it is 5.71 % (24.5 to "
        f"23.1 images/s) to 18.75 % (27.2 to 22.1) below Best.\n\n{_split(evaluation)}"
    )
    charts = _charts(evaluation, folder, 13, "Throughput", BASELINES, SPEED)
    return section("Figure 13: throughput, images/s", charts, _header(evaluation), lines, said)


def figure_14(evaluation: Evaluation, folder: Path) -> str:
    """Expert switches: loads that a request had to wait for."""
    papers = ("the paper's", *(PAPER_SWITCHES.get(run, "78.5 to 93.87 %") for run in evaluation.runs))
    lines = [*_lines(evaluation, BASELINES, SWITCHES), *_against_samba(evaluation, ", fewer than", papers, _fewer)]
    said = (
        "A switch is a load, from the SSD or from host memory, that a request had to wait for. The paper: Best has "
        "1.28 to 18.18 % fewer than Casual on NUMA and 16.48 to 31.13 % fewer on UMA."
    )
    charts = _charts(evaluation, folder, 14, "Expert switches", BASELINES, SWITCHES)
    return section("Figure 14: expert switches", charts, _header(evaluation), lines, said)


def figure_15(evaluation: Evaluation, folder: Path) -> str:
    """Throughput of the ablations, and of our policy."""
    charts = _charts(evaluation, folder, 15, "Ablations", ABLATIONS, SPEED)
    lines = _lines(evaluation, (*ABLATIONS, *OURS), SPEED)
    said = "The paper: each optimisation adds to the throughput, None < EM < EM+RA < CoServe; its text has no figures."
    title = "Figure 15: throughput of the ablations, images/s"
    return section(title, charts, _header(evaluation), lines, said)


def figure_16(evaluation: Evaluation, folder: Path) -> str:
    """Switches of the ablations, and of our policy."""
    charts = _charts(evaluation, folder, 16, "Ablations: expert switches", ABLATIONS, SWITCHES)
    lines = _lines(evaluation, (*ABLATIONS, *OURS), SWITCHES)
    said = "The paper: each optimisation reduces the number of switches; its text has no figures."
    return section("Figure 16: expert switches of the ablations", charts, _header(evaluation), lines, said)


def figure_17(evaluation: Evaluation, folder: Path) -> str:
    """Throughput over the number of executors, on a sample."""
    searches = _paper_searches(evaluation)
    charts = []
    for device in dict.fromkeys(best.device for best in searches):
        sweeps = {best.board: _by_executors(best) for best in searches if best.device == device}
        settings = sorted({setting for sweep in sweeps.values() for setting in sweep})
        chart = folder / f"figure-17-{device}.png"
        bar_chart(
            chart,
            Labels(f"Executors of CoServe on {device}, on a sample", "images/s", note=SIMULATED),
            [f"{gpu}G+{cpu}C" for gpu, cpu in settings],
            {f"board {board}": [sweep.get(setting) for setting in settings] for board, sweep in sweeps.items()},
            unknown="not tried",
        )
        charts.append(chart)
    lines = []
    for best in searches:
        chosen = f"{best.system.executors[GPU]} GPU + {best.system.executors[CPU]} CPU"
        tried = ", ".join(f"{gpu}G+{cpu}C {value:.1f}" for (gpu, cpu), value in _by_executors(best).items())
        lines.append((best.board, best.device, chosen, PAPER_EXECUTORS.get(best.board, "-"), tried))
    header = ("board", "device", "best", "the paper's", "all that was run, images/s")
    said = (
        "G and C are executors of the GPU and of the CPU. The simulation charges one more executor the memory of its "
        "process and its part of the processor, and nothing else that the paper's further executors may cost."
    )
    return section("Figure 17: executors", charts, header, lines, said)


def figure_18(evaluation: Evaluation, folder: Path) -> str:
    """Throughput over the number of experts that the GPU's memory has room for, on a sample."""
    searches = [best for best in _paper_searches(evaluation) if best.memory]
    if not searches:
        return "## Figure 18: memory for experts\n\nNo device with a memory of the GPU's own was run."
    series = [
        Series(f"board {each.board}", [row.experts for row in each.memory], [row.images_per_s for row in each.memory])
        for each in searches
    ]
    chart = folder / "figure-18.png"
    labels = Labels("Room for experts in GPU memory, on a sample", "images/s", "experts", SIMULATED)
    line_chart(chart, labels, series)
    lines = []
    for best in searches:
        window, chosen = best.search.window if best.search else None, best.memory[highest(best.memory)]
        slid = f"{window.lower} to {window.upper}, {best.search.end}" if window and best.search else "-"
        tried = ", ".join(f"{row.experts}: {row.images_per_s:.1f}" for row in best.memory)
        ours = f"{chosen.experts} experts, {chosen.images_per_s:.1f} images/s"
        lines.append((best.board, best.device, slid, ours, PAPER_MEMORY.get(best.board, "-"), tried))
    header = ("board", "device", "window of the search", "best of all windows", "the paper's", "all, images/s")
    said = "Where the search stopped before the best window, the throughput of the sample did not rise in a line."
    return section("Figure 18: memory for experts", [chart], header, lines, said)


def short_of(evaluation: Evaluation) -> str:
    found = shortfalls(evaluation)
    listed = "\n".join(f"- {text}" for text in found) if found else "Nothing: every target is reached."
    return f"## Short of its target\n\n{listed}"


def _charts(
    evaluation: Evaluation, folder: Path, figure: int, title: str, policies: Sequence[str], measure: Measure
) -> list[Path]:
    charts = []
    for device in dict.fromkeys(row.device for row in evaluation.rows):
        runs = {f"task {task}": rows for (task, on), rows in evaluation.runs.items() if on == device}
        bars = {NAMES[policy]: [measure.of(rows[policy]) for rows in runs.values()] for policy in policies}
        charts.append(folder / f"figure-{figure}-{device}.png")
        labels = Labels(f"{title} on {device}", measure.unit, note=SIMULATED)
        bar_chart(charts[-1], labels, list(runs), bars)
    return charts


def _header(evaluation: Evaluation) -> tuple[str, ...]:
    return ("system", *(f"{task} {device}" for task, device in evaluation.runs))


def _lines(evaluation: Evaluation, policies: Sequence[str], measure: Measure) -> list[tuple[str, ...]]:
    return [
        (NAMES[policy], *(f"{measure.of(rows[policy]):{measure.form}}" for rows in evaluation.runs.values()))
        for policy in policies
    ]


def _against_samba(
    evaluation: Evaluation, over: str, papers: tuple[str, ...], text: Callable[[SystemRow, SystemRow], str]
) -> list[tuple[str, ...]]:
    """The paper's policy and ours against both rows of Samba-CoE, with what the paper says of it."""

    def against(than: str) -> list[tuple[str, ...]]:
        return [
            (f"{name}{over} {NAMES[than]}", *(text(rows[policy], rows[than]) for rows in evaluation.runs.values()))
            for name, policy in (("Best", PAPER), ("ours", COSERVE))
        ]

    best, ours = against(SAMBA)
    return [best, papers, ours, *against(SAMBA_ALL_MEMORY)]


def _ratio(row: SystemRow, than: SystemRow) -> str:
    return f"{row.images_per_s / than.images_per_s:.1f}"


def _fewer(row: SystemRow, than: SystemRow) -> str:
    return f"{fewer_switches(row.switches, than.switches):.1%}"


def _split(evaluation: Evaluation) -> str:
    """Split of Samba-CoE's memory in its main row, and the effect of the other split, row by row."""
    calibrated = evaluation.runs.get(("B2", "numa"))
    here = "" if calibrated is None else f" ({calibrated[SAMBA].switches:,} here)"
    said = (
        "Samba-CoE's main row keeps 75 % of the memory for experts and 25 % for batches, as Casual does: with that, "
        f"and with quantities of sigma 2, it makes about the paper's 1,060 switches in task B2 on NUMA{here}. But its "
        "one executor groups no requests, nearly all of its batches have one image, and that quarter is of little use "
        'to it. "All memory for experts" is the same with room for as many of the most used experts as fit beside one '
        "image"
    )
    found = []
    for (task, device), rows in evaluation.runs.items():
        main, other = rows[SAMBA], rows[SAMBA_ALL_MEMORY]
        best, ours = (
            " to ".join(f"{rows[policy].images_per_s / samba.images_per_s:.2f}" for samba in (main, other))
            for policy in (PAPER, COSERVE)
        )
        changes = f"{main.experts} to {other.experts} experts, {main.switches} to {other.switches} switches"
        found.append(f"- {task} {device}: {changes}, Best over it {best}, ours {ours}")
    return "\n".join((f"{said}. From the one to the other:\n", *found))


def _paper_searches(evaluation: Evaluation) -> list[Best]:
    return [best for best in evaluation.best if best.system.policy == PAPER]


def _by_executors(best: Best) -> dict[tuple[int, int], float]:
    return {(row.executors.get(GPU, 0), row.executors.get(CPU, 0)): row.images_per_s for row in best.executors}


def section(
    title: str, charts: Iterable[Path], header: Sequence[str], lines: Iterable[Sequence[str]], said: str
) -> str:
    images = "\n".join(f"![{title}]({chart.name})" for chart in charts)
    return f"## {title}\n\n{images}\n\n{markdown_table([header, *lines])}\n\n{said}"
