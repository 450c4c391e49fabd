"""The Engine: one state machine that takes events and answers with effects. It decides; the shell does.

An image is one unit of work, and its batch runs to the end. A request that counts in tokens leases memory from its
first batch to the end of its step, and runs in quanta; new requests join between quanta.

Guarantees, for any events in any order:
    every request that arrived ends in exactly one Complete or Fail, once the shell has answered all loads and batches;
    a request of idle precedence delays no other by more than one image's batch and one load, already started;
    an expert with transient failures is retried after bounded pauses; quarantine is for permanent causes;
    no memory's budget is exceeded at any step, and no expert that runs, is pinned, or is being copied is evicted;
    ``handle`` never blocks and never raises: an invalid event is counted and otherwise ignored;
    equal events at equal times give equal effects;
    overlapping policy: no executor is idle while it has a request whose expert is resident, unless an overdue head
    waits for the room of that expert, or the request cannot have its lease yet;
    executors may be lost, with their memories, and join, at any time: loads and batches of lost ones have no answer;
    bounded policy: the head whose oldest request has waited longest, for ``max_overtake_s`` or more, gets the next free
    room and the next place on the link. No request whose expert is resident and that could begin is
    overtaken by one that came ``max_overtake_s`` or more after it, except by the batch of images after a quantum.
Assumes: each StartLoad and StartBatch is answered by exactly one event, in order for the batches of one executor. A
Tick arrives when ``next_wakeup_s`` has passed without another event. Each quantum reduces the work of its requests or
enlarges their leases, never above the maximum given at arrival, unless a request came to its executor meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from agent.core import demand, events, failures, membership, requests, room, running, turns
from agent.core.effects import Fail
from agent.core.performance import PerformanceMatrix, pinned_homes
from agent.core.policy import PRESETS
from agent.core.pool import ModelPool
from agent.core.request import CANCELLED, GAVE_WAY, NO_SPARE_ROOM, Outcome, Precedence
from agent.core.scheduler import Scheduler
from agent.core.state import ServedLine, State, Ticket, check_invariants, statistics
from experts.expert import Rejected, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from agent.core.effects import Effect
    from agent.core.events import Event
    from agent.core.performance import ExecutorSpec, ExpertProfile, Limits, PoolSpec
    from agent.core.policy import Policy
    from agent.core.request import Batch
    from agent.core.state import EngineStatistics
    from experts.expert import Precision
    from experts.graph import ExpertGraph


class Engine:
    """Raises MemoryExceeded at construction if an expert can never fit where it has to run."""

    def __init__(
        self,
        graph: ExpertGraph,
        matrix: PerformanceMatrix,
        executors: Sequence[ExecutorSpec],
        policy: Policy,
        limits: Limits,
    ) -> None:
        scheduler = Scheduler(
            executors,
            matrix,
            policy,
            limits,
            lambda spec, profile: demand.switch_s(self._state, spec, profile),
            lambda expert: failures.barred(self._state, expert),
        )
        used = [queue.spec for queue in scheduler.queues]
        homes = pinned_homes(limits.pinned, used, matrix.experts)
        lacking = membership.lacking(limits.pools, used, matrix, homes)
        if lacking is not None:
            raise lacking
        line = ServedLine(graph, matrix, homes)
        pools = {spec.name: ModelPool(spec) for spec in limits.pools}
        self._state: State = State(policy, limits, line, scheduler, pools)
        demand.pin_copies(self._state)
        membership.guarantee_workspaces(self._state)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Effects of an event. ``now``: seconds, monotonic; an earlier time counts as the latest one seen."""
        state = self._state
        before, state.now, state.effects = state.now, max(state.now, now), []
        state.touched.clear()
        transition = _TRANSITIONS.get(type(event))
        may_move = state.unexpected() if transition is None else transition(state, event)
        is_local = type(event) in _LOCAL
        if state.setbacks and any(before < setback.pause.until_s <= state.now for setback in state.setbacks.values()):
            demand.place_due(state, before)
            may_move, is_local = True, False
        if state.lowered and failures.relieve(state):
            may_move, is_local = True, False
        if not is_local:
            state.touched.update(state.queues_at)
        if state.stranded:
            membership.end_absence(state)
        if may_move:
            if state.leases.is_any:
                turns.look_again(state)
            demand.claim_overdue(state)
            running.start_batches(state)
            demand.claim(state)
        if state.images.is_on:
            state.images.advance(state.effects)
            if state.policy.overlapping and state.running:
                running.queue_batches_ahead(state)
        if state.idle_request is not None and not state.loads:
            requests.end_idle(state, NO_SPARE_ROOM)
        return state.effects

    def next_wakeup_s(self) -> float | None:
        """Time of the next Tick if no other event arrives before; None if time alone changes nothing."""
        return failures.next_wakeup_s(self._state)

    def statistics(self) -> EngineStatistics:
        return statistics(self._state)

    def check_invariants(self) -> None:
        """Recount bytes, uses and requests. Raises AssertionError that names what does not add up."""
        check_invariants(self._state)


