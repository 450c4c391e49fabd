"""A box with less memory than was planned with: smaller batches, less in memory, other executors, and UNKNOWN last."""

import pytest

from agent.core import events
from agent.core.effects import BudgetChanged, Evict, FellBack, StartBatch
from agent.core.performance import DEVICE, HOST, SSD, PerformanceMatrix, PoolSpec
from experts.expert import Verdict
from experts.graph import ExpertGraph, RouteStep
from tests.agent.core.worlds import OK, AnsweringLine, row

NO_MEMORY = {"reason": "no memory", "out_of_memory": True}


class Box(AnsweringLine):
    """A device and a CPU, each with a memory."""

    def __init__(self, device_bytes=3, with_cpu=True, cache=None, is_one_piece=False, cpu_form="fp32", **more):
        processors = {"gpu": ("abcd", DEVICE)} | ({"cpu": ("abcd", HOST)} if with_cpu else {})
        pools = (PoolSpec(DEVICE, device_bytes, 4, cache, is_one_piece), PoolSpec(HOST, 8, 8))
        usual = {
            "routes": {name.upper(): name for name in "abcd"},
            "usage": dict.fromkeys("abcd", 0.25),
            "forms": {"gpu": "fp16", "cpu": cpu_form},
            "speeds": {"gpu": (0.001, 0.1), "cpu": (1.0, 0.1)},
            "load_s": {SSD: 0.1, HOST: 0.05},
        }
        super().__init__(pools, processors, **usual | more)

    def lack_room(self, *places):
        """For loads into these memories, or of these copies; for no others."""
        self.bad_loads = dict.fromkeys(places, NO_MEMORY | {"permanent": False})

    def lack_workspace(self, *executors):
        self.bad_batches = dict.fromkeys(executors, NO_MEMORY)

    def budget(self, name):
        return next(pool.expert_bytes for pool in self.pools() if pool.name == name)


def test_a_load_that_finds_no_memory_lowers_the_budget_to_what_was_there():
    box = Box(device_bytes=3)
    box.send("A")
    box.send("B")
    box.lack_room(DEVICE)
    box.send("C")
    (lowered,) = box.told(BudgetChanged)
    assert (lowered.pool, lowered.before_bytes, lowered.after_bytes, lowered.reason) == (DEVICE, 3, 2, "no memory")
    box.lack_room()
    box.pass_time(1.0)
    assert [outcome.verdict for outcome in box.outcomes.values()] == [Verdict.OK] * 3
    assert box.budget(DEVICE) == 2
    assert box.told(Evict)  # C came where one of the others was


def test_an_expert_that_cannot_be_had_on_the_device_is_asked_on_the_cpu():
    box = Box()
    box.lack_room(DEVICE)
    requests = [box.send("A") for _ in range(3)]
    box.pass_time(5.0)
    assert [box.outcomes[request].verdict for request in requests] == [Verdict.OK] * 3
    assert {started.batch.executor for started in box.told(StartBatch)} == {1}
    fell = box.told(FellBack)[0]
    assert (fell.expert, fell.pool, fell.reason) == ("a", DEVICE, "no memory")
    box.lack_room()
    box.pass_time(120.0)  # until its pause is over
    box.send("A")
    box.pass_time(1.0)
    assert box.told(StartBatch)[-1].batch.executor == 0


def test_without_another_executor_it_is_unknown_and_on_probation():
    box = Box(with_cpu=False)
    box.lack_room(DEVICE)
    request = box.send("A")
    box.pass_time(5.0)
    assert box.outcomes[request].verdict is Verdict.UNKNOWN
    assert "a" in box.on_probation


def test_a_batch_without_memory_gets_smaller_then_less_lies_there_then_it_runs_elsewhere():
    box = Box(device_bytes=3)
    for component in "AB":
        box.send(component)
    box.lack_workspace(0)
    request = box.send("A")
    assert box.outcomes[request].verdict is Verdict.OK
    assert box.told(BudgetChanged)[0].after_bytes < 3
    assert box.told(BudgetChanged)[0].reason == "no memory"
    assert box.told(StartBatch)[-1].batch.executor == 1
    later = box.send("A")  # while the device's copy pauses nobody is sent there
    assert box.outcomes[later].verdict is Verdict.OK
    assert box.told(StartBatch)[-1].batch.executor == 1


