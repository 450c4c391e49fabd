"""Requests: queue, move and end them along their routes. Each request has one Ticket until it ends.

Guarantees: a request is in one queue or in one batch, and ends in exactly one Complete or Fail. An expert on probation
has at most one trial request at a time; after a trial that ends without a batch, another may begin.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from agent.core import demand
from agent.core.effects import Complete, Fail, Preempt, Standing
from agent.core.prepared import NO_LATER_FORMS
from agent.core.request import CANCELLED, IMAGE, NO_SPARE_ROOM, Outcome, StepResult
from agent.core.scheduler import Placing
from experts.expert import Rejected, Verdict

if TYPE_CHECKING:
    from agent.core.performance import ExpertProfile
    from agent.core.prepared import LaterForms
    from agent.core.queue import ExecutorQueue, Group
    from agent.core.request import Work
    from agent.core.state import State, Ticket
    from experts.expert import Prediction


def enqueue(state: State, request: int, expert: str, home: int | None = None) -> bool:
    """Queue the rest of a request's step, on ``home`` if able. True if a batch or load may start now.

    It joins no group if it ran on a lost executor. A request that only lost executors can run is stranded.
    """
    ticket = state.tickets[request]
    standing = state.standings.get(expert)
    is_refused = standing is not None and (standing.trial is not None or state.now < standing.retry_s)
    if is_refused and ticket.trial_of != expert:
        return fail(state, request, str(standing_reason(state, expert)))
    work, unable = ticket.left, set[int]()
    if work is not IMAGE:  # even empty, their memory lacks room for so many tokens
        rows = state.rows_of(expert)
        unable = {spec.id for spec, row in rows if row.performance.most_for(work) > state.pools[spec.pool].lease_bytes}
    if request == state.idle_request:
        unable = state.queue_of.keys() - demand.executors_to_spare(state, expert)
    if home is not None and home not in unable:
        unable = state.queue_of.keys() - {home}
    placing = Placing(request, expert, work, unable, ticket.worker, alone=ticket.losses > 0)
    placed = state.scheduler.place(placing, state.now)
    if placed is None:
        if request == state.idle_request or not _is_able_away(state, expert):
            return fail(state, request, _unplaced(state, request, expert, is_able=bool(unable)))
        if request not in state.stranded:
            state.stranded[request] = expert
            state.images.forget(request, state.effects)
            ticket.queued_s = state.now
        return False
    state.stranded.pop(request, None)
    if standing is not None:
        state.standings[expert] = replace(standing, trial=request)
        ticket.trial_of = expert
    group, assigned = placed
    queue = state.queue_of[assigned.executor]
    ticket.queued_s = state.now
    state.effects.append(assigned)
    stand(state, request, queue, group)
    return not assigned.joined or queue.spec.id not in state.running


def stand(state: State, request: int, queue: ExecutorQueue, group: Group) -> None:
    """Record a request's place in a group: it waits for its lease, or its image is prepared."""
    ticket = state.tickets[request]
    ticket.queue, ticket.group = queue, group
    state.touched.add(queue.spec.worker)
    performance = group.profile.performance
    if performance.runs_in_quanta:
        state.leases.wait(request, queue.spec.pool, performance.lease_for(ticket.left), ticket.queued_s)
    if state.images.is_on and ticket.work is IMAGE and not ticket.losses:
        state.images.queued(request, group, _later_forms(state, ticket), queue, state.now, state.effects)


def _later_forms(state: State, ticket: Ticket) -> LaterForms:
    if ticket.component is None:
        return NO_LATER_FORMS
    step = ticket.graph, ticket.component, ticket.step
    later = state.later_forms.get(step)
    if later is None:
        later = state.later_forms[step] = state.images.later_forms(state.line.matrix, *step)
    return later


def _is_able_away(state: State, expert: str) -> bool:
    """True if a lost executor that may return can run the expert."""
    columns = state.line.matrix.experts
    return any(expert in columns[spec.processor] for spec in state.away.values())


def standing_reason(state: State, expert: str) -> str | None:
    """Reason why requests may not use an expert; None while it serves."""
    row = state.standings.get(expert)
    if row is None:
        return None
    where = "in quarantine" if row.standing is Standing.QUARANTINE else "on probation"
    return f"{expert} is {where}: {row.reason}"


def _unplaced(state: State, request: int, expert: str, *, is_able: bool) -> str:
    if request == state.idle_request and any(True for _ in state.rows_of(expert)):
        return NO_SPARE_ROOM
    if request == state.idle_request or not is_able:
        return f"no executor of this box can run {expert}"
    largest = max((pool.lease_bytes for pool in state.pools.values()), default=0)
    return (
        f"{expert}: {state.tickets[request].left.most} tokens need more memory than any that it could run from has for "
        f"texts (the largest share is {largest} bytes) - ask for fewer tokens"
    )


