"""A real mosquitto as the receiver: topics, acknowledgements, last will, logins, TLS, and a broker that hangs."""

import queue
import signal
import socket
import subprocess
import threading
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from agent.faults.errors import SecretMissing
from agent.line_file.records import MqttSection
from agent.records.delivery.deliveries import Deliveries
from agent.records.delivery.mqtt import MqttReceiver, level
from agent.records.outbox import Outbox, OutboxReader
from agent.records.result_writer import ResultStore
from experts.errors import ConfigError
from experts.expert import Verdict
from tests.agent.records.delivery.conftest import board, image
from tests.waiting import until

EVENTS = ("board", "ng", "result")


def section(port, scheme="mqtt", **settings):
    return MqttSection.model_validate(
        {"url": f"{scheme}://localhost:{port}", **settings}, context={"folder": Path("/")}
    )


@pytest.fixture
def line(delivering):
    return lambda section, events=EVENTS, name="demo": delivering(MqttReceiver(section, name), events, name)


def heard_until(heard, topic, patience_s=60.0):
    told = []
    while not told or told[-1].topic != topic:
        told.append(heard.get(timeout=patience_s))
    return told


def test_each_event_has_its_topic_and_is_acknowledged(broker, line):
    mosquitto = broker()
    settings = section(mosquitto.port, topic="plant/smt 1/", client_id="box 7")
    with mosquitto.subscribed() as heard:
        with line(settings, name="l.1") as (store, deliveries):
            store.record(image(1, Verdict.OK))
            store.record(image(2, Verdict.UNKNOWN))
            store.record_board(board("B1", Verdict.UNKNOWN))
            told = heard_until(heard, "plant/smt 1/l.1/board/B1/verdict")
            with mosquitto.subscribed() as later:
                said = later.get(timeout=60)
                assert (said.topic, said.payload, said.is_retained) == ("plant/smt 1/l.1/status", "online", True)
            until(lambda: deliveries.statistics()[0].waiting == 0)
            assert (deliveries.statistics()[0].delivered, deliveries.statistics()[0].alarm) == (4, None)
        assert heard_until(heard, "plant/smt 1/l.1/status")[-1].payload == "offline"
    assert [(each.topic, each.payload if "status" in each.topic else each.json["verdict"]) for each in told] == [
        ("plant/smt 1/l.1/status", "online"), ("plant/smt 1/l.1/component/result", "OK"),
        ("plant/smt 1/l.1/component/ng", "UNKNOWN"), ("plant/smt 1/l.1/component/result", "UNKNOWN"),
        ("plant/smt 1/l.1/board/B1/verdict", "UNKNOWN"),
    ]  # fmt: skip
    assert "as box 7" in mosquitto.log()
    assert len({each.json["id"] for each in told[1:]}) == 4


ONLINE = """
import sys, threading
from pathlib import Path
from agent.line_file.records import MqttSection
from agent.records.delivery.deliveries import Deliveries
from agent.records.delivery.mqtt import MqttReceiver
from agent.records.outbox import Outbox
from agent.records.result_writer import ResultStore

receiver = MqttReceiver(MqttSection(url=sys.argv[2]), "demo")
outbox = Outbox("demo", ["mqtt"], ["board"], 100)
store = ResultStore(Path(sys.argv[1]), followers=[outbox])
"""


def test_last_will_reports_a_killed_agent_as_offline(broker, tmp_path, forks):
    mosquitto = broker()
    script = ONLINE + "Deliveries([receiver], outbox, store, 100.0).start()\nthreading.Event().wait()\n"
    with mosquitto.subscribed() as heard:
        agent = forks.start(script, tmp_path / "r.db", f"mqtt://127.0.0.1:{mosquitto.port}")
        assert heard.get(timeout=60).payload == "online"
        agent.kill()
        said = heard.get(timeout=60)
        assert (said.topic, said.payload) == ("coserve/demo/status", "offline")


KILLED = (
    ONLINE
    + """
import os, signal
from datetime import UTC, datetime
from agent.records.boards import BoardVerdict
from experts.expert import Verdict

class KilledBeforeTheDelete:
    path = store.path
    def write(self, write, then=None):
        if sys.argv[3] == "killed" and then is not None and getattr(write, "func", None) is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        store.write(write, then)

at = datetime(2026, 5, 1, tzinfo=UTC)
for serial in sys.argv[4:]:
    store.record_board(BoardVerdict(serial, "main", Verdict.NG, at, at, {}, {}))
while store.statistics().pending:
    threading.Event().wait(0.001)
deliveries = Deliveries([receiver], outbox, KilledBeforeTheDelete(), 10_000.0)
deliveries.start()
while deliveries.statistics()[0].waiting:
    threading.Event().wait(0.01)
assert deliveries.stop(60)
store.close()
"""
)


