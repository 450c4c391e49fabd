"""Effects of each event, exactly; statistics; and damage that check_invariants finds."""

import pytest

from agent.core import effects, events
from agent.core.performance import SSD, PoolSpec
from agent.core.pool import PoolStatistics, Residency
from agent.core.prepared import PreparedStatistics
from agent.core.request import Batch, Outcome, StepResult
from agent.core.scheduler import FIRST_PATIENCE
from agent.core.state import EngineStatistics, QueueStatistics
from experts.errors import MemoryExceeded
from experts.expert import Prediction, Rejected, Verdict
from tests.agent.core.script import played
from tests.agent.core.shell import PASS
from tests.agent.core.worlds import Line, alone, of

DEFECT = Prediction("bad", 0.625)
LOAD_A = effects.StartLoad(1, "a", "a@fp32", SSD, "host", 1)
PASSED_A = Outcome(Verdict.OK, "ok", 1.0, (StepResult("a", PASS),))


def unknown(request, reason, *steps):
    return effects.Fail(request, Outcome(Verdict.UNKNOWN, None, None, tuple(steps), reason))


def running(policy="coserve", components="A", **line):
    """A line that runs a batch of these requests, of expert a, which is loaded once all have come."""
    line = alone(policy=policy, **line)
    for component in components if isinstance(components, list) else list(components):
        line.arrive(component)
    line.loaded("a")
    return line


def effects_of(line, event, at=None):
    line.handle(event, at)
    return line.effects


def test_request_is_assigned_loaded_run_and_completed():
    line = alone()
    assigned = effects.Assigned(7, "a", 0, False, (effects.AssignmentCandidate(0, 0.0, 13.0),))
    assert effects_of(line, events.Arrived(7, "A")) == [assigned, LOAD_A]
    assert effects_of(line, events.Loaded(1), 10.0) == [effects.StartBatch(Batch(1, 0, "a", "a@fp32", (7,), 1))]
    assert effects_of(line, events.Finished(1, (PASS,)), 13.0) == [effects.Complete(7, PASSED_A)]


@pytest.mark.parametrize(("results", "verdict"), [((PASS, PASS, PASS), Verdict.OK), ((PASS, DEFECT), Verdict.NG)])
def test_route_ends_at_its_last_step_or_first_defect_and_reports_each_step(results, verdict):
    line = running("paper", ["ABC"], routes={"ABC": "abc"})
    for expert, result in zip("abc", results, strict=False):
        if expert in line.loads:
            line.loaded(expert)
        line.finished(expert, result=result)
    steps = tuple(StepResult(*step) for step in zip("abc", results, strict=False))
    assert line.outcomes == {1: Outcome(verdict, results[-1].label, results[-1].score, steps)}


@pytest.mark.parametrize(
    ("arrived", "reason"),
    [
        (events.Arrived(7, "resistor"), "no route for component 'resistor'"),
        (events.Arrived(7, expert="z"), "no expert 'z' on this line"),
        (events.Arrived(7), "no expert None on this line"),
        (events.Arrived(7, expert="e"), "no executor of this box can run e"),
    ],
)
def test_unknown_component_or_expert_gives_unknown_and_its_name(arrived, reason):
    line = alone(routes={"E": "e"})
    assert effects_of(line, arrived) == [unknown(7, reason)]
    assert line.handle(events.Wanted("e")) == []
    assert line.engine.statistics().in_flight == 0


def test_rejected_image_ends_its_own_request_only():
    line = running("paper", ["AB", "AB"], routes={"AB": "ab"})
    told = effects_of(line, events.Finished(line.batches["a"].id, (PASS, Rejected("not an image"))))
    assert of(effects.Fail, told) == [unknown(2, "not an image")]
    line.loaded("b")
    assert line.batches["b"].requests == (1,)
    line.finished("b", result=Rejected("gone"))
    assert line.effects == [unknown(1, "gone", StepResult("a", PASS))]


