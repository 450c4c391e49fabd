"""Figures 10 to 13 of DeepSpeed-MoE (arXiv 2201.05596, section 5.5), simulated, beside what the paper's text says.

Guarantees: targets are sentences of the text; our copy of the paper has no figures. One quantity is fitted, to one
number of figure 11: a launch of the baseline. Everything else is a prediction, and a missed target is SHORT.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from experts.llm.parallel.costs import ExchangeForm, all_to_all, tensor_gather
from experts.llm.parallel.shape import MeshShape
from profiler.bench.measured import Column, Measured, Target
from profiler.charts import Labels, Series, bar_chart, line_chart
from proof.mesh.decoding import (
    BASELINE,
    GPU_TOKENS,
    LAUNCH_S,
    NODE_GPUS,
    OPTIMISED,
    PR_MOE,
    RESERVED_BYTES,
    STANDARD,
    STUDENT,
    TABLE_6,
    decode,
    fits,
    forms_of,
    layout_s,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from proof.mesh.decoding import DecodingStep, MixtureModel, MoeSystem

    Grid = dict[tuple[str, str, str, int], DecodingStep]  # by system, model, form and GPUs

GPU_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # powers of two, as in the paper
FIGURE_10 = (8, 16, 32, 64)
BASELINE_GPUS = 128  # in figure 11; the optimised system has twice as many for trillion-scale models
LARGEST_GAIN, LONGEST_S = 7.3, 0.025  # in latency, and for a trillion parameters (section 5.5.2)
LEAST_KERNEL_GAIN = 6  # section 5.4
FORMS = (STANDARD, PR_MOE, STUDENT)
COLUMNS = (
    Column("model", "model"),
    Column("form", "form"),
    Column("system", "system"),
    Column("GPUs", "gpus", "d"),
    Column("all-to-all", "exchange"),
    Column("GB/GPU", "gpu_bytes", ".1f", 1e-9),
    Column("latency, ms", "latency_s", ".2f", 1e3),
    Column("tokens/s/GPU", "gpu_tokens_per_s", ".0f"),
    Column("compute, ms", "compute_s", ".2f", 1e3),
    Column("messages, ms", "messages_s", ".2f", 1e3),
    Column("launches, ms", "launches_s", ".2f", 1e3),
)


def simulate_figures(gpu_tokens: int = GPU_TOKENS) -> Measured:
    """Every form of every model on all meshes from one node upwards that hold it: figure 13, with 10 and 11 in it.

    ``gpu_tokens``: sequences for each GPU, equal for all systems and meshes.
    """
    baseline = fitted_baseline(gpu_tokens)
    steps = tuple(
        decode(form, gpus, system, gpu_tokens)
        for model in TABLE_6
        for system, form in ((baseline, model), *((OPTIMISED, form) for form in forms_of(model)))
        for gpus in GPU_COUNTS
        if gpus >= NODE_GPUS and fits(form, gpus) and (system is OPTIMISED or gpus <= BASELINE_GPUS)
    )
    mesh = f"simulated: A100 40 GB, nodes of {NODE_GPUS}, HDR InfiniBand; {gpu_tokens} sequences for each GPU"
    grid = grid_of(steps)
    return Measured(mesh, COLUMNS, steps, _targets(grid, gpu_tokens), _notes(grid, baseline))


def fitted_baseline(gpu_tokens: int = GPU_TOKENS) -> MoeSystem:
    """The baseline whose launches make the largest gain of figure 11 the paper's 7.3."""
    launches_s = []
    for model in TABLE_6:
        theirs, ours = (decode(model, gpus_in_11(model, each), each, gpu_tokens) for each in (BASELINE, OPTIMISED))
        launches_s.append((LARGEST_GAIN * ours.latency_s - theirs.latency_s) / theirs.launches)
    return replace(BASELINE, launch_s=max(min(launches_s), 0.0))


def gpus_in_11(model: MixtureModel, system: MoeSystem) -> int:
    return BASELINE_GPUS * (2 if model.parameters > 1e12 and system is OPTIMISED else 1)


def grid_of(steps: Sequence[DecodingStep]) -> Grid:
    return {(step.system, step.model, step.form, step.gpus): step for step in steps}


def figure_10(grid: Grid, system: MoeSystem) -> list[DecodingStep]:
    return [grid[system.name, TABLE_6[0].name, STANDARD, gpus] for gpus in FIGURE_10]


def figure_11(grid: Grid, system: MoeSystem) -> list[DecodingStep]:
    return [grid[system.name, model.name, STANDARD, gpus_in_11(model, system)] for model in TABLE_6]


