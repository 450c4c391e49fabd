"""`coserve plan`: predicts a line before it is deployed."""

from __future__ import annotations

import json
import logging
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agent.cli.arguments import AsJson, LineFile
from agent.cli.endings import explained, log_to_stderr
from experts.errors import ConfigError
from profiler.cli.arguments import (
    Executors,
    LinePrecision,
    Memory,
    Policies,
    Trace,
    disk_explained,
    refuse_unknown_policies,
    refuse_unused,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from agent.config import LineConfig
    from agent.device_profile.records import StoredProfile
    from profiler.planning.advice import Advice
    from profiler.planning.plan import LinePlan, PlanRow
    from profiler.planning.workers import WorkersPlan

    Case = tuple[str, str]  # a policy, and a memory as it was typed

PlannedBandwidth = Annotated[
    str | None,
    typer.Option("--ssd-bandwidth", help="plan with an SSD of this speed, such as 530MB/s; default: the profile's"),
]


def plan(
    ctx: typer.Context,
    line: LineFile,
    trace: Trace = None,
    database: Annotated[
        Path | None, typer.Option("--profile", help="a device profile; default: STATE/profile.db of the line")
    ] = None,
    policies: Policies = None,
    memory: Memory = None,
    executors: Executors = None,
    precision: LinePrecision = None,
    ssd_bandwidth: PlannedBandwidth = None,
    workers: Annotated[
        int | None, typer.Option(min=1, max=64, help="also on 1 to N workers like this box, with the experts of each")
    ] = None,
    boards: Annotated[int, typer.Option(min=1, help="without --trace: boards of the generated trace")] = 20,
    seed: Annotated[int, typer.Option(help="of what a step lets pass, and of the generated trace")] = 0,
    as_json: AsJson = False,
) -> None:
    """Predict, before deploying: images/s, switches, waits, takt, bytes read; and what would remove the bottleneck.

    Memories that are too small are named on stderr, beside the rows of the others.
    """
    from agent.commands.progress import progress_on_stderr
    from agent.config import read_line
    from agent.device_profile.store import read_profile
    from profiler.cli.arguments import bytes_per_s, executor_counts, given_precision, memory_bytes
    from profiler.planning.plan import LinePlan
    from profiler.workload.traces import board_trace, read_trace

    log_to_stderr(logging.WARNING)
    with explained(), disk_explained(), progress_on_stderr() as progress:
        if trace is not None:
            refuse_unused(ctx, ("boards",), "boards are of the generated trace - leave them, or leave --trace")
        refuse_unknown_policies(policies or ())
        config = read_line(line)
        stored = read_profile(database or config.profile_file)
        if database is None:
            _print_doubts(config, stored)
        if trace is None and not config.catalog.components:
            raise ConfigError("no expert of this line takes images, of which a trace could be generated - give --trace")
        arrivals = read_trace(trace, config.catalog, is_planned=True) if trace else board_trace(config, boards, seed)
        is_split = stored.box.device_bytes is not None
        memories = {each: memory_bytes(each, is_split=is_split) for each in memory or []} or {"": {}}
        config = config.having(executors=executor_counts(executors), precision=given_precision(precision))
        line_plan = LinePlan(config, stored, arrivals, bytes_per_s(ssd_bandwidth), seed)
        cases = [(policy, size) for size in memories for policy in dict.fromkeys(policies or [config.policy])]
        rows, refused, advice = _planned(
            line_plan, cases, memories, partial(progress, f"plan for {len(arrivals):,} requests")
        )
        policy, size = next(case for case in cases if case not in refused)
        on_workers = None if workers is None else line_plan.workers(workers, policy, memories[size])
    _print(rows, refused, advice, on_workers, as_json=as_json)


def _print_doubts(config: LineConfig, stored: StoredProfile) -> None:
    from agent.deployment.build import doubts

    for doubt in doubts(config, stored):
        print(f"note: an agent that starts now would not use all of the profile: {doubt}", file=sys.stderr)


def _planned(
    line_plan: LinePlan,
    cases: Sequence[Case],
    memories: Mapping[str, Mapping[str, int]],
    progress: Callable[[int, int], None],
) -> tuple[list[PlanRow], dict[Case, ConfigError], Advice]:
    steps = len(cases) + 1  # the last one: advice
    rows: dict[Case, PlanRow] = {}
    refused: dict[Case, ConfigError] = {}
    for done, (policy, size) in enumerate(cases):
        progress(done, steps)
        try:
            rows[policy, size] = line_plan.row(policy, memories[size])
        except ConfigError as error:
            refused[policy, size] = error
    if not rows:
        raise ConfigError.of([*{str(each): each for each in refused.values()}.values()])
    progress(len(cases), steps)
    policy, size = next(iter(rows))
    advice = line_plan.advice(policy, memories[size])
    progress(steps, steps)
    return [*rows.values()], refused, advice


def _print(
    rows: list[PlanRow],
    refused: Mapping[Case, ConfigError],
    advice: Advice,
    on_workers: WorkersPlan | None,
    *,
    as_json: bool,
) -> None:
    from profiler.planning.plan import as_json as plan_json
    from profiler.planning.plan import plan_table
    from profiler.planning.workers import workers_json, workers_text

    for (policy, size), reason in refused.items():
        sys.stderr.write(f"not planned: {policy}{f' with --memory {size}' if size else ''}: {reason}\n")
    if as_json:
        reasons = [
            {"policy": policy, "memory": size or None, "reason": f"{reason}"}
            for (policy, size), reason in refused.items()
        ]
        further = {} if on_workers is None else {"workers": workers_json(on_workers)}
        print(json.dumps(plan_json(rows, advice) | {"refused": reasons} | further))
    else:
        print(plan_table(rows, advice), end="")
        print("" if on_workers is None else workers_text(on_workers), end="")
