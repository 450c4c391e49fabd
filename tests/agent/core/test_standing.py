"""Failures that pass are no verdict: probation, trials, pauses that double, and release; quarantine is for the rest."""

import itertools

import pytest

from agent.core import events
from agent.core.effects import Assigned, Evict, Standing, StandingChanged, StartBatch, StartLoad
from agent.core.performance import PoolSpec
from agent.core.request import Rejected
from experts.expert import Verdict
from tests.agent.core.worlds import PASS, AnsweringLine

FAILURES = 3  # of loads, or of batches, that put an expert on probation
LOAD_BACKOFF_S, PROBATION_S, LONGEST_S = 0.25, 1.0, 60.0


def build(capacity=2, executors=1, **limits):
    """Component X runs on expert x, component AB on a and then on b."""
    names = "abcdef"
    routes = {name.upper(): name for name in names} | {"AB": "ab"}
    processors = {f"cpu{number}": (names, "host") for number in range(executors)}
    usage = dict.fromkeys(names, 0.1)
    return AnsweringLine((PoolSpec("host", capacity, 8 * executors),), processors, routes=routes, usage=usage, **limits)


def standings(line):
    return [(at_s, each.expert, each.standing) for at_s, each in line.log if isinstance(each, StandingChanged)]


def loads_fail(reason="I/O error", *, permanent=False):
    return {"reason": reason, "permanent": permanent}


def batches_fail(reason="it broke", *, out_of_memory=False):
    return {"reason": reason, "out_of_memory": out_of_memory}


def line_on_probation_by_loads(**options):
    """a's loads failed three times: at 0, 0.25 and 0.75 s."""
    line = build(**options)
    line.bad_loads["a"] = loads_fail()
    line.send("A")
    line.pass_time(LOAD_BACKOFF_S * 3)
    return line


def line_on_probation_by_batches(**options):
    """Three of a's batches failed, at 0 s."""
    line = build(**options)
    line.bad_batches["a"] = batches_fail()
    for _ in range(FAILURES):
        line.send("A")
    return line


def test_loads_that_fail_in_a_row_mean_probation_and_unknown_with_the_last_reason():
    line = build()
    line.bad_loads["a"] = loads_fail("timed out")
    first, second = line.send("A"), line.send("A")
    line.pass_time(0.25)
    line.bad_loads["a"] = loads_fail("I/O error")
    assert standings(line) == []
    line.pass_time(0.5)
    reason = "3 loads in a row failed, last: I/O error"
    assert line.on_probation == {"a": reason}
    assert line.engine.statistics().quarantined == {}
    (told,) = line.told(StandingChanged)
    assert line.now == 0.75
    assert told == StandingChanged("a", Standing.PROBATION, reason, retry_s=1.0)
    for request in (first, second, line.send("A")):
        assert line.outcomes[request].verdict is Verdict.UNKNOWN
        assert line.outcomes[request].reason == f"a is on probation: {reason}"


def test_the_engine_loads_an_expert_on_probation_again_by_itself_and_releases_it():
    line = line_on_probation_by_loads()
    line.bad_loads.clear()
    assert line.engine.next_wakeup_s() == 1.75
    line.pass_time(0.99)
    assert line.judge("A")[0] is Verdict.UNKNOWN
    line.pass_time(0.01)
    assert standings(line)[1:] == [(1.75, "a", Standing.SERVING)]
    assert line.on_probation == {}
    assert line.judge("A") == (Verdict.OK, None)


def test_the_pause_doubles_up_to_a_minute_and_begins_anew_after_success():
    line = line_on_probation_by_loads()
    line.pass_time(400)
    told = [each.retry_s for each in line.told(StandingChanged)]
    assert told[:8] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert set(told[8:]) == {60}
    loads = [at_s for at_s, each in line.log if isinstance(each, StartLoad) and each.expert == "a"]
    assert [later - earlier for earlier, later in itertools.pairwise(loads[2:])] == told[:-1]
    line.bad_loads.clear()
    line.pass_time(60)
    assert line.on_probation == {}
    line.bad_loads["a"] = loads_fail()
    for component in "BC":  # they take a's room
        line.judge(component)
    line.log.clear()
    line.send("A")
    line.pass_time(0.75)
    assert [each.retry_s for each in line.told(StandingChanged)] == [1.0]


