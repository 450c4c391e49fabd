"""Flight record: bounded rings of what the loop saw and did, from which waits, evictions and traces are explained.

Guarantees: each note is O(1), on the loop's thread, and takes no lock; a reader copies a ring and never makes the loop
wait. The rings hold a fixed number of entries: the last minute of a line with 130 images, 130 batches and 540 decisions
a second, and longer of a slower one. Entries are of all workers; preparation is of this process alone.

Times are those of the loop's clock. Experts have the Engine's names.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, TypeVar

from agent.core import events

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from agent.core.effects import Assigned, AssignmentCandidate, Evict, StartLoad
    from agent.core.events import Event
    from agent.core.performance import ExecutorSpec, PoolSpec
    from agent.core.request import Batch
    from agent.runtime.images.preparation import ImagePrepared

REQUESTS = BATCHES = 8_192  # arbitrary, as are those below: about 30 MB in all when every ring is full
DECISIONS = 32_768
LOADS, EVICTIONS = 4_096, 2_048
CANDIDATES = 12  # of an eviction, in ranked order
MARKS = 64  # of one request: assignments, and batches
WAITS = 1_000  # latest images whose waits are summed up

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


@dataclass(frozen=True, slots=True)
class BatchSpan:
    """Batch of images, or quantum of texts. ``ended_s``: None while it runs."""

    executor: int
    expert: str
    requests: int
    began_s: float
    ended_s: float | None
    is_quantum: bool
    has_failed: bool


@dataclass(frozen=True, slots=True)
class DecisionSpan:
    event: str
    began_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """Spans that were under way since ``since_s``, each kind in order of begin, and evictions. ``at_s``: now."""

    at_s: float
    since_s: float
    batches: tuple[BatchSpan, ...]
    loads: tuple[LoadSpan, ...]
    evictions: tuple[Eviction, ...]
    decisions: tuple[DecisionSpan, ...]
    prepared: tuple[ImagePrepared, ...]


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
    """One expert in the record. ``p50_s``, ``p99_s``: of its images, from queued to answered; None without any."""

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


@dataclass(slots=True, eq=False)
class _Run:
    """Batch from its begin. ``loads``: latest ones of its copies, into its executor's memory and the one in front."""

    batch: Batch
    began_s: float
    loads: tuple[_Load, ...]
    ended_s: float | None = None
    has_failed: bool = False

    def spans(self) -> Iterator[BatchSpan]:
        batch = self.batch
        for portion in batch.all_portions:
            yield BatchSpan(
                batch.executor, portion.expert, len(portion.requests), self.began_s, self.ended_s,
                batch.quantum_s is not None, self.has_failed,
            )  # fmt: skip


@dataclass(slots=True, eq=False)
class _Trip:
    """Request: its assignments and batches, in order."""

    request: int
    arrived_s: float
    asked: str
    marks: list[tuple[float, Assigned] | _Run] = field(default_factory=list)
    ended_s: float | None = None
    key: str = ""


