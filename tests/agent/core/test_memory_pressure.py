"""A box with less memory than was planned with: smaller batches, less in memory, other executors, and UNKNOWN last."""

import pytest

from agent.core import events
from agent.core.effects import BudgetChanged, Evict, FellBack, StartBatch
from agent.core.performance import DEVICE, HOST, SSD, PerformanceMatrix, PoolSpec
from tests.agent.core.script import played
from tests.agent.core.worlds import AnsweringLine, graph_of, row

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

    # -- verbs of a script --

    def lack_room(self, *places):
        """For loads into these memories, or of these copies; for no others."""
        self.bad_loads = dict.fromkeys(places, NO_MEMORY | {"permanent": False})

    def lack_workspace(self, *executors):
        self.bad_batches = dict.fromkeys(map(int, executors), NO_MEMORY)

    def break_batches(self, *executors):
        self.bad_batches = {int(each): {"reason": "broke"} for each in executors}

    def ran(self, *executors):
        """The latest batches."""
        assert [started.batch.executor for started in self.logged(StartBatch)][-len(executors) :] == [
            *map(int, executors)
        ]

    def budget(self, size):
        assert self.pools()[0].expert_bytes == int(size)

    def budgets(self, *sizes):
        """All that the budget has changed to."""
        assert [change.after_bytes for change in self.logged(BudgetChanged)] == [*map(int, sizes)]

    def fell(self, expert, pool, count):
        """Back so often, for the first time from there."""
        first, *more = self.logged(FellBack)
        assert (first.expert, first.pool, first.reason, 1 + len(more)) == (expert, pool, "no memory", int(count))

    def because(self, *reason):
        assert self.outcomes[self.last_request].reason == " ".join(reason)


@played("""
a load that finds no memory lowers the budget to what was there | Box() |
    sends A B; lack_room device; sends C; budgets 2; lack_room; passes 1; verdicts OK OK OK; budgets 2
an expert that cannot be had on the device is asked on the CPU until its pause is over | Box() |
    lack_room device; sends A A A; passes 5; verdicts OK OK OK; ran 1; fell a device 1;
    lack_room; passes 120; sends A; passes 1; ran 1 0
without another executor it is unknown and on probation | Box(with_cpu=False) |
    lack_room device; sends A; passes 5; verdicts UNKNOWN; probation a
a failure on the device long ago does not hide that nothing comes to it any more | Box(cache=HOST) |
    lack_room device; wanted a; unwanted a; holds host; lack_room a@fp16; sends A; passes 10; verdicts OK; ran 1
an expert on the device is asked there though the host has no room for it |
    Box(cache=HOST, cpu_form="fp16", speeds={"gpu": (2.0, 0.1), "cpu": (1.0, 0.1)}) |
    # the CPU runs the same copy, and faster
    wanted a; lack_room host; sends A; passes 5; fell a host 1; verdicts OK; ran 0
the trial of an expert goes on elsewhere | Box() |
    lack_room device host; sends A; passes 5; probation a; passes 60; lack_room device; sends A; passes 60;
    verdicts UNKNOWN OK; probation
a batch that ran again where there was no memory ends all doubt | Box(device_bytes=1) |
    # b takes a's place
    lack_workspace 0; sends A; lack_workspace; passes 60; sends A; ran 0; sends B; fell a device 1; lack_room a@fp16;
    sends A; fell a device 1
a budget that came back too soon is left alone for longer | Box(device_bytes=5) |
    lack_room device; sends A; passes 601; budget 3; sends B; passes 5; budget 1; passes 900; budget 1; passes 400;
    budget 3
a memory in one piece keeps its budget: an eviction makes no room for a batch | Box(is_one_piece=True) |
    sends B; lack_workspace 0; sends A; verdicts OK OK; ran 1; budgets; holds device ba
a batch has all its tries on each executor and says in the end what it lacked | Box() |
    lack_workspace 0 1; sends A; ran 0 0 0 1 1 1; verdicts UNKNOWN; because a: no memory
a batch that fails for another reason is not tried elsewhere | Box() |
    break_batches 0; sends A; ran 0; verdicts UNKNOWN; because a: broke; judges B UNKNOWN b: broke
the last of a budget that is no more than an expert comes back at once | Box(10, sizes=dict.fromkeys("abcd", 3)) |
    lack_room device; sends A; lack_room; passes 3600; budgets 3 7 10
what the shell reserves is free of experts until it gives it back | Box() |
    sends A B C; holds device abc; reserved device 2; budget 1; sends A B; verdicts OK OK OK OK OK; budget 1;
    reserved device 0; budget 3; budgets 1 3
the shell gets nothing of what the line's largest expert needs | Box(sizes=dict.fromkeys("abcd", 2)) |
    reserved device 3; budget 2; sends A B; verdicts OK OK; reserved device 0; budget 3
a budget that comes back leaves the shell what it reserved | Box(device_bytes=9) |
    reserved device 4; lack_room device; sends A; lack_room; budget 1; passes 9600; budget 5;
    reserved device 0; budget 9
a reservation of a memory in one piece is not possible | Box(is_one_piece=True) | reserved device 1; budgets
a pinned expert comes to its home once there is room again | Box(pinned=frozenset("a")) |
    lack_room device; started; passes 5; fell a device 3; lack_room; passes 60; holds device a
""")
def test_memory_below_plan_shrinks_the_budget(made, script):
    eval(made).play(script)


