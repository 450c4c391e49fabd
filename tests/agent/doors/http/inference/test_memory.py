"""Images over HTTP in the memory of a server in a process of its own."""

import gzip
import http.client
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tests.waiting import until

ROOT = Path(__file__).parents[5]
SERVER = """
import gc, sys
from agent.doors.access import logged, Tokens
from agent.doors.orders import Orders
from agent.doors.statistics import CallStatistics
from agent.line_file.api import ApiSection
from agent.doors.http.door import WebDoor
from agent.doors.http.inference.endpoint import InferenceEndpoint
from agent.doors.http.server import WebServer
from tests.agent.doors.fake_desk import FakeDesk
gc.disable()  # what is let go by the collector alone is not let go in time
desk = FakeDesk(most=30, holds=True)
api = ApiSection(http=["127.0.0.1:0"], limits={"memory": "64MiB", "message": "16MiB"})
part = InferenceEndpoint(Orders(desk), api.limits, CallStatistics()).section()
server = WebServer(api, WebDoor([part], Tokens(api), logged, api))
server.start()
print(server.addresses[0], flush=True)
for line in sys.stdin:
    if "release" in line:
        desk.release()
    print(len(desk.under_way), flush=True)
"""


@contextmanager
def server():
    """Address of a server; the number of images at its desk, once it was told something; its growth in bytes."""

    def peak_bytes():  # not ru_maxrss: that begins with what the parent took
        return int(re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text())[1]) * 1024

    def tell(word):
        process.stdin.write(f"{word}\n")
        process.stdin.flush()
        return int(process.stdout.readline())

    given_back = {"MALLOC_MMAP_THRESHOLD_": "1000000"}  # what is freed leaves at once, in no pieces of the heap
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], cwd=ROOT, env=os.environ | given_back,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            address = process.stdout.readline().strip()
            before = peak_bytes()
            yield address, tell, lambda: peak_bytes() - before
        finally:
            process.kill()


def asked(address, body, headers):
    host, port = address.split(":")
    with closing(http.client.HTTPConnection(host, int(port), timeout=60)) as caller:
        caller.request("POST", "/v2/models/resistor/infer", body, {"inference-header-content-length": "0"} | headers)
        with caller.getresponse() as answer:
            return answer.status


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["identity", "gzip"])
def test_waiting_image_is_in_memory_once_and_the_number_is_bounded(encoding):
    """240 MB are under way; another copy of them, or 30 more inflated at once, would be as much again."""
    body = bytes(8_000_000) if encoding == "identity" else gzip.compress(bytes(8_000_000))
    with server() as (address, tell, grown_bytes), ThreadPoolExecutor(60) as callers:
        calls = [callers.submit(asked, address, body, {"content-encoding": encoding}) for _ in range(60)]
        until(lambda: sum(call.done() for call in calls) == 30)
        assert tell("count") == 30
        assert grown_bytes() < 400_000_000
        tell("release")
        assert sorted(call.result() for call in calls) == [200] * 30 + [429] * 30
