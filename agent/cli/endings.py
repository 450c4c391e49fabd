"""Output, log and exit of a command: exit codes, errors as text, and an exit at once if threads hang."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import typer

from agent.faults.errors import AgentCrashed, DeviceMissing
from experts.errors import ConfigError, CoServeError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

FAILED, USAGE, CONFIGURATION = 1, 2, 78
OUTPUT_ERRORS = frozenset({errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


def say(as_json: bool, row: object, lines: Iterable[str]) -> None:
    """Print one JSON object for scripts, or lines for people. A value that JSON lacks, such as a path, becomes text."""
    for line in [json.dumps(row, default=str)] if as_json else lines:
        print(line)


def say_rows(name: str, rows: Iterable[object]) -> None:
    """Print a JSON object of one list, row by row: there may be millions. Nothing if the first row cannot be read."""
    opening = f'{{"{name}": ['
    for row in rows:
        sys.stdout.write(f"{opening}{json.dumps(row)}")
        opening = ", "
    sys.stdout.write(("" if opening == ", " else opening) + "]}\n")


@contextmanager
def plain_output() -> Iterator[None]:
    """Output of a whole command. Files and other programs get UTF-8, whatever the locale; a terminal gets characters
    that it lacks as escapes. A reader that has gone ends the command quietly, a full disk with one line."""
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # closed by the shell
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            encoding = stream.encoding if stream.isatty() else "utf-8"
            stream.reconfigure(encoding=encoding, errors="backslashreplace")
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.filename is not None or error.errno not in OUTPUT_ERRORS:
            raise
        with open(os.devnull, "wb") as nowhere, suppress(OSError, ValueError):
            os.dup2(nowhere.fileno(), sys.stdout.fileno())  # for what is still buffered
        if error.errno != errno.EPIPE:
            with suppress(OSError):
                sys.stderr.write(f"the output cannot be written: {error.strerror} - make room there\n")
        raise SystemExit(FAILED) from None


@contextmanager
def explained() -> Iterator[None]:
    """Print CoServe's errors as plain text on stderr, and exit with the code of their kind."""
    try:
        yield
    except CoServeError as error:
        sys.stderr.write(f"{error}\n")
        if isinstance(error, AgentCrashed) and error.leaves_threads:
            leave_at_once(FAILED)
        is_mistake = isinstance(error, ConfigError) and not isinstance(error, DeviceMissing)
        raise typer.Exit(CONFIGURATION if is_mistake else FAILED) from error


def leave_at_once(code: int) -> None:
    """Exit without finalisers: runtimes would wait for a driver that hangs, or abort under a running thread."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


def log_to_stderr(level: int) -> None:
    """Log to stderr, with syslog levels under systemd; verbose libraries from WARNING on."""
    from agent.environment import service_manager
    from agent.service.service_manager import JournalFormatter

    logging.basicConfig(level=level, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    if service_manager().takes_levels:
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JournalFormatter())
    for name in ("PIL", "watchdog", "matplotlib"):
        logging.getLogger(name).setLevel(logging.WARNING)
