"""Experts, executors, memories and texts of a line, as `/api` shows them."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, defaultdict
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from agent.core.names import line_name
from agent.core.performance import worker_of
from agent.faults.errors import OrderRefused, Reason
from agent.records.station.reviews import Finding, ReviewCounts
from agent.service.desk.line_state import state_of
from agent.service.desk.views import memory_view
from agent.service.station import views
from agent.service.station.rates import RecentRates
from agent.service.station.stored import EVER
from experts.document import suggestion

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agent.core.pool import PoolStatistics
    from agent.deployment.build import Agent
    from agent.records.station.reviews import ReviewReader
    from agent.runtime.flight_record import Eviction
    from agent.runtime.loop import LoopStatistics
    from agent.service.desk.line_state import LineParts
    from agent.service.station import questions as asked

EVICTIONS = 20
TOKENS_S = 10.0
COUNTED_S = 60.0


class Machine:
    """For any thread."""

    def __init__(self, parts: LineParts, reviews: ReviewReader) -> None:
        self._line = parts
        self._reviews = reviews
        self._looking = threading.Lock()  # guards the rates
        self._tokens = RecentRates(TOKENS_S)
        self._counted: tuple[float, Mapping[str | None, ReviewCounts]] = (-math.inf, {})

    def experts(self, _: object) -> views.ExpertsDocument:
        return views.ExpertsDocument(tuple(views.ExpertView(**each) for each in self._experts()))

    def expert(self, query: asked.OfExpert) -> views.ExpertDetail:
        agent, name = self._line.inspector.agent, query.id
        listed = agent.config.catalog.experts
        if name not in listed:
            raise OrderRefused(Reason.NOT_FOUND, f"no expert {name!r} - {suggestion(name, listed)}", field="id")
        (values,) = self._experts(name)
        record, now = agent.loop.record, (datetime.now(UTC), time.monotonic())
        evictions = [each for each in record.evictions() if line_name(each.expert) == name]
        return views.ExpertDetail(
            **values,
            labels=tuple(listed[name].answers),
            task=None if listed[name].task is None else str(listed[name].task),
            latency=_latencies(agent, name),
            drift=round(values["usage_seen"] - values["usage_profiled"], 6),
            reviews={str(one): count for one, count in self._reviewed().get(name, ReviewCounts()).findings.items()},
            seen=record.seen(agent.expert(name)),
            evictions_recent=tuple(_eviction(each, *now) for each in reversed(evictions[-EVICTIONS:])),
        )

    def engine(self, query: asked.EngineAsked) -> views.EngineDocument:
        agent = self._line.inspector.agent
        loop, at = agent.loop.statistics(), datetime.now(UTC)
        timeline = agent.loop.record.timeline(query.last)
        ran, came = defaultdict[int, list[views.Span]](list), defaultdict[str, list[views.Span]](list)
        for batch in timeline.batches:
            span = _span(batch.began_s, batch.ended_s, timeline.at_s)
            ran[batch.executor].append((*span, line_name(batch.expert), batch.requests))
        for load in timeline.loads:
            span = _span(load.began_s, load.ended_s, timeline.at_s)
            came[f"{load.source} to {load.pool}"].append((*span, line_name(load.expert), load.size_bytes))
        executors = tuple(
            views.ExecutorSpans(each.executor, each.processor, worker_of(each.processor), tuple(ran[each.executor]))
            for each in loop.engine.queues
        )
        links = tuple(views.LinkSpans(name, tuple(spans)) for name, spans in sorted(came.items()))
        memories = tuple(_memory(pool, agent) for pool in loop.engine.pools)
        return views.EngineDocument(at, query.last, executors, links, memories)

    def texts(self, _: object) -> views.TextsDocument:
        state, texts = state_of(self._line), self._line.texts
        with self._looking:
            per_s = self._tokens.per_s({"tokens": float(state.written_tokens)}, time.monotonic())["tokens"]
        first = state.texts.first_token_s
        shown = max(first.counts.values())
        return views.TextsDocument(
            tuple(texts.models()),
            tuple(texts.glances()),
            round(per_s, 1),
            first.sum_s / shown if shown else None,
        )  # fmt: skip

    def reviewed(self) -> None:
        self._counted = (-math.inf, {})

    def _reviewed(self) -> Mapping[str | None, ReviewCounts]:
        """Reviews since ever; counting 100,000 takes 0.3 s, and those that retention removes may count for a while."""
        counted_s, counts = self._counted
        if time.monotonic() - counted_s > COUNTED_S:
            counts = self._reviews.counts(EVER)
            self._counted = (time.monotonic(), counts)
        return counts

    def _experts(self, only: str | None = None) -> Sequence[dict[str, Any]]:
        state = state_of(self._line)
        agent, loop, config, graph = state.agent, state.loop, state.agent.config, state.agent.config.catalog.graph
        shares = {line_name(share.expert): share for share in self._line.inspector.usage().shares()}
        loads, evictions = Counter[str](), Counter[str]()
        for (expert, _), count in loop.transfers.of_experts.items():
            loads[line_name(expert)] += count
        for expert, count in agent.loop.record.evicted_counts().items():
            evictions[line_name(expert)] += count
        reviews, lacks = self._reviewed(), state.lacks
        routes = [*config.catalog.components, *config.catalog.texts]
        reached = {route: graph.experts_of(route) for route in config.catalog.components}
        reached |= {route: texts.experts for route, texts in config.catalog.texts.items()}
        return [
            {
                "id": name,
                "sha256": self._line.inspector.weights_of(name),
                "shadow": graph.shadows.get(name),
                "components": tuple(route for route in routes if name in reached[route]),
                "architecture": expert.architecture,
                "memories": _memories_of(agent, loop, name),
                "usage_profiled": round(shares[name].expected, 6) if name in shares else 0.0,
                "usage_seen": round(shares[name].seen, 6) if name in shares else 0.0,
                "loads": loads[name],
                "evictions": evictions[name],
                "standing": state.standing.get(name),
                "unproven": lacks[name].why if name in lacks else None,
                "false_calls": reviews[name].findings[Finding.FALSE_CALL] if name in reviews else 0,
                "reviewed_ng": reviews[name].machine_ng if name in reviews else 0,
            }
            for name, expert in config.catalog.experts.items()
            if only in (None, name)
        ]


def _memories_of(agent: Agent, loop: LoopStatistics, expert: str) -> tuple[str, ...]:
    columns = agent.setup.matrix.experts.values()
    copies = {row.copy for column in columns if (row := column.get(agent.expert(expert))) is not None}
    return tuple(pool.name for pool in loop.engine.pools if not copies.isdisjoint(pool.resident))


def _latencies(agent: Agent, expert: str) -> dict[str, views.LatencyView]:
    columns = agent.setup.matrix.experts.items()
    rows = {processor: row for processor, column in columns if (row := column.get(agent.expert(expert))) is not None}
    return {
        processor: views.LatencyView(
            row.performance.latency_s(1),
            row.performance.max_batch,
            row.performance.latency_s(row.performance.max_batch),
            dict(row.load_s),
        )
        for processor, row in rows.items()
    }


def _memory(pool: PoolStatistics, agent: Agent) -> views.MemoryDetail:
    held = tuple(
        views.Resident(line_name(copy.expert.id), copy.footprint.total_bytes)
        for name in pool.resident
        if (copy := agent.copies.get(name)) is not None
    )
    return memory_view(views.MemoryDetail, pool, held)


def _eviction(seen: Eviction, now: datetime, now_s: float) -> views.EvictionView:
    return views.EvictionView(
        now - timedelta(seconds=now_s - seen.at_s),
        seen.pool,
        seen.stage,
        seen.claim,
        line_name(seen.for_expert) or None,
        tuple(line_name(candidate) for candidate in seen.candidates),
    )


def _span(began_s: float, ended_s: float | None, at_s: float) -> tuple[float, float]:
    return round(began_s - at_s, 4), round((at_s if ended_s is None else ended_s) - at_s, 4)
