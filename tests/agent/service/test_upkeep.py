"""What becomes of a served line's verdicts: told to a web server, kept with their images, traceable to their models."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import threading
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from experts.errors import ConfigError
from experts.expert import Verdict
from tests.lines import order as order_of


class Hook:
    """A web server that takes what it is told."""

    def __init__(self):
        self.told = []
        told = self.told

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                told.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(204)
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server.server_address[1]}/verdicts"

    @contextmanager
    def serving(self):
        thread = threading.Thread(target=self.server.serve_forever)
        thread.start()
        try:
            yield self
        finally:
            self.server.shutdown()
            self.server.server_close()
            thread.join()


def weights_sha256(desk_line, number):
    return hashlib.sha256((desk_line.folder / f"f{number}.yaml").read_bytes()).hexdigest()


def test_bad_images_are_kept_and_told_and_good_ones_are_not(desk_line, caller, png, wait_until_so):
    desk_line.fake(1, label="bad")
    hook = Hook()
    desk_line.document["outbox"] = {"webhook": {"url": hook.url}, "events": ["board", "ng"]}
    with hook.serving(), desk_line.served() as service:
        parts = []
        for number, ref in enumerate(("R1", "R2")):
            someone = caller()
            order = order_of(png(), component=f"c{number}", board="B1", ref=ref, key=ref)
            service.desk.order(order, someone)
            parts += someone.wait()
        wait_until_so(lambda: len(hook.told) == 2)
    assert [part.verdict for part in parts] == [Verdict.OK, Verdict.NG]
    images = [file for file in (desk_line.folder / "state" / "images").rglob("*") if file.is_file()]
    assert [file.read_bytes() for file in images] == [png()]
    rows = {row.result.subject.key: row.result for row in desk_line.results.query()}
    assert rows["api/R1"].kept_as is None
    assert (desk_line.folder / "state" / "images" / rows["api/R2"].kept_as).is_file()
    assert {message["verdict"] for message in hook.told} == {"NG"}
    told = {message["event"]: message["models"] for message in hook.told}
    used = [{"expert": f"cls/f{number}", "sha256": weights_sha256(desk_line, number)} for number in (0, 1)]
    assert told == {"ng": used[1:], "board": used}, "an MES learns which weights judged"


def test_a_result_names_the_weights_that_judged_it(desk_line, caller, png):
    with desk_line.served() as service:
        someone = caller()
        service.desk.order(order_of(png(), component="c0", key="k"), someone)
        someone.wait()
    (step,) = next(desk_line.results.query()).result.detail["steps"]
    assert step["model_sha256"] == weights_sha256(desk_line, 0)


def test_a_receiver_whose_secret_is_missing_keeps_the_line_from_starting(desk_line):
    desk_line.document["outbox"] = {"webhook": {"url": "http://127.0.0.1:1/", "token": {"file": "none"}}}
    with pytest.raises(ConfigError, match="put the secret there"), desk_line.served():
        pass


def test_who_cannot_be_told_is_an_alarm_and_delays_nothing(desk_line, caller, png, wait_until_so):
    desk_line.fake(0, label="bad")
    desk_line.document["outbox"] = {"webhook": {"url": "http://127.0.0.1:1/", "timeout_s": 1.0}}
    with desk_line.served() as service:
        someone = caller()
        service.desk.order(order_of(png(), component="c0"), someone)
        assert someone.wait()[0].verdict is Verdict.NG
        wait_until_so(lambda: any("webhook is not told" in alarm for alarm in service.desk.status().alarms))


def test_who_reads_the_results_and_does_not_end_is_an_alarm_while_the_line_goes_on(
    desk_line, caller, png, wait_until_so, monkeypatch
):
    """AC23: somebody is told, wherever alarms are shown."""
    monkeypatch.setattr("agent.records.write_ahead_log.LOG_ALARM_BYTES", 0)
    monkeypatch.setattr("agent.records.group_commit.IDLE_CHECKPOINT_S", 0.02)
    with desk_line.served() as service:
        with closing(sqlite3.connect(desk_line.folder / "state" / "results.db")) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM results").fetchall()
            someone = caller()
            service.desk.order(order_of(png(), component="c0"), someone)
            assert someone.wait()[0].verdict is Verdict.OK
            wait_until_so(lambda: any("keeps reading" in alarm for alarm in service.desk.status().alarms))
        wait_until_so(lambda: service.desk.status().alarms == ())
