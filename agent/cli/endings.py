"""How a command ends: exit codes, errors of ours in words, and at once where threads hang."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from experts.errors import AgentCrashed, AlreadyRunning, BackendUnavailable, ConfigError, CoServeError, DeviceMissing

if TYPE_CHECKING:
    from collections.abc import Iterator

FAILED, USAGE, CONFIGURATION = 1, 2, 78


@contextmanager
def explained() -> Iterator[None]:
    """Errors of ours as one plain text on stderr, with the exit code of their kind."""
    try:
        yield
    except (ConfigError, AlreadyRunning) as error:
        sys.stderr.write(f"{error}\n")
        is_mistake = isinstance(error, ConfigError) and not isinstance(error, DeviceMissing)
        raise typer.Exit(CONFIGURATION if is_mistake else FAILED) from error
    except (BackendUnavailable, CoServeError) as error:
        sys.stderr.write(f"{error}\n")
        if isinstance(error, AgentCrashed) and error.leaves_threads:
            leave_at_once(FAILED)
        raise typer.Exit(FAILED) from error


def leave_at_once(code: int) -> None:
    """End the process as it is: its runtimes, while they take themselves down, would wait for a driver that hangs, or
    abort under a thread that is still at work."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
