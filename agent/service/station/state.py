"""State of a line for its page: one document of one moment.

Guarantees: what is always moving is rounded, so that the document of an idle line stays the same, to the byte. A disk
that cannot be read is told as a line that fails, beside what was read before.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from heapq import nlargest
from importlib.metadata import version
from typing import TYPE_CHECKING

from agent.core.names import line_name
from agent.core.performance import worker_of
from agent.records.station.shifts import Shifts
from agent.service.desk.line_state import state_of
from agent.service.desk.views import memory_view
from agent.service.station import views
from agent.service.station.live import BOARDS, Live
from agent.service.station.rates import RecentRates
from agent.service.station.shown import result_view, tile_of_row, tile_of_run
from experts.expert import Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agent.config import LineConfig
    from agent.core.state import EngineStatistics
    from agent.service.desk.line_state import LineParts, LineState
    from agent.service.station.live import LiveFigures

BUSY_S, SWITCHES_S = 10.0, 60.0
IDLE_S = 30.0  # without a verdict
P99 = 0.99
BARS = 8


class StationState:
    """For one thread at a time."""

    def __init__(self, parts: LineParts, live: Live) -> None:
        self._line = parts
        self._live = live
        self._version = version("coserve")
        self._recent, self._switches = RecentRates(BUSY_S), RecentRates(SWITCHES_S)

    def view(self) -> views.StateView:
        state = state_of(self._line)
        config, engine, now_s = state.agent.config, state.loop.engine, time.monotonic()
        since = Shifts(config.records.shifts).began_at(datetime.now(UTC))
        figures = self._live.figures(since)
        recent = self._recent.per_s(_counters(state), now_s)
        takts = _takts(config, figures)
        return views.StateView(
            line=config.line,
            version=self._version,
            config_sha256=config.catalog.sha256,
            phase=state.phase,
            judging=self._judging(state, figures),
            shift=views.ShiftView(
                since, _each(figures.totals.verdicts), _each(figures.totals.boards),
                takts[0].takt_s if takts else None, takts[0].takt_target_s if takts else None, takts, figures.findings,
                tuple(views.ParetoBar(*bar) for bar in figures.totals.bad[:BARS]),
            ),
            alarms=tuple(self._line.open_alarms()),
            boards=self._boards(figures),
            cases=tuple(result_view(case, config) for case in figures.cases),
            sources=_sources(state, recent),
            receivers=tuple(views.ReceiverView(each.receiver, each.waiting, each.alarm) for each in state.receivers),
            executors=_executors(engine, recent),
            memories=tuple(memory_view(views.MemoryView, pool, len(pool.resident)) for pool in engine.pools),
            loads=self._loads(engine, now_s),
            texts=_texts(state, recent),
            standing=tuple(views.StandingView(*each) for each in state.standing.items()),
            unproven=tuple(state.lacks),
        )  # fmt: skip

    def _judging(self, state: LineState, figures: LiveFigures) -> views.JudgingView:
        if state.phase is not None:
            return views.JudgingView("STOPPED", state.phase)
        not_read = None if figures.failure is None else f"results are not read: {figures.failure}"
        if wrong := state.crash or state.unready or not_read:
            return views.JudgingView("FAILING", str(wrong))
        age_s = self._live.last_age_s
        is_recent = age_s is not None and age_s < IDLE_S
        return views.JudgingView("JUDGING" if state.loop.requests_in_flight or is_recent else "IDLE")

    def _boards(self, figures: LiveFigures) -> tuple[views.BoardTile, ...]:
        runs = nlargest(BOARDS, self._line.boards.open_runs(), key=lambda run: run.opened_at)
        return (*map(tile_of_run, runs), *map(tile_of_row, figures.boards[: BOARDS - len(runs)]))

    def _loads(self, engine: EngineStatistics, now_s: float) -> views.LoadsView:
        per_s = self._switches.per_s({"switches": float(engine.switches)}, now_s)["switches"]
        return views.LoadsView(
            engine.switches, round(60 * per_s, 1), engine.evictions, engine.bytes_read, _p99(self._live.waits_s())
        )


def _counters(state: LineState) -> dict[str, float]:
    counters = {f"source {source.name}": float(source.received) for source in state.sources}
    counters |= {f"busy {one.executor}": one.busy_s for one in state.loop.executors}
    return counters | {"tokens": float(state.written_tokens)}


def _sources(state: LineState, recent: Mapping[str, float]) -> tuple[views.SourceView, ...]:
    return tuple(
        views.SourceView(
            one.name, one.kind, one.state, one.alarm, one.received, one.waiting,
            round(recent.get(f"source {one.name}", 0.0), 1), one.dropped,
        )
        for one in state.sources
    )  # fmt: skip


def _texts(state: LineState, recent: Mapping[str, float]) -> views.WritingView | None:
    if not any(expert.takes_texts for expert in state.agent.config.catalog.experts.values()):
        return None
    return views.WritingView(state.texts.under_way, sum(state.texts.ended.values()), round(recent["tokens"], 1))


def _executors(engine: EngineStatistics, recent: Mapping[str, float]) -> tuple[views.ExecutorView, ...]:
    return tuple(
        views.ExecutorView(
            queue.executor,
            queue.processor,
            worker_of(queue.processor),
            queue.requests,
            None if queue.expert is None else line_name(queue.expert),
            round(queue.length_s, 3),
            round(min(recent.get(f"busy {queue.executor}", 0.0), 1.0), 2),
        )
        for queue in engine.queues
    )


def _takts(config: LineConfig, figures: LiveFigures) -> tuple[views.TaktView, ...]:
    """Takts by type of the line file: the newest board's, or the first one, and those with a takt."""
    newest = [row.board_type for row in figures.boards[:1]] or [*config.boards][:1]
    names = dict.fromkeys([*newest, *reversed(figures.takts_s)])
    return tuple(
        views.TaktView(name, _rounded(figures.takts_s.get(name)), config.boards[name].takt_s)
        for name in names
        if name in config.boards
    )


def _p99(values: Sequence[float]) -> float | None:
    if not values:
        return None
    return round(values[min(int(P99 * len(values)), len(values) - 1)], 3)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def _each(counts: Mapping[Verdict, int]) -> dict[Verdict, int]:
    return {verdict: counts.get(verdict, 0) for verdict in Verdict}
