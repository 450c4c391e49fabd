"""A real broker, a real web server, and event loops whose time is our own."""

from __future__ import annotations

import asyncio
import http.server
import json
import os
import queue
import selectors
import shutil
import socket
import subprocess
import threading
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from paho.mqtt import client as paho

from agent.records.boards import BoardVerdict
from agent.records.delivery.deliveries import Deliveries
from agent.records.outbox import Outbox
from agent.records.result_writer import ResultStore
from experts.expert import Verdict
from tests.lines import NOON, changed, result
from tests.waiting import PATIENCE_S, until

MOSQUITTO = shutil.which("mosquitto", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


def image(number, verdict=Verdict.NG, **changes):
    made = result(
        f"key-{number}", verdict, component="r0402", image=f"{number}.png", seconds=0.25, config_sha256="ab" * 32,
        board="B1", board_type="main", ref=f"R{number}", label="burnt", score=0.75, experts=("cls/r",),
    )  # fmt: skip
    return changed(made, **changes)


def board(serial, verdict=Verdict.OK, **changes):
    values = {
        "serial": serial, "board_type": "main", "verdict": verdict, "opened_at": NOON, "closed_at": NOON,
        "missing": {}, "counts": {verdict: 1},
    }  # fmt: skip
    return BoardVerdict(**{**values, **changes})


@pytest.fixture
def delivering(tmp_path):
    """A line's store with its outbox, and deliveries to one receiver; stopped with the test."""

    @contextmanager
    def open_line(receiver, events=("board",), name="demo"):
        outbox = Outbox(name, [receiver.name], events, 1000)
        with closing(ResultStore(tmp_path / "r.db", followers=[outbox])) as store:
            deliveries = Deliveries([receiver], outbox, store, 10_000.0)
            deliveries.start()
            try:
                yield store, deliveries
            finally:
                assert deliveries.stop(60.0)

    return open_line


class Leaping(selectors.DefaultSelector):
    """Looks at what is ready, and never waits: the loop's time leaps to what is due next instead."""

    def __init__(self):
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout=None):
        if timeout is None:  # nothing is due: only another thread can go on
            return super().select(PATIENCE_S)
        ready = super().select(0)
        if not ready and timeout > 0:
            self.now_s += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on which a day passes at once."""

    def __init__(self):
        self.selector = Leaping()
        super().__init__(self.selector)

    def time(self):
        return self.selector.now_s


def heard_of(message):
    text = message.payload.decode()
    told = json.loads(text) if text.startswith("{") else None
    return SimpleNamespace(topic=message.topic, payload=text, is_retained=bool(message.retain), json=told)


class Broker:
    """Debian's mosquitto with a configuration of ours, in a folder of ours."""

    def __init__(self, folder, *settings):
        self.folder = folder
        with closing(socket.socket()) as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._settings = settings
        self._process = None

    def start(self):
        lines = [f"listener {self.port} 127.0.0.1", "persistence false", *self._settings]
        if not any(line.startswith("allow_anonymous") for line in lines):
            lines.append("allow_anonymous true")
        configuration = self.folder / f"mosquitto-{self.port}.conf"
        configuration.write_text("\n".join(lines) + "\n")
        with (self.folder / f"mosquitto-{self.port}.log").open("ab") as log:
            self._process = subprocess.Popen([str(MOSQUITTO), "-c", str(configuration)], stdout=log, stderr=log)
        until(self._answers, self.log)

    def stop(self):
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def log(self):
        return (self.folder / f"mosquitto-{self.port}.log").read_text()

    def _answers(self):
        assert self._process is not None
        assert self._process.poll() is None, self.log()
        with closing(socket.socket()) as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    @contextmanager
    def subscribed(self, *, ca=None):
        """Everything that is published, in a queue; from a subscriber that is there when this begins."""
        heard = queue.Queue()
        ready = threading.Event()
        client = paho.Client(paho.CallbackAPIVersion.VERSION2)
        client.on_connect = lambda *_: client.subscribe("#", qos=1)
        client.on_subscribe = lambda *_: ready.set()
        client.on_message = lambda _client, _data, message: heard.put(heard_of(message))
        if ca is not None:
            client.tls_set(ca_certs=str(ca))
        client.connect("127.0.0.1", self.port)
        client.loop_start()
        try:
            assert ready.wait(PATIENCE_S), "no subscription"
            yield heard
        finally:
            client.disconnect()
            client.loop_stop()


@pytest.fixture
def broker(tmp_path, request):
    """Starts brokers; all end with the test."""
    if MOSQUITTO is None:
        end = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        end("mosquitto is not installed: make tools, or apt-get install mosquitto")

    def make(*settings):
        made = Broker(tmp_path, *settings)
        request.addfinalizer(made.stop)
        made.start()
        return made

    return make


@dataclass
class WebServer:
    """A web server that answers as it is told: (status, headers), one after another; then 200. None: never."""

    answers: list = field(default_factory=list)
    posted: queue.Queue = field(default_factory=queue.Queue)
    url: str = ""
    connections: int = 0
    released: threading.Event = field(default_factory=threading.Event)


def _handler(server):
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self):
            super().setup()
            server.connections += 1

        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            told = {"path": self.path, "headers": self.headers, "body": body, "json": json.loads(body)}
            server.posted.put(SimpleNamespace(**told, id=self.headers["Idempotency-Key"]))
            answer = server.answers.pop(0) if server.answers else (200, {})
            if answer is None:
                server.released.wait(PATIENCE_S)
                self.close_connection = True
                return
            status, headers = answer
            text = b"as it was told"
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)
            if headers.get("Connection") == "close" or "X-Hang-Up" in headers:  # the latter without saying so
                self.close_connection = True

        def log_message(self, *_):
            pass

    return Handler


@pytest.fixture
def web_server():
    """Makes web servers; ``tls``: an ssl.SSLContext of a server."""
    made = []

    def make(*answers, tls=None):
        server = WebServer(list(answers))
        httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(server))
        httpd.daemon_threads = True
        if tls is not None:
            httpd.socket = tls.wrap_socket(httpd.socket, server_side=True)
        server.url = f"http{'s' if tls else ''}://localhost:{httpd.server_port}/mes?line=1"
        thread = threading.Thread(target=httpd.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        made.append((server, httpd, thread))
        return server

    yield make
    for server, httpd, thread in made:
        server.released.set()
        httpd.shutdown()
        httpd.server_close()
        thread.join()
