"""`coserve bench`: a line and its trace on this box, beside the benchmarks of the proof where it is installed.

Heavy runtimes are imported inside the commands that need them, so that ``--help`` answers at once.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from agent.cli.arguments import AsJson, LineFile
from agent.cli.endings import explained, log_to_stderr
from profiler.cli.arguments import Executors, Policies, disk_explained

LINE = "line"  # the name of what `bench LINE.yaml` runs


class LineByDefault(TyperGroup):
    """``bench LINE.yaml ...`` runs the line; ``bench NAME ...`` the benchmark of that name."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401  # a class that typer keeps moving
        if args and args[0] not in self.commands and args[0] not in {"--help", "--version"}:
            args = [LINE, *args]
        return super().parse_args(ctx, args)


bench_app = typer.Typer(
    help="Measure: a line and its trace on this box (bench LINE.yaml --trace T), or one of these.",
    cls=LineByDefault,
    no_args_is_help=True,
)

Bandwidth = Annotated[
    str | None, typer.Option("--ssd-bandwidth", help="hold loads from the SSD to a rate, such as 530MB/s")
]


@bench_app.command(LINE, hidden=True)
def bench_line(
    ctx: typer.Context,
    line: LineFile,
    trace: Annotated[Path | None, typer.Option(help="JSON lines, one arrival each", show_default=False)] = None,
    policies: Policies = None,
    memory: Annotated[str | None, typer.Option(help="such as 2GiB, or host=2GiB,device=1GiB")] = None,
    precision: Annotated[
        str | None,
        typer.Option(help="such as bf16, or bf16,auto in turn; auto: as the profile found; default: the line's"),
    ] = None,
    executors: Executors = None,
    ssd_bandwidth: Bandwidth = None,
    repeat: Annotated[int, typer.Option(min=1, help="rounds over all policies; medians are shown")] = 1,
    journal: Annotated[
        bool, typer.Option("--journal", help="instead: cost of journaling and storing every request")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Play a trace on the real engine, each policy in turn, beside the roofline measured in the same run."""
    from agent.commands.progress import progress_on_stderr
    from agent.config import read_line
    from agent.environment import set_spinning

    log_to_stderr(logging.WARNING)
    with explained(), disk_explained():
        if not line.exists() and not line.suffix:
            raise typer.BadParameter(f"{line} is neither a line file nor one of {', '.join(benchmarks(ctx))}")
        if trace is None:
            raise typer.BadParameter("a trace to play is missing - give --trace FILE.jsonl", param_hint="--trace")
        config = read_line(line)
        set_spinning()
        from agent.deployment.build import detect_box  # loads torch, as do those below
        from profiler.bench.journal_cost import measure_journal
        from profiler.bench.policy_runs import RunOptions, run_line
        from profiler.bench.rows import report
        from profiler.cli.arguments import bytes_per_s, executor_counts, memory_bytes, precisions_in_turn
        from profiler.workload.traces import read_trace

        options = RunOptions(
            policies=tuple(policies or ()),
            repeats=repeat,
            memory=memory_bytes(memory, is_split=detect_box(config).is_split) if memory else {},
            precisions=precisions_in_turn(precision),
            executors=executor_counts(executors),
            ssd_bytes_per_s=bytes_per_s(ssd_bandwidth),
        )
        if journal and len(options.precisions) > 1:
            raise typer.BadParameter("--journal measures one precision at a time", param_hint="--precision")
        arrivals = read_trace(trace, config.catalog)
        with progress_on_stderr() as progress:
            if journal:
                cost = measure_journal(config, arrivals, options, progress)
                found, text = cost.as_json(), cost.text()
            else:
                measured = run_line(config, arrivals, options, progress)
                found, text = measured.as_json(), report(measured)
    print(json.dumps(found) if as_json else text)


def benchmarks(ctx: typer.Context) -> list[str]:
    group = ctx.parent.command if ctx.parent is not None else None
    return sorted(set(group.commands) - {LINE}) if isinstance(group, TyperGroup) else []