TWO_STEPS = {"AB": "ab"}
# Each case: a line, and what is played on it: see ``script``.
CASES = """
a request to one expert is answered without a verdict | alone() |
    run d; finished d => UNKNOWN 1 after d: asked of one expert, not of a route
# batches that fail
a failed batch is run one by one and a request that fails alone is unknown with the reason | alone() |
    asks AA; loaded a; failed a => run a 1; failed a => UNKNOWN 1: a: broke | run a 2; finished a => OK 2 after a
a request has so many attempts at each step | alone(policy="paper", routes=TWO_STEPS, batch_attempts=2) |
    arrive AB; loaded a; short a; finished a; loaded b; short b => run b 1; short b => UNKNOWN 1 after a: b: broke;
    quarantined z => nothing
an expert that fails on so many images in a row is put on probation and all that wait for it end |
    alone(expert_failures=2) | asks AAA; loaded a; failed a; failed a => UNKNOWN 1: a: broke | run a 2;
    failed a => UNKNOWN 2: a: broke | probation a for 1.0 s: 2 batches in a row failed, last: broke | UNKNOWN 3: a
    is on probation: 2 batches in a row failed, last: broke | evict a host stage 0;
    asks A => UNKNOWN 4: a is on probation: 2 batches in a row failed, last: broke;
    asks A @1.0; loaded a; finished a => serving a: a batch went well | OK 5 after a
batches of several do not count as failures of their expert and a success ends the count | alone(expert_failures=2) |
    asks AAAA; loaded a; failed a; failed a => UNKNOWN 1: a: broke | run a 2; finished a; failed a;
    finished a => OK 4 after a
# quarantine
an expert that the shell finds bad is in quarantine at once, for the first reason | alone() |
    bring a; quarantined a => quarantine a: bad | evict a host stage 0; quarantined a => nothing
a quarantined expert that is on its way leaves when it has come | alone() |
    asks A; quarantined a; loaded a -> evict a host stage 0
a quarantined expert that runs leaves when its batch has ended well | alone() |
    asks AA; loaded a; quarantined a => quarantine a: bad;
    finished a => OK 1 after a | OK 2 after a | evict a host stage 0
a quarantined expert that runs leaves when its batch has failed | alone() |
    asks AA; loaded a; quarantined a;
    failed a => UNKNOWN 1: a is in quarantine: bad | UNKNOWN 2: a is in quarantine: bad | evict a host stage 0
after quarantine the next one moves | alone(policy="paper") |
    # one load at a time: for the head
    asks AB; quarantined a => quarantine a: bad | UNKNOWN 1: a is in quarantine: bad | load b ssd>host
after bad weights the next one moves | alone(policy="paper") |
    asks AB; bad a => quarantine a: I/O error | UNKNOWN 1: a is in quarantine: I/O error | load b ssd>host
after a cancelled request the next one moves | alone(policy="paper") |
    asks AB; cancelled 1 => UNKNOWN 1: cancelled | load b ssd>host
# cancelling, draining, wishes
a running request that is cancelled ends with its batch and is not tried again |
    alone(policy="paper", routes=TWO_STEPS) | arrive AB; arrive AB; loaded a; cancelled 2 => nothing;
    failed a => UNKNOWN 2: cancelled | run a 1; cancelled 1; finished a => UNKNOWN 1 after a: cancelled
an agent that stops takes nothing new and brings nothing early |
    alone(usage={"a": 0.5, "b": 0.25}, loads_in_flight=1) | started; drain => nothing;
    asks A => UNKNOWN 1: the agent is stopping; loaded a -> nothing; wanted b -> nothing
an unwanted expert goes and a wanted one comes back | alone() |
    wanted a -> load a ssd>host; loaded a; unwanted a -> evict a host stage 0; wanted a -> load a ssd>host; loaded a;
    unwanted a -> evict a host stage 0
an expert that runs, is pinned or is waited for stays though it is unwanted | alone(pinned=frozenset("b")) |
    asks A; loaded a; wanted b; loaded b; wanted c; loaded c; ask c; unwanted a -> nothing; unwanted b -> nothing;
    unwanted c -> nothing
"""


@played(CASES)
def test_each_event_has_its_effects(made, script):
    eval(made).play(script)


def test_results_that_are_too_few_or_too_many_are_a_failure_of_the_batch():
    line = running(components="AA")
    line.handle(events.Finished(line.batches["a"].id, (PASS,)))
    assert line.batches["a"].requests == (1,)
    line.handle(events.Finished(line.batches["a"].id, (PASS, PASS)))
    assert of(effects.Fail, line.effects) == [unknown(1, "a: 2 results for 1 images")]


def test_out_of_memory_halves_the_batch_until_the_halved_size_has_held():
    line = running(components="A" * (8 + 2 * FIRST_PATIENCE + 4))
    line.finished("a")
    line.failed("a", out_of_memory=True)
    sizes = []
    while "a" in line.batches:
        sizes.append(len(line.batches["a"].requests))
        line.finished("a")
    assert sizes == [1] * 4 + [2] * FIRST_PATIENCE + [4]


def test_unexpected_event_is_counted_and_ignored():
    line = running()
    unfitting = [
        events.Arrived(1, "A"),  # it is here already
        events.Loaded(99),
        events.LoadFailed(99, "no such load", permanent=True),
        events.Finished(99, ()),
        events.BatchFailed(99, "no such batch"),
        events.Progressed(99, (), ()),
        events.Cancelled(99),
        events.Preempted(99),
        events.Preempted(1),  # it has not begun to write
        events.Quarantined("z", "no such expert"),
        object(),  # no event at all
    ]
    for number, event in enumerate(unfitting, start=1):
        assert effects_of(line, event) == []
        assert line.engine.statistics().unexpected_events == number
    assert (line.engine.statistics().arrived, line.engine.statistics().quarantined) == (1, {})


