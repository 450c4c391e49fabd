"""State of one Engine, read and written by the core's modules of functions.

Decisions append to ``State.effects``, which the Engine returns to the shell at the end of the event.
``check_invariants`` recounts everything from scratch.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from agent.core.effects import Standing
from agent.core.performance import SSD
from agent.core.pool import Leases
from agent.core.prepared import PreparedImages
from agent.core.request import IMAGE
from agent.core.scheduler import BatchSplitter

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from agent.core.effects import Effect
    from agent.core.performance import ExecutorSpec, ExpertProfile, Limits, PerformanceMatrix
    from agent.core.policy import Policy
    from agent.core.pool import ModelPool, PoolStatistics
    from agent.core.prepared import LaterForms, PreparedStatistics
    from agent.core.queue import ExecutorQueue, Group
    from agent.core.request import Batch, Portion, StepResult, Work
    from agent.core.scheduler import Scheduler
    from agent.faults.backoff import Backoff
    from experts.graph import ExpertGraph

SPECULATIONS = 32  # arbitrary: enough for every executor's last few batches


@dataclass(frozen=True, slots=True)
class ServedLine:
    """``homes``: executor of each pinned expert. ``retired``: experts of earlier lines, which requests may need."""

    graph: ExpertGraph
    matrix: PerformanceMatrix
    homes: Mapping[str, ExecutorSpec]
    retired: frozenset[str] = frozenset()


@dataclass(slots=True)
class Ticket:
    """Position of a request: in ``group`` of ``queue``, or in a batch. ``queued_s``: time its step was queued.

    ``graph``: routes at its arrival, which it follows to the end.
    """

    component: str | None
    graph: ExpertGraph
    step: int = 0
    steps: list[StepResult] = field(default_factory=list)
    queue: ExecutorQueue | None = None
    group: Group | None = None
    queued_s: float = 0.0
    attempts: int = 0  # of its step, on this executor
    moves: int = 0  # of its step, to other executors
    losses: int = 0  # executors that were lost while they ran it
    worker: str = ""  # the worker that has its image
    is_cancelled: bool = False
    trial_of: str | None = None  # expert on probation
    work: Work = IMAGE
    left: Work = IMAGE  # of its work, in the present step


@dataclass(frozen=True, slots=True)
class Pause:
    """Current pause of a backoff."""

    pause_s: float
    until_s: float

    @classmethod
    def after(cls, before: Pause | None, backoff: Backoff, now: float) -> Pause:
        pause_s = backoff.next_pause_s(before.pause_s if before else 0.0)
        return cls(pause_s, now + pause_s)


@dataclass(frozen=True, slots=True)
class Setback:
    """Consecutive failed loads of one copy into one memory. ``since_s``: time of the first."""

    attempts: int
    pause: Pause
    since_s: float


@dataclass(frozen=True, slots=True)
class ExpertStanding:
    """Standing of an expert that does not serve, and earliest time of a trial.

    ``copy``: the copy whose loads failed, which is reloaded without a request; None after failed batches.
    """

    standing: Standing
    reason: str
    retry_s: float = math.inf
    copy: str | None = None
    trial: int | None = None  # the trial request


@dataclass(frozen=True, slots=True)
class Load:
    copy: str
    expert: str
    source: str
    pool: str
    is_idle: bool = False  # for a request of idle precedence


class Wish(NamedTuple):
    """Copy that is wanted in an executor's memory. ``since_s``: time its group's oldest request was queued.

    A tuple for speed: dozens per decision.
    """

    spec: ExecutorSpec
    expert: str
    profile: ExpertProfile
    since_s: float
    starts_s: float


@dataclass(slots=True, eq=False)
class State:
    policy: Policy
    limits: Limits
    line: ServedLine
    scheduler: Scheduler
    pools: dict[str, ModelPool]
    now: float = 0.0
    is_draining: bool = False
    effects: list[Effect] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    # requests
    overtake_s: float = field(init=False)  # bound on overtaking; infinity for a policy without one
    tickets: dict[int, Ticket] = field(default_factory=dict)
    idle_request: int | None = None  # of idle precedence: queued, or in a batch
    stranded: dict[int, str] = field(default_factory=dict)  # request -> expert, which only lost executors can run
    away: dict[int, ExecutorSpec] = field(default_factory=dict)  # lost executors that may return
    leases: Leases = field(init=False)
    images: PreparedImages = field(init=False)
    # by routes, component and step
    later_forms: dict[tuple[ExpertGraph, str, int], LaterForms] = field(default_factory=dict)

    # batches
    queues: tuple[ExecutorQueue, ...] = field(init=False)
    queue_of: dict[int, ExecutorQueue] = field(init=False)  # executor -> queue
    queues_at: dict[str, tuple[ExecutorQueue, ...]] = field(init=False)  # worker -> queues
    touched: set[str] = field(default_factory=set)  # workers where this event may start a batch or a load
    splitter: BatchSplitter = field(default_factory=BatchSplitter)
    batches: dict[int, Batch] = field(default_factory=dict)
    parts: dict[int, list[tuple[Portion, ExpertProfile]]] = field(default_factory=dict)  # by batch
    running: dict[int, int] = field(default_factory=dict)  # executor -> batch
    queued_ahead: dict[int, int] = field(default_factory=dict)  # executor -> the batch behind the running one
    last_batch: int = 0

    # memory: copies that are resident, loading, or wanted
    users: dict[str, tuple[ExecutorQueue, ...]] = field(init=False)  # memory -> queues that run from it
    fed: dict[str, tuple[ModelPool, ...]] = field(init=False)  # memory -> memories that it caches for
    pinned: frozenset[tuple[str, str]] = frozenset()  # (memory, copy)
    presence: Counter[str] = field(default_factory=Counter)  # expert -> copies loading or resident, over all memories
    loads: dict[int, Load] = field(default_factory=dict)
    last_load: int = 0
    in_flight: Counter[str] = field(default_factory=Counter)  # link -> loads
    kept_free: Counter[str] = field(default_factory=Counter)  # link -> places kept for overdue claims
    reserved: dict[str, frozenset[str]] = field(default_factory=dict)  # memory -> copies reserved for an overdue claim
    all_queued: set[str] = field(default_factory=set)  # memories where a STAGE claim found nothing in this round
    full: set[str] = field(default_factory=set)  # memories where an overdue claim waits for room
    short: set[str] = field(default_factory=set)  # memories where a claim that is not overdue found no room
    # by worker; wanted as soon as there is room
    placements: defaultdict[str, deque[Wish]] = field(default_factory=lambda: defaultdict(deque))
    speculations: deque[Wish] = field(default_factory=lambda: deque(maxlen=SPECULATIONS))

    # failures
    setbacks: dict[tuple[str, str], Setback] = field(default_factory=dict)  # (memory, copy)
    lowered: dict[str, Pause] = field(default_factory=dict)  # memories whose budget was lowered
    standings: dict[str, ExpertStanding] = field(default_factory=dict)  # by expert; the others serve
    failed_batches: dict[str, int] = field(default_factory=dict)  # expert -> batches of one that failed in a row
    batch_pauses: dict[str, Pause] = field(default_factory=dict)  # expert -> latest pause for failed batches

    def __post_init__(self) -> None:
        self.overtake_s = self.limits.max_overtake_s if self.policy.bounded else math.inf
        self.leases = Leases(self.pools, self.overtake_s)
        self.images = PreparedImages(self.limits.prepared_bytes)
        self.connect()

    def connect(self) -> None:
        """Connect queues and memories, after any of them came or went."""
        self.queues = self.scheduler.queues
        self.queue_of = {queue.spec.id: queue for queue in self.queues}
        self.users = {name: tuple(q for q in self.queues if q.spec.pool == name) for name in self.pools}
        self.fed = {name: tuple(p for p in self.pools.values() if p.spec.cache == name) for name in self.pools}
        self.queues_at = {pool.spec.worker: () for pool in self.pools.values()}
        for queue in self.queues:
            self.queues_at[queue.spec.worker] += (queue,)
        self.images.connect(self.queues_at)

    @property
    def executors(self) -> list[ExecutorSpec]:
        return [queue.spec for queue in self.queues]

    @property
    def touched_queues(self) -> tuple[ExecutorQueue, ...]:
        if self.touched.issuperset(self.queues_at):
            return self.queues
        return tuple(queue for worker, queues in self.queues_at.items() if worker in self.touched for queue in queues)

    def pool_of(self, executor: int) -> ModelPool:
        return self.pools[self.queue_of[executor].spec.pool]

    def running_batch(self, executor: int) -> Batch | None:
        number = self.running.get(executor)
        return None if number is None else self.batches[number]

    def batch_under_way(self, number: int) -> Batch | None:
        """Batch of this number if it runs; None for a batch that is queued ahead."""
        batch = self.batches.get(number)
        return batch if batch is not None and self.running[batch.executor] == number else None

    @property
    def queued_idle(self) -> int | None:
        """Request of idle precedence, while it is queued."""
        request = self.idle_request
        return request if request is not None and self.tickets[request].group is not None else None

    def rows_of(self, expert: str) -> Iterator[tuple[ExecutorSpec, ExpertProfile]]:
        """Executors that can run an expert, each with the expert's row."""
        for queue in self.queues:
            row = self.line.matrix.experts[queue.spec.processor].get(expert)
            if row is not None:
                yield queue.spec, row

    def may_use(self, pool: ModelPool, copy: str) -> bool:
        """True if the copy is resident, and not reserved for an overdue claim."""
        return pool.is_resident(copy) and copy not in self.reserved.get(pool.name, ())

    def unexpected(self) -> bool:
        """Count an event that fits nothing. Returns False: no batch or load may start because of it."""
        self.counts["unexpected_events"] += 1
        return False

    def standing_of(self, expert: str) -> Standing:
        row = self.standings.get(expert)
        return Standing.SERVING if row is None else row.standing

    def is_awaited(self, expert: str) -> bool:
        return any(queue.first_group(expert) is not None for queue in self.queues)

    def is_planned(self, spec: ExecutorSpec, expert: str) -> bool:
        """True if the plan gives the expert to this executor's memory, or has no place for it."""
        pools = self.limits.placement.get(expert)
        return pools is None or spec.pool in pools


