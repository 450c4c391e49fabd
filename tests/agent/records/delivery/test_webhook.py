"""A real web server as the receiver: acknowledgements, refusals, answers that come late or never, TLS, tokens."""

import asyncio
import logging
import ssl
import threading
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest

from agent.faults.errors import ReceiverUnavailable, SecretMissing
from agent.line_file.records import WebhookSection
from agent.records.delivery.webhook import WebhookConnection, WebhookReceiver
from agent.records.outbox import Message
from experts.errors import ConfigError
from tests.agent.records.delivery.conftest import board
from tests.waiting import until


def section(url, **settings):
    return WebhookSection.model_validate({"url": url, **settings}, context={"folder": Path("/")})


@pytest.fixture
def line(delivering):
    return lambda section: delivering(WebhookReceiver(section))


def serials(server, count):
    return [server.posted.get(timeout=60).json["board_serial"] for _ in range(count)]


def test_board_is_posted_as_json_with_its_id_and_the_token(web_server, line, tmp_path):
    (tmp_path / "token").write_text("t0ken\n")
    server = web_server()
    with line(section(server.url, token={"file": str(tmp_path / "token")})) as (store, deliveries):
        store.record_board(board("B1"))
        posted = server.posted.get(timeout=60)
        until(lambda: deliveries.statistics()[0].waiting == 0)
    assert (posted.path, posted.headers["Content-Type"]) == ("/mes?line=1", "application/json")
    assert (posted.headers["Authorization"], posted.id) == ("Bearer t0ken", posted.json["id"])
    assert (posted.json["schema"], posted.json["board_serial"], posted.json["verdict"]) == (1, "B1", "OK")
    assert deliveries.statistics()[0].delivered == 1


@pytest.mark.parametrize("closing", [{"Connection": "close"}, {"X-Hang-Up": "1"}], ids=["told", "not told"])
def test_connection_is_reused_and_reopened_after_the_server_closed_it(web_server, line, caplog, closing):
    server = web_server((200, {}), (200, {}), (200, closing))
    with line(section(server.url)) as (store, deliveries):
        for number in range(6):
            store.record_board(board(f"B{number}"))
        assert serials(server, 6) == [f"B{number}" for number in range(6)]
        until(lambda: deliveries.statistics()[0].waiting == 0)
    assert (server.connections, caplog.records) == (2, [])


NOT_NOW, REFUSED, WRONG_ADDRESS = (500, 503, 408, 425, 429), (400, 409, 413, 422), (301, 401, 403, 404, 405)


@pytest.mark.parametrize("status", [*NOT_NOW, *REFUSED, *WRONG_ADDRESS])
def test_status_of_the_answer_decides_whether_a_message_is_retried_or_dropped(web_server, line, caplog, status):
    server = web_server((status, {"Location": "/elsewhere"}))
    with line(section(server.url)) as (store, deliveries):
        store.record_board(board("B1"))
        store.record_board(board("B2"))
        posted = [server.posted.get(timeout=60) for _ in range(2 if status in REFUSED else 3)]
        until(lambda: deliveries.statistics()[0].waiting == 0)
        counts = deliveries.statistics()[0].delivered, deliveries.statistics()[0].refused
    assert posted[-1].json["board_serial"] == "B2"
    if status in REFUSED:
        assert counts == (1, 1)
        (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert "board=B1" in record.getMessage()
        assert f"answered {status} as it was told" in record.getMessage()
    else:
        assert counts == (2, 0)
        assert (posted[0].id, posted[0].body) == (posted[1].id, posted[1].body)
    assert ("correct url or token of outbox.webhook" in caplog.text) == (status in WRONG_ADDRESS)


def test_missing_answer_times_out_and_is_retried(web_server, line):
    server = web_server(None)
    with line(section(server.url, timeout_s=0.3)) as (store, deliveries):
        store.record_board(board("B1"))
        assert serials(server, 2) == ["B1", "B1"]
        until(lambda: deliveries.statistics()[0].waiting == 0)


def test_post_without_answer_in_time_is_not_posted_again_by_its_abandoned_thread(web_server, line):
    server = web_server((200, {}), None)  # the second one is asked on the kept connection
    with line(section(server.url, timeout_s=0.3)) as (store, deliveries):
        store.record_board(board("B1"))
        store.record_board(board("B2"))
        until(lambda: deliveries.statistics()[0].delivered == 2)
    assert serials(server, server.posted.qsize()) == ["B1", "B2", "B2"]


def test_connection_that_is_made_after_the_post_was_given_up_posts_nothing(web_server):
    server = web_server()
    connection = WebhookConnection(section(server.url), None, {})
    connect, connected = connection._http.connect, threading.Event()

    def connect_late():
        connection.close()  # what ``deliver`` does at its deadline, while this thread connects
        connect()
        connected.set()

    connection._http.connect = connect_late
    with pytest.raises(ReceiverUnavailable, match="given up"):
        asyncio.run(connection.deliver(Message("1", "board", None, "{}")))
    assert connected.is_set()
    assert server.posted.empty()


@pytest.mark.parametrize(("answer", "by_message"), [((500, {}), True), ((503, {}), False), ("cut", True)])
def test_answer_of_500_or_a_cut_connection_may_be_caused_by_the_message(web_server, answer, by_message):
    server = web_server(None if answer == "cut" else answer)
    server.released.set()

    async def tell(url):
        async with WebhookReceiver(section(url)).connected() as connection:
            await connection.deliver(Message("1", "board", None, "{}"))

    with pytest.raises(ReceiverUnavailable) as told:
        asyncio.run(tell(server.url))
    assert told.value.by_message is by_message
    with pytest.raises(ReceiverUnavailable) as told:
        asyncio.run(tell("http://127.0.0.1:9/"))  # nobody listens: never the message's fault
    assert told.value.by_message is False


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_server_with_an_untrusted_certificate_receives_nothing(web_server, line, authority, monkeypatch):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority / "server.pem", authority / "server.key")
    server = web_server(tls=context)
    with line(section(server.url)) as (store, deliveries):
        store.record_board(board("B1"))
        until(lambda: deliveries.statistics()[0].alarm is not None)
        alarm = deliveries.statistics()[0].alarm
        assert (alarm.partition(": [SSL")[0], "certificate verify failed" in alarm) == (server.url, True)
    assert server.posted.empty()


def test_missing_token_or_authority_prevents_the_start(tmp_path):
    with pytest.raises(SecretMissing, match="nowhere"):
        WebhookReceiver(section("http://mes/", token={"file": str(tmp_path / "nowhere")}))
    with pytest.raises(ConfigError, match=r"outbox\.webhook\.ca: .*nowhere: No such file or directory - write a PEM"):
        WebhookReceiver(section("https://mes/", ca=str(tmp_path / "nowhere")))


@pytest.mark.parametrize(
    ("retry_after", "wanted_s"), [(None, None), ("7", 7.0), ("-1", 0.0), ("soon", None), ("nan", None), ("date", 30.0)]
)
def test_retry_after_header_sets_the_pause(web_server, retry_after, wanted_s):
    if retry_after == "date":
        retry_after = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    server = web_server((503, {} if retry_after is None else {"Retry-After": retry_after}))

    async def tell():
        async with WebhookReceiver(section(server.url)).connected() as connection:
            await connection.deliver(Message("1", "board", None, "{}"))

    with pytest.raises(ReceiverUnavailable) as told:
        asyncio.run(tell())
    assert told.value.retry_s == (wanted_s if wanted_s is None else pytest.approx(wanted_s, abs=25.0))
