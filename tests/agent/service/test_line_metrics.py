"""A served line's metrics and health, asked over HTTP as Prometheus and those who look after health do."""

from __future__ import annotations

import http.client
import math
import os
import re
import shutil
import socket
import sqlite3
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import cv2
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from agent.records.boards import BoardVerdict
from agent.records.results import Recorded
from agent.runtime.loop import BatchWatch
from agent.service.desk.tally import Tally
from experts.errors import AgentCrashed, OrderRefused
from experts.expert import Verdict
from tests.lines import order as order_of
from tests.lines import result

PROMTOOL = shutil.which("promtool")
PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"
PATIENCE_S = 60.0
NOON = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)
HISTOGRAMS = {"coserve_verdict_seconds", "coserve_text_first_token_seconds"}
LABELS = {
    "found",
    "version", "python", "line", "device", "verdict", "source", "le", "reason", "executor", "processor", "pool", "tier",
    "expert", "folder", "camera", "state", "receiver", "ending",
}  # fmt: skip


def do_without_promtool(environment):
    """End the test: skipped, with the reason; failed where CI=true."""
    reason = "promtool is not installed: make tools, or apt-get install prometheus"
    if environment.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def asked(service, path):
    """The status and the text of one page."""
    host, _, port = service.web.addresses[0].rpartition(":")
    with closing(http.client.HTTPConnection(host, int(port), timeout=PATIENCE_S)) as caller:
        caller.request("GET", path)
        answer = caller.getresponse()
        return answer.status, answer.read().decode()


class Scraped:
    """One answer of /metrics."""

    def __init__(self, text):
        self.text = text
        found = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        self.samples = {(sample.name, *sorted(sample.labels.items())): sample for sample in found}
        assert len(self.samples) == len(found), "one of them is there twice"

    def __call__(self, name, **labels):
        return self.samples[(f"coserve_{name}", *sorted(labels.items()))].value


def scraped(service):
    status, text = asked(service, "/metrics")
    assert status == 200, text
    return Scraped(text)


@pytest.fixture
def line(desk_line):
    desk_line.document["api"] = {"http": "127.0.0.1:0"}
    return desk_line


@pytest.fixture
def clip(tmp_path):
    path = tmp_path / "clip.avi"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"MJPG"), 20.0, (32, 16))
    for shade in (0, 80, 160):
        writer.write(np.full((16, 32, 3), shade, np.uint8))
    writer.release()
    return path


