"""The pages `/metrics`, `/health/live`, `/health/ready`; other paths are 404, other methods 405.

Guarantees: a page is answered within PATIENCE_S; while the line hangs it is 503 with that reason. The line is asked
each question once at a time, and concurrent callers share the answer: neither questions nor threads pile up.
A connection is cut off after CONNECTION_S. After ``stop`` only a thread whose question hangs in the line goes on.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from typing import TYPE_CHECKING, Generic, TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from agent.http.exchange import HttpAnswer, Terms
from agent.web.readings import Histogram, MetricKind
from experts.daemon_threads import DaemonThreads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future

    from prometheus_client import Metric as Family

    from agent.http.exchange import HttpRequest, Stream
    from agent.web.readings import Condition, Metric, ObservedLine

log = logging.getLogger(__name__)

PREFIX = "coserve"
PATIENCE_S = 5.0  # Prometheus and health checks wait for 10 s
CONNECTION_S = 10.0  # twice PATIENCE_S
BODY_BYTES = 1024  # no page takes a body
CONNECTIONS = 16  # of each address at a time
FAMILIES = {MetricKind.COUNTER: CounterMetricFamily, MetricKind.GAUGE: GaugeMetricFamily}
PATHS = ("/metrics", "/health/live", "/health/ready")

Result = TypeVar("Result")


class Pages:
    """Implements ``agent.http.exchange.Application``."""

    def __init__(self, line: ObservedLine, patience_s: float = PATIENCE_S, connection_s: float = CONNECTION_S) -> None:
        self.terms = Terms(BODY_BYTES, connection_s, connection_s, CONNECTIONS)
        self._patience_s = patience_s
        self._condition = _SingleFlight(line.condition, "web-health")
        self._metrics = _SingleFlight(line.metrics, "web-metrics")
        self._writing = DaemonThreads(1, "web-text")  # exposition takes a while
        self._process = ProcessCollector(PREFIX, registry=None)

    def serves(self, path: str) -> bool:
        return path in PATHS

    async def answer(self, request: HttpRequest, stream: Stream) -> HttpAnswer:
        if not self.serves(request.path):
            return _said(404, f"no such page - there are {', '.join(PATHS)}")
        if request.method != "GET":
            return _said(405, "only GET is answered", ("allow", "GET"))
        try:
            return await self._page(request)
        except TimeoutError:
            return _said(503, f"no answer from the line within {self._patience_s:g} s: it hangs")
        except Exception:  # the boundary of one request
            log.exception("page_failed path=%s", request.path)
            return _said(500, "see the agent's log")

    def refusal(self, status: int, reason: str) -> HttpAnswer:
        return _said(status, reason)

    def stop(self) -> None:
        """Stop asking the line; a question that hangs is abandoned."""
        for threads in (self._condition.thread, self._metrics.thread, self._writing):
            threads.stop(0.0)

    async def _page(self, request: HttpRequest) -> HttpAnswer:
        if request.path == "/metrics":
            metrics = await self._metrics.answer(self._patience_s)
            written = self._writing.submit(_written, metrics, self._process, request.headers.get("accept", ""))
            return await asyncio.wrap_future(written)
        condition: Condition = await self._condition.answer(self._patience_s)
        wrong = condition.dead if request.path == "/health/live" else condition.dead or condition.unready
        if wrong is not None:
            return _said(503, " ".join(wrong.split()))
        return _said(200, "alive" if request.path == "/health/live" else "ready")


class _SingleFlight(Generic[Result]):
    """One call to the line at a time, on its thread: concurrent callers share the answer."""

    def __init__(self, ask: Callable[[], Result], name: str) -> None:
        self._ask = ask
        self.thread = DaemonThreads(1, name)
        self._lock = threading.Lock()
        self._under_way: Future[Result] | None = None

    async def answer(self, timeout_s: float) -> Result:
        """Raises TimeoutError, and the line's own errors."""
        with self._lock:
            if self._under_way is None or self._under_way.done():
                self._under_way = self.thread.submit(self._ask)
            under_way = self._under_way
        async with asyncio.timeout(timeout_s):
            return await asyncio.shield(asyncio.wrap_future(under_way))


def _written(metrics: Sequence[Metric | Histogram], process: ProcessCollector, accepted: str) -> HttpAnswer:
    registry = CollectorRegistry()
    registry.register(_Metrics(metrics))
    registry.register(process)
    encode, kind = choose_encoder(accepted)
    return HttpAnswer(200, encode(registry), (("content-type", kind), ("cache-control", "no-store")))


class _Metrics(Collector):
    def __init__(self, metrics: Sequence[Metric | Histogram]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Family]:
        for metric in self._metrics:
            name = f"{PREFIX}_{metric.name}"
            if isinstance(metric, Histogram):
                histogram = HistogramMetricFamily(name, metric.help, labels=metric.labels)
                for labels, found in metric.values.items():
                    buckets = [("+Inf" if le == math.inf else str(le), count) for le, count in found.counts.items()]
                    histogram.add_metric(labels, buckets, found.sum_s)
                yield histogram
                continue
            family = FAMILIES[metric.kind](name, metric.help, labels=metric.labels)
            for labels, value in metric.values.items():
                family.add_metric(labels, value)
            yield family


def _said(status: int, line: str, *headers: tuple[str, str]) -> HttpAnswer:
    content = line.encode("utf-8", "backslashreplace") + b"\n"
    usual = (("content-type", "text/plain; charset=utf-8"), ("cache-control", "no-store"))
    return HttpAnswer(status, content, (*usual, *headers))
