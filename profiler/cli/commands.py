"""The offline commands: ``coserve profile | plan | bench``. Each prints what it measured, and where that is short.

Heavy runtimes are imported inside the commands that need them, so that ``--help`` answers at once.
"""

from __future__ import annotations

import json
import logging
import sqlite3
import sys
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from agent.cli import FAILED, AsJson, LineFile, explained, log_to_stderr
from experts.errors import ConfigError
from experts.expert import Precision

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from profiler.planning.plan import PlanRow

LINE = "line"  # the name of what `bench LINE.yaml` runs
SEARCHING = ("initial_window", "error_margin", "fit_values")  # parameters of the search alone
OPTIONS = {name: name.replace("_", "-") for name in SEARCHING} | {"directory": "dir", "folder": "out"}
BENCHMARKS = ("decisions", "generate", "load", "overhead", "report", "start", "tasks")


class LineByDefault(TyperGroup):
    """``bench LINE.yaml ...`` runs the line; ``bench NAME ...`` the benchmark of that name."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401  # a class that typer keeps moving
        """Put the hidden command's name in front of whatever is not one."""
        if args and args[0] not in self.commands and args[0] not in {"--help", "--version"}:
            args = [LINE, *args]
        return super().parse_args(ctx, args)


offline_app = typer.Typer()
bench_app = typer.Typer(
    help="Measure: a line and its trace on this box (bench LINE.yaml --trace T), or one of these.",
    cls=LineByDefault,
    no_args_is_help=True,
)
offline_app.add_typer(bench_app, name="bench")

Memory = Annotated[
    list[str] | None,
    typer.Option(help="memory of experts and batches, such as 2GiB, or host=2GiB,device=1GiB; default: the line's"),
]
Policies = Annotated[list[str] | None, typer.Option("--policy", help="one or several; default: the line's")]
Executors = Annotated[str | None, typer.Option(help="such as cuda=3,cpu=1; default: the line's")]
Bandwidth = Annotated[
    str | None, typer.Option("--ssd-bandwidth", help="hold loads from the SSD to a rate, such as 530MB/s")
]
PlannedBandwidth = Annotated[
    str | None,
    typer.Option("--ssd-bandwidth", help="plan with an SSD of this speed, such as 530MB/s; default: the profile's"),
]
Trace = Annotated[Path | None, typer.Option(help="JSON lines, one arrival each; default: some boards one takt apart")]
Requests = Annotated[int, typer.Option(min=1)]
Directory = Annotated[
    Path | None, typer.Option("--dir", help="a folder on the SSD to measure; default: the current folder")
]


@contextmanager
def disk_explained(*, resumes: bool = False) -> Iterator[None]:
    """What a disk refuses, as one line on stderr. Exit code 1.

    ``resumes``: what was saved until then is whole, and the command goes on from there when it is run again.
    """
    try:
        yield
    except (OSError, sqlite3.OperationalError) as error:
        from agent.device_profile.schema import is_refused_by_disk

        if isinstance(error, sqlite3.Error) and not is_refused_by_disk(error):
            raise
        told = f"{error}"
        if isinstance(error, OSError) and error.strerror:
            reason = "is there, and is no folder" if isinstance(error, FileExistsError) else error.strerror
            told = f"{error.filename}: {reason}" if error.filename else reason
        again = "run the command again: it resumes" if resumes else "run the command again"
        sys.stderr.write(f"{told} - make room or correct the path, then {again}\n")
        raise typer.Exit(FAILED) from error


