"""One call to the line at a time: concurrent callers share its answer, and those who come soon after."""

import asyncio
import threading

import pytest

from agent.doors.http.single_flight import SingleFlight

PATIENCE_S = 60.0


class Line:
    """Answers with the number of the call, once it may."""

    def __init__(self):
        self.calls, self.may_answer = 0, threading.Event()

    def ask(self):
        self.calls += 1
        assert self.may_answer.wait(PATIENCE_S)
        if self.calls == 3:
            raise OSError("a broken disk")
        return self.calls


@pytest.fixture
def line():
    return Line()


async def answered(flight, callers):
    return await asyncio.gather(*(flight.answer(PATIENCE_S) for _ in range(callers)))


def test_concurrent_callers_and_those_soon_after_share_one_call(line):
    flight = SingleFlight(line.ask, "flight", fresh_s=3600.0)
    line.may_answer.set()
    assert asyncio.run(answered(flight, 20)) + asyncio.run(answered(flight, 2)) == [1] * 22
    flight.thread.stop()


def test_stale_answer_and_an_error_are_asked_for_again(line):
    flight = SingleFlight(line.ask, "flight")
    line.may_answer.set()
    assert [asyncio.run(answered(flight, 1)), asyncio.run(answered(flight, 1))] == [[1], [2]]
    with pytest.raises(OSError, match="broken"):
        asyncio.run(answered(flight, 1))
    assert asyncio.run(answered(flight, 1)) == [4]
    flight.thread.stop()


def test_hanging_call_is_not_repeated_and_times_out_for_its_callers(line):
    flight = SingleFlight(line.ask, "flight")
    for _ in range(2):
        with pytest.raises(TimeoutError):
            asyncio.run(flight.answer(0.05))
    assert line.calls == 1
    line.may_answer.set()
    flight.thread.stop()
