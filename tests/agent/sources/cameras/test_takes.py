"""The ledger of triggers, and the interval, in virtual time."""

from __future__ import annotations

from agent.sources.cameras.takes import NEVER, Interval, Takes, Trigger
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


def test_triggers_are_asked_for_in_their_order_few_at_once_and_anew_after_a_lost_connection() -> None:
    takes = filled(7)
    assert numbers(takes.ask(0.0)) == [1, 2, 3, 4]
    assert takes.ask(0.0) == []
    assert takes.answer(1) == trigger(1, 1)
    assert numbers(takes.ask(2.0)) == [5]
    takes.disconnect()
    assert takes.asked_since == NEVER
    assert numbers(takes.ask(3.0)) == [2, 3, 4, 5]
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


def test_the_interval_fires_while_frames_come_and_makes_up_for_nothing() -> None:
    interval = Interval(2.0)
    assert not interval.is_due(0.0, is_streaming=False)
    assert interval.deadline == NEVER
    fired = [now for now in (100.0, 101.0, 102.0, 109.0, 110.9, 111.0) if interval.is_due(now, is_streaming=True)]
    assert fired == [100.0, 102.0, 109.0, 111.0]
    assert not Interval(None).is_due(0.0, is_streaming=True)
