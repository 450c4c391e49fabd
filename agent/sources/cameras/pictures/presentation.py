"""Arrival times of a stream's frames, without lag: presentation times against the monotonic clock.

The minimum of (arrival - presentation time) is the offset of the two clocks; a frame's further delay is lag, in the
camera, the network, a buffer or the decoder. Without presentation times, a read that had to wait found every buffer
empty, so all later frames arrived after that read.

Guarantees: no frame counts as newer than it is, apart from the camera's least delay. Until a read has waited and the
minimum is steady, as after each jump of the camera's clock, the time is LONG_AGO.
"""

from __future__ import annotations

import resource
import time

LONG_AGO = float("-inf")
WAITED_S = 0.003  # a shorter read may have waited for the interpreter's lock only
JUMP_S = 1.0  # larger than any delay: the camera's clock was set, or its stream restarted
DRIFT = 5e-4  # of a slow camera's clock, in seconds per second
STEADY_S = 0.05  # while a backlog is read, the minimum decreases by more within SETTLING_S
SETTLING_S = 0.5


class PresentationClock:
    """Call ``ask`` before each packet is read and ``came`` after it.

    ``is_one_behind``: a packet is returned only when the next one begins, as by FFmpeg's parser of H.264.
    """

    def __init__(self, *, is_one_behind: bool = False, shortest_wait_s: float = WAITED_S) -> None:
        self._is_one_behind = is_one_behind
        self._shortest_wait_s = shortest_wait_s
        self._asked_at, self._asked_blocks = LONG_AGO, 0
        self._emptied_at = LONG_AGO  # the last read that had to wait
        self._last: tuple[float, float] | None = None  # the previous packet: presentation time, and time of its read
        self._distance_s: float | None = None
        self._steadiest_s = 0.0  # the minimum at ``_steady_since``
        self._steady_since = LONG_AGO
        self._is_settled = False

    def ask(self) -> None:
        self._asked_at, self._asked_blocks = time.monotonic(), _blocks()

    def came(self, presented_s: float | None) -> None:
        """Record a packet. ``presented_s``: its time by the camera's clock; None without one."""
        now = time.monotonic()
        has_waited = now - self._asked_at >= self._shortest_wait_s and _blocks() > self._asked_blocks
        self.learn(presented_s, now, has_waited)

    def learn(self, presented_s: float | None, now: float, has_waited: bool) -> None:
        """Record a packet as ``came`` does, at a given time."""
        if has_waited:
            self._emptied_at = now
        if presented_s is None:
            return
        last, self._last = self._last, (presented_s, now)
        if last is None:
            return
        last_presented_s, last_at = last
        distance_s = (last_at if self._is_one_behind else now) - presented_s
        known_s, gone_s = self._distance_s, presented_s - last_presented_s
        if known_s is None or not -JUMP_S <= gone_s <= now - last_at + JUMP_S:
            self._distance_s, self._steadiest_s, self._steady_since = distance_s, distance_s, now
            self._is_settled = False
            return
        self._distance_s = min(distance_s, known_s + DRIFT * (now - last_at))
        if distance_s < self._steadiest_s - STEADY_S:
            self._steadiest_s, self._steady_since = distance_s, now
        self._is_settled |= has_waited and now - self._steady_since >= SETTLING_S

    def came_at(self, presented_s: float | None, now: float) -> float:
        """Arrival time without lag of a frame with this presentation time; LONG_AGO while unknown."""
        if presented_s is None or self._distance_s is None:
            return self._emptied_at if self._last is None else LONG_AGO
        return min(presented_s + self._distance_s, now) if self._is_settled else LONG_AGO


def _blocks() -> int:
    """Voluntary context switches of this thread."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
