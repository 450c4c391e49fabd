"""A Perfetto trace of the flight record: what executors, links, the Engine and preparation did, and what memories held.

The format is protobuf (https://perfetto.dev/docs/reference/synthetic-track-event), written here field by field: a
handful of its fields suffices, and its stubs are ten megabytes.

Guarantees: packets are in order of time; a track's slices follow one another, as slices that overlap get tracks of
their own. A slice that is still under way has no end. Times are those of the loop's clock.
"""

from __future__ import annotations

import os
from collections import defaultdict
from itertools import count
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from agent.deployment.line_change import line_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from agent.core.pool import PoolStatistics
    from agent.runtime.flight_record import Timeline
    from agent.runtime.loop import AgentLoop

    Value: TypeAlias = "int | bytes | str"

BEGIN, END, COUNTER = 1, 2, 4  # TrackEvent.Type
BYTES = 3  # CounterDescriptor.Unit
SEQUENCE = 1  # of packets; any number
PROCESS = 1  # uuid of the process's track


class Slice(NamedTuple):
    begin_s: float
    end_s: float | None
    name: str
    notes: Mapping[str, int | str]


def trace_of(loop: AgentLoop, line: str, last_s: float) -> bytes:
    """Perfetto trace of the last seconds."""
    pools, timeline = loop.statistics().engine.pools, loop.record.timeline(last_s)
    tracks: defaultdict[str, list[Slice]] = defaultdict(list)
    for track, one in _slices(loop, timeline):
        tracks[track].append(one)
    uuids = count(PROCESS + 1)
    process = _message((1, os.getpid()), (6, f"coserve {line}"))
    head = [_packet(None, (60, _message((1, PROCESS), (3, process))))]
    timed: list[tuple[float, bytes]] = []
    for name, slices in sorted(tracks.items()):
        for number, lane in enumerate(_lanes(slices), start=1):
            uuid = next(uuids)
            head.append(_track(uuid, name if number == 1 else f"{name} ({number})"))
            timed += [event for one in lane for event in _events(uuid, one)]
    for pool in pools:
        uuid = next(uuids)
        head.append(_track(uuid, f"memory {pool.name}", (8, _message((3, BYTES)))))
        timed += [
            (at_s, _packet(at_s, (11, _event(uuid, COUNTER, (30, used))))) for at_s, used in _used(pool, timeline)
        ]
    timed.sort(key=lambda each: each[0])  # stable: an end stays before the next begin of its track
    return b"".join((*head, *(packet for _, packet in timed)))


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


# -- the format: numbers of fields are Perfetto's --


def _events(uuid: int, one: Slice) -> Iterator[tuple[float, bytes]]:
    notes = [
        (4, _message((10, name), (4 if isinstance(value, int) else 6, value))) for name, value in one.notes.items()
    ]
    yield one.begin_s, _packet(one.begin_s, (11, _event(uuid, BEGIN, (23, one.name), *notes)))
    if one.end_s is not None:
        yield one.end_s, _packet(one.end_s, (11, _event(uuid, END)))


def _event(uuid: int, kind: int, *fields: tuple[int, Value]) -> bytes:
    return _message((9, kind), (11, uuid), *fields)


def _track(uuid: int, name: str, *fields: tuple[int, Value]) -> bytes:
    return _packet(None, (60, _message((1, uuid), (2, name), (5, PROCESS), *fields)))


def _packet(at_s: float | None, *fields: tuple[int, Value]) -> bytes:
    timed = () if at_s is None else ((8, max(round(at_s * 1e9), 0)),)
    return _message((1, _message(*timed, (10, SEQUENCE), *fields)))


def _message(*fields: tuple[int, Value]) -> bytes:
    parts = []
    for number, value in fields:
        if isinstance(value, int):
            parts.append(_varint(number << 3) + _varint(value))
        else:
            content = value.encode("utf-8", "replace") if isinstance(value, str) else value
            parts.append(_varint(number << 3 | 2) + _varint(len(content)) + content)
    return b"".join(parts)


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