def test_agent_killed_between_acknowledgement_and_commit_sends_the_same_id_again(broker, tmp_path, forks):
    """At least once, with the same id; then nothing more."""
    mosquitto = broker()

    def run(mode, *serials):
        url = f"mqtt://127.0.0.1:{mosquitto.port}"
        return forks.run(KILLED, tmp_path / "r.db", url, mode, *serials).returncode

    with mosquitto.subscribed() as heard:
        assert run("killed", "B1", "B2") == -signal.SIGKILL
        assert heard_until(heard, "coserve/demo/board/B1/verdict")
        assert OutboxReader(tmp_path / "r.db").standing("mqtt").waiting == 2
        first = heard_until(heard, "coserve/demo/board/B2/verdict")[-1]
        assert run("lives") == 0
        again = heard_until(heard, "coserve/demo/board/B2/verdict")[-1]
        assert (again.json, OutboxReader(tmp_path / "r.db").standing("mqtt").waiting) == (first.json, 0)
        assert run("lives", "B3") == 0
        told = heard_until(heard, "coserve/demo/board/B3/verdict")
        assert [each.topic for each in told if "board" in each.topic] == ["coserve/demo/board/B3/verdict"]


def test_broker_that_returns_has_missed_nothing(broker, line):
    mosquitto = broker()
    with line(section(mosquitto.port), events=("board",)) as (store, deliveries):
        with mosquitto.subscribed() as heard:
            store.record_board(board("B0"))
            heard_until(heard, "coserve/demo/board/B0/verdict")
        until(lambda: deliveries.statistics()[0].waiting == 0)
        mosquitto.stop()
        until(lambda: "Connection refused" in str(deliveries.statistics()[0].alarm))
        for number in range(1, 101):
            store.record_board(board(f"B{number % 5}", counts={Verdict.OK: number}))
        mosquitto.start()
        with mosquitto.subscribed() as heard:
            seen = {}
            while sum(len(told) for told in seen.values()) < 100:
                said = heard.get(timeout=60)
                if said.topic.endswith("verdict"):
                    seen.setdefault(said.json["board_serial"], []).append(said.json["revision"])
        assert all(told == sorted(told) for told in seen.values())
        until(lambda: deliveries.statistics()[0].waiting == 0 and deliveries.statistics()[0].alarm is None)


def test_any_serial_is_one_topic_level_and_an_overlong_one_is_dropped(broker, line, caplog):
    mosquitto = broker()
    with mosquitto.subscribed() as heard, line(section(mosquitto.port), events=("board",)) as (store, deliveries):
        for serial in ("x" * 70_000, "a/b", "a+b", "#", "100%", "a\nb\x00", "schön", "$SYS", "a b"):
            store.record_board(board(serial))
            if len(serial) < 10:
                said = heard_until(heard, f"coserve/demo/board/{level(serial)}/verdict")[-1]
                assert said.json["board_serial"] == serial
                assert not set(level(serial)) & set("/+#\n\x00")
        until(lambda: deliveries.statistics()[0].waiting == 0)
        assert deliveries.statistics()[0].refused == 1
    assert "message_refused" in caplog.text


@pytest.mark.parametrize("character", ["\ufffe", "\uffff", "\ufdd0", "\U0010fffe", "\x01", "\x7f", "\udc80"])
def test_serial_with_a_character_that_mqtt_forbids_is_percent_encoded_in_its_topic(broker, line, character):
    written = "".join(f"%{byte:02X}" for byte in character.encode(errors="surrogatepass"))
    assert level(f"A{character}1") == f"A{written}1"
    if character.isprintable() or character == "\udc80":
        return
    mosquitto = broker()
    with mosquitto.subscribed() as heard, line(section(mosquitto.port), events=("board",)) as (store, _):
        store.record_board(board(f"A{character}1"))
        store.record_board(board("B2"))
        told = heard_until(heard, "coserve/demo/board/B2/verdict")
        assert told[-2].topic == f"coserve/demo/board/A{written}1/verdict"
        assert told[-2].json["board_serial"] == f"A{character}1"


