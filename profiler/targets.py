"""Targets of the project: each figure is compared once, where it is measured, and shown with the result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from profiler.tables import markdown_table, text_table

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True)
class Target:
    """Figure with its target. ``reached``: None for a figure without a target."""

    what: str
    wanted: str
    found: str
    reached: bool | None

    @property
    def verdict(self) -> str:
        return "" if self.reached is None else "reached" if self.reached else "SHORT"

    @property
    def remark(self) -> str:
        return "reached" if self.reached else "SHORT of its target"

    @property
    def cells(self) -> tuple[str, str, str, str]:
        return self.what, self.wanted, self.found, self.verdict


def at_least(what: str, found: float, least: float) -> Target:
    return Target(what, f"at least {least:g}", f"{found:.3g}", found >= least)


def at_most(what: str, found: float, most: float) -> Target:
    return Target(what, f"at most {most:.1%}", f"{found:.2%}", found <= most)


def targets_text(targets: Iterable[Target]) -> str:
    return text_table(target.cells for target in targets)


def targets_table(targets: Iterable[Target]) -> str:
    return markdown_table([("what", "to reach", "here", ""), *(target.cells for target in targets)])