@dataclass(frozen=True, slots=True)
class QueueStatistics:
    executor: int
    processor: str
    requests: int
    length_s: float
    running: int
    expert: str | None = None  # of the running batch


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """A frozen snapshot: queues, memories, counters since the start; experts that do not serve, with the reason.

    Requests of idle precedence and their batches are not counted.
    """

    arrived: int
    completed: int
    failed: int
    in_flight: int
    switches: int
    batches: int
    loads: dict[str, int]
    bytes_read: int
    evictions: int
    unexpected_events: int
    is_draining: bool
    quarantined: dict[str, str]
    on_probation: dict[str, str]
    queues: tuple[QueueStatistics, ...]
    pools: tuple[PoolStatistics, ...]
    prepared: PreparedStatistics
    serves_earlier_lines: bool = False  # a request accepted under earlier routes is in flight


def statistics(state: State) -> EngineStatistics:
    counts, pools = state.counts, state.pools.values()
    paths = (f"{source}_{pool.name}" for pool in pools for source in (SSD, pool.spec.cache) if source is not None)
    queues = []
    for queue in state.queues:
        spec, batch = queue.spec, state.running_batch(queue.spec.id)
        requests, length_s = queue.request_count + queue.ahead_requests, queue.length_s(state.now)
        running, expert = (len(batch.requests), batch.expert) if batch else (0, None)
        queues.append(QueueStatistics(spec.id, spec.processor, requests, length_s, running, expert))
    return EngineStatistics(
        arrived=counts["arrived"],
        completed=counts["completed"],
        failed=counts["failed"],
        in_flight=len(state.tickets) - (state.idle_request is not None),
        switches=counts["switches"],
        batches=state.last_batch - counts["idle_batches"],
        loads={path: counts[path] for path in sorted(paths)},
        bytes_read=counts["bytes_read"],
        evictions=sum(count for name, count in counts.items() if name.startswith("evictions_")),
        unexpected_events=counts["unexpected_events"],
        is_draining=state.is_draining,
        quarantined=_reasons(state, Standing.QUARANTINE),
        on_probation=_reasons(state, Standing.PROBATION),
        queues=tuple(queues),
        pools=tuple(pool.statistics() for pool in pools),
        prepared=state.images.statistics(),
        serves_earlier_lines=any(ticket.graph is not state.line.graph for ticket in state.tickets.values()),
    )


