"""The Engine's promises, over random lines, traces, budgets, answers and failures, in any order of answers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from agent.core import events
from agent.core.effects import (
    Assigned,
    Complete,
    Evict,
    Fail,
    LeasesChanged,
    Preempt,
    Prepare,
    Standing,
    StandingChanged,
    StartBatch,
    StartLoad,
)
from agent.core.engine import Engine
from agent.core.failures import LONGEST_PAUSE_S
from agent.core.performance import (
    SSD,
    ExecutorSpec,
    ExpertProfile,
    Footprint,
    Limits,
    Performance,
    PerformanceMatrix,
    PoolSpec,
    PreparedForm,
    SharedTensors,
)
from agent.core.policy import PRESETS, Assigning
from agent.core.request import GAVE_WAY, IMAGE, Precedence, Work
from experts.expert import Prediction, Rejected, Verdict
from experts.graph import ExpertGraph, RouteStep
from tests.agent.core.ahead_books import AheadBooks
from tests.agent.core.shell import Shell

OK = frozenset({"ok"})
MAX_OVERTAKE_S = 1.0
CPU_ONLY, SPLIT, UNIFIED = {"cpu": "host"}, {"cpu": "host", "gpu": "device"}, {"cpu": "host", "gpu": "host"}
BOXES = (CPU_ONLY, SPLIT, UNIFIED)
ANSWERS_PER_REQUEST = 50  # three times what any needs
TEXTS = (0, 0, 1, 2, 3)  # experts whose requests count in tokens
FAMILIES = ((None, None, None), ("f", "f", "f"), ("f", "g", "f"))  # those that may run together
FORMS = (PreparedForm("small", 1), PreparedForm("large", 5), PreparedForm("huge", 17))
WORKS = (
    IMAGE,
    Work(2, 1, 3),
    Work(1, 3, 6),
    Work(0, 2, 2),
    Work(1, 2, 12),  # it fits in few memories
    Work(1, 3, 6, lease=2),  # they may need more than they begin with
    Work(2, 4, 10, lease=3),
)


@dataclass(frozen=True)
class Setup:
    graph: ExpertGraph
    profile: PerformanceMatrix
    executors: tuple[ExecutorSpec, ...]
    limits: Limits
    policy: str
    retired: frozenset[str] = frozenset()

    @property
    def served(self):
        return sorted(self.graph.experts - self.retired)

    @property
    def asked_executors(self):
        return self.executors[:1] if PRESETS[self.policy].assigning is Assigning.FIRST else self.executors

    def engine(self):
        return Engine(self.graph, self.profile, self.executors, PRESETS[self.policy], self.limits)


def image_performance(draw):
    return Performance(0.01, 0.02, draw(st.integers(1, 4)), draw(st.integers(0, 2)), draw(st.integers(0, 1)))


def text_performance(draw):
    return replace(image_performance(draw), K_prompt_s=0.001, K_output_s=0.01, lease_bytes=draw(st.integers(1, 3)))


@st.composite
def setups(draw, policies=tuple(PRESETS), texts_only=False):
    """``texts_only``: of a family, with an expert of images beside them."""
    classifiers = [f"cls/{n}" for n in range(1 if texts_only else draw(st.integers(1, 6)))]
    detectors = [] if texts_only else [f"det/{n}" for n in range(draw(st.integers(0, 2)))]
    shadows = {name: f"new/{name[4:]}" for name in classifiers[: draw(st.integers(0, 2))]}
    texts = [f"llm/{n}" for n in range(draw(st.integers(2, 3) if texts_only else st.sampled_from(TEXTS)))]
    experts = classifiers + detectors + texts + sorted(shadows.values())
    routes = {f"t{number}": (RouteStep(text, OK),) for number, text in enumerate(texts)}
    for number, classifier in enumerate(classifiers):
        steps = [RouteStep(classifier, OK, 0.5)]
        if detectors and draw(st.booleans()):
            steps.append(RouteStep(draw(st.sampled_from(detectors)), OK))
        if texts and draw(st.booleans()):
            steps.append(RouteStep(draw(st.sampled_from(texts)), OK))
        routes[f"c{number}"] = tuple(steps)
    shared = SharedTensors("trunk", 3)
    footprints = {
        name: Footprint(draw(st.integers(1, 10)), (shared,) if draw(st.booleans()) else ()) for name in experts
    }
    performances = {name: text_performance(draw) if name in texts else image_performance(draw) for name in experts}
    if texts_only:
        most = draw(st.integers(3, 6))
        performances |= {name: replace(performances[name], max_batch=most, workspace_bytes=0) for name in texts}
    families = dict(zip(texts, draw(st.sampled_from(FAMILIES[texts_only:])), strict=False))
    prepared = {name: draw(st.sampled_from(FORMS)) for name in experts if name not in texts}
    same_precision = draw(st.booleans())
    processors = draw(st.sampled_from(BOXES))
    profiles = {}
    for processor in processors:
        precision = "fp32" if processor == "cpu" or same_precision else "fp16"
        load_s = {SSD: 0.3, "host": 0.05} if processor == "gpu" else {SSD: 0.2}
        unable = draw(st.sets(st.sampled_from(experts), max_size=2)) if processor == "gpu" else set()
        profiles[processor] = {
            name: ExpertProfile(
                f"{name}@{precision}",
                performances[name],
                footprints[name],
                load_s,
                families.get(name),
                prepared.get(name),
            )
            for name in experts
            if name not in unable
        }
    executors = tuple(
        ExecutorSpec(number, processor, processors[processor])
        for number, processor in enumerate(
            draw(st.lists(st.sampled_from(sorted(processors)), min_size=1, max_size=1 if texts_only else 4))
        )
    )
    largest = 3 + max(footprint.own_bytes for footprint in footprints.values())  # of any line: see successor
    pinned = frozenset(draw(st.lists(st.sampled_from(sorted({*experts} - {*shadows.values()})), max_size=1)))
    pools = tuple(
        PoolSpec(
            name,
            expert_bytes=3 * largest + draw(st.integers(0, 30)),
            workspace_bytes=3 * len(executors) + draw(st.integers(0, 8)),
            cache="host" if name == "device" else None,
            is_one_piece=name == "device" and draw(st.booleans()),
            lease_bytes=draw(st.integers(6, 90 if texts_only else 30)) if texts else 0,
        )
        for name in dict.fromkeys(processors.values())
    )
    limits = Limits(
        pools,
        MAX_OVERTAKE_S,
        loads_in_flight=draw(st.integers(1, 3)),
        prepared_bytes=draw(st.sampled_from((0, 3, 16, 50, 200))),
        pinned=pinned,
    )
    usage = {name: draw(st.floats(0, 1)) for name in experts}
    return Setup(
        ExpertGraph(experts, routes, shadows),
        PerformanceMatrix(profiles, usage),
        executors,
        limits,
        draw(st.sampled_from(policies)),
    )


def next_line(setup, draw, generation, *, is_behind):
    """Another line for the same box: experts stay, are replaced by others, or go; their components stay or go.

    ``is_behind``: something still needs experts of an earlier one; if not, nothing is said of those any more.
    """
    fates = {expert: draw(st.sampled_from(("stays", "stays", "replaced", "goes"))) for expert in setup.served}
    if all(fate == "goes" for fate in fates.values()):
        fates[setup.served[0]] = "replaced"
    names = {e: e if fate == "stays" else f"{e}+{generation}" for e, fate in fates.items() if fate != "goes"}
    known = setup.graph.experts if is_behind else set(setup.served)
    profiles = {
        processor: {name: row for name, row in column.items() if name in known}
        for processor, column in setup.profile.experts.items()
    }
    for old, new in names.items():
        footprint, performance = successor(setup, old, draw)
        for column in profiles.values():
            if new != old and old in column:
                copy = f"{new}@{column[old].copy.rpartition('@')[2]}"
                column[new] = replace(column[old], copy=copy, footprint=footprint, performance=performance)
    routes = {
        component: tuple(replace(step, expert=names[step.expert]) for step in steps)
        for component, steps in setup.graph.routes.items()
        if all(step.expert in names for step in steps)
    } or {"c0": (RouteStep(min(names.values()), OK, 0.5),)}
    retired = (setup.graph.experts | setup.retired) - set(names.values())
    asked = {step.expert for steps in routes.values() for step in steps}
    pairs = ((names[e], names[s]) for e, s in setup.graph.shadows.items() if {e, s} <= names.keys())
    shadows = {e: s for e, s in pairs if s not in asked}
    pinned = frozenset(draw(st.lists(st.sampled_from(sorted(set(names.values()) - set(shadows.values()))), max_size=1)))
    return replace(
        setup,
        graph=ExpertGraph([*names.values(), *retired], routes, shadows),
        profile=PerformanceMatrix(profiles, {name: draw(st.floats(0, 1)) for name in names.values()}),
        limits=replace(setup.limits, pinned=pinned),
        retired=retired,
    )


def successor(setup, old, draw):
    """Costs of an expert that replaces another: no more than the largest expert ever."""
    rows = [row for column in setup.profile.experts.values() for row in column.values()]
    own_bytes = draw(st.integers(1, max(row.footprint.own_bytes for row in rows)))
    shared = draw(st.sampled_from(rows)).footprint.shared
    performance = text_performance(draw) if old.startswith("llm/") else image_performance(draw)
    return Footprint(own_bytes, shared), replace(performance, workspace_base_bytes=1)


@st.composite
def choosing(draw):
    """Draws for a play, without the record that st.data() keeps of every draw; a play that fails shows its events."""
    return draw


@dataclass
class Books(Shell):
    """Answers all loads and batches in an order that hypothesis chooses, and keeps books."""

    setup: Setup
    draw: object
    may_fail: bool
    queued: dict[int, tuple[int, str, float]] = field(default_factory=dict)  # request -> executor, expert, since
    assigned: dict[int, tuple[int, str, float]] = field(default_factory=dict)  # the same, since it came to its expert
    work: dict[int, Work] = field(default_factory=dict)
    begun: dict[int, tuple[str, int]] = field(default_factory=dict)  # request -> memory and bytes of its lease
    left: dict[int, Work] = field(default_factory=dict)  # of the step that each is at
    passed: dict[tuple[int, str], list[bool | None]] = field(default_factory=dict)  # -> quanta past who goes on
    kinds: dict[int, bool] = field(default_factory=dict)  # executor -> was its last batch a quantum?
    standings: dict[str, tuple[Standing, float]] = field(default_factory=dict)  # of experts, and until when they pause
    shares: dict[str, int] = field(default_factory=dict)  # memory -> what may be leased there, since it changed
    short: set[str] = field(default_factory=set)  # memories of which the box has less than was planned with
    generation: int = 1
    before_change: set[int] = field(default_factory=set)  # batches that were started under an earlier line
    offered: dict[int, str] = field(default_factory=dict)  # request of idle precedence -> expert
    spare: set[tuple[str, str]] = field(default_factory=set)  # (memory, copy) loaded for such requests alone
    held: int = 0  # batches that were started behind another one
    ahead: AheadBooks = field(init=False)

    def __post_init__(self):
        super().__init__(self.setup.engine(), {spec.id: spec for spec in self.setup.executors})
        self.ahead = AheadBooks(self.setup.limits.prepared_bytes)
        self.ahead.know(self.setup.profile)

    @property
    def asked(self):
        """Requests that are not of idle precedence."""
        return self.arrived.keys() - self.offered.keys()

    def profile_of(self, executor, expert):
        return self.setup.profile.experts[self.executors[executor].processor][expert]

    def performance_of(self, executor, expert):
        return self.profile_of(executor, expert).performance

    def is_resident(self, executor, expert):
        return self.profile_of(executor, expert).copy in self.resident[self.pool_of(executor)]

    def handle(self, event, at=None):
        note((self.now, event))
        return super().handle(event, at)

    def check(self):
        super().check()
        self.check_books()
        self.check_prepared()
        if PRESETS[self.setup.policy].overlapping:
            self.check_nobody_idles()

    def take(self, effect):
        self.ahead.take(effect)
        if isinstance(effect, StandingChanged):
            self.check_standing(effect)
        elif isinstance(effect, Prepare):
            assert effect.executor == self.assigned[effect.request][0]
        elif isinstance(effect, StartLoad):
            self.check_is_asked(effect.expert)
            if any(self.queued[each][1] == effect.expert for each in self.offered.keys() & self.queued.keys()):
                self.spare.add((effect.pool, effect.copy))
        elif isinstance(effect, Evict):
            here = [batch for batch in self.running.values() if self.pool_of(batch.executor) == effect.pool]
            busy = {copy for batch in here for copy in batch.copies}
            copied = {load.copy for load in self.loading.values() if load.source == effect.pool}
            assert effect.copy not in busy | copied
            self.check_pin(effect)
            self.check_spare(effect, busy | copied)
            self.spare.discard((effect.pool, effect.copy))
        elif isinstance(effect, StartBatch):
            self.check_batch(effect.batch)
            self.check_precedence(effect.batch)
            self.begin(effect.batch)
        elif isinstance(effect, Assigned):
            self.check_is_asked(effect.expert)
            assert effect.request not in self.begun
            self.assigned[effect.request] = (effect.executor, effect.expert, self.now)
            self.queued[effect.request] = self.assigned[effect.request]
        elif isinstance(effect, LeasesChanged):
            assert effect.before_bytes == self.share_of(effect.pool)
            self.shares[effect.pool] = effect.after_bytes
            assert self.leased(effect.pool) <= effect.after_bytes
            if effect.after_bytes < effect.before_bytes:
                self.check_nobody_needs_more(effect.pool)
        elif isinstance(effect, Preempt):
            pool, _ = self.begun.pop(effect.request)
            assert pool == self.pool_of(effect.executor)
            self.left[effect.request] = self.left[effect.request].restarted()
        elif isinstance(effect, Complete | Fail):
            assert effect.request not in self.offered or effect.outcome.verdict is Verdict.UNKNOWN
            self.queued.pop(effect.request, None)
            self.begun.pop(effect.request, None)
        super().take(effect)

    def begin(self, batch):
        for request, expert in experts_of(batch).items():
            executor, queued_for, _ = self.queued.pop(request)
            assert (executor, queued_for) == (batch.executor, expert)
            if self.runs_in_quanta(executor, expert) and request not in self.begun:
                self.begun[request] = self.pool_of(executor), self.lease_of(request, executor, expert)
        assert self.leased(self.pool_of(batch.executor)) <= self.share_of(self.pool_of(batch.executor))

    def runs_in_quanta(self, executor, expert):
        return self.performance_of(executor, expert).lease_bytes > 0

    def lease_of(self, request, executor, expert):
        return self.performance_of(executor, expert).lease_bytes * self.left[request].leased

    def leased(self, pool):
        return sum(size for name, size in self.begun.values() if name == pool)

    def share_of(self, pool):
        """Bytes that may be leased there: as planned, or as changed since."""
        planned = next(spec.lease_bytes for spec in self.setup.limits.pools if spec.name == pool)
        assert self.shares.get(pool, planned) <= planned
        return self.shares.get(pool, planned)

    def check_nobody_needs_more(self, pool):
        """Each waiting request finds room for its largest lease, once the others have ended."""
        for request, (executor, expert, _) in self.queued.items():
            if self.pool_of(executor) == pool and self.runs_in_quanta(executor, expert):
                most_bytes = self.performance_of(executor, expert).most_for(self.left[request])
                assert most_bytes <= self.share_of(pool)

    def can_begin(self, request):
        """Is a request that has not begun the next of its expert's there, with a place in a batch and its lease free?

        Free is what is not held, but for what all need who came max_overtake_s or more before it.
        """
        executor, expert, since = self.queued[request]
        performance, pool = self.performance_of(executor, expert), self.pool_of(executor)
        if not performance.lease_bytes:
            return True
        there = [(other, who) for who, (*where, other) in self.queued.items() if where == [executor, expert]]
        ongoing = sum(who in self.begun for _, who in there)
        first = min((who in self.begun, other) for other, who in there)
        firsts = [who for other, who in there if (who in self.begun, other) == first]  # of one moment: in any order
        if request not in firsts:
            return False
        if ongoing and (performance.workspace_bytes or ongoing >= performance.max_batch):
            return False
        size = max(self.lease_of(each, executor, expert) for each in firsts)
        return not size or size + self.owed_before(since, pool) <= self.share_of(pool) - self.leased(pool)

    def owed_before(self, since, pool, but=()):
        """Bytes of all requests that wait for a lease there and came max_overtake_s or more earlier."""
        if not PRESETS[self.setup.policy].bounded:
            return 0
        return sum(
            self.lease_of(request, executor, expert)
            for request, (executor, expert, other) in self.queued.items()
            if self.pool_of(executor) == pool
            and self.runs_in_quanta(executor, expert)
            and not (request in self.begun or request in but)
            and other + MAX_OVERTAKE_S <= since
        )

    def check_turns(self, batch):
        """Who goes on is passed by no two batches of images in a row, and by one that begins at most until somebody
        goes on; with an overlapping policy no image is passed by two quanta in a row."""
        is_text, goes_on = batch.quantum_s is not None, bool(self.begun.keys() & set(batch.requests))
        here = [
            (request, expert)
            for request, (executor, expert, _) in self.queued.items()
            if executor == batch.executor and self.is_resident(executor, expert)
        ]
        is_held = self.is_room_awaited(self.pool_of(batch.executor))
        is_overlapping = PRESETS[self.setup.policy].overlapping
        if is_text and self.kinds.get(batch.executor) and is_overlapping and not is_held:
            assert all(self.runs_in_quanta(batch.executor, expert) for _, expert in here)
        self.kinds[batch.executor] = is_text
        waiting = {expert for request, expert in here if request in self.begun}
        for expert in self.setup.graph.experts:
            key = batch.executor, expert
            if goes_on or expert not in waiting:
                self.passed.pop(key, None)
                continue
            past = self.passed.setdefault(key, [])
            past.append(None if is_held else is_text)
            if not is_held:
                assert past.count(True) <= 1
                assert (False, False) not in pairwise(past)
                assert is_overlapping or len(past) - past.count(None) == 1

    def check_standing(self, effect):
        """No expert leaves quarantine, or serves again without having been on probation; pauses are bounded."""
        before, _ = self.standings.get(effect.expert, (Standing.SERVING, 0.0))
        assert before is not Standing.QUARANTINE
        assert effect.reason
        if effect.standing is Standing.PROBATION:
            assert 0.0 < effect.retry_s <= LONGEST_PAUSE_S
        else:
            assert effect.retry_s is None
            assert before is Standing.PROBATION or effect.standing is Standing.QUARANTINE
        self.standings[effect.expert] = (effect.standing, self.now + (effect.retry_s or 0.0))

    def check_is_asked(self, expert):
        """Nothing moves for an expert in quarantine, or on probation before its pause is over."""
        standing, until_s = self.standings.get(expert, (Standing.SERVING, 0.0))
        assert standing is Standing.SERVING or (standing is Standing.PROBATION and self.now >= until_s - 1e-9)

    def check_pin(self, effect):
        """A pinned expert that serves never leaves the memory of the first executor that can run it."""
        standing, _ = self.standings.get(effect.expert, (Standing.SERVING, 0.0))
        if effect.expert not in self.setup.limits.pinned or standing is not Standing.SERVING:
            return
        able = [
            each for each in self.setup.asked_executors if effect.expert in self.setup.profile.experts[each.processor]
        ]
        at_home = [each.processor for each in able if each.pool == able[0].pool]
        copies = {self.setup.profile.experts[processor][effect.expert].copy for processor in at_home}
        assert effect.pool != able[0].pool or effect.copy not in copies  # others are cached there for another memory

    def check_batch(self, batch):
        assert batch.requests
        self.check_parts(batch)
        self.check_is_next(batch)
        assert len(set(batch.requests)) == len(batch.requests)
        quantum_s = self.setup.limits.quantum_s if self.runs_in_quanta(batch.executor, batch.expert) else None
        assert batch.quantum_s == quantum_s
        self.check_kept_leases(batch)
        if PRESETS[self.setup.policy].bounded and not self.may_fail:
            self.check_overtaking(batch)
        self.check_turns(batch)

    def check_is_next(self, batch):
        """Its executor is idle, or runs one batch of the line's images and holds none: then this one is full, is what
        stood first there, needs no more memory than that has, and its images were begun."""
        before = [other for other in self.running.values() if other.executor == batch.executor]
        if not before:
            return
        (running,) = before
        self.held += 1
        assert PRESETS[self.setup.policy].overlapping
        assert running.requests[0] not in self.offered
        assert running.quantum_s is None
        assert batch.quantum_s is None
        assert not any(self.runs_in_quanta(*row[:2]) for row in self.queued.values() if row[0] == batch.executor)
        assert batch.workspace_bytes <= running.workspace_bytes
        assert self.ahead.told.keys() >= set(batch.requests)
        assert not any(
            row[:2] == (batch.executor, batch.expert) and row[2] < self.queued[last][2]
            for request, row in self.queued.items()
            if request not in batch.requests
            for last in batch.requests
        )
        row = self.performance_of(batch.executor, batch.expert)
        if not self.may_fail and not row.workspace_bytes:
            assert len(batch.requests) == row.max_batch
        self.ahead.hold(batch)

    def check_precedence(self, batch):
        """A request of idle precedence runs alone, while no other is in flight; its copy stays spare."""
        idle = self.offered.keys() & set(batch.requests)
        if idle:
            assert idle == set(batch.requests)
            assert len(idle) == 1
            assert self.asked <= self.outcomes.keys()
            assert not self.running
        else:
            self.spare -= {(self.pool_of(batch.executor), copy) for copy in batch.copies}

    def check_spare(self, effect, busy):
        """Only spare copies leave for a request of idle precedence. A spare copy that no request waits for leaves
        before any other, and no other leaves for want of room while a spare one is in use or on its way there. A pinned
        expert's copy is spare no more."""
        wanted = effect.decision.for_copy
        if (effect.pool, effect.copy) in self.spare or wanted in ("", effect.copy):
            return
        assert wanted.rpartition("@")[0] not in {row[1] for each, row in self.queued.items() if each in self.offered}
        kept = {expert for _, expert, _ in self.queued.values()} | set(self.setup.limits.pinned)
        spare = {copy for pool, copy in self.spare if pool == effect.pool and copy.rpartition("@")[0] not in kept}
        assert not spare & (self.resident[effect.pool] - busy)
        assert not spare & busy

    def check_parts(self, batch):
        """Several experts run together only where they are one family, and each request is of one."""
        parts = batch.all_portions
        assert parts[0][:2] == (batch.expert, batch.copy)
        assert tuple(request for part in parts for request in part.requests) == batch.requests
        assert len({part.expert for part in parts}) == len({part.copy for part in parts}) == len(parts)
        assert all(part.requests for part in parts)
        rows = [self.profile_of(batch.executor, part.expert) for part in parts]
        assert [row.copy for row in rows] == [part.copy for part in parts]
        if len(parts) > 1:
            assert len({row.family for row in rows}) == 1
            assert rows[0].family is not None
            assert all(row.performance.runs_in_quanta for row in rows)
        most = min(row.performance.max_batch for row in rows)
        assert len(batch.requests) <= most
        assert batch.workspace_bytes == max(row.performance.workspace_for(len(batch.requests)) for row in rows)

    def check_overtaking(self, batch):
        """A request that begins passes none that can begin and came max_overtake_s or more before it."""
        beginning = [self.queued[request][2] for request in batch.requests if request not in self.begun]
        for request, (executor, expert, since) in self.queued.items():
            if executor != batch.executor or request in batch.requests or request in self.begun:
                continue
            if batch.quantum_s is None and self.kinds.get(executor) and self.runs_in_quanta(executor, expert):
                continue  # images have the batch after a quantum
            if self.is_resident(executor, expert) and self.can_begin(request):
                assert max(beginning, default=-1.0) < since + MAX_OVERTAKE_S

    def check_kept_leases(self, batch):
        """A request that begins leaves room for the leases of all that came max_overtake_s or more before it."""
        pool, experts = self.pool_of(batch.executor), experts_of(batch)
        taken = self.leased(pool)
        for request in batch.requests if batch.quantum_s is not None else ():
            if request not in self.begun:
                size = self.lease_of(request, batch.executor, experts[request])
                owed = self.owed_before(self.queued[request][2], pool, batch.requests)
                taken += size
                assert not size or taken + owed <= self.share_of(pool)

    def check_books(self):
        statistics = self.engine.statistics()
        told = {standing: {e for e, (each, _) in self.standings.items() if each is standing} for standing in Standing}
        assert statistics.quarantined.keys() == told[Standing.QUARANTINE]
        assert statistics.on_probation.keys() == told[Standing.PROBATION]
        for pool in self.engine.statistics().pools:
            assert pool.used_bytes <= pool.expert_bytes
            self.check_budget(pool)
            assert pool.workspace_used_bytes <= pool.workspace_bytes
            assert pool.lease_used_bytes == self.leased(pool.name) <= pool.lease_bytes == self.share_of(pool.name)

    def check_prepared(self):
        """The next images of each queue are begun, as far as there is room for far ones."""
        lines = {}
        for request, (executor, _, _) in self.queued.items():
            if request not in self.begun:
                lines.setdefault(executor, []).append(request)
        used_bytes = self.engine.statistics().prepared.used_bytes
        self.ahead.check(used_bytes, self.setup.graph, lines if self.generation == 1 else {})

    def check_nobody_idles(self):
        for request, (executor, expert, _) in self.queued.items():
            idles = self.on(executor) is None and self.is_resident(executor, expert)
            pool = self.pool_of(executor)
            if idles and (request in self.begun or self.can_begin(request)):
                assert self.is_room_awaited(pool) or self.is_workspace_awaited(pool)

    def is_room_awaited(self, pool):
        """Has a request waited longer than the bound for an expert that is not in this memory?"""
        return any(
            self.pool_of(executor) == pool
            and self.now - since >= MAX_OVERTAKE_S
            and not self.is_resident(executor, expert)
            for executor, expert, since in self.queued.values()
        )

    def is_workspace_awaited(self, pool):
        """Does a batch run there that took more than the experts of a later line leave it?"""
        return any(self.pool_of(self.running[batch].executor) == pool for batch in self.before_change)

    def check_budget(self, pool):
        """Each expert that has to run there fits into the budget."""
        processors = {spec.processor for spec in self.setup.asked_executors if spec.pool == pool.name}
        rows = [row for processor in processors for row in self.setup.profile.experts[processor].values()]
        planned = next(spec for spec in self.setup.limits.pools if spec.name == pool.name)
        largest = max((row.footprint.total_bytes for row in rows), default=0)
        assert largest <= pool.expert_bytes <= planned.expert_bytes
        assert pool.expert_bytes == planned.expert_bytes or not planned.is_one_piece

    def change_line(self):
        self.generation += 1
        is_behind = self.engine.statistics().serves_earlier_lines
        self.setup = next_line(self.setup, self.draw, self.generation, is_behind=is_behind)
        self.before_change = set(self.running)
        setup = self.setup
        self.ahead.know(setup.profile)
        self.handle(events.LineChanged(setup.graph, setup.profile, setup.limits.pinned, setup.retired))

    def check_retired_are_gone(self):
        """No memory holds an expert of an earlier line once no request needs it."""
        while self.loading or self.running:
            self.answer()
        for pool in self.engine.statistics().pools:
            assert not self.setup.retired & {copy.rpartition("@")[0] for copy in pool.resident}

    def answer(self):
        wakeup_s = self.engine.next_wakeup_s()
        if not self.loading and not self.running:
            assert wakeup_s is not None, "requests are open, nothing is under way, and nothing is due"
            assert wakeup_s <= self.now + LONGEST_PAUSE_S, "only a budget that comes back may help"
        super().answer(lambda options: options[self.draw(st.integers(0, len(options) - 1))])

    def answer_load(self, number):
        fate = self.fate(self.loading[number].pool)
        if fate in (0, 1, 2):
            is_away = fate == 2 and number % 2 == 0
            self.handle(events.LoadFailed(number, "it did not come", fate == 1, fate == 0, is_away))
        else:
            super().answer_load(number)

    def answer_batch(self, number):
        batch = self.running[number]
        self.before_change.discard(number)
        for held in self.running.values():
            if held is not batch and held.executor == batch.executor:
                self.ahead.run(held)
        fate = self.fate(self.pool_of(batch.executor))
        if fate <= 3:  # what a failed batch held is queued again, until it ends or runs again
            for request in batch.requests:
                self.queued[request] = self.assigned[request]
                self.ahead.give_back(request, self.assigned[request][1])
        if fate <= 2:
            self.handle(events.BatchFailed(number, "broke", out_of_memory=fate == 0))
            return
        if batch.quantum_s is not None:
            self.handle(self.mistold(batch) if fate == 3 else self.progress(batch, fate))
            return
        results = tuple(self.result(fate) for _ in batch.requests)
        self.handle(events.Finished(number, results[:-1] if fate == 3 else results))

    def offer(self, shadow):
        number = 10**5 + len(self.offered)
        self.offered[number] = shadow
        self.work[number] = self.left[number] = IMAGE
        self.ahead.images.add(number)
        is_refused = not self.arrived.keys() <= self.outcomes.keys()
        self.handle(events.Arrived(number, expert=shadow, precedence=Precedence.IDLE))
        assert not is_refused or self.outcomes[number].reason == GAVE_WAY

    def progress(self, batch, fate):
        """The end of a quantum: an unfinished request has less work than before."""
        finished, unfinished, experts = [], [], experts_of(batch)
        for request in batch.requests:
            left = self.left[request]
            if left.output and self.draw(st.booleans()):
                self.left[request] = self.further(left)
                pool, size = self.begun[request]
                self.begun[request] = pool, max(size, self.lease_of(request, batch.executor, experts[request]))
                unfinished.append((request, self.left[request]))
                self.queued[request] = batch.executor, experts[request], self.now
            else:
                finished.append((request, self.result(fate)))
                self.left[request] = self.work[request]
                del self.begun[request]
        if not unfinished and self.draw(st.booleans()):
            return events.Finished(batch.id, tuple(result for _, result in finished))
        return events.Progressed(batch.id, tuple(finished), tuple(unfinished))

    def further(self, left):
        """Work after one more token; a lease that is not the largest may have to grow."""
        lease = left.lease if left.lease is None else left.lease + self.draw(st.sampled_from((0, 0, 1, 4)))
        return Work(0, left.output - 1, left.most, lease, left.held + left.prompt + 1)

    def mistold(self, batch):
        """An answer that misses a request, or names it twice."""
        both = tuple((request, self.left.get(request, IMAGE)) for request in batch.requests)
        return events.Progressed(batch.id, (), self.draw(st.sampled_from([both[1:], both + both[:1]])))

    def preempt(self, request):
        if request in self.queued and self.begun.pop(request, None):
            self.left[request] = self.left[request].restarted()
        self.handle(events.Preempted(request))

    def fate(self, pool):
        """How a load or a batch ends: 0 is out of memory, and most numbers are success."""
        if not self.may_fail:
            return 19
        if pool in self.short and self.draw(st.integers(0, 3)):
            return 0
        return self.draw(st.integers(0, 19))

    def result(self, fate):
        if fate == 4:
            return Rejected("not an image")
        return Prediction("ok" if self.draw(st.booleans()) else "bad", 0.9)

    def arrive(self, number, component, work=IMAGE):
        self.work[number] = self.left[number] = work
        if work is IMAGE:
            self.ahead.images.add(number)
        self.handle(events.Arrived(number, component, work=work))


