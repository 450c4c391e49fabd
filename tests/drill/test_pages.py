"""Eight hours of three open pages, in minutes: neither the agent nor the pages grow."""

import threading
import time

import psutil
import pytest

from tests.agent.web.pages.conftest import browser
from tests.agent.web.station_line import FakeStation, Watched
from tests.drill.scene import is_full

__all__ = ["browser"]

pytestmark = pytest.mark.slow
FIRST = 60  # boards: all lists are as long as they get
EVERY_S = 1.0  # a board later
PAGES = ("/", "/engine", "/review")
UPDATES = 8 * 3600 if is_full() else 600  # of each page: one a second
SPEED = 40  # seconds of a page's clock in one
# A page's clock and its timer run faster; how long an answer may take does not.
FASTER = f"""
const now = performance.now.bind(performance), interval = setInterval;
performance.now = () => now() * {SPEED};
window.setInterval = (what, ms) => interval(what, ms / {SPEED});
window.updates = 0;
const asked = window.fetch;
window.fetch = (path, ...rest) => {{
  window.updates += path === "/api/state";
  return asked(path, ...rest);
}};
"""
AGENT_BYTES, HEAP_BYTES, NODES = 48 * 2**20, 3 * 2**20, 400  # that may be added: caches fill up, a list is longer


class Feeder:
    """Keeps boards coming, with a good part and a bad one."""

    def __init__(self, station):
        self._station, self._is_over = station, threading.Event()
        self._thread = threading.Thread(target=self._feed, daemon=True)
        self.boards = 0

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._is_over.set()
        self._thread.join()

    def _feed(self):
        while not self._is_over.wait(EVERY_S):
            self.boards += 1
            self._station.make_board(f"SN-{self.boards}")


class SoakedPage:
    def __init__(self, browser, station, path):
        context = browser.new_context(viewport={"width": 1024, "height": 768}, reduced_motion="reduce")
        context.add_init_script(FASTER)
        self.watched = Watched(context.new_page(), station.url)
        self.watched.sign_in()
        self.page = self.watched.go(path)
        self._session = context.new_cdp_session(self.page)
        self._session.send("Performance.enable")

    @property
    def updates(self):
        return self.page.evaluate("updates")

    def size(self):
        """Bytes of the heap and DOM nodes, after a collection."""
        for _ in range(2):
            self._session.send("HeapProfiler.collectGarbage")
        told = {each["name"]: each["value"] for each in self._session.send("Performance.getMetrics")["metrics"]}
        return told["JSHeapUsedSize"], told["Nodes"]


def size_of(process):
    return process.memory_info().rss, process.num_fds(), process.num_threads()


@pytest.fixture
def station(tmp_path, forks):
    station = FakeStation(tmp_path / "line", forks)
    station.start()
    yield station
    station.stop()


def test_eight_hours_of_three_pages_add_nothing(station, browser, told):
    process = psutil.Process(station.agent.pid)
    for number in range(FIRST):
        station.make_board(f"first-{number}")
    station.committed_at(f"first-{FIRST - 1}")
    began_s = time.monotonic()
    with Feeder(station) as feeder:
        pages = [SoakedPage(browser, station, path) for path in PAGES]

        def updated(updates):
            until_s = 3600 if is_full() else 600
            while min(page.updates for page in pages) < updates:
                assert time.monotonic() - began_s < until_s, [page.updates for page in pages]
                pages[0].page.wait_for_timeout(500)

        updated(UPDATES // 4)  # all caches are full
        before, sizes = size_of(process), [page.size() for page in pages]
        updated(UPDATES)
        after, sizes_after = size_of(process), [page.size() for page in pages]
        wrong = [each for page in pages for each in page.watched.wrong]
    seconds = time.monotonic() - began_s
    told(
        "pages",
        {
            "updates": [page.updates for page in pages], "boards": feeder.boards, "seconds": round(seconds),
            "agent's bytes, files and threads before": before, "after": after,
            "pages' heap bytes and nodes before": sizes, "then": sizes_after,
        },
    )  # fmt: skip
    assert wrong == []
    assert after[0] - before[0] < AGENT_BYTES
    assert (after[1] - before[1], after[2] - before[2]) <= (8, 4)
    for (heap, nodes), (heap_after, nodes_after) in zip(sizes, sizes_after, strict=True):
        assert heap_after - heap < HEAP_BYTES
        assert nodes_after - nodes < NODES