@pytest.mark.parametrize("limit", ["max_packet_size", "message_size_limit"])
def test_message_larger_than_the_broker_takes_is_refused_and_the_next_one_is_delivered(broker, line, limit):
    mosquitto = broker(f"{limit} 700")
    with mosquitto.subscribed() as heard, line(section(mosquitto.port), events=("board",)) as (store, deliveries):
        store.record_board(board("x" * 600))
        store.record_board(board("B2"))
        heard_until(heard, "coserve/demo/board/B2/verdict")
        until(lambda: (deliveries.statistics()[0].delivered, deliveries.statistics()[0].refused) == (1, 1))
        assert "board-1-0" in deliveries.statistics()[0].refusal


def test_topic_forbidden_by_access_rules_raises_an_alarm_and_waits_for_another_to_succeed(broker, line, tmp_path):
    rules = tmp_path / "acl"
    rules.write_text("topic readwrite coserve/demo/status\ntopic readwrite coserve/demo/component/ng\ntopic read #\n")
    rules.chmod(0o644)
    mosquitto = broker(f"acl_file {rules}", "user root")
    with line(section(mosquitto.port), events=("board", "ng")) as (store, deliveries):
        store.record_board(board("B1"))
        until(lambda: "access rules" in str(deliveries.statistics()[0].alarm))
        assert "coserve/demo/board/B1/verdict" in deliveries.statistics()[0].alarm
        assert (deliveries.statistics()[0].waiting, deliveries.statistics()[0].refused) == (1, 0)
        store.record(image(1))
        until(lambda: (deliveries.statistics()[0].delivered, deliveries.statistics()[0].refused) == (1, 1))
        assert "correct its access rules" in deliveries.statistics()[0].refusal


def test_second_agent_with_the_client_id_raises_an_alarm_with_id_and_remedy(broker, line, tmp_path):
    mosquitto = broker()
    with line(section(mosquitto.port), events=("board",)) as (store, deliveries):
        store.record_board(board("B1"))
        until(lambda: deliveries.statistics()[0].delivered == 1)
        other = Deliveries(
            [MqttReceiver(section(mosquitto.port), "demo")], Outbox("demo", ["mqtt"], ["board"], 100), store, 100.0
        )
        other.start()
        wanted = "another client has the client id 'coserve-demo', too - give each box its own `line`"
        until(lambda: wanted in f"{deliveries.statistics()[0].alarm} {other.statistics()[0].alarm}")
        assert other.stop(25.0)


def test_unreachable_broker_raises_an_alarm_with_address_and_remedy(line):
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for url, wanted in [
        (f"mqtt://127.0.0.1:{port}", "Connection refused - see whether the broker runs there"),
        ("mqtt://nowhere.invalid", "the host is unknown"),
    ]:
        settings = MqttSection.model_validate({"url": url}, context={"folder": Path("/")})
        with line(settings, events=("board",)) as (_, deliveries):
            until(lambda: deliveries.statistics()[0].alarm is not None)
            alarm = deliveries.statistics()[0].alarm
            assert alarm.startswith(f"{url}: ")
            assert wanted in alarm


@pytest.mark.slow
def test_wrong_password_is_logged_once_and_a_corrected_one_is_used(broker, line, tmp_path, caplog):
    file = tmp_path / "passwords"
    subprocess.run(["mosquitto_passwd", "-b", "-c", file, "box", "s3cret"], check=True, capture_output=True, timeout=60)
    file.chmod(0o644)  # mosquitto leaves root behind
    tmp_path.chmod(0o755)
    mosquitto = broker("allow_anonymous false", f"password_file {file}", "user root")
    secret = tmp_path / "secret"
    secret.write_text("wrong\n")
    settings = section(mosquitto.port, user="box", password={"file": str(secret)})
    with line(settings, events=("board",)) as (store, deliveries):
        store.record_board(board("B1"))
        until(lambda: mosquitto.log().count("not authorised") >= 3 or mosquitto.log().count("disconnected") >= 3)
        told = [record.getMessage() for record in caplog.records if "receiver_unavailable" in record.getMessage()]
        assert len(told) == 1
        assert "the broker refuses the login" in told[0]
        assert "wrong" not in caplog.text
        assert "user and password" in deliveries.statistics()[0].alarm
        secret.write_text("s3cret\n")
        until(lambda: deliveries.statistics()[0].waiting == 0)
        assert deliveries.statistics()[0].alarm is None


def test_missing_password_or_invalid_certificate_prevents_the_start(tmp_path):
    with pytest.raises(SecretMissing, match="nowhere"):
        MqttReceiver(section(1883, user="box", password={"file": str(tmp_path / "nowhere")}), "demo")
    (tmp_path / "ca.pem").write_text("not a certificate")
    for name in ("ca.pem", "nowhere.pem"):
        with pytest.raises(ConfigError, match=rf"outbox\.mqtt\.ca: .*{name}: .* - write a PEM file"):
            MqttReceiver(section(8883, "mqtts", ca=str(tmp_path / name)), "demo")


