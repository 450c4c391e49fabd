"""The Engine's answers to the letter: what each event leads to, what it says of itself, and that it notices damage."""

from __future__ import annotations

import pytest

from agent.core import events
from agent.core.effects import (
    Assigned,
    AssignmentCandidate,
    Complete,
    Evict,
    EvictionDecision,
    Fail,
    Standing,
    StandingChanged,
    StartBatch,
    StartLoad,
)
from agent.core.engine import Engine
from agent.core.performance import (
    SSD,
    ExecutorSpec,
    ExpertProfile,
    Footprint,
    Performance,
    PerformanceMatrix,
    PoolSpec,
)
from agent.core.policy import PRESETS
from agent.core.pool import PoolStatistics, Residency
from agent.core.request import Batch, Outcome, Rejected, StepResult
from agent.core.state import EngineStatistics, QueueStatistics
from experts.errors import MemoryExceeded
from experts.expert import Prediction, Verdict
from experts.graph import ExpertGraph, RouteStep
from tests.agent.core import worlds

PASS = Prediction("ok", 0.75)
DEFECT = Prediction("bad", 0.625)
ROUTES = {"A": "a", "B": "b", "C": "c"}


def row(expert, workspace_bytes=1, own_bytes=1, load_s=10.0):
    performance = Performance(1.0, 2.0, max_batch=4, workspace_bytes=workspace_bytes)
    return ExpertProfile(f"{expert}@fp32", performance, Footprint(own_bytes), {SSD: load_s})


def build(policy="coserve", routes=ROUTES, executors=1, expert_bytes=3, workspace_bytes=8, usage=None, **limits):
    """Experts a to d; K = 1 s, B = 2 s, a load 10 s; a copy takes a byte, and so does the workspace of an image."""
    steps = {name: tuple(RouteStep(expert, frozenset({"ok"})) for expert in route) for name, route in routes.items()}
    profile = PerformanceMatrix({"cpu": {name: row(name) for name in "abcd"}}, usage or {})
    specs = [ExecutorSpec(number, "cpu", "host") for number in range(executors)]
    pool = PoolSpec("host", expert_bytes, workspace_bytes)
    return Engine(ExpertGraph("abcd", steps), profile, specs, PRESETS[policy], worlds.limits((pool,), **limits))


def of(kind, effects):
    return [effect for effect in effects if isinstance(effect, kind)]


def finish(engine, batch, now, prediction=PASS):
    return engine.handle(events.Finished(batch.id, (prediction,) * len(batch.requests)), now)


def unknown(request, reason, *steps):
    return Fail(request, Outcome(Verdict.UNKNOWN, None, None, tuple(steps), reason))


def running(engine, *components, now=0.0):
    """The batch that runs once these have arrived, as requests 0, 1, ..., and the first of their experts is loaded."""
    effects = []
    for number, component in enumerate(components):
        effects += engine.handle(events.Arrived(number, component), now)
    (load, *_) = of(StartLoad, effects)
    (started,) = of(StartBatch, engine.handle(events.Loaded(load.load), now))
    return started.batch


def fail_alone(engine, batch, reason="broke"):
    """The batch fails; the one that is started next."""
    effects = engine.handle(events.BatchFailed(batch.id, reason), 0.0)
    return effects, [started.batch for started in of(StartBatch, effects)]


def test_a_request_is_assigned_its_expert_loaded_run_and_its_outcome_told():
    engine = build()
    assert engine.handle(events.Arrived(7, "A"), 0.0) == [
        Assigned(7, "a", 0, False, (AssignmentCandidate(0, 0.0, 13.0),)),
        StartLoad(1, "a", "a@fp32", SSD, "host", 1),
    ]
    assert engine.handle(events.Loaded(1), 10.0) == [StartBatch(Batch(1, 0, "a", "a@fp32", (7,), 1))]
    outcome = Outcome(Verdict.OK, "ok", 0.75, (StepResult("a", PASS),))
    assert engine.handle(events.Finished(1, (PASS,)), 13.0) == [Complete(7, outcome)]


