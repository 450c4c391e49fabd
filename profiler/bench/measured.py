"""Common form of all measurements: rows of records, targets and notes, as text and as JSON."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from profiler.tables import markdown_table, text_table

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


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
