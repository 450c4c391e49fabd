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
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import chain, takewhile
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from agent.core import events
from agent.core.effects import AssignmentCandidate
from agent.runtime.images.preparation import ImagePrepared

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


# -- what readers get --


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
    source: str
    pool: str
    size_bytes: int
    began_s: float
    ended_s: float | None
    evicted: tuple[Eviction, ...]
    failure: str | None = None


class BatchSpan(NamedTuple):
    """Batch of images, or quantum of texts. ``ended_s``: None while it runs. A tuple for speed, as those below."""

    executor: int
    expert: str
    requests: int
    began_s: float
    ended_s: float | None
    is_quantum: bool
    has_failed: bool


class DecisionSpan(NamedTuple):
    event: str
    began_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """Spans that were under way since ``since_s``, in order of begin, and evictions. ``at_s``: now."""

    at_s: float
    since_s: float
    batches: tuple[BatchSpan, ...]
    loads: tuple[LoadSpan, ...]
    evictions: tuple[Eviction, ...]


@dataclass(frozen=True, slots=True)
class CourseBatch:
    """``began_s``: since the request's arrival. ``seconds``: None while it runs."""

    requests: int
    began_s: float
    seconds: float | None


@dataclass(frozen=True, slots=True)
class CourseStep:
    """``queued_s``: since the request's arrival. ``load``: ended after that, perhaps in two legs. ``batch``: the first
    one to the last one; None while the request is queued."""

    expert: str
    executor: int
    processor: str
    joined: bool
    candidates: tuple[AssignmentCandidate, ...]
    queued_s: float
    load: LoadSpan | None
    batch: CourseBatch | None


@dataclass(frozen=True, slots=True)
class RequestCourse:
    """``asked``: component or expert. ``total_s``: since its arrival at the agent; so far, unless it ``is_over``."""

    request: int
    asked: str
    arrived_s: float
    steps: tuple[CourseStep, ...]
    total_s: float
    is_over: bool


@dataclass(frozen=True, slots=True)
class ExpertSeen:
    """One expert in the record. ``p50_s``, ``p99_s``: of its latest images, from queued to answered; None without."""

    images: int
    batches: int
    p50_s: float | None
    p99_s: float | None


# -- what the loop's thread writes --


@dataclass(slots=True, eq=False)
class _Load:
    effect: StartLoad
    began_s: float
    evicted: tuple[Eviction, ...]
    ended_s: float | None = None
    failure: str | None = None

    def span(self) -> LoadSpan:
        effect = self.effect
        return LoadSpan(
            effect.expert, effect.source, effect.pool, effect.size_bytes, self.began_s, self.ended_s, self.evicted,
            self.failure,
        )  # fmt: skip


class _Ran(NamedTuple):
    """Fields of a batch's plain tuple. ``portions``: experts and numbers of their requests, in turn. ``loads``: those
    that the first request waited for."""

    executor: int
    portions: tuple[str | int, ...]
    began_s: float
    ended_s: float | None
    is_quantum: bool
    has_failed: bool
    loads: tuple[_Load, ...]


class _Queued(NamedTuple):
    """Fields of an assignment's plain tuple. ``candidates``: executor, queue and addition of each, in turn."""

    at_s: float
    expert: str
    executor: int
    joined: bool
    candidates: tuple[float, ...]


RAN, QUEUED = len(_Ran._fields), len(_Queued._fields)


@dataclass(slots=True, eq=False)
class _Run:
    """Batch under way."""

    batch: Batch
    began_s: float
    loads: tuple[_Load, ...]

    def plain(self, ended_s: float | None, *, has_failed: bool = False) -> tuple[Any, ...]:
        batch = self.batch
        portions: tuple[str | int, ...] = (batch.expert, len(batch.requests))
        if batch.portions:
            portions = tuple(chain.from_iterable((each.expert, len(each.requests)) for each in batch.portions))
        is_quantum = batch.quantum_s is not None
        return batch.executor, portions, self.began_s, ended_s, is_quantum, has_failed, self.loads


