"""What systemd is told, over the socket that it listens on: a real one, which the tests read."""

import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from agent.environment import ServiceManager, service_manager
from agent.records.database import state_held
from agent.records.station.audit import audit_page
from agent.service.service_manager import (
    BACKOFF,
    EXTENDED_EVERY_S,
    FREE_STARTS,
    HEALTHY_S,
    JournalFormatter,
    Notifier,
    Starts,
    failures_reported,
    heartbeat,
)
from experts.errors import ConfigError
from experts.packed.weights import SegmentStore
from tests.agent.service.fake_line import PATIENCE_S


class Listener:
    """The service manager's end: one message for each datagram."""

    def __init__(self, address):
        self.channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.channel.bind(address)
        self.channel.settimeout(PATIENCE_S)
        self.heard = []

    def hear(self):
        text = self.channel.recv(65536).decode()
        self.heard.append(dict(line.partition("=")[::2] for line in text.split("\n")))
        return self.heard[-1]

    def hear_until(self, key, text=""):
        """The next message that says this under this key; those before it are in ``heard``."""
        deadline = time.monotonic() + PATIENCE_S
        while text not in (said := self.hear()).get(key, ()):
            assert time.monotonic() < deadline, self.heard
        return said

    def hears_nothing(self):
        """Nothing has come that was not heard. Sending is done when it returns, so whatever was sent lies here."""
        self.channel.setblocking(False)
        try:
            self.channel.recv(65536)
        except BlockingIOError:
            return True
        finally:
            self.channel.settimeout(PATIENCE_S)
        return False


@pytest.fixture
def listener(tmp_path):
    listener = Listener(str(tmp_path / "notify"))
    yield listener
    listener.channel.close()


@pytest.fixture
def notifier(tmp_path, listener):
    return Notifier(ServiceManager(str(tmp_path / "notify")))


class TestNotifier:
    def test_notification_of_a_long_start_is_throttled(self, notifier, listener):
        for now_s in (100.0, 100.0, 100.0 + EXTENDED_EVERY_S):
            notifier._clock = lambda now_s=now_s: now_s
            notifier.starting("pack", 1, 350)
        for _ in range(2):
            said = listener.hear()
            assert int(said["EXTEND_TIMEOUT_USEC"]) > EXTENDED_EVERY_S * 1e6
            assert said["STATUS"] == "starting: pack 1/350"
        assert listener.hears_nothing()

    def test_missing_notify_socket_is_logged_once(self, tmp_path, caplog):
        Notifier(ServiceManager()).ready("here")
        notifier = Notifier(ServiceManager(str(tmp_path / "gone")))
        notifier.alive("here")
        notifier.alive("here")
        assert [record.message.split()[0] for record in caplog.records] == ["service_manager_not_told"]

    def test_full_notify_socket_blocks_no_caller(self, notifier, listener):
        status = "s" * 60_000
        for _ in range(200):  # more than any socket holds
            notifier.alive(status)
        assert listener.hear()["WATCHDOG"] == "1"

    def test_notified_status_is_one_line_for_any_names(self, notifier, listener):
        notifier.alive("1 queued; inbox\nSTOPPING=1\udcff: not claimed")
        assert listener.hear() == {"WATCHDOG": "1", "STATUS": "1 queued; inbox STOPPING=1?: not claimed"}

    def test_agent_that_ends_is_no_longer_notified_as_working(self, notifier, listener):
        notifier.stopping()
        notifier.reloading()
        notifier.ready("reloaded")
        notifier.alive("still here")
        with pytest.raises(ConfigError), failures_reported(notifier):
            raise ConfigError("line.yaml:3: no such key\nand more")
        assert "STOPPING" in listener.hear()
        assert listener.hear() == {"STATUS": "line.yaml:3: no such key"}


def test_look_that_hangs_or_raises_does_not_feed_the_watchdog_but_later_ones_do(notifier, listener):
    is_asked, may_answer = threading.Event(), threading.Event()
    errors = iter([ValueError("the agent is gone")])

    def look():
        for error in errors:
            raise error
        is_asked.set()
        assert may_answer.wait(PATIENCE_S)
        return "back"

    beating = heartbeat(notifier, 0.03, look)
    beating.start()
    assert is_asked.wait(PATIENCE_S)
    assert listener.hears_nothing()
    beating.stop(0.0)  # does not wait for the look either
    may_answer.set()
    assert listener.hear() == {"WATCHDOG": "1", "STATUS": "back"}