def test_a_route_is_followed_expert_by_expert_and_every_step_is_told():
    engine = build("paper", routes={"ABC": "abc"})
    batch = running(engine, "ABC")
    for expert in "bc":
        (load,) = of(StartLoad, finish(engine, batch, 0.0))
        (started,) = of(StartBatch, engine.handle(events.Loaded(load.load), 0.0))
        batch = started.batch
        assert batch.expert == expert
    steps = (StepResult("a", PASS), StepResult("b", PASS), StepResult("c", PASS))
    assert finish(engine, batch, 0.0) == [Complete(0, Outcome(Verdict.OK, "ok", 0.75, steps))]


def test_a_route_ends_at_the_first_defect():
    engine = build("paper", routes={"ABC": "abc"})
    outcome = Outcome(Verdict.NG, "bad", 0.625, (StepResult("a", DEFECT),))
    assert finish(engine, running(engine, "ABC"), 0.0, DEFECT) == [Complete(0, outcome)]


def test_a_request_to_one_expert_is_answered_without_a_verdict():
    engine = build()
    (load,) = of(StartLoad, engine.handle(events.Arrived(7, expert="d"), 0.0))
    engine.handle(events.Loaded(load.load), 0.0)
    outcome = Outcome(
        Verdict.UNKNOWN, "ok", 0.75, (StepResult("d", PASS),), "asked of one expert, not of a route"
    )  # fmt: skip
    assert engine.handle(events.Finished(1, (PASS,)), 0.0) == [Complete(7, outcome)]


@pytest.mark.parametrize(
    ("arrived", "reason"),
    [
        (events.Arrived(7, "resistor"), "no route for component 'resistor'"),
        (events.Arrived(7, expert="z"), "no expert 'z' on this line"),
        (events.Arrived(7), "no expert None on this line"),
    ],
)
def test_what_the_line_does_not_know_is_unknown_by_name(arrived, reason):
    engine = build()
    assert engine.handle(arrived, 0.0) == [unknown(7, reason)]
    assert engine.statistics().in_flight == 0


def test_what_no_executor_can_run_is_unknown_by_name():
    profile = PerformanceMatrix({"cpu": {"a": row("a")}})
    graph = ExpertGraph("ab", {"B": (RouteStep("b", frozenset({"ok"})),)})
    limits = worlds.limits((PoolSpec("host", 3, 8),))
    engine = Engine(graph, profile, [ExecutorSpec(0, "cpu", "host")], PRESETS["coserve"], limits)
    assert engine.handle(events.Arrived(7, "B"), 0.0) == [unknown(7, "no executor of this box can run b")]


def test_an_image_that_is_rejected_ends_its_request_and_no_other():
    engine = build("paper", routes={"AB": "ab"})
    batch = running(engine, "AB", "AB")
    effects = engine.handle(events.Finished(batch.id, (PASS, Rejected("not an image"))), 0.0)
    assert of(Fail, effects) == [unknown(1, "not an image")]
    (load,) = of(StartLoad, effects)
    (started,) = of(StartBatch, engine.handle(events.Loaded(load.load), 0.0))
    assert started.batch.requests == (0,)
    last = engine.handle(events.Finished(started.batch.id, (Rejected("gone"),)), 0.0)
    assert last == [unknown(0, "gone", StepResult("a", PASS))]


# -- batches that fail --


def test_a_failed_batch_is_run_one_by_one_and_what_fails_alone_is_unknown_with_the_reason():
    engine = build()
    batch = running(engine, "A", "A")
    assert fail_alone(engine, batch, "broke") == (
        [StartBatch(Batch(2, 0, "a", "a@fp32", (0,), 1))],
        [Batch(2, 0, "a", "a@fp32", (0,), 1)],
    )
    assert engine.handle(events.BatchFailed(2, "broke again"), 0.0) == [
        unknown(0, "a: broke again"),
        StartBatch(Batch(3, 0, "a", "a@fp32", (1,), 1)),
    ]
    outcome = Outcome(Verdict.OK, "ok", 0.75, (StepResult("a", PASS),))
    assert engine.handle(events.Finished(3, (PASS,)), 0.0) == [Complete(1, outcome)]


