"""What identifies an image once it was judged."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shown:
    """Key of its result, name in the log, and component; None: one expert was asked."""

    key: str
    name: str
    component: str | None
