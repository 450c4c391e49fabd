"""The pump, on time of our own: a day without a broker passes at once."""

import asyncio
import json
from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise

import pytest

from agent.faults.errors import ReceiverUnavailable
from agent.records.delivery.pump import Pump
from agent.records.outbox import Outbox, OutboxReader, forget
from agent.records.result_writer import ResultStore
from experts.errors import ConfigError
from experts.expert import Verdict
from tests.agent.records.delivery.conftest import VirtualLoop, board, image
from tests.waiting import settled

DAY_S = 24 * 3600.0


class FakeReceiver:
    """Hears what it is told, with when; ``down_until_s``: until then it cannot be reached."""

    name = "mqtt"

    def __init__(self):
        self.heard = []
        self.tries_s = []
        self.down_until_s = 0.0
        self.asks_for_s = None
        self.error = None
        self.ends_on = lambda _: False  # numbers of results whose message ends the accepted connection
        self.drop = asyncio.Event()

    @property
    def seqs(self):
        return [seq for _, seq, _ in self.heard]

    @asynccontextmanager
    async def connected(self):
        now_s = asyncio.get_running_loop().time()
        self.tries_s.append(now_s)
        if self.error is not None:
            raise self.error
        if now_s < self.down_until_s:
            raise ReceiverUnavailable(self.name, "nobody is there", self.asks_for_s)
        yield self

    async def deliver(self, message):
        seq = json.loads(message.payload)["seq"]
        if self.ends_on(seq):
            raise ReceiverUnavailable(self.name, "ended", by_message=True)
        self.heard.append((asyncio.get_running_loop().time(), seq, message))

    async def lost(self):
        await self.drop.wait()
        self.drop.clear()
        raise ReceiverUnavailable(self.name, "gone")


class Stage:
    """A store that is followed by an outbox, and a pump that empties it, on a loop whose time leaps."""

    def __init__(self, folder, *, events=("ng",), limit=1000, per_s=1000.0):
        self.file = folder / "r.db"
        self.outbox = Outbox("demo", ["mqtt"], events, limit)
        self.store = ResultStore(self.file, followers=[self.outbox])
        self.reader = OutboxReader(self.file)
        self.receiver = FakeReceiver()
        self.settled = []
        self.pump = Pump(self.receiver, self.reader, self.settle, per_s)
        self.outbox.when_committed(self.pump.wake)
        self.runner = asyncio.Runner(loop_factory=VirtualLoop)

    def settle(self, ids, done):
        self.settled.append(list(ids))
        self.store.write(partial(forget, "mqtt", ids), lambda _: done())

    def run(self, is_over, step_s=0.05, longest_s=600.0):
        """Pump until this is so, or so much of the loop's time has passed."""

        async def main():
            pumping = asyncio.ensure_future(self.pump.run())
            while not is_over():
                assert not pumping.done(), pumping.exception()
                assert asyncio.get_running_loop().time() < longest_s, "it did not come about"
                await asyncio.sleep(step_s)
            pumping.cancel()
            await asyncio.gather(pumping, return_exceptions=True)

        self.runner.run(main())
        settled(self.store)


@pytest.fixture
def stage(tmp_path, request):
    def make_stage(**settings):
        made = Stage(tmp_path, **settings)
        request.addfinalizer(made.store.close)
        request.addfinalizer(made.runner.close)
        return made

    return make_stage


def test_messages_wait_through_a_day_without_a_broker(stage, caplog):
    """Bounded, each board's order kept, drained at a limited rate; told once when it goes and when it is back."""
    one = stage(events=("board", "ng"), limit=300, per_s=20.0)
    one.receiver.down_until_s = DAY_S
    for number in range(400):
        serial = f"B{number % 7}"
        one.store.record(image(number, board=serial))
        one.store.record_board(board(serial, Verdict.NG, counts={Verdict.NG: number + 1}))
    settled(one.store)
    assert one.reader.standing("mqtt").waiting == 300
    last = one.reader.waiting("mqtt", 1000)[-1].id
    one.run(lambda: bool(one.receiver.heard) and one.receiver.heard[-1][2].id == last, 60.0, 2 * DAY_S)
    assert len(one.receiver.heard) == 300
    of_board = {}
    for _, _, message in one.receiver.heard:
        payload = json.loads(message.payload)
        of_board.setdefault((message.board, message.event), []).append(payload.get("revision", payload["seq"]))
    assert len(of_board) == 14
    assert all(told == sorted(told) for told in of_board.values())
    times_s = [at_s for at_s, _, _ in one.receiver.heard]
    assert times_s[0] >= DAY_S
    assert times_s[-1] - times_s[0] == pytest.approx(299 / 20.0)
    assert all(later - sooner >= 1 / 20.0 - 1e-6 for sooner, later in pairwise(times_s))
    waits_s = [later - sooner for sooner, later in pairwise(one.receiver.tries_s)]
    assert (waits_s[:8], max(waits_s)) == (pytest.approx([0.5, 1, 2, 4, 8, 16, 32, 60]), pytest.approx(60.0))
    told = [record.getMessage().split(" ")[0] for record in caplog.records]
    assert told == ["receiver_unavailable", "receiver_available"]