def test_results_that_are_too_few_or_too_many_are_a_failure_of_the_batch():
    engine = build()
    batch = running(engine, "A", "A")
    (alone,) = of(StartBatch, engine.handle(events.Finished(batch.id, (PASS,)), 0.0))
    assert alone.batch.requests == (0,)
    effects = engine.handle(events.Finished(alone.batch.id, (PASS, PASS)), 0.0)
    assert of(Fail, effects) == [unknown(0, "a: 2 results for 1 images")]


def test_a_request_has_so_many_attempts_at_each_step():
    engine = build("paper", routes={"AB": "ab"}, batch_attempts=2)
    batch = running(engine, "AB")
    (again,) = of(StartBatch, engine.handle(events.BatchFailed(batch.id, "oom", out_of_memory=True), 0.0))
    (load,) = of(StartLoad, finish(engine, again.batch, 0.0))
    (started,) = of(StartBatch, engine.handle(events.Loaded(load.load), 0.0))
    effects = engine.handle(events.BatchFailed(started.batch.id, "oom", out_of_memory=True), 0.0)
    (again,) = of(StartBatch, effects)
    assert of(Complete, finish(engine, again.batch, 0.0))


def test_a_request_that_runs_out_of_memory_too_often_is_unknown():
    engine = build(batch_attempts=2)
    batch = running(engine, "A")
    (again,) = of(StartBatch, engine.handle(events.BatchFailed(batch.id, "oom", out_of_memory=True), 0.0))
    assert again.batch.requests == (0,)
    effects = engine.handle(events.BatchFailed(again.batch.id, "oom", out_of_memory=True), 0.0)
    assert effects == [unknown(0, "a: oom")]
    assert engine.statistics().quarantined == {}


def test_an_expert_that_fails_on_so_many_images_in_a_row_is_put_on_probation_and_all_that_wait_for_it_end():
    engine = build(expert_failures=2)
    batch = running(engine, "A", "A", "A")
    _, (first,) = fail_alone(engine, batch)
    effects, (second,) = fail_alone(engine, first)
    assert of(Fail, effects) == [unknown(0, "a: broke")]
    effects, after = fail_alone(engine, second, "still broke")
    assert after == []
    reason = "2 batches in a row failed, last: still broke"
    assert effects == [
        unknown(1, "a: still broke"),
        StandingChanged("a", Standing.PROBATION, reason, retry_s=1.0),
        unknown(2, f"a is on probation: {reason}"),
        Evict("a", "a@fp32", "host", 1, 0, EvictionDecision("a@fp32", 0, ())),
    ]
    assert engine.statistics().on_probation == {"a": reason}
    assert engine.handle(events.Arrived(9, "A"), 0.0) == [unknown(9, f"a is on probation: {reason}")]


def test_an_image_that_succeeds_in_between_starts_the_count_of_failures_anew():
    engine = build(expert_failures=2)
    batch = running(engine, *"AAAA")
    _, (first,) = fail_alone(engine, batch)
    _, (second,) = fail_alone(engine, first)
    (third,) = of(StartBatch, finish(engine, second, 0.0))
    _, (fourth,) = fail_alone(engine, third.batch)
    assert finish(engine, fourth, 0.0)
    assert engine.statistics().on_probation == {}


def test_batches_of_several_do_not_count_as_failures_of_their_expert():
    engine = build(expert_failures=1)
    fail_alone(engine, running(engine, "A", "A"))
    assert engine.statistics().on_probation == {}


# -- quarantine --


def quarantined(reason):
    return StandingChanged("a", Standing.QUARANTINE, reason)


def test_what_the_shell_finds_out_quarantines_an_expert_at_once():
    engine = build()
    engine.handle(events.Loaded(1), 0.0)  # an answer to nothing
    finish(engine, running(engine, "A"), 0.0)
    evict = Evict("a", "a@fp32", "host", 1, 0, EvictionDecision("a@fp32", 0, ()))
    assert engine.handle(events.Quarantined("a", "wrong sha256"), 0.0) == [quarantined("wrong sha256"), evict]
    assert engine.statistics().quarantined == {"a": "wrong sha256"}
    engine.handle(events.Quarantined("a", "another reason"), 0.0)
    assert engine.statistics().quarantined == {"a": "wrong sha256"}


