"""Measurements: contestants take turns, and what they reached is shown as rows, targets and notes, as text and as JSON.

Guarantees: a change of the machine's speed affects all contestants equally. Each one warms up before any time counts;
every round runs each one once, in rotated order, so that none always follows the same one. A pause precedes each run:
threads of other runtimes spin for about a millisecond after their last operator, on the cores of the next contestant.
"""

from __future__ import annotations

import math
import platform
import statistics
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from operator import attrgetter
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from profiler.tables import markdown_table, text_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

ROUNDS_LEAST = 3  # for a median, beyond any limit
PAUSE_S = 0.003
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class TimedTurns(Generic[Result]):
    """Counted runs of one way, in order."""

    seconds: tuple[float, ...]
    results: tuple[Result, ...] = ()

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    def scaled(self, factor: float) -> TimedTurns[Result]:
        return TimedTurns(tuple(seconds * factor for seconds in self.seconds))


@dataclass(frozen=True, slots=True)
class Plan:
    """Extent of a comparison. ``limit_s``: no round beyond ROUNDS_LEAST begins later. ``progress``: reports rounds."""

    rounds: int
    warming_up: int = 2  # rounds that do not count
    limit_s: float = math.inf
    progress: Callable[[int, int], None] = lambda done, total: None


def by_turns(ways: Mapping[str, Callable[[], Result]], plan: Plan) -> dict[str, TimedTurns[Result]]:
    """Run every way in every round. Raises what a way raises."""
    runs: dict[str, list[tuple[float, Result]]] = {name: [] for name in ways}
    names, ends_s = list(ways), perf_counter() + plan.limit_s
    for number in range(-plan.warming_up, plan.rounds):
        if number >= ROUNDS_LEAST and perf_counter() >= ends_s:
            break
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            run = one_turn(ways[name])
            if number >= 0:
                runs[name].append(run)
        plan.progress(plan.warming_up + number + 1, plan.warming_up + plan.rounds)
    return {
        name: TimedTurns(tuple(seconds for seconds, _ in each), tuple(result for _, result in each))
        for name, each in runs.items()
    }


def one_turn(way: Callable[[], Result]) -> tuple[float, Result]:
    """Seconds and result of one run, after a pause."""
    sleep(PAUSE_S)
    started_s = perf_counter()
    result = way()
    return perf_counter() - started_s, result


@dataclass(frozen=True, slots=True)
class Target:
    """Figure with the project's target. ``reached``: None for a figure without a target."""

    what: str
    wanted: str
    found: str
    reached: bool | None

    @property
    def cells(self) -> tuple[str, str, str, str]:
        verdict = "" if self.reached is None else "reached" if self.reached else "SHORT"
        return self.what, self.wanted, self.found, verdict


def at_least(what: str, found: float, least: float) -> Target:
    return Target(what, f"at least {least:g}", f"{found:.3g}", found >= least)


def at_most(what: str, found: float, most: float) -> Target:
    return Target(what, f"at most {most:.1%}", f"{found:.2%}", found <= most)


def without_target(what: str, found: float) -> Target:
    return Target(what, "-", f"{found:.2f}", None)


def targets_text(targets: Iterable[Target]) -> str:
    return text_table(target.cells for target in targets)


def targets_table(targets: Iterable[Target]) -> str:
    return markdown_table([("what", "to reach", "here", ""), *(target.cells for target in targets)])


@dataclass(frozen=True, slots=True)
class Column:
    """Column of a table. ``path``: attribute of a row, dotted; ``form``: its format; ``scale``: factor to its unit."""

    heading: str
    path: str
    form: str = ""
    scale: float | None = None

    def cell(self, row: object) -> str:
        value = attrgetter(self.path)(row)
        if value is None:
            return "-"
        return format(value if self.scale is None else value * self.scale, self.form)


def table_of(columns: Sequence[Column], rows: Sequence[object]) -> str:
    lines = [[column.heading for column in columns], *([column.cell(row) for column in columns] for row in rows)]
    return text_table(lines, [number for number, column in enumerate(columns) if column.form])


@dataclass(frozen=True, slots=True)
class Measured:
    """One benchmark on this machine. ``rows``: records of one kind; ``more``: further keys of the JSON only."""

    machine: str
    columns: tuple[Column, ...]
    rows: tuple[Any, ...]
    targets: tuple[Target, ...] = ()
    notes: tuple[str, ...] = ()
    more: Mapping[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        parts = [f"machine  {self.machine}", table_of(self.columns, self.rows)]
        parts += [targets_text(self.targets)] if self.targets else []
        return "\n".join((*parts, *(f"note     {note}" for note in self.notes)))

    def as_json(self) -> dict[str, Any]:
        return {
            "machine": self.machine,
            "rows": [asdict(row) for row in self.rows],
            "targets": [asdict(target) for target in self.targets],
            "notes": list(self.notes),
            **self.more,
        }


def software() -> str:
    return f"{platform.system()} {platform.release()}, Python {platform.python_version()}, torch {version('torch')}"


def this_machine(*also: str) -> str:
    return ", ".join((platform.machine(), software(), *also))
