"""Backoff: the pauses double up to the longest, however many failures there were."""

from agent.faults.backoff import Backoff


def test_pauses_double_up_to_the_longest():
    backoff = Backoff(0.5, 3.0)
    assert [backoff.pause_s(failures) for failures in (0, 1, 2, 3, 4, 10**9)] == [0.0, 0.5, 1.0, 2.0, 3.0, 3.0]