def test_batch_without_memory_shrinks_then_evicts_then_runs_elsewhere():
    Box().play("sends A B; lack_workspace 0; sends A; verdicts OK OK OK; budgets 1; ran 1; sends A; ran 1")


@pytest.mark.parametrize("lacks", ["lack_room device host", "lack_workspace 0 1"])
@pytest.mark.parametrize("load_s", [0.0, 2.0, 100.0])
def test_request_that_fits_nowhere_ends_however_long_each_try_takes(lacks, load_s):
    box = Box()
    box.load_s = load_s
    box.play(f"{lacks}; sends A; passes 3600; verdicts UNKNOWN")
    assert box.outcomes[1].reason.endswith("no memory")


def test_lowered_budget_grows_back_by_halves_without_shortage():
    box = Box(device_bytes=9)
    box.play(
        "lack_room device; sends A; lack_room; budgets 1; passes 600; budgets 1 5; passes 1200; budgets 1 5 7;"
        "passes 2400; budgets 1 5 7 8; passes 4800; budgets 1 5 7 8 9; passes 96000; budgets 1 5 7 8 9"
    )
    assert box.engine.next_wakeup_s() is None


def test_line_with_larger_experts_regains_their_room_of_a_lowered_budget():
    box = Box(device_bytes=6, with_cpu=False)
    box.play("lack_room device; sends A; lack_room; passes 60; budget 1")
    graph = graph_of("abcde", {name.upper(): name for name in "abcde"})
    columns = {"gpu": {**box.matrix.experts["gpu"], "e": row("e", 5, form="fp16")}}
    box.handle(events.LineChanged(graph, PerformanceMatrix(columns), frozenset(), frozenset()))
    box.play("judges E OK; budget 5; passes 601")
    reasons = [change.reason for change in box.logged(BudgetChanged)]
    assert reasons == ["no memory", "the line has larger experts now", "it did not run short again"]


def test_requests_behind_a_batch_that_fits_nowhere_fall_back_to_another_executor():
    box = Box()
    box.play("lack_workspace 0; hold; sends A; release; verdicts OK; passes 120; hold")
    box.play("sends A A A A A A A; release")  # four make a batch; the others wait
    fell = box.logged(FellBack)[-1]
    assert (fell.expert, fell.copy, fell.pool, fell.reason) == ("a", "a@fp16", DEVICE, "no memory")
    assert fell.requests > 0
    assert [each.retry_s for each in box.logged(FellBack)] == [0.25, 0.5]
    box.verdicts(*["OK"] * 8)


def test_expert_of_the_batch_out_of_memory_is_evicted_last():
    box = Box(device_bytes=2, with_cpu=False)
    box.play("sends A B; lack_workspace 0; sends A")
    (gone,) = box.logged(Evict)
    assert (gone.expert, gone.stage, gone.freed_bytes) == ("b", 2, 1)
    assert (gone.decision.for_copy, gone.decision.needed_bytes) == ("", 1)
    assert [candidate.expert for candidate in gone.decision.candidates] == ["b", "a"]
