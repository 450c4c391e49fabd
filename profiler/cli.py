"""The measuring commands: ``coserve bench``. Each prints what it measured, and where it is short of a target."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

bench_app = typer.Typer(help="Measure this box: decision times, loading from SSD.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="one JSON object on stdout, nothing else there")]


@bench_app.command()
def decisions(as_json: AsJson = False) -> None:
    """How long a decision takes against the number of queued requests."""
    from profiler.decisions import report

    lines, rows = report()
    print(json.dumps({"rows": [asdict(row) for row in rows]}) if as_json else "\n".join(lines))


@bench_app.command()
def load(
    directory: Annotated[
        Path | None, typer.Option("--dir", help="a folder on the SSD to measure; default: the current folder")
    ] = None,
    architecture: Annotated[str, typer.Option(help="a torchvision classifier or an ultralytics YAML")] = "resnet101",
    files: Annotated[int, typer.Option(min=1, help="experts written for it, removed afterwards")] = 8,
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    as_json: AsJson = False,
) -> None:
    """SSD to runnable, beside a raw direct read of the same packed bytes."""
    from profiler.loading import measure_loading, report

    with tempfile.TemporaryDirectory(prefix="bench-load-", dir=directory or Path.cwd()) as scratch:
        measured = measure_loading(Path(scratch), architecture, files, repeats)
    if as_json:
        print(json.dumps(asdict(measured)))
    else:
        print(report(measured))