def test_a_failure_on_the_device_long_ago_does_not_hide_that_nothing_comes_to_it_any_more():
    box = Box(cache=HOST)
    box.lack_room(DEVICE)
    box.handle(events.Wanted("a"))
    box.handle(events.Unwanted("a"))
    assert not box.pools()[1].resident
    box.lack_room("a@fp16")
    request = box.send("A")
    box.pass_time(10.0)
    assert box.outcomes[request].verdict is Verdict.OK
    assert box.told(StartBatch)[-1].batch.executor == 1


def test_an_expert_on_the_device_is_asked_there_though_the_host_has_no_room_for_it():
    box = Box(
        cache=HOST, cpu_form="fp16", speeds={"gpu": (2.0, 0.1), "cpu": (1.0, 0.1)}
    )  # the CPU runs the same copy, and faster
    box.handle(events.Wanted("a"))
    box.lack_room(HOST)
    request = box.send("A")
    box.pass_time(5.0)
    assert box.told(FellBack)[0].pool == HOST
    assert box.outcomes[request].verdict is Verdict.OK
    assert box.told(StartBatch)[-1].batch.executor == 0


@pytest.mark.parametrize("load_s", [0.0, 2.0, 100.0])
def test_a_request_that_fits_nowhere_ends_however_long_each_try_takes(load_s):
    """Each pause is over when the next executor has failed, and still the request ends."""
    box = Box()
    box.lack_room(DEVICE, HOST)
    box.load_s = load_s
    request = box.send("A")
    box.pass_time(3600.0)
    assert (box.outcomes[request].verdict, "no memory" in box.outcomes[request].reason) == (Verdict.UNKNOWN, True)


def test_the_trial_of_an_expert_goes_on_elsewhere():
    box = Box()
    box.lack_room(DEVICE, HOST)
    box.send("A")
    box.pass_time(5.0)
    assert "a" in box.on_probation
    box.pass_time(60.0)
    box.lack_room(DEVICE)
    requests = [box.send("A")]
    box.pass_time(60.0)
    assert box.outcomes[requests[0]].verdict is Verdict.OK
    assert box.on_probation == {}


def test_a_batch_that_ran_again_where_there_was_no_memory_ends_all_doubt():
    box = Box(device_bytes=1)
    box.lack_workspace(0)
    box.send("A")
    box.lack_workspace()
    box.pass_time(60.0)
    box.send("A")
    assert box.told(StartBatch)[-1].batch.executor == 0
    box.send("B")  # takes a's place
    fell_before = len(box.told(FellBack))
    box.lack_room("a@fp16")
    box.send("A")
    assert len(box.told(FellBack)) == fell_before


def test_a_line_with_larger_experts_gets_back_what_they_need_of_a_lowered_budget():
    box = Box(device_bytes=6, with_cpu=False)
    box.lack_room(DEVICE)
    box.send("A")
    box.lack_room()
    box.pass_time(60.0)
    assert box.budget(DEVICE) == 1
    large = row("e", 5, form="fp16")
    names = "abcde"
    graph = ExpertGraph(names, {name.upper(): (RouteStep(name, OK),) for name in names})
    columns = {"gpu": {**box.matrix.experts["gpu"], "e": large}}
    box.handle(events.LineChanged(graph, PerformanceMatrix(columns), frozenset(), frozenset()))
    assert box.outcomes[box.send("E")].verdict is Verdict.OK
    assert box.budget(DEVICE) == 5
    box.pass_time(601.0)
    reasons = [change.reason for change in box.told(BudgetChanged)]
    assert reasons == ["no memory", "the line has larger experts now", "it did not run short again"]


