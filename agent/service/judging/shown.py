"""What an image is known by once it was judged, to whoever hears of it later."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shown:
    """Key of its result, name in the log, and component; None: one expert was asked."""

    key: str
    name: str
    component: str | None
