"""Options of the offline commands, and values that they read from text: memories, executors, bandwidths, folders.

An error names the valid form.
"""

from __future__ import annotations

import sqlite3
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agent.cli.endings import FAILED
from agent.line_file.machine import MAX_EXECUTORS, PROCESSORS
from agent.line_file.values import AUTO
from experts.document import suggestion
from experts.errors import ConfigError
from experts.expert import Precision
from experts.sizes import size_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from agent.line_file.machine import GivenPrecision

MEMORIES = ("host", "device", "workspace")
PER_SECOND = "/s"
SEARCHING = ("initial_window", "error_margin", "fit_values")  # parameters of the search alone
OPTIONS = {name: name.replace("_", "-") for name in SEARCHING} | {"directory": "dir", "folder": "out"}
Memory = Annotated[
    list[str] | None,
    typer.Option(help="memory of experts and batches, such as 2GiB, or host=2GiB,device=1GiB; default: the line's"),
]
Policies = Annotated[list[str] | None, typer.Option("--policy", help="one or several; default: the line's")]
Executors = Annotated[str | None, typer.Option(help="such as cuda=3,cpu=1; default: the line's")]
PRECISIONS = "|".join((AUTO, *Precision))
LinePrecision = Annotated[
    str | None, typer.Option("--precision", metavar=PRECISIONS, help="auto: as the profile found; default: the line's")
]
NewPrecision = Annotated[
    str, typer.Option("--precision", metavar=PRECISIONS, help="auto: as an agent without a profile runs it, fp32")
]
Trace = Annotated[Path | None, typer.Option(help="JSON lines, one arrival each; default: some boards one takt apart")]


def memory_bytes(text: str, *, is_split: bool) -> dict[str, int]:
    """`2GiB`, or `host=2GiB,device=1GiB`, as bytes by memory. Raises ConfigError.

    A bare size is that of the memory which experts run from: the device's where memory is split, else the host's. A
    size for the device is refused where memory is not split.
    """
    if "=" not in text:
        return {"device" if is_split else "host": _size(text, "--memory")}
    found = {}
    for name, value in _pairs(text, "--memory", "host=2GiB,device=1GiB"):
        if name not in MEMORIES:
            raise ConfigError(f"--memory: no memory {name!r} - {suggestion(name, MEMORIES)}")
        found[name] = _size(value, f"--memory {name}")
    if "device" in found and not is_split:
        raise ConfigError("--memory device: this box has one memory for all its processors - write host=SIZE instead")
    return found


def executor_counts(text: str | None) -> dict[str, int] | None:
    """`cuda=3,cpu=1` as counts by processor; None for no text. Raises ConfigError."""
    if text is None:
        return None
    counts = {}
    for name, value in _pairs(text, "--executors", "cuda=3,cpu=1"):
        if name not in PROCESSORS:
            raise ConfigError(f"--executors: no processor {name!r} - {suggestion(name, PROCESSORS)}")
        if not value.isascii() or not value.isdigit() or int(value) > MAX_EXECUTORS:
            raise ConfigError(f"--executors {name}: {value!r} is not a count from 0 to {MAX_EXECUTORS}")
        counts[name] = int(value)
    if not any(counts.values()):
        raise ConfigError("--executors: no executor at all - give one processor at least 1")
    return counts


def bytes_per_s(text: str | None) -> float | None:
    """`530MB/s` as bytes per second; None for no text. Raises ConfigError."""
    if text is None:
        return None
    rate = _size(text.removesuffix(PER_SECOND), "--ssd-bandwidth", "530MB/s")
    if not rate:
        raise ConfigError(f"--ssd-bandwidth: {text!r} lets nothing through - write a rate such as 530MB/s")
    return float(rate)


def image_size(text: str) -> tuple[int, int]:
    """`224x224` as height and width. Raises ConfigError."""
    sides = text.lower().split("x")
    if len(sides) != 2 or not all(side.isascii() and side.isdigit() and int(side) for side in sides):
        raise ConfigError(f"--size: {text!r} is not HEIGHTxWIDTH - write it as in 224x224")
    return int(sides[0]), int(sides[1])


def batch_sizes(text: str) -> tuple[int, ...]:
    """`1,8` as numbers of images. Raises ConfigError."""
    sizes = [size.strip() for size in text.split(",")]
    if not all(size.isascii() and size.isdigit() and int(size) for size in sizes):
        raise ConfigError(f"--batches: {text!r} are not numbers of images from 1 - write them as in 1,8")
    return tuple(int(size) for size in sizes)


def given_precision(text: str | None) -> GivenPrecision | None:
    """`auto`, or the name of a precision; None for no text. Raises ConfigError."""
    if text is None:
        return None
    if text == AUTO:
        return "auto"
    if text not in list(Precision):
        raise ConfigError(f"--precision: no precision {text!r} - {suggestion(text, (AUTO, *map(str, Precision)))}")
    return Precision(text)


def precisions_in_turn(text: str | None) -> tuple[GivenPrecision, ...]:
    """`bf16,auto` as precisions to compare, each once; none for no text. Raises ConfigError."""
    names = () if text is None else text.split(",")
    given = (given_precision(name.strip()) for name in names)
    return tuple(dict.fromkeys(each for each in given if each is not None))


def precision_without_profile(given: GivenPrecision | None) -> Precision:
    return given if isinstance(given, Precision) else Precision.FP32


def given_precisions(texts: Iterable[str]) -> tuple[Precision, ...]:
    """Precisions in one text or several; empty, meaning all, if auto is among them. Raises ConfigError."""
    given = precisions_in_turn(",".join(texts) or None)
    return () if AUTO in given else tuple(map(Precision, given))


def given_peers(texts: Iterable[str], known: Sequence[str]) -> tuple[str, ...]:
    """Known peers in one text or several; all of them for no text. Raises ConfigError."""
    named = dict.fromkeys(name.strip() for text in texts for name in text.split(","))
    for name in named:
        if name not in known:
            raise ConfigError(f"--against: no peer {name!r} - {suggestion(name, known)}")
    return tuple(named) or tuple(known)


def _size(text: str, option: str, example: str = "2GiB") -> int:
    try:
        size = size_bytes(text)
    except ValueError as error:
        raise ConfigError(
            f"{option}: {text!r} is not understood - write a number and a unit, as in {example}"
        ) from error
    if not size and option != "--ssd-bandwidth":
        raise ConfigError(f"{option}: {text!r} is no memory at all - write a size such as {example}")
    return size


def _pairs(text: str, option: str, example: str) -> Iterator[tuple[str, str]]:
    seen = set()
    for part in text.split(","):
        name, equals, value = (each.strip() for each in part.partition("="))
        if not equals or not name or not value:
            raise ConfigError(f"{option}: {part!r} is not NAME=VALUE - write it as in {example}")
        if name in seen:
            raise ConfigError(f"{option}: {name} is there twice - keep one")
        seen.add(name)
        yield name, value


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
