"""Failures that pass are no verdict: probation, trials, pauses that double, and release; quarantine is for the rest."""

import itertools

import pytest

from agent.core.effects import Assigned, Evict, Standing, StandingChanged, StartBatch, StartLoad
from agent.core.events import BatchFailed
from agent.core.performance import PoolSpec
from experts.expert import Rejected
from tests.agent.core.script import played
from tests.agent.core.shell import PASS
from tests.agent.core.worlds import AnsweringLine


class Box(AnsweringLine):
    """Component X runs on expert x, component AB on a and then on b."""

    def __init__(self, capacity=2, executors=1, script="forget", **limits):
        names = "abcdef"
        routes = {name.upper(): name for name in names} | {"AB": "ab"}
        processors = {f"cpu{number}": (names, "host") for number in range(executors)}
        pools, usage = (PoolSpec("host", capacity, 8 * executors),), dict.fromkeys(names, 0.1)
        super().__init__(pools, processors, routes=routes, usage=usage, **limits)
        self.play(script)

    # -- verbs of a script --

    def loads_fail(self, expert, *reason, permanent=False):
        self.bad_loads[expert] = {"reason": " ".join(reason) or "I/O error", "permanent": permanent}

    def weights_are_bad(self, expert, *reason):
        self.loads_fail(expert, *reason, permanent=True)

    def loads_pass(self):
        self.bad_loads.clear()

    def batches_fail(self, out_of_memory=""):
        self.bad_batches = {"a": {"reason": "it broke", "out_of_memory": bool(out_of_memory)}}

    def batches_pass(self):
        self.bad_batches.clear()

    def images(self, said="pass"):
        self.result = PASS if said == "pass" else Rejected("not an image")

    def due(self, at_s):
        assert self.engine.next_wakeup_s() == float(at_s)

    def runs(self, *requests):
        """What is held."""
        assert [request for batch in self.held for request in batch.requests] == [*map(int, requests)]

    def standings(self, *told):
        """Of a, with the time of each."""
        changes = [(each.standing, at_s) for at_s, each in self.log if isinstance(each, StandingChanged)]
        assert changes == list(zip(told[::2], map(float, told[1::2]), strict=True))

    def pauses(self, *seconds):
        assert [each.retry_s for each in self.logged(StandingChanged)] == [*map(float, seconds)]

    def loads_of(self, expert, count):
        assert len(self.logged(StartLoad, expert)) == int(count)


def by_loads(**more):
    """On probation: a's loads failed three times, at 0, 0.25 and 0.75 s."""
    return Box(script="loads_fail a; sends A; passes 0.75", **more)


def by_batches(**more):
    """On probation: three of a's batches failed, at 0 s."""
    return Box(script="batches_fail; sends A A A", **more)


@played("""
without free room no copy leaves for a trial but the next request after the pause is one | by_loads() |
    loads_pass; judges B OK; judges C OK; forget; passes 10; quiet; probation a; judges A OK; probation
a pinned expert is placed again as soon as there is room | by_loads(pinned=frozenset("a")) |
    loads_pass; hold; sends B C; passes 10; probation a; quarantined c; probation; holds host ba
after failed batches the next request after the pause is the trial | by_batches() |
    batches_pass; passes 0.99; judges A UNKNOWN; passes 0.01; judges A OK; standings probation 0 serving 1; probation
nothing is loaded for a trial that nobody asks for | by_batches() |
    forget; passes 100; quiet
one trial at a time | by_batches() |
    passes 1; batches_pass; hold; sends A A A A; runs 4; release;
    verdicts UNKNOWN UNKNOWN UNKNOWN OK UNKNOWN UNKNOWN UNKNOWN
what lacks memory does not count against an expert | Box() |
    batches_fail out_of_memory; sends A A A A A; standings; verdicts UNKNOWN UNKNOWN UNKNOWN UNKNOWN UNKNOWN
what is cancelled does not count against an expert | Box() |
    batches_fail; hold; sends A; cancelled 1; release; hold; sends A; cancelled 2; release; hold; sends A; cancelled 3;
    release; hold; sends A; cancelled 4; release; standings; verdicts UNKNOWN UNKNOWN UNKNOWN UNKNOWN
an image that cannot be read does not end a row of failures | Box() |
    images rejected; batches_fail; sends A; batches_pass; sends A; batches_fail; sends A; batches_pass; sends A;
    batches_fail; sends A; probation a
bad weights found during probation are for good | by_loads() |
    weights_are_bad a wrong sha256; passes 1000; standings probation 0.75 quarantine 1.75; probation; loads_pass;
    passes 1000; judges A UNKNOWN a is in quarantine: wrong sha256
an expert on probation is not loaded on a guess | Box(capacity=3) |
    # b would be speculated on while a runs
    loads_fail b; sends B; passes 0.75; forget; sends AB; loads_of b 0; loads_of a 1
a stopping agent tries nobody again | by_loads() |
    drain; forget; passes 100; quiet
loads that fail leave a probation for batches to batches | by_batches() |
    # the trial's loads fail; a good load says nothing of the batches
    loads_fail a; passes 1; sends A; passes 0.75; probation a 3 loads in a row failed, last: I/O error; loads_pass;
    passes 60; probation a; judges A UNKNOWN; batches_pass; passes 120; judges A OK; probation
""")
def test_standing_of_an_expert_follows_its_failures_and_trials(made, script):
    eval(made).play(script)