def experts_of(batch):
    return {request: part.expert for part in batch.all_portions for request in part.requests}


def play(setup, draw, *, may_fail, requests=40):
    shell = Books(setup, draw, may_fail)
    shell.handle(events.Started())
    count = draw(st.integers(1, requests))
    texts = any(name.startswith("llm/") for name in setup.graph.experts)
    for number in range(count):
        components = [*sorted(shell.setup.graph.routes), *(["no-such-component"] if may_fail else [])]
        shell.arrive(number, draw(st.sampled_from(components)), draw(st.sampled_from(WORKS)) if texts else IMAGE)
        shell.now += draw(st.sampled_from([0.0, 0.004, 0.3]))
        for _ in range(draw(st.integers(0, 2))):
            if shell.loading or shell.running:
                shell.answer()
        interfere(shell, number)
    shell.short.clear()
    for turn in range(ANSWERS_PER_REQUEST * count):
        if shell.asked <= shell.outcomes.keys():
            return shell
        shell.now += 0.01
        shell.answer()
        if turn < count:
            interfere(shell, count - 1)
    raise AssertionError(f"{len(shell.asked - shell.outcomes.keys())} of {count} requests wait for ever")


def interfere(shell, number):
    """Events beside arrivals and answers. ``number``: the latest request."""
    draw = shell.draw
    if draw(st.integers(0, 9)) == 0:
        shell.handle(events.Cancelled(draw(st.integers(0, number))))
    if draw(st.integers(0, 9)) == 0:
        expert = draw(st.sampled_from(shell.setup.served))
        shell.handle(draw(st.sampled_from([events.Wanted(expert), events.Unwanted(expert)])))
    if draw(st.integers(0, 9)) == 0:
        pool = draw(st.sampled_from(shell.setup.limits.pools))
        shell.handle(events.Reserved(pool.name, draw(st.integers(0, pool.expert_bytes))))
    if shell.begun and draw(st.integers(0, 4)) == 0:
        request = draw(st.sampled_from(sorted(shell.begun)))
        shell.handle(events.Cancelled(request)) if draw(st.booleans()) else shell.preempt(request)
    if shell.setup.graph.in_shadow:
        for _ in range(draw(st.integers(0, 3))):
            shell.offer(draw(st.sampled_from(sorted(shell.setup.graph.in_shadow))))
        if shell.offered and draw(st.integers(0, 9)) == 0:
            shell.handle(events.Cancelled(draw(st.sampled_from(sorted(shell.offered)))))
    if draw(st.integers(0, 14)) == 0:
        shell.change_line()
    if shell.may_fail and draw(st.integers(0, 9)) == 0:
        shell.handle(draw(st.sampled_from(odd_events(shell, number))))
    if shell.may_fail and draw(st.integers(0, 9)) == 0:
        shell.short ^= {draw(st.sampled_from([pool.name for pool in shell.setup.limits.pools]))}


