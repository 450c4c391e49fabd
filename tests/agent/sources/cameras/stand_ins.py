"""Cameras that misbehave on command, and a taker of their frames."""

import os
import socket
import socketserver
import ssl
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import cv2
import numpy as np

from agent.line_file.intake import CameraSection
from agent.sources.cameras import process
from agent.sources.cameras.camera import CameraSource
from experts.expert import Verdict
from tests.agent.sources.cameras import fault
from tests.waiting import until

process.PROCESS = fault.__name__
WAIT_S = 60.0  # a generous deadline: whatever is waited for comes within two seconds
SIZE = (48, 64)
PERIOD_S = 0.02


def picture(number):
    """Grey, and brighter with each number."""
    return np.full((*SIZE, 3), number % 256, np.uint8)


def section(url, **given):
    """A camera of a line file; a `fault:` url is put in past the check."""
    folder = Path("/")
    checked = "file:clip.avi" if url.startswith("fault:") else url
    made = CameraSection.model_validate({"name": "top", "url": checked, **given}, context={"folder": folder})
    return made.model_copy(update={"url": url}) if url.startswith("fault:") else made


class MjpegCamera:
    """An HTTP server with one endless multipart answer of JPEG pictures. ``word`` says how it behaves from now on.

    stream; stall (nothing comes, and nothing ends); drop (the connection ends); refuse (404); lock (401 unless it is
    given a login); move (the stream is elsewhere, at ``moved_to``).
    """

    def __init__(self):
        self.word = "stream"
        self.login = None
        self.moved_to = ""
        self.viewers = 0
        camera = self

        class Answer(BaseHTTPRequestHandler):
            def do_GET(self):
                camera.viewers += 1
                camera.answer(self)

            def log_message(self, *_):
                """Nothing is printed."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/video"

    def answer(self, to):
        if self.word == "refuse":
            to.send_error(404)
        elif self.word == "move":
            to.send_response(302)
            to.send_header("Location", self.moved_to)
            to.end_headers()
        elif self.word == "lock" and not to.headers.get("Authorization"):
            to.send_response(401)
            to.send_header("WWW-Authenticate", 'Basic realm="camera"')
            to.end_headers()
        else:
            self.login = to.headers.get("Authorization")
            to.send_response(200)
            to.send_header("Content-Type", "multipart/x-mixed-replace; boundary=frame")
            to.end_headers()
            with suppress(OSError):
                self._stream(to)

    def _stream(self, to):
        number = 0
        while self.word != "drop":
            time.sleep(PERIOD_S)
            if self.word == "stall":
                continue
            number += 1
            content = cv2.imencode(".jpg", picture(number))[1].tobytes()
            to.wfile.write(b"--frame\r\nContent-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n" % len(content))
            to.wfile.write(content + b"\r\n")
            to.wfile.flush()

    def close(self):
        self.word = "drop"
        self._server.shutdown()
        self._server.server_close()


class TlsFront:
    """TLS proxy at a port of ``host`` in front of ``url``. ``heard``: blocks that were handed on."""

    def __init__(self, authority, url, host="127.0.0.1"):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(authority / "server.pem", authority / "server.key")
        parts = urlsplit(url)
        self._behind = (parts.hostname, parts.port)
        self.heard = 0
        front = self

        class CameraConnection(socketserver.BaseRequestHandler):
            def handle(self):
                with suppress(OSError), context.wrap_socket(self.request, server_side=True) as outer:
                    front.serve(outer)

        self._server = socketserver.ThreadingTCPServer((host, 0), CameraConnection)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        address = f"{host}:{self._server.server_address[1]}"
        self.url = parts._replace(scheme=f"{parts.scheme}s", netloc=address).geturl()

    def serve(self, outer):
        with socket.create_connection(self._behind) as inner:
            threading.Thread(target=_pump, args=(inner, outer), daemon=True).start()
            while content := outer.recv(65536):
                self.heard += 1
                inner.sendall(content)

    def close(self):
        self._server.shutdown()
        self._server.server_close()


def _pump(source, to):
    with suppress(OSError):
        while content := source.recv(65536):
            to.sendall(content)


class FailingCamera:
    """File of a `fault:` url, changed in one step."""

    def __init__(self, path):
        self._path = path
        self.url = f"fault:{path}"
        self.say("stream")

    def say(self, word):
        fresh = self._path.with_suffix(".new")
        fresh.write_text(word)
        os.replace(fresh, self._path)


class Taker:
    """A line with one camera, and the frames that it took while it had room and its door was open."""

    config = SimpleNamespace(boards=dict.fromkeys(("main", "other")), layouts=dict.fromkeys(("main", "other")))

    def __init__(self, section, password=None, has_room=True, is_open=True):
        self.frames = []
        self.lost = []
        self.is_free = has_room
        self.faults = 0  # so often the door breaks
        self.door = threading.Event()  # while it is not set, an image that is offered waits
        if is_open:
            self.door.set()
        self.camera = CameraSource(section, password, self)
        self.camera.start()

    def has_room(self, _):
        return self.is_free

    def _pass_door(self):
        self.door.wait()
        if self.faults:
            self.faults -= 1
            raise OSError("no space")

    def offer_image(self, arrival, source):
        self._pass_door()
        self.frames.append(arrival)
        source.verdict_committed(arrival.subject, Verdict.OK, None)

    def refuse_subject(self, subject, reason, source):
        self._pass_door()
        self.lost.append((subject, reason))
        source.verdict_committed(subject, Verdict.UNKNOWN, reason)

    def release_key(self, key): ...

    @property
    def now(self):
        return self.camera.status()

    @property
    def process(self):
        child = self.camera._child
        return None if child is None else child.pid

    def until_state(self, state):
        return until(lambda: (found := self.now).state == state and found, lambda: f"{state}, but {self.now}")

    def streaming(self):
        """Number of the camera's process, once its frames come."""
        self.until_state("STREAMING")
        return until(lambda: self.process)