@pytest.mark.parametrize("pinned", ["", "a"])
def test_damaged_copy_is_loaded_again_and_its_batch_is_judged_by_the_new_one(pinned):
    line = Box(script="hold; sends A A A", pinned=frozenset(pinned))
    held, line.held = line.held, None
    line.forget()
    for batch in held:
        line.handle(BatchFailed(batch.id, "moving its bytes failed", is_damaged=True))
    line.play("verdicts OK OK OK; standings; loads_of a 1")
    assert [each.expert for each in line.logged(Evict)] == ["a"]


def test_repeatedly_damaged_copies_give_unknown_and_blame_no_expert():
    line = Box()
    line.bad_batches = {"a": {"reason": "moving its bytes failed", "is_damaged": True}}
    line.play("sends A A A A; verdicts UNKNOWN UNKNOWN UNKNOWN UNKNOWN; standings; batches_pass; judges A OK")
    assert {str(each.reason) for each in line.outcomes.values()} == {"a: moving its bytes failed", "None"}


def test_expert_on_probation_is_loaded_again_without_a_request_and_released():
    line = by_loads()
    line.play(
        "loads_pass; due 1.75; passes 0.99; judges A UNKNOWN; passes 0.01; standings probation 0.75 serving 1.75;"
        "probation; judges A OK"
    )
    assert line.logged(StandingChanged)[-1].reason == "a load went well"


@pytest.mark.parametrize(
    "script",
    ["hold; sends B A; cancelled 5", "hold; sends A; cancelled 4", "batches_fail out_of_memory; hold; sends A",
     "batches_pass; images rejected; hold; sends A"],
    ids=["cancelled in its queue", "cancelled while it ran", "no memory", "not an image"],
)  # fmt: skip
def test_inconclusive_trial_leaves_the_next_one_free(script):
    by_batches().play(f"passes 1; {script}; release; standings probation 0; batches_pass; images pass; judges A OK")


def test_loads_that_fail_in_a_row_mean_probation_and_unknown_with_the_last_reason():
    line = Box(script="loads_fail a timed out; sends A A; passes 0.25; loads_fail a; standings; passes 0.5")
    reason = "3 loads in a row failed, last: I/O error"
    assert line.on_probation == {"a": reason}
    assert line.engine.statistics().quarantined == {}
    assert line.logged(StandingChanged) == [StandingChanged("a", Standing.PROBATION, reason, retry_s=1.0)]
    line.send("A")
    assert [str(each.reason) for each in line.outcomes.values()] == [f"a is on probation: {reason}"] * 3


def test_probation_pause_doubles_up_to_a_minute_and_resets_after_success():
    line = by_loads()
    line.pass_time(400)
    told = [each.retry_s for each in line.logged(StandingChanged)]
    assert told[:8] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert set(told[8:]) == {60}
    loads = [at_s for at_s, each in line.log if isinstance(each, StartLoad) and each.expert == "a"]
    assert [later - earlier for earlier, later in itertools.pairwise(loads[2:])] == told[:-1]
    # b and c take a's room
    line.play("loads_pass; passes 60; probation; loads_fail a; judges B OK; judges C OK; forget; sends A; passes 0.75")
    line.pauses(1)


def test_failed_trial_doubles_the_pause_and_reports_the_number_of_failures():
    line = by_batches()
    told = []
    for _ in range(9):
        line.pass_time(60)
        line.send("A")
        told.append(line.logged(StandingChanged)[-1])
    assert [each.retry_s for each in told] == [2, 4, 8, 16, 32, 60, 60, 60, 60]
    assert told[0].reason == "4 batches in a row failed, last: it broke"
    line.play("batches_pass; passes 60; sends A; batches_fail; forget; sends A A A; pauses 1")


def test_trial_reloads_the_weights_although_another_executor_still_used_them():
    line = Box(executors=2, script="batches_fail; hold; sends A A A A")
    while line.held and not line.on_probation:
        line.answer_batch(line.held.pop(0).id)
    line.probation("a")
    while line.held:  # the other executor's batch ends after the probation began
        line.answer_batch(line.held.pop(0).id)
    assert "a" not in line.held_in()


@pytest.mark.parametrize("goes_well", [True, False])
def test_late_batch_may_release_an_expert_but_does_not_lengthen_its_pause(goes_well):
    line = Box(executors=2, script="hold; sends A A A A")
    (late,) = (batch for batch in line.held if batch.executor == 1)
    line.held.remove(late)
    line.batches_fail()
    while not line.on_probation:
        line.answer_batch(line.held.pop().id) if line.held else line.send("A")
    assert "a" in line.held_in()  # the late one runs on it
    if goes_well:
        line.batches_pass()
    line.answer_batch(late.id)
    assert [each.standing for each in line.logged(StandingChanged)] == ["probation", "serving"][: 1 + goes_well]


@pytest.mark.parametrize(("kind", "most"), [("loads", 20), ("batches", 35), ("both in turn", 100)])
def test_flapping_expert_is_retried_at_a_bounded_rate(kind, most):
    line = Box()
    for number in range(3000):
        failing = kind if kind != "both in turn" else ("loads", "batches")[number // 175 % 2]
        line.loads_fail("a") if failing == "loads" else line.loads_pass()
        line.batches_fail() if failing == "batches" else line.batches_pass()
        line.play("sends A; passes 0.2")
    batches_tried = sum(started.batch.expert == "a" for started in line.logged(StartBatch))
    assert len(line.logged(StartLoad, "a")) + batches_tried < most
    assert len(line.logged(Assigned)) < most
    line.play("loads_pass; batches_pass; passes 60; judges A OK")
