"""The Engine: one state machine that takes events and answers with effects. It decides; the shell does.

It knows two kinds of work. An image is one unit, and its batch runs to the end. A request that counts in tokens leases
memory from its first batch to the end of its step, and runs in quanta: whoever is not done when one is over goes on in
a later one, together with those that came meanwhile (Orca's iteration-level scheduling, section 3, seen from outside).

An executor that runs a batch of images may be given the next one behind it (see ``holding``): StartBatch comes while
one runs, and the shell begins what is held as soon as it has answered. What is held is in use, and is not taken back.

Guarantees, whatever comes and in whatever order:
    every request that arrived ends in exactly one Complete or Fail, once the shell has answered what it was asked;
    background work, which the shadows of experts have, begins only while nothing else is in flight, and takes nothing
    from anybody (see ``background``); it ends in one Complete or Fail, too, once it ran or was dropped;
    an expert whose failures may pass is on probation and tried again, the pauses bounded; only what cannot pass is for
    good, and a batch that failed for want of memory, or that nobody waits for any more, says nothing of its expert;
    no memory's budget is exceeded at any step, and no expert that runs, is pinned, or is being copied is evicted;
    a lease is held exactly by who has begun and is not done, and whoever has begun can go on to the end: one whose
    lease turns out too small, with no room for a larger one, gives it back and waits for that;
    ``handle`` never blocks and never raises: an event that fits nothing is counted and otherwise ignored;
    the same events at the same times give the same effects;
    with an overlapping policy no executor is idle while it has a request whose expert is resident, unless an overdue
    head waits for the very room of that expert, or the request can have no lease yet;
    images and quanta take turns (see ``turns``): with an overlapping policy an image waits for at most one quantum per
    batch of images before it and its own, and what has begun is passed by no two of these in a row while its expert is
    here;
    with a bounded policy, a head of a queue whose oldest remaining request has waited for ``max_overtake_s`` gets the
    next room that comes free and the next place on the link, the oldest of several first, and no request whose expert
    is resident and that could begin is overtaken by one that came ``max_overtake_s`` or more after it, but in the batch
    of images that follows a quantum; while its expert is on its way, others may run meanwhile; no lease is taken of
    what those need who have waited for so long.
Assumes: each StartLoad and StartBatch is answered by exactly one event, the batches of one executor in their order;
when ``next_wakeup_s`` has passed without another event, a Tick comes; each quantum leaves its requests less work than
they had, or tells of a larger lease, and none of more than the most that was told when they arrived.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from agent.core import events
from agent.core.ahead import PreparedAhead
from agent.core.background import DROPPED, BackgroundWork
from agent.core.batches import Batches
from agent.core.batching import Batching
from agent.core.effects import Complete, Fail, FellBack, Preempt, Standing, StandingChanged
from agent.core.holding import Holding
from agent.core.invariants import check_background, check_leases, check_requests, check_uses
from agent.core.later import LaterSteps
from agent.core.leases import Leases
from agent.core.performance import SSD
from agent.core.placement import Placement, footprints_in, pinned_homes
from agent.core.pool import ModelPool, misfits
from agent.core.pressure import MemoryPressure
from agent.core.request import CANCELLED, IMAGE, Outcome, Rejected, StepResult
from agent.core.scheduler import Scheduler
from agent.core.served_line import ServedLine
from agent.core.shadows import Shadows
from agent.core.splitter import BatchSplitter
from agent.core.standing import Standings
from agent.core.statistics import EngineStatistics, QueueStatistics
from agent.core.supply import Supply
from agent.core.ticket import Ticket
from agent.core.turns import Turns
from experts.errors import MemoryExceeded
from experts.expert import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from agent.core.effects import Effect
    from agent.core.events import Event
    from agent.core.performance import ExecutorSpec, ExpertProfile, Limits, Performance, PerformanceMatrix
    from agent.core.placement import Load
    from agent.core.policy import Policy
    from agent.core.queue import ExecutorQueue, Group
    from agent.core.request import Batch, Part, Work
    from agent.core.standing import Probation
    from experts.expert import Prediction
    from experts.graph import ExpertGraph

    Ended = tuple[tuple[int, Prediction | Rejected], ...]  # by request
    Left = tuple[tuple[int, Work], ...]


class Engine:
    """See the module. Raises MemoryExceeded at construction if an expert can never fit where it has to run."""

    def __init__(
        self,
        graph: ExpertGraph,
        matrix: PerformanceMatrix,
        executors: Sequence[ExecutorSpec],
        policy: Policy,
        limits: Limits,
    ) -> None:
        self._limits = limits
        self._scheduler = Scheduler(executors, matrix, policy, limits.max_overtake_s, self._switch_s, self._barred)
        queues = self._scheduler.queues
        self._queues = {queue.spec.id: queue for queue in queues}
        self._pools = {spec.name: ModelPool(spec) for spec in limits.pools}
        homes = pinned_homes(limits.pinned, [queue.spec for queue in queues], matrix.experts)
        self._line = ServedLine(graph, matrix, homes)
        self._refuse_misfits()
        self._placement = Placement(self._pools, queues, graph, matrix, policy, limits, homes)
        self._pressure = MemoryPressure(queues, self._placement, limits, matrix, homes)
        self._splitter = BatchSplitter()
        overtake_s = limits.max_overtake_s if policy.bounded else math.inf
        self._leases = Leases(self._pools, overtake_s)
        self._turns = Turns(
            self._pools, self._placement, self._leases, self._splitter, policy.overlapping, overtake_s, self._runs_alone
        )
        self._standings = Standings(limits)
        self._ahead = ahead = PreparedAhead(queues, limits)
        self._later = LaterSteps(ahead)
        self._holding = Holding(self._placement, self._splitter, ahead, policy.overlapping and ahead.is_on)
        self._tickets: dict[int, Ticket] = {}
        self._batches = Batches(self._queues, self._pools, ahead)
        self._supply = Supply(
            self._queues, self._placement, self._turns, self._standings, self._batches, policy, limits
        )
        self._batching = Batching(
            queues, self._pools, self._tickets, self._batches, self._turns, self._holding, ahead, self._supply, limits
        )
        self._background = BackgroundWork(limits)
        self._shadows = Shadows(self._background, self._queues, self._placement, self._standings, self._batches)
        self._counts: Counter[str] = Counter()
        self._now = 0.0
        self._is_draining = False
        self._answers = self._answers_by_event()

    def handle(self, event: Event, now: float) -> list[Effect]:
        """What to do about an event. ``now``: seconds, monotonic; an earlier time counts as the latest one seen."""
        before, self._now = self._now, max(self._now, now)
        effects: list[Effect] = []
        answer = self._answers.get(type(event))
        may_move = self._unexpected() if answer is None else answer(event, effects)
        if self._placement.is_retry_due(before, self._now):
            self._try_again(before)
            may_move = True
        if self._pressure.is_lasting and self._pressure.relieve(self._now, effects):
            may_move = True
        if may_move:
            self._advance(effects)
        if self._ahead.is_on:
            self._ahead.advance(effects)
        if self._holding.is_on and self._batches.is_any:
            self._batching.hold(self._background.batch, self._line, self._now, effects)
        if self._background.is_waiting and not self._is_anybody_there:
            self._shadows.begin(self._line, self._now, effects)
        return effects

    def next_wakeup_s(self) -> float | None:
        """When a Tick is due if nothing else happens before; None when time alone changes nothing."""
        moments = (
            self._placement.next_retry_s(self._now),
            self._pressure.next_relief_s(),
            self._background.next_moment_s(self._now),
        )
        return min((moment for moment in moments if moment is not None), default=None)

    def statistics(self) -> EngineStatistics:
        counts = self._placement.counts
        return EngineStatistics(
            arrived=self._counts["arrived"],
            completed=self._counts["completed"],
            failed=self._counts["failed"],
            in_flight=len(self._tickets),
            switches=self._counts["switches"],
            batches=self._batches.count - self._shadows.batch_count,
            loads={path: counts[path] for path in self._load_paths()},
            bytes_read=counts["bytes_read"],
            evictions=sum(count for name, count in counts.items() if name.startswith("evictions_")),
            unexpected_events=self._counts["unexpected_events"],
            is_draining=self._is_draining,
            quarantined=dict(self._standings.quarantined),
            on_probation=self._standings.on_probation,
            queues=tuple(self._queue_statistics(queue) for queue in self._scheduler.queues),
            pools=tuple(pool.statistics() for pool in self._pools.values()),
            background=self._background.statistics(),
            prepared=self._ahead.statistics(),
            serves_earlier_lines=any(ticket.graph is not self._line.graph for ticket in self._tickets.values()),
        )

    def check_invariants(self) -> None:
        """Recount bytes, uses and requests. Raises AssertionError saying what does not add up."""
        check_requests(self._scheduler.queues, self._tickets, self._batches, self._background)
        check_uses(self._pools, self._queues, self._batches, self._placement)
        check_leases(self._scheduler.queues, self._batches, self._leases)
        check_background(self._tickets, self._queues, self._batches, self._placement, self._background)
        self._ahead.check_invariants(self._tickets)

    # -- events: each says whether something may be able to move now --

    def _started(self, _: events.Started, effects: list[Effect]) -> bool:
        self._supply.place_all(self._line, self._now)
        return True

    def _arrived(self, event: events.Arrived, effects: list[Effect]) -> bool:
        if event.request in self._tickets or event.request in self._background:
            return self._unexpected()
        self._counts["arrived"] += 1
        ticket = Ticket(event.component, self._line.graph, work=event.work, left=event.work)
        self._tickets[event.request] = ticket
        if self._is_draining:
            return self._fail(event.request, "the agent is stopping", effects)
        expert = event.expert
        if event.component is not None:
            expert = self._line.graph.first_expert(event.component)
            if expert is None:
                return self._fail(event.request, f"no route for component {event.component!r}", effects)
        if expert is None or expert not in self._line.graph.experts:
            return self._fail(event.request, f"no expert {expert!r} on this line", effects)
        ticket.left = event.work.at(expert)
        return self._enqueue(event.request, ticket, expert, effects)

    def _loaded(self, event: events.Loaded, effects: list[Effect]) -> bool:
        load = self._placement.loads.pop(event.load, None)
        if load is None:
            return self._unexpected()
        self._placement.loaded(load)
        if load.is_background:
            self._background.went_well(load.pool)
        if any(self._waits_for(queue, load) for queue in self._scheduler.queues if queue.spec.pool == load.pool):
            self._counts["switches"] += 1
        if self._standings.loaded(load.expert, load.copy):
            self._released(load.expert, "a load went well", effects)
        self._discard_if_gone(load.expert, effects)
        return not load.is_background or self._is_anybody_there

    def _load_failed(self, event: events.LoadFailed, effects: list[Effect]) -> bool:
        load = self._placement.loads.pop(event.load, None)
        if load is None:
            return self._unexpected()
        setback = self._placement.load_failed(load, self._now, is_away=event.is_away)
        if event.permanent:
            self._put_in_quarantine(load.expert, event.reason, effects)
            return True
        if event.out_of_memory and load.is_background:
            self._background.ran_short(load.pool, self._now)
        elif event.out_of_memory:
            pool = self._pools[load.pool]
            self._pressure.ran_short(pool, pool.used_bytes, event.reason, self._now, effects)
        if self._fall_back(load.expert, load.pool, load.copy, event.reason, effects):
            self._supply.place_pinned(load.expert, self._line, self._now)
            self._discard_if_gone(load.expert, effects)
            return True
        probation = self._standings.load_failed(load.expert, load.copy, event.reason, setback.attempts, setback.retry_s)
        if probation is not None:
            self._put_on_probation(load.expert, probation, effects)
        else:
            self._supply.place_pinned(load.expert, self._line, self._now)
        self._discard_if_gone(load.expert, effects)
        return True

    def _finished(self, event: events.Finished, effects: list[Effect]) -> bool:
        batch = self._batches.under_way(event.batch)
        if batch is None:
            return self._unexpected()
        if len(event.results) != len(batch.requests):
            reason = f"{len(event.results)} results for {len(batch.requests)} images"
            return self._batch_failed(events.BatchFailed(event.batch, reason), effects)
        return self._batch_ran(batch, tuple(zip(batch.requests, event.results, strict=True)), (), effects)

    def _progressed(self, event: events.Progressed, effects: list[Effect]) -> bool:
        batch = self._batches.under_way(event.batch)
        if batch is None:
            return self._unexpected()
        reason = _mistold(event, batch)
        if reason is not None:
            return self._batch_failed(events.BatchFailed(event.batch, reason), effects)
        return self._batch_ran(batch, event.finished, event.unfinished, effects)

    def _batch_ran(self, batch: Batch, finished: Ended, unfinished: Left, effects: list[Effect]) -> bool:
        if batch.id == self._background.batch:
            return self._background_ran(batch, finished[0][1], effects)
        profiles = self._batches.end(batch, self._now)
        if batch.quantum_s is not None:
            for request, _ in finished:
                self._leases.end(request)
        if not batch.parts:
            self._part_ran(batch, batch.all_parts[0], profiles[0], finished, unfinished, effects)
            return True
        for part, profile in zip(batch.parts, profiles, strict=True):
            mine = frozenset(part.requests)
            ended = tuple(each for each in finished if each[0] in mine)
            self._part_ran(batch, part, profile, ended, tuple(each for each in unfinished if each[0] in mine), effects)
        return True

    def _part_ran(
        self, batch: Batch, part: Part, profile: ExpertProfile, ended: Ended, unfinished: Left, effects: list[Effect]
    ) -> None:
        expert = part.expert
        self._splitter.ran(expert, batch.executor, len(batch.requests), profile.performance.max_batch)
        self._placement.ran(self._queues[batch.executor].spec.pool, part.copy)
        was_asked = bool(unfinished) or any(not isinstance(result, Rejected) for _, result in ended)
        if was_asked and self._standings.batch_ran(expert):
            self._released(expert, "a batch went well", effects)
        if unfinished:
            self._go_on(expert, batch.executor, profile, unfinished, effects)
        for request, result in ended:
            self._one_step_done(request, expert, result, effects)
        self._discard_if_gone(expert, effects)

    def _go_on(
        self, expert: str, executor: int, profile: ExpertProfile, unfinished: Left, effects: list[Effect]
    ) -> None:
        """Queue unfinished requests for their next quantum; end or preempt those that cannot have one."""
        queue, reason = self._queues[executor], self._standings.reason(expert)
        tokens_s: dict[int, float] = {}
        for request, left in unfinished:
            ticket = self._tickets[request]
            ending = CANCELLED if ticket.is_cancelled else reason
            if ending is None:
                ticket.left = left
                tokens_s[request] = profile.performance.tokens_s(left)
            else:
                self._leases.end(request)
                self._fail(request, ending, effects)
        without_room = self._without_room(tokens_s, profile.performance)
        for request in without_room:
            del tokens_s[request]
        if tokens_s:
            group = queue.go_on(expert, profile, tokens_s, self._now)
            for request in tokens_s:
                self._tickets[request].queue, self._tickets[request].group = queue, group
        for request in without_room:
            self._preempt(request, expert, executor, effects)

    def _without_room(self, requests: Iterable[int], performance: Performance) -> list[int]:
        """Grow the leases of these requests; those for which there was no room."""
        tickets = sorted((self._tickets[request].queued_s, request) for request in requests)
        return [
            request
            for since_s, request in tickets
            if not self._leases.grow(request, performance.lease_for(self._tickets[request].left), since_s)
        ]

    def _preempt(self, request: int, expert: str, executor: int, effects: list[Effect]) -> None:
        """A begun request loses what it holds, and begins anew on the executor that has its text."""
        ticket = self._tickets[request]
        self._lose(request, executor, effects)
        ticket.attempts = 0
        self._enqueue(request, ticket, expert, effects, home=executor)

    def _lose(self, request: int, executor: int, effects: list[Effect]) -> None:
        self._leases.end(request)
        ticket = self._tickets[request]
        ticket.left = ticket.left.anew()
        effects.append(Preempt(request, executor))

    def _batch_failed(self, event: events.BatchFailed, effects: list[Effect]) -> bool:
        batch = self._batches.under_way(event.batch)
        if batch is None:
            return self._unexpected()
        if batch.id == self._background.batch:
            return self._background_failed(batch, event, effects)
        parts = list(zip(batch.all_parts, self._batches.end(batch, self._now), strict=True))
        if batch.quantum_s is not None:
            for request in batch.requests:
                self._lose(request, batch.executor, effects)
        if event.out_of_memory:
            for part, _ in parts:
                self._splitter.ran_out_of_memory(part.expert, batch.executor, len(batch.requests))
        probation = self._probation_for(batch, event)
        for part, profile in sorted(parts, key=self._age_of, reverse=True):  # each goes in front of the others
            retried = [request for request in part.requests if self._may_retry(request, part, batch, event, effects)]
            self._give_back(part.expert, batch, profile, retried, effects)
        if event.out_of_memory and len(batch.requests) == 1:  # no batch is smaller: the weights there have to be fewer
            pool = self._pools[self._queues[batch.executor].spec.pool]
            to_bytes = pool.used_bytes - batch.workspace_bytes
            self._pressure.ran_short(pool, to_bytes, event.reason, self._now, effects)
            if pool.used_bytes > to_bytes and not pool.spec.is_one_piece:
                self._lower_leases(pool, pool.used_bytes - to_bytes, event.reason, effects)
        if probation is not None:
            self._put_on_probation(batch.expert, probation, effects)
        for part, _ in parts:
            if self._standings.fails_in_batches(part.expert):
                self._placement.discard(part.expert, effects)  # a trial reads its bytes anew
            self._discard_if_gone(part.expert, effects)
        return True

    def _age_of(self, part: tuple[Part, ExpertProfile]) -> tuple[float, int]:
        return min((self._tickets[request].queued_s, request) for request in part[0].requests)

    def _lower_leases(self, pool: ModelPool, by_bytes: int, reason: str, effects: list[Effect]) -> None:
        to_bytes = max(pool.lease_bytes - by_bytes, self._most_leased(pool))
        if to_bytes >= pool.lease_bytes:
            return
        waiting = [
            (self._tickets[request].queued_s, request, group.expert, queue.spec.id)
            for queue in self._scheduler.queues
            if queue.spec.pool == pool.name
            for group in queue.ongoing.values()
            for request in group.requests
        ]
        for _, request, expert, executor in sorted(waiting, reverse=True):
            if pool.lease_used_bytes <= to_bytes:
                break
            self._leave_queue(request, self._tickets[request], effects)
            self._tickets[request].attempts = 0
            self._enqueue(request, self._tickets[request], expert, effects, home=executor)
            self._discard_if_gone(expert, effects)
        self._pressure.lower_leases(pool, to_bytes, reason, self._now, effects)

    def _most_leased(self, pool: ModelPool) -> int:
        rows = [
            row
            for queue in self._scheduler.queues
            if queue.spec.pool == pool.name
            for row in self._line.matrix.experts[queue.spec.processor].values()
        ]
        token_bytes = max((row.performance.lease_bytes for row in rows), default=0)
        most = (max(ticket.left.most, ticket.work.most_of_any) for ticket in self._tickets.values())
        return token_bytes * max(most, default=0)

    def _probation_for(self, batch: Batch, event: events.BatchFailed) -> Probation | None:
        request = batch.requests[0]
        if event.out_of_memory or len(batch.requests) > 1 or self._tickets[request].is_cancelled:
            return None
        is_trial = self._standings.is_trial(request)
        return self._standings.lone_batch_failed(batch.expert, event.reason, self._now, is_trial=is_trial)

    def _cancelled(self, event: events.Cancelled, effects: list[Effect]) -> bool:
        ticket = self._tickets.get(event.request)
        if self._background.expert_of(event.request) is not None:
            self._shadows.drop(event.request, CANCELLED, effects)
            return False
        if event.request == self._background.request:
            return False  # it is one image: its answer comes soon
        if ticket is None:
            return self._unexpected()
        if ticket.group is None:
            ticket.is_cancelled = True  # it runs: its batch's answer ends it
            return False
        expert = ticket.group.expert
        self._leave_queue(event.request, ticket)
        self._fail(event.request, CANCELLED, effects)
        self._discard_if_gone(expert, effects)
        return True

    def _preempted(self, event: events.Preempted, effects: list[Effect]) -> bool:
        ticket = self._tickets.get(event.request)
        if ticket is None or ticket.group is None or not ticket.group.is_ongoing:
            return self._unexpected()
        expert, home = ticket.group.expert, ticket.queue
        assert home is not None, "its group is in one"
        self._leave_queue(event.request, ticket)
        ticket.attempts = 0
        ticket.left = ticket.left.anew() if event.work is None else event.work
        self._enqueue(event.request, ticket, expert, effects, home=home.spec.id)
        self._discard_if_gone(expert, effects)
        return True

    def _quarantined(self, event: events.Quarantined, effects: list[Effect]) -> bool:
        if event.expert not in self._line.graph.experts:
            return self._unexpected()
        self._put_in_quarantine(event.expert, event.reason, effects)
        return True

    def _wanted(self, event: events.Wanted, effects: list[Effect]) -> bool:
        if event.expert not in self._line.graph.experts:
            return self._unexpected()
        specs = [queue.spec for queue in self._scheduler.queues]
        spec = next((each for each in specs if event.expert in self._line.matrix.experts[each.processor]), None)
        if spec is not None and not self._is_draining:
            self._supply.place(event.expert, self._line.homes.get(event.expert, spec), self._line, self._now)
        return True

    def _unwanted(self, event: events.Unwanted, effects: list[Effect]) -> bool:
        if event.expert not in self._line.graph.experts:
            return self._unexpected()
        if not (self._is_awaited(event.expert) or event.expert in self._line.homes):
            self._placement.discard(event.expert, effects)
        return True

    def _line_changed(self, event: events.LineChanged, effects: list[Effect]) -> bool:
        before, specs = self._line, [queue.spec for queue in self._scheduler.queues]
        homes = pinned_homes(event.pinned, specs, event.matrix.experts)
        self._line = ServedLine(event.graph, event.matrix, homes, event.retired)
        self._owe_workspaces()
        self._scheduler.matrix = event.matrix
        self._placement.change_line(event.graph, event.matrix, homes)
        self._pressure.change_line(event.matrix, homes, effects)
        self._supply.change_line(before, self._line, self._now, places=not self._is_draining)
        self._shadows.drop_all_but(event.graph.in_shadow - event.retired, effects)
        self._standings.forget_all_but(event.graph.experts)
        for expert in sorted(event.retired):
            self._discard_if_gone(expert, effects)
        return True

    def _drained(self, _: events.Drain, effects: list[Effect]) -> bool:
        self._is_draining = True
        self._supply.stop()
        self._shadows.drop_all_but(frozenset(), effects)
        return False

    # -- requests --

    def _enqueue(
        self, request: int, ticket: Ticket, expert: str, effects: list[Effect], home: int | None = None
    ) -> bool:
        """Queue what is left of a request's step, on ``home`` if able. True if a batch or load may start now."""
        refusal = self._standings.refusal(request, expert, self._now)
        if refusal is not None:
            return self._fail(request, refusal, effects)
        work = ticket.left
        unable = () if work is IMAGE else self._unable(expert, work)
        if home is not None and home not in unable:
            unable = tuple(executor for executor in self._queues if executor != home)
        placed = self._scheduler.place(request, expert, self._now, work, unable)
        if placed is None:
            reason = self._too_much(expert, work) if unable else f"no executor of this box can run {expert}"
            return self._fail(request, reason, effects)
        self._standings.let_through(request, expert)
        ticket.group, assigned = placed
        ticket.queue = self._queues[assigned.executor]
        ticket.queued_s = self._now
        self._wait_for_lease(request, ticket, ticket.queue, ticket.group)
        effects.append(assigned)
        self._prepare_ahead(request, ticket, ticket.queue, ticket.group, effects)
        return not assigned.joined or not self._batches.is_running(assigned.executor)

    def _unable(self, expert: str, work: Work) -> tuple[int, ...]:
        """The executors that have the expert and no memory for so many tokens, however empty it is."""
        return tuple(
            queue.spec.id
            for queue in self._scheduler.queues
            if (row := self._line.matrix.experts[queue.spec.processor].get(expert)) is not None
            and row.performance.most_for(work) > self._pools[queue.spec.pool].lease_bytes
        )

    def _too_much(self, expert: str, work: Work) -> str:
        largest = max(pool.lease_bytes for pool in self._pools.values())
        return (
            f"{expert}: what {work.most} tokens hold fits in no memory that it could run from (the largest share for "
            f"that has {largest} bytes) - ask for fewer tokens"
        )

    def _wait_for_lease(self, request: int, ticket: Ticket, queue: ExecutorQueue, group: Group) -> None:
        performance = group.profile.performance
        if performance.runs_in_quanta:
            self._leases.wait(request, queue.spec.pool, performance.lease_for(ticket.left), ticket.queued_s)

    def _prepare_ahead(
        self, request: int, ticket: Ticket, queue: ExecutorQueue, group: Group, effects: list[Effect]
    ) -> None:
        if self._ahead.is_on and ticket.work is IMAGE:
            self._ahead.queued(request, queue, group, self._later.after(ticket, self._line), self._now, effects)

    def _one_step_done(self, request: int, expert: str, result: Prediction | Rejected, effects: list[Effect]) -> None:
        ticket = self._tickets[request]
        if isinstance(result, Rejected):
            self._fail(request, result.reason, effects)
            return
        ticket.steps.append(StepResult(expert, result))
        if ticket.component is None:
            outcome = Outcome(
                Verdict.UNKNOWN, result.label, result.score, tuple(ticket.steps), "asked of one expert, not of a route"
            )
            self._end(request, Complete(request, outcome), effects)
        else:
            self._follow_route(request, ticket, ticket.component, result, effects)

    def _follow_route(
        self, request: int, ticket: Ticket, component: str, prediction: Prediction, effects: list[Effect]
    ) -> None:
        judgement = ticket.graph.judge(component, ticket.step, prediction)
        if judgement.next_expert is not None and ticket.is_cancelled:
            self._fail(request, CANCELLED, effects)
        elif judgement.next_expert is not None:
            ticket.step += 1
            ticket.attempts = ticket.moves = 0
            ticket.left = ticket.work.at(judgement.next_expert)
            self._enqueue(request, ticket, judgement.next_expert, effects)
        elif judgement.verdict is not None:
            outcome = Outcome(judgement.verdict, judgement.label, judgement.score, tuple(ticket.steps))
            self._end(request, Complete(request, outcome), effects)

    def _fail(self, request: int, reason: str, effects: list[Effect]) -> bool:
        steps = tuple(self._tickets[request].steps)
        self._end(request, Fail(request, Outcome(Verdict.UNKNOWN, None, None, steps, reason)), effects)
        return False

    def _end(self, request: int, effect: Complete | Fail, effects: list[Effect]) -> None:
        del self._tickets[request]
        self._ahead.ended(request)
        self._standings.request_ended(request)
        self._counts["completed" if isinstance(effect, Complete) else "failed"] += 1
        effects.append(effect)

    def _leave_queue(self, request: int, ticket: Ticket, effects: list[Effect] | None = None) -> None:
        """``effects``: given where the request moves to another queue, and loses what it holds here."""
        assert ticket.queue is not None
        assert ticket.group is not None
        ticket.queue.remove(ticket.group, request)
        self._ahead.left(request)
        if effects is not None and ticket.group.is_ongoing:
            self._lose(request, ticket.queue.spec.id, effects)
        ticket.queue = ticket.group = None
        self._leases.end(request)

    # -- batches that failed --

    def _may_retry(
        self, request: int, part: Part, batch: Batch, event: events.BatchFailed, effects: list[Effect]
    ) -> bool:
        """Ends a request whose batch failed once too often; True for one that gets another try, alone."""
        ticket = self._tickets[request]
        ticket.attempts += 1
        if ticket.is_cancelled:
            return self._fail(request, CANCELLED, effects)
        ran_alone = len(batch.requests) == 1 and not event.out_of_memory
        if ran_alone or ticket.attempts >= self._limits.batch_attempts:
            if event.out_of_memory and self._moves_elsewhere(request, part, batch.executor, event.reason, effects):
                return False
            return self._fail(request, f"{part.expert}: {event.reason}", effects)
        return True

    def _give_back(
        self, expert: str, batch: Batch, profile: ExpertProfile, requests: Sequence[int], effects: list[Effect]
    ) -> None:
        reason = self._standings.reason(expert)
        if reason is not None:
            for request in requests:
                if not self._standings.is_trial(request):
                    self._fail(request, reason, effects)
            requests = [request for request in requests if self._standings.is_trial(request)]
        if not requests:
            return
        queue = self._queues[batch.executor]
        if batch.quantum_s is not None:  # those that had begun were taken by turns
            requests = sorted(requests, key=lambda request: (self._tickets[request].queued_s, request))
        queued_s = {request: self._tickets[request].queued_s for request in requests}
        tokens_s = {request: profile.performance.tokens_s(self._tickets[request].left) for request in requests}
        group = queue.give_back(expert, profile, queued_s, self._now, tokens_s)
        for request in queued_s:
            ticket = self._tickets[request]
            ticket.queue, ticket.group = queue, group
            self._wait_for_lease(request, ticket, queue, group)
            self._prepare_ahead(request, ticket, queue, group, effects)

    def _runs_alone(self, request: int) -> bool:
        return self._tickets[request].attempts > 0

    # -- background work --

    @property
    def _is_anybody_there(self) -> bool:
        return bool(self._tickets) or self._supply.has_to_place

    def _offered(self, event: events.Offered, effects: list[Effect]) -> bool:
        if event.request in self._tickets or event.request in self._background:
            return self._unexpected()
        dropped = self._background.offer(event.request, event.expert)
        if self._is_draining or event.expert not in self._line.graph.in_shadow - self._line.retired:
            dropped = [event.request]
        for request in dropped:
            self._shadows.drop(request, DROPPED, effects)
        return False

    def _background_ran(self, batch: Batch, result: Prediction | Rejected, effects: list[Effect]) -> bool:
        request, expert, pool = batch.requests[0], batch.expert, self._queues[batch.executor].spec.pool
        self._shadows.batch_over(batch, self._now)
        self._background.went_well(pool)
        self._placement.ran(pool, batch.copy)
        if isinstance(result, Rejected):
            self._shadows.failed(request, result.reason, effects)
        else:
            if self._standings.batch_ran(expert):
                self._released(expert, "a batch went well", effects)
            self._shadows.ran(request, expert, result, effects)
        self._discard_if_gone(expert, effects)
        return self._is_anybody_there

    def _background_failed(self, batch: Batch, event: events.BatchFailed, effects: list[Effect]) -> bool:
        request, expert, probation = batch.requests[0], batch.expert, None
        self._shadows.batch_over(batch, self._now)
        if event.out_of_memory:
            self._background.ran_short(self._queues[batch.executor].spec.pool, self._now)
        else:
            is_trial = self._standings.is_trial(request)
            probation = self._standings.lone_batch_failed(expert, event.reason, self._now, is_trial=is_trial)
        self._shadows.failed(request, f"{expert}: {event.reason}", effects)
        if probation is not None:
            self._put_on_probation(expert, probation, effects)
        if self._standings.fails_in_batches(expert):
            self._placement.discard(expert, effects)
        self._discard_if_gone(expert, effects)
        return self._is_anybody_there

    # -- experts --

    def _advance(self, effects: list[Effect]) -> None:
        self._placement.release()
        if self._leases.is_any:
            self._turns.look_again(self._scheduler.queues)
        full = self._supply.claim_overdue(self._now, effects)
        self._batching.start(self._line, self._now, effects)
        lacking = self._supply.claim(full, self._line, self._now, effects)
        self._holding.look(full, lacking)

    def _switch_s(self, spec: ExecutorSpec, profile: ExpertProfile) -> float:
        """Predicted seconds until a copy could run on this executor, were it asked for now; 0 when it is resident."""
        pool = self._pools[spec.pool]
        if pool.is_resident(profile.copy):
            return 0.0
        return profile.load_s[self._placement.source_of(pool, profile.copy)]

    def _put_in_quarantine(self, expert: str, reason: str, effects: list[Effect]) -> None:
        if self._standings.quarantine(expert, reason):
            effects.append(StandingChanged(expert, Standing.QUARANTINE, reason))
            self._empty_queues(expert, effects)
        self._placement.discard(expert, effects)

    def _put_on_probation(self, expert: str, probation: Probation, effects: list[Effect]) -> None:
        retry_s = probation.retry_s - self._now
        effects.append(StandingChanged(expert, Standing.PROBATION, probation.reason, retry_s))
        self._empty_queues(expert, effects)

    def _released(self, expert: str, reason: str, effects: list[Effect]) -> None:
        effects.append(StandingChanged(expert, Standing.SERVING, reason))
        self._supply.place_pinned(expert, self._line, self._now)

    def _empty_queues(self, expert: str, effects: list[Effect]) -> None:
        for queue in self._scheduler.queues:
            while (group := queue.first_group(expert)) is not None:
                for request in tuple(group.requests):
                    self._leave_queue(request, self._tickets[request])
                    self._fail(request, str(self._standings.reason(expert)), effects)

    def _try_again(self, since_s: float) -> None:
        """Experts on probation whose pause ended after ``since_s`` are loaded, if there is room."""
        if self._is_draining:
            return
        for expert, copy in self._standings.due_loads(since_s, self._now):
            if expert in self._line.retired or expert in self._line.graph.in_shadow:
                continue  # whoever needs it still asks for it
            if not self._supply.place_pinned(expert, self._line, self._now):
                self._supply.place(expert, self._runs_on(expert, copy), self._line, self._now)

    def _runs_on(self, expert: str, copy: str) -> ExecutorSpec:
        columns = self._line.matrix.experts
        specs = (queue.spec for queue in self._scheduler.queues)
        return next(
            spec for spec in specs if (row := columns[spec.processor].get(expert)) is not None and row.copy == copy
        )

    def _moves_elsewhere(self, request: int, part: Part, executor: int, reason: str, effects: list[Effect]) -> bool:
        """Move a request that even an empty memory has no workspace for; False without another executor."""
        pool = self._queues[executor].spec.pool
        if not self._pressure.has_alternative(part.expert, pool, part.copy, self._now):
            return False
        self._placement.set_back(pool, part.copy, self._limits.load_attempts, self._now)
        self._fall_back(part.expert, pool, part.copy, reason, effects)
        self._move(request, part.expert, reason, effects)
        return True

    def _move(self, request: int, expert: str, reason: str, effects: list[Effect]) -> None:
        """Queue a request on another executor; a request fails once every executor has been tried."""
        ticket = self._tickets[request]
        ticket.attempts = 0
        ticket.moves += 1
        if ticket.moves < len(self._queues):
            self._enqueue(request, ticket, expert, effects)
        else:
            self._fail(request, f"{expert}: {reason}", effects)

    def _fall_back(self, expert: str, pool: str, copy: str, reason: str, effects: list[Effect]) -> bool:
        """Move the requests of a copy that fails too often; False where it may go on, or nothing else runs it."""
        now, pressure = self._now, self._pressure
        if not self._placement.is_barred(pool, copy, now) or not pressure.has_alternative(expert, pool, copy, now):
            return False
        moving = pressure.stranded(expert, now)
        retry_s = self._placement.retry_s(pool, copy) - self._now
        effects.append(FellBack(expert, copy, pool, len(moving), reason, retry_s))
        for request in moving:
            self._leave_queue(request, self._tickets[request], effects)
            self._move(request, expert, reason, effects)
        return True

    def _barred(self, expert: str, now: float) -> frozenset[int]:
        return self._pressure.barred(expert, now)

    def _discard_if_gone(self, expert: str, effects: list[Effect]) -> None:
        is_done = expert in self._line.retired and not self._is_awaited(expert)
        if is_done or expert in self._standings.quarantined:
            self._placement.discard(expert, effects)

    def _is_awaited(self, expert: str) -> bool:
        return any(queue.first_group(expert) is not None for queue in self._scheduler.queues)

    def _answers_by_event(self) -> dict[type, Callable[..., bool]]:
        """What answers each event; True where more may move now."""
        return {
            events.Started: self._started,
            events.Arrived: self._arrived,
            events.Offered: self._offered,
            events.Loaded: self._loaded,
            events.LoadFailed: self._load_failed,
            events.Finished: self._finished,
            events.Progressed: self._progressed,
            events.BatchFailed: self._batch_failed,
            events.Cancelled: self._cancelled,
            events.Preempted: self._preempted,
            events.Quarantined: self._quarantined,
            events.Wanted: self._wanted,
            events.Unwanted: self._unwanted,
            events.LineChanged: self._line_changed,
            events.Tick: lambda *_: True,
            events.Drain: self._drained,
        }

    def _refuse_misfits(self) -> None:
        for name, pool in self._pools.items():
            users = [queue.spec for queue in self._scheduler.queues if queue.spec.pool == name]
            footprints = footprints_in(name, users, self._line.matrix.experts, self._line.homes)
            needs = misfits(footprints, pool.spec.expert_bytes)
            if needs:
                expert = max(needs, key=lambda each: needs[each])
                raise MemoryExceeded(f"{name}, for {expert}", needs[expert], pool.spec.expert_bytes)
        self._owe_workspaces()
        for name, pool in self._pools.items():
            owed = sum(pool.guaranteed_workspace.values())
            if owed > pool.spec.workspace_bytes:
                raise MemoryExceeded(f"{name}, workspace of one image per executor", owed, pool.spec.workspace_bytes)

    def _owe_workspaces(self) -> None:
        for queue in self._scheduler.queues:
            profiles = self._line.matrix.experts[queue.spec.processor].values()
            largest = max((each.performance.workspace_for(1) for each in profiles), default=0)
            self._pools[queue.spec.pool].guaranteed_workspace[queue.spec.id] = largest

    def _waits_for(self, queue: ExecutorQueue, load: Load) -> bool:
        """Does the head of this queue wait for this load, and not for its executor?"""
        head = queue.front
        if head is None or head.profile.copy != load.copy:
            return False
        return not self._batches.is_running(queue.spec.id) or queue.is_overtaken

    def _load_paths(self) -> list[str]:
        sources = ((source, pool.name) for pool in self._pools.values() for source in (SSD, pool.spec.cache))
        return sorted(f"{source}_{pool}" for source, pool in sources if source is not None)

    def _queue_statistics(self, queue: ExecutorQueue) -> QueueStatistics:
        spec, batch = queue.spec, self._batches.running(queue.spec.id)
        requests, length_s = queue.request_count + queue.held_requests, queue.length_s(self._now)
        running, expert = (len(batch.requests), batch.expert) if batch else (0, None)
        return QueueStatistics(spec.id, spec.processor, requests, length_s, running, expert)

    def _unexpected(self) -> bool:
        self._counts["unexpected_events"] += 1
        return False


def _mistold(event: events.Progressed, batch: Batch) -> str | None:
    told = [request for request, _ in event.finished] + [request for request, _ in event.unfinished]
    if sorted(told) != sorted(batch.requests):
        return f"it ended with requests {sorted(told)}, and began with {sorted(batch.requests)}"
    if event.unfinished and batch.quantum_s is None:
        return f"{len(event.unfinished)} of {len(told)} images are not done, and images have no quantum"
    return None
