"""The housekeeper outlives its duties, tells which fail, and says when they work again."""

from __future__ import annotations

import threading

from agent.service.housekeeping import TOLD_AGAIN_STEPS, Housekeeper

PATIENCE_S = 60.0


class Duty:
    """Counts its turns, and fails in them while it is told to."""

    def __init__(self):
        self.turns = 0
        self.error = None

    def __call__(self):
        self.turns += 1
        if self.error is not None:
            raise self.error


def failures_told(caplog):
    return [one.getMessage() for one in caplog.records if "housekeeping_failed" in one.getMessage()]


def test_a_duty_that_fails_once_has_its_turn_again(caplog):
    first, second = Duty(), Duty()
    keeper = Housekeeper({"first": first, "second": second})
    first.error = OSError("disk gone")
    keeper.step()
    assert (first.turns, second.turns) == (1, 1)
    assert keeper.statistics().failing == {"first": "OSError: disk gone"}
    first.error = None
    keeper.step()
    assert (first.turns, second.turns) == (2, 2)
    assert (keeper.statistics().steps, keeper.statistics().failures, keeper.statistics().failing) == (2, 1, {})
    assert failures_told(caplog) == ["housekeeping_failed duty=first times=1: it is tried again"]
    assert "housekeeping_works_again duty=first failures=1" in caplog.text


def test_a_duty_that_fails_for_good_is_told_at_first_and_then_every_minute(caplog):
    duty = Duty()
    duty.error = ValueError("broken")
    keeper = Housekeeper({"duty": duty})
    for _ in range(2 * TOLD_AGAIN_STEPS):
        keeper.step()
    assert keeper.statistics().failing == {"duty": "ValueError: broken"}
    assert [told.split()[2] for told in failures_told(caplog)] == ["times=1:", f"times={TOLD_AGAIN_STEPS + 1}:"]
    keeper.step()
    assert len(failures_told(caplog)) == 3


def test_its_thread_goes_on_after_a_failure_until_it_is_stopped():
    had_turns = threading.Event()
    turns = []

    def fail():
        turns.append(threading.current_thread().name)
        if len(turns) == 2:
            had_turns.set()
        raise RuntimeError("always")

    keeper = Housekeeper({"duty": fail})
    keeper.start()
    assert had_turns.wait(PATIENCE_S)
    assert keeper.stop(PATIENCE_S)
    assert set(turns) == {"housekeeper"}
    assert keeper.statistics().failures == len(turns)


def test_one_that_was_never_started_can_be_stopped():
    assert Housekeeper({}).stop(0.0)