def step_done(state: State, request: int, expert: str, result: Prediction | Rejected) -> None:
    """Follow a request's route to its next expert, or end it."""
    ticket = state.tickets[request]
    if isinstance(result, Rejected):
        fail(state, request, result.reason)
        return
    ticket.steps.append(StepResult(expert, result))
    steps = tuple(ticket.steps)
    if ticket.component is None:
        reason = "asked of one expert, not of a route"
        _end(state, Complete(request, Outcome(Verdict.UNKNOWN, result.label, result.score, steps, reason)))
        return
    judgement = ticket.graph.judge(ticket.component, ticket.step, result)
    if judgement.next_expert is not None and ticket.is_cancelled:
        fail(state, request, CANCELLED)
    elif judgement.next_expert is not None:
        ticket.step += 1
        ticket.attempts = ticket.moves = ticket.losses = 0
        ticket.left = ticket.work.at(judgement.next_expert)
        enqueue(state, request, judgement.next_expert)
    elif judgement.verdict is not None:
        _end(state, Complete(request, Outcome(judgement.verdict, judgement.label, judgement.score, steps)))


def fail(state: State, request: int, reason: str) -> bool:
    """End a request UNKNOWN. Returns False: no batch or load may start because of it."""
    steps = tuple(state.tickets[request].steps)
    _end(state, Fail(request, Outcome(Verdict.UNKNOWN, None, None, steps, reason)))
    return False


def _end(state: State, effect: Complete | Fail) -> None:
    request = effect.request
    expert = state.tickets.pop(request).trial_of
    state.stranded.pop(request, None)
    state.images.ended(request)
    if expert is not None:
        state.standings[expert] = replace(state.standings[expert], trial=None)
    if request == state.idle_request:
        state.idle_request = None
    else:
        state.counts["completed" if isinstance(effect, Complete) else "failed"] += 1
    state.effects.append(effect)


def end_idle(state: State, reason: str) -> None:
    """End the request of idle precedence, unless its batch runs."""
    request = state.queued_idle
    if request is not None:
        leave_queue(state, request)
        fail(state, request, reason)


def leave_queue(state: State, request: int) -> None:
    ticket = state.tickets[request]
    assert ticket.queue is not None
    assert ticket.group is not None
    ticket.queue.remove(ticket.group, request)
    state.touched.add(ticket.queue.spec.worker)
    state.images.left(request)
    ticket.queue = ticket.group = None
    state.leases.end(request)


def leave_executor(state: State, request: int) -> None:
    """Take a request off its executor; a begun request loses its memory."""
    ticket = state.tickets[request]
    queue, group = ticket.queue, ticket.group
    leave_queue(state, request)
    if queue is not None and group is not None and group.is_ongoing:
        lose(state, request, queue.spec.id)


def lose(state: State, request: int, executor: int) -> None:
    """Preempt a begun request: end its lease and restart its work."""
    state.leases.end(request)
    ticket = state.tickets[request]
    ticket.left = ticket.left.restarted()
    state.effects.append(Preempt(request, executor))


def restart_request(state: State, request: int, expert: str, executor: int) -> None:
    """Requeue a preempted request on the executor that has its text."""
    state.tickets[request].attempts = 0
    enqueue(state, request, expert, home=executor)


def move(state: State, request: int, expert: str, reason: str) -> None:
    """Queue a request on another executor; it fails once every executor has been tried."""
    ticket = state.tickets[request]
    ticket.attempts = 0
    ticket.moves += 1
    if ticket.moves < len(state.queues):
        enqueue(state, request, expert)
    else:
        fail(state, request, f"{expert}: {reason}")


def go_on(state: State, expert: str, executor: int, profile: ExpertProfile, left: dict[int, Work]) -> None:
    """Queue unfinished requests (``left``: their work) for their next quantum; end or preempt the others."""
    queue, reason = state.queue_of[executor], standing_reason(state, expert)
    tokens_s: dict[int, float] = {}
    for request, work in left.items():
        ticket = state.tickets[request]
        ending = CANCELLED if ticket.is_cancelled else reason
        if ending is None:
            ticket.left = work
            tokens_s[request] = profile.performance.tokens_s(work)
        else:
            state.leases.end(request)
            fail(state, request, ending)
    without_room = [
        request
        for since_s, request in sorted((state.tickets[request].queued_s, request) for request in tokens_s)
        if not state.leases.grow(request, profile.performance.lease_for(left[request]), since_s)
    ]
    for request in without_room:
        del tokens_s[request]
    if tokens_s:
        group = queue.go_on(expert, profile, tokens_s, state.now)
        for request in tokens_s:
            state.tickets[request].queue, state.tickets[request].group = queue, group
    for request in without_room:
        lose(state, request, executor)
        restart_request(state, request, expert, executor)