def from_here(path: Path) -> Path:
    """As it would be typed in the current folder, where it lies below that."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def scratch_folder(directory: Path | None) -> Path:
    """The folder on the SSD to measure; where none is given, the current one. Raises ConfigError."""
    if directory is not None and not directory.is_dir():
        raise ConfigError(f"{directory}: no such folder - name one on the SSD to measure")
    return directory or Path.cwd()


def refuse_unused(ctx: typer.Context, names: Sequence[str], why: str) -> None:
    """Raises BadParameter naming those of these parameters that were given, as nothing will come of them."""
    given = [name for name in names if (source := ctx.get_parameter_source(name)) and source.name == "COMMANDLINE"]
    if given:
        raise typer.BadParameter(why, param_hint=" / ".join(f"--{OPTIONS.get(name, name)}" for name in given))


def refuse_unknown_policies(policies: Sequence[str]) -> None:
    """Raises ConfigError for a policy that is none."""
    from agent.core.policy import PRESETS
    from experts.document import suggestion

    for name in policies:
        if name not in PRESETS:
            raise ConfigError(f"no policy {name!r} - {suggestion(name, PRESETS)}")


def refuse_contradictions(ctx: typer.Context, *, is_measured: bool) -> None:
    """Raises BadParameter for parameters of `profile` that exclude one another, or that nothing will come of."""
    given = ctx.params
    if given["simulate"] and given["casual"]:
        raise typer.BadParameter("a search and no search - give one of the two", param_hint="--simulate / --casual")
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


@offline_app.command()
def profile(
    ctx: typer.Context,
    line: LineFile,
    samples: Annotated[
        Path | None, typer.Option(help="real images: <component>/<label>/*.png; default: what the intake has seen")
    ] = None,
    usage_from: Annotated[
        Path | None,
        typer.Option(
            help="usage from served history (results.db, or its rows); alone it only changes a finished profile"
        ),
    ] = None,
    count_usage: Annotated[bool, typer.Option(help="usage by running the routes on the samples")] = False,
    simulate: Annotated[bool, typer.Option(help="search memory and executors in simulation: seconds")] = False,
    casual: Annotated[bool, typer.Option(help="no search: 75 % of memory for experts, the casual executors")] = False,
    initial_window: Annotated[int, typer.Option(min=1, max=99, help="of the search, in experts")] = 15,
    error_margin: Annotated[float, typer.Option(min=0.0, max=1.0, help="of the search's linear fit")] = 0.05,
    fit_values: Annotated[int, typer.Option(min=2, help="throughputs that the fit needs at least")] = 2,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="how far scores may be off fp32 for precision: auto")
    ] = 0.02,
    fresh: Annotated[
        bool, typer.Option(help="measure everything anew, also in the place of another box's or a damaged profile")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Profile this box for a line, once: times, memory, usage; then split the memory and count the executors.

    Writes STATE/profile.db, which the agent then starts from, and charts beside it. Killed half-way, it resumes.
    """
    from agent.commands.progress import progress_on_stderr
    from agent.config import read_line
    from agent.deployment.profile_in_use import set_spinning

    log_to_stderr(logging.WARNING)
    with explained():
        is_measured = fresh or simulate or casual or samples is not None or usage_from is None
        refuse_contradictions(ctx, is_measured=is_measured)
        config = read_line(line)
        spinning = set_spinning(config)
        from profiler.allocation.search import SearchOptions
        from profiler.allocation.step import CASUAL, ENGINE, SIMULATE  # loads torch, as do those below
        from profiler.profiling.profile_line import ProfilingOptions, learn_usage, profile_line
        from profiler.profiling.report import profile_charts, profile_json, profile_table

        options = ProfilingOptions(
            samples=samples,
            count_usage=count_usage,
            usage_from=usage_from,
            allocation=SIMULATE if simulate else CASUAL if casual else ENGINE,
            fresh=fresh,
            tolerance=tolerance,
            search=SearchOptions(initial_window, error_margin, fit_values),
            spinning=spinning,
        )
        with disk_explained(resumes=True), progress_on_stderr() as progress:
            learned = None if is_measured else learn_usage(config, usage_from)
            done = learned or profile_line(config, options, progress)
    for note in done.notes:
        sys.stderr.write(f"note: {note}\n")
    print(json.dumps(profile_json(done.profile)) if as_json else profile_table(done.profile))
    with disk_explained(resumes=True):
        charts = profile_charts(done.profile, done.path.with_name("profile"))
    if not as_json:
        written = f"written      {from_here(done.path)}"
        print(f"{written}, charts in {from_here(charts[0].parent)}" if charts else written)


