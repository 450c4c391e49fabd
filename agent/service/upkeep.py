"""What becomes of verdicts once they are stored: told to receivers, exported each day, kept with images, removed.

Guarantees: nothing here delays a verdict, or ends the agent; what a disk, a broker or a web server refuses is tried
again and stands among the alarms meanwhile.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from agent.intake.files.filing import SHELF_OF
from agent.records.delivery.deliveries import Deliveries, line_outbox, line_receivers
from agent.records.export import DailyExport
from agent.records.result_writer import ResultStore
from agent.records.retention.archive import ImageArchive, ImageKeeper
from agent.records.retention.kept_images import Shelf
from agent.records.retention.rules import Limits
from agent.records.retention.sweeper import Sweeper
from experts.expert import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import datetime

    from agent.config import LineConfig

KEEPER_STOP_S = 1.0
DELIVERIES_STOP_S = 3.0


class Upkeep:
    """See the module. It opens the store, whose commits it follows; whoever made it closes both.

    ``is_needed``: whether a result's key is that of a file that still lies in a watched folder. Raises ConfigError for
    receivers that cannot be told as the line file says.
    """

    def __init__(self, config: LineConfig, is_needed: Callable[[str], bool], wall: Callable[[], datetime]) -> None:
        receivers = line_receivers(config)
        outbox = line_outbox(config, receivers)
        self.store = ResultStore(config.results_file, followers=[outbox])
        archive = ImageArchive(config.state / "images", config.records.images)
        self.images = ImageKeeper(archive)
        self.deliveries = Deliveries(receivers, outbox, self.store, config.outbox.per_s)
        shelves = [
            Shelf(folder.path / name, verdict, is_dated=verdict is not Verdict.UNKNOWN)
            for folder in config.intake.folders
            for verdict, name in SHELF_OF.items()
        ]
        self._sweeper = Sweeper(Limits.of(config.records.keep), archive, shelves, self.store, is_needed=is_needed)
        section = config.records.export
        self._export = None if section is None else DailyExport(section, config.line, self.store, wall)

    @property
    def duties(self) -> Mapping[str, Callable[[], None]]:
        """What is to be done by time, a step each; each may wait for a disk of its own, which may be far away."""
        export = {} if self._export is None else {"export": self._export.step}
        return {"retention": self._sweeper.step, **export}

    def start(self) -> None:
        """Tell receivers what waits for them, and what comes."""
        self.deliveries.start()

    def alarms(self) -> list[str]:
        """What keeps any of it from going on."""
        parts = [
            ("images are not kept", self.images.statistics().alarm),
            ("images are not removed", self._sweeper.statistics().alarm),
        ]
        told = [(f"{each.receiver} is not told", each.alarm) for each in self.deliveries.statistics()]
        return [f"{what}: {alarm}" for what, alarm in (*parts, *told) if alarm is not None]

    def stop_images(self) -> None:
        """Keep what is on its way: its verdicts are stored after that."""
        self.images.stop(KEEPER_STOP_S)

    def stop(self) -> None:
        """Export and tell no more; what was not told waits for the next start."""
        if self._export is not None:
            with suppress(ValueError):  # a step of it hangs on its disk; the next start removes the draft
                self._export.stop()
        self.deliveries.stop(DELIVERIES_STOP_S)
