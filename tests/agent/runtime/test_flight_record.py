"""What the record tells of a real loop: waits, batches, loads, evictions, decisions, preparation; and its bounds."""

import gc
import threading
import time
from collections import deque

import pytest

from agent.core import events
from agent.core.effects import Assigned, Evict, EvictionDecision
from agent.core.performance import ExecutorSpec, PoolSpec
from agent.core.request import Batch
from agent.runtime.flight_record import BATCHES, EVICTIONS, MARKS, REQUESTS, FlightRecord, percentile
from tests.agent.runtime.test_loop import Agent


def ended(agent):
    """Courses of all requests that a loop has ended, by number."""
    found = {request: agent.loop.record.find(f"k{request}") for request in agent.outcomes}
    assert all(is_over for _, is_over in found.values())
    return {request: course for request, (course, _) in found.items()}


@pytest.fixture
def served(line):
    """Three requests for own-0, then one each for other experts; two copies fit."""
    told = {}

    def name_it(request, outcome):
        agent.loop.record.named(request, f"k{request}")
        told[request] = outcome

    agent = Agent(line, room=2, on_outcome=name_it)
    agent.outcomes = told
    with agent:
        agent.numbers = [agent.submit(name) for name in ("own-0", "own-0", "own-0", "own-1", "own-2", "own-3", "chain")]
        agent.settle()
        yield agent


def test_course_of_a_request_has_executor_load_and_batch_in_seconds_since_arrival(served):
    courses = ended(served)
    assert courses.keys() == set(served.numbers)
    for course in courses.values():
        for step in course["steps"]:
            assert (step["executor"], step["processor"]) == (0, "cpu")
            assert [candidate["executor"] for candidate in step["candidates"]] == [0]
            assert 0.0 <= step["queued_s"] <= step["batch"]["began_s"]
            assert step["batch"]["began_s"] + step["batch"]["seconds"] <= course["total_s"] + 0.001
    loaded = [step for course in courses.values() for step in course["steps"] if step["load"] is not None]
    for step in loaded:
        assert (step["load"]["from"], step["load"]["to"], step["load"]["failure"]) == ("ssd", "host", None)
        assert step["load"]["seconds"] > 0.0
    assert {"cls/own-2", "cls/own-3"} <= {step["expert"] for step in loaded}  # more experts than have room
    chain = courses[served.numbers[-1]]["steps"]
    assert [step["expert"] for step in chain] == ["cls/twin-0", "cls/wide"][: len(chain)]
    later = [step["queued_s"] for step in chain]
    assert later == sorted(later)


def test_requests_of_one_batch_joined_its_group(served):
    first, second, third = (ended(served)[number]["steps"][0] for number in served.numbers[:3])
    assert not first["joined"]
    assert second["joined"] or second["batch"] != first["batch"]
    assert third["batch"]["images"] >= 1


def test_evictions_are_recorded_with_claim_stage_and_candidates_under_their_load(served):
    evictions = served.loop.record.evictions()
    assert len(evictions) == served.loop.statistics().engine.evictions
    by_loads = [each for load in served.loop.record.timeline(60.0).loads for each in load.evicted]
    assert [each for each in evictions if each.for_expert] == by_loads
    for each in evictions:
        assert each.pool == "host"
        assert each.stage in (1, 2, 3)
        assert each.expert in each.candidates
        assert each.claim in {"head", "prefetch", "patient", "overdue", "bypass"}


def test_timeline_is_in_order_and_forgets_what_is_older(served):
    record = served.loop.record
    timeline = record.timeline(60.0)
    statistics = served.loop.statistics()
    assert len(timeline.batches) == statistics.engine.batches
    assert sum(span.requests for span in timeline.batches) == sum(each.images for each in statistics.executors)
    assert len(timeline.loads) == sum(statistics.engine.loads.values())
    decisions, prepared = record.decisions(timeline.since_s), record.preparations(timeline.since_s)
    for spans in (timeline.batches, timeline.loads):
        begins = [span.began_s for span in spans]
        assert begins
        assert begins == sorted(begins)
    assert [began_s for _, began_s, _ in decisions] == sorted(began_s for _, began_s, _ in decisions)
    for before, after in zip(timeline.batches, timeline.batches[1:], strict=False):
        assert before.ended_s <= after.began_s  # one executor
    assert {event for event, *_ in decisions} >= {"Started", "Arrived", "Loaded", "Finished"}
    assert {request for request, *_ in prepared} <= set(served.numbers)
    assert not record.timeline(0.0).batches
    assert not record.decisions(record.timeline(0.0).at_s)


def test_images_and_batches_of_an_expert_are_counted_with_their_times(served):
    seen = served.loop.record.seen("cls/own-0")
    assert seen.images == 3
    assert 1 <= seen.batches <= 3
    assert 0.0 < seen.p50_s <= seen.p99_s
    assert served.loop.record.seen("cls/kin-0").p99_s is None


