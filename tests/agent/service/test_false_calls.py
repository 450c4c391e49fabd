"""An expert that calls more good parts bad than before raises an alarm, and a person's reviews clear it."""

from contextlib import closing
from datetime import UTC, datetime, time

import pytest

from agent.records.result_writer import ResultStore
from agent.records.station.alarms import raise_alarm
from agent.records.station.reviews import Reviews
from agent.records.station.shifts import Shifts
from agent.records.truth.false_calls import EARLIER, LATEST
from agent.service.false_calls import EVERY_S, FalseCallWatch
from experts.expert import Verdict
from tests.agent.service.fake_line import FakeLine
from tests.lines import result
from tests.waiting import settled, until

OK, NG = Verdict.OK, Verdict.NG
TOLD = "30 of the latest 50 reviewed NG verdicts of cls/f0 are false calls, before 20 of 200"


class Station:
    """Results that people review at once, and the watch of them."""

    def __init__(self, store):
        self.now = 0.0
        self.watch = FalseCallWatch(store.path, lambda: self.now)
        self._store = store
        self._reviews = Reviews(store, Shifts((time(6),), UTC), lambda: datetime.now(UTC))
        self._stored = 0

    def judge(self, people, machine=NG, experts=("cls/f0",)):
        """``people``: their verdicts, oldest first."""
        first = self._stored + 1
        for _ in people:
            self._stored += 1
            self._store.record(result(f"k{self._stored}", machine, experts=experts))
        settled(self._store)
        return [self._reviews.add(seq, said, "ann") for seq, said in enumerate(people, first)]

    def drift(self, called=30):
        """The false calls of cls/f0 rise; the latest reviews."""
        self.judge(([OK] + [NG] * 9) * (EARLIER // 10))
        return self.judge([NG] * (LATEST - called) + [OK] * called)

    def raised(self):
        """As the line's watch of alarms stores it."""
        self._store.write(lambda database: raise_alarm(database, "false_calls/cls/f0", "", datetime.now(UTC)))
        settled(self._store)

    def undo(self, reviews):
        for each in reviews:
            self._reviews.undo(each.number, "ann")

    def alarms(self):
        self.now += EVERY_S
        self.watch.step()
        return {expert: alarm.message for expert, alarm in self.watch.alarms.items()}


@pytest.fixture
def station(tmp_path):
    (tmp_path / "state").mkdir()
    with closing(ResultStore(tmp_path / "state" / "results.db")) as store:
        yield Station(store)


def test_rise_of_false_calls_raises_an_alarm_until_reviews_change(station):
    assert station.alarms() == {}
    latest = station.drift()
    alarms = station.alarms()
    assert list(alarms) == ["cls/f0"]
    assert alarms["cls/f0"].startswith(f"{TOLD} - see `coserve review list LINE --expert cls/f0`")
    station.undo(latest[-30:])
    assert station.alarms() == {}


def test_raised_false_call_alarm_survives_a_restart(station):
    station.drift(called=15)
    assert station.alarms() == {}
    station.raised()
    assert list(station.alarms()) == ["cls/f0"]


def test_images_passed_by_an_expert_or_called_ng_by_another_do_not_count(station):
    for said in ([NG] * LATEST * 2, [OK] * LATEST):
        station.judge(said, machine=OK)
        station.judge(said, experts=())
        station.judge(said, machine=Verdict.UNKNOWN)
    station.drift()
    station.judge([OK] * LATEST, experts=("cls/f0", "det/x"))
    assert list(station.alarms()) == ["cls/f0"]


def test_reviews_are_read_at_intervals(station):
    station.alarms()
    station.drift()
    station.watch.step()
    assert not station.watch.alarms


def test_false_call_alarm_ends_when_the_line_drops_its_expert(station, tmp_path):
    station.drift()
    line = FakeLine(tmp_path)
    with line.served() as service:
        until(lambda: [alarm for alarm in service.desk.status().alarms if TOLD in alarm])
        line.remove_expert(0)
        line.document["boards"]["main"] = {"components": {"c1": 1}}
        line.write()
        service.desk.reload()
        assert not [alarm for alarm in service.desk.status().alarms if TOLD in alarm]
