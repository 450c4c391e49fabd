"""A served line's metrics and health, asked over HTTP as Prometheus and those who look after health do."""

import http.client
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from agent.faults.errors import AgentCrashed, OrderRefused
from agent.records.boards import BoardVerdict
from agent.records.result_writer import Recorded
from agent.runtime.dispatcher import BatchWatch
from agent.service.inspections.tally import Tally
from experts.expert import Verdict
from tests.agent.deployment.test_worker_manager import worker_processes
from tests.agent.service.fake_line import PATIENCE_S, Caller, FakeLine, asked, ordered, picture, write_clip
from tests.lines import NOON, result
from tests.lines import order as order_of
from tests.waiting import until

PROMTOOL = shutil.which("promtool")
DOCUMENTED = Path(__file__).parents[3] / "docs" / "metrics.md"
HISTOGRAMS = {"coserve_verdict_seconds", "coserve_text_first_token_seconds"}
LABELS = {
    "found",
    "version", "python", "line", "device", "verdict", "source", "le", "reason", "executor", "processor", "pool", "tier",
    "expert", "folder", "camera", "state", "receiver", "ending", "worker",
}  # fmt: skip


def promtool(*words, **options):
    """How `promtool check` ends; a test that cannot run it is skipped, and fails where CI=true."""
    if PROMTOOL is None:
        reason = "promtool is not installed: make tools, or apt-get install prometheus"
        pytest.fail(reason) if os.environ.get("CI") == "true" else pytest.skip(reason)
    return subprocess.run([PROMTOOL, "check", *words], capture_output=True, text=True, timeout=60, **options)


def page(service, path):
    host, _, port = service.web.addresses[0].rpartition(":")
    with closing(http.client.HTTPConnection(host, int(port), timeout=PATIENCE_S)) as caller:
        caller.request("GET", path)
        answer = caller.getresponse()
        return answer.status, answer.read().decode()


class Scraped:
    def __init__(self, service):
        status, self.text = page(service, "/metrics")
        assert status == 200, self.text
        found = [sample for family in text_string_to_metric_families(self.text) for sample in family.samples]
        self.samples = {(sample.name, *sorted(sample.labels.items())): sample for sample in found}
        assert len(self.samples) == len(found), "one of them is there twice"

    def __call__(self, name, **labels):
        return self.samples[(f"coserve_{name}", *sorted(labels.items()))].value


@pytest.fixture
def line(line):
    line.document["api"] = {"http": "127.0.0.1:0"}
    return line


@pytest.fixture(scope="module")
def busy(tmp_path_factory):
    """A line with a folder, a camera, a caller and a receiver that is not there, all of which had something to do."""
    line = FakeLine(tmp_path_factory.mktemp("busy"))
    line.document["api"] = {"http": "127.0.0.1:0"}
    line.watch("inbox-of-the-plant")
    for name in ("SERIAL-1_c0_REF-1.png", "SERIAL-2_no-such-thing_REF-1.png"):
        line.drop(name, inbox="inbox-of-the-plant")
    clip = write_clip(line.folder / "clip.avi")
    line.document["intake"]["cameras"] = [{"name": "top", "url": f"file:{clip}", "loop": True, "frames_per_s": 20.0}]
    with closing(socket.socket()) as nobody:
        nobody.bind(("127.0.0.1", 0))
        webhook = {"url": f"http://127.0.0.1:{nobody.getsockname()[1]}/mes/secret"}
        line.document["outbox"] = {"events": ["result", "board"], "webhook": webhook}
        with line.served() as service:
            asked(service, order_of(picture(), component="c0", board="SERIAL-3", ref="REF-1", key="KEY-1"))
            with pytest.raises(OrderRefused):
                service.desk.order(order_of(picture(), component="SERIAL-4"), Caller())
            until(lambda: Scraped(service)("camera_frames_total", camera="top") >= 2)
            until(lambda: Scraped(service)("folder_files_total", folder="1") == 2)
            until(lambda: Scraped(service)("verdicts_total", verdict="UNKNOWN") == 1)
            until(lambda: Scraped(service)("alarms") >= 1)  # of the receiver
            yield service


def test_no_metric_has_a_serial_or_a_path_for_a_label(busy):
    found = Scraped(busy)
    labels = {(name, value) for sample in found.samples.values() for name, value in sample.labels.items()}
    assert {name for name, _ in labels} <= LABELS
    assert {value for name, value in labels if "/" in value} == {"cls/f0", "cls/f1"}
    for secret in ("SERIAL", "REF-", "KEY-", "no-such-thing", "inbox", "secret", ".png", "/busy"):
        assert secret not in found.text