def test_a_quarantined_expert_leaves_its_queue_and_lets_the_next_one_move():
    engine = build(policy="paper")  # one load at a time: for the head
    engine.handle(events.Arrived(0, "A"), 0.0)
    engine.handle(events.Arrived(1, "B"), 0.0)
    assert engine.handle(events.Quarantined("a", "wrong sha256"), 0.0) == [
        quarantined("wrong sha256"),
        unknown(0, "a is in quarantine: wrong sha256"),
        StartLoad(2, "b", "b@fp32", SSD, "host", 1),
    ]


def test_a_quarantined_expert_that_is_on_its_way_leaves_when_it_has_come():
    engine = build()
    engine.handle(events.Arrived(0, "A"), 0.0)
    ended = [quarantined("bad"), unknown(0, "a is in quarantine: bad")]
    assert engine.handle(events.Quarantined("a", "bad"), 0.0) == ended
    evict = Evict("a", "a@fp32", "host", 1, 0, EvictionDecision("a@fp32", 0, ()))
    assert engine.handle(events.Loaded(1), 0.0) == [evict]


def test_a_quarantined_expert_that_runs_leaves_when_its_batch_has_ended():
    evict = Evict("a", "a@fp32", "host", 1, 0, EvictionDecision("a@fp32", 0, ()))
    engine = build()
    batch = running(engine, "A", "A")
    assert engine.handle(events.Quarantined("a", "bad"), 0.0) == [quarantined("bad")]
    outcome = Outcome(Verdict.OK, "ok", 0.75, (StepResult("a", PASS),))
    assert finish(engine, batch, 0.0) == [Complete(0, outcome), Complete(1, outcome), evict]
    engine = build()
    batch = running(engine, "A", "A")
    engine.handle(events.Quarantined("a", "bad"), 0.0)
    effects = engine.handle(events.BatchFailed(batch.id, "broke"), 0.0)
    assert effects == [unknown(0, "a is in quarantine: bad"), unknown(1, "a is in quarantine: bad"), evict]


def test_bad_weights_that_are_noticed_beside_a_resident_copy_take_no_other_expert_along():
    engine = build()
    finish(engine, running(engine, "B"), 0.0)
    (load,) = of(StartLoad, engine.handle(events.Arrived(5, "A"), 0.0))
    effects = engine.handle(events.LoadFailed(load.load, "wrong sha256", permanent=True), 0.0)
    assert effects == [quarantined("wrong sha256"), unknown(5, "a is in quarantine: wrong sha256")]
    assert engine.statistics().pools[0].resident == ("b@fp32",)


def test_an_expert_whose_load_fails_so_often_in_a_row_is_put_on_probation():
    engine = build(load_attempts=2, load_backoff_s=1.0)
    engine.handle(events.Arrived(0, "A"), 0.0)
    assert engine.handle(events.LoadFailed(1, "I/O error", permanent=False), 0.0) == []
    (load,) = engine.handle(events.Tick(), 1.0)
    reason = "2 loads in a row failed, last: I/O error"
    assert engine.handle(events.LoadFailed(load.load, "I/O error", permanent=False), 1.0) == [
        StandingChanged("a", Standing.PROBATION, reason, retry_s=2.0),
        unknown(0, f"a is on probation: {reason}"),
    ]
    assert (engine.statistics().on_probation, engine.statistics().quarantined) == ({"a": reason}, {})


def test_bad_weights_let_the_next_one_move():
    engine = build(policy="paper")
    engine.handle(events.Arrived(0, "A"), 0.0)
    engine.handle(events.Arrived(1, "B"), 0.0)
    effects = engine.handle(events.LoadFailed(1, "wrong sha256", permanent=True), 0.0)
    assert of(StartLoad, effects) == [StartLoad(2, "b", "b@fp32", SSD, "host", 1)]


