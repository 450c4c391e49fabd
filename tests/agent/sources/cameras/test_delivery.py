"""Delivery of frames and lost triggers, without a camera."""

from __future__ import annotations

import logging
import threading

import pytest

from agent.sources.cameras.delivery import OVERFLOW_MAXIMUM, Delivery
from tests.agent.sources.cameras.stand_ins import WAIT_S
from tests.lines import subject
from tests.waiting import until


def frame(number):
    return subject(f"top@{number}")


class Hands:
    """A delivery of a triggered camera and its output; callbacks wait until the door is opened."""

    def __init__(self, limit):
        self.out: list[str] = []
        self.door = threading.Event()
        self.faults = 0  # so often the door breaks
        self.one = Delivery("top", self._take, self._tell_lost, lambda: True, limit, None)
        self.one.thread.start()

    def _take(self, given, content):
        assert content == b"png"
        self._pass()
        self.out.append(given.key)

    def _tell_lost(self, given, reason):
        self._pass()
        self.out.append(f"{given.key} lost: {reason}")

    def _pass(self):
        self.door.wait()
        if self.faults:
            self.faults -= 1
            raise OSError("no space")


@pytest.fixture
def hands():
    made = Hands(2)
    yield made
    made.door.set()
    made.one.stop()
    made.one.end()
    made.one.thread.join(WAIT_S)
    assert not made.one.thread.is_alive()


def test_what_was_let_in_goes_out_in_its_order_and_only_then_makes_room(hands):
    assert [hands.one.admit() for _ in range(3)] == [True, True, False]
    hands.one.put(frame(1), b"png")
    hands.one.overflow(frame(3), "full")
    hands.one.lose(frame(2), "stalled")
    assert (hands.one.waiting, hands.out) == (2, [])
    hands.door.set()
    until(lambda: hands.one.waiting == 0)
    assert hands.out == ["top@1", "top@3 lost: full", "top@2 lost: stalled"]
    assert (hands.one.received, hands.one.lost) == (1, 2)
    assert hands.one.admit()


def test_what_overflows_is_bounded_and_the_pause_is_told(hands):
    """No trigger is dropped silently."""
    for number in range(OVERFLOW_MAXIMUM):
        assert hands.one.can_overflow()
        hands.one.overflow(frame(number), "full")
    assert not hands.one.can_overflow()
    assert "interval_s pauses" in (hands.one.alarm or "")
    hands.door.set()
    until(lambda: len(hands.out) == OVERFLOW_MAXIMUM)
    until(hands.one.can_overflow)
    assert hands.one.alarm is None


def test_a_door_that_breaks_is_told_once_and_costs_no_other_frame(hands, caplog):
    hands.one.stop()  # it waits for nothing then
    hands.faults = 3
    for number in range(4):
        hands.one.put(frame(number), b"png")
    hands.door.set()
    until(lambda: hands.one.received == 2)
    assert hands.out == ["top@1 lost: its frame was not taken: no space", "top@2", "top@3"]
    assert (hands.one.handed, hands.one.lost, hands.one.alarm) == (2, 2, None)
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
