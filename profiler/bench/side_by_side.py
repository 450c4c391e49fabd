"""A line and a trace in several precisions, round by round in turn, so that the machine's changes touch all of them.

Guarantees: a precision's rows are those of ``policy_runs`` in it alone, all rounds of one policy in one row; the naive
server, which runs in fp32 whatever is given, has one row, of the first precision's rounds.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import TYPE_CHECKING

from agent.records.database import StateLock
from profiler.bench.naive import NAIVE
from profiler.bench.policy_runs import run_line
from profiler.bench.rows import Measurement, medians

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent.config import LineConfig
    from agent.line_file.machine import GivenPrecision
    from profiler.bench.policy_runs import RunOptions
    from profiler.bench.rows import PolicyRow
    from profiler.replay.player import Progress
    from profiler.workload.traces import TracedArrival


def run_in_precisions(
    config: LineConfig,
    trace: Sequence[TracedArrival],
    options: RunOptions,
    precisions: Sequence[GivenPrecision],
    progress: Progress = lambda *_: None,
) -> Measurement:
    """Play a trace in each of these in turn, ``options.repeats`` times; in what ``options`` gives for none of them.

    Raises as ``run_line`` does.
    """
    if not precisions:
        return run_line(config, trace, options, progress)
    asked = options.policies or (config.policy,)
    engines = tuple(policy for policy in asked if policy != NAIVE)
    of_each = [(given, engines if number else asked) for number, given in enumerate(precisions)]
    found: list[list[Measurement]] = [[] for _ in of_each]
    with StateLock(config.state):
        for _ in range(options.repeats):
            for measured, (given, policies) in zip(found, of_each, strict=True):
                if policies:
                    once = replace(options, policies=policies, precision=given, repeats=1, is_locked=True)
                    measured.append(run_line(config, trace, once, _told_of(given, progress)))
    return _joined([_rounds(measured) for measured in found if measured], precisions)


def _told_of(given: GivenPrecision, progress: Progress) -> Progress:
    return lambda stage, done, total: progress(f"{given}: {stage}", done, total)


def _rounds(measured: Sequence[Measurement]) -> Measurement:
    """One precision's rounds as one measurement."""
    seconds = [each.compute_s for each in measured if each.compute_s is not None]
    return replace(
        measured[0],
        rows=tuple(_row(rows) for rows in zip(*(each.rows for each in measured), strict=True)),
        ssd_bytes_per_s=statistics.median(each.ssd_bytes_per_s or 0.0 for each in measured),
        is_held=all(each.is_held for each in measured),
        compute_s=statistics.median(seconds) if seconds else None,
        notes=tuple(dict.fromkeys(note for each in measured for note in each.notes)),
    )


def _row(rows: Sequence[PolicyRow]) -> PolicyRow:
    runs = tuple(run for row in rows for run in row.runs)
    reasons = tuple(dict.fromkeys(reason for row in rows for reason in row.unknown_reasons))
    return replace(rows[0], runs=runs, medians=medians(runs), unknown_reasons=reasons)


def _ran_in(measured: Measurement) -> str:
    return next((row.precision for row in measured.rows if row.policy != NAIVE), "")


def _joined(measured: Sequence[Measurement], precisions: Sequence[GivenPrecision]) -> Measurement:
    """Rows of all precisions; single figures, such as the SSD's speed, are of the first precision's rounds."""
    ran_in = ((given, _ran_in(each)) for given, each in zip(precisions, measured, strict=False))
    notes = [f"--precision {given}: ran in {precision}" for given, precision in ran_in if precision]
    return replace(
        measured[0],
        rows=tuple(row for each in measured for row in each.rows),
        notes=tuple(dict.fromkeys((*notes, *(note for each in measured for note in each.notes)))),
    )
