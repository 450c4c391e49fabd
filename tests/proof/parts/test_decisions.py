"""The Engine whose decisions are timed is at work all the time, at the queue length that the figures are told for."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from proof.parts.decisions import measure_decisions

BATCHES = 4 * 8  # four executors, eight requests a batch at most
NOT_WAITING = 3 * BATCHES  # those that run or are held, and those that have ended and whose followers come next


@pytest.mark.parametrize("policy", ["coserve", "paper", "samba"])
def test_batches_end_and_experts_come_and_go_in_both_halves(policy):
    half, whole = (measure_decisions(500, calls, policy) for calls in (1000, 2000))
    first = {name: asdict(half)[name] for name in ("batches", "loads", "evictions")}
    second = {name: asdict(whole)[name] - count for name, count in first.items()}
    assert min(first.values()) > 10
    assert all(second[name] > count / 2 for name, count in first.items())


@pytest.mark.parametrize("queued", [200, 2000])
def test_the_queue_keeps_the_length_that_it_is_measured_at(queued):
    times = measure_decisions(queued, 2000)
    assert queued - NOT_WAITING <= times.fewest_queued <= times.most_queued <= queued + BATCHES