# -- transitions: each returns True if a batch or a load may start now --


def _started(state: State, _: events.Started) -> bool:
    demand.wish_for(state, demand.first_wishes(state))
    return True


def _arrived(state: State, event: events.Arrived) -> bool:
    request, is_idle = event.request, event.precedence is Precedence.IDLE
    if request in state.tickets:
        return state.unexpected()
    if is_idle and state.tickets:
        state.effects.append(Fail(request, Outcome(Verdict.UNKNOWN, None, None, (), GAVE_WAY)))
        return False
    state.tickets[request] = Ticket(event.component, state.line.graph, work=event.work, left=event.work)
    if is_idle:
        state.idle_request = request
    else:
        state.counts["arrived"] += 1
        requests.end_idle(state, GAVE_WAY)
    if state.is_draining:
        return requests.fail(state, request, "the agent is stopping")
    expert, graph = event.expert, state.line.graph
    if event.component is not None:
        expert = graph.first_expert(event.component)
        if expert is None:
            return requests.fail(state, request, f"no route for component {event.component!r}")
    if expert is None or expert not in graph.experts:
        return requests.fail(state, request, f"no expert {expert!r} on this line")
    state.tickets[request].left = event.work.at(expert)
    return requests.enqueue(state, request, expert)


def _load_ended(state: State, event: events.Loaded | events.LoadFailed) -> bool:
    load = state.loads.pop(event.load, None)
    if load is None:
        return state.unexpected()
    demand.load_over(state, load)
    if isinstance(event, events.LoadFailed):
        failures.load_failed(state, load, event)
        return True
    state.pools[load.pool].loaded(load.copy)
    state.setbacks.pop((load.pool, load.copy), None)
    for queue in () if load.is_idle else state.users[load.pool]:
        waits = queue.spec.id not in state.running or queue.is_overtaken  # for this load, not for its executor
        if queue.front is not None and queue.front.profile.copy == load.copy and waits:
            state.counts["switches"] += 1
            break
    failures.expert_loaded(state, load.expert, load.copy)
    room.discard_if_gone(state, load.expert)
    return True


def _batch_ran(state: State, event: events.Finished | events.Progressed) -> bool:
    batch = state.batch_under_way(event.batch)
    if batch is None:
        return state.unexpected()
    reason = _mismatch(event, batch)
    if reason is not None:
        return _batch_failed(state, events.BatchFailed(event.batch, reason))
    if isinstance(event, events.Finished):
        finished, unfinished = dict(zip(batch.requests, event.results, strict=True)), {}
    else:
        finished, unfinished = dict(event.finished), dict(event.unfinished)
    parts = running.end(state, batch)
    if batch.quantum_s is not None:
        for request in finished:
            state.leases.end(request)
    for portion, profile in parts:
        expert = portion.expert
        ended = {request: result for request, result in finished.items() if request in portion.requests}
        left = {request: work for request, work in unfinished.items() if request in portion.requests}
        state.splitter.ran(expert, batch.executor, len(batch.requests), profile.performance.max_batch)
        state.setbacks.pop((state.queue_of[batch.executor].spec.pool, portion.copy), None)
        if left or any(not isinstance(result, Rejected) for result in ended.values()):
            failures.expert_ran(state, expert)
        if left:
            requests.go_on(state, expert, batch.executor, profile, left)
        for request, result in ended.items():
            requests.step_done(state, request, expert, result)
        room.discard_if_gone(state, expert)
    return True


def _mismatch(event: events.Finished | events.Progressed, batch: Batch) -> str | None:
    """Reason why an answer does not fit its batch; None for a valid answer."""
    if isinstance(event, events.Finished):
        images, results = len(batch.requests), len(event.results)
        return f"{results} results for {images} images" if results != images else None
    answered = [request for request, _ in (*event.finished, *event.unfinished)]
    if sorted(answered) != sorted(batch.requests):
        return f"it ended with requests {sorted(answered)}, and began with {sorted(batch.requests)}"
    if event.unfinished and batch.quantum_s is None:
        return f"{len(event.unfinished)} of {len(answered)} images are not done, and images have no quantum"
    return None


def _batch_failed(state: State, event: events.BatchFailed) -> bool:
    batch = state.batch_under_way(event.batch)
    if batch is None:
        return state.unexpected()
    failures.batch_failed(state, batch, event)
    return True


def _cancelled(state: State, event: events.Cancelled) -> bool:
    ticket = state.tickets.get(event.request)
    if ticket is None:
        return state.unexpected()
    if event.request in state.stranded:
        return requests.fail(state, event.request, CANCELLED)
    if ticket.group is None:
        ticket.is_cancelled = True  # the answer of its batch ends it
        return False
    expert = ticket.group.expert
    requests.leave_queue(state, event.request)
    requests.fail(state, event.request, CANCELLED)
    room.discard_if_gone(state, expert)
    return True


