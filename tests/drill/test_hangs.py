"""What never answers: an expert that hangs, a camera that stalls; the agent ends or goes on, and loses nothing."""

from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import cv2
import numpy as np

from tests.drill.scene import until

STOP_S = 10.0

HANGING = """
import sys, threading
from functools import partial
from pathlib import Path
import agent.service.inspections.inspector
from agent.config import read_line
from agent.deployment.build import AgentOptions, build_agent
from agent.runtime.ages import AgeLimits
from agent.runtime.loop import LoopOptions
from agent.service.line_service import LineService
from agent.service.serve import serve_line
from experts.backends.fake import FakeSkeleton
ages = AgeLimits(told_s=0.5, told_multiple=0.0, ended_s=1.0, ended_multiple=0.0)
options = AgentOptions(loop=LoopOptions(ages=ages))
agent.service.inspections.inspector.build_agent = partial(build_agent, options=options)
infer = FakeSkeleton.infer
def hang(self, expert, batch):
    if expert.id == "cls/f1":
        threading.Event().wait()
    return infer(self, expert, batch)
start = LineService.start
def started(service):
    FakeSkeleton.infer = hang  # once it serves: before that experts are probed
    start(service)
LineService.start = started
import os
try:
    serve_line(read_line(Path(sys.argv[1]), {}), lambda *_: None)
except BaseException as error:
    print(error, file=sys.stderr)
    os._exit(1)
"""


def test_an_executor_that_hangs(scene, agents, forks, told):
    """It ends the agent, with exit code 1; the next one judges everything."""
    scene.drop_many(40)
    ended = forks.run(HANGING, scene.write())
    assert ended.returncode == 1, ended.stderr
    before = len(scene.rows)
    agents.start()
    until(scene.is_up)
    until(scene.is_finished)
    assert agents.stop() == 0
    told("hung executor", {"judged before": before} | scene.account())


class Stalling:
    """An MJPEG camera that stalls on command without closing."""

    def __init__(self):
        self.flows = threading.Event()
        self.flows.set()
        self.is_over = False
        jpeg = cv2.imencode(".jpg", np.full((8, 8, 3), 120, np.uint8))[1].tobytes()
        camera = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200)
                self.send_header("Content-Type", "multipart/x-mixed-replace; boundary=f")
                self.end_headers()
                try:
                    while not camera.is_over:
                        camera.flows.wait(0.1)
                        if not camera.flows.is_set():
                            continue
                        head = f"--f\r\nContent-Type: image/jpeg\r\nContent-Length: {len(jpeg)}\r\n\r\n"
                        self.wfile.write(head.encode() + jpeg + b"\r\n")
                        time.sleep(0.02)
                except OSError:
                    pass

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def close(self):
        self.is_over = True
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


def test_a_camera_that_stalls(scene, told):
    """AC12: it is told, killed and connected anew; a stop does not wait for it."""
    camera = Stalling()
    scene.document["intake"]["cameras"] = [
        {"name": "top", "url": f"http://127.0.0.1:{camera.server.server_address[1]}/", "component": "c0",
         "stall_timeout_s": 1.0}
    ]  # fmt: skip
    scene.write()

    def view():
        return next(each for each in service.desk.status().sources if each.name == "top")

    with scene.served() as service:
        until(lambda: service.judged >= 3)
        camera.flows.clear()
        until(lambda: view().state != "STREAMING")
        scene.drop_many(8)
        until(scene.is_finished)  # the folder's files, meanwhile
        camera.flows.set()
        until(lambda: view().state == "STREAMING")
        received = view().received
        until(lambda: view().received > received)
        camera.flows.clear()
        started = time.monotonic()
    seconds = time.monotonic() - started
    camera.close()
    verdict = "reached" if seconds < STOP_S else f"SHORT of {STOP_S:g}"
    told("stalled camera", {"stopped in s": f"{seconds:.1f} ({verdict})"} | scene.account())
