"""Upkeep of stored verdicts: delivered, exported, kept with images, removed.

Guarantees: upkeep delays neither a verdict nor the agent's end. A refused step is retried, a hanging step is
abandoned, both with alarms.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from agent.faults.housekeeping import Housekeeper
from agent.records.delivery.deliveries import Deliveries, line_outbox, line_receivers
from agent.records.export import ResultExport
from agent.records.result_writer import ResultStore
from agent.records.retention.archive import ImageArchive, ImageKeeper
from agent.records.retention.kept_images import Shelf
from agent.records.retention.sweeper import Sweeper
from agent.records.station.alarms import Alarm
from agent.service.false_calls import FalseCallWatch
from agent.sources.folder.custody import SHELF_OF
from experts.expert import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import datetime

    from agent.config import LineConfig

DUTIES_STOP_S = 0.5
HANGS_S = 30.0  # a step takes milliseconds
DELIVERIES_STOP_S = 3.0


class Upkeep:
    """Opens the store, which the caller closes. ``is_needed``: a result's file is still in a watched folder.
    Raises ConfigError for a receiver without its secret."""

    def __init__(self, config: LineConfig, is_needed: Callable[[str], bool], wall: Callable[[], datetime]) -> None:
        receivers = line_receivers(config)
        self.outbox = outbox = line_outbox(config, receivers)
        self.store = ResultStore(config.results_file, followers=[outbox])
        archive = ImageArchive(config.state / "images", config.records.images)
        self.images = ImageKeeper(archive)
        self.deliveries = Deliveries(receivers, outbox, self.store, config.outbox.per_s)
        shelves = [
            Shelf(folder.path / name, verdict, is_dated=verdict is not Verdict.UNKNOWN)
            for folder in config.intake.folders
            for verdict, name in SHELF_OF.items()
        ]
        self._sweeper = Sweeper(config.records.keep, archive, shelves, self.store, is_needed=is_needed)
        section = config.records.export
        self._export = None if section is None else ResultExport(section, config.line, self.store, wall)
        self.false_calls = FalseCallWatch(config.results_file)
        duties = {"retention": self._sweeper.step, "false calls": self.false_calls.step}
        if self._export is not None:
            duties["export"] = self._export.step
        self._keepers = {duty: Housekeeper({duty: step}, duty) for duty, step in duties.items()}

    def start(self) -> None:
        self.deliveries.start()
        for keeper in self._keepers.values():
            keeper.start()

    def alarms(self) -> Iterator[Alarm]:
        parts = [
            ("images", "images are not kept", self.images.statistics().alarm),
            ("disk", "images are not removed", self._sweeper.alarm),
        ]
        receivers = self.deliveries.statistics()
        late = [(f"receiver/{each.receiver}", f"{each.receiver} gets no verdicts", each.alarm) for each in receivers]
        lost = [(f"refused/{each.receiver}", f"{each.receiver} refused messages", each.refusal) for each in receivers]
        yield from (Alarm(name, f"{what}: {why}") for name, what, why in (*parts, *late, *lost) if why is not None)
        for duty, keeper in self._keepers.items():
            yield from (Alarm(f"duty/{duty}", trouble) for trouble in _troubles(duty, keeper))

    def stop(self) -> None:
        """Stop exports, removal and delivery; messages wait for the next start."""
        deadline_s = time.monotonic() + DUTIES_STOP_S
        ended = {duty: keeper.stop(max(deadline_s - time.monotonic(), 0.0)) for duty, keeper in self._keepers.items()}
        if self._export is not None and ended["export"]:
            self._export.stop()
        self.deliveries.stop(DELIVERIES_STOP_S)


def _troubles(duty: str, keeper: Housekeeper) -> list[str]:
    failing = [f"{duty}: {reason}" for duty, reason in keeper.failing.items()]
    step_s = keeper.step_s
    if step_s > HANGS_S:
        failing.append(f"{duty} has been waiting for {step_s:.0f} s: see whether its disk, or share, still answers")
    return failing