def odd_events(shell, number):
    """Events of a confused, or a stopping, shell."""
    setup = shell.setup
    is_open = number not in shell.outcomes
    early = [key for key in shell.running if not shell.is_running(key)]
    return [
        *([events.Arrived(number, "c0")] if is_open else []),
        *([events.Arrived(number, expert="new/0", precedence=Precedence.IDLE)] if is_open else []),
        *(each for key in (10**6, *early) for each in (events.Finished(key, ()), events.BatchFailed(key, "early"))),
        events.Loaded(10**6),
        events.LoadFailed(10**6, "no such load", permanent=True),
        events.Progressed(10**6, (), ()),
        events.Preempted(10**6),
        events.Quarantined(min(setup.graph.experts), "somebody said so"),
        events.Quarantined("no/such-expert", "somebody said so"),
        events.Wanted("no/such-expert"),
        events.Unwanted("no/such-expert"),
        events.LineChanged(setup.graph, setup.profile, setup.limits.pinned, setup.retired),
        events.Drain(),
        events.Tick(),
    ]


# Short plays come first, as what they find is soon made as small as it can be. To do that with a long play takes
# minutes: one that fails is shown as it was found.
FOUND_AS_IT_IS = (Phase.explicit, Phase.reuse, Phase.generate)
BASE = settings(deadline=None, suppress_health_check=list(HealthCheck), report_multiple_bugs=False)
SHORT = settings(BASE, max_examples=25, phases=(*FOUND_AS_IT_IS, Phase.shrink))
SETTINGS = settings(BASE, phases=FOUND_AS_IT_IS)


