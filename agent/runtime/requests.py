"""Requests of one-off commands, replays and measurements, which wait for outcomes. A service uses a journal instead."""

from __future__ import annotations

import time
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING

from agent.faults.errors import AgentCrashed

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent.core.request import Outcome
    from agent.runtime.executor import RequestSource
    from agent.runtime.loop import AgentLoop


@dataclass(frozen=True, slots=True)
class Ended:
    """Outcome, with the monotonic times of submission and outcome."""

    outcome: Outcome
    submitted_s: float
    at_s: float


class Requests:
    """Submits requests to one loop and collects their outcomes, or its crash, on one thread.

    Pass ``tell`` as the loop's ``on_outcome``, then the loop to ``watch``.
    """

    _loop: AgentLoop

    def __init__(self) -> None:
        self._ended: SimpleQueue[tuple[int, Outcome, float] | AgentCrashed] = SimpleQueue()
        self._submitted_s: dict[int, float] = {}

    def report(self, number: int, outcome: Outcome) -> None:
        self._ended.put((number, outcome, time.monotonic()))

    def watch(self, loop: AgentLoop) -> None:
        self._loop = loop
        loop.when_crashed(self._ended.put)

    def submit(self, source: RequestSource, *, component: str | None = None, expert: str | None = None) -> None:
        """Submit as ``AgentLoop.submit`` does. Raises AgentCrashed."""
        if self._loop.crash is not None:
            raise self._loop.crash
        number = self._loop.submit(source, component=component, expert=expert)
        self._submitted_s[number] = time.monotonic()

    def collect(self, progress: Callable[[int, int], None] = lambda *_: None) -> list[Ended]:
        """Outcomes of all requests since the last call, in order of submission. Raises AgentCrashed."""
        submitted_s, self._submitted_s = self._submitted_s, {}
        ended: dict[int, Ended] = {}
        while len(ended) < len(submitted_s):
            end = self._ended.get()
            if isinstance(end, AgentCrashed):
                raise end
            number, outcome, at_s = end
            ended[number] = Ended(outcome, submitted_s[number], at_s)
            progress(len(ended), len(submitted_s))
        return [ended[number] for number in submitted_s]
