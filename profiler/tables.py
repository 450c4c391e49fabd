"""Tables of the offline phase: columns of text for a terminal, and Markdown.

Guarantees: cells are printed unchanged, in order, without colours.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from rich.console import JustifyMethod

WIDTH = 120  # of folded tables


def text_table(lines: Iterable[Sequence[str]], to_the_right: Collection[int] = ()) -> str:
    """Columns for a terminal, two blanks apart; the first line holds the headings. ``to_the_right``: column numbers."""
    lines = list(lines)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    layout = "  ".join(f"{{:{'>' if n in to_the_right else '<'}{width}}}" for n, width in enumerate(widths))
    return "\n".join(layout.format(*cells).rstrip() for cells in lines)


def markdown_table(lines: Iterable[Sequence[str]]) -> str:
    header, *rows = lines
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows))


def folded_table(columns: Mapping[str, JustifyMethod], rows: Iterable[Sequence[str]]) -> Table:
    """Table for ``folded``, by heading. Its first column is folded where the table would be too wide."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for number, (heading, justify) in enumerate(columns.items()):
        table.add_column(heading, justify=justify, overflow="fold", no_wrap=number > 0)
    for cells in rows:
        table.add_row(*cells)
    return table


def wait_text(seconds: float) -> str:
    if seconds < 1.0:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 100.0:
        return f"{seconds:.1f} s"
    return f"{seconds:.0f} s" if seconds < 3600.0 else f"{seconds / 3600:.1f} h"


def folded(parts: Iterable[str | Table]) -> str:
    """Text and tables one below the other, within WIDTH."""
    stream = io.StringIO()
    console = Console(file=stream, width=WIDTH, force_terminal=False, color_system=None)
    for part in parts:
        console.print(part, highlight=False, markup=False)
    return stream.getvalue()
