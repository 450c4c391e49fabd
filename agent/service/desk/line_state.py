"""State of a line at one moment, read in one place.

`/api/state`, `coserve status`, gRPC's Status, health and metrics are projections of one ``LineState``.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from agent.core.names import with_line_names

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from agent.core.state import EngineStatistics
    from agent.deployment.build import Agent
    from agent.doors.desk import ReloadView, ShadowsView
    from agent.faults.errors import AgentCrashed
    from agent.line_file.proofs import Lack
    from agent.records.delivery.deliveries import Deliveries, DeliveryStatistics
    from agent.records.group_commit import StoreStatistics
    from agent.records.result_writer import ResultStore
    from agent.records.retention.archive import ImageKeeper
    from agent.records.station.alarms import Alarm
    from agent.records.verdict import AlarmRow
    from agent.runtime.loop import LoopStatistics
    from agent.service.inspections.admission import Admission
    from agent.service.inspections.inspector import Inspector
    from agent.service.inspections.journaled import JournaledImages
    from agent.service.inspections.line_boards import LineBoards
    from agent.service.inspections.tally import Tally, TallyStatistics
    from agent.service.inspections.verdicts import Verdicts
    from agent.service.texts.text_door import TextDoor, TextStatistics
    from agent.subject import SourceStatus


@dataclass(frozen=True, slots=True, eq=False)
class LineParts:
    """Parts of a served line that answer its callers. ``phase``: intended reason to take no work, or None.
    ``alarms``: there now; ``open_alarms``: raised and not cleared."""

    inspector: Inspector
    admission: Admission
    journaled: JournaledImages
    verdicts: Verdicts
    boards: LineBoards
    store: ResultStore
    images: ImageKeeper
    deliveries: Deliveries
    texts: TextDoor
    tally: Tally
    sources: Callable[[], Sequence[SourceStatus]]
    trigger: Callable[[str, str | None, str | None, str | None], str]
    reload: Callable[[], ReloadView]
    promote: Callable[[str, str, str], ReloadView]
    alarms: Callable[[], Sequence[Alarm]]
    phase: Callable[[], str | None]
    open_alarms: Callable[[], Sequence[AlarmRow]]
    started_s: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, eq=False)
class LineState:
    """``standing``: expert -> why it takes no requests now; ``lacks``: expert -> what its proof lacks; ``unfinished``:
    accepted, and not judged yet. The disk is read for ``alarms`` and ``receivers`` alone, once they are asked for."""

    line: LineParts
    agent: Agent
    phase: str | None
    crash: AgentCrashed | None
    loop: LoopStatistics
    store: StoreStatistics
    sources: Sequence[SourceStatus]
    boards_open: int
    unfinished: int
    tally: TallyStatistics
    texts: TextStatistics
    shadows: ShadowsView
    standing: Mapping[str, str]
    lacks: Mapping[str, Lack]

    @cached_property
    def alarms(self) -> Sequence[Alarm]:
        return self.line.alarms()

    @cached_property
    def receivers(self) -> Sequence[DeliveryStatistics]:
        return self.line.deliveries.statistics()

    @property
    def unready(self) -> str | None:
        """Why no work is taken now."""
        return self.phase or (None if self.store.alarm is None else f"results are not stored: {self.store.alarm}")

    @property
    def written_tokens(self) -> int:
        return sum(each.written_tokens for each in self.loop.executors)


def state_of(line: LineParts) -> LineState:
    """State of a line now. Returning proves that the scheduler makes progress."""
    inspector = line.inspector
    agent = inspector.agent
    loop = agent.loop.statistics()
    return LineState(
        line, agent, line.phase(), inspector.crash, loop, line.store.statistics(), line.sources(),
        line.boards.statistics().open, line.journaled.unfinished, line.tally.statistics(), line.texts.statistics(),
        inspector.shadow_counts(), standing_of(agent, loop.engine), inspector.trust.lacks,
    )  # fmt: skip


def standing_of(agent: Agent, engine: EngineStatistics) -> dict[str, str]:
    """Reasons of experts on probation or in quarantine, by name in the line file."""
    reasons = engine.on_probation | engine.quarantined
    served = {name: agent.expert(name) for name in agent.config.catalog.experts}
    return {name: with_line_names(reasons[now]) for name, now in served.items() if now in reasons}
