"""An executor is given its next batch while one runs, where waiting for the answer could make nothing better."""

import pytest

from agent.core import events
from agent.core.effects import Evict, StartBatch
from tests.agent.core.test_ahead import GOOD, Line


class HoldingLine(Line):
    """One executor, with every batch that it was given; ``under_way`` in the order in which they run."""

    def __init__(self, prepared_bytes=100, **box):
        self.under_way, self.given = [], []
        super().__init__(prepared_bytes, **box)

    def handle(self, event, at=None):
        effects = super().handle(event, at)
        batches = [effect.batch for effect in effects if isinstance(effect, StartBatch)]
        self.under_way += batches
        self.given += [batch.requests for batch in batches]
        return effects

    def end(self):
        batch = self.under_way.pop(0)
        self.now += 0.1
        return self.handle(events.Finished(batch.id, (GOOD,) * len(batch.requests)))

    @property
    def queues(self):
        return self.engine.statistics().queues

    @property
    def queue(self):
        return self.queues[0]


def running(*then, **box):
    """A line that runs request 1, of a, when the others come."""
    line = HoldingLine(**box)
    line.ask("a", "b")
    line.load()
    while len(line.given) < 2:
        line.end()
    line.end()
    line.given.clear()
    line.last_request = 10
    line.ask("a", *then)
    assert line.given[0] == (11,)
    return line


def test_a_full_batch_is_given_behind_the_one_that_runs_and_no_third():
    line = running("a", "a", "a", "a")
    assert line.given == [(11,), (12, 13)]
    assert (line.queue.running, line.queue.requests) == (1, 4)
    line.end()
    assert line.given == [(11,), (12, 13), (14, 15)]
    assert (line.queue.running, line.queue.requests) == (2, 2)


def test_what_is_held_counts_in_when_the_executor_is_free():
    line = running("a")
    before_s = line.queue.length_s
    line.ask("a")
    assert line.given == [(11,), (12, 13)]
    assert abs(line.queue.length_s - before_s - 0.1) < 1e-9  # one more of K_s


def test_a_batch_that_somebody_may_still_join_waits():
    line = running("a")
    assert line.given == [(11,)]
    line.end()
    assert line.given == [(11,), (12,)]


def test_nobody_is_passed_by_what_is_held():
    line = running("b", "a", "a")
    assert line.given == [(11,)]  # of b another one may come; what is full is behind it
    line.ask("b")
    assert line.given == [(11,), (12, 15)]


def test_without_images_prepared_ahead_the_next_batch_waits_for_the_answer():
    assert running("a", "a", prepared_bytes=0).given == [(11,)]


def test_an_image_without_room_keeps_its_batch_from_being_held():
    line = running("a", "a", prepared_bytes=1)
    assert line.given == [(11,)]
    line.end()
    assert line.given == [(11,), (12, 13)]


@pytest.mark.parametrize(("waited_s", "given"), [(0.0, [(1,), (3, 4)]), (1000.0, [(1,)])])
def test_nothing_is_held_where_somebody_has_waited_for_room_beyond_the_bound(waited_s, given):
    line = HoldingLine(executors=2, memory=1)
    line.ask("a")
    line.load()
    line.ask("c")  # on the other executor; a is in use, and there is room for one
    line.now += waited_s
    line.handle(events.Tick())
    line.ask("a", "a")
    assert line.given == given


@pytest.mark.parametrize(("memory", "then", "held"), [(2, "bbbb", {0: (4, 6)}), (3, "bbbbb", {0: (4, 7), 1: (5, 8)})])
def test_another_expert_is_not_held_while_somebody_lacks_room_in_that_memory(memory, then, held):
    line = HoldingLine(executors=3, memory=memory)
    line.ask("b", "a")
    line.load()
    line.ask("c")  # on the third executor; a and b are in use
    running = [(batch.executor, batch.expert) for batch in line.under_way]
    assert sorted(running) == [(0, "b"), (1, "a"), (2, "c")][:memory]
    line.under_way.clear()
    line.ask(*then)  # by turns, until there are two behind b, and two behind a
    assert line.queues[1].requests == 2
    assert {batch.executor: batch.requests for batch in line.under_way} == held


@pytest.mark.parametrize("waited_s", [0.0, 3.0])  # 3 s: more than half of the overtaking bound
def test_whoever_stands_behind_a_held_batch_has_time_still_and_takes_nothing_that_is_needed_sooner(waited_s):
    line = HoldingLine(executors=2, memory=2)
    line.ask("a", "b")
    line.load()
    while line.under_way:
        line.end()
    line.last_request = 10
    line.ask("b", "b", "b", "b", "b", "a")
    assert line.given[2:] == [(11,), (12,), (13, 15)]  # 14 stands behind 12, and 16, which needs a, behind that
    line.ask("c")
    line.now += waited_s
    line.handle(events.Tick())
    assert not line.told(Evict)
    assert line.engine.statistics().evictions == 0


def test_an_answer_of_a_held_batch_before_its_turn_is_ignored():
    line = running("a", "a")
    held = line.under_way[1]
    line.handle(events.Finished(held.id, (GOOD, GOOD)))
    line.handle(events.BatchFailed(held.id, "too early"))
    assert line.engine.statistics().unexpected_events == 2
    line.end()
    line.end()
    assert line.engine.statistics().in_flight == 0


def test_a_batch_that_fails_is_tried_again_behind_what_is_held_one_by_one():
    line = running("a", "a", "a", "a")
    line.end()
    failing = line.under_way.pop(0)
    assert failing.requests == (12, 13)
    line.handle(events.BatchFailed(failing.id, "broke"))
    assert [batch.requests for batch in line.under_way] == [(14, 15)]
    line.end()
    line.end()
    line.end()
    assert line.given[-2:] == [(12,), (13,)]
    assert line.engine.statistics().in_flight == 0