class FlightRecord:
    """Written on the loop's thread; ``prepared``: preparations, written by their threads. Readers: any thread."""

    def __init__(
        self,
        executors: Iterable[ExecutorSpec],
        pools: Iterable[PoolSpec],
        prepared: deque[ImagePrepared],
        clock: Callable[[], float],
    ) -> None:
        self._clock = clock
        self._executors: dict[int, ExecutorSpec] = {}
        self._caches: dict[str, str | None] = {}
        self.know(executors, pools)
        self._prepared = prepared
        self._now_s = 0.0
        self._decisions: deque[tuple[float, float, type]] = deque(maxlen=DECISIONS)
        self._under_way: dict[int, _Trip] = {}
        self._keys: dict[int, str] = {}  # of requests under way
        self._ended: deque[_Trip] = deque(maxlen=REQUESTS)
        self._running: dict[int, _Run] = {}
        self._runs: deque[_Run] = deque(maxlen=BATCHES)
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
        self._decisions.append((began_s, ended_s - began_s, type(event)))
        if isinstance(event, events.Arrived):
            asked = event.component or event.expert or ""
            self._under_way[event.request] = _Trip(event.request, began_s, asked)
        elif isinstance(event, events.Loaded | events.LoadFailed):
            self.load_ended(event.load, None if isinstance(event, events.Loaded) else event.reason)

    def assigned(self, effect: Assigned) -> None:
        self._mark(effect.request, (self._now_s, effect))

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
        pool = self._executors[batch.executor].pool
        places = [(place, copy) for copy in batch.copies for place in (self._caches[pool], pool) if place is not None]
        run = _Run(batch, began_s, tuple(load for each in places if (load := self._latest.get(each)) is not None))
        self._running[batch.id] = run
        self._runs.append(run)
        for request in batch.requests:
            self._mark(request, run)

    def batch_ended(self, batch: int, ended_s: float, *, has_failed: bool) -> None:
        run = self._running.pop(batch, None)
        if run is not None:
            run.ended_s, run.has_failed = ended_s, has_failed

    def request_ended(self, request: int) -> None:
        """Call after the outcome is delivered: until then ``named`` may be called, and ``course_of`` is cheap."""
        trip, key = self._under_way.pop(request, None), self._keys.pop(request, "")
        if trip is not None:
            trip.ended_s, trip.key = self._clock(), key
            self._ended.append(trip)

    def forget_pools(self, names: Iterable[str]) -> None:
        """Memories are lost, with their loads."""
        gone = set(names)
        for load in [each for each in self._loading.values() if each.effect.pool in gone]:
            self.load_ended(load.effect.load, "its worker or device was lost")
        self._latest = {place: load for place, load in self._latest.items() if place[0] not in gone}

    def _mark(self, request: int, mark: tuple[float, Assigned] | _Run) -> None:
        trip = self._under_way.get(request)
        if trip is None:
            return
        marks = trip.marks
        # A text has a batch for each quantum: the first and the last one of a step are kept.
        if isinstance(mark, _Run) and len(marks) > 1 and isinstance(marks[-1], _Run) and isinstance(marks[-2], _Run):
            marks[-1] = mark
        elif len(marks) < MARKS:
            marks.append(mark)

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
        runs = [run for run in _copied(self._runs) if run.ended_s is None or run.ended_s >= since_s]
        loads = [load for load in _copied(self._loads) if load.ended_s is None or load.ended_s >= since_s]
        decisions = [
            DecisionSpan(kind.__name__, began_s, seconds)
            for began_s, seconds, kind in _copied(self._decisions)
            if began_s + seconds >= since_s
        ]
        prepared = [each for each in _copied(self._prepared) if each.ended_s >= since_s]
        return Timeline(
            now_s,
            since_s,
            tuple(span for run in runs for span in run.spans()),
            tuple(load.span() for load in loads),
            self.evictions(last_s),
            tuple(decisions),
            tuple(sorted(prepared, key=lambda each: each.began_s)),
        )

    def evictions(self, last_s: float = math.inf) -> tuple[Eviction, ...]:
        """Oldest first."""
        since_s = self._clock() - last_s
        return tuple(each for each in _copied(self._evictions) if each.at_s >= since_s)

    def wall(self, at_s: float) -> datetime:
        """Wall-clock time of a time of the loop's clock."""
        return datetime.now(UTC).astimezone() - timedelta(seconds=self._clock() - at_s)

    def waiting(self, expert: str) -> list[int]:
        """Executors of the requests that are queued for an expert, one for each request."""
        last = [marks[-1] for trip in _copied(self._under_way.values()) if (marks := trip.marks)]
        return [mark[1].executor for mark in last if isinstance(mark, tuple) and mark[1].expert == expert]

    def loading(self, expert: str) -> tuple[LoadSpan, ...]:
        """Loads of an expert that are under way."""
        return tuple(each.span() for each in _copied(self._loading.values()) if each.effect.expert == expert)

    def course_of(self, request: int) -> RequestCourse | None:
        """Course of a request that is under way."""
        trip = self._under_way.get(request)
        return None if trip is None else self._course(trip)

    def find(self, key: str) -> RequestCourse | None:
        """Course of the latest request with this key."""
        for request, each in reversed(_copied(self._keys.items())):
            if each == key and (course := self.course_of(request)) is not None:
                return course
        trips = (trip for trip in reversed(_copied(self._ended)) if trip.key == key)
        return next((self._course(trip) for trip in trips), None)

    def seen(self, expert: str) -> ExpertSeen:
        """Images and batches of an expert, quanta of texts not counted."""
        spans = [span for run in _copied(self._runs) if run.batch.quantum_s is None for span in run.spans()]
        batches = [span.requests for span in spans if span.expert == expert]
        waits_s: list[float] = []
        for trip in _copied(self._ended):
            for mark, following in zip(trip.marks, trip.marks[1:], strict=False):
                if isinstance(mark, tuple) and mark[1].expert == expert and isinstance(following, _Run):
                    waits_s.append((following.ended_s or following.began_s) - mark[0])
        return ExpertSeen(sum(batches), len(batches), percentile(waits_s, 0.5), percentile(waits_s, 0.99))

    def busy_shares(self, last_s: float) -> Mapping[int, float]:
        """Share of the last seconds that each executor was running batches."""
        now_s = self._clock()
        busy_s: defaultdict[int, float] = defaultdict(float)
        for run in _copied(self._runs):
            ended_s = now_s if run.ended_s is None else run.ended_s
            busy_s[run.batch.executor] += max(ended_s - max(run.began_s, now_s - last_s), 0.0)
        return {executor: min(busy_s[executor] / last_s, 1.0) for executor in _copied(self._executors)}

    def wait_p99_s(self) -> float | None:
        """Of the ``WAITS`` latest ended requests: seconds from arrival to the first batch."""
        first = [(trip, _first_run(trip)) for trip in _copied(self._ended)[-WAITS:]]
        return percentile([run.began_s - trip.arrived_s for trip, run in first if run is not None], 0.99)

    def _course(self, trip: _Trip) -> RequestCourse:
        ended_s, marks = trip.ended_s, tuple(trip.marks)
        steps = []
        for place, mark in enumerate(marks):
            if isinstance(mark, tuple):
                following = [each for each in marks[place + 1 : place + 3] if isinstance(each, _Run)]
                steps.append(self._step(trip, *mark, following))
        total_s = (self._clock() if ended_s is None else ended_s) - trip.arrived_s
        return RequestCourse(trip.request, trip.asked, trip.arrived_s, tuple(steps), total_s, ended_s is not None)

    def _step(self, trip: _Trip, at_s: float, assigned: Assigned, runs: Sequence[_Run]) -> CourseStep:
        spec, batch = self._executors[assigned.executor], None
        if runs:
            first, last = runs[0], runs[-1]
            seconds = None if last.ended_s is None else last.ended_s - first.began_s
            batch = CourseBatch(len(first.batch.requests), first.began_s - trip.arrived_s, seconds)
            loads = [each for each in first.loads if each.effect.expert == assigned.expert]
        else:
            pools = (self._caches[spec.pool], spec.pool)
            under_way = _copied(self._loading.values())
            loads = [each for each in under_way if each.effect.expert == assigned.expert and each.effect.pool in pools]
        waited = [each for each in loads if each.ended_s is None or each.ended_s > at_s]
        return CourseStep(
            assigned.expert, spec.id, spec.processor, assigned.joined, assigned.candidates, at_s - trip.arrived_s,
            _one_load([each.span() for each in waited]), batch,
        )  # fmt: skip


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


def _first_run(trip: _Trip) -> _Run | None:
    return next((mark for mark in trip.marks if isinstance(mark, _Run)), None)


def _copied(ring: Iterable[Entry]) -> list[Entry]:
    """Copy of a ring that the loop's thread may change meanwhile."""
    while True:
        with suppress(RuntimeError):  # changed during the copy
            return list(ring)