@contextmanager
def nothing_committed(line):
    with closing(sqlite3.connect(line.folder / "state" / "results.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


def test_without_promtool_its_test_says_so_and_fails_where_it_must_run():
    with pytest.raises(pytest.skip.Exception, match="make tools"):
        do_without_promtool({})
    with pytest.raises(pytest.fail.Exception, match="make tools"):
        do_without_promtool({"CI": "true"})


@pytest.fixture
def busy(line, clip, caller, png, wait_until_so):
    """A line with a folder, a camera, a caller and a receiver that is not there, all of which had something to do."""
    pattern = r"(?P<board>[^_]+)_(?P<component>[^_]+)_(?P<ref>[^.]+)\.png"
    inbox = line.folder / "inbox-of-the-plant"
    inbox.mkdir()
    (inbox / "SERIAL-1_c0_REF-1.png").write_bytes(png())
    (inbox / "SERIAL-2_no-such-thing_REF-1.png").write_bytes(png())
    with closing(socket.socket()) as nobody:
        nobody.bind(("127.0.0.1", 0))
        line.document["intake"] = {
            "folders": [{"path": str(inbox), "pattern": pattern, "settle_ms": 0}],
            "cameras": [{"name": "top", "url": f"file:{clip}", "loop": True, "frames_per_s": 20.0}],
        }
        webhook = {"url": f"http://127.0.0.1:{nobody.getsockname()[1]}/mes/secret"}
        line.document["outbox"] = {"events": ["result", "board"], "webhook": webhook}
        with line.served() as service:
            someone = caller()
            order = order_of(png(), component="c0", board="SERIAL-3", ref="REF-1", key="KEY-1")
            service.desk.order(order, someone)
            someone.wait()
            with pytest.raises(OrderRefused):
                service.desk.order(order_of(png(), component="SERIAL-4"), caller())
            wait_until_so(lambda: scraped(service)("camera_frames_total", camera="top") >= 2)
            wait_until_so(lambda: scraped(service)("folder_files_total", folder="1") == 2)
            wait_until_so(lambda: scraped(service)("verdicts_total", verdict="UNKNOWN") == 1)
            wait_until_so(lambda: scraped(service)("alarms") >= 1)  # of the receiver
            yield service


def test_no_metric_has_a_serial_or_a_path_for_a_label(busy, line):
    """AC28, first half: by name and by value, on a line where all that has metrics has had something to do."""
    found = scraped(busy)
    labels = {(name, value) for sample in found.samples.values() for name, value in sample.labels.items()}
    assert {name for name, _ in labels} <= LABELS
    assert {value for name, value in labels if "/" in value} == {"cls/f0", "cls/f1"}
    for secret in (
        "SERIAL",
        "REF-",
        "KEY-",
        "no-such-thing",
        "inbox",
        "secret",
        ".png",
        str(line.folder),
        line.folder.name,
    ):
        assert secret not in found.text
    histogram = {sample.name: set(sample.labels) for sample in found.samples.values() if "le" in sample.labels}
    assert histogram == {
        "coserve_verdict_seconds_bucket": {"le", "source"},
        "coserve_text_first_token_seconds_bucket": {"le"},
    }


def test_promtool_finds_nothing_to_say_about_the_metrics(busy):
    """AC28, second half: the real `promtool check metrics`."""
    if PROMTOOL is None:
        do_without_promtool(os.environ)
    text = scraped(busy).text
    done = subprocess.run([PROMTOOL, "check", "metrics"], input=text, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    wrong = text.replace("coserve_switches_total", "coserve_switches")
    done = subprocess.run([PROMTOOL, "check", "metrics"], input=wrong, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0


def test_the_page_about_them_names_metrics_that_there_are_and_its_yaml_is_prometheus_s(busy, tmp_path):
    """docs/metrics.md: every name in it, its scrape configuration, and its alarms."""
    told = {key[0] for key in scraped(busy).samples} | HISTOGRAMS
    named = set(re.findall(r"\bcoserve_[a-z_]+\b", PAGE.read_text("utf-8")))
    assert named - told == set()
    assert len(named) > 30
    if PROMTOOL is None:
        do_without_promtool(os.environ)
    scrape, alarms = re.findall(r"^```yaml\n(scrape_configs:.*?|groups:.*?)^```", PAGE.read_text("utf-8"), re.M | re.S)
    for kind, content in (("config", scrape), ("rules", alarms)):
        file = tmp_path / f"{kind}.yaml"
        file.write_text(content)
        done = subprocess.run([PROMTOOL, "check", kind, file], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr


def test_what_the_parts_of_a_line_did_is_told_of_each(busy):
    found = scraped(busy)
    assert found("ready") == 1
    assert found("folder_up", folder="1") == 1
    assert found("camera_state", camera="top", state="STREAMING") == 1
    assert found("camera_state", camera="top", state="OFFLINE") == 0
    assert found("camera_frame_age_seconds", camera="top") < PATIENCE_S
    assert found("verdict_seconds_count", source="folder") == 2
    assert found("verdict_seconds_count", source="api") == 1
    assert found("verdict_seconds_count", source="camera") >= 2
    assert found("board_verdicts_total", verdict="OK") >= 1  # the camera's frames are whole boards
    assert found("boards_open") >= 2
    assert found("outbox_messages", receiver="webhook") >= 5
    assert 0 < found("outbox_oldest_age_seconds", receiver="webhook") < PATIENCE_S
    assert found("orders_accepted_total") == found("orders_refused_total", reason="NOT_FOUND") == 1
    assert found("images_kept_total") == 0
    assert found("state_free_bytes") > found("results_bytes") > 0
    executors = {dict(key[1:])["executor"] for key in found.samples if key[0] == "coserve_queue_requests"}
    told = [dict(key[1:]) for key in found.samples if key[0] == "coserve_executor_info"]
    assert executors == {one["executor"] for one in told} != set()
    assert {one["processor"] for one in told} == {"cpu"}, "AC39: what each executor runs on"


def test_counters_never_go_back(busy, wait_until_so):
    """Prometheus would take a camera's count that does for a new start, and add all of it once more."""

    def counters():
        return {
            key: sample.value
            for key, sample in scraped(busy).samples.items()
            if key[0].endswith(("_total", "_bucket", "_count", "_sum"))
        }

    first = before = counters()
    while (
        counters()["coserve_camera_frames_total", ("camera", "top")]
        < first["coserve_camera_frames_total", ("camera", "top")] + 5
    ):
        now = counters()
        assert [key for key, value in before.items() if now[key] < value] == []
        before = now


def test_memories_and_loads_are_told_in_bytes_and_by_expert_also_of_one_that_was_replaced(line, caller, png):
    with line.served() as service:
        for number in range(3):
            line.fake(0, weight_bytes=1_000_000 + number)
            service.desk.reload()
            someone = caller()
            service.desk.order(order_of(png(), component="c0", is_kept=False), someone)
            someone.wait()
        found, status = scraped(service), service.desk.status()
        (pool,) = status.pools
        assert found("memory_used_bytes", pool=pool.name) == pool.used_bytes > 0
        assert found("memory_budget_bytes", pool=pool.name) == pool.capacity_bytes
        assert pool.used_bytes <= found("memory_peak_bytes", pool=pool.name) <= pool.capacity_bytes
        loads = {
            dict(key[1:])["expert"]: sample.value for key, sample in found.samples.items() if "expert_loads" in key[0]
        }
        assert loads["cls/f0"] == 3
        assert sum(loads.values()) == status.loads == found("loads_total", source="ssd", tier=pool.name)
        assert found("load_read_bytes_total") > 4 * 1_000_000
        assert found("switches_total") == status.switches
        assert found("requests_total") == 3
        assert found("verdicts_total", verdict="OK") == 0  # nothing of them was stored


def test_it_is_ready_while_verdicts_can_be_stored_and_says_why_not(line, caller, png, wait_until_so):
    with line.served() as service:
        assert asked(service, "/health/live") == (200, "alive\n")
        assert asked(service, "/health/ready") == (200, "ready\n")
        someone = caller()
        with nothing_committed(line):
            service.desk.order(order_of(png(), component="c0"), someone)
            wait_until_so(lambda: asked(service, "/health/ready")[0] == 503)
            assert asked(service, "/health/ready")[1] == "results are not stored: database is locked\n"
            assert asked(service, "/health/live")[0] == 200
            found = scraped(service)
            assert found("ready") == 0
            assert found("store_pending") >= 1
            assert found("store_failed_commits_total") >= 1
        someone.wait()
        wait_until_so(lambda: asked(service, "/health/ready")[0] == 200)


def test_a_disk_that_is_gone_takes_no_metric_but_its_own_along(line, wait_until_so):
    with line.served() as service:
        (line.folder / "state").rename(line.folder / "away")
        found = scraped(service)
        assert math.isnan(found("state_free_bytes"))
        assert found("results_bytes") == 0
        (line.folder / "away").rename(line.folder / "state")
        assert scraped(service)("results_bytes") > 0


def test_while_it_stops_it_lives_and_is_not_ready(line, caller, png, wait_until_so):
    line.fake(0, B_s=1.0)
    said = {"/health/live": set(), "/health/ready": set()}
    with line.served() as service:

        def look():
            with suppress(ConnectionError):
                while True:
                    for page, answers in said.items():
                        answers.add(asked(service, page))

        looking = threading.Thread(target=look)
        service.desk.order(order_of(png(), component="c0"), caller())
        wait_until_so(lambda: scraped(service)("batch_requests", executor="0") == 1)
        looking.start()
    looking.join(PATIENCE_S)
    assert said["/health/live"] == {(200, "alive\n")}
    assert said["/health/ready"] - {(200, "ready\n")} == {(503, "it stops: the next one will take work\n")}
    with pytest.raises(ConnectionRefusedError):
        asked(service, "/health/live")


def test_a_scheduler_that_hangs_is_told_and_so_is_that_it_goes_on(line, caller, png, wait_until_so):
    """AC31's hang, as whoever looks after health sees it."""
    begun, goes_on = threading.Event(), threading.Event()

    def hang(_):
        begun.set()
        assert goes_on.wait(PATIENCE_S)

    pages = ("/health/live", "/health/ready", "/metrics")
    with line.served() as service, ThreadPoolExecutor(len(pages)) as callers:
        service.agent.loop.watch_batches(BatchWatch(hang, lambda _: None))
        service.desk.order(order_of(png(), component="c0", is_kept=False), caller())
        assert begun.wait(PATIENCE_S)
        for answer in callers.map(lambda page: asked(service, page), pages):
            assert answer == (503, "no answer from the line within 5 s: it hangs\n")
        goes_on.set()
        wait_until_so(lambda: asked(service, "/health/live")[0] == 200)


def test_a_crash_is_told_as_death(line, caller, png, wait_until_so):
    def broken(_):
        raise RuntimeError("a mistake")

    with ExitStack() as ending:
        ending.enter_context(pytest.raises(AgentCrashed))
        service = ending.enter_context(line.served())
        service.agent.loop.watch_batches(BatchWatch(broken, broken))
        service.desk.order(order_of(png(), component="c0", is_kept=False), caller())
        wait_until_so(lambda: asked(service, "/health/live")[0] == 503)
        for page in ("/health/live", "/health/ready"):
            status, text = asked(service, page)
            assert (status, text.partition(" - ")[0]) == (503, "the agent crashed: RuntimeError: a mistake")
        assert scraped(service)("ready") == 0


@pytest.mark.parametrize("taken", ["http", "grpc"])
def test_a_line_whose_address_is_taken_stops_and_comes_again_when_it_is_free(line, taken, wait_until_so):
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        free = {"http": "127.0.0.1:0", "grpc": "127.0.0.1:0"}
        line.document["api"] = free | {taken: f"127.0.0.1:{other.getsockname()[1]}"}
        with line.served() as service:
            assert service.desk.status().alarms
        with line.served() as service:
            other.close()
            wait_until_so(lambda: not service.desk.status().alarms)
            assert asked(service, "/health/ready")[0] == 200


def test_a_clock_that_was_set_back_counts_as_no_time_and_a_revised_board_counts_again():
    tally = Tally(wall=lambda: NOON)
    for key, late_s in (("1a2b3c4d/x@1", 0.3), ("camera/top@1#1", -5.0), ("api/k", 1000.0)):
        tally.stored(result(key, arrived_at=NOON - timedelta(seconds=late_s)), Recorded(1, is_new=True))
    seconds = tally.statistics().seconds
    assert {name: found.sum_s for name, found in seconds.items()} == {"folder": 0.3, "camera": 0.0, "api": 1000.0}
    assert [seconds["folder"].counts[bound] for bound in (0.25, 0.5, 300.0, float("inf"))] == [0, 1, 1, 1]
    assert (seconds["camera"].counts[0.01], seconds["api"].counts[300.0], seconds["api"].counts[float("inf")]) == (
        1,
        0,
        1,
    )
    board = BoardVerdict("B", "main", Verdict.OK, NOON, NOON, {}, {Verdict.OK: 1})
    for verdict in (Verdict.OK, Verdict.NG):
        tally.stored(replace(board, verdict=verdict), Recorded(1, is_new=True))
    assert tally.statistics().boards == {Verdict.OK: 1, Verdict.NG: 1, Verdict.UNKNOWN: 0}
