"""Eight hours of three open pages, in minutes: neither the agent nor the pages grow."""

import threading
import time

import psutil
import pytest

from tests.agent.doors.http.pages.conftest import browser
from tests.agent.doors.http.station_line import FakeStation, Watched
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
LIMIT_S = 3600 if is_full() else 600
# May be added: caches fill up, a connection is open just then, a row is a line longer.
AGENT_BYTES, FILES, THREADS = 48 * 2**20, 8, 4
HEAP_BYTES, NODES = 3 * 2**20, 400


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
    with FakeStation(tmp_path / "line", forks) as station:
        yield station


def test_eight_hours_of_three_pages_add_nothing(station, browser, report):
    """Compared from the first eighth on, when all caches are full."""
    process = psutil.Process(station.agent.pid)
    for number in range(FIRST):
        station.make_board(f"first-{number}")
    station.committed_at(f"first-{FIRST - 1}")
    began_s, agent, shown = time.monotonic(), [], []
    with Feeder(station) as feeder:
        pages = [SoakedPage(browser, station, path) for path in PAGES]
        for eighths in (1, 4, 8):
            while (updates := min(page.updates for page in pages)) < UPDATES * eighths // 8:
                assert time.monotonic() - began_s < LIMIT_S, updates
                pages[0].page.wait_for_timeout(500)
            agent.append(size_of(process))
            shown.append([page.size() for page in pages])
            report(
                "pages",
                {
                    "updates of each": updates, "boards": feeder.boards + FIRST, "s": round(time.monotonic() - began_s),
                    "the agent's bytes, files and threads": agent[-1], "the pages' bytes and nodes": shown[-1],
                },
            )  # fmt: skip
        wrong = [each for page in pages for each in page.watched.wrong]
    assert wrong == []
    grown = [last - first for first, last in zip(agent[0], agent[-1], strict=True)]
    assert all(each <= most for each, most in zip(grown, (AGENT_BYTES, FILES, THREADS), strict=True)), grown
    for (heap, nodes), (last_heap, last_nodes) in zip(shown[0], shown[-1], strict=True):
        assert last_heap - heap < HEAP_BYTES
        assert last_nodes - nodes < NODES
