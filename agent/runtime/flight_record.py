"""Flight record: bounded rings of what the loop saw and did, from which waits, evictions and traces are explained.

Guarantees: each note is O(1), on the loop's thread, and takes no lock; a reader copies a ring and never makes the loop
wait. What is kept of requests, batches, decisions and preparations is plain tuples of numbers and names: the garbage
collector forgets these, so a full record makes its passes no longer. The rings hold a fixed number of entries: the last
minute of a line with 130 images, 130 batches and 540 decisions a second, and longer of a slower one. Entries are of all
workers; preparation is of this process alone.

Times are those of the loop's clock. Experts have the Engine's names.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import chain, takewhile
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

from agent.core import events
from agent.core.names import expert_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from agent.core.effects import Assigned, Evict, StartLoad
    from agent.core.events import Event
    from agent.core.performance import ExecutorSpec, PoolSpec
    from agent.core.request import Batch

REQUESTS = BATCHES = 8_192  # arbitrary, as are those below: about 25 MB in all when every ring is full
DECISIONS = 32_768
LOADS, EVICTIONS = 4_096, 2_048
CANDIDATES = 12  # of an eviction, in ranked order
WAITS = 1_000  # latest images of an expert whose times are summed up
MARKS = 64  # of one request: what it asked and when, assignments, batches

Entry = TypeVar("Entry")
# Of a request: what it asked, its arrival, then in order ``Queued`` and ``Ran``, told apart by their lengths.
Noted: TypeAlias = "Sequence[Any]"
# Time, expert, executor, whether it joined a group, and executor, queue and addition of each candidate in turn.
Queued: TypeAlias = "tuple[float, str, int, bool, tuple[float, ...]]"
# Executor, expert and requests of each portion in turn, begin, end (None: it runs), whether it is a quantum and has
# failed, and the numbers of the loads that its first request waited for.
Ran: TypeAlias = "tuple[int, tuple[Any, ...], float, float | None, bool, bool, tuple[int, ...]]"
QUEUED, RAN = 5, 7


@dataclass(frozen=True, slots=True)
class Eviction:
    """``stage``, ``claim``: see ``agent.core.effects``. ``candidates``: first ones of ``weighed``, in ranked order."""

    at_s: float
    expert: str
    pool: str
    stage: int
    claim: str
    for_expert: str
    freed_bytes: int
    candidates: tuple[str, ...]
    weighed: int


@dataclass(frozen=True, slots=True)
class LoadSpan:
    """``ended_s``: None while it is under way. ``evicted``: for its room. ``failure``: None unless it failed."""

    expert: str
    copy: str
    source: str
    pool: str
    size_bytes: int
    began_s: float
    evicted: tuple[Eviction, ...]
    ended_s: float | None = None
    failure: str | None = None


class BatchSpan(NamedTuple):
    """Batch of images, or quantum of texts. ``ended_s``: None while it runs. A tuple for speed."""

    executor: int
    expert: str
    requests: int
    began_s: float
    ended_s: float | None
    is_quantum: bool
    has_failed: bool


class Timeline(NamedTuple):
    """Spans that were under way since ``since_s``, in order of begin, and evictions. ``at_s``: now."""

    at_s: float
    since_s: float
    batches: Sequence[BatchSpan]
    loads: Sequence[LoadSpan]
    evictions: Sequence[Eviction]


@dataclass(frozen=True, slots=True)
class ExpertSeen:
    """One expert since the start. ``p50_s``, ``p99_s``: time from queued to answered of its latest images, if any."""

    images: int
    batches: int
    p50_s: float | None
    p99_s: float | None


class FlightRecord:
    """Written on the loop's thread; ``preparations`` by the threads that prepare. Readers: any thread.

    A preparation: request or None, expert, thread, begin, end.
    """

    def __init__(
        self,
        executors: Iterable[ExecutorSpec],
        pools: Iterable[PoolSpec],
        preparations: deque[tuple[Any, ...]],
        clock: Callable[[], float],
    ) -> None:
        self._clock = clock
        self._now_s = 0.0
        self._executors: dict[int, ExecutorSpec] = {}
        self._caches: dict[str, str | None] = {}
        self.know(executors, pools)
        self._preparations = preparations
        self._decisions: deque[tuple[str, float, float]] = deque(maxlen=DECISIONS)
        self._under_way: dict[int, list[Any]] = {}  # ``Noted``, by request
        self._keys: dict[int, str] = {}  # of requests under way
        self._ended: deque[tuple[str, float, Noted]] = deque(maxlen=REQUESTS)  # key, end, notes
        self._running: dict[int, tuple[Batch, float, tuple[int, ...]]] = {}  # batch, begin, loads
        self._ran: deque[Ran] = deque(maxlen=BATCHES)
        self._loading: dict[int, LoadSpan] = {}
        self._latest: dict[tuple[str, str], int] = {}  # load by memory and copy, until the copy leaves
        self._loads: dict[int, LoadSpan] = {}  # the ``LOADS`` that ended last, by number
        self._evictions: deque[Eviction] = deque(maxlen=EVICTIONS)
        self._images, self._batches, self._evicted = Counter[str](), Counter[str](), Counter[str]()  # by expert
        self._making_room: dict[tuple[str, str], tuple[Eviction, ...]] = {}  # by memory and newcomer

    def know(self, executors: Iterable[ExecutorSpec], pools: Iterable[PoolSpec]) -> None:
        self._executors |= {spec.id: spec for spec in executors}
        self._caches |= {pool.name: pool.cache for pool in pools}

    # -- notes, on the loop's thread --

    def decided(self, event: Event, began_s: float, ended_s: float) -> None:
        """Call before the decision's effects are carried out."""
        self._now_s = began_s
        self._decisions.append((type(event).__name__, began_s, ended_s - began_s))
        if isinstance(event, events.Arrived):
            self._under_way[event.request] = [event.component or event.expert or "", began_s]
        elif isinstance(event, events.Loaded):
            self.load_ended(event.load, None)
        elif isinstance(event, events.LoadFailed):
            self.load_ended(event.load, event.reason)

    def assigned(self, effect: Assigned) -> None:
        noted = self._under_way.get(effect.request)
        if noted is not None and len(noted) < MARKS:
            candidates = tuple(chain.from_iterable(effect.candidates))
            noted.append((self._now_s, effect.expert, effect.executor, effect.joined, candidates))

    def load_began(self, effect: StartLoad) -> None:
        evicted = self._making_room.pop((effect.pool, effect.copy), ())
        self._loading[effect.load] = LoadSpan(
            effect.expert, effect.copy, effect.source, effect.pool, effect.size_bytes, self._now_s, evicted
        )

    def load_ended(self, load: int, failure: str | None) -> None:
        span = self._loading.pop(load, None)
        if span is not None:
            self._loads[load] = replace(span, ended_s=self._now_s, failure=failure)
            self._latest[span.pool, span.copy] = load
            if len(self._loads) > LOADS:
                del self._loads[next(iter(self._loads))]

    def evicted(self, effect: Evict) -> None:
        decision, pool = effect.decision, effect.pool
        names = tuple(each.expert for each in decision.candidates[:CANDIDATES])
        newcomer = "" if decision.for_copy == effect.copy else decision.for_copy
        eviction = Eviction(
            self._now_s, effect.expert, pool, effect.stage, decision.claim, expert_of(newcomer),
            effect.freed_bytes, names, len(decision.candidates),
        )  # fmt: skip
        self._evictions.append(eviction)
        self._evicted[effect.expert] += 1
        self._latest.pop((pool, effect.copy), None)
        if newcomer:
            before = self._making_room.get((pool, newcomer), ())
            self._making_room[pool, newcomer] = (*before, eviction)[-CANDIDATES:]

    def batch_began(self, batch: Batch, began_s: float) -> None:
        """Its loads: the latest ones of its copies, in one leg or two, if its first request was queued before."""
        noted, pool = self._under_way.get(batch.requests[0]), self._executors[batch.executor].pool
        since_s = noted[-1][0] if noted is not None and len(noted) > 2 else self._now_s
        places = [(place, copy) for copy in batch.copies for place in (self._caches[pool], pool) if place is not None]
        loads = [load for place in places if (load := self._latest.get(place)) is not None]
        self._running[batch.id] = batch, began_s, tuple(load for load in loads if self._ended_after(load, since_s))

    def _ended_after(self, load: int, since_s: float) -> bool:
        span = self._loads.get(load)
        return span is not None and span.ended_s is not None and span.ended_s > since_s

    def batch_ended(self, batch: int, ended_s: float, *, has_failed: bool) -> None:
        found = self._running.pop(batch, None)
        if found is None:
            return
        ran = _ran(*found, ended_s, has_failed=has_failed)
        self._ran.append(ran)
        if found[0].quantum_s is None:
            for expert, images in zip(ran[1][::2], ran[1][1::2], strict=True):
                self._images[expert] += images
                self._batches[expert] += 1
        for request in found[0].requests:
            noted = self._under_way.get(request)
            if noted is None:
                continue
            # A text has a batch for each quantum: the first and the last one of a step are kept.
            if found[0].quantum_s is not None and len(noted) > 4 and len(noted[-1]) == len(noted[-2]) == RAN:
                noted[-1] = ran
            elif len(noted) < MARKS:
                noted.append(ran)

    def request_ended(self, request: int) -> None:
        """Call after the outcome is delivered: until then ``named`` may be called, and ``course_of`` is cheap."""
        noted, key = self._under_way.pop(request, None), self._keys.pop(request, "")
        if noted is not None:
            self._ended.append((key, self._now_s, tuple(noted)))

    def forget_pools(self, names: Iterable[str]) -> None:
        """Memories are lost, with their loads."""
        gone = set(names)
        for load in [load for load, span in self._loading.items() if span.pool in gone]:
            self.load_ended(load, "its worker or device was lost")
        self._latest = {place: load for place, load in self._latest.items() if place[0] not in gone}

    # -- any thread --

    def named(self, request: int, key: str) -> None:
        """Give a request the key by which it is found, before its outcome is delivered."""
        self._keys[request] = key

    @property
    def executors(self) -> Sequence[ExecutorSpec]:
        return _copied(self._executors.values())

    def wall(self, at_s: float) -> datetime:
        """Wall-clock time of a time of the loop's clock."""
        return datetime.now(UTC).astimezone() - timedelta(seconds=self._clock() - at_s)

    def timeline(self, last_s: float) -> Timeline:
        now_s = self._clock()
        since_s = now_s - last_s
        ran = [_ran(*each, None) for each in _copied(self._running.values())]
        ran += takewhile(lambda each: (each[3] or 0.0) >= since_s, reversed(_copied(self._ran)))
        loads = [span for span in _copied(self._loads.values()) if (span.ended_s or 0.0) >= since_s]
        loads += _copied(self._loading.values())
        batches = sorted((span for each in ran for span in _spans(each)), key=lambda span: span.began_s)
        evictions = [each for each in self.evictions() if each.at_s >= since_s]
        return Timeline(now_s, since_s, batches, sorted(loads, key=lambda span: span.began_s), evictions)

    def evictions(self) -> list[Eviction]:
        """Oldest first."""
        return _copied(self._evictions)

    def evicted_counts(self) -> dict[str, int]:
        """Evictions of each expert since the start."""
        return dict(_copied(self._evicted.items()))

    def decisions(self, since_s: float) -> list[tuple[str, float, float]]:
        """Event, begin and seconds of each, oldest first."""
        return [*takewhile(lambda each: each[1] >= since_s, reversed(_copied(self._decisions)))][::-1]

    def preparations(self, since_s: float) -> list[tuple[Any, ...]]:
        """Preparations that ended since, latest first; see the class."""
        return [*takewhile(lambda each: bool(each[4] >= since_s), reversed(_copied(self._preparations)))]

    def loading(self, expert: str) -> list[LoadSpan]:
        return [span for span in _copied(self._loading.values()) if span.expert == expert]

    def waiting(self, expert: str) -> list[int]:
        """Executors of the requests that are queued for an expert, one for each request."""
        running = {request for batch, *_ in _copied(self._running.values()) for request in batch.requests}
        last = [(request, noted[-1]) for request, noted in _copied(self._under_way.items()) if len(noted) > 2]
        queued = [mark for request, mark in last if len(mark) == QUEUED and request not in running]
        return [executor for _, name, executor, *_ in queued if name == expert]

    def seen(self, expert: str) -> ExpertSeen:
        """Images and batches of an expert, quanta of texts not counted."""
        waits_s: list[float] = []
        for _, _, noted in reversed(_copied(self._ended)):
            if len(waits_s) >= WAITS:
                break
            if any(mark[1] == expert for mark in noted[2:]):  # so that few requests are looked into
                steps = [(queued, runs) for queued, runs in _steps(noted) if queued[1] == expert and runs]
                waits_s += [(runs[-1][3] or 0.0) - queued[0] for queued, runs in steps]
        counts = self._images[expert], self._batches[expert]
        return ExpertSeen(*counts, percentile(waits_s, 0.5), percentile(waits_s, 0.99))

    def course_of(self, request: int) -> dict[str, Any] | None:
        """Course of a request that is under way: values for JSON (docs/results.md), in seconds since its arrival."""
        noted = self._under_way.get(request)
        if noted is None:
            return None
        running = [_ran(*each, None) for each in _copied(self._running.values()) if request in each[0].requests]
        return self._course([*noted, *running], self._clock())

    def find(self, key: str) -> tuple[dict[str, Any], bool] | None:
        """Course of the latest request with this key, and whether it has ended."""
        for request, each in reversed(_copied(self._keys.items())):
            if each == key and (course := self.course_of(request)) is not None:
                return course, False
        found = next((each for each in reversed(_copied(self._ended)) if each[0] == key), None)
        return None if found is None else (self._course(found[2], found[1]), True)

    def _course(self, noted: Noted, until_s: float) -> dict[str, Any]:
        arrived_s = noted[1]
        steps = [self._step(arrived_s, queued, runs) for queued, runs in _steps(noted)]
        return {"steps": steps, "total_s": _rounded(until_s - arrived_s)}

    def _step(self, arrived_s: float, queued: Queued, runs: Sequence[Ran]) -> dict[str, Any]:
        at_s, expert, executor, joined, numbers = queued
        spec, batch = self._executors[executor], None
        if runs:
            began_s, ended_s = runs[0][2], runs[-1][3]
            seconds = None if ended_s is None else _rounded(ended_s - began_s)
            batch = {"images": sum(runs[0][1][1::2]), "began_s": _rounded(began_s - arrived_s), "seconds": seconds}
        pools = (self._caches[spec.pool], spec.pool)
        loads = [load for load in self.loading(expert) if load.pool in pools]
        if runs:
            loads = [load for number in runs[0][6] if (load := self._loads.get(number)) is not None]
        waited = [load for load in loads if load.expert == expert and (load.ended_s is None or load.ended_s > at_s)]
        candidates = zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)
        return {
            "expert": expert,
            "executor": executor,
            "processor": spec.processor,
            "joined": joined,
            "candidates": [
                {"executor": int(number), "queue_s": _rounded(queue_s), "addition_s": _rounded(addition_s)}
                for number, queue_s, addition_s in candidates
            ],
            "queued_s": _rounded(at_s - arrived_s),
            "load": _load(waited) if waited else None,
            "batch": batch,
        }