def test_broker_is_verified_by_a_private_certificate_authority(broker, line, authority):
    mosquitto = broker(f"certfile {authority}/server.pem", f"keyfile {authority}/server.key", "user root")
    ca = authority / "ca.pem"
    with (
        mosquitto.subscribed(ca=ca) as heard,
        line(section(mosquitto.port, "mqtts", ca=str(ca)), events=("board",)) as (store, _),
    ):
        store.record_board(board("B1"))
        assert heard_until(heard, "coserve/demo/board/B1/verdict")


@contextmanager
def hanging_broker(*, answers_connect):
    """A socket that takes connections, may acknowledge the connection, and says nothing more."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        connected, taken = queue.Queue(), []

        def take():
            try:
                while True:
                    taken.append(listener.accept()[0])
                    taken[-1].recv(1024)
                    if answers_connect:
                        taken[-1].sendall(b"\x20\x02\x00\x00")
                    connected.put(1)
            except OSError:
                return

        thread = threading.Thread(target=take, daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1], connected
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            for each in taken:
                each.close()


@pytest.mark.parametrize("answers_connect", [False, True])
def test_hanging_broker_does_not_delay_the_end_of_the_line(tmp_path, answers_connect):
    with hanging_broker(answers_connect=answers_connect) as (port, connected):
        receiver = MqttReceiver(section(port), "demo")
        outbox = Outbox("demo", ["mqtt"], ["board"], 100)
        store = ResultStore(tmp_path / "r.db", followers=[outbox])
        deliveries = Deliveries([receiver], outbox, store, 100.0)
        deliveries.start()
        store.record_board(board("B1"))
        connected.get(timeout=60)
        assert deliveries.stop(25.0)
        store.close()
    assert OutboxReader(tmp_path / "r.db").standing("mqtt").waiting == 1


def packet(connection):
    """Type and body of one MQTT packet."""
    kind, shift, size = connection.recv(1)[0], 0, 0
    while True:
        byte = connection.recv(1)[0]
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    body = b""
    while len(body) < size:
        body += connection.recv(size - len(body))
    return kind >> 4, body


def answers_old(connection, heard):
    """Speak MQTT 3.1.1, and hang up on a topic with POISON."""
    _, connect = packet(connection)
    if connect[6] != 4:
        return connection.sendall(b"\x20\x02\x00\x01")
    connection.sendall(b"\x20\x02\x00\x00")
    while True:
        kind, body = packet(connection)
        if kind == 3:
            size = int.from_bytes(body[:2], "big")
            topic = body[2 : 2 + size].decode()
            if "POISON" in topic:
                return None
            heard.append(topic)
            connection.sendall(b"\x40\x02" + body[2 + size : 4 + size])


def test_mqtt_3_broker_that_hangs_up_on_one_message_gets_all_others(line):
    heard = []
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:

        def serve():
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection, suppress(OSError, IndexError):
                        answers_old(connection, heard)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with line(section(listener.getsockname()[1]), events=("board",)) as (store, deliveries):
            for serial in ("B1", "POISON", "B2", "B3"):
                store.record_board(board(serial))
            until(lambda: deliveries.statistics()[0].delivered == 3)
            assert deliveries.statistics()[0].refused == 1
            assert "board POISON" in deliveries.statistics()[0].refusal
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    boards = [topic.split("/")[3] for topic in heard if "board" in topic]
    assert boards == ["B1", "B2", "B3"]


@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        (0x8E, "another client has the client id 'coserve-demo', too - give each box its own `line`"),
        (0x8B, "the broker ended the accepted connection ([code:139] Server shutting down) - see the broker's log"),
        (0x80, "the broker ended the accepted connection without a reason - see the broker's log"),
    ],
)
def test_brokers_disconnect_reason_becomes_an_alarm_with_a_remedy(line, code, wanted):
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:

        def serve():
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection, suppress(OSError, IndexError):
                        packet(connection)
                        connection.sendall(b"\x20\x03\x00\x00\x00")  # accepted, MQTT 5
                        _, body = packet(connection)
                        size = int.from_bytes(body[:2], "big")
                        connection.sendall(b"\x40\x02" + body[2 + size : 4 + size])  # the status
                        connection.sendall(bytes([0xE0, 1, code]))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with line(section(listener.getsockname()[1]), events=("board",)) as (_, deliveries):
            until(lambda: wanted in str(deliveries.statistics()[0].alarm))
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
