"""When a receiver may be told the next thing: not too fast, and after a failure not too soon. No clock of its own."""

from __future__ import annotations

FIRST_RETRY_S = 0.5
LONGEST_RETRY_S = 60.0
LONGEST_ASKED_S = 3600.0  # a receiver that asks to be left alone for a day is asked again all the same


class Pace:
    """At most ``per_s`` turns a second, evenly spread: what was not used is not made up for."""

    def __init__(self, per_s: float) -> None:
        self._interval_s = 1.0 / per_s
        self._next_s = 0.0

    def turn_in_s(self, now_s: float) -> float:
        """Take the next turn; how long it is until then."""
        at_s = max(self._next_s, now_s)
        self._next_s = at_s + self._interval_s
        return at_s - now_s


class Backoff:
    """Waits that double, from FIRST_RETRY_S to LONGEST_RETRY_S."""

    def __init__(self) -> None:
        self._wait_s = FIRST_RETRY_S

    def failed(self, asked_s: float | None = None) -> float:
        """How long to wait now; ``asked_s``: so long at least, as the receiver asks for it."""
        wait_s = self._wait_s
        self._wait_s = min(2 * wait_s, LONGEST_RETRY_S)
        return max(wait_s, min(asked_s or 0.0, LONGEST_ASKED_S))

    def succeeded(self) -> None:
        self._wait_s = FIRST_RETRY_S
