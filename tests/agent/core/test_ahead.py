"""Images are prepared before their batches start; a batch is queued behind a running one where that costs nothing."""

from dataclasses import replace

import pytest

from agent.core import events
from agent.core.effects import Prepare
from agent.core.performance import SSD, PerformanceMatrix, PoolSpec, PreparedForm
from agent.core.request import Precedence, Work
from tests.agent.core.script import played
from tests.agent.core.shell import PASS
from tests.agent.core.worlds import Line, of, row

SMALL, LARGE = PreparedForm("small", 1), PreparedForm("large", 5)
FORMS = {"a": SMALL, "b": SMALL, "c": LARGE, "h": PreparedForm("huge", 6)}


class Ahead(Line):
    """A component of each expert's name in capitals, and R of ``route``. d has no form, e has no executor.

    Executors share ``memories``; a batch has at most two images.
    """

    def __init__(self, route="a", budget=100, executors=1, memories=1, memory=9, workspaces=99, **more):
        pools = tuple(PoolSpec(f"m{number}", memory, workspaces) for number in range(memories))
        processors = {f"cpu{number}": ("abcdh", f"m{number % memories}") for number in range(executors)}
        routes = {"R": route} | {name.upper(): name for name in "abcdh"}
        usual = {"prepared": FORMS, "max_batch": 2, "load_s": {SSD: 10.0}, "workspace": 0}
        super().__init__(pools, processors, routes=routes, prepared_bytes=budget, **usual | more)

    # -- verbs of a script --

    def uses(self, used, later="0"):
        told = self.engine.statistics().prepared
        assert (told.used_bytes, told.later_bytes) == (int(used), int(later))

    def begun(self, ahead, late):
        told = self.engine.statistics().prepared
        assert (told.begun_ahead, told.begun_late) == (int(ahead), int(late))

    def queues(self, *told):
        """Running and waiting requests of each executor."""
        queues = self.engine.statistics().queues
        assert [f"{each.running}+{each.requests}" for each in queues] == list(told)

    def length(self, seconds):
        assert self.engine.statistics().queues[0].length_s == float(seconds)

    def offer(self, component):
        """A request of idle precedence."""
        self.handle(events.Arrived(0, component, precedence=Precedence.IDLE))


def line_of_three(memory):
    """Executor 0 runs b, executor 1 runs a."""
    speeds = dict.fromkeys(("cpu0", "cpu1", "cpu2"), (1.0, 0.0))
    line = Ahead(executors=3, memory=memory, load_s={SSD: 1.0}, speeds=speeds)
    line.play("asks BA; loaded b; loaded a")
    return line