class _Trip(NamedTuple):
    """Fields of a request's plain tuple. ``noted``: what was asked, and when, then plain tuples of ``_Queued`` and
    ``_Ran`` in order, told apart by their lengths. ``ended_s``: None while it is under way."""

    request: int
    key: str
    ended_s: float | None
    noted: Sequence[Any]

    @property
    def steps(self) -> Iterator[tuple[_Queued, Sequence[_Ran]]]:
        """Each assignment, with its first batch and its last one."""
        marks = self.noted[2:]
        for place, mark in enumerate(marks):
            if len(mark) == QUEUED:
                following = marks[place + 1 : place + 3]
                yield _Queued(*mark), [_Ran(*each) for each in following if len(each) == RAN]


class FlightRecord:
    """Written on the loop's thread; ``prepared``: preparations, written by their threads. Readers: any thread."""

    def __init__(
        self,
        executors: Iterable[ExecutorSpec],
        pools: Iterable[PoolSpec],
        prepared: deque[tuple[Any, ...]],
        clock: Callable[[], float],
    ) -> None:
        self._clock = clock
        self._executors: dict[int, ExecutorSpec] = {}
        self._caches: dict[str, str | None] = {}
        self.know(executors, pools)
        self._prepared = prepared
        self._now_s = 0.0
        self._decisions: deque[tuple[str, float, float]] = deque(maxlen=DECISIONS)
        self._under_way: dict[int, list[Any]] = {}  # ``noted``, by request
        self._keys: dict[int, str] = {}  # of requests under way
        self._ended: deque[tuple[Any, ...]] = deque(maxlen=REQUESTS)
        self._running: dict[int, _Run] = {}
        self._ran: deque[tuple[Any, ...]] = deque(maxlen=BATCHES)
        self._loading: dict[int, _Load] = {}
        self._latest: dict[tuple[str, str], _Load] = {}  # by memory and copy, until the copy leaves
        self._loads: deque[_Load] = deque(maxlen=LOADS)
        self._evictions: deque[Eviction] = deque(maxlen=EVICTIONS)
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
        candidates = tuple(chain.from_iterable(effect.candidates))
        noted = self._under_way.get(effect.request)
        if noted is not None and len(noted) < MARKS:
            noted.append((self._now_s, effect.expert, effect.executor, effect.joined, candidates))

    def load_began(self, effect: StartLoad) -> None:
        place = effect.pool, effect.copy
        load = _Load(effect, self._now_s, self._making_room.pop(place, ()))
        self._loading[effect.load] = self._latest[place] = load
        self._loads.append(load)

    def load_ended(self, load: int, failure: str | None) -> None:
        found = self._loading.pop(load, None)
        if found is not None:
            found.ended_s, found.failure = self._now_s, failure

    def evicted(self, effect: Evict) -> None:
        decision, pool = effect.decision, effect.pool
        names = tuple(each.expert for each in decision.candidates[:CANDIDATES])
        newcomer = "" if decision.for_copy == effect.copy else decision.for_copy
        eviction = Eviction(
            self._now_s, effect.expert, pool, effect.stage, decision.claim, newcomer.rpartition("@")[0],
            effect.freed_bytes, names, len(decision.candidates),
        )  # fmt: skip
        self._evictions.append(eviction)
        self._latest.pop((pool, effect.copy), None)
        if newcomer:
            before = self._making_room.get((pool, newcomer), ())
            self._making_room[pool, newcomer] = (*before, eviction)[-CANDIDATES:]

    def batch_began(self, batch: Batch, began_s: float) -> None:
        self._running[batch.id] = _Run(batch, began_s, self._loads_of(batch))

    def _loads_of(self, batch: Batch) -> tuple[_Load, ...]:
        """Latest loads of a batch's copies, if they ended after its first request was queued: in one leg or two."""
        noted, pool = self._under_way.get(batch.requests[0]), self._executors[batch.executor].pool
        since_s = noted[-1][0] if noted is not None and len(noted) > 2 else self._now_s
        places = [(place, copy) for copy in batch.copies for place in (self._caches[pool], pool) if place is not None]
        loads = [self._latest.get(place) for place in places]
        return tuple(load for load in loads if load is not None and (load.ended_s is None or load.ended_s > since_s))

    def batch_ended(self, batch: int, ended_s: float, *, has_failed: bool) -> None:
        run = self._running.pop(batch, None)
        if run is None:
            return
        ran = run.plain(ended_s, has_failed=has_failed)
        self._ran.append(ran)
        is_quantum = run.batch.quantum_s is not None
        for request in run.batch.requests:
            noted = self._under_way.get(request)
            if noted is None:
                continue
            # A text has a batch for each quantum: the first and the last one of a step are kept.
            if is_quantum and len(noted) > 4 and len(noted[-1]) == len(noted[-2]) == len(ran):
                noted[-1] = ran
            elif len(noted) < MARKS:
                noted.append(ran)

    def request_ended(self, request: int) -> None:
        """Call after the outcome is delivered: until then ``named`` may be called, and ``course_of`` is cheap."""
        noted, key = self._under_way.pop(request, None), self._keys.pop(request, "")
        if noted is not None:
            self._ended.append((request, key, self._now_s, tuple(noted)))

    def forget_pools(self, names: Iterable[str]) -> None:
        """Memories are lost, with their loads."""
        gone = set(names)
        for load in [each for each in self._loading.values() if each.effect.pool in gone]:
            self.load_ended(load.effect.load, "its worker or device was lost")
        self._latest = {place: load for place, load in self._latest.items() if place[0] not in gone}

    # -- any thread --

    @property
    def executors(self) -> Sequence[ExecutorSpec]:
        return _copied(self._executors.values())

    def named(self, request: int, key: str) -> None:
        """Give a request the key by which it is found, before its outcome is delivered."""
        self._keys[request] = key

    def timeline(self, last_s: float) -> Timeline:
        now_s = self._clock()
        since_s = now_s - last_s
        loads = [load for load in _copied(self._loads) if load.ended_s is None or load.ended_s >= since_s]
        spans = sorted(
            (span for each in self._batches(since_s) for span in _spans(each)), key=lambda each: each.began_s
        )
        return Timeline(now_s, since_s, tuple(spans), tuple(load.span() for load in loads), self.evictions(last_s))

    def decisions(self, since_s: float) -> list[DecisionSpan]:
        """Oldest first."""
        decisions = map(DecisionSpan._make, reversed(_copied(self._decisions)))
        return [*takewhile(lambda each: each.began_s >= since_s, decisions)][::-1]

    def prepared(self, since_s: float) -> list[ImagePrepared]:
        """Images of which the preparation ended since, in order of begin."""
        latest = takewhile(lambda each: each[4] >= since_s, reversed(_copied(self._prepared)))
        return sorted((ImagePrepared(*each) for each in latest), key=lambda each: each.began_s)

    def evictions(self, last_s: float = math.inf) -> tuple[Eviction, ...]:
        """Oldest first."""
        since_s = self._clock() - last_s
        return tuple(each for each in _copied(self._evictions) if each.at_s >= since_s)

    def wall(self, at_s: float) -> datetime:
        """Wall-clock time of a time of the loop's clock."""
        return datetime.now(UTC).astimezone() - timedelta(seconds=self._clock() - at_s)

    def waiting(self, expert: str) -> list[int]:
        """Executors of the requests that are queued for an expert, one for each request."""
        running = {request for run in _copied(self._running.values()) for request in run.batch.requests}
        last = [(request, noted[-1]) for request, noted in _copied(self._under_way.items()) if len(noted) > 2]
        queued = [_Queued(*mark) for request, mark in last if len(mark) == QUEUED and request not in running]
        return [each.executor for each in queued if each.expert == expert]

    def loading(self, expert: str) -> tuple[LoadSpan, ...]:
        """Loads of an expert that are under way."""
        return tuple(each.span() for each in _copied(self._loading.values()) if each.effect.expert == expert)

    def course_of(self, request: int) -> RequestCourse | None:
        """Course of a request that is under way."""
        noted = self._under_way.get(request)
        if noted is None:
            return None
        runs = [run for run in _copied(self._running.values()) if request in run.batch.requests]
        return self._course(_Trip(request, "", None, [*noted, *(run.plain(None) for run in runs)]))

    def find(self, key: str) -> RequestCourse | None:
        """Course of the latest request with this key."""
        for request, each in reversed(_copied(self._keys.items())):
            if each == key and (course := self.course_of(request)) is not None:
                return course
        ended = (_Trip(*each) for each in reversed(_copied(self._ended)) if each[1] == key)
        return next((self._course(each) for each in ended), None)

    def seen(self, expert: str) -> ExpertSeen:
        """Images and batches of an expert, quanta of texts not counted."""
        ran = [each for each in _copied(self._ran) if expert in each[1]]  # portions: most batches are skipped
        spans = [span for each in ran for span in _spans(each) if span.expert == expert and not span.is_quantum]
        waits_s: list[float] = []
        for trip in reversed(_copied(self._ended)):
            if len(waits_s) >= WAITS:
                break
            if any(mark[1] == expert for mark in trip[3][2:]):  # so that few trips are looked into
                steps = [step for step in _Trip(*trip).steps if step[0].expert == expert and step[1]]
                waits_s += [(runs[-1].ended_s or runs[-1].began_s) - queued.at_s for queued, runs in steps]
        images = sum(span.requests for span in spans)
        return ExpertSeen(images, len(spans), percentile(waits_s, 0.5), percentile(waits_s, 0.99))

    def _batches(self, since_s: float) -> Iterator[tuple[Any, ...]]:
        """Plain tuples of batches that run, then of those that have ended since, latest first."""
        yield from (run.plain(None) for run in _copied(self._running.values()))
        yield from takewhile(lambda each: each[3] >= since_s, reversed(_copied(self._ran)))

    def _course(self, trip: _Trip) -> RequestCourse:
        asked, arrived_s = trip.noted[:2]
        steps = tuple(self._step(arrived_s, queued, runs) for queued, runs in trip.steps)
        total_s = (self._clock() if trip.ended_s is None else trip.ended_s) - arrived_s
        return RequestCourse(trip.request, asked, arrived_s, steps, total_s, is_over=trip.ended_s is not None)

    def _step(self, arrived_s: float, queued: _Queued, runs: Sequence[_Ran]) -> CourseStep:
        spec, batch = self._executors[queued.executor], None
        if runs:
            first, last = runs[0], runs[-1]
            seconds = None if last.ended_s is None else last.ended_s - first.began_s
            batch = CourseBatch(sum(map(int, first.portions[1::2])), first.began_s - arrived_s, seconds)
        pools = (self._caches[spec.pool], spec.pool)
        loads = (
            runs[0].loads if runs else [each for each in _copied(self._loading.values()) if each.effect.pool in pools]
        )
        mine = [each.span() for each in loads if each.effect.expert == queued.expert]
        waited = [each for each in mine if each.ended_s is None or each.ended_s > queued.at_s]
        numbers = queued.candidates
        candidates = [
            AssignmentCandidate(int(executor), queue_s, addition_s)
            for executor, queue_s, addition_s in zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)
        ]
        return CourseStep(
            queued.expert, spec.id, spec.processor, queued.joined, tuple(candidates), queued.at_s - arrived_s,
            _one_load(waited), batch,
        )  # fmt: skip


def _spans(ran: tuple[Any, ...]) -> Iterator[BatchSpan]:
    executor, portions, *times = ran[:-1]  # fields of _Ran
    for place in range(0, len(portions), 2):
        yield BatchSpan(executor, portions[place], portions[place + 1], *times)


def percentile(values: Iterable[float], share: float) -> float | None:
    """Smallest value that at least ``share`` of all do not exceed; None without values."""
    ranked = sorted(values)
    return ranked[max(math.ceil(share * len(ranked)) - 1, 0)] if ranked else None


def _one_load(legs: Sequence[LoadSpan]) -> LoadSpan | None:
    """Load in one or two legs, as one: from the first one's source into the last one's memory."""
    if not legs:
        return None
    first, last = legs[0], legs[-1]
    evicted = tuple(each for leg in legs for each in leg.evicted)
    return LoadSpan(
        last.expert, first.source, last.pool, last.size_bytes, first.began_s, last.ended_s, evicted, last.failure
    )


def _copied(ring: Iterable[Entry]) -> list[Entry]:
    """Copy of a ring that the loop's thread may change meanwhile."""
    while True:
        with suppress(RuntimeError):  # changed during the copy
            return list(ring)
