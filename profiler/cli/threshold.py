"""`coserve experts threshold`: from which score on an image is anomalous, learned on samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agent.cli.arguments import AsJson, LineFile
from agent.cli.endings import explained
from profiler.cli.arguments import disk_explained, from_here

if TYPE_CHECKING:
    from experts.expert import Expert
    from experts.thresholds.learning import Learned
    from profiler.thresholds import Scores

NAMED = 5  # files, in a list for people


def threshold(
    line: LineFile,
    expert: Annotated[str, typer.Argument(metavar="ID", help="an expert of task anomaly", show_default=False)],
    samples: Annotated[
        str,
        typer.Option(
            metavar="DATA|reviews",
            help="folder with good/ and bad/, or <component>/ok/ and <component>/<defect>/, or a .csv or .json of file "
            "and label; or `reviews`: images that the expert judged and people reviewed",
        ),
    ],
    false_alarms: Annotated[
        float, typer.Option(min=0.0, max=0.5, help="share of good parts that may be called anomalous")
    ] = 0.01,
    chart: Annotated[
        Path | None, typer.Option(help="PNG of what each threshold would do; default: ID.threshold.png beside the line")
    ] = None,
    prints: Annotated[
        bool, typer.Option("--print", help="the lines for the line file, and write nothing in it")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Learn the threshold of an anomaly expert on good and bad parts, and write it into the line file.

    Chooses a threshold that keeps within the false alarms allowed and catches most of the bad parts. Draws the effect
    of every other threshold. Without bad samples, the threshold is a little above the good samples that must pass.
    """
    from agent.commands.progress import progress_on_stderr
    from agent.config import read_line
    from experts.packed.sources import unchanged_source
    from experts.thresholds.binding import threshold_of
    from experts.thresholds.learning import learned
    from profiler.thresholds import anomaly_expert, draw_curve, labelled_samples, measured

    drawn = chart or line.parent / f"{expert.replace('/', '-')}.threshold.png"
    with explained(), disk_explained():
        config = read_line(line)
        anomaly = anomaly_expert(config, expert)
        with progress_on_stderr() as progress, unchanged_source(anomaly) as seen:
            scores = measured(anomaly, labelled_samples(config, anomaly, samples), progress)
        evidence = threshold_of(anomaly, seen.sha256)
        good, bad = list(scores.good.values()), list(scores.bad.values())
        found = learned(good, bad, false_alarms)
        draw_curve(drawn, expert, good, bad, found)
        if not prints:
            _write(line, anomaly, found.rates.threshold, evidence)
    row = _row(expert, anomaly.threshold, scores, found, false_alarms)
    if as_json:
        print(json.dumps({**row, "chart": str(drawn), "is_written": not prints}))
        return
    _show(row, drawn, scores)
    where = from_here(line.absolute())
    if prints:
        keys = f"    threshold: {found.rates.threshold!r}\n    threshold_of: '{evidence}'"
        print(f"Write it into {where}:\nexperts:\n  {expert}:\n{keys}")
    else:
        print(f"written into {where}: a running agent takes it when it reloads")


def _write(line: Path, expert: Expert, value: float, evidence: str) -> None:
    from agent.line_file.editing import edit_file, set_key

    def both(text: str) -> str:
        place = ("experts", expert.id)
        text = set_key(text, path=(*place, "threshold"), value=value, file=line)
        return set_key(text, path=(*place, "threshold_of"), value=evidence, file=line)

    edit_file(line, both)


def _row(expert: str, before: float | None, scores: Scores, found: Learned, asked: float) -> dict[str, Any]:
    at = found.rates.threshold
    return {
        "expert": expert,
        "threshold": at,
        "threshold_before": before,
        "good": len(scores.good),
        "bad": len(scores.bad),
        "false_alarms": found.rates.false_alarms,
        "false_alarms_asked": asked,
        "false_alarms_expected": found.expected,
        "caught": found.rates.caught,
        "separation": found.separation,
        "alarms": [name for name, score in scores.good.items() if score >= at],
        "missed": [name for name, score in scores.bad.items() if score < at],
        "left_out": list(scores.left_out),
    }


def _show(row: dict[str, Any], chart: Path, scores: Scores) -> None:
    before = "" if row["threshold_before"] is None else f" (was {row['threshold_before']:g})"
    print(
        f"{row['expert']}: threshold {row['threshold']:g}{before}, from {row['good']} good and {row['bad']} bad samples"
    )
    print(
        f"false alarms {row['false_alarms']:.2%} of these; of parts to come {row['false_alarms_expected']:.2%} at most"
    )
    if row["false_alarms_expected"] > row["false_alarms_asked"]:
        needed = _least_good(row["false_alarms_asked"])
        print(f"  too few samples to guarantee less: {row['false_alarms_asked']:.2%} takes {needed} good samples")
    if row["caught"] is None:
        print("caught: not known, as there is no bad sample")
    else:
        print(
            f"caught {row['caught']:.2%}; a bad part measures more than a good one in {row['separation']:.2%} of pairs"
        )
    for title, key in (("good, and above it", "alarms"), ("bad, and below it", "missed"), ("left out", "left_out")):
        for each in row[key][:NAMED]:
            print(f"  {title}: {each}")
        if len(row[key]) > NAMED:
            print(f"  {title}: {len(row[key]) - NAMED} more")
    print(f"curve: {chart}")


def _least_good(false_alarms: float) -> str:
    from math import ceil

    return str(ceil(1 / false_alarms - 1e-9) - 1) if false_alarms else "endlessly many"
