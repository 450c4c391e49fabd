"""What an image is known by once it was judged, to whoever hears of it later."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shown:
    """Its result's key, its name in the log, and the component that it was judged for; None: one expert was asked."""

    key: str
    name: str
    component: str | None
