"""What a line file says of receivers, and that one that hangs delays no other."""

import asyncio
import sys
import threading
from contextlib import asynccontextmanager, closing
from types import SimpleNamespace

import pytest

from agent.faults.errors import ReceiverUnavailable
from agent.line_file.records import MqttSection, OutboxSection, WebhookSection
from agent.records.delivery.deliveries import Deliveries, line_outbox, line_receivers
from agent.records.delivery.webhook import WebhookReceiver
from agent.records.result_writer import ResultStore
from experts.document import read_document
from experts.errors import ConfigError
from tests.agent.records.delivery.conftest import board
from tests.waiting import until


@pytest.fixture
def configured(tmp_path):
    file = tmp_path / "line.yaml"
    file.write_text("line: demo\noutbox:\n  mqtt: {url: mqtt://broker}\n")

    def make_config(**sections):
        return SimpleNamespace(line="demo", outbox=OutboxSection(**sections), document=read_document(file))

    return make_config


def test_receivers_are_those_that_the_line_file_names(configured):
    assert line_receivers(configured()) == ()
    config = configured(
        mqtt=MqttSection(url="mqtt://broker"), webhook=WebhookSection(url="http://mes/"), events=("ng",), limit=100
    )
    receivers = line_receivers(config)
    assert [receiver.name for receiver in receivers] == ["mqtt", "webhook"]
    outbox = line_outbox(config, receivers)
    assert (outbox.line, outbox.receivers, outbox.limit) == ("demo", ("mqtt", "webhook"), 100)


def test_broker_without_the_mqtt_extra_is_a_config_error_that_names_the_package(configured, monkeypatch):
    monkeypatch.setitem(sys.modules, "aiomqtt", None)
    monkeypatch.delitem(sys.modules, "agent.records.delivery.mqtt", raising=False)
    with pytest.raises(ConfigError, match=r"line\.yaml:3:\d+: outbox\.mqtt: .*pip install coserve\[mqtt\]"):
        line_receivers(configured(mqtt=MqttSection(url="mqtt://broker")))


class Another(WebhookReceiver):
    name = "another"


class NeverReturning:
    """Each try to connect leaves a blocking call that does not end."""

    name = "hangs"

    def __init__(self):
        self.released, self.tries = threading.Event(), 0

    @asynccontextmanager
    async def connected(self):
        for _ in range(20):
            asyncio.get_running_loop().run_in_executor(None, self.released.wait)
            self.tries += 1
        raise ReceiverUnavailable(self.name, "no answer")
        yield


def test_blocking_calls_of_one_receiver_that_never_return_leave_threads_to_another(tmp_path, web_server):
    hangs, server = NeverReturning(), web_server()
    receivers = [hangs, Another(WebhookSection(url=server.url))]
    outbox = line_outbox(SimpleNamespace(line="demo", outbox=OutboxSection(events=("board",))), receivers)
    with closing(ResultStore(tmp_path / "r.db", followers=[outbox])) as store:
        deliveries = Deliveries(receivers, outbox, store, 1000.0)
        deliveries.start()
        until(lambda: hangs.tries >= 20)
        store.record_board(board("B1"))
        assert server.posted.get(timeout=60).json["board_serial"] == "B1"
        assert deliveries.stop(60.0)
    hangs.released.set()


def test_hanging_receiver_delays_no_other(tmp_path, web_server):
    hangs, answers = web_server(None, None), web_server()
    receivers = [
        WebhookReceiver(WebhookSection(url=hangs.url, timeout_s=600.0)), Another(WebhookSection(url=answers.url)),
    ]  # fmt: skip
    config = SimpleNamespace(line="demo", outbox=OutboxSection(events=("board",)))
    outbox = line_outbox(config, receivers)
    with closing(ResultStore(tmp_path / "r.db", followers=[outbox])) as store:
        deliveries = Deliveries(receivers, outbox, store, 1000.0)
        deliveries.start()
        for number in range(20):
            store.record_board(board(f"B{number}"))
        told = [answers.posted.get(timeout=60).json["board_serial"] for _ in range(20)]
        assert told == [f"B{number}" for number in range(20)]
        until(lambda: deliveries.statistics()[1].waiting == 0)
        assert deliveries.statistics()[0].waiting == 20
        assert deliveries.stop(60.0)
