"""Charts of the offline phase, as PNG files that a README can show.

Guarantees: drawn without a display; colours differ for colour-blind readers and, by markers and hatches, in print;
equal figures give equal bytes, with one version of matplotlib; files are written atomically.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from experts.filesystem import whole_file

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

WIDTH_INCHES, HEIGHT_INCHES, DOTS_PER_INCH = 9.0, 4.6, 110  # just under a thousand pixels: a README's width
GROUP_WIDTH = 0.84  # of the distance between two groups of bars
LARGEST_LABELLED = 40  # bars; with more, their figures would overlap
LABEL_POINTS = 8.0  # a figure over a bar
POINTS_PER_CHARACTER = 0.8  # of the letters' size, with a gap to the next label
AXES_POINTS = WIDTH_INCHES * 72 * 0.85  # that the groups of a chart share
HEADROOM = 1.1  # the top of a chart over its highest value
UPRIGHT_HEADROOM = 1.2
LEGEND_CHARACTERS, MARK_CHARACTERS = 110, 6  # that a chart is wide, and a legend's mark with its gaps
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")  # Okabe and Ito
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
HATCHES = ("", "//", "..", "xx", "--", "\\\\", "++", "oo")
STYLE: Any = {  # the stubs of matplotlib list every key it knows, which differ between versions
    "font.size": 11,
    "font.family": "DejaVu Sans",  # part of matplotlib: equal glyphs everywhere
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "hatch.linewidth": 0.6,
}


@dataclass(frozen=True, slots=True)
class Series:
    """Curve, or set of points. ``x`` and ``y`` have one length; an empty ``label`` is not in the legend.

    ``colour``: a number that related series share; None: the series' place among the others.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    kind: Literal["line", "points", "dashed"] = "line"
    colour: int | None = None


@dataclass(frozen=True, slots=True)
class Labels:
    """Texts of a chart. ``note``: small text below it; bars have no ``x``."""

    title: str
    y: str
    x: str = ""
    note: str = ""


def line_chart(path: Path, labels: Labels, series: Sequence[Series]) -> None:
    """Curves over a common axis, from zero upwards; at least one series."""
    with rc_context(STYLE):
        figure, axes = _empty(labels)
        for number, each in enumerate(series):
            place = number if each.colour is None else each.colour
            shown = {"line": ("-", MARKERS[place % len(MARKERS)]), "dashed": ("--", "none")}
            style, marker = shown.get(each.kind, ("none", MARKERS[place % len(MARKERS)]))
            colour, label = COLOURS[place % len(COLOURS)], each.label or None
            axes.plot(each.x, each.y, linestyle=style, marker=marker, color=colour, markersize=5, label=label)
        axes.set_xlabel(labels.x)
        if all(float(x).is_integer() for each in series for x in each.x):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))  # counts of images and experts are integers
        _finish(path, figure, axes, labels.note, [each.label for each in series])


def bar_chart(
    path: Path,
    labels: Labels,
    groups: Sequence[str],
    bars: Mapping[str, Sequence[float | None]],
    *,
    unknown: str = "n/a",
) -> None:
    """Grouped bars, one of each kind per group. ``bars[kind]``: height in each group, None if unknown.

    ``unknown``: text in place of an unknown bar. Figures wider than their bars are rotated.
    """
    with rc_context(STYLE):
        figure, axes = _empty(labels)
        width = GROUP_WIDTH / len(bars)
        is_labelled = len(bars) * len(groups) <= LARGEST_LABELLED
        figures = {
            kind: [unknown if height is None else _short(height) for height in heights] if is_labelled else []
            for kind, heights in bars.items()
        }
        longest = max((len(text) for texts in figures.values() for text in texts), default=0)
        is_upright = longest * LABEL_POINTS * POINTS_PER_CHARACTER > AXES_POINTS / len(groups) * width
        for number, (kind, heights) in enumerate(bars.items()):
            drawn = axes.bar(
                [place + (number - (len(bars) - 1) / 2) * width for place in range(len(groups))],
                [height or 0.0 for height in heights],
                width * 0.94,
                label=kind,
                color=COLOURS[number % len(COLOURS)],
                hatch=HATCHES[number % len(HATCHES)],
                edgecolor="white",
                linewidth=0.0,
            )
            if figures[kind]:
                axes.bar_label(drawn, figures[kind], fontsize=LABEL_POINTS, padding=2, rotation=90 if is_upright else 0)
        fitting_points = AXES_POINTS / len(groups) / (max(map(len, groups)) * POINTS_PER_CHARACTER)
        axes.set_xticks(range(len(groups)), groups, fontsize=min(STYLE["font.size"], fitting_points))
        _finish(path, figure, axes, labels.note, list(bars), UPRIGHT_HEADROOM if is_upright else HEADROOM)


def _empty(labels: Labels) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES), dpi=DOTS_PER_INCH, layout="constrained")
    axes = figure.subplots()
    figure.suptitle(labels.title, x=0.01, horizontalalignment="left", fontsize=12)
    axes.set_ylabel(labels.y)
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    return figure, axes


def _short(value: float) -> str:
    if value == int(value) or abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 1 else f"{value:.2g}"


def _finish(
    path: Path, figure: Figure, axes: Axes, note: str, labels: Sequence[str], headroom: float = HEADROOM
) -> None:
    highest = axes.dataLim.y1
    axes.set_ylim(bottom=min(0.0, axes.dataLim.y0), top=highest * headroom if highest > 0 else None)
    if any(labels):
        columns = max(1, min(len(labels), 4, LEGEND_CHARACTERS // (max(map(len, labels)) + MARK_CHARACTERS)))
        axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=columns, frameon=False, fontsize=10)
    if note:
        figure.supxlabel(note, fontsize=8.5, color="#555555")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    with whole_file(path) as file:
        file.write(buffer.getvalue())
