"""What becomes of a served line's verdicts: told to a web server, kept with their images, traceable to their models."""

import hashlib
import sqlite3
from contextlib import closing

import pytest

from experts.errors import ConfigError
from experts.expert import Verdict
from tests.agent.records.delivery.conftest import web_server  # noqa: F401  a fixture
from tests.agent.service.fake_line import asked, picture
from tests.lines import order as order_of
from tests.waiting import until


def test_only_ng_images_are_kept_and_sent_with_their_weights(line, web_server):  # noqa: F811
    line.fake(1, label="bad")
    server = web_server()
    line.document["outbox"] = {"webhook": {"url": server.url}, "events": ["board", "ng"]}
    orders = [order_of(picture(), component=f"c{n}", board="B1", ref=f"R{n + 1}", key=f"R{n}") for n in range(2)]
    with line.served() as service:
        assert [asked(service, order)[0][0].verdict for order in orders] == [Verdict.OK, Verdict.NG]
        messages = [server.posted.get(timeout=60).json for _ in range(2)]
    images = [file for file in (line.folder / "state" / "images").rglob("*") if file.is_file()]
    assert [file.read_bytes() for file in images] == [picture()]
    rows = {row.subject.key: row for row in line.rows}
    assert rows["api/R0"].kept_as is None
    assert (line.folder / "state" / "images" / rows["api/R1"].kept_as).is_file()
    assert {message["verdict"] for message in messages} == {"NG"}
    told = {message["event"]: message["models"] for message in messages}
    sha256 = [hashlib.sha256((line.folder / f"f{n}.yaml").read_bytes()).hexdigest() for n in range(2)]
    used = [{"expert": f"cls/f{n}", "sha256": sha256[n]} for n in range(2)]
    assert told == {"ng": used[1:], "board": used}, "an MES learns which weights judged"
    assert rows["api/R0"].steps[0].model_sha256 == sha256[0]


def test_message_refused_for_good_raises_an_alarm_that_names_it(line, web_server):  # noqa: F811
    line.fake(1, label="bad")
    server = web_server((422, {}))
    line.document["outbox"] = {"webhook": {"url": server.url}, "events": ["ng"]}
    with line.served() as service:
        assert asked(service, order_of(picture(), component="c1", board="B1", ref="R1"))[0][0].verdict is Verdict.NG
        until(lambda: any("webhook refused messages" in alarm for alarm in service.desk.status().alarms))
        (alarm,) = service.desk.status().alarms
    assert "(board B1): answered 422" in alarm


def test_receiver_without_its_secret_prevents_the_start(line):
    line.document["outbox"] = {"webhook": {"url": "http://127.0.0.1:1/", "token": {"file": "none"}}}
    with pytest.raises(ConfigError, match="put the secret there"), line.served():
        pass


def test_endless_reader_of_the_results_raises_an_alarm_while_the_line_serves(line, monkeypatch):
    monkeypatch.setattr("agent.records.write_ahead_log.LOG_ALARM_BYTES", 0)
    monkeypatch.setattr("agent.records.group_commit.IDLE_CHECKPOINT_S", 0.02)
    with line.served() as service:
        with closing(sqlite3.connect(line.folder / "state" / "results.db")) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM results").fetchall()
            assert asked(service, order_of(picture(), component="c0"))[0][0].verdict is Verdict.OK
            until(lambda: any("keeps reading" in alarm for alarm in service.desk.status().alarms))
        until(lambda: service.desk.status().alarms == ())
