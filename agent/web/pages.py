"""The three pages: `/metrics`, `/health/live`, `/health/ready`; all else is 404, and what is no GET is 405.

Guarantees: a page is answered within PATIENCE_S, also while the line hangs: then it is 503, and says so. The line is
asked one thing at a time; who asks the same meanwhile waits for the same answer, so that callers that do not give up
pile up neither questions nor threads.
"""

from __future__ import annotations

import logging
import math
import threading
from typing import TYPE_CHECKING, Generic, TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from agent.web.readings import Histogram, Kind
from experts.daemon_threads import DaemonThreads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from concurrent.futures import Future
    from wsgiref.types import StartResponse, WSGIEnvironment

    from prometheus_client import Metric as Family

    from agent.web.readings import Line, Metric

log = logging.getLogger(__name__)

PREFIX = "coserve"
PATIENCE_S = 5.0  # Prometheus and those who look after health wait for ten
FAMILIES = {Kind.COUNTER: CounterMetricFamily, Kind.GAUGE: GaugeMetricFamily}

Answer = TypeVar("Answer")


class Pages:
    """A WSGI application. For any thread."""

    def __init__(self, line: Line, patience_s: float) -> None:
        self._patience_s = patience_s
        self._condition = _Question(line.condition, "web-health")
        self._metrics = _Question(line.metrics, "web-metrics")
        registry = CollectorRegistry()
        registry.register(_Metrics(lambda: self._metrics.answer(patience_s)))
        ProcessCollector(PREFIX, registry=registry)
        self._pages = {"/metrics": make_wsgi_app(registry), "/health/live": self._live, "/health/ready": self._ready}

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        page = self._pages.get(environ["PATH_INFO"])
        if page is None:
            return _said("404 Not Found", f"no such page - there are {', '.join(self._pages)}", start_response)
        if environ["REQUEST_METHOD"] != "GET":
            return _said("405 Method Not Allowed", "only GET is answered", start_response, ("Allow", "GET"))
        try:
            return page(environ, start_response)
        except TimeoutError:
            return _unwell(f"no answer from the line within {self._patience_s:g} s: it hangs", start_response)
        except Exception:  # the boundary of a caller's thread: one page's mistake is not the others'
            log.exception("page_failed path=%s", environ["PATH_INFO"])
            return _said("500 Internal Server Error", "see the agent's log", start_response)

    def close(self) -> None:
        """Ask the line nothing more; a question that hangs is left behind."""
        self._condition.close()
        self._metrics.close()

    def _live(self, _: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        dead = self._condition.answer(self._patience_s).dead
        return _said("200 OK", "alive", start_response) if dead is None else _unwell(dead, start_response)

    def _ready(self, _: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        condition = self._condition.answer(self._patience_s)
        reason = condition.dead or condition.unready
        return _said("200 OK", "ready", start_response) if reason is None else _unwell(reason, start_response)


class _Question(Generic[Answer]):
    """Something that is asked of the line on a thread of its own, once at a time."""

    def __init__(self, ask: Callable[[], Answer], name: str) -> None:
        self._ask = ask
        self._thread = DaemonThreads(1, name)
        self._lock = threading.Lock()
        self._under_way: Future[Answer] | None = None

    def answer(self, timeout_s: float) -> Answer:
        """Raises TimeoutError, and whatever the line does."""
        with self._lock:
            if self._under_way is None or self._under_way.done():
                self._under_way = self._thread.submit(self._ask)
            under_way = self._under_way
        return under_way.result(timeout_s)

    def close(self) -> None:
        self._thread.stop(0.0)


class _Metrics(Collector):
    """The line's metrics as families of the library's."""

    def __init__(self, read: Callable[[], Sequence[Metric | Histogram]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Family]:
        for metric in self._read():
            name = f"{PREFIX}_{metric.name}"
            if isinstance(metric, Histogram):
                yield _histogram(name, metric)
                continue
            family = FAMILIES[metric.kind](name, metric.help, labels=metric.labels)
            for labels, value in metric.values.items():
                family.add_metric(labels, value)
            yield family


def _histogram(name: str, metric: Histogram) -> Family:
    family = HistogramMetricFamily(name, metric.help, labels=metric.labels)
    for labels, found in metric.values.items():
        buckets = [("+Inf" if bound == math.inf else str(bound), count) for bound, count in found.counts.items()]
        family.add_metric(labels, buckets, found.sum_s)
    return family


def _unwell(reason: str, start_response: StartResponse) -> Iterable[bytes]:
    return _said("503 Service Unavailable", " ".join(reason.split()), start_response)


def _said(status: str, line: str, start_response: StartResponse, *headers: tuple[str, str]) -> Iterable[bytes]:
    start_response(status, [("Content-Type", "text/plain; charset=utf-8"), ("Cache-Control", "no-store"), *headers])
    return [line.encode("utf-8", "backslashreplace") + b"\n"]