# Each case: a line, and what is played on it: see ``script``. K is 1 s, B 2 s, and a load takes 10 s.
CASES = """
an image is prepared when it is queued while its expert loads | Ahead() |
    asks A => load a ssd>m0 | prepare 1 a by 0 @0; uses 1; loaded a => run a 1; uses 0; begun 1 0
an image whose batch starts at once is prepared first | Ahead() |
    bring a; asks A @20 => prepare 2 a by 0 @20 | run a 2; begun 1 1
images are due when the groups before them have run or at the latest prediction where these have no form | Ahead() |
    asks A; asks A => prepare 2 a by 0 @1; asks B => load b ssd>m0 | prepare 3 b by 0 @4;
    asks C => prepare 4 c by 0 @7; asks D => nothing; asks H => prepare 6 h by 0 @53
far images leave a quarter of the budget to near ones | Ahead(budget=8, max_batch=1) |
    asks AAAAAAAAAA; uses 6; loaded a @2 => run a 1 | prepare 7 a by 0 @10 | run a 2; uses 6
a near image may take the whole budget and those without room are prepared with their batch |
    Ahead(budget=1, max_batch=3) | asks AAA; uses 1;
    loaded a => prepare 2 a by 0 @0 | prepare 3 a by 0 @0 | run a 1,2,3; begun 1 2; uses 0;
    failed a => forget 2 | forget 3 | run a 1 | prepare 2 a by 0 @3
images begin in the order of their groups | Ahead(budget=8, max_batch=1) |
    asks CABAB; uses 6;
    cancelled 1 => UNKNOWN 1: cancelled | prepare 4 a by 0 @4 | prepare 3 b by 0 @6 | prepare 5 b by 0 @7
images of several queues begin in order of their predicted starts |
    Ahead(budget=8, executors=2, max_batch=1, speeds={"cpu1": (3.0, 2.0)}) | asks CBAAABAB;
    cancelled 1 => UNKNOWN 1: cancelled | prepare 3 a by 0 @3 | prepare 6 b by 1 @3 | prepare 4 a by 0 @4 |
    prepare 5 a by 0 @5 | prepare 7 a by 0 @6; uses 6
# later steps
a form that a later step needs is kept from the first step on | Ahead("ac") |
    asks R => load a ssd>m0 | prepare 1 a+c by 0 @0; uses 6 5; loaded a; uses 5 5; finished a => prepare 1 c by 0 @0;
    uses 5; loaded c => run c 1; uses 0; begun 1 0
steps of one form share it | Ahead("ab") |
    asks R => load a ssd>m0 | prepare 1 a+b by 0 @0; uses 1 1; loaded a; uses 1 1; finished a => prepare 1 b by 0 @0;
    uses 1; loaded b; uses 0
forms of the steps after the next one stay | Ahead("abc") |
    asks R => load a ssd>m0 | prepare 1 a+b+c by 0 @0; loaded a; finished a => prepare 1 b+c by 0 @0; uses 6 5
no form is kept for an expert without an executor | Ahead("aec") | asks R => load a ssd>m0 | prepare 1 a+c by 0 @0
a step whose expert has no form releases all others | Ahead("adc") |
    asks R => load a ssd>m0 | prepare 1 a+c by 0 @0; loaded a; finished a => forget 1; uses 0
later forms take up to an eighth of the budget | Ahead("ac", budget=40) |
    asks R => load a ssd>m0 | prepare 1 a+c by 0 @0
no more than an eighth of the budget is for later forms | Ahead("ac", budget=39) |
    asks R => load a ssd>m0 | prepare 1 a by 0 @0; loaded a; finished a => forget 1 | prepare 1 c by 0 @0
a far image waits for room for its later forms and a near one goes without |
    Ahead("ac", budget=40, executors=3, max_batch=1, speeds={"cpu1": (1.0, 9.0), "cpu2": (1.0, 9.0)}) |
    asks RRRRRRRR; uses 30 25; asks R => prepare 9 a+c by 1 @0; asks R => prepare 10 a by 2 @0; uses 37 30
a far image that never fits with its later forms goes without | Ahead("ha", budget=8) |
    asks D; asks R => load h ssd>m0 | prepare 2 h by 0 @13; asks R => nothing
a batch that starts at once goes without later forms where they find no room | Ahead("ac", budget=40, executors=9) |
    bring a; asks RRRRRRR; asks R => prepare 9 a+c by 7 @0 | run a 9;
    asks R => prepare 10 a by 8 @0 | run a 10; uses 40 40
# forms without room
an image larger than the budget is left to its batch | Ahead(budget=4) | asks C => load c ssd>m0; loaded c => run c 1
an image may be as large as the budget | Ahead(budget=5) | asks C => load c ssd>m0 | prepare 1 c by 0 @0
forms are released at a step that needs more than the budget | Ahead("ah", budget=5) |
    asks R => load a ssd>m0 | prepare 1 a by 0 @0; loaded a; finished a => forget 1
# requests that are queued again
the images of a failed batch are not decoded again | Ahead() |
    asks AA; loaded a; uses 0; failed a => run a 1; uses 1; begun 2 0
the images of a failed batch are decoded again where others took their room |
    Ahead(budget=2, executors=2, speeds={"cpu1": (1.0, 3.0)}) |
    asks AA; loaded a; asks BB; uses 2;
    failed a => forget 1 | forget 2 | prepare 1 a by 0 @0 | run a 1
the images of a failed batch need no more than the room that is left |
    Ahead(budget=4, executors=2, speeds={"cpu1": (1.0, 3.0)}) | asks AA; loaded a; asks BB; uses 2; failed a => run a 1;
    uses 3
the images of a failed batch keep the forms of later steps | Ahead("ac", budget=40) |
    asks RRRRRRR; loaded a; uses 34 30; failed a => nothing; uses 34 30
a request that moves to another executor keeps its forms | Ahead(executors=2, memories=2, load_attempts=1) |
    asks AA; load_failed a => nothing; queues 0+0 0+2; uses 2; cancelled 2; uses 1; cancelled 1; uses 0
# batches queued ahead
a full batch is queued behind the running one and no third | Ahead() |
    bring a; asks AA; length 6; asks A => prepare 4 a by 0 @4 | run a 3,4; length 7; uses 2; queues 1+2;
    asks A => prepare 5 a by 0 @7; asks A; queues 1+4; finished a => OK 2 after a | run a 5,6; queues 2+2; uses 2;
    finished a => OK 3 after a | OK 4 after a; uses 0
a batch that is not full waits for others to join | Ahead() |
    bring a; asks A; asks A => prepare 3 a by 0 @3; finished a => OK 2 after a | run a 3
a full batch passes no group before it | Ahead() |
    bring ab; asks ABA; asks A => prepare 6 a by 0 @7; asks B => prepare 7 b by 0 @4 | run b 4,7
without images prepared ahead the next batch waits | Ahead(budget=0) | bring a; asks AA; asks A => nothing
an image without room keeps its batch from being queued ahead | Ahead(budget=1) |
    bring a; asks AA; asks A => nothing; finished a => OK 2 after a | prepare 4 a by 0 @0 | run a 3,4
a batch queued ahead needs no more workspace than the running one | Ahead(workspace=1) |
    bring a; asks AA; asks A => prepare 4 a by 0 @4; finished a => OK 2 after a | run a 3,4; asks A;
    asks A => prepare 6 a by 0 @5 | run a 5,6
a batch queued ahead has the workspace of the running one | Ahead(workspace=1, workspaces=3, max_batch=4) |
    asks AAA; loaded a => run a 1,2,3; asks AA; asks A => prepare 6 a by 0 @7 | run a 4,5,6
a batch queued ahead is as small as a shortage of memory left it | Ahead() |
    asks AA; loaded a; short a; finished a; finished a; asks A; asks A => prepare 4 a by 0 @3 | run a 4
no batch is queued ahead in a memory where another expert lacks room beyond the bound | Ahead(executors=2, memory=1) |
    asks A; loaded a; asks C; tick @1000.0; asks A; asks A => prepare 4 a by 0 @1001
a batch is queued ahead where another expert lacks room | Ahead(executors=2, memory=1) |
    asks A; loaded a; asks C; asks A; asks A => prepare 4 a by 0 @4 | run a 3,4
no batch is queued ahead of a request of idle precedence | Ahead() |
    bring a; offer A => prepare 0 a by 0 @0 | run a 0; asks A; asks A => prepare 3 a by 0 @4
a group behind a batch that is queued ahead has time | Ahead(memory=2, max_overtake_s=100.0, long_queue_s=100.0) |
    bring ad; asks AAA; asks C => prepare 6 c by 0 @7; tick @49.0 => nothing;
    tick @50.0 -> evict d m0 stage 2, load c ssd>m0
a failed batch is retried alone behind the batch that is queued ahead | Ahead() |
    bring a; asks AAAAA; finished a; failed a => nothing; finished a => OK 5 after a | OK 6 after a | run a 3;
    finished a => OK 3 after a | run a 4
# other experts
no batch of another expert is queued ahead where one lacks room | line_of_three(memory=2) |
    # for c; executors 0 and 1 take turns
    asks C; asks BBB; queues 1+2 1+1 0+1; asks B => prepare 7 b by 1 @2
a batch of another expert is queued ahead where none lacks room | line_of_three(memory=3) |
    asks C; loaded c; asks BBBB; queues 1+2 1+1 1+1; asks B => prepare 8 b by 1 @2 | run b 5,8
a group behind a batch that is queued ahead takes nothing that a group before it needs | Ahead(executors=2, memory=2) |
    # executor 1 runs b, too, and a is queued behind it
    bring ab; asks BBBB; asks B => prepare 7 b by 0 @4 | run b 5,7; asks A; asks C; tick @0.0 -> nothing;
    tick @3.0 -> nothing
"""


