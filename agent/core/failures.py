"""Failures: consequences of a failed load or batch for its expert, its memory and its requests.

    loads or lone batches fail in a row  the expert is on probation: only one trial request per pause uses it
    a load or batch went well            the expert serves again
    bad weights, or the shell's report   quarantine, for good
    a load ran short of memory           the budget is lowered to the bytes that were used there, and the load retried
    a batch found a damaged copy         the copy is evicted, and its requests run again, a few times
    a batch of one ran short             the budget is lowered by the batch's bytes; bytes that no expert can free
                                         are taken from the leases of begun requests, youngest first
    no shortage for a while              half of the missing budget is restored, then half of the rest, then all
    a copy fails too often               its requests there wait on other executors that can run the expert

Example: the weights of a cannot be read, and A waits for it.

    a load fails, at 0 s     nothing is told; loaded again at 0.25 s, then at 1 s
    the third one fails      a is on probation for 1 s, and A is UNKNOWN with the reason
    A comes again, at 1.5 s  UNKNOWN at once
    at 2 s                   load a, which nobody waits for: a trial
    a is loaded              a serves again

Guarantees: pauses double and are reset only by success: an expert that always fails costs one trial a minute, and a
memory that is too small one shortage a day. No budget is lower than each expert of the line needs to
run there, and no budget for leases lower than any accepted request may need. A memory allocated in one piece
keeps its budget. A failed request of idle precedence lowers no budget and ends no other request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.core import demand, requests, room, running
from agent.core.effects import BudgetChanged, FellBack, LeasesChanged, Standing, StandingChanged
from agent.core.performance import footprints_in
from agent.core.pool import least_bytes
from agent.core.request import CANCELLED
from agent.core.state import ExpertStanding, Pause, Setback
from agent.faults.backoff import Backoff

if TYPE_CHECKING:
    from agent.core.events import BatchFailed, LoadFailed, Reserved
    from agent.core.performance import ExecutorSpec, ExpertProfile
    from agent.core.pool import ModelPool
    from agent.core.request import Batch, Portion
    from agent.core.state import Load, State

LOAD_ATTEMPTS = 3  # failed in a row: probation
LOAD_BACKOFF_S = 0.25  # after a failed load
AWAY_S = 30.0  # failed loads of a missing or unreadable file count only after this wait
LONGEST_AWAY_PAUSE_S = 4.0  # between two attempts to read such a file
BATCH_ATTEMPTS = 3
EXPERT_FAILURES = 3  # failed batches of one in a row: probation
PROBATION_S = 1.0  # after failed batches
LONGEST_PAUSE_S = 60.0
BUDGET_PAUSE_S = 600.0  # without shortage, before a lowered budget is raised
LONGEST_BUDGET_PAUSE_S = 86_400.0
LITTLE = 8  # a missing part of the leases below this fraction is restored at once; arbitrary
NO_SHORTAGE = "it did not run short again"
LARGER_EXPERTS = "the line has larger experts now"
RESERVED = "new experts are measured"
NOWHERE: frozenset[int] = frozenset()


# -- experts --


def put_in_quarantine(state: State, expert: str, reason: str) -> None:
    if state.standing_of(expert) is not Standing.QUARANTINE:
        _change_standing(state, expert, ExpertStanding(Standing.QUARANTINE, reason))
        state.effects.append(StandingChanged(expert, Standing.QUARANTINE, reason))
        _empty_queues(state, expert)
    room.discard(state, expert)


def expert_ran(state: State, expert: str) -> None:
    state.failed_batches.pop(expert, None)
    state.batch_pauses.pop(expert, None)
    if state.standing_of(expert) is Standing.PROBATION:
        _serve_again(state, expert, "a batch went well")


def expert_loaded(state: State, expert: str, copy: str) -> None:
    """End a probation that was due to failed loads of this copy."""
    standing = state.standings.get(expert)
    if standing is not None and standing.copy == copy:
        _serve_again(state, expert, "a load went well")


def forget_all_but(state: State, experts: frozenset[str]) -> None:
    for by_expert in (state.standings, state.failed_batches, state.batch_pauses):
        for expert in [expert for expert in by_expert if expert not in experts]:
            del by_expert[expert]


def _serve_again(state: State, expert: str, reason: str) -> None:
    _change_standing(state, expert, None)
    state.effects.append(StandingChanged(expert, Standing.SERVING, reason))
    demand.place_pinned(state, expert)


def _change_standing(state: State, expert: str, standing: ExpertStanding | None) -> None:
    """Change the standing of an expert, which ends its trial; None: it serves."""
    before = state.standings.pop(expert, None)
    if before is not None and before.trial is not None:
        state.tickets[before.trial].trial_of = None
    if standing is not None:
        state.standings[expert] = standing


def _announce_probation(state: State, expert: str) -> None:
    standing = state.standings[expert]
    retry_s = standing.retry_s - state.now
    state.effects.append(StandingChanged(expert, Standing.PROBATION, standing.reason, retry_s))
    _empty_queues(state, expert)


def _empty_queues(state: State, expert: str) -> None:
    for queue in state.queues:
        while (group := queue.first_group(expert)) is not None:
            for request in tuple(group.requests):
                requests.leave_queue(state, request)
                requests.fail(state, request, str(requests.standing_reason(state, expert)))
    for request in [each for each, wanted in state.stranded.items() if wanted == expert]:
        requests.fail(state, request, str(requests.standing_reason(state, expert)))


def _fails_in_batches(state: State, expert: str) -> bool:
    """True if the expert is on probation for failed batches, which only a batch can end."""
    standing = state.standings.get(expert)
    return standing is not None and standing.standing is Standing.PROBATION and standing.copy is None


# -- loads --


def load_failed(state: State, load: Load, event: LoadFailed) -> None:
    pool = state.pools[load.pool]
    pool.load_failed(load.copy)
    state.presence[load.expert] -= 1
    setback = _set_back(state, load.pool, load.copy, is_away=event.is_away)
    if load.is_idle:
        requests.end_idle(state, f"{load.expert}: {event.reason}")
    if event.permanent:
        put_in_quarantine(state, load.expert, event.reason)
        return
    if event.out_of_memory and not load.is_idle:
        _ran_short(state, pool, pool.used_bytes, event.reason)
    if _fall_back(state, load.expert, load.pool, load.copy, event.reason):
        demand.place_pinned(state, load.expert)
    else:
        _count_failed_load(state, load, event.reason, setback)
    room.discard_if_gone(state, load.expert)


def _count_failed_load(state: State, load: Load, reason: str, setback: Setback) -> None:
    expert, retry_s = load.expert, setback.pause.until_s
    if state.standing_of(expert) is Standing.QUARANTINE or setback.attempts < LOAD_ATTEMPTS:
        demand.place_pinned(state, expert)
        return
    reason = f"{_in_a_row(setback.attempts, 'load', 'loads')}, last: {reason}"
    if _fails_in_batches(state, expert):  # a successful load would prove nothing
        retry_s = max(state.standings[expert].retry_s, retry_s)
        probation = ExpertStanding(Standing.PROBATION, reason, retry_s)
    else:
        probation = ExpertStanding(Standing.PROBATION, reason, retry_s, load.copy)
    _change_standing(state, expert, probation)
    _announce_probation(state, expert)


def _set_back(state: State, pool: str, copy: str, attempts: int | None = None, *, is_away: bool = False) -> Setback:
    """Count a failed load of a copy into a memory; ``attempts``: set the count instead.

    ``is_away``: the file was missing; such failures count only after AWAY_S. AWAY_S without a failure reset the count.
    """
    before = state.setbacks.get((pool, copy))
    is_new = before is None or state.now - before.pause.until_s > AWAY_S
    since_s = state.now if before is None or is_new else before.since_s
    if attempts is None:
        is_waited_for = is_away and state.now - since_s < AWAY_S
        attempts = (before.attempts if before else 0) + (not is_waited_for)
    backoff = Backoff(LOAD_BACKOFF_S, LONGEST_AWAY_PAUSE_S if is_away else LONGEST_PAUSE_S)
    setback = Setback(attempts, Pause.after(before.pause if before else None, backoff, state.now), since_s)
    state.setbacks[pool, copy] = setback
    return setback


def next_wakeup_s(state: State) -> float | None:
    """Time of the next retry of a load, of the next raise of a budget, or of the end of a wait for lost executors.

    Loads past their pause wait for room only.
    """
    retries = (setback.pause.until_s for setback in state.setbacks.values())
    reliefs = [pause.until_s for pause in state.lowered.values()]
    waits = [state.tickets[request].queued_s + state.limits.absence_s for request in state.stranded]
    return min([*reliefs, *waits, *(moment for moment in retries if moment > state.now)], default=None)


# -- batches --


def batch_failed(state: State, batch: Batch, event: BatchFailed) -> None:
    """Retry the requests of a batch alone, end them, or move them; and count the failure."""
    portions = running.end(state, batch)
    is_idle, is_lone = state.idle_request in batch.requests, len(batch.requests) == 1
    if batch.quantum_s is not None:
        for request in batch.requests:
            requests.lose(state, request, batch.executor)
    if event.out_of_memory and not is_idle:
        for portion, _ in portions:
            state.splitter.ran_out_of_memory(portion.expert, batch.executor, len(batch.requests))
    is_on_probation = _count_failed_batch(state, batch, event)

    def oldest(each: tuple[Portion, ExpertProfile]) -> tuple[float, int]:
        return min((state.tickets[request].queued_s, request) for request in each[0].requests)

    for portion, profile in sorted(portions, key=oldest, reverse=True):
        retried = [request for request in portion.requests if _may_retry(state, request, portion, batch, event)]
        _give_back(state, portion.expert, batch, profile, retried)  # each is put in front of the others
    if event.out_of_memory and is_lone and not is_idle:  # no batch is smaller: the weights there have to be fewer
        _lack_workspace(state, batch, event.reason)
    if is_on_probation:
        _announce_probation(state, batch.expert)
    for portion, _ in portions if event.is_damaged else ():
        room.discard(state, portion.expert, state.pool_of(batch.executor))
        demand.place_pinned(state, portion.expert)
    for portion, _ in portions:
        if _fails_in_batches(state, portion.expert):
            room.discard(state, portion.expert)  # a trial reads the weights again
        room.discard_if_gone(state, portion.expert)


def _count_failed_batch(state: State, batch: Batch, event: BatchFailed) -> bool:
    """Count a lone batch that failed by its expert; True if that puts the expert on probation."""
    request, expert = batch.requests[0], batch.expert
    if event.out_of_memory or event.is_damaged or len(batch.requests) > 1 or state.tickets[request].is_cancelled:
        return False
    count = state.failed_batches[expert] = state.failed_batches.get(expert, 0) + 1
    # without a trial, the batch ran when the expert's standing changed
    if count < EXPERT_FAILURES or (expert in state.standings and state.tickets[request].trial_of is None):
        return False
    pause = Pause.after(state.batch_pauses.get(expert), Backoff(PROBATION_S, LONGEST_PAUSE_S), state.now)
    state.batch_pauses[expert] = pause
    reason = f"{_in_a_row(count, 'batch', 'batches')}, last: {event.reason}"
    _change_standing(state, expert, ExpertStanding(Standing.PROBATION, reason, pause.until_s))
    return True


def _may_retry(state: State, request: int, portion: Portion, batch: Batch, event: BatchFailed) -> bool:
    """True for a request to retry alone; ends or moves any other."""
    ticket = state.tickets[request]
    ticket.attempts += 1
    if ticket.is_cancelled:
        return requests.fail(state, request, CANCELLED)
    is_due_again = event.out_of_memory or event.is_damaged
    is_idle, ran_alone = request == state.idle_request, len(batch.requests) == 1 and not is_due_again
    if not (ran_alone or is_idle or ticket.attempts >= BATCH_ATTEMPTS):
        return True
    may_move = event.out_of_memory and not is_idle
    if may_move and _moves_elsewhere(state, request, portion, batch.executor, event.reason):
        return False
    return requests.fail(state, request, f"{portion.expert}: {event.reason}")


def _give_back(state: State, expert: str, batch: Batch, profile: ExpertProfile, retried: list[int]) -> None:
    reason = requests.standing_reason(state, expert)
    if reason is not None:
        for request in retried:
            if state.tickets[request].trial_of is None:
                requests.fail(state, request, reason)
        retried = [each for each in retried if each in state.tickets]
    if not retried:
        return
    if batch.quantum_s is not None:  # begun requests were taken in turns
        retried = sorted(retried, key=lambda request: (state.tickets[request].queued_s, request))
    queue = state.queue_of[batch.executor]
    queued_s = {request: state.tickets[request].queued_s for request in retried}
    tokens_s = {request: profile.performance.tokens_s(state.tickets[request].left) for request in retried}
    group = queue.give_back(expert, profile, queued_s, state.now, tokens_s)
    for request in queued_s:
        requests.stand(state, request, queue, group)


# -- other executors --


def barred(state: State, expert: str) -> frozenset[int]:
    """Executors that requests for an expert avoid for now: its copy fails too often there."""
    if not state.setbacks:
        return NOWHERE
    return frozenset(spec.id for spec, row in state.rows_of(expert) if _is_barred(state, spec.pool, row.copy))


def _is_barred(state: State, pool: str, copy: str) -> bool:
    """True during the pause of a copy that failed too often, in this memory or in the cache in front of it."""
    cache = state.pools[pool].spec.cache
    is_on_its_way = cache is not None and state.pools[pool].entry(copy) is None
    places = (pool, cache) if cache is not None and is_on_its_way else (pool,)
    setbacks = (state.setbacks.get((place, copy)) for place in places)
    return any(
        each is not None and each.attempts >= LOAD_ATTEMPTS and state.now < each.pause.until_s for each in setbacks
    )


def _has_alternative(state: State, expert: str, pool: str, copy: str) -> bool:
    """True if another executor can run the expert without this copy in this memory."""
    return any(
        not _is_barred(state, spec.pool, row.copy) and (row.copy != copy or not _needs(state, spec, copy, pool))
        for spec, row in state.rows_of(expert)
    )


def _needs(state: State, spec: ExecutorSpec, copy: str, pool: str) -> bool:
    """True if the executor can run the copy only by way of this memory."""
    own = state.pools[spec.pool]
    return pool == own.name or (pool == own.spec.cache and own.entry(copy) is None)


def _moves_elsewhere(state: State, request: int, portion: Portion, executor: int, reason: str) -> bool:
    """Move a request whose workspace exceeds even an empty memory; False without another executor."""
    pool = state.queue_of[executor].spec.pool
    if not _has_alternative(state, portion.expert, pool, portion.copy):
        return False
    _set_back(state, pool, portion.copy, LOAD_ATTEMPTS)
    _fall_back(state, portion.expert, pool, portion.copy, reason)
    requests.move(state, request, portion.expert, reason)
    return True


def _fall_back(state: State, expert: str, pool: str, copy: str, reason: str) -> bool:
    """Move the requests of a copy that fails too often; False below that limit, or without another executor."""
    if not _is_barred(state, pool, copy) or not _has_alternative(state, expert, pool, copy):
        return False
    executors = barred(state, expert)
    moving = [
        request
        for queue in state.queues
        if queue.spec.id in executors
        for group in queue.groups()
        if group.expert == expert
        for request in group.requests
    ]
    retry_s = state.setbacks[pool, copy].pause.until_s - state.now
    state.effects.append(FellBack(expert, copy, pool, len(moving), reason, retry_s))
    for request in moving:
        requests.leave_executor(state, request)
        requests.move(state, request, expert, reason)
    return True


# -- budgets --


def relieve(state: State) -> bool:
    """Raise the lowered budgets whose pause is over; True if there were any."""
    due = [name for name, pause in state.lowered.items() if pause.until_s <= state.now]
    for name in due:
        pool, pause = state.pools[name], state.lowered.pop(name)
        lacking, lacking_leases = pool.missing_bytes, pool.missing_lease_bytes
        if lacking or lacking_leases:
            kept = 0 if lacking <= _least_bytes(state, pool) else lacking // 2
            kept_leases = 0 if lacking_leases * LITTLE <= pool.spec.lease_bytes else lacking_leases // 2
            _set_budget(state, pool, pool.most_bytes - kept, NO_SHORTAGE)
            _set_leases(state, pool, pool.spec.lease_bytes - kept_leases, NO_SHORTAGE)
            state.lowered[name] = Pause.after(pause, Backoff(BUDGET_PAUSE_S, LONGEST_BUDGET_PAUSE_S), state.now)
    return bool(due)


def raise_budgets(state: State) -> None:
    """After a change of the line: raise lowered budgets to the bytes that its experts need."""
    for pool in [state.pools[name] for name in state.lowered]:
        needed_bytes = min(_least_bytes(state, pool), pool.most_bytes)
        _set_budget(state, pool, max(pool.expert_bytes, needed_bytes), LARGER_EXPERTS)


def reserve(state: State, event: Reserved) -> bool:
    """Give the shell bytes of a memory, or all back; none of those that the line's experts need to run there."""
    pool = state.pools.get(event.pool)
    if pool is None or pool.spec.is_one_piece or event.size_bytes < 0:
        return state.unexpected()
    before_bytes = pool.expert_bytes
    whole_bytes = before_bytes + pool.reserved_bytes
    left_bytes = min(max(whole_bytes - event.size_bytes, _least_bytes(state, pool)), whole_bytes)
    room.shrink(state, pool, left_bytes)
    pool.reserved_bytes = whole_bytes - max(left_bytes, pool.used_bytes)
    if pool.expert_bytes != before_bytes:
        state.effects.append(BudgetChanged(pool.name, before_bytes, pool.expert_bytes, RESERVED))
    return True