def test_watchdog_of_another_process_is_ignored():
    told = {"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}
    assert service_manager(told).watchdog_s is None
    assert service_manager(told | {"WATCHDOG_PID": str(os.getpid())}).watchdog_s == 30.0
    assert service_manager({}) == ServiceManager(None, None, takes_levels=False)


class TestJournal:
    def test_journal_line_has_its_level_and_no_time(self):
        try:
            raise ValueError("two\nlines")
        except ValueError:
            failed = logging.LogRecord("agent.x", logging.ERROR, "f", 1, "failed expert=%s", ("a",), sys.exc_info())
        lines = JournalFormatter().format(failed).splitlines()
        assert (lines[0], len(lines) > 3) == ("<3>agent.x failed expert=a", True)
        assert all(line.startswith("<3>") for line in lines)
        for level, told in (("DEBUG", 7), ("INFO", 6), ("WARNING", 4), ("CRITICAL", 2)):
            record = logging.LogRecord("agent.x", getattr(logging, level), "f", 1, "ready", (), None)
            assert JournalFormatter().format(record) == f"<{told}>agent.x ready"

    @pytest.mark.parametrize("is_journal", [True, False])
    def test_journal_levels_are_written_only_where_the_journal_reads(self, is_journal, tmp_path, forks):
        file = tmp_path / "stderr"
        file.touch()
        stream = f"{file.stat().st_dev}:{file.stat().st_ino if is_journal else 1}"
        code = "import logging, agent.cli.endings as e; e.log_to_stderr(logging.INFO); logging.info('here')"
        assert forks.start(code, log=file, JOURNAL_STREAM=stream).wait(PATIENCE_S).returncode == 0
        assert (file.read_text() == "<6>root here\n") is is_journal
        assert file.read_text().endswith("root here\n")


class TestAgent:
    """`coserve serve` as a unit's process, with a line of fake experts."""

    @pytest.fixture
    def start(self, listener, tmp_path, forks, monkeypatch):
        with ExitStack() as running:
            monkeypatch.delenv("WATCHDOG_PID", raising=False)
            told = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "300000"}

            def start(line):
                process = forks.start("from coserve import main; main()", "serve", line, "--json", **told)
                running.callback(process.kill)
                return process

            yield start

    def audited(self, line):
        entries = audit_page(line.folder / "state" / "results.db")
        return [(entry.who, entry.action, entry.outcome) for entry in entries]

    def ended(self, process):
        process.send_signal(signal.SIGTERM)
        ended = process.wait(PATIENCE_S)
        assert (ended.returncode, json.loads(ended.stdout)["requests"]) == (0, 0), ended.stderr
        return ended

    def test_agent_notifies_start_readiness_progress_reload_and_end(self, line, listener, start):
        process = start(line.write())
        assert listener.hear()["STATUS"].startswith("starting: ")
        assert "/2 experts in memory" in listener.hear_until("READY")["STATUS"]
        assert not any("WATCHDOG" in message for message in listener.heard)
        assert "queued" in listener.hear_until("WATCHDOG")["STATUS"]
        process.send_signal(signal.SIGHUP)
        assert "MONOTONIC_USEC" in listener.hear_until("RELOADING")
        listener.hear_until("READY")
        listener.hear_until("WATCHDOG")  # it goes on
        self.ended(process)
        listener.hear_until("STOPPING")
        assert self.audited(line) == [("signal", "reload", "done")]

    def test_reload_waiting_for_the_disk_does_not_block_a_signal(self, line, listener, start):
        process = start(line.write())
        listener.hear_until("READY")
        with closing(SegmentStore(line.config.packed_folder)) as segments, segments.locked():
            process.send_signal(signal.SIGHUP)
            listener.hear_until("RELOADING")
            listener.hear_until("WATCHDOG")  # it serves, and is fed
            self.ended(process)

    def test_reload_that_fails_unexpectedly_ends_nothing(self, line, listener, start):
        process = start(line.write())
        listener.hear_until("READY")
        (line.config.packed_folder / "staging").write_text("a file where packing wants a folder")
        process.send_signal(signal.SIGHUP)
        for each in ("RELOADING", "READY", "WATCHDOG"):
            listener.hear_until(each)
        told = self.ended(process).stderr.splitlines()
        assert "staging" in next(each for each in told if "reload_problem" in each)
        ((*_, outcome),) = self.audited(line)
        assert outcome.startswith("not applied: ")

    @pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="there is a CUDA device")
    def test_missing_device_delays_readiness_and_stands_in_the_status(self, line, listener, start):
        line.document["device"] = "cuda"
        process = start(line.write())
        assert listener.hear_until("STATUS", "torch sees no CUDA device")["STATUS"].startswith("waiting ")
        self.ended(process)
        assert not any("READY" in message for message in listener.heard)
        assert not (line.folder / "state" / "starts.json").exists()  # it waits as long before each try

    def test_agent_that_ends_soon_spaces_its_starts_and_a_signal_ends_the_pause(self, line, listener, start):
        for _ in range(FREE_STARTS):
            process = start(line.write())
            listener.hear_until("READY")
            process.kill()
            process.wait(PATIENCE_S)
        process = start(line.write())
        said = listener.hear_until("STATUS", "waiting")  # the start before may still be heard of
        assert said["STATUS"] == "waiting 5 s: earlier starts ended soon, and the log says why"
        assert int(said["EXTEND_TIMEOUT_USEC"]) > 5_000_000
        self.ended(process)
        start(line.write())  # somebody asked for that end
        listener.hear_until("READY")

    def test_second_agent_waits_before_the_next_try_and_counts_no_start(self, line, listener, start):
        state = line.folder / "state"
        with state_held(state):
            process = start(line.write())
            status = listener.hear_until("STATUS")["STATUS"]
            assert (status.startswith("waiting 20 s: "), str(state) in status) == (True, True)
            self.ended(process)
        assert not any("READY" in message for message in listener.heard)
        assert not (state / "starts.json").exists()

    def test_mistake_in_the_line_file_ends_with_78_and_stands_in_the_status(self, line, listener, start):
        line.document["experts"] = 7
        ended = start(line.write()).wait(PATIENCE_S)
        assert (ended.returncode, "line.yaml:" in ended.stderr) == (78, True)
        assert listener.hear() == {"STATUS": ended.stderr.splitlines()[0]}