@offline_app.command()
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
    precision: Annotated[Precision | None, typer.Option(help="default: the profile's")] = None,
    ssd_bandwidth: PlannedBandwidth = None,
    boards: Annotated[int, typer.Option(min=1, help="without --trace: boards of the made-up trace")] = 20,
    seed: Annotated[int, typer.Option(help="of what a step lets pass, and of the made-up trace")] = 0,
    as_json: AsJson = False,
) -> None:
    """Predict, before deploying: images/s, switches, waits, takt, bytes read; and what would remove the bottleneck.

    Of several memories those that are too small are told on stderr, beside the rows of the others.
    """
    from agent.commands.progress import progress_on_stderr
    from agent.config import read_line
    from agent.deployment.build import doubts
    from agent.device_profile.store import read_profile
    from profiler.cli.settings import bytes_per_s, executor_counts, memory_bytes
    from profiler.planning.plan import as_json as plan_json
    from profiler.planning.plan import plan as plan_rows
    from profiler.planning.plan import plan_advice, plan_table
    from profiler.workload.traces import board_trace, read_trace

    log_to_stderr(logging.WARNING)
    with explained(), disk_explained(), progress_on_stderr() as progress:
        if trace is not None:
            refuse_unused(ctx, ("boards",), "boards are of the made-up trace - leave them, or leave --trace")
        refuse_unknown_policies(policies or ())
        config = read_line(line)
        stored = read_profile(database or config.profile_file)
        if database is None:
            for doubt in doubts(config, stored):
                print(f"note: an agent that starts now may refuse this profile: {doubt}", file=sys.stderr)
        arrivals = read_trace(trace, config.catalog) if trace else board_trace(config, boards, seed)
        is_split = stored.box.device_bytes is not None
        memories = {each: memory_bytes(each, is_split=is_split) for each in memory or []} or {"": {}}
        common: dict[str, Any] = {
            "executors": executor_counts(executors),
            "precision": precision,
            "ssd_bytes_per_s": bytes_per_s(ssd_bandwidth),
            "seed": seed,
        }
        asked = [(policy, size) for size in memories for policy in dict.fromkeys(policies or [config.policy])]
        stage, steps = f"plan for {len(arrivals):,} requests", len(asked) + 1  # the last one: what would help
        rows: dict[tuple[str, str], PlanRow] = {}
        refused: dict[tuple[str, str], ConfigError] = {}
        for done, (policy, size) in enumerate(asked):
            progress(stage, done, steps)
            try:
                (rows[policy, size],) = plan_rows(config, None, stored, arrivals, [policy], [memories[size]], **common)
            except ConfigError as error:
                refused[policy, size] = error
        if not rows:
            raise ConfigError.of([*{str(each): each for each in refused.values()}.values()])
        progress(stage, len(asked), steps)
        policy, size = next(iter(rows))
        advice = plan_advice(config, None, stored, arrivals, policy, memories[size], **common)
        progress(stage, steps, steps)
    for (policy, size), reason in refused.items():
        sys.stderr.write(f"not planned: {policy}{f' with --memory {size}' if size else ''}: {reason}\n")
    if as_json:
        told = [
            {"policy": policy, "memory": size or None, "reason": f"{reason}"}
            for (policy, size), reason in refused.items()
        ]
        print(json.dumps(plan_json([*rows.values()], advice) | {"refused": told}))
    else:
        print(plan_table([*rows.values()], advice), end="")


@bench_app.command(LINE, hidden=True)
def bench_line(
    line: LineFile,
    trace: Annotated[Path | None, typer.Option(help="JSON lines, one arrival each", show_default=False)] = None,
    policies: Policies = None,
    memory: Annotated[str | None, typer.Option(help="such as 2GiB, or host=2GiB,device=1GiB")] = None,
    precision: Annotated[Precision | None, typer.Option(help="default: the line's")] = None,
    executors: Executors = None,
    ssd_bandwidth: Bandwidth = None,
    repeat: Annotated[int, typer.Option(min=1, help="rounds over all policies; medians are told")] = 1,
    as_json: AsJson = False,
) -> None:
    """Play a trace on the real engine, each policy in turn, beside the roofline measured in the same run."""
    from agent.commands.progress import progress_on_stderr
    from agent.config import read_line
    from agent.deployment.profile_in_use import set_spinning

    log_to_stderr(logging.WARNING)
    with explained(), disk_explained():
        if not line.exists() and not line.suffix:
            raise typer.BadParameter(f"{line} is neither a line file nor one of {', '.join(BENCHMARKS)}")
        if trace is None:
            raise typer.BadParameter("a trace to play is missing - give --trace FILE.jsonl", param_hint="--trace")
        config = read_line(line)
        set_spinning(config)
        from agent.deployment.build import detect_box  # loads torch, as do those below
        from profiler.bench.policy_runs import RunOptions, run_line
        from profiler.bench.rows import report
        from profiler.cli.settings import bytes_per_s, executor_counts, memory_bytes
        from profiler.workload.traces import read_trace

        options = RunOptions(
            policies=tuple(policies or ()),
            repeats=repeat,
            memory=memory_bytes(memory, is_split=detect_box(config).is_split) if memory else {},
            precision=precision,
            executors=executor_counts(executors),
            ssd_bytes_per_s=bytes_per_s(ssd_bandwidth),
        )
        with progress_on_stderr() as progress:
            measured = run_line(config, read_trace(trace, config.catalog), options, progress)
    print(json.dumps(measured.as_json()) if as_json else report(measured))


