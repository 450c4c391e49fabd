"""Alarms are raised and cleared once each, stored with their times, told to receivers, and open over a restart."""

import json
import sqlite3
import threading
from contextlib import closing
from datetime import UTC, datetime, timedelta

import pytest

from agent.records.database import read_rows, utc_text
from agent.records.outbox import Outbox, OutboxReader
from agent.records.result_writer import ResultStore
from agent.records.station.alarms import Alarm
from agent.records.verdict import AlarmRow
from agent.service.alarms import CLEARED_S, RAISED_S, AlarmWatch
from agent.sources.cameras.supervision import CameraState
from experts.backends.fake import FakeSkeleton
from experts.expert import Verdict
from tests.agent.records.delivery.conftest import broker, web_server  # noqa: F401  fixtures
from tests.agent.service.fake_line import asked, picture, write_clip
from tests.lines import order as order_of
from tests.waiting import settled, until

NOON = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)
ROWS = "SELECT name, cleared_at IS NOT NULL FROM alarms ORDER BY number DESC"
BELT, DISK = Alarm("camera/belt", "belt: OFFLINE"), Alarm("disk", "no room")


class Watched:
    """A watch whose time and alarms are the test's."""

    def __init__(self, path):
        self.path = path
        self.elapsed_s = 0.0
        self.there = []
        self.open()

    def open(self):
        self.outbox = Outbox("demo", ["mes"], ["alarm"], 100)
        self.store = ResultStore(self.path, followers=[self.outbox])
        clocks = {
            "clock": lambda: self.elapsed_s,
            "wall": lambda: NOON + timedelta(seconds=self.elapsed_s),
        }
        self.watch = AlarmWatch(lambda: self.there, self.store, self.outbox, **clocks)

    def see(self, *alarms, seconds=0.0):
        """What is there from now on, for so long, looked at twice a second."""
        self.there = list(alarms)
        self.watch.step()
        for _ in range(round(2 * seconds)):
            self.elapsed_s += 0.5
            self.watch.step()

    @property
    def names(self):
        return [row.name for row in self.watch.open]

    @property
    def rows(self):
        settled(self.store)
        return [(name, bool(is_cleared)) for name, is_cleared in read_rows(self.path, ROWS)]

    @property
    def messages(self):
        settled(self.store)
        messages = [json.loads(message.payload) for message in OutboxReader(self.path).waiting("mes", 100)]
        return [(message["name"], message["state"]) for message in messages]


@pytest.fixture
def watched(tmp_path):
    watched = Watched(tmp_path / "results.db")
    yield watched
    watched.store.close()


def test_lasting_alarm_is_raised_and_cleared_once_with_its_times(watched):
    watched.see(BELT, seconds=RAISED_S - 0.5)
    assert (watched.names, watched.rows) == ([], [])
    watched.see(BELT, seconds=60)
    settled(watched.store)
    raised_at = NOON + timedelta(seconds=RAISED_S)
    assert watched.watch.open == (AlarmRow(1, "camera/belt", "belt: OFFLINE", raised_at),)
    assert watched.messages == [("camera/belt", "raised")]
    watched.see(seconds=CLEARED_S)
    assert (watched.names, watched.rows) == ([], [("camera/belt", True)])
    ((cleared_at,),) = read_rows(watched.path, "SELECT cleared_at FROM alarms")
    assert cleared_at == utc_text(NOON + timedelta(seconds=watched.elapsed_s))
    assert watched.messages == [("camera/belt", "raised"), ("camera/belt", "cleared")]


def test_flapping_alarm_is_raised_once_and_a_short_one_never(watched):
    for _ in range(20):
        watched.see(BELT, seconds=RAISED_S - 0.5)
        watched.see(seconds=1)
    assert watched.messages == []
    watched.see(BELT, seconds=RAISED_S)
    for _ in range(20):
        watched.see(seconds=CLEARED_S - 0.5)
        watched.see(BELT, seconds=0.5)
    assert watched.messages == [("camera/belt", "raised")]


def test_alarms_of_one_name_are_one_and_show_their_latest_message(watched):
    watched.see(DISK, Alarm("disk", "and slow"), seconds=RAISED_S)
    assert [row.message for row in watched.watch.open] == ["no room; and slow"]
    watched.see(DISK, seconds=1)
    assert [row.message for row in watched.watch.open] == ["no room"]
    assert watched.rows == [("disk", False)]


def test_alarm_of_the_earlier_run_stays_or_is_cleared(watched):
    watched.see(BELT, DISK, seconds=RAISED_S)
    watched.store.close()
    watched.open()
    watched.see(DISK, seconds=CLEARED_S)
    assert [(row.number, row.name) for row in watched.watch.open] == [(2, "disk")]
    assert watched.rows == [("disk", False), ("camera/belt", True)]
    assert watched.messages == [("camera/belt", "raised"), ("disk", "raised"), ("camera/belt", "cleared")]


