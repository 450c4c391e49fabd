"""Suite of the source contract: ``keeps_the_contract``."""

import threading
import time
from contextlib import nullcontext

from agent.subject import SourceStatus
from experts.expert import Verdict

WAIT_S = 30.0
QUIET_S = 0.3  # in which a source that has stopped offers nothing


class ContractLine:
    """A ``agent.sources.base.Line`` that accepts every image, and commits a verdict when a test says so."""

    def __init__(self, config, journaled=None):
        self.config = config
        self.left_overs = ()
        self.arrivals = []
        self.refusals = []
        self._journaled = journaled or {}
        self._changed = threading.Condition()

    def has_room(self, source):
        return True

    def expects(self, subject, source):
        return True

    def offer_image(self, arrival, source):
        with self._changed:
            self.arrivals.append(arrival)
            self._changed.notify_all()
        if not source.keeps_images:
            source.image_accepted(arrival.subject)

    def refuse_subject(self, subject, reason, source):
        self.refusals.append((subject, reason))
        source.verdict_committed(subject, Verdict.UNKNOWN, reason)

    def reading(self, subject):
        return nullcontext()

    def reserve_key(self, key, asked_sha256):
        return True

    def release_key(self, key):
        return

    def journaled_image(self, number):
        return self._journaled[number]

    def first(self):
        with self._changed:
            assert self._changed.wait_for(lambda: self.arrivals, WAIT_S), "nothing is offered"
            return self.arrivals[0]


def keeps_the_contract(make, line):
    """An image is offered whole and once, comes again after a crash where the source keeps it, and ends with its
    verdict; a stopped source offers nothing."""
    source = make(line)
    source.start()
    arrival = line.first()
    subject = arrival.subject
    assert (bool(subject.key), bool(subject.image), subject.arrived_at.tzinfo is not None) == (True, True, True)
    assert subject.component or subject.expert or subject.shows_board
    assert arrival.image
    stopped(source)
    keys = [each.subject.key for each in line.arrivals]
    assert len(set(keys)) == len(keys)
    if source.keeps_images:  # as after a crash: no verdict was told
        source.close(WAIT_S)
        line.arrivals.clear()
        source = make(line)
        source.start()
        assert line.first().subject.key == subject.key
        assert source.holds(subject.key) or source.held
    for each in tuple(line.arrivals):
        source.verdict_committed(each.subject, Verdict.OK, None)
    deadline_s = time.monotonic() + WAIT_S
    while source.held:
        assert time.monotonic() < deadline_s, "what is judged is not let go"
        time.sleep(0.01)
    status = source.status()
    assert status is None or (isinstance(status, SourceStatus) and status.name == source.name)
    stopped(source)
    source.close(WAIT_S)
    count = len(line.arrivals)
    time.sleep(QUIET_S)
    assert len(line.arrivals) == count, "a stopped source offers"


def stopped(source):
    source.stop(0.0)
    assert source.stop(WAIT_S)