def _reasons(state: State, standing: Standing) -> dict[str, str]:
    return {expert: row.reason for expert, row in state.standings.items() if row.standing is standing}


# -- invariants between the parts of a State; each part also checks itself --


def check_invariants(state: State) -> None:
    """Recount bytes, uses, requests and leases. Raises AssertionError with the mismatch."""
    _check_requests(state)
    for pool in state.pools.values():
        pool.check_invariants()
    _check_batches(state)
    _check_leases(state)
    ahead = [request for number in state.queued_ahead.values() for request in state.batches[number].requests]
    state.images.check_invariants(state.tickets, ahead)
    idle = [each.id for each in state.batches.values() if state.idle_request in each.requests]
    assert len(idle) + sum(load.is_idle for load in state.loads.values()) <= 2, "idle work is more than one request's"


def _check_requests(state: State) -> None:
    """Each request is in one queue, in one batch, or stranded."""
    queued = [request for queue in state.queues for group in queue.groups() for request in group.requests]
    running = [request for batch in state.batches.values() for request in batch.requests]
    everywhere = Counter([*queued, *running, *state.stranded])
    assert set(everywhere) == set(state.tickets), "a request is lost, or stands where none should"
    assert all(count == 1 for count in everywhere.values()), "a request stands in two places"
    for queue in state.queues:
        count = sum(len(group.requests) for group in queue.groups())
        assert count == queue.request_count, f"executor {queue.spec.id}: requests miscounted"
    assert state.idle_request is None or state.idle_request in state.tickets, "an idle request is lost"


