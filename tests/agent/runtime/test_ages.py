"""Ages of open work, by predictions and limits; without a thread or a clock."""

import pytest

from agent.core.effects import StartLoad
from agent.core.performance import ExecutorSpec, ExpertProfile, Footprint, Performance, PerformanceMatrix
from agent.core.request import Batch
from agent.faults.errors import WorkOverdue
from agent.runtime.ages import AgeLimits, OpenWork

LIMITS = AgeLimits(logged_s=10.0, logged_multiple=2.0, ended_s=50.0, ended_multiple=5.0)
PERFORMANCE = Performance(K_s=4.0, B_s=2.0, max_batch=8, workspace_bytes=0)
PROFILE = PerformanceMatrix({"cpu": {"cls/slow": ExpertProfile("slow", PERFORMANCE, Footprint(1), {"ssd": 30.0})}})
EXECUTORS = [ExecutorSpec(0, "cpu", "host")]


def batch_of(expert, size):
    return Batch(1, 0, expert, expert, tuple(range(size)), 0)


def load_of(expert):
    return StartLoad(1, expert, expert, "ssd", "host", 1000)


@pytest.fixture
def work():
    return OpenWork(LIMITS, EXECUTORS, PROFILE, None)


def test_unpredicted_work_has_the_least_limits(work, caplog):
    work.open_batch(batch_of("cls/unknown", 1), 100.0)
    assert work.next_due_s() == 110.0
    work.look(109.9)
    assert not caplog.records
    work.look(110.0)
    work.look(149.9)
    assert len(caplog.records) == 1
    with pytest.raises(WorkOverdue, match="the batch of 1 for cls/unknown on executor 0"):
        work.look(150.0)


def test_age_limits_grow_with_the_prediction(work):
    work.open_batch(batch_of("cls/slow", 8), 0.0)  # 34 s
    assert work.next_due_s() == 68.0
    work.look(68.0)
    assert work.next_due_s() == 170.0
    work.close_batch(1)
    work.open_load(load_of("cls/slow"), 0.0)  # 30 s
    assert work.next_due_s() == 60.0


@pytest.mark.parametrize(("processor", "ended_s"), [("cpu", 600.0), ("cuda", 60.0), ("emulated", 60.0)])
def test_hung_device_with_known_times_is_noticed_after_a_minute(processor, ended_s):
    quick = ExpertProfile("quick", Performance(0.01, 0.01, 8, 0), Footprint(1), {"host": 0.01})
    known = PerformanceMatrix({processor: {"cls/quick": quick}})
    work = OpenWork(AgeLimits(), [ExecutorSpec(0, processor, "device")], known)
    work.open_batch(batch_of("cls/quick", 8), 0.0)
    work.look(work.next_due_s())
    assert work.next_due_s() == ended_s
    work.close_batch(1)
    work.open_load(StartLoad(1, "cls/quick", "quick", "host", "device", 1000), 0.0)
    work.look(work.next_due_s())
    assert work.next_due_s() == 60.0


def test_overdue_work_is_announced_before_it_ends_the_agent(work):
    work.open_load(load_of("cls/unknown"), 0.0)
    work.look(10_000.0)
    work.look(10_039.9)
    with pytest.raises(WorkOverdue, match="10040 s"):
        work.look(10_040.0)