def test_a_budget_comes_back_by_halves_while_nothing_runs_short():
    box = Box(device_bytes=9)
    box.lack_room(DEVICE)
    box.send("A")
    box.lack_room()
    assert box.budget(DEVICE) == 1
    found = []
    for _ in range(5):
        found.append(box.budget(DEVICE))
        box.pass_time(600.0 * 2 ** len(found[1:]))
    assert found == [1, 5, 7, 8, 9]
    box.pass_time(86_400.0)
    assert box.engine.next_wakeup_s() is None
    assert [change.after_bytes for change in box.told(BudgetChanged)] == found


def test_a_budget_that_came_back_too_soon_is_left_alone_for_longer():
    box = Box(device_bytes=5)
    box.lack_room(DEVICE)
    box.send("A")
    box.pass_time(601.0)
    assert box.budget(DEVICE) == 3
    box.send("B")
    box.pass_time(5.0)
    assert box.budget(DEVICE) == 1
    box.pass_time(900.0)
    assert box.budget(DEVICE) == 1
    box.pass_time(400.0)
    assert box.budget(DEVICE) == 3


def test_a_memory_in_one_piece_keeps_its_budget():
    """An eviction makes no room for a batch: only other executors can help."""
    box = Box(is_one_piece=True)
    box.send("B")
    box.lack_workspace(0)
    request = box.send("A")
    assert box.outcomes[request].verdict is Verdict.OK
    assert box.told(StartBatch)[-1].batch.executor == 1
    assert box.budget(DEVICE) == 3
    assert not box.told(Evict)


def test_who_waits_behind_a_batch_that_fits_nowhere_there_waits_elsewhere():
    box = Box()
    box.lack_workspace(0)
    box.held = []
    requests = [box.send("A")]
    box.release()
    assert box.outcomes[1].verdict is Verdict.OK
    box.pass_time(120.0)
    box.held = []
    requests = [box.send("A") for _ in range(7)]  # four make a batch; the others wait
    box.release()
    fell = box.told(FellBack)[-1]
    assert (fell.expert, fell.copy, fell.pool, fell.reason) == ("a", "a@fp16", DEVICE, "no memory")
    assert fell.requests > 0
    assert [each.retry_s for each in box.told(FellBack)] == [0.25, 0.5]
    assert all(box.outcomes[request].verdict is Verdict.OK for request in requests)


def test_a_batch_has_all_its_tries_on_each_executor_and_says_in_the_end_what_it_lacked():
    box = Box()
    box.lack_workspace(0, 1)
    request = box.send("A")
    assert [started.batch.executor for started in box.told(StartBatch)] == [0, 0, 0, 1, 1, 1]
    outcome = box.outcomes[request]
    assert (outcome.verdict, outcome.reason) == (Verdict.UNKNOWN, "a: no memory")


def test_the_last_of_a_budget_that_is_no_more_than_an_expert_comes_back_at_once():
    box = Box(device_bytes=10, sizes=dict.fromkeys("abcd", 3))
    box.lack_room(DEVICE)
    box.send("A")
    box.lack_room()
    box.pass_time(3600.0)
    assert [change.after_bytes for change in box.told(BudgetChanged)] == [3, 7, 10]


def test_what_the_batch_that_ran_short_needs_is_the_last_to_leave():
    box = Box(device_bytes=2, with_cpu=False)
    for component in "AB":
        box.send(component)
    box.lack_workspace(0)
    box.send("A")
    (gone,) = box.told(Evict)
    assert (gone.expert, gone.stage, gone.freed_bytes) == ("b", 2, 1)
    assert (gone.decision.for_copy, gone.decision.needed_bytes) == ("", 1)
    assert [candidate.expert for candidate in gone.decision.candidates] == ["b", "a"]


def test_a_pinned_expert_comes_to_its_home_once_there_is_room_again():
    box = Box(pinned=frozenset("a"))
    box.lack_room(DEVICE)
    box.handle(events.Started())
    box.pass_time(5.0)
    assert box.told(FellBack)
    box.lack_room()
    box.pass_time(60.0)
    assert "a@fp16" in box.pools()[0].resident
