"""A place of images that hangs, such as a share: few wait for it, the others are refused with the reason."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from agent.faults.errors import OrderRefused, Reason
from agent.service.station.places import CALLERS, PlaceReader
from tests.waiting import until

LONG_S = 60.0


def test_hanging_place_is_refused_at_once_after_the_first_timeout():
    now, begun, goes_on = [0.0], threading.Event(), threading.Event()
    place = PlaceReader("share", lambda: None, lambda: now[0])

    def hangs():
        begun.set()
        return goes_on.wait(LONG_S)

    with ThreadPoolExecutor() as pool:
        first = pool.submit(place.made, hangs, LONG_S)
        assert begun.wait(LONG_S)
        now[0] = LONG_S + 1
        with pytest.raises(OrderRefused, match="has not answered for 61 s: check its share") as refused:
            place.made(hangs, LONG_S)
        assert refused.value.reason is Reason.NOT_NOW
        goes_on.set()
        assert first.result(LONG_S)
    assert place.made(lambda: "again", LONG_S) == "again"
    place.stop()


def test_more_callers_than_its_share_of_the_threads_wait_for_half_of_the_patience():
    goes_on, ended = threading.Event(), []
    place = PlaceReader("share", lambda: None, lambda: 0.0)

    def waits(number):
        try:
            place.made(lambda: goes_on.wait(LONG_S), 1.0 if number < CALLERS else 0.02)
        except OrderRefused:
            ended.append(number)

    threads = [threading.Thread(target=waits, args=(number,)) for number in range(2 * CALLERS)]
    for thread in threads:
        thread.start()
    until(lambda: len(ended) == len(threads))
    goes_on.set()
    assert sorted(ended) == list(range(2 * CALLERS)), "none is left waiting"
    place.stop()