def _ran_short(state: State, pool: ModelPool, to_bytes: int, reason: str) -> None:
    if pool.spec.is_one_piece:
        return
    target_bytes = max(to_bytes, _least_bytes(state, pool))
    if target_bytes < pool.expert_bytes:
        room.shrink(state, pool, target_bytes)
        _set_budget(state, pool, max(target_bytes, pool.used_bytes), reason)
    if pool.missing_bytes:
        _pause_budget(state, pool)


def _lack_workspace(state: State, batch: Batch, reason: str) -> None:
    """Lower the budgets by the bytes of a batch: of weights first, then of leases."""
    pool = state.pool_of(batch.executor)
    weights_bytes = pool.used_bytes - batch.workspace_bytes
    _ran_short(state, pool, weights_bytes, reason)
    to_bytes = max(pool.lease_bytes - (pool.used_bytes - weights_bytes), _most_leased(state, pool))
    if pool.used_bytes <= weights_bytes or pool.spec.is_one_piece or to_bytes >= pool.lease_bytes:
        return
    waiting = [
        (state.tickets[request].queued_s, request, group.expert, queue.spec.id)
        for queue in state.users[pool.name]
        for group in queue.ongoing.values()
        for request in group.requests
    ]
    for _, request, expert, executor in sorted(waiting, reverse=True):
        if pool.lease_used_bytes <= to_bytes:
            break
        requests.leave_executor(state, request)
        requests.restart_request(state, request, expert, executor)
        room.discard_if_gone(state, expert)
    _set_leases(state, pool, max(to_bytes, pool.lease_used_bytes), reason)
    if pool.missing_lease_bytes:
        _pause_budget(state, pool)