def test_time_never_goes_back():
    line = alone(load_backoff_s=1.0)
    line.arrive("A", at=5.0)
    line.load_failed("a", at=3.0)
    assert line.engine.next_wakeup_s() == 6.0


# -- what it says of itself --


def counted(**changes):
    usual = dict.fromkeys(("arrived", "completed", "failed", "in_flight", "switches", "batches", "bytes_read"), 0)
    usual |= {"evictions": 0, "unexpected_events": 0, "is_draining": False, "quarantined": {}, "on_probation": {}}
    usual["prepared"] = PreparedStatistics()
    return EngineStatistics(**usual | changes)


def test_everything_that_happened_is_counted():
    line = alone(host=2)
    queues, pools = (QueueStatistics(0, "cpu", 0, 0.0, 0),), (PoolStatistics("host", 2, 0, 8, 0, 0, (), ()),)
    assert line.engine.statistics() == counted(loads={"ssd_host": 0}, queues=queues, pools=pools)
    for component in "ABCA":  # two of three experts fit
        line.arrive(component)
        line.loaded(component.lower())
        line.finished(component.lower())
    for component in ("nothing", "nowhere", "B"):
        line.arrive(component)
    line.loaded("b")
    line.arrive("B", at=1.0)
    line.arrive("B")
    assert line.engine.statistics() == counted(
        arrived=9,
        completed=4,
        failed=2,
        in_flight=3,
        switches=5,
        batches=5,
        loads={"ssd_host": 5},
        bytes_read=5,
        evictions=3,
        queues=(QueueStatistics(0, "cpu", 2, (3.0 - 1.0) + 2.0 + 2 * 1.0, 1, "b"),),
        pools=(PoolStatistics("host", 2, 2, 8, 1, 2, ("c@fp32", "b@fp32"), ()),),
    )


# -- what it refuses at the start --


def test_expert_that_never_fits_is_refused_by_name_largest_first():
    with pytest.raises(MemoryExceeded, match="memory host, for b: 9 bytes wanted, 6 free"):
        alone(host=6, sizes={"a": 7, "b": 9})


def test_pinned_experts_that_leave_no_room_for_another_are_refused():
    with pytest.raises(MemoryExceeded, match=r"memory host, for [cd]: 3 bytes wanted, 2 free"):
        alone(host=2, pinned=frozenset("ab"))
    alone(host=3, pinned=frozenset("ab"))


def shared_workspace(workspace_bytes):
    """Two executors, whose largest expert takes a byte for itself and one for each image."""
    pools = (PoolSpec("host", 3, workspace_bytes),)
    return Line(pools, {"one": ("a", "host"), "two": ("ab", "host")}, workspace_base={"b": 1})


def test_every_executor_is_guaranteed_workspace_for_its_largest_expert():
    with pytest.raises(MemoryExceeded, match="workspace of one image per executor: 3 bytes wanted, 2 free"):
        shared_workspace(2)
    line = shared_workspace(5)
    for _ in range(12):
        line.ask("a")
    line.loaded("a")
    assert [len(each.batch.requests) for each in of(effects.StartBatch, line.effects)] == [3, 2]
    assert [queue.running for queue in line.engine.statistics().queues] == [3, 2]


# -- that damage is noticed --


def queue_a_request_that_runs(state):
    queue = state.queues[0]
    queue.head.requests[1] = queue.head.requests[2]
    queue.request_count += 1


def damaged(place, **changes):
    """``place(state)``: the record that is damaged."""
    return lambda state: [setattr(place(state), name, change) for name, change in changes.items()]


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda state: state.tickets.pop(1), "^a request is lost, or stands where none should$"),
        (queue_a_request_that_runs, "^a request stands in two places$"),
        (damaged(lambda state: state.queues[0], request_count=7), "^executor 0: requests miscounted$"),
        (
            damaged(lambda state: state.pools["host"].entry("a@fp32"), state=Residency.LOADING, uses=0),
            "^batch 1 runs on a@fp32, which is not resident$",
        ),
        (
            damaged(lambda state: state.pools["host"].entry("a@fp32"), uses=2),
            r"^host: a@fp32 counts 2 uses of Counter\({'a@fp32': 1}\)$",
        ),
        (damaged(lambda state: state.pools["host"], used_bytes=9), "^host: ledger is not the sum of its copies$"),
    ],
)
def test_inconsistent_engine_state_is_reported_by_name(damage, told):
    line = running()
    line.arrive("B")
    damage(line.engine._state)
    with pytest.raises(AssertionError, match=told):
        line.engine.check_invariants()