def test_a_batch_that_goes_well_releases_its_expert_and_says_so():
    engine = build(expert_failures=1, probation_s=1.0)
    fail_alone(engine, running(engine, "A"))
    (load,) = of(StartLoad, engine.handle(events.Arrived(1, "A"), 1.0))  # the trial
    (started,) = of(StartBatch, engine.handle(events.Loaded(load.load), 1.0))
    outcome = Outcome(Verdict.OK, "ok", 0.75, (StepResult("a", PASS),))
    released = StandingChanged("a", Standing.SERVING, "a batch went well")
    assert finish(engine, started.batch, 1.0) == [released, Complete(1, outcome)]


def test_a_load_that_goes_well_releases_its_expert_and_says_so():
    engine = build(load_attempts=1, load_backoff_s=1.0)
    engine.handle(events.Arrived(0, "A"), 0.0)
    engine.handle(events.LoadFailed(1, "I/O error", permanent=False), 0.0)
    assert engine.handle(events.Tick(), 1.0) == [StartLoad(2, "a", "a@fp32", SSD, "host", 1)]
    assert engine.handle(events.Loaded(2), 1.0) == [StandingChanged("a", Standing.SERVING, "a load went well")]


# -- cancelling, draining, unexpected events --


def test_a_queued_request_is_cancelled_at_once_and_lets_the_next_one_move():
    engine = build(policy="paper")
    engine.handle(events.Arrived(0, "A"), 0.0)
    engine.handle(events.Arrived(1, "B"), 0.0)
    assert engine.handle(events.Cancelled(0), 0.0) == [
        unknown(0, "cancelled"),
        StartLoad(2, "b", "b@fp32", SSD, "host", 1),
    ]


def test_a_running_request_that_is_cancelled_ends_with_its_batch_and_is_not_tried_again():
    engine = build("paper", routes={"AB": "ab"})
    batch = running(engine, "AB", "AB")
    assert engine.handle(events.Cancelled(1), 0.0) == []
    effects = engine.handle(events.BatchFailed(batch.id, "broke"), 0.0)
    assert of(Fail, effects) == [unknown(1, "cancelled")]
    (started,) = of(StartBatch, effects)
    engine.handle(events.Cancelled(0), 0.0)
    assert finish(engine, started.batch, 0.0) == [unknown(0, "cancelled", StepResult("a", PASS))]


def test_an_agent_that_stops_takes_nothing_new_and_brings_nothing_early():
    engine = build(usage={"a": 0.5, "b": 0.25}, loads_in_flight=1)
    (load,) = engine.handle(events.Started(), 0.0)
    assert engine.handle(events.Drain(), 0.0) == []
    assert engine.handle(events.Arrived(0, "A"), 0.0) == [unknown(0, "the agent is stopping")]
    assert engine.handle(events.Loaded(load.load), 0.0) == []
    assert engine.statistics().is_draining


def test_an_event_that_fits_nothing_is_counted_and_otherwise_ignored():
    engine = build()
    batch = running(engine, "A")
    unfitting = [
        events.Arrived(0, "A"),  # it is here already
        events.Loaded(99),
        events.LoadFailed(99, "no such load", permanent=True),
        events.Finished(99, ()),
        events.BatchFailed(99, "no such batch"),
        events.Cancelled(99),
        events.Quarantined("z", "no such expert"),
        object(),  # no event at all
    ]
    for number, event in enumerate(unfitting, start=1):
        assert engine.handle(event, 0.0) == []
        assert engine.statistics().unexpected_events == number
    assert (engine.statistics().arrived, engine.statistics().quarantined) == (1, {})
    assert of(Complete, finish(engine, batch, 0.0))


def test_time_never_goes_back():
    engine = build(load_backoff_s=1.0)
    engine.handle(events.Arrived(0, "A"), 5.0)
    engine.handle(events.LoadFailed(1, "I/O error", permanent=False), 3.0)
    assert engine.next_wakeup_s() == 6.0


# -- what it says of itself --