def test_promtool_accepts_the_metrics(busy):
    text = Scraped(busy).text
    done = promtool("metrics", input=text)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert promtool("metrics", input=text.replace("coserve_switches_total", "coserve_switches")).returncode != 0


def test_metrics_page_names_existing_metrics_and_its_yaml_is_valid_for_prometheus(busy, tmp_path):
    told = {key[0] for key in Scraped(busy).samples} | HISTOGRAMS
    named = set(re.findall(r"\bcoserve_[a-z_]+\b", DOCUMENTED.read_text("utf-8")))
    assert named - told == {"coserve_worker_up"}  # see below
    assert len(named) > 30
    blocks = re.findall(r"^```yaml\n(scrape_configs:.*?|groups:.*?)^```", DOCUMENTED.read_text("utf-8"), re.M | re.S)
    for name in ("ca.pem", "coserve.token"):
        (tmp_path / name).touch()
    for kind, content in zip(("config", "config", "rules"), blocks, strict=True):
        file = tmp_path / f"{kind}.yaml"
        file.write_text(content.replace("/etc/prometheus", str(tmp_path)))
        done = promtool(kind, file)
        assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_lost_worker_is_shown_by_metrics_and_status_until_it_is_back(tmp_path):
    line = FakeLine(tmp_path)
    line.document |= {"cluster": {"workers": [{"count": 1, "device": "cpu"}]}}
    line.document["api"] = {"http": "127.0.0.1:0"}
    with line.served() as service:
        assert Scraped(service)("worker_up", worker="w1") == 1
        assert {queue.processor for queue in service.desk.status().queues} == {"w1/cpu"}
        os.kill(worker_processes(line.folder)["w1"], signal.SIGKILL)
        until(lambda: Scraped(service)("worker_up", worker="w1") == 0)
        assert service.desk.status().alarms == ("worker w1 is lost, and starts again: its process ended",)
        until(lambda: Scraped(service)("worker_up", worker="w1") == 1)
        assert service.desk.status().alarms == ()


def test_metrics_count_each_part_of_a_line(busy):
    found = Scraped(busy)
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
    executors = {dict(key[1:])["executor"]: "cpu" for key in found.samples if key[0] == "coserve_queue_requests"}
    told = [dict(key[1:]) for key in found.samples if key[0] == "coserve_executor_info"]
    assert executors == {one["executor"]: one["processor"] for one in told} != {}


def test_metrics_give_memory_bytes_and_loads_per_expert_also_of_replaced_ones(line):
    with line.served() as service:
        for number in range(3):
            line.fake(0, weight_bytes=1_000_000 + number)
            service.desk.reload()
            asked(service, order_of(picture(), component="c0", is_kept=False))
        found, status = Scraped(service), service.desk.status()
    (pool,) = status.pools
    assert found("memory_used_bytes", pool=pool.name) == pool.used_bytes > 0
    assert found("memory_budget_bytes", pool=pool.name) == pool.capacity_bytes
    assert pool.used_bytes <= found("memory_peak_bytes", pool=pool.name) <= pool.capacity_bytes
    loads = {dict(key[1:])["expert"]: sample.value for key, sample in found.samples.items() if "expert_loads" in key[0]}
    assert loads["cls/f0"] == 3
    assert sum(loads.values()) == status.loads == found("loads_total", source="ssd", tier=pool.name)
    assert found("load_read_bytes_total") > 4 * 1_000_000
    assert found("switches_total") == status.switches
    assert found("requests_total") == 3
    assert found("verdicts_total", verdict="OK") == 0  # nothing of them was stored


def test_full_disk_makes_the_line_not_ready_with_the_reason(line):
    with line.served() as service:
        assert page(service, "/health/live") == (200, "alive\n")
        assert page(service, "/health/ready") == (200, "ready\n")
        with line.full_disk():
            (someone,) = ordered(service, order_of(picture(), component="c0"))
            until(lambda: page(service, "/health/ready")[0] == 503)
            assert page(service, "/health/ready")[1] == "results are not stored: database is locked\n"
            assert page(service, "/v2/health/ready")[0] == 503
            assert page(service, "/health/live")[0] == 200
            found = Scraped(service)
            assert found("ready") == 0
            assert found("store_pending") >= 1
            assert found("store_failed_commits_total") >= 1
        someone.wait()
        until(lambda: page(service, "/health/ready")[0] == 200)
        (line.folder / "state").rename(line.folder / "away")
        found = Scraped(service)  # a disk that is gone takes no metric but its own along
        assert math.isnan(found("state_free_bytes"))
        assert found("results_bytes") == 0
        (line.folder / "away").rename(line.folder / "state")


