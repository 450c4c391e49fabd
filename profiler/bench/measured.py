"""One shape for everything that is measured: rows of records, targets and notes, as text and as JSON."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from profiler.tables import text_table
from profiler.targets import Target, targets_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ABSENT = "-"


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table. ``path``: a row's attribute, dotted; ``form``: its format; ``scale``: to its unit."""

    heading: str
    path: str
    form: str = ""
    scale: float | None = None

    def cell(self, row: object) -> str:
        value = attrgetter(self.path)(row)
        if value is None:
            return ABSENT
        return format(value if self.scale is None else value * self.scale, self.form)

    @property
    def is_text(self) -> bool:
        return not self.form


def table_of(columns: Sequence[Column], rows: Sequence[object]) -> str:
    """Rows as text: words to the left, figures to the right."""
    lines = [[column.heading for column in columns], *([column.cell(row) for column in columns] for row in rows)]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    marks = ["<" if column.is_text else ">" for column in columns]
    layout = "  ".join(f"{{:{mark}{width}}}" for mark, width in zip(marks, widths, strict=True))
    return text_table(lines, layout)


@dataclass(frozen=True, slots=True)
class Measured:
    """One benchmark on this machine. ``rows``: records of one kind; ``notes``: what a reader has to know of them.

    ``more``: further keys of the JSON alone.
    """

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