@SHORT
@given(setups(), choosing())
def test_few_requests_all_end_under_any_fault(setup, draw):
    shell = play(setup, draw, may_fail=True, requests=4)
    assert shell.outcomes.keys() >= shell.asked


@SHORT
@given(setups(policies=("coserve",)), choosing())
def test_few_requests_are_never_overtaken_beyond_the_bound(setup, draw):
    play(setup, draw, may_fail=False, requests=6)


@SETTINGS
@given(setups(), choosing())
def test_every_request_ends_exactly_once_within_the_budgets_under_any_fault(setup, draw):
    shell = play(setup, draw, may_fail=True)
    statistics = shell.engine.statistics()
    assert shell.outcomes.keys() >= shell.asked
    assert statistics.in_flight == 0
    shell.check_retired_are_gone()
    shell.handle(events.Drain())
    while shell.loading or shell.running:
        shell.answer()
    assert shell.outcomes.keys() == shell.arrived.keys()  # what was offered ended once, at the latest then
    assert statistics.completed + statistics.failed == statistics.arrived == len(shell.asked)


@SETTINGS
@given(setups(), choosing())
def test_experts_outside_quarantine_serve_again_after_the_last_fault(setup, draw):
    """One request after the longest pause is the trial of every expert on its route; from then on none is refused."""
    shell = play(setup, draw, may_fail=True)
    shell.may_fail = False
    if shell.engine.statistics().is_draining:
        return
    setup = shell.setup
    shell.now += LONGEST_PAUSE_S
    able = set().union(*(setup.profile.experts[each.processor] for each in setup.asked_executors))
    for number, component in enumerate(2 * sorted(setup.graph.routes), start=1000):
        shell.arrive(number, component)
        while number not in shell.outcomes:
            shell.now += 0.01
            shell.answer()
        steps = {step.expert for step in setup.graph.routes[component]}
        if steps <= able - shell.engine.statistics().quarantined.keys():
            assert shell.outcomes[number].verdict in (Verdict.OK, Verdict.NG)
    asked = {setup.graph.first_expert(component) for component in setup.graph.routes}
    assert not asked & shell.engine.statistics().on_probation.keys()


@SETTINGS
@given(setups(policies=("coserve",)), choosing())
def test_no_request_is_overtaken_beyond_the_bound(setup, draw):
    play(setup, draw, may_fail=False, requests=60)


@SETTINGS
@given(setups(policies=("coserve", "coserve", "paper"), texts_only=True), choosing(), st.booleans())
def test_expert_family_requests_end_and_are_not_overtaken_beyond_the_bound(setup, draw, may_fail):
    shell = play(setup, draw, may_fail=may_fail, requests=50)
    assert shell.outcomes.keys() >= shell.asked