def test_a_new_engine_has_counted_nothing():
    statistics = build(executors=2).statistics()
    assert statistics == EngineStatistics(
        arrived=0,
        completed=0,
        failed=0,
        in_flight=0,
        switches=0,
        batches=0,
        loads={"ssd_host": 0},
        bytes_read=0,
        evictions=0,
        unexpected_events=0,
        is_draining=False,
        quarantined={},
        on_probation={},
        queues=(QueueStatistics(0, "cpu", 0, 0.0, 0), QueueStatistics(1, "cpu", 0, 0.0, 0)),
        pools=(PoolStatistics("host", 3, 0, 8, 0, 0, (), ()),),
    )


def test_everything_that_happened_is_counted():
    engine = build(expert_bytes=2)
    for number, component in enumerate("ABCA"):  # two of three experts fit
        effects = engine.handle(events.Arrived(number, component), 0.0)
        for load in of(StartLoad, effects):
            effects += engine.handle(events.Loaded(load.load), 0.0)
        for started in of(StartBatch, effects):
            finish(engine, started.batch, 0.0)
    for number, component in enumerate(("nothing", "nowhere"), start=4):
        engine.handle(events.Arrived(number, component), 0.0)
    (load,) = of(StartLoad, engine.handle(events.Arrived(6, "B"), 0.0))
    engine.handle(events.Loaded(load.load), 0.0)
    engine.handle(events.Arrived(7, "B"), 1.0)
    engine.handle(events.Arrived(8, "B"), 1.0)
    assert engine.statistics() == EngineStatistics(
        arrived=9,
        completed=4,
        failed=2,
        in_flight=3,
        switches=5,
        batches=5,
        loads={"ssd_host": 5},
        bytes_read=5,
        evictions=3,
        unexpected_events=0,
        is_draining=False,
        quarantined={},
        on_probation={},
        queues=(QueueStatistics(0, "cpu", 2, (3.0 - 1.0) + 2.0 + 2 * 1.0, 1, "b"),),
        pools=(PoolStatistics("host", 2, 2, 8, 1, 2, ("c@fp32", "b@fp32"), ()),),
    )


def test_each_executors_own_batch_is_counted_and_no_other():
    engine = build(executors=2)
    running(engine, "A")
    assert [queue.running for queue in engine.statistics().queues] == [1, 0]


# -- what it refuses at the start --


def test_an_expert_that_can_never_fit_is_refused_by_name_the_largest_one_first():
    profile = PerformanceMatrix({"cpu": {"a": row("a", own_bytes=7), "b": row("b", own_bytes=9), "c": row("c")}})
    limits = worlds.limits((PoolSpec("host", 6, 8),))
    with pytest.raises(MemoryExceeded, match="memory host, for b: 9 bytes wanted, 6 free"):
        Engine(ExpertGraph("abc", {}), profile, [ExecutorSpec(0, "cpu", "host")], PRESETS["coserve"], limits)


def test_what_is_pinned_leaves_room_for_every_other_expert_or_is_refused():
    with pytest.raises(MemoryExceeded, match=r"memory host, for [cd]: 3 bytes wanted, 2 free"):
        build(expert_bytes=2, pinned=frozenset("ab"))
    build(expert_bytes=3, pinned=frozenset("ab"))


def test_every_executor_is_owed_the_workspace_of_one_image_of_its_largest_expert():
    experts = {"a": row("a", workspace_bytes=2), "b": row("b", workspace_bytes=3)}
    specs = [ExecutorSpec(number, "cpu", "host") for number in range(2)]
    graph = ExpertGraph("ab", {"A": (RouteStep("a", frozenset({"ok"})),)})

    def engine(workspace_bytes):
        limits = worlds.limits((PoolSpec("host", 3, workspace_bytes),))
        return Engine(graph, PerformanceMatrix({"cpu": experts}), specs, PRESETS["coserve"], limits)

    with pytest.raises(
        MemoryExceeded, match="memory host, workspace of one image per executor: 6 bytes wanted, 5 free"
    ):
        engine(5)
    assert [pool.workspace_bytes for pool in engine(6).statistics().pools] == [6]