def _most_leased(state: State, pool: ModelPool) -> int:
    """Bytes that the largest accepted request may need here."""
    columns = (state.line.matrix.experts[queue.spec.processor] for queue in state.users[pool.name])
    token_bytes = max((row.performance.lease_bytes for column in columns for row in column.values()), default=0)
    most = (max(ticket.left.most, ticket.work.most_of_any) for ticket in state.tickets.values())
    return token_bytes * max(most, default=0)


def _pause_budget(state: State, pool: ModelPool) -> None:
    lowered = state.lowered.get(pool.name)
    pause_s = lowered.pause_s if lowered is not None else BUDGET_PAUSE_S
    state.lowered[pool.name] = Pause(pause_s, state.now + pause_s)


def _set_budget(state: State, pool: ModelPool, to_bytes: int, reason: str) -> None:
    before_bytes = pool.expert_bytes
    if to_bytes != before_bytes:
        pool.set_budget(to_bytes)
        state.effects.append(BudgetChanged(pool.name, before_bytes, to_bytes, reason))


def _set_leases(state: State, pool: ModelPool, to_bytes: int, reason: str) -> None:
    before_bytes = pool.lease_bytes
    if to_bytes != before_bytes:
        pool.set_lease_budget(to_bytes)
        state.effects.append(LeasesChanged(pool.name, before_bytes, to_bytes, reason))


def _least_bytes(state: State, pool: ModelPool) -> int:
    return least_bytes(footprints_in(pool.name, state.executors, state.line.matrix.experts, state.line.homes))


def _in_a_row(count: int, one: str, many: str) -> str:
    return f"1 {one} failed" if count == 1 else f"{count} {many} in a row failed"