def test_failed_load_is_recorded_with_its_reason(breakable_line):
    breakable_line.file_of("own-0").unlink()
    with Agent(breakable_line) as agent:
        agent.submit("own-0")
        agent.settle()
        failures = [span.failure for span in agent.loop.record.timeline(60.0).loads if span.expert == "cls/own-0"]
    assert failures
    assert all(failures)


# -- bounds, by hand: a loop would need minutes --


class ByHand:
    def __init__(self):
        self.now_s = 0.0
        executors = [ExecutorSpec(0, "cpu", "host")]
        self.record = FlightRecord(executors, [PoolSpec("host", 1, 1)], deque(maxlen=1), lambda: self.now_s)

    def arrive(self, request):
        self.record.decided(events.Arrived(request, "c0"), self.now_s, self.now_s)
        self.record.assigned(Assigned(request, "a", 0, joined=False, candidates=()))

    def run(self, batch, *requests, quantum_s=None, seconds=1.0):
        self.record.batch_began(Batch(batch, 0, "a", "a@fp32", requests, 0, quantum_s), self.now_s)
        self.now_s += seconds
        self.record.batch_ended(batch, self.now_s, has_failed=False)


def test_counts_since_the_start_outlive_the_rings():
    hand = ByHand()
    for _ in range(EVICTIONS + 1):
        hand.record.evicted(Evict("a", "a@fp32", "host", 1, 1, EvictionDecision("b@fp32", 1, (), "head")))
    for number in range(BATCHES + 1):
        hand.run(number, number)
    assert len(hand.record.evictions()) == EVICTIONS
    assert hand.record.evicted_counts() == {"a": EVICTIONS + 1}
    assert (hand.record.seen("a").images, hand.record.seen("a").batches) == (BATCHES + 1, BATCHES + 1)


def test_unfinished_request_is_found_in_its_group_or_batch():
    hand = ByHand()
    hand.record.named(7, "k")
    hand.arrive(7)
    hand.now_s = 2.0
    course, is_over = hand.record.find("k")
    assert (is_over, course["total_s"], course["steps"][0]["batch"]) == (False, 2.0, None)
    assert hand.record.waiting("a") == [0]
    hand.record.batch_began(Batch(1, 0, "a", "a@fp32", (7,), 0), 3.0)
    batch = hand.record.find("k")[0]["steps"][0]["batch"]
    assert batch == {"images": 1, "began_s": 3.0, "seconds": None}
    assert hand.record.waiting("a") == []


def test_text_of_many_quanta_is_recorded_as_one_batch():
    hand = ByHand()
    hand.record.named(1, "text")
    hand.arrive(1)
    for number in range(1, 1000):
        hand.run(number, 1, quantum_s=0.1, seconds=0.25)
    (step,) = hand.record.find("text")[0]["steps"]
    assert (step["batch"]["began_s"], step["batch"]["seconds"]) == (0.0, 999 * 0.25)


def test_request_moved_endlessly_is_recorded_a_bounded_number_of_times():
    hand = ByHand()
    hand.record.named(1, "k")
    for _ in range(10 * MARKS):
        hand.record.assigned(Assigned(1, "a", 0, joined=False, candidates=()))
    hand.arrive(1)
    for _ in range(10 * MARKS):
        hand.record.assigned(Assigned(1, "a", 0, joined=False, candidates=()))
    assert len(hand.record.find("k")[0]["steps"]) == MARKS - 2


def test_record_keeps_the_latest_requests_and_no_name_of_an_ended_one():
    hand = ByHand()
    for request in range(REQUESTS + 10):
        hand.record.named(request, f"k{request}")
        hand.arrive(request)
        hand.record.request_ended(request)
    assert hand.record.find("k9") is None
    assert hand.record.find("k10")[1]
    assert hand.record.course_of(REQUESTS) is None


def test_records_are_untracked_by_the_garbage_collector():
    hand = ByHand()
    gc.collect()
    before = len(gc.get_objects())
    for request in range(2_000):
        hand.arrive(request)
        hand.run(request, request)
        hand.record.request_ended(request)
    for _ in range(4):  # a tuple is forgotten after the tuples in it
        gc.collect()
    assert len(gc.get_objects()) < before + 200


def test_concurrent_readers_never_see_a_changing_ring():
    hand, failed = ByHand(), []
    is_over = threading.Event()

    def read():
        try:
            while not is_over.is_set():
                hand.record.timeline(60.0)
                hand.record.seen("a")
                hand.record.find("none")
        except Exception as error:  # noqa: BLE001  # whatever it is
            failed.append(error)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    until_s, request = time.monotonic() + 1.0, 0
    while time.monotonic() < until_s:
        request += 1
        hand.record.named(request, "k")
        hand.arrive(request)
        hand.run(request, request, seconds=0.0)
        hand.record.request_ended(request)
    is_over.set()
    for reader in readers:
        reader.join()
    assert not failed


def test_percentiles_equal_the_nearest_rank():
    assert percentile([], 0.99) is None
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile(list(range(1, 101)), 0.99) == 99
