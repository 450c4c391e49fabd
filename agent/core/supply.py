"""Supply: which copies are asked for, and in which order, whenever something may have come free.

    overdue          heads of queues that have waited beyond the overtaking bound, the oldest first; a memory where one
                     of them lacks room is *full*: nothing younger takes what comes free there
    the heads        of all queues, before their executors are idle where the policy overlaps; a memory where one finds
                     no room is *short*
    the next groups  while a link that could serve one of them is free; free room only in a short memory
    spare room       of memories neither full nor short: what may follow what runs now (speculation), then the placement
                     at the start (section 4.1)

Guarantees: a pinned expert is placed sooner or later; whatever is in quarantine, or whose pause is not over, is not
loaded for spare room; speculation and placement give way to whatever a queue waits for.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agent.core.placement import Answer, Claim
from agent.core.prefetch import Wish, demands, initial_placement, overdue, upcoming

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from agent.core.batches import Batches
    from agent.core.effects import Effect
    from agent.core.performance import ExecutorSpec, Limits
    from agent.core.placement import Placement
    from agent.core.policy import Policy
    from agent.core.queue import ExecutorQueue
    from agent.core.served_line import ServedLine
    from agent.core.standing import Standings
    from agent.core.turns import Turns

SPECULATIONS = 32  # arbitrary: enough for every executor's last few batches
PATIENCE = 0.5  # of the overtaking bound: a head that has waited for longer has no time any more; arbitrary, too


@dataclass(slots=True, eq=False)
class Supply:
    _queues: Mapping[int, ExecutorQueue]
    _placement: Placement
    _turns: Turns
    _standings: Standings
    _batches: Batches
    _policy: Policy
    _limits: Limits
    _short: set[str] = field(default_factory=set)  # memories where a claim that is not overdue found no room this time
    _initial: deque[Wish] = field(default_factory=deque)
    _waiting: int = 0  # of these, for room or the end of a pause, as of the latest look
    _speculations: deque[Wish] = field(default_factory=lambda: deque(maxlen=SPECULATIONS))

    # -- what is to be had when there is room --

    @property
    def has_to_place(self) -> bool:
        """False where all that is left waits for room, or for the end of a pause."""
        return len(self._initial) > self._waiting

    def place_all(self, line: ServedLine, now: float) -> None:
        self._initial.extend(self._first_wishes(line, now))

    def place(self, expert: str, spec: ExecutorSpec, line: ServedLine, now: float) -> None:
        self._initial.append(Wish(spec, expert, line.matrix.experts[spec.processor][expert], now, now))

    def place_pinned(self, expert: str, line: ServedLine, now: float) -> bool:
        """Place a pinned expert at its home; False for any other, which is loaded when it is asked for."""
        home = line.homes.get(expert)
        if home is not None:
            self.place(expert, home, line, now)
        return home is not None

    def change_line(self, before: ServedLine, line: ServedLine, now: float, *, places: bool) -> None:
        """What left the line is not wished for any more; ``places``: what is new, or pinned now, is placed."""
        for waiting in (self._initial, self._speculations):
            staying = [wish for wish in waiting if wish.expert not in line.retired]
            waiting.clear()
            waiting.extend(staying)
        if places:
            known, at_home = before.graph.experts, line.homes.keys() - before.homes.keys()
            wishes = self._first_wishes(line, now)
            self._initial.extend(wish for wish in wishes if wish.expert not in known or wish.expert in at_home)

    def stop(self) -> None:
        self._initial.clear()
        self._speculations.clear()

    def speculate(self, spec: ExecutorSpec, expert: str, line: ServedLine, now: float) -> None:
        if not self._policy.overlapping:
            return
        for name in line.graph.subsequents(expert):
            profile = line.matrix.experts[spec.processor].get(name)
            if profile is not None:
                self._speculations.append(Wish(spec, name, profile, now, now))

    def _first_wishes(self, line: ServedLine, now: float) -> Iterator[Wish]:
        profiles = {processor: dict(experts) for processor, experts in line.matrix.experts.items()}
        executors = [queue.spec for queue in self._queues.values()]
        pinned = [(spec, expert) for expert, spec in line.homes.items()]
        served = line.graph.experts - line.retired - line.graph.in_shadow
        usage = {expert: line.matrix.usage.get(expert, 0.0) for expert in served}
        placed = initial_placement(usage, executors, profiles) if self._policy.placing else []
        for spec, expert in pinned + placed:
            yield Wish(spec, expert, profiles[spec.processor][expert], now, now)

    # -- what is claimed now --

    def claim_overdue(self, now: float, effects: list[Effect]) -> set[str]:
        """Claim for overdue heads; the memories that are full: where an older claim waits for room."""
        full: set[str] = set()
        self._short.clear()
        if self._policy.bounded:
            for wish in overdue(self._queues.values(), now - self._limits.max_overtake_s):
                self._claim_overdue_one(wish, full, now, effects)
        return full

    def claim(self, full: set[str], line: ServedLine, now: float, effects: list[Effect]) -> set[str]:
        """Claim for all the rest, once every batch that can has started; the memories that are full or short."""
        for wish in demands(self._queues.values()):
            if self._policy.overlapping or not self._batches.is_running(wish.spec.id):
                self._claim_one(wish, self._demand(wish, now), full, now, effects)
        if self._policy.overlapping:
            self._prefetch(full, now, effects)
        lacking = full | self._short
        self._load_speculations(lacking, now, effects)
        self._load_placements(lacking, line, now, effects)
        return lacking

    def _demand(self, wish: Wish, now: float) -> Claim:
        """How strongly a head asks. One that has time takes free room only while its executor has other work.

        Its victim is chosen later then, knowing more of the queue. Behind a held batch a head asks as a later group.
        """
        executor = wish.spec.id
        if self._batches.is_holding(executor):
            return Claim.EARLY if self._has_time(wish, now) else Claim.PREFETCH
        if not self._policy.overlapping or not self._batches.is_running(executor) or not self._has_time(wish, now):
            return Claim.DEMAND
        return Claim.EARLY if self._turns.is_anything_runnable(self._queues[executor]) else Claim.PATIENT

    def _has_time(self, wish: Wish, now: float) -> bool:
        """Is the wish young, and its queue short? A long queue is run in order.

        Never on a device with a memory in front of it: its early loads come from there, not from the SSD.
        """
        if self._placement.pools[wish.spec.pool].spec.cache is not None:
            return False
        bound_s, length_s = self._limits.max_overtake_s, self._queues[wish.spec.id].length_s(now)
        is_long = length_s > min(bound_s, self._limits.long_queue_s)
        return now - wish.since_s < PATIENCE * bound_s and not is_long

    def _prefetch(self, full: set[str], now: float, effects: list[Effect]) -> None:
        """Load for the groups behind the heads while a link is free; in a short memory, evict nothing for them."""
        passed: set[str] = set()  # memories where an earlier group waits for a busy link
        for wish in upcoming(self._queues.values(), self._limits.prefetch_groups, self._placement.pools):
            claim = Claim.BYPASS if wish.spec.pool in passed else Claim.PREFETCH
            if self._has_time(wish, now):
                claim = Claim.EARLY
            if wish.spec.pool in self._short:
                answer = self._take_free(wish, claim, now, effects)
            else:
                answer = self._claim_one(wish, claim, full, now, effects)
            if answer is Answer.BUSY:
                if not self._placement.may_prefetch(full | self._short):
                    return
                passed.add(wish.spec.pool)

    def _claim_overdue_one(self, wish: Wish, full: set[str], now: float, effects: list[Effect]) -> None:
        if self._placement.is_under_way(wish):
            return
        is_first = wish.spec.pool not in full
        answer = self._claim_one(wish, Claim.OVERDUE, full, now, effects)
        if answer in (Answer.NO_ROOM, Answer.BUSY):
            full.add(wish.spec.pool)
            self._placement.keep_free(wish)
        if answer is Answer.NO_ROOM and is_first:
            self._placement.hold(wish)

    def _claim_one(self, wish: Wish, claim: Claim, full: set[str], now: float, effects: list[Effect]) -> Answer:
        if wish.spec.pool in full:
            return self._stage(wish, claim, now, effects)
        answer = self._placement.bring(wish, claim, now, effects)
        if answer is Answer.NO_ROOM and claim not in (Claim.OVERDUE, Claim.EARLY, Claim.PATIENT):
            self._short.add(wish.spec.pool)
        return answer

    def _take_free(self, wish: Wish, claim: Claim, now: float, effects: list[Effect]) -> Answer:
        """Load into free room of a short memory, by way of the memory in front as far as that has room."""
        staged = self._stage(wish, claim, now, effects)
        if staged not in (Answer.HERE, Answer.NO_ROOM):
            return staged
        return self._placement.bring(wish, Claim.EARLY, now, effects)

    def _stage(self, wish: Wish, claim: Claim, now: float, effects: list[Effect]) -> Answer:
        stages = claim in (Claim.PREFETCH, Claim.BYPASS)
        return self._placement.stage(wish, now, effects) if stages else Answer.NO_ROOM

    def _load_speculations(self, full: set[str], now: float, effects: list[Effect]) -> None:
        while self._speculations:
            wish = self._speculations.popleft()
            if wish.spec.pool not in full and self._standings.may_load(wish.expert, now):
                self._placement.bring(wish, Claim.SPARE, now, effects)

    def _load_placements(self, full: set[str], line: ServedLine, now: float, effects: list[Effect]) -> None:
        """Load as far as there is room and a link; a pinned expert may evict others, and waits for room."""
        self._waiting = 0
        for _ in range(len(self._initial)):
            wish = self._initial.popleft()
            if not self._standings.may_load(wish.expert, now):
                continue
            is_full, is_pinned = wish.spec.pool in full, wish.expert in line.homes
            claim = Claim.PINNED if is_pinned else Claim.SPARE
            answer = Answer.NO_ROOM if is_full else self._placement.bring(wish, claim, now, effects)
            if answer is Answer.BUSY:
                self._initial.appendleft(wish)
                return
            if answer in (Answer.NO_ROOM, Answer.WAIT) and is_pinned:
                self._initial.append(wish)
                self._waiting += 1
