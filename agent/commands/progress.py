"""Output of commands: pages on stdout; progress on stderr, bars on a terminal and a line per stage elsewhere."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.progress import TaskID

    Report = Callable[[str, int, int], None]  # stage, done, total

PAGE_WIDTH = 160
PLAIN_EVERY_S = 5.0  # between two lines of one stage, without a terminal


def console_page() -> Console:
    return Console(width=None if Console().is_terminal else PAGE_WIDTH, highlight=False)


@contextmanager
def progress_on_stderr() -> Iterator[Report]:
    """Show ``report(stage, done, total)``: bars on a terminal, lines elsewhere."""
    if sys.stderr.isatty():
        with _bars() as report:
            yield report
    else:
        yield _plain()


@contextmanager
def _bars() -> Iterator[Report]:
    columns = (TextColumn("{task.description:<34}"), BarColumn(bar_width=32), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, TaskID] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield report


def _plain() -> Report:
    shown: dict[str, tuple[float, float]] = {}  # stage -> start, last line

    def report(stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        began_s, shown_s = shown.get(stage, (now, float("-inf")))
        if done == total or now - shown_s >= PLAIN_EVERY_S:
            shown_s = now
            sys.stderr.write(f"{stage}: {done}/{total} after {now - began_s:.1f} s\n")
        shown[stage] = (began_s, shown_s)

    return report
