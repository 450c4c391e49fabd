"""Executors that are lost and join: every request ends once, budgets hold, and nothing moves where nobody is."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, currently_in_test_context, given, note, settings
from hypothesis import strategies as st

from agent.core import events
from agent.core.effects import Assigned, Preempt, Prepare, StartBatch
from agent.core.engine import Engine
from agent.core.membership import LOSSES
from agent.core.performance import SSD, ExecutorSpec, Limits, Performance, PerformanceMatrix, PoolSpec, PreparedForm
from agent.core.policy import PRESETS
from agent.core.request import IMAGE, Work
from experts.expert import Verdict
from tests.agent.core.shell import Shell
from tests.agent.core.worlds import graph_of, of, row

TEXT = Work(2, 3, 5)
EXPERTS = ("a", "b", "c", "d")
SPEED = Performance(0.01, 0.02, 4, 1)
TEXTS = replace(SPEED, K_prompt_s=0.001, K_output_s=0.01, lease_bytes=1)
ROUTES = {"A": "a", "B": "bd", "C": "cd", "T": "t"}
GRAPH = graph_of([*EXPERTS, "t"], ROUTES)
LOAD_S = 0.2  # into the memory of a CPU
SPLIT = {"cpu": "host", "gpu": "device"}


def matrix(sizes, unable=()):
    def column(processor, load_s):
        rows = {
            name: row(name, sizes[name], performance=SPEED, load_s=load_s, prepared=PreparedForm("form", 1))
            for name in EXPERTS
            if (processor, name) not in unable
        }
        return rows | {"t": row("t", performance=TEXTS, load_s=load_s)}

    columns = {"cpu": column("cpu", {SSD: LOAD_S}), "gpu": column("gpu", {SSD: 0.3, "host": 0.05})}
    return PerformanceMatrix(columns, dict.fromkeys(EXPERTS, 0.25))


def memories(worker, expert_bytes, *, has_own_drive=True, lease_bytes=20):
    prefix = f"{worker}/" if worker else ""
    drive = f"{prefix}{SSD}" if has_own_drive else SSD
    host = PoolSpec(f"{prefix}host", expert_bytes, 16, lease_bytes=lease_bytes, drive=drive)
    return host, replace(host, name=f"{prefix}device", cache=host.name, is_one_piece=True)


class Cluster(Shell):
    """The shell of an Engine with workers; ``present``: executors."""

    def __init__(self, engine, pools, executors):
        super().__init__(engine, executors)
        self.pools, self.present = pools, set(executors)
        self.resident.update((name, set()) for name in pools)
        self.ran = Counter()  # request -> executors lost under it
        self.late = []  # answers of lost executors and memories

    def handle(self, event, at=None):
        if currently_in_test_context():
            note((self.now, event))
        return super().handle(event, at)

    def take(self, effect):
        if isinstance(effect, Assigned | Prepare):
            assert effect.executor in self.present
        elif isinstance(effect, StartBatch):
            assert effect.batch.executor in self.present
        super().take(effect)

    def check(self):
        super().check()
        assert {pool.name for pool in self.engine.statistics().pools} == self.resident.keys()
        for queue in self.engine.statistics().queues:
            waits = queue.requests and self.on(queue.executor) is None and not self.loading
            assert not waits or self.engine.next_wakeup_s() is not None

    def arrive(self, component, work=IMAGE):
        return self.handle(events.Arrived(len(self.arrived), component, work=work))

    def lose(self, executors, *, may_return=True):
        self.present -= executors
        for number, batch in [each for each in self.running.items() if each[1].executor in executors]:
            self.late += [events.BatchFailed(number, "the device is lost"), events.Finished(number, ())]
            if self.is_running(number):
                self.ran.update(batch.requests)
        self.running = {number: each for number, each in self.running.items() if each.executor not in executors}
        used = {self.pool_of(each) for each in self.present}
        used |= {self.pools[name].cache for name in used}
        lost = {self.pool_of(each) for each in executors}
        for name in (lost | {self.pools[each].cache for each in lost}) - used - {None}:
            self.resident.pop(name, None)
        gone = [number for number, load in self.loading.items() if load.pool not in self.resident]
        self.late += [answer for number in gone for answer in (events.Loaded(number), _failed(number))]
        self.loading = {number: load for number, load in self.loading.items() if number not in gone}
        return self.handle(events.ExecutorsLost(frozenset(executors), "unplugged", may_return))

    def join(self, executors):
        specs = tuple(self.executors[each] for each in sorted(executors))
        wanted = {spec.pool for spec in specs}
        wanted |= {self.pools[name].cache for name in wanted} - {None}
        missing = sorted(wanted - self.resident.keys())
        self.resident |= {name: set() for name in missing}
        self.present |= executors
        return self.handle(events.ExecutorsJoined(specs, tuple(self.pools[name] for name in missing)))

    def finish(self):
        while self.answer():
            self.now += 0.01


def _failed(load):
    return events.LoadFailed(load, "the device is lost", permanent=False)


def cluster(
    workers, *, sizes=None, expert_bytes=12, policy="coserve", unable=(), shares_drive=False, boxes=SPLIT, **chosen
):
    sizes = sizes or dict.fromkeys(EXPERTS, 3)
    pools, executors = [], []
    for worker in workers:
        here = memories(worker, expert_bytes, has_own_drive=not shares_drive)
        used = [pool for pool in here if len(boxes) > 1 or pool.cache is None]
        pools += used
        for processor, memory in boxes.items():
            name = next(pool.name for pool in used if pool.name.endswith(memory))
            executors.append(ExecutorSpec(len(executors), processor, name))
    engine = Engine(GRAPH, matrix(sizes, unable), executors, PRESETS[policy], Limits(tuple(pools), 1.0, **chosen))
    made = Cluster(engine, {pool.name: pool for pool in pools}, {spec.id: spec for spec in executors})
    made.handle(events.Started())
    return made


@st.composite
def clusters(draw):
    workers = draw(st.sampled_from([("",), ("", "w1"), ("w1", "w2"), ("w1", "w2", "w3")]))
    sizes = {name: draw(st.integers(1, 6)) for name in EXPERTS}
    placement = {}
    if draw(st.booleans()):
        names = [f"{worker}/host".lstrip("/") for worker in workers]
        placement = {each: frozenset(draw(st.sets(st.sampled_from(names), min_size=1))) for each in EXPERTS[:3]}
    return cluster(
        workers,
        sizes=sizes,
        expert_bytes=draw(st.integers(12, 30)),
        policy=draw(st.sampled_from(("coserve", "coserve", "paper", "none", "samba-parallel"))),
        unable=draw(st.sets(st.sampled_from([("gpu", "a"), ("cpu", "b"), ("gpu", "c")]))),
        shares_drive=draw(st.booleans()),
        boxes=draw(st.sampled_from((SPLIT, {"cpu": "host"}))),
        prepared_bytes=draw(st.sampled_from((0, 3, 20))),
        pinned=frozenset(draw(st.sets(st.sampled_from(EXPERTS), max_size=1))),
        placement=placement,
        transfer_s=draw(st.sampled_from((0.0, 0.005))),
        absence_s=5.0,
    )


@st.composite
def choosing(draw):
    return draw


@settings(deadline=None, suppress_health_check=list(HealthCheck), report_multiple_bugs=False)
@given(clusters(), choosing())
def test_every_request_ends_once_while_executors_leave_and_join(made, draw):
    def choose(options):
        return options[draw(st.integers(0, len(options) - 1))]

    def step():
        away = set(made.executors) - made.present
        kind = draw(st.sampled_from(["arrive"] * 6 + ["answer"] * 6 + ["lose", "join", "cancel", "late"]))
        if kind == "arrive":
            component = draw(st.sampled_from(sorted(ROUTES)))
            made.arrive(component, TEXT if component == "T" else IMAGE)
        elif kind == "answer":
            made.answer(choose)
        elif kind == "lose" and made.present:
            worker = choose(sorted({made.pools[made.executors[each].pool].worker for each in made.present}))
            here = {each for each in made.present if made.pools[made.executors[each].pool].worker == worker}
            lost = here if draw(st.booleans()) else {choose(sorted(here))}
            made.lose(lost, may_return=draw(st.booleans()))
        elif kind == "join" and away:
            made.join(away if draw(st.booleans()) else {choose(sorted(away))})
        elif kind == "cancel" and made.arrived:
            made.handle(events.Cancelled(choose(list(made.arrived))))
        elif kind == "late":
            unknown = events.ExecutorsLost(frozenset({99}), "")
            made.handle(choose([events.Loaded(10**6), events.Finished(10**6, ()), unknown, *made.late]))
        made.now += draw(st.sampled_from((0.0, 0.01, 0.4)))

    for _ in range(draw(st.integers(1, 60))):
        step()
    if draw(st.booleans()) and made.present != set(made.executors):
        made.join(set(made.executors) - made.present)
    made.finish()
    assert made.outcomes.keys() == made.arrived.keys()
    statistics = made.engine.statistics()
    assert statistics.completed + statistics.failed == statistics.arrived == len(made.arrived)
    assert max(made.ran.values(), default=0) <= LOSSES * len(ROUTES["B"])


def test_lost_workers_requests_run_elsewhere_and_its_batch_one_by_one():
    made = cluster(["w1", "w2"], boxes={"cpu": "host"})
    made.finish()
    for _ in range(8):
        made.arrive("A")
    ran = set(made.on(0).requests)
    made.lose({0})
    while ran - made.outcomes.keys():
        for each in made.running.values():
            assert not ran & set(each.requests) or len(each.requests) == 1
        made.answer()
        made.now += 0.01
    made.finish()
    assert {outcome.verdict for outcome in made.outcomes.values()} == {Verdict.OK}


def test_image_that_ends_every_executor_that_runs_it_is_unknown():
    made = cluster(["w1", "w2", "w3"], boxes={"cpu": "host"})
    made.finish()
    made.arrive("A")
    for _ in range(LOSSES):
        while not made.running:
            assert made.answer()
        (batch,) = made.running.values()
        made.lose({batch.executor})
    assert made.outcomes[0].verdict is Verdict.UNKNOWN
    assert made.outcomes[0].reason == "a: 3 executors were lost while they ran it, last: unplugged"


def test_image_that_ends_workers_in_preparation_fails_alone():
    """Its preparation ends them: in its batch, or ahead of it."""
    made = cluster(["w1", "w2"], boxes={"cpu": "host"}, prepared_bytes=20)
    made.finish()
    poison = 3
    for number in range(8):
        made.arrive("A" if number != poison else "B")
    while poison not in made.outcomes:
        begun = [each.executor for _, each in made.log if isinstance(each, Prepare) and each.request == poison]
        begun += [each.executor for each in made.running.values() if poison in each.requests]
        if begun:
            made.log.clear()
            made.lose({begun[-1]})
            made.join({begun[-1]})
        else:
            assert made.answer()
        made.now += 0.01
    made.finish()
    verdicts = {number: outcome.verdict for number, outcome in made.outcomes.items()}
    assert verdicts == {number: Verdict.UNKNOWN if number == poison else Verdict.OK for number in range(8)}


@pytest.mark.parametrize("is_reloaded", [False, True])
def test_pinned_expert_without_room_elsewhere_is_loaded_on_demand(is_reloaded):
    made = cluster(["w1"], boxes={"cpu": "host"}, expert_bytes=6, pinned=frozenset("a"))
    made.pools["w2/host"] = replace(made.pools["w1/host"], name="w2/host", expert_bytes=5, drive="w2/ssd")
    made.executors[1] = ExecutorSpec(1, "cpu", "w2/host")
    made.join({1})
    made.lose({0})
    if is_reloaded:
        made.handle(events.LineChanged(GRAPH, matrix(dict.fromkeys(EXPERTS, 3)), frozenset("a"), frozenset()))
    for component in "ABCA":
        made.arrive(component)
    made.finish()
    assert {outcome.verdict for outcome in made.outcomes.values()} == {Verdict.OK}


def test_requests_wait_for_lost_executors_and_end_at_the_absence_limit():
    made = cluster(["w1"], boxes={"cpu": "host"}, absence_s=30.0)
    made.finish()
    made.lose({0})
    made.arrive("A")
    assert not made.outcomes
    assert made.engine.next_wakeup_s() == made.now + 30.0
    made.join({0})
    made.finish()
    assert made.outcomes[0].verdict is Verdict.OK
    made.lose({0})
    made.arrive("A")
    made.arrive("B")
    made.handle(events.Cancelled(2))
    assert made.outcomes[2].reason == "cancelled"
    made.finish()
    assert made.outcomes[1].reason == "a: no executor could run it for 30 s"


def test_executors_that_never_return_leave_no_request_waiting():
    made = cluster(["w1", "w2"], boxes={"cpu": "host"})
    made.lose({0, 1})
    made.arrive("A")
    made.handle(events.ExecutorsLost(frozenset({0}), "given up", may_return=False))
    assert not made.outcomes
    made.handle(events.ExecutorsLost(frozenset({1}), "given up", may_return=False))
    assert made.outcomes[0].reason == "no executor of this box can run a"


def test_waiting_requests_are_shared_with_executors_that_join():
    made = cluster(["w1", "w2"], boxes={"cpu": "host"})
    made.finish()
    made.lose({1})
    for _ in range(40):
        made.arrive("A")
    made.join({1})
    queued = {queue.executor: queue.requests for queue in made.engine.statistics().queues}
    assert queued[1] >= 10


def test_joining_executor_takes_its_share_of_requests_oldest_first():
    made = cluster(["w1", "w2", "w3"], boxes={"cpu": "host"})
    made.finish()
    made.lose({2})
    for number in range(300):
        made.arrive("ABC"[number % 3])
    moved = of(Assigned, made.join({2}))
    assert {each.executor for each in moved} == {2}
    assert 80 <= len(moved) <= 120
    assert [each.request for each in moved] == sorted(each.request for each in moved)
    lengths_s = [queue.length_s for queue in made.engine.statistics().queues]
    assert max(lengths_s) - min(lengths_s) <= SPEED.latency_s(SPEED.max_batch) + LOAD_S


def test_pinned_expert_moves_where_it_fits_and_returns_with_its_executor():
    made = cluster(["w1", "w2"], boxes={"cpu": "host"}, pinned=frozenset("a"))
    made.finish()
    made.lose({0})
    made.finish()
    assert "a@fp32" in made.resident["w2/host"]
    made.join({0})
    made.finish()
    assert "a@fp32" in made.resident["w1/host"]


def test_executors_with_too_little_memory_do_not_join():
    made = cluster(["w1"], boxes={"cpu": "host"})
    small = replace(made.pools["w1/host"], name="w2/host", expert_bytes=2)
    before = made.engine.statistics()
    assert made.engine.handle(events.ExecutorsJoined((ExecutorSpec(1, "cpu", "w2/host"),), (small,)), 0.0) == []
    after = made.engine.statistics()
    assert (after.pools, after.unexpected_events) == (before.pools, before.unexpected_events + 1)


def test_planned_placement_loads_each_expert_once_and_routes_requests_to_it():
    placement = {"a": frozenset({"w1/host"}), "b": frozenset({"w2/host"}), "c": frozenset({"w1/host", "w2/host"})}
    made = cluster(["w1", "w2"], boxes={"cpu": "host"}, placement=placement)
    made.finish()
    assert {"a@fp32", "c@fp32"} <= made.resident["w1/host"]
    assert {"b@fp32", "c@fp32"} <= made.resident["w2/host"]
    for _ in range(20):
        made.arrive("A")
    assert {each.executor for _, each in made.log if isinstance(each, Assigned)} == {0}
    made.lose({0})
    made.finish()
    assert {outcome.verdict for outcome in made.outcomes.values()} == {Verdict.OK}


def test_all_steps_of_a_route_run_on_one_executor():
    made = cluster(["w1", "w2"], boxes={"cpu": "host"}, transfer_s=1.0, expert_bytes=30)
    made.finish()
    for _ in range(6):
        made.arrive("B")
    made.finish()
    taken = {}
    for _, each in made.log:
        if isinstance(each, Assigned):
            taken.setdefault(each.request, []).append(each.executor)
    assert all(len(set(executors)) == 1 for executors in taken.values())


def test_begun_text_is_read_again_on_another_executor():
    made = cluster(["w1", "w2"], boxes={"cpu": "host"}, expert_bytes=30)
    made.finish()
    made.arrive("T", TEXT)
    while not made.running:
        assert made.answer()
    (batch,) = made.running.values()
    left = events.Progressed(batch.id, (), ((0, Work(0, 2, 5, None, 3)),))
    made.handle(left)
    lost = made.lose({batch.executor})
    assert [each.request for each in of(Preempt, lost)] == [0]
    made.finish()
    assert made.outcomes[0].verdict is Verdict.OK
