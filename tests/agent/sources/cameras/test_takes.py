"""A camera's interval, in virtual time."""

from __future__ import annotations

from agent.sources.cameras.takes import NEVER, Interval


def test_the_interval_fires_while_frames_come_and_makes_up_for_nothing():
    interval = Interval(2.0)
    assert not interval.is_due(0.0, is_streaming=False)
    assert interval.deadline == NEVER
    fired = [now for now in (100.0, 101.0, 102.0, 109.0, 110.9, 111.0) if interval.is_due(now, is_streaming=True)]
    assert fired == [100.0, 102.0, 109.0, 111.0]
    assert not Interval(None).is_due(0.0, is_streaming=True)