def test_a_batch_leaves_the_other_executors_the_workspace_that_they_are_owed():
    engine = build(executors=2, workspace_bytes=4)
    for number in range(12):
        engine.handle(events.Arrived(number, "A"), 0.0)
    sizes = [len(started.batch.requests) for started in of(StartBatch, engine.handle(events.Loaded(1), 0.0))]
    assert sizes == [3, 1]


# -- that damage is noticed --


def lose_a_request(engine):
    del engine._state.tickets[0]


def queue_a_request_that_runs(engine):
    queue = engine._state.queues[0]
    queue.head.requests[0] = queue.head.requests[1]
    queue.request_count += 1


def miscount_a_queue(engine):
    engine._state.queues[0].request_count += 1


def take_the_copy_from_under_a_batch(engine):
    entry = engine._state.pools["host"].entry("a@fp32")
    entry.state, entry.uses = Residency.LOADING, 0


def count_a_use_too_many(engine):
    engine._state.pools["host"].entry("a@fp32").uses += 1


def miscount_a_ledger(engine):
    engine._state.pools["host"].used_bytes += 1


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lose_a_request, "^a request is lost, or stands where none should$"),
        (queue_a_request_that_runs, "^a request stands in two places$"),
        (miscount_a_queue, "^executor 0: requests miscounted$"),
        (take_the_copy_from_under_a_batch, "^batch 1 runs on a@fp32, which is not resident$"),
        (count_a_use_too_many, r"^host: a@fp32 counts 2 uses of Counter\({'a@fp32': 1}\)$"),
        (miscount_a_ledger, "^host: ledger is not the sum of its copies$"),
    ],
)
def test_an_engine_that_does_not_add_up_says_what_does_not(damage, told):
    engine = build()
    running(engine, "A")
    engine.handle(events.Arrived(1, "B"), 0.0)
    engine.check_invariants()
    damage(engine)
    with pytest.raises(AssertionError, match=told):
        engine.check_invariants()


def test_what_is_unwanted_goes_and_what_is_wanted_comes_back():
    engine = build()
    (load,) = of(StartLoad, engine.handle(events.Wanted("a"), 0.0))
    engine.handle(events.Loaded(load.load), 0.0)
    (gone,) = of(Evict, engine.handle(events.Unwanted("a"), 0.0))
    assert (load.expert, gone.expert) == ("a", "a")
    (load,) = of(StartLoad, engine.handle(events.Wanted("a"), 0.0))
    assert load.expert == "a"


def with_a_in_memory(engine):
    (load,) = of(StartLoad, engine.handle(events.Wanted("a"), 0.0))
    engine.handle(events.Loaded(load.load), 0.0)
    return engine


def test_what_somebody_waits_for_stays_though_it_is_unwanted():
    engine = with_a_in_memory(build())
    batch = running(engine, "B")
    engine.handle(events.Arrived(1, "A"), 0.0)
    assert engine.handle(events.Unwanted("a"), 0.0) == []
    (started,) = of(StartBatch, finish(engine, batch, 0.0))
    assert started.batch.expert == "a"


def test_what_runs_or_is_pinned_stays_though_it_is_unwanted():
    engine = build(pinned=frozenset("a"))
    running(engine, "A")
    assert engine.handle(events.Unwanted("a"), 0.0) == []
    engine = with_a_in_memory(build(pinned=frozenset("a")))
    assert engine.handle(events.Unwanted("a"), 0.0) == []


def test_what_no_executor_can_run_is_wanted_in_vain():
    profile = PerformanceMatrix({"cpu": {"a": row("a")}})
    limits = worlds.limits((PoolSpec("host", 3, 8),))
    engine = Engine(ExpertGraph("ab", {}), profile, [ExecutorSpec(0, "cpu", "host")], PRESETS["coserve"], limits)
    assert engine.handle(events.Wanted("b"), 0.0) == []


def test_while_it_stops_nothing_is_brought_because_it_is_wanted():
    engine = build()
    engine.handle(events.Drain(), 0.0)
    assert engine.handle(events.Wanted("a"), 0.0) == []