@bench_app.command()
def generate(
    folder: Annotated[Path, typer.Argument(help="a new folder: line.yaml, weights, images, trace.jsonl")],
    experts: Annotated[int, typer.Option(min=1, help="classifiers, one component each")] = 40,
    architecture: Annotated[str, typer.Option(help="a torchvision classifier")] = "resnet101",
    detectors: Annotated[int, typer.Option(min=0, help="shared YOLOv5m and YOLOv5l behind every third component")] = 0,
    requests: Requests = 240,
    memory_for: Annotated[int, typer.Option(min=1, help="experts that fit into memory")] = 12,
    seed: Annotated[int, typer.Option(help="of everything random")] = 0,
    as_json: AsJson = False,
) -> None:
    """Write a line of random experts and a trace with heavy-tailed popularity, for `coserve bench LINE.yaml`."""
    from profiler.workload.generated_line import LineRecipe, generate_line

    recipe = LineRecipe(experts, architecture, detectors, requests=requests, memory_for=memory_for, seed=seed)
    with explained(), disk_explained():
        made = generate_line(folder, recipe)
    if as_json:
        print(
            json.dumps({name: str(value) if isinstance(value, Path) else value for name, value in asdict(made).items()})
        )
    else:
        print(f"{made.written_bytes / 1e9:.1f} GB written, memory for {memory_for} experts; measure it with")
        print(f"coserve bench {made.line} --trace {made.trace} --policy coserve --policy samba")


@bench_app.command()
def report(
    folder: Annotated[Path, typer.Option("--out", help="where report.md and its charts go")] = Path("bench-report"),
    directory: Directory = None,
    full: Annotated[
        bool,
        typer.Option(
            "--full",
            help="the traces and tasks that the targets are stated for, searches on whole samples; half an hour",
        ),
    ] = False,
    repeat: Annotated[int | None, typer.Option(min=1, help="rounds; default: 1, with --full 3")] = None,
    as_json: AsJson = False,
) -> None:
    """Everything below in one run, as a Markdown report with charts; the short form takes under five minutes."""
    from agent.commands.progress import progress_on_stderr
    from profiler.bench.report import REPORT, measure_report, prepare_folder, targets_text, write_report

    log_to_stderr(logging.WARNING)
    with explained(), disk_explained():
        scratch = scratch_folder(directory)
        prepare_folder(folder)
        with progress_on_stderr() as progress:
            found = measure_report(scratch, progress, full=full, repeats=repeat)
        if as_json:
            targets = [asdict(target) for target in found.targets]
            print(json.dumps({"path": str(folder / REPORT), "targets": targets, "seconds": found.seconds}))
        else:
            print(targets_text(found.targets))
        path = write_report(folder, found)
    if not as_json:
        print(f"{path} in {found.seconds:.0f} s")