def test_line_is_not_ready_only_while_all_of_its_sources_take_no_images(line):
    for name in ("one", "two"):
        line.watch(name)
    with line.served() as service:
        until(lambda: page(service, "/health/ready") == (200, "ready\n"))
        (line.folder / "one").rename(line.folder / "one-away")
        until(lambda: Scraped(service)("folder_up", folder="1") == 0)
        assert page(service, "/health/ready") == (200, "ready\n")
        (line.folder / "two").rename(line.folder / "two-away")
        until(lambda: page(service, "/health/ready")[0] == 503)
        assert page(service, "/v2/health/ready")[0] == 200  # calls are judged
        told = page(service, "/health/ready")[1]
        assert told.startswith("no source takes images: ")
        assert all(f"{line.folder / name}: OFFLINE: it was there and is gone" in told for name in ("one", "two"))
        assert Scraped(service)("ready") == 0
        (line.folder / "two-away").rename(line.folder / "two")
        until(lambda: page(service, "/health/ready") == (200, "ready\n"))


def test_stopping_line_is_alive_and_not_ready(line):
    line.fake(0, B_s=1.0)
    said = set()
    with line.served() as service:

        def look():
            with suppress(ConnectionError):
                while True:
                    said.update((path, *page(service, f"/health/{path}")) for path in ("live", "ready"))

        looking = threading.Thread(target=look)
        ordered(service, order_of(picture(), component="c0"))
        until(lambda: Scraped(service)("batch_requests", executor="0") == 1)
        looking.start()
    looking.join(PATIENCE_S)
    ended = {("live", 200, "alive\n"), ("ready", 503, "it stops: the next one will take work\n")}
    assert said - {("ready", 200, "ready\n")} == ended


def test_hanging_scheduler_is_reported_by_health_and_metrics_until_it_goes_on(line):
    begun, goes_on = threading.Event(), threading.Event()

    def hang(_):
        begun.set()
        assert goes_on.wait(PATIENCE_S)

    paths = ("/health/live", "/health/ready", "/metrics")
    with line.served() as service, ThreadPoolExecutor(len(paths)) as callers:
        service.agent.loop.watch_batches(BatchWatch(hang, lambda _: None))
        ordered(service, order_of(picture(), component="c0", is_kept=False))
        assert begun.wait(PATIENCE_S)
        answers = set(callers.map(lambda path: page(service, path), paths))
        assert answers == {(503, "no answer from the line within 5 s: it hangs\n")}
        goes_on.set()
        until(lambda: page(service, "/health/live")[0] == 200)


def test_crashed_agent_is_reported_as_dead(line):
    def broken(_):
        raise RuntimeError("a mistake")

    with ExitStack() as ending:
        ending.enter_context(pytest.raises(AgentCrashed))
        service = ending.enter_context(line.served())
        service.agent.loop.watch_batches(BatchWatch(broken, broken))
        ordered(service, order_of(picture(), component="c0", is_kept=False))
        until(lambda: page(service, "/health/live")[0] == 503)
        status, text = page(service, "/health/ready")
        assert (status, text.partition(" - ")[0]) == (503, "the agent crashed: RuntimeError: a mistake")
        assert Scraped(service)("ready") == 0


def test_verdict_time_is_zero_after_the_clock_was_set_back_and_revised_boards_count_again():
    tally = Tally(wall=lambda: NOON)
    for key, late_s in (("1a2b3c4d/x@1", 0.3), ("camera/top@1#1", -5.0), ("api/k", 1000.0)):
        tally.stored(result(key, arrived_at=NOON - timedelta(seconds=late_s)), Recorded(1, is_new=True))
    seconds = tally.statistics().seconds
    assert {name: found.sum_s for name, found in seconds.items()} == {"folder": 0.3, "camera": 0.0, "api": 1000.0}
    assert [seconds["folder"].counts[bound] for bound in (0.25, 0.5, math.inf)] == [0, 1, 1]
    assert [seconds["api"].counts[bound] for bound in (300.0, math.inf)] == [0, 1]
    board = BoardVerdict("B", "main", Verdict.OK, NOON, NOON, {}, {Verdict.OK: 1})
    for verdict in (Verdict.OK, Verdict.NG):
        tally.stored(replace(board, verdict=verdict), Recorded(1, is_new=True))
    assert tally.statistics().boards == {Verdict.OK: 1, Verdict.NG: 1, Verdict.UNKNOWN: 0}
