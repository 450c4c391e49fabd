"""Requests whose outcomes somebody waits for, over a loop that answers when the test says so."""

import numpy as np
import pytest

from agent.core.request import Outcome
from agent.faults.errors import AgentCrashed
from agent.runtime.requests import Requests
from experts.expert import Verdict

IMAGE = np.zeros((8, 8, 3), dtype=np.uint8)


class Loop:
    def __init__(self):
        self.asked, self.told, self.crash = [], [], None

    def when_crashed(self, tell):
        self.told.append(tell)

    def submit(self, image, *, component=None, expert=None):
        self.asked.append((component, expert))
        return len(self.asked)


@pytest.fixture
def loop():
    return Loop()


@pytest.fixture
def requests(loop):
    requests = Requests()
    requests.watch(loop)
    return requests


def outcome(label):
    return Outcome(Verdict.OK, label, 1.0, ())


def test_outcomes_are_in_the_order_of_the_requests_and_are_collected_once(loop, requests):
    requests.submit(IMAGE, component="resistor")
    requests.submit(IMAGE, expert="cls/a")
    for number, label in ((2, "second"), (1, "first")):
        requests.report(number, outcome(label))
    told = []
    ended = requests.collect(lambda done, total: told.append((done, total)))
    assert loop.asked == [("resistor", None), (None, "cls/a")]
    assert [each.outcome.label for each in ended] == ["first", "second"]
    assert ended[0].submitted_s <= ended[1].submitted_s <= ended[1].at_s <= ended[0].at_s
    assert told == [(1, 2), (2, 2)]
    requests.submit(IMAGE, component="resistor")
    requests.report(3, outcome("third"))
    assert ([each.outcome.label for each in requests.collect()], requests.collect()) == (["third"], [])


def test_a_crash_ends_the_wait_and_every_further_request(loop, requests):
    requests.submit(IMAGE, component="resistor")
    (tell,) = loop.told
    loop.crash = AgentCrashed(ValueError("broken"))
    tell(loop.crash)
    with pytest.raises(AgentCrashed, match="broken"):
        requests.collect()
    with pytest.raises(AgentCrashed, match="broken"):
        requests.submit(IMAGE, component="resistor")
    assert len(loop.asked) == 1
