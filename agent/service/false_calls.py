"""Alarms of experts whose false calls became more, by people's reviews."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from agent.records.station.alarms import Alarm, open_alarms
from agent.records.truth.false_calls import more_false_calls, read_calls

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from agent.records.truth.figures import Rate

EVERY_S = 30.0
NAME = "false_calls/{}"  # of an alarm, by expert


class FalseCallWatch:
    """Reads reviews every EVERY_S. ``alarms``: by expert, for any thread. A raised alarm stays more easily, also over
    a restart."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.alarms: Mapping[str, Alarm] = {}
        self._path = path
        self._clock = clock
        self._due_s = clock()

    def step(self) -> None:
        if self._clock() < self._due_s:
            return
        self._due_s = self._clock() + EVERY_S
        raised = {row.name for row in open_alarms(self._path)}
        found = {
            expert: more_false_calls(calls, is_raised=NAME.format(expert) in raised)
            for expert, calls in read_calls(self._path).items()
        }
        self.alarms = {expert: _alarm(expert, *rates) for expert, rates in found.items() if rates is not None}


def _alarm(expert: str, latest: Rate, earlier: Rate) -> Alarm:
    message = (
        f"{latest.count} of the latest {latest.of} reviewed NG verdicts of {expert} are false calls, before "
        f"{earlier.count} of {earlier.of} - see `coserve review list LINE --expert {expert}`, and train it anew"
    )
    return Alarm(NAME.format(expert), message)