def test_any_text_can_be_an_alarm(watched):
    strange = Alarm("folder/\udcff", "no room in \udcff" * 1000)
    watched.see(strange, seconds=RAISED_S)
    assert watched.rows == [("folder/\\udcff", False)]
    (shown,) = watched.watch.open
    assert shown.message.encode().startswith(b"no room in \\udcff")
    watched.store.close()
    watched.open()
    watched.see(strange, seconds=RAISED_S + CLEARED_S)
    assert watched.rows == [("folder/\\udcff", False)]
    watched.see(seconds=CLEARED_S)
    assert watched.rows == [("folder/\\udcff", True)]


def test_alarm_is_shown_while_nothing_can_be_stored_and_stored_later(watched):
    with closing(sqlite3.connect(watched.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")  # no commit of ours can be made
        watched.see(Alarm("store", "results are not stored"), seconds=RAISED_S)
        assert [(row.number, row.name) for row in watched.watch.open] == [(None, "store")]
        watched.see(seconds=CLEARED_S)
        watched.see(BELT, seconds=RAISED_S)
        other.execute("ROLLBACK")
    until(lambda: watched.store.statistics().pending == 0)
    assert watched.rows == [("camera/belt", False), ("store", True)]
    assert [(row.number, row.name) for row in watched.watch.open] == [(2, "camera/belt")]


# -- of a served line --


def open_alarms(service):
    return {row.name: row.message for row in service.alarms.open}


@pytest.fixture
def hurried(monkeypatch):
    """Alarms of a served line are looked at as often as wanted, and raised and cleared at the second look."""
    for name, seconds in (("RAISED_S", 0.01), ("CLEARED_S", 0.01)):
        monkeypatch.setattr(f"agent.service.alarms.{name}", seconds)
    monkeypatch.setattr("agent.service.line_service.LOOK_S", 0.02)


def test_quarantined_expert_raises_an_alarm_sent_to_the_mes_until_it_serves(line, web_server, hurried):  # noqa: F811
    server = web_server()
    line.document["outbox"] = {"webhook": {"url": server.url}}
    weights = line.folder / "f1.yaml"
    kept = weights.read_text()
    weights.write_text("weight_bytes: -1")
    with line.served() as service:
        until(lambda: "expert/cls/f1" in open_alarms(service))
        assert "gets no requests" in open_alarms(service)["expert/cls/f1"]
        raised = server.posted.get(timeout=60)
        assert (raised.json["event"], raised.json["state"], raised.json["cleared_at"]) == ("alarm", "raised", None)
        assert raised.id == raised.json["id"]
        weights.write_text(kept)
        assert service.desk.reload().is_applied
        until(lambda: not open_alarms(service))
        cleared = server.posted.get(timeout=60).json
        assert (cleared["number"], cleared["state"]) == (raised.json["number"], "cleared")


def test_offline_camera_raises_an_alarm_sent_to_the_broker(line, broker, hurried):  # noqa: F811
    mosquitto = broker()
    line.document["outbox"] = {"mqtt": {"url": f"mqtt://127.0.0.1:{mosquitto.port}"}}
    clip = write_clip(line.folder / "clip.avi")
    away = clip.rename(line.folder / "away.avi")
    line.document["intake"] = {"cameras": [{"name": "belt", "url": f"file:{clip}", "loop": True, "mode": "triggered"}]}
    with mosquitto.subscribed() as heard, line.served() as service:
        until(lambda: "camera/belt" in open_alarms(service))
        away.rename(clip)
        until(lambda: service.desk.status().sources[0].state == CameraState.STREAMING)
        until(lambda: not open_alarms(service))
        told = []
        while [message.json["state"] for message in told] != ["raised", "cleared"]:
            message = heard.get(timeout=60)
            told += [message] if message.topic.endswith("/alarm") else []
    assert {message.json["name"] for message in told} == {"camera/belt"}


def test_lowered_budget_raises_an_alarm(line, monkeypatch, hurried):
    line.fake(0, workspace_bytes=1_000_000)
    runs_short, infer = threading.Event(), FakeSkeleton.infer

    def fail(*given):
        if runs_short.is_set():
            runs_short.clear()
            raise MemoryError
        return infer(*given)

    monkeypatch.setattr(FakeSkeleton, "infer", fail)
    with line.served() as service:
        runs_short.set()
        assert asked(service, order_of(picture(), component="c0"))[0][0].verdict is Verdict.OK
        until(lambda: [name for name in open_alarms(service) if name.startswith("budget/")])
        assert any("were planned" in alarm for alarm in service.desk.status().alarms)