@played(CASES)
def test_images_are_prepared_ahead(made, script):
    eval(made).play(script)


def test_requests_are_prepared_by_the_forms_of_the_line_at_that_time():
    line = Ahead("ac")
    line.play("asks R")
    column = {name: row(name, prepared=SMALL) for name in "abcdh"}
    line.handle(events.LineChanged(line.graph, PerformanceMatrix({"cpu0": column}), frozenset(), frozenset()))
    line.play("uses 6 5; asks R; uses 7 6")
    assert [(each.later, each.later_bytes) for each in of(Prepare, line.effects)] == [(("c",), 1)]
    assert line.engine.statistics().prepared.budget_bytes == 100


def test_early_answer_of_a_batch_queued_ahead_is_ignored():
    line = Ahead()
    line.play("bring a; asks AAA")
    ahead = line.running[max(line.running)]
    line.handle(events.Finished(ahead.id, (PASS, PASS)))
    line.handle(events.BatchFailed(ahead.id, "too early"))
    assert line.engine.statistics().unexpected_events == 2
    line.play("finished a; finished a => OK 3 after a | OK 4 after a")


def test_text_request_needs_no_prepared_image_and_runs_beside_image_requests():
    line = Ahead()
    line.handle(events.Arrived(8, "A", work=Work(1, 1, 2)))
    line.play("uses 0; asks A => prepare 1 a by 0 @0; loaded a => run a 8,1; uses 0; finished a; uses 0")


def first(images):
    return next(iter(images._places.values()))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda images: images._images.update({9: images._images[1]}), "an image is kept for a request that has its"),
        (lambda images: setattr(images, "_used_bytes", 9), "^prepared bytes miscounted$"),
        (lambda images: setattr(images, "_later_bytes", 9), "^later bytes miscounted$"),
        (lambda images: setattr(images, "_budget_bytes", 0), "^more is prepared than has room$"),
        (lambda images: images._places.update(dict.fromkeys(images._places)), "^a place is lost$"),
        (lambda images: setattr(first(images), "begun", 2), "^begun images are miscounted$"),
        (lambda images: setattr(first(images), "is_listed", False), "^a place with waiting images is not listed$"),
        (
            lambda images: images._places.update({0: replace(first(images), waiting={}, begun=0)}),
            "^an empty place is kept$",
        ),
    ],
)
def test_miscounted_prepared_images_are_reported_by_name(damage, told):
    line = Ahead(budget=1)
    line.play("asks AA")
    damage(line.engine._state.images)
    with pytest.raises(AssertionError, match=told):
        line.engine.check_invariants()
