"""`coserve profile`: measure this box for a line, once."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agent.cli.arguments import AsJson, LineFile
from agent.cli.endings import explained, log_to_stderr
from profiler.cli.arguments import SEARCHING, disk_explained, from_here, refuse_unused

if TYPE_CHECKING:
    from profiler.profiling.profile_line import Profiled

Samples = Annotated[
    Path | None,
    typer.Option(
        metavar="DATA",
        help="real images: <component>/<label>/*.png, a .csv or .json of file, label and component, or YOLO data; "
        "default: what the intake has seen",
    ),
]
UsageFrom = Annotated[
    Path | None,
    typer.Option(help="usage from served history (results.db, or its rows); alone it only changes a finished profile"),
]
Tolerance = Annotated[float, typer.Option(min=0.0, help="how far scores may be off fp32 for precision: auto")]
Fresh = Annotated[
    bool, typer.Option(help="measure everything again, also in place of another box's or a damaged profile")
]


def refuse_contradictions(ctx: typer.Context, *, is_measured: bool) -> None:
    """Raises BadParameter for parameters of `profile` that exclude one another or have no effect."""
    given = ctx.params
    if given["simulate"] and given["casual"]:
        raise typer.BadParameter("a search and no search - give one of the two", param_hint="--simulate / --casual")
    others = [name for name in ("usage_from", "count_usage", "simulate", "casual", "fresh") if given[name]]
    if given["expert"] is not None and others:
        raise typer.BadParameter(
            f"it measures one expert alone - leave --{others[0].replace('_', '-')}", param_hint="--expert"
        )
    if given["usage_from"] is not None and given["count_usage"]:
        raise typer.BadParameter(
            "usage is learned or counted - give one of the two", param_hint="--usage-from / --count-usage"
        )
    if not is_measured:
        refuse_unused(
            ctx,
            ("tolerance", *SEARCHING),
            "--usage-from alone measures and searches nothing - leave it, or add --simulate, --casual or --fresh",
        )
    elif given["casual"]:
        refuse_unused(ctx, SEARCHING, "--casual searches nothing - leave one of the two")


def profile(
    ctx: typer.Context,
    line: LineFile,
    samples: Samples = None,
    usage_from: UsageFrom = None,
    expert: Annotated[
        str | None, typer.Option(help="prove one expert again, for example after retraining; the agent may run")
    ] = None,
    count_usage: Annotated[bool, typer.Option(help="usage by running the routes on the samples")] = False,
    simulate: Annotated[bool, typer.Option(help="search memory and executors in simulation: seconds")] = False,
    casual: Annotated[bool, typer.Option(help="no search: 75 % of memory for experts, the casual executors")] = False,
    initial_window: Annotated[int, typer.Option(min=1, max=99, help="of the search, in experts")] = 15,
    error_margin: Annotated[float, typer.Option(min=0.0, max=1.0, help="of the search's linear fit")] = 0.05,
    fit_values: Annotated[int, typer.Option(min=2, help="throughputs that the fit needs at least")] = 2,
    tolerance: Tolerance = 0.02,
    fresh: Fresh = False,
    as_json: AsJson = False,
) -> None:
    """Profile this box for a line, once: times, memory, usage; then split the memory and count the executors.

    Writes STATE/profile.db, which the agent then starts from, and charts beside it. Killed half-way, it resumes.
    """
    from agent.commands.progress import progress_on_stderr
    from agent.config import read_line
    from agent.environment import set_spinning

    log_to_stderr(logging.WARNING)
    with explained():
        is_measured = fresh or simulate or casual or samples is not None or usage_from is None
        refuse_contradictions(ctx, is_measured=is_measured)
        config = read_line(line)
        set_spinning()
        from profiler.allocation.decay_window import WindowOptions
        from profiler.allocation.search import SearchOptions
        from profiler.allocation.step import CASUAL, ENGINE, SIMULATE  # loads torch, as do those below
        from profiler.profiling.profile_expert import profile_expert
        from profiler.profiling.profile_line import ProfilingOptions, learn_usage, profile_line

        options = ProfilingOptions(
            samples=samples,
            count_usage=count_usage,
            usage_from=usage_from,
            allocation=SIMULATE if simulate else CASUAL if casual else ENGINE,
            fresh=fresh,
            tolerance=tolerance,
            search=SearchOptions(WindowOptions(initial_window, error_margin, fit_values)),
        )
        with disk_explained(resumes=True), progress_on_stderr() as progress:
            learned = None if is_measured else learn_usage(config, usage_from)
            if expert is not None:
                done = profile_expert(config, expert, options, progress)
            else:
                done = learned or profile_line(config, options, progress)
    _print(done, as_json=as_json)


def _print(done: Profiled, *, as_json: bool) -> None:
    from profiler.profiling.report import profile_charts, profile_json, profile_table

    for note in done.notes:
        sys.stderr.write(f"note: {note}\n")
    print(json.dumps(profile_json(done.profile)) if as_json else profile_table(done.profile))
    with disk_explained(resumes=True):
        charts = profile_charts(done.profile, done.path.with_name("profile"))
    if not as_json:
        written = f"written      {from_here(done.path)}"
        print(f"{written}, charts in {from_here(charts[0].parent)}" if charts else written)
