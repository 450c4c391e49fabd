"""Limits of callers: number and bytes of images and texts in flight; any excess is refused at once.

Guarantees: admitted orders never exceed the limits; a refusal names the time to retry, by the recent rate.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING

from agent.faults.errors import OrderRefused, Reason
from experts import sizes

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent.line_file.api import ApiLimitsSection

SHORTEST_RETRY_S = 0.05
LONGEST_RETRY_S = 10.0
USUAL_RETRY_S = 0.5  # before the rate of ended images is known


class Admission:
    """``ended_per_s``: recent rate of ended images."""

    def __init__(self, limits: ApiLimitsSection, ended_per_s: Callable[[], float]) -> None:
        self._limits = limits
        self._ended_per_s = ended_per_s
        self._lock = threading.Lock()
        self.images = 0
        self.size_bytes = 0

    def enter(self, images: int, size_bytes: int) -> Callable[[int], None]:
        """Admit an image of so many requests, or a text. Raises OrderRefused: TOO_LARGE, QUEUE_FULL.

        Returns a function that releases so many requests, with the last one the bytes; idempotent after that.
        """
        if images > self._limits.requests or size_bytes > self._limits.memory:
            raise OrderRefused(
                Reason.TOO_LARGE,
                f"{images} images or texts of {sizes.mib(size_bytes)} are more than the line takes at once "
                f"({self._limits.requests}, {sizes.mib(self._limits.memory)}) - raise api.limits",
            )
        with self._lock:
            if self.images + images <= self._limits.requests and self.size_bytes + size_bytes <= self._limits.memory:
                self.images += images
                self.size_bytes += size_bytes
                return partial(self._leave, [images], size_bytes)
            under_way, held = self.images, self.size_bytes
        too_many, per_s = max(under_way + images - self._limits.requests, 1), self._ended_per_s()
        retry_s = too_many / per_s if per_s > 0 else USUAL_RETRY_S
        raise OrderRefused(
            Reason.QUEUE_FULL,
            f"{under_way} images or texts of {sizes.mib(held)} are under way, and the line takes "
            f"{self._limits.requests} of {sizes.mib(self._limits.memory)} at once - try again",
            min(max(retry_s, SHORTEST_RETRY_S), LONGEST_RETRY_S),
        )

    def _leave(self, inside: list[int], size_bytes: int, images: int) -> None:
        with self._lock:
            done = min(images, inside[0])
            inside[0] -= done
            self.images -= done
            if done and not inside[0]:
                self.size_bytes -= size_bytes
