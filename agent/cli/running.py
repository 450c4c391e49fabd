"""`coserve serve`, `inspect`, `doctor`, `demo` and `service`."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from agent.cli.arguments import AsJson, Authority, Certificate, Key, LineFile, Target, TokenFile
from agent.cli.endings import FAILED, explained, leave_at_once, log_to_stderr, say

service_app = typer.Typer(help="The agent as a systemd service.", no_args_is_help=True)


def serve(
    line: LineFile,
    as_json: AsJson = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="log every decision")] = False,
    strict_profile: Annotated[
        bool, typer.Option(help="stop if the device profile is of another box, instead of probing with an alarm")
    ] = False,
) -> None:
    """Run the agent: watch the line's folders and judge new images, until SIGTERM or Ctrl-C."""
    from agent.commands.progress import progress_on_stderr
    from agent.config import read_line
    from agent.environment import service_manager, set_spinning
    from agent.runtime.machine.garbage import loading_modules
    from agent.service.service_manager import Notifier, failures_reported

    log_to_stderr(logging.DEBUG if verbose else logging.INFO)
    with explained(), failures_reported(Notifier(service_manager())):
        config = read_line(line).model_copy(update={"is_profile_strict": strict_profile})
        set_spinning()
        with loading_modules():
            from agent.service.serve import serve_line  # loads torch

        with progress_on_stderr() as progress:
            closing = serve_line(config, progress)
    if as_json:
        print(json.dumps(closing))
    if closing["threads_left_behind"]:
        leave_at_once(0)


def inspect(
    line: LineFile,
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...", help="image files", show_default=False)],
    component: Annotated[str, typer.Option(help="component type of all of them")],
    picture: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="draw each image there, with its anomalies and boxes")
    ] = None,
    target: Target = None,
    ca: Authority = None,
    token_file: TokenFile = None,
    certificate: Certificate = None,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Judge images now, without the agent, or with --target by a running one. No file is moved, nothing is stored."""
    from agent.commands.judged_images import outputs_sha256
    from agent.commands.progress import progress_on_stderr
    from agent.config import read_line

    log_to_stderr(logging.WARNING)
    with explained():
        config = read_line(line)
        with progress_on_stderr() as progress:
            if target is not None:
                from agent.commands.asking import AgentAccess, ask_to_inspect

                access = AgentAccess(target, ca, token_file, certificate, key)
                results = ask_to_inspect(config, access, images, component, progress, picture)
            else:
                from agent.environment import set_spinning

                set_spinning()
                from agent.commands.inspection import inspect_images  # loads torch

                results = inspect_images(config, images, component, progress, picture)
    row = {"results": results, "outputs_sha256": outputs_sha256(result["label"] for result in results)}
    lines = []
    for result in results:
        score = "" if result["score"] is None else f" {result['score']:.3f}"
        lines.append(f"{result['verdict']:<8} {result['label'] or result['reason']}{score}  {result['image']}")
    say(as_json, row, lines)


def doctor(
    line: LineFile,
    cameras: Annotated[bool, typer.Option(help="read a frame from each camera")] = True,
    as_box: Annotated[
        str | None,
        typer.Option(
            "--as",
            metavar="BOX",
            help="instead a dry run on a box that is not there: cuda:sm_86:12GiB, jetson[:16GiB] or mps[:24GiB]",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check everything that this line needs of this box; exit code 1 for any problem, with its remedy."""
    from agent.config import read_line

    log_to_stderr(logging.ERROR)
    with explained():
        config = read_line(line)
        if as_box is not None:
            from agent.commands.dry_run import examine_as  # loads torch

            checks = examine_as(config, as_box)
        else:
            from agent.commands.doctor import examine  # loads torch

            checks = examine(config, cameras=cameras)
    lines = []
    for check in checks:
        lines.append(f"{'ok ' if check.is_well else 'BAD'} {check.name}: {check.found}")
        lines += [] if check.fix is None else [f"    -> {check.fix}"]
    problems = sum(not check.is_well for check in checks)
    row = {"problems": problems, "checks": [asdict(check) for check in checks]}
    row |= {} if as_box is None else {"dry_run": as_box}
    say(as_json, row, [*lines, f"{problems} problems"])
    if problems:
        raise typer.Exit(FAILED)


def demo(
    directory: Annotated[Path, typer.Option("--dir", help="folder of the demo line")] = Path("demo"),
    data: Annotated[Path | None, typer.Option(help="real crops instead: DATA/<component>/<label>/*.png")] = None,
    llm: Annotated[bool, typer.Option("--llm", help="language models instead: two experts on one backbone")] = False,
    seed: Annotated[int, typer.Option(help="seed of all random numbers")] = 0,
    as_json: AsJson = False,
) -> None:
    """Make a board line, train its small experts, and inspect it under a third of the memory they need."""
    if llm and data is not None:
        raise typer.BadParameter("--data is for image experts - leave out --data or --llm")
    from agent.commands.progress import progress_on_stderr
    from agent.environment import set_spinning

    def show(text: str) -> None:
        if not as_json:
            print(text, end="", flush=True)

    log_to_stderr(logging.WARNING)
    set_spinning()
    with explained():
        from agent.demo.demo import run_demo, show_report  # loads torch
        from agent.demo.text_demo import run_text_demo, show_text_report

        with progress_on_stderr() as progress:
            if llm:
                report = run_text_demo(directory, seed, progress, show)
            else:
                report = run_demo(directory, data, seed, progress)
        if as_json:
            print(json.dumps(report))
        else:
            (show_text_report if llm else show_report)(report)


@service_app.callback()
def service() -> None:
    """The agent as a systemd service."""


@service_app.command("install")
def service_install(
    prints: Annotated[bool, typer.Option("--print", help="print the shell script, and run nothing")] = False,
    as_json: AsJson = False,
) -> None:
    """Write the units of this very agent, with their user and folders, and load them into systemd. Needs root."""
    from agent.commands.unit_files import install, unit_files

    with explained():
        units = unit_files()
        if not prints:
            install(units)
    if as_json:
        print(json.dumps({"files": units.files, "commands": units.commands, "is_installed": not prints}))
    elif prints:
        print(units.script(), end="")
    else:
        print("installed: now write /etc/coserve/line.yaml, then systemctl enable --now coserve")
