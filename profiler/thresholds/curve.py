"""Chart of false alarms and catches on the samples, by threshold."""

from __future__ import annotations

from typing import TYPE_CHECKING

from experts.thresholds.learning import rates_at
from profiler.charts import Labels, Series, line_chart

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from experts.thresholds.learning import Learned

MOST_POINTS = 60  # of a curve: with more, its markers run into one another


def draw_curve(path: Path, expert: str, good: Sequence[float], bad: Sequence[float], learned: Learned) -> None:
    """False alarms and what is caught, in percent, over the thresholds between the lowest score and the highest."""
    scores = sorted({*good, *bad, learned.rates.threshold})
    steps = min(MOST_POINTS, len(scores))
    chosen = [scores[round(number * (len(scores) - 1) / max(steps - 1, 1))] for number in range(steps)]
    rates = [rates_at(threshold, good, bad) for threshold in chosen]
    series = [Series(f"false alarms, of {len(good)} good", chosen, [100 * each.false_alarms for each in rates])]
    if bad:
        series.append(Series(f"caught, of {len(bad)} bad", chosen, [100 * (each.caught or 0.0) for each in rates]))
    at = learned.rates.threshold
    series.append(Series(f"threshold {at:g}", [at, at], [0.0, 100.0], kind="dashed"))
    line_chart(path, Labels(f"{expert}: what a threshold does to the samples", "% of samples", "threshold"), series)