def test_dropped_messages_are_logged_once_per_outage_and_counted(stage, caplog):
    one = stage(limit=100)
    one.receiver.down_until_s = 1000.0
    numbers = iter(range(10_000))

    def more():
        for _ in range(60):
            one.store.record(image(next(numbers)))
        settled(one.store)
        return len(one.receiver.tries_s) > 8

    one.run(more, 10.0, 5000.0)
    one.receiver.down_until_s = 0.0
    one.run(lambda: one.reader.standing("mqtt").waiting == 0)
    one.run(lambda: any("outbox_told" in record.getMessage() for record in caplog.records))
    told = [record.getMessage() for record in caplog.records if record.getMessage().startswith("outbox_")]
    assert len(told) == 2
    assert told[0].startswith("outbox_full receiver=mqtt waiting=100")
    given_way = one.reader.standing("mqtt").given_way
    assert given_way > 0
    assert told[1] == f"outbox_told receiver=mqtt given_way={given_way}"


def test_receivers_retry_after_is_respected(stage):
    one = stage()
    one.receiver.down_until_s, one.receiver.asks_for_s = 1.0, 120.0
    one.store.record(image(1))
    settled(one.store)
    one.run(lambda: bool(one.receiver.heard))
    assert one.receiver.tries_s == pytest.approx([0.0, 120.0])


def test_connection_lost_while_idle_is_made_again(stage):
    one = stage()
    one.receiver.down_until_s = 10.0

    def drop():
        if one.runner.get_loop().time() > 100.0 and len(one.receiver.tries_s) == 6:
            one.receiver.drop.set()
        return len(one.receiver.tries_s) == 7

    one.run(drop)
    assert one.receiver.tries_s[-1] < 101.0, "at once, after more than a minute of connection"
    assert one.pump.alarm == "gone"
    one.store.record(image(1))
    settled(one.store)
    one.run(lambda: one.receiver.seqs == [1])
    assert one.pump.alarm is None


@pytest.mark.parametrize("error", [ConfigError("no password"), ZeroDivisionError("a mistake of ours")])
def test_any_delivery_error_raises_an_alarm_and_is_retried(stage, error, caplog):
    one = stage()
    one.receiver.error = error

    def heal():
        if len(one.receiver.tries_s) == 5:
            one.receiver.error = None
        return bool(one.receiver.heard)

    one.store.record(image(1))
    settled(one.store)
    one.run(heal)
    assert one.receiver.seqs == [1]
    told = [record for record in caplog.records if record.getMessage().startswith("receiver_unavailable")]
    assert len(told) == 1
    assert str(error) in told[0].getMessage()


def test_delivered_message_is_not_sent_again_while_its_commit_is_pending(stage):
    one = stage(per_s=100_000.0, limit=3000)
    kept = []
    settle, one.pump._settle = one.pump._settle, lambda ids, done: kept.append((ids, done))
    for number in range(1, 1501):
        one.store.record(image(number))
    settled(one.store)
    steps = iter(range(10_000))
    one.run(lambda: len(one.receiver.heard) >= 1000 and next(steps) > 500)
    assert 1000 <= len(one.receiver.heard) <= 1100
    assert one.receiver.seqs == list(range(1, len(one.receiver.heard) + 1))
    one.pump._settle = settle
    for ids, done in kept:
        settle(ids, done)
    one.run(lambda: len(one.receiver.heard) == 1500)
    assert one.receiver.seqs == list(range(1, 1501))


def test_message_that_ends_each_accepted_connection_is_refused_while_others_are_delivered(stage, caplog):
    one = stage()
    one.receiver.ends_on = {2, 3}.__contains__
    for number in range(1, 8):
        one.store.record(image(number))
    settled(one.store)
    one.run(lambda: one.reader.standing("mqtt").waiting == 0)
    assert (sorted(one.receiver.seqs), one.pump.refused) == ([1, 4, 5, 6, 7], 2)
    assert "result-3-ng (board B1): ended" in one.pump.refusal
    told = [record.getMessage() for record in caplog.records if record.getMessage().startswith("message_refused")]
    assert len(told) == 2
    one.store.record(image(8))
    settled(one.store)
    one.run(lambda: one.pump.refusal is None, 60.0, 7200.0)
    assert one.receiver.seqs[-1] == 8


def test_message_accepted_at_last_is_delivered_after_the_one_tried_ahead_of_it(stage):
    one = stage()
    one.receiver.ends_on = lambda seq: seq == 1 and len(one.receiver.tries_s) < 6 and not one.receiver.heard
    for number in range(1, 5):
        one.store.record(image(number))
    settled(one.store)
    one.run(lambda: len(one.receiver.heard) == 4)
    assert (one.receiver.seqs, one.pump.refused) == ([2, 1, 3, 4], 0)


def test_lone_message_that_ends_connections_waits_until_another_one_shows_that_the_receiver_works(stage):
    one = stage()
    one.receiver.ends_on = {1}.__contains__
    one.store.record(image(1))
    settled(one.store)
    one.run(lambda: len(one.receiver.tries_s) > 10, 10.0)
    assert (one.reader.standing("mqtt").waiting, one.pump.refused, one.pump.alarm) == (1, 0, "ended")
    one.store.record(image(2))
    settled(one.store)
    one.run(lambda: one.reader.standing("mqtt").waiting == 0)
    assert (one.receiver.seqs, one.pump.refused) == ([2], 1)


@pytest.mark.slow
def test_receiver_that_ends_every_connection_for_a_day_costs_no_message(stage):
    one = stage(limit=1000)
    one.receiver.ends_on = lambda _: one.runner.get_loop().time() < DAY_S
    for number in range(1, 201):
        one.store.record(image(number))
    settled(one.store)
    one.run(lambda: len(one.receiver.heard) == 200, 60.0, 2 * DAY_S)
    assert (sorted(one.receiver.seqs), one.pump.refused) == (list(range(1, 201)), 0)