def test_without_free_room_no_copy_leaves_for_a_trial_but_the_next_request_after_the_pause_is_one():
    line = line_on_probation_by_loads()
    line.bad_loads.clear()
    for component in "BC":
        line.judge(component)
    line.log.clear()
    line.pass_time(10)
    assert line.told(StartLoad) == line.told(Evict) == []
    assert line.on_probation.keys() == {"a"}
    assert line.judge("A") == (Verdict.OK, None)
    assert line.on_probation == {}


def test_a_pinned_expert_is_placed_again_as_soon_as_there_is_room():
    line = line_on_probation_by_loads(pinned=frozenset("a"))
    line.bad_loads.clear()
    line.held = []
    line.send("B")
    line.send("C")
    line.pass_time(10)
    assert line.on_probation.keys() == {"a"}
    line.handle(events.Quarantined("c", "the operator said so"))  # its room is free
    assert line.on_probation == {}
    assert "a" in line.resident()


def test_after_failed_batches_the_next_request_after_the_pause_is_the_trial():
    line = line_on_probation_by_batches()
    line.bad_batches.clear()
    line.pass_time(0.99)
    assert line.judge("A")[0] is Verdict.UNKNOWN
    line.pass_time(0.01)
    assert line.judge("A") == (Verdict.OK, None)
    assert standings(line)[1:] == [(1.0, "a", Standing.SERVING)]
    assert line.on_probation == {}


def test_nothing_is_loaded_for_a_trial_that_nobody_asks_for():
    line = line_on_probation_by_batches()
    line.log.clear()
    line.pass_time(100)
    assert line.log == []


def test_a_failed_trial_doubles_the_pause_and_says_how_many_failed():
    line = line_on_probation_by_batches()
    told = []
    for _ in range(9):
        line.pass_time(LONGEST_S)
        line.send("A")
        told.append(line.told(StandingChanged)[-1])
    assert [each.retry_s for each in told] == [2, 4, 8, 16, 32, 60, 60, 60, 60]
    assert told[0].reason == "4 batches in a row failed, last: it broke"
    line.bad_batches.clear()
    line.pass_time(LONGEST_S)
    line.send("A")
    line.bad_batches["a"] = batches_fail()
    line.log.clear()
    for _ in range(FAILURES):
        line.send("A")
    assert [each.retry_s for each in line.told(StandingChanged)] == [PROBATION_S]


def test_one_trial_at_a_time():
    line = line_on_probation_by_batches()
    line.pass_time(1.0)
    line.bad_batches.clear()
    line.held = []
    trial, others = line.send("A"), [line.send("A") for _ in range(3)]
    assert [batch.requests for batch in line.held] == [(trial,)]
    assert all("on probation" in line.outcomes[other].reason for other in others)
    line.answer(line.held.pop())
    assert line.outcomes[trial].verdict is Verdict.OK


@pytest.mark.parametrize("fate", ["cancelled in its queue", "cancelled while it ran", "no memory", "not an image"])
def test_a_trial_that_says_nothing_of_the_expert_leaves_the_next_one_free(fate):
    line = line_on_probation_by_batches()
    line.pass_time(1.0)
    line.held = []
    if fate == "cancelled in its queue":
        line.send("B")
        line.handle(events.Cancelled(line.send("A")))
        line.answer(line.held.pop())
    else:
        trial = line.send("A")
        if fate == "no memory":
            line.bad_batches["a"] = batches_fail("no memory", out_of_memory=True)
        elif fate == "not an image":
            line.bad_batches.clear()
            line.result = Rejected("not an image")
        else:
            line.handle(events.Cancelled(trial))
        while line.held:
            line.answer(line.held.pop())
        assert trial in line.outcomes
    assert standings(line) == [(0.0, "a", Standing.PROBATION)]
    line.held, line.bad_batches, line.result = None, {}, PASS
    assert line.judge("A") == (Verdict.OK, None)


@pytest.mark.parametrize("fate", ["no memory", "cancelled"])
def test_what_is_not_the_experts_fault_does_not_count_against_it(fate):
    line = build()
    line.bad_batches["a"] = batches_fail("no memory", out_of_memory=fate == "no memory")
    for _ in range(5):
        line.held = [] if fate == "cancelled" else None
        request = line.send("A")
        if fate == "cancelled":
            line.handle(events.Cancelled(request))
            line.answer(line.held.pop())
        assert line.outcomes[request].verdict is Verdict.UNKNOWN
    assert standings(line) == []


def test_an_image_that_cannot_be_read_does_not_end_a_row_of_failures():
    line = build()
    for fault in (batches_fail(), None, batches_fail(), None, batches_fail()):
        line.bad_batches = {} if fault is None else {"a": fault}
        line.result = Rejected("not an image")
        line.send("A")
    assert line.on_probation.keys() == {"a"}


