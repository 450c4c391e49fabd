"""Made once: whoever asks at whatever moment gets the one thing, and nothing is kept that nobody needs."""

import gc
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from experts.backends.made_once import MadeOnce

WAIT_S = 60.0


class Thing:
    """Something that can be held, and told apart."""


def test_concurrent_requests_for_one_thing_build_it_once():
    asked, may_end = Event(), Event()

    def make(name):
        asked.set()
        assert may_end.wait(WAIT_S)
        return Thing()

    things = MadeOnce(make, kept=1)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(things, "a")
        assert asked.wait(WAIT_S)
        second = threads.submit(things, "a")  # asks while the first is being made
        may_end.set()
        assert first.result(WAIT_S) is second.result(WAIT_S)
    assert things.count == 1


def test_held_things_are_never_rebuilt_and_few_unused_ones_stay():
    things = MadeOnce(lambda number: Thing(), kept=2)
    held = [things(number) for number in range(100)]
    assert ([things(number) for number in range(100)], things.count) == (held, 100)
    del held
    for number in (1, 2, 1, 3):
        things(number)
    gc.collect()
    made = things.count
    for number in (1, 3):
        things(number)
    assert things.count == made
    things(2)
    assert things.count == made + 1


def test_error_is_raised_to_its_caller_and_the_next_call_tries_again():
    failures = [ValueError("not this time")]

    def make(name):
        if failures:
            raise failures.pop()
        return Thing()

    things = MadeOnce(make, kept=1)
    with pytest.raises(ValueError, match="not this time"):
        things("a")
    assert things("a") is things("a")