def _check_batches(state: State) -> None:
    """Each batch runs, or is queued ahead, and a copy is in use by exactly the batches and loads that use it."""
    for batch in state.batches.values():
        for copy in batch.copies:
            resident = state.pool_of(batch.executor).is_resident(copy)
            assert resident, f"batch {batch.id} runs on {copy}, which is not resident"
        here = (state.running.get(batch.executor), state.queued_ahead.get(batch.executor))
        assert batch.id in here, "a batch is lost"
    assert state.queued_ahead.keys() <= state.running.keys(), "a batch is queued ahead behind nothing"
    for name, pool in state.pools.items():
        here_too = [batch for batch in state.batches.values() if state.pool_of(batch.executor) is pool]
        uses = Counter(copy for batch in here_too for copy in batch.copies)
        uses += Counter(load.copy for load in state.loads.values() if load.source == name)
        for entry in pool.entries():
            assert entry.uses == uses[entry.copy], f"{name}: {entry.copy} counts {entry.uses} uses of {uses}"


def _check_leases(state: State) -> None:
    """A begun request holds its lease where it runs; a request that has not begun waits for one."""
    state.leases.check_invariants()
    begun: dict[int, str] = {}
    waiting: set[int] = set()
    for queue in state.queues:
        groups = list(queue.groups())
        ongoing = [group for group in groups if group.is_ongoing]
        to_begin = [group for group in groups if not group.is_ongoing and group.profile.performance.runs_in_quanta]
        assert sorted(map(id, ongoing)) == sorted(map(id, queue.ongoing.values())), "ongoing groups miscounted"
        assert set(to_begin) == set(queue.begins), "groups that have not begun are miscounted"
        begun.update((request, queue.spec.pool) for group in ongoing for request in group.requests)
        waiting.update(request for group in to_begin for request in group.requests)
    for batch in state.batches.values():
        if batch.quantum_s is not None:
            begun.update(dict.fromkeys(batch.requests, state.pool_of(batch.executor).name))
    assert begun == state.leases.begun, f"leases are taken by {state.leases.begun}, begun are {begun}"
    assert waiting == state.leases.waiting, "requests that wait for a lease are not those that have not begun"