def test_what_ran_when_others_failed_may_release_but_does_not_lengthen_the_pause():
    for goes_well in (True, False):
        line = build(executors=2)
        line.held = []
        for _ in range(4):
            line.send("A")
        by_executor = {batch.executor: batch for batch in line.held}
        assert by_executor.keys() == {0, 1}
        late = by_executor[1]
        line.held.remove(late)
        line.bad_batches["a"] = batches_fail()
        while line.held and not line.on_probation:
            line.answer(line.held.pop())
            if not line.held and not line.on_probation:
                line.send("A")
        assert line.on_probation.keys() == {"a"}
        assert "a" in line.resident()  # the late one runs on it
        if goes_well:
            line.bad_batches.clear()
        line.answer(late)
        told = [standing for _, _, standing in standings(line)]
        assert told == [Standing.PROBATION, Standing.SERVING] if goes_well else [Standing.PROBATION]


def test_bad_weights_found_during_probation_are_for_good():
    line = line_on_probation_by_loads()
    line.bad_loads["a"] = loads_fail("wrong sha256", permanent=True)
    line.pass_time(1000)
    statistics = line.engine.statistics()
    assert (statistics.quarantined, statistics.on_probation) == ({"a": "wrong sha256"}, {})
    assert standings(line)[1:] == [(1.75, "a", Standing.QUARANTINE)]
    line.bad_loads.clear()
    line.pass_time(1000)
    assert line.judge("A") == (Verdict.UNKNOWN, "a is in quarantine: wrong sha256")


def test_who_is_on_probation_is_not_loaded_on_a_guess():
    line = build(capacity=3)
    line.bad_loads["b"] = loads_fail()
    line.send("B")
    line.pass_time(0.75)
    line.log.clear()
    line.send("AB")  # b would be speculated on while a runs
    assert line.told(StartLoad, "b") == []


def test_a_stopping_agent_tries_nobody_again():
    line = line_on_probation_by_loads()
    line.handle(events.Drain())
    line.log.clear()
    line.pass_time(100)
    assert line.log == []


@pytest.mark.parametrize(("kind", "most"), [("loads", 20), ("batches", 35), ("both in turn", 100)])
def test_an_expert_that_flaps_never_loops_hot(kind, most):
    """Five requests a second for ten minutes: what fails is tried a few times, then once a pause."""
    line = build()
    for number in range(3000):
        loads, batches = kind == "loads", kind == "batches"
        if kind == "both in turn":
            loads, batches = number // 175 % 2 == 0, number // 175 % 2 == 1
        line.bad_loads = {"a": loads_fail()} if loads else {}
        line.bad_batches = {"a": batches_fail()} if batches else {}
        line.send("A")
        line.pass_time(0.2)
    batches_tried = sum(started.batch.expert == "a" for started in line.told(StartBatch))
    assert len(line.told(StartLoad, "a")) + batches_tried < most
    assert len(line.told(Assigned)) < most
    line.bad_loads, line.bad_batches = {}, {}
    line.pass_time(LONGEST_S)
    assert line.judge("A") == (Verdict.OK, None)


def test_a_trial_reads_its_bytes_anew_also_where_another_executor_still_ran_on_them():
    line = build(executors=2)
    line.bad_batches["a"] = batches_fail()
    line.held = []
    for _ in range(4):
        line.send("A")
    while line.held and "a" not in line.on_probation:
        line.answer(line.held.pop(0))
    assert "a" in line.on_probation
    while line.held:  # the other executor's batch ends after the probation began
        line.answer(line.held.pop(0))
    assert "a" not in line.resident()


def test_loads_that_fail_leave_a_probation_for_batches_to_batches():
    line = line_on_probation_by_batches()
    line.bad_loads["a"] = loads_fail()
    line.pass_time(PROBATION_S)
    line.send("A")  # the trial; its loads fail
    line.pass_time(LOAD_BACKOFF_S * 3)
    assert line.on_probation == {"a": "3 loads in a row failed, last: I/O error"}
    line.bad_loads.clear()
    line.pass_time(LONGEST_S)
    assert "a" in line.on_probation  # a good load says nothing of the batches
    assert line.judge("A")[0] is Verdict.UNKNOWN
    line.bad_batches.clear()
    line.pass_time(2 * LONGEST_S)
    assert line.judge("A") == (Verdict.OK, None)
    assert line.on_probation == {}
