"""Options, folders and refusals that the offline commands share."""

from __future__ import annotations

import sqlite3
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agent.cli.endings import FAILED
from agent.line_file.values import AUTO
from experts.errors import ConfigError
from experts.expert import Precision

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SEARCHING = ("initial_window", "error_margin", "fit_values")  # parameters of the search alone
OPTIONS = {name: name.replace("_", "-") for name in SEARCHING} | {"directory": "dir", "folder": "out"}
Memory = Annotated[
    list[str] | None,
    typer.Option(help="memory of experts and batches, such as 2GiB, or host=2GiB,device=1GiB; default: the line's"),
]
Policies = Annotated[list[str] | None, typer.Option("--policy", help="one or several; default: the line's")]
Executors = Annotated[str | None, typer.Option(help="such as cuda=3,cpu=1; default: the line's")]
PRECISIONS = "|".join((AUTO, *Precision))
GivenPrecision = Annotated[
    str | None, typer.Option("--precision", metavar=PRECISIONS, help="auto: as the profile found; default: the line's")
]
NewPrecision = Annotated[
    str, typer.Option("--precision", metavar=PRECISIONS, help="auto: as an agent without a profile runs it, fp32")
]
Trace = Annotated[Path | None, typer.Option(help="JSON lines, one arrival each; default: some boards one takt apart")]


@contextmanager
def disk_explained(*, resumes: bool = False) -> Iterator[None]:
    """Reports a disk's refusal as one line on stderr, exit code 1. ``resumes``: the command resumes when run again."""
    try:
        yield
    except (OSError, sqlite3.OperationalError) as error:
        from agent.device_profile.schema import is_refused_by_disk

        if isinstance(error, sqlite3.Error) and not is_refused_by_disk(error):
            raise
        refusal = f"{error}"
        if isinstance(error, OSError) and error.strerror:
            reason = "exists, and is not a folder" if isinstance(error, FileExistsError) else error.strerror
            refusal = f"{error.filename}: {reason}" if error.filename else reason
        again = "run the command again: it resumes" if resumes else "run the command again"
        sys.stderr.write(f"{refusal} - make room or correct the path, then {again}\n")
        raise typer.Exit(FAILED) from error


def from_here(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def scratch_folder(directory: Path | None) -> Path:
    """Folder on the SSD to measure, by default the current one. Raises ConfigError."""
    if directory is not None and not directory.is_dir():
        raise ConfigError(f"{directory}: no such folder - name one on the SSD to measure")
    return directory or Path.cwd()


def refuse_unused(ctx: typer.Context, names: Sequence[str], why: str) -> None:
    given = [name for name in names if (source := ctx.get_parameter_source(name)) and source.name == "COMMANDLINE"]
    if given:
        raise typer.BadParameter(why, param_hint=" / ".join(f"--{OPTIONS.get(name, name)}" for name in given))


def refuse_unknown_policies(policies: Sequence[str]) -> None:
    """Raises ConfigError for an unknown policy."""
    from agent.core.policy import PRESETS
    from experts.document import suggestion

    for name in policies:
        if name not in PRESETS:
            raise ConfigError(f"no policy {name!r} - {suggestion(name, PRESETS)}")