def _preempted(state: State, event: events.Preempted) -> bool:
    ticket = state.tickets.get(event.request)
    if ticket is None or ticket.group is None or not ticket.group.is_ongoing:
        return state.unexpected()
    expert, home = ticket.group.expert, ticket.queue
    assert home is not None  # its group is in one
    requests.leave_queue(state, event.request)
    ticket.left = ticket.left.restarted() if event.work is None else event.work
    requests.restart_request(state, event.request, expert, home.spec.id)
    room.discard_if_gone(state, expert)
    return True


def _expert_named(state: State, event: events.Quarantined | events.Wanted | events.Unwanted) -> bool:
    expert, homes = event.expert, state.line.homes
    if expert not in state.line.graph.experts:
        return state.unexpected()
    if isinstance(event, events.Quarantined):
        failures.put_in_quarantine(state, expert, event.reason)
    elif isinstance(event, events.Wanted):
        spec = next((spec for spec, _ in state.rows_of(expert)), None)
        if spec is not None and not state.is_draining:
            demand.place(state, expert, homes.get(expert, spec))
    elif not (state.is_awaited(expert) or expert in homes):
        room.discard(state, expert)
    return True


def _line_changed(state: State, event: events.LineChanged) -> bool:
    state.limits = replace(state.limits, pinned=event.pinned, placement=event.placement)
    state.scheduler.matrix, state.scheduler.limits = event.matrix, state.limits
    state.later_forms.clear()
    for pool in state.pools.values():
        if pool.reserved_bytes:
            failures.reserve(state, events.Reserved(pool.name, 0))
    membership.change_line(state, ServedLine(event.graph, event.matrix, {}, event.retired))
    membership.guarantee_workspaces(state)
    failures.forget_all_but(state, event.graph.experts)
    for expert in sorted(event.retired):
        room.discard_if_gone(state, expert)
    return True


def _drained(state: State, _: events.Drain) -> bool:
    state.is_draining = True
    demand.keep_wishes(state, lambda _: False)
    requests.end_idle(state, GAVE_WAY)
    return False


# Events whose effects start batches and loads only at the workers that they touch.
_LOCAL: dict[type, Callable[..., bool]] = {
    events.Arrived: _arrived,
    events.Loaded: _load_ended,
    events.LoadFailed: _load_ended,
    events.Finished: _batch_ran,
    events.Progressed: _batch_ran,
    events.BatchFailed: _batch_failed,
    events.Cancelled: _cancelled,
    events.Preempted: _preempted,
}
_TRANSITIONS: dict[type, Callable[..., bool]] = {
    **_LOCAL,
    **dict.fromkeys((events.Quarantined, events.Wanted, events.Unwanted), _expert_named),
    events.Started: _started,
    events.LineChanged: _line_changed,
    events.Reserved: failures.reserve,
    events.ExecutorsLost: membership.executors_lost,
    events.ExecutorsJoined: membership.executors_joined,
    events.Tick: lambda *_: True,
    events.Drain: _drained,
}


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """Arguments of an Engine. ``precisions``: by processor and expert. ``broken``: experts not served, and why."""

    graph: ExpertGraph
    policy: str
    executors: tuple[ExecutorSpec, ...]
    matrix: PerformanceMatrix
    limits: Limits
    precisions: Mapping[str, Mapping[str, Precision]] = field(default_factory=dict)
    broken: Mapping[str, str] = field(default_factory=dict)

    @property
    def pools(self) -> tuple[PoolSpec, ...]:
        return self.limits.pools

    @property
    def workers(self) -> tuple[str, ...]:
        """Names of the workers beside the agent."""
        return tuple(dict.fromkeys(pool.worker for pool in self.limits.pools if pool.worker))

    def at(self, worker: str) -> EngineSetup:
        """The executors and memories of one worker; "" is the agent's own process."""
        pools = tuple(pool for pool in self.pools if pool.worker == worker)
        names = {pool.name for pool in pools}
        executors = tuple(spec for spec in self.executors if spec.pool in names)
        return replace(self, executors=executors, limits=replace(self.limits, pools=pools))

    def with_columns(
        self, worker: str, columns: Mapping[str, Mapping[str, ExpertProfile]], failed: Mapping[str, str]
    ) -> EngineSetup:
        """The setup with a worker's processors. An expert is broken if no processor can run it."""
        experts = {**self.matrix.experts, **{f"{worker}/{name}": column for name, column in columns.items()}}
        able = {expert for column in experts.values() for expert in column}
        broken = {name: reason for name, reason in {**self.broken, **failed}.items() if name not in able}
        return replace(self, matrix=PerformanceMatrix(experts, self.matrix.usage), broken=broken)

    def engine(self) -> Engine:
        """A new Engine. Raises MemoryExceeded for memories that are too small."""
        return Engine(self.graph, self.matrix, self.executors, PRESETS[self.policy], self.limits)