@pytest.fixture
def boot(tmp_path):
    file = tmp_path / "boot_id"
    file.write_text("a boot\n")
    return file


def pauses(state, boot, count):
    return [Starts(state, boot).count_start() for _ in range(count)]


def test_pauses_between_starts_begin_at_zero_and_double_up_to_a_bound(tmp_path, boot):
    found = pauses(tmp_path, boot, FREE_STARTS + 60)
    assert found[: FREE_STARTS + 4] == [0.0] * FREE_STARTS + [BACKOFF.first_s * factor for factor in (1, 2, 4, 8)]
    assert max(found) == found[-1] == BACKOFF.longest_s
    boot.write_text("another boot")
    assert Starts(tmp_path, boot).count_start() == 0.0


def test_long_service_resets_the_count_of_starts(tmp_path, boot):
    pauses(tmp_path, boot, FREE_STARTS)
    starts = Starts(tmp_path, boot)
    assert starts.count_start() == BACKOFF.first_s
    for now_s in (1000.0, 1000.0 + HEALTHY_S - 1):
        starts.served(now_s)
    assert Starts(tmp_path, boot).count_start() == BACKOFF.first_s * 2
    starts.served(1000.0 + HEALTHY_S)
    assert Starts(tmp_path, boot).count_start() == 0.0


@pytest.mark.parametrize("content", ["", "[]", '{"boot": "a boot", "starts": 1e999}', '{"boot": "a boot"}'])
def test_unreadable_count_of_starts_costs_the_pause_and_not_the_start(tmp_path, boot, content):
    (tmp_path / "starts.json").write_text(content)
    assert Starts(tmp_path, boot).count_start() == 0.0
    assert pauses(tmp_path / "none", boot, FREE_STARTS + 2) == [0.0] * (FREE_STARTS + 2)