def percentile(values: Iterable[float], share: float) -> float | None:
    """Smallest value that at least ``share`` of all do not exceed; None without values."""
    ranked = sorted(values)
    return ranked[max(math.ceil(share * len(ranked)) - 1, 0)] if ranked else None


def _load(legs: Sequence[LoadSpan]) -> dict[str, Any]:
    """Load in one or two legs: from the first one's source into the last one's memory."""
    first, last = legs[0], legs[-1]
    evicted = [each for leg in legs for each in leg.evicted]
    return {
        "from": first.source,
        "to": last.pool,
        "seconds": None if last.ended_s is None else _rounded(last.ended_s - first.began_s),
        "evicted": [each.expert for each in evicted],
        "claim": evicted[0].claim if evicted else None,
        "stages": [each.stage for each in evicted],
        "failure": last.failure,
    }


def _ran(
    batch: Batch, began_s: float, loads: tuple[int, ...], ended_s: float | None, *, has_failed: bool = False
) -> Ran:
    portions: tuple[str | int, ...] = (batch.expert, len(batch.requests))
    if batch.portions:
        portions = tuple(chain.from_iterable((each.expert, len(each.requests)) for each in batch.portions))
    return batch.executor, portions, began_s, ended_s, batch.quantum_s is not None, has_failed, loads


def _spans(ran: Ran) -> Iterator[BatchSpan]:
    executor, portions, began_s, ended_s, is_quantum, has_failed, _ = ran
    for place in range(0, len(portions), 2):
        yield BatchSpan(executor, portions[place], portions[place + 1], began_s, ended_s, is_quantum, has_failed)


def _steps(noted: Noted) -> Iterator[tuple[Queued, list[Ran]]]:
    """Each assignment of a request, with its first batch and its last one."""
    marks = noted[2:]
    for place, mark in enumerate(marks):
        if len(mark) == QUEUED:
            yield mark, [each for each in marks[place + 1 : place + 3] if len(each) == RAN]


def _rounded(seconds: float) -> float:
    return round(seconds, 4)


def _copied(ring: Iterable[Entry]) -> list[Entry]:
    """Copy of a ring that the loop's thread may change meanwhile."""
    while True:
        with suppress(RuntimeError):  # changed during the copy
            return list(ring)
