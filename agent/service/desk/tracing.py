"""A trace of the flight record: what executors, links, the Engine and preparation did, and what memories held.

The format is Chrome's trace events, as JSON: Perfetto opens it.

Guarantees: events are in order of time; a track's slices follow one another, as slices that overlap get tracks of
their own. A slice that is still under way has no end. Times are those of the loop's clock.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

from agent.core.names import line_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from agent.core.pool import PoolStatistics
    from agent.runtime.flight_record import Timeline
    from agent.runtime.loop import AgentLoop


class Slice(NamedTuple):
    begin_s: float
    end_s: float | None
    name: str
    notes: Mapping[str, int | str]


def trace_of(loop: AgentLoop, line: str, last_s: float) -> bytes:
    """Trace events of the last seconds."""
    pools, timeline = loop.statistics().engine.pools, loop.record.timeline(last_s)
    tracks: defaultdict[str, list[Slice]] = defaultdict(list)
    for track, one in _slices(loop, timeline):
        tracks[track].append(one)
    head = [_event("M", 0, name="process_name", args={"name": f"coserve {line}"})]
    timed: list[dict[str, Any]] = []
    for name, slices in sorted(tracks.items()):
        for number, lane in enumerate(_lanes(slices), start=1):
            thread = len(head)
            shown = name if number == 1 else f"{name} ({number})"
            head.append(_event("M", thread, name="thread_name", args={"name": shown}))
            for one in lane:
                timed.append(_event("B", thread, one.begin_s, name=one.name, args=one.notes))
                if one.end_s is not None:
                    timed.append(_event("E", thread, one.end_s))
    for pool in pools:
        name = f"memory {pool.name}"
        timed += [_event("C", 0, at_s, name=name, args={"bytes": used}) for at_s, used in _used(pool, timeline)]
    timed.sort(key=lambda each: each["ts"])  # stable: an end stays before the next begin of its track
    return json.dumps({"traceEvents": head + timed}, ensure_ascii=False).encode("utf-8", "replace")


def _event(kind: str, thread: int, at_s: float = 0.0, **fields: Any) -> dict[str, Any]:  # noqa: ANN401  of JSON
    """``kind``: Chrome's letter for begin, end, counter or metadata."""
    return {"ph": kind, "pid": os.getpid(), "tid": thread, "ts": round(at_s * 1e6, 3), **fields}


def _slices(loop: AgentLoop, timeline: Timeline) -> Iterator[tuple[str, Slice]]:
    """Each slice, with the name of its track."""
    record, since_s = loop.record, timeline.since_s
    processors = {spec.id: spec.processor for spec in record.executors}
    for span in timeline.batches:
        notes: dict[str, int | str] = {"requests": span.requests, "kind": "quantum" if span.is_quantum else "batch"}
        notes |= {"failed": 1} if span.has_failed else {}
        track = f"executor {span.executor} {processors[span.executor]}"
        yield track, Slice(span.began_s, span.ended_s, line_name(span.expert), notes)
    for load in timeline.loads:
        notes = {"bytes": load.size_bytes} | ({} if load.failure is None else {"failure": load.failure})
        if load.evicted:
            evicted = ", ".join(line_name(each.expert) for each in load.evicted)
            notes |= {"evicted": evicted, "claim": load.evicted[0].claim}
        yield f"link {load.source} to {load.pool}", Slice(load.began_s, load.ended_s, line_name(load.expert), notes)
    for event, began_s, seconds in record.decisions(since_s):
        yield "decisions", Slice(began_s, began_s + seconds, event, {})
    for request, expert, thread, began_s, ended_s in record.preparations(since_s):
        about = {} if request is None else {"request": request}
        yield f"preparation {thread}", Slice(began_s, ended_s, expert, about)


def _used(pool: PoolStatistics, timeline: Timeline) -> list[tuple[float, int]]:
    """Bytes in a memory after each change: counted back from what it holds now."""
    changes = [(each.at_s, -each.freed_bytes) for each in timeline.evictions if each.pool == pool.name]
    for load in timeline.loads:
        if load.pool == pool.name and load.began_s >= timeline.since_s:
            changes.append((load.began_s, load.size_bytes))
        if load.pool == pool.name and load.failure is not None and load.ended_s is not None:
            changes.append((load.ended_s, -load.size_bytes))
    used, found = pool.used_bytes, [(timeline.at_s, pool.used_bytes)]
    for at_s, more in sorted(changes, reverse=True):
        found.append((at_s, used))
        used -= more
    return [(timeline.since_s, used), *reversed(found)]


def _lanes(slices: Iterable[Slice]) -> list[list[Slice]]:
    """Slices by lane, so that those of a lane do not overlap."""
    lanes: list[list[Slice]] = [[]]
    ends_s: list[float] = [float("-inf")]
    for each in sorted(slices, key=lambda one: one.begin_s):
        free = next((lane for lane, end_s in enumerate(ends_s) if end_s <= each.begin_s), None)
        if free is None:
            free = len(lanes)
            lanes.append([])
            ends_s.append(0.0)
        lanes[free].append(each)
        ends_s[free] = float("inf") if each.end_s is None else each.end_s
    return lanes
