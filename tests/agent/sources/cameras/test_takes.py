"""Which frames are wanted, and when the interval fires, in virtual time."""

from __future__ import annotations

from agent.sources.cameras.frames import Trigger
from agent.sources.cameras.takes import AT_ONCE, NEVER, Interval, Takes
from tests.lines import subject


def trigger(number: int, asked_s: float = 0.0) -> Trigger:
    return Trigger(subject(f"top@{number}"), number, asked_s)


def filled(count: int) -> Takes:
    takes = Takes(5.0)
    for number in range(1, count + 1):
        takes.add(trigger(number, asked_s=number))
    return takes


def numbers(triggers: list[Trigger]) -> list[int]:
    return [each.number for each in triggers]


def test_triggers_are_asked_for_in_their_order_and_few_at_once() -> None:
    takes = filled(7)
    assert numbers(takes.ask(0.0)) == [1, 2, 3, 4]
    assert len(takes.ask(0.0)) == 0
    assert takes.answer(1) == trigger(1, 1)
    assert numbers(takes.ask(2.0)) == [5]
    assert AT_ONCE == 4


def test_a_lost_connection_has_them_asked_for_anew() -> None:
    takes = filled(2)
    takes.ask(0.0)
    takes.disconnect()
    assert takes.asked_since == NEVER
    assert numbers(takes.ask(3.0)) == [1, 2]
    assert takes.asked_since == 3.0


def test_one_that_waited_too_long_leaves_and_a_late_frame_is_nobodys() -> None:
    takes = filled(2)
    takes.ask(1.0)
    assert takes.deadline == 6.0
    assert numbers(takes.overdue(5.9)) == []
    assert numbers(takes.overdue(6.0)) == [1]
    assert takes.answer(1) is None
    assert numbers(takes.clear()) == [2]
    assert takes.deadline == NEVER


def test_the_interval_fires_while_frames_come() -> None:
    interval = Interval(2.0)
    assert not interval.is_due(0.0, is_streaming=False)
    assert interval.deadline == NEVER
    assert [now for now in range(100, 108) if interval.is_due(now, is_streaming=True)] == [100, 102, 104, 106]


def test_what_the_interval_missed_is_not_made_up_for() -> None:
    interval = Interval(2.0)
    assert interval.is_due(0.0, is_streaming=True)
    assert interval.is_due(9.0, is_streaming=True)
    assert not interval.is_due(10.9, is_streaming=True)
    assert interval.is_due(11.0, is_streaming=True)


def test_without_an_interval_none_fires() -> None:
    assert not Interval(None).is_due(0.0, is_streaming=True)