@bench_app.command()
def tasks(
    ctx: typer.Context,
    device: Annotated[
        list[str] | None, typer.Option(help="numa, uma (the paper's boxes; default: both) or PROFILE.db")
    ] = None,
    short: Annotated[
        bool, typer.Option("--short", help="A1 and B1 only, searched on half the sample: other figures")
    ] = False,
    folder: Annotated[Path | None, typer.Option("--out", help="also write figures 13 to 18 there")] = None,
    experts: Annotated[int | None, typer.Option(min=2, help="on the real engine instead: so many experts")] = None,
    requests: Annotated[int, typer.Option(min=1, help="with --experts: so many requests")] = 240,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="with --experts: a folder on the SSD; default: the current folder")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """The paper's tasks A1 A2 B1 B2, simulated on its boxes; or scaled down on the real engine of this one."""
    from agent.commands.progress import progress_on_stderr
    from profiler.bench.report import prepare_folder
    from profiler.bench.scaled_tasks import measure_scaled, scaled_json, scaled_table
    from profiler.paper.evaluation import evaluation_json, evaluation_table, simulated_tasks
    from profiler.paper.figures import write_figures
    from profiler.paper.measured_device import device_notes
    from profiler.paper.task_devices import DEVICE_FILES, task_devices

    log_to_stderr(logging.WARNING)
    if experts is not None and (device or short or folder is not None):
        raise typer.BadParameter(
            "the real engine has no --device, --short or --out - leave them", param_hint="--experts"
        )
    if experts is None:
        refuse_unused(ctx, ("requests", "directory"), "a simulation has neither - leave it, or give --experts")
    with explained(), disk_explained():
        if experts is not None:
            with progress_on_stderr() as progress:
                measured = measure_scaled(scratch_folder(directory), experts, requests, progress)
            print(json.dumps(scaled_json(measured)) if as_json else scaled_table(measured))
            return
        devices = task_devices(device or tuple(DEVICE_FILES))
        if folder is not None:
            prepare_folder(folder)
        with progress_on_stderr() as progress:
            evaluation = simulated_tasks(devices, progress, full=not short)
        others = dict.fromkeys(row.device for row in evaluation.rows if row.device not in DEVICE_FILES)
        for note in device_notes(others):
            sys.stderr.write(f"note: {note}\n")
        print(json.dumps(evaluation_json(evaluation)) if as_json else evaluation_table(evaluation))
        if folder is not None:
            (folder / "tasks.md").write_text(write_figures(evaluation, folder), encoding="utf-8")


@bench_app.command()
def overhead(
    line: LineFile,
    trace: Annotated[Path, typer.Option(help="JSON lines, one arrival each")],
    repeat: Annotated[int, typer.Option(min=1, help="pairs of a run and its playback")] = 3,
    as_json: AsJson = False,
) -> None:
    """What scheduling costs: a trace on the real engine, and played back with everything decided beforehand."""
    from agent.commands.progress import progress_on_stderr
    from agent.config import read_line
    from agent.deployment.profile_in_use import set_spinning

    log_to_stderr(logging.WARNING)
    with explained(), disk_explained():
        config = read_line(line)
        set_spinning(config)
        from profiler.bench.policy_runs import RunOptions  # loads torch, as do those below
        from profiler.bench.scheduling_cost import measure_scheduling, report
        from profiler.workload.traces import read_trace

        arrivals = read_trace(trace, config.catalog)
        with progress_on_stderr() as progress:
            cost = measure_scheduling(config, arrivals, RunOptions(repeats=repeat), progress)
    print(json.dumps(asdict(cost)) if as_json else report(cost))


@bench_app.command()
def start(
    directory: Directory = None,
    starts: Annotated[int, typer.Option(min=1)] = 3,
    as_json: AsJson = False,
) -> None:
    """How soon an agent without experts to speak of is ready, and what it holds then."""
    from profiler.bench.parts.starting import measure_start, report

    with explained(), disk_explained():
        times = measure_start(scratch_folder(directory), starts)
    print(json.dumps(asdict(times)) if as_json else report(times))


@bench_app.command()
def decisions(as_json: AsJson = False) -> None:
    """How long a decision takes against the number of queued requests."""
    from profiler.bench.parts.decisions import report

    lines, rows = report()
    print(json.dumps({"rows": [asdict(row) for row in rows]}) if as_json else "\n".join(lines))


@bench_app.command()
def load(
    directory: Directory = None,
    architecture: Annotated[str, typer.Option(help="a torchvision classifier or an ultralytics YAML")] = "resnet101",
    files: Annotated[int, typer.Option(min=1, help="experts written for it, removed afterwards")] = 8,
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    as_json: AsJson = False,
) -> None:
    """SSD to runnable, beside a raw direct read of the same packed bytes."""
    from profiler.bench.parts.loading import measure_loading, report

    with explained(), disk_explained():
        measured = measure_loading(scratch_folder(directory), architecture, files, repeats)
    print(json.dumps(asdict(measured)) if as_json else report(measured))