def gains_of(grid: Grid) -> list[float]:
    """Gains in latency, by model of figure 11."""
    pairs = zip(figure_11(grid, BASELINE), figure_11(grid, OPTIMISED), strict=True)
    return [theirs.latency_s / ours.latency_s for theirs, ours in pairs]


def slower_students(grid: Grid) -> list[str]:
    """Meshes on which another form is faster than PR-MoE+MoS."""
    fastest: dict[tuple[str, int], DecodingStep] = {}
    for step in sorted(grid.values(), key=lambda step: -step.latency_s):
        fastest[step.model, step.gpus] = step
    return [f"{model} on {gpus} GPUs" for (model, gpus), step in fastest.items() if step.form != STUDENT]


def fewest_gpus(model: MixtureModel) -> int:
    return next(gpus for gpus in GPU_COUNTS if fits(model, gpus))


def messages_of(ranks: int) -> tuple[int, int, int, int]:
    """Messages of a rank in one direction: flat, hierarchical, coordinated, and the gather after the last.

    Nodes of 8, tensor-slicing by 8, as in the paper's example (section 5.3); a smaller mesh is one node.
    """
    node = min(ranks, NODE_GPUS)
    whole, sliced = MeshShape(1, ranks, 1, node_ranks=node), MeshShape(1, ranks // node, node, node_ranks=node)
    shapes = {ExchangeForm.FLAT: whole, ExchangeForm.HIERARCHICAL: whole, ExchangeForm.COORDINATED: sliced}
    flat, hierarchical, coordinated = (all_to_all(shape, form, 1).messages for form, shape in shapes.items())
    return flat, hierarchical, coordinated, tensor_gather(sliced, 1).messages


def kernel_gain(model: MixtureModel, gpu_tokens: int = GPU_TOKENS) -> float:
    """Gain in gating and layouts of a layer. A launch takes both systems the same time: nothing is fitted."""
    tokens = gpu_tokens * model.tensor
    times = [each.gating * LAUNCH_S + layout_s(128, model.hidden, tokens, each) for each in (BASELINE, OPTIMISED)]
    return times[0] / times[1]


def _targets(grid: Grid, gpu_tokens: int) -> tuple[Target, ...]:
    theirs, ours = figure_10(grid, BASELINE), figure_10(grid, OPTIMISED)
    their_gain, our_gain = (each[-1].gpu_tokens_per_s / each[0].gpu_tokens_per_s for each in (theirs, ours))
    late = theirs[2].latency_s / theirs[3].latency_s
    trillion = figure_11(grid, OPTIMISED)[3]
    needs = [(fewest_gpus(model), fewest_gpus(forms_of(model)[2])) for model in TABLE_6]
    halved = sum(whole >= 2 * student for whole, student in needs)
    slower = len(slower_students(grid))
    kernels = min(kernel_gain(model, gpu_tokens) for model in TABLE_6)
    flat, _, coordinated, _ = messages_of(128)
    rows = (
        ("10: optimised latency falls", "8 to 64 GPUs", _ms(ours), _falls(ours)),
        ("10: optimised throughput per GPU, 64 over 8", "above 1", f"{our_gain:.2f}", our_gain > 1),
        ("10: baseline latency falls", "8 to 32 GPUs", _ms(theirs[:3]), _falls(theirs[:3])),
        ("10: baseline latency, 32 GPUs over 64", "at most 1", f"{late:.2f}", late <= 1),
        ("10: baseline throughput per GPU, 64 over 8", "below ours", f"{their_gain:.2f}", their_gain < our_gain),
        ("11: largest gain in latency, fitted", "7.3", f"{max(gains_of(grid)):.2f}", None),
        ("11: a trillion parameters", "under 25 ms", _ms([trillion]), trillion.latency_s < LONGEST_S),
        ("12: half the GPUs for PR-MoE+MoS", "each model", f"{halved} of {len(needs)}", halved == len(needs)),
        ("12: 16 GPUs instead of 32", "a model", f"{needs.count((32, 16))}", (32, 16) in needs),
        ("13: PR-MoE+MoS is not the fastest on", "0 meshes", f"{slower}", not slower),
        ("5.4: gain in gating and layouts, nothing fitted", "over 6", f"{kernels:.1f}", kernels > LEAST_KERNEL_GAIN),
        ("5.3: messages of 128 ranks, sliced by 8", "127 to 15", f"{flat} to {coordinated}", coordinated == 15),
    )
    return tuple(Target(*row) for row in rows)


def _falls(steps: Sequence[DecodingStep]) -> bool:
    return all(later.latency_s < earlier.latency_s for earlier, later in pairwise(steps))


def _ms(steps: Sequence[DecodingStep]) -> str:
    return ", ".join(f"{step.latency_s * 1e3:.1f}" for step in steps) + " ms"


def _notes(grid: Grid, baseline: MoeSystem) -> tuple[str, ...]:
    gains = ", ".join(f"{gain:.1f}" for gain in gains_of(grid))
    needs = [
        ", ".join(f"{form.form} ({form.parameters / 1e9:.1f} billion) {fewest_gpus(form)}" for form in forms_of(model))
        for model in TABLE_6
    ]
    rows = ["{}: {}, {}, {} and {}".format(ranks, *messages_of(ranks)) for ranks in GPU_COUNTS[2:]]
    return (
        f"fitted: {baseline.launch_s * 1e6:.1f} us for a launch of the baseline, to the 7.3 of figure 11; it stands "
        "for all of PyTorch that is not simulated. Figure 12 and the optimised rows have nothing fitted",
        "figure 10: 1.3B+MoE-128 as MoE on 8 to 64 GPUs",
        "figure 11: MoE, the baseline on 128 GPUs, the optimised on 128, 24B and 47B on 256. Gains in latency, and "
        f"so in throughput: {gains}",
        *(f"figure 12: GPUs for {model.name}: {each}" for model, each in zip(TABLE_6, needs, strict=True)),
        f"figure 12: counts are powers of two; {RESERVED_BYTES >> 30} GiB of each GPU hold no weights (assumed)",
        f"figure 13: PR-MoE+MoS is not the fastest: {'; '.join(slower_students(grid)) or 'nowhere'}",
        f"messages of a rank, flat, hierarchical, coordinated and its gather: {'; '.join(rows)}",
    )


def write_figures(folder: Path, measured: Measured) -> None:
    """Write ``folder/mesh.md`` with its charts. Raises OSError."""
    grid = grid_of(measured.rows)
    systems, names = (BASELINE, OPTIMISED), [model.name for model in TABLE_6]
    note = f"simulated; a launch of the baseline is fitted to the {LARGEST_GAIN} of figure 11"
    quantities: dict[str, tuple[str, Callable[[DecodingStep], float]]] = {
        "latency": ("ms", lambda step: step.latency_s * 1e3),
        "throughput": ("tokens/s for each GPU", lambda step: step.gpu_tokens_per_s),
    }
    charts = []
    for quantity, (unit, of) in quantities.items():
        charts.append(f"figure-10-{quantity}.png")
        curves = [Series(each.name, FIGURE_10, [of(step) for step in figure_10(grid, each)]) for each in systems]
        line_chart(folder / charts[-1], Labels(f"Figure 10: {quantity}, {names[0]}", unit, "GPUs", note), curves)
        charts.append(f"figure-11-{quantity}.png")
        labels = Labels(f"Figure 11: {quantity}, 128 GPUs (optimised 24B and 47B: 256)", unit, note=note)
        bar_chart(
            folder / charts[-1], labels, names, {each.name: [of(s) for s in figure_11(grid, each)] for each in systems}
        )
    charts.append("figure-12.png")
    needed = {form: [float(fewest_gpus(forms_of(model)[n])) for model in TABLE_6] for n, form in enumerate(FORMS)}
    bar_chart(folder / charts[-1], Labels("Figure 12: fewest GPUs", "GPUs", note="simulated"), names, needed)
    kinds = {"baseline": (BASELINE.name, STANDARD), **{form: (OPTIMISED.name, form) for form in FORMS}}
    for name in names:
        charts.append(f"figure-13-{name}.png")
        counts = sorted({step.gpus for step in grid.values() if step.model == name})
        bars = {
            kind: [
                None if (step := grid.get((system, name, form, gpus))) is None else step.latency_s * 1e3
                for gpus in counts
            ]
            for kind, (system, form) in kinds.items()
        }
        labels = Labels(f"Figure 13: latency, {name}", "ms", note=note)
        bar_chart(folder / charts[-1], labels, [f"{gpus} GPUs" for gpus in counts], bars)
    images = "\n\n".join(f"![{chart}]({chart})" for chart in sorted(charts))
    text = f"# Figures 10 to 13 of DeepSpeed-MoE, simulated\n\n```\n{measured.text()}\n```\n\n{images}\n"
    (folder / "mesh.md").write_text(text, encoding="utf-8")
