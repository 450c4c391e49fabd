"""The pages `/metrics`, `/health/live`, `/health/ready`; other paths are 404, other methods 405.

Guarantees: a page is answered within PATIENCE_S; while the line hangs it is 503 with that reason. The line is asked
each question once at a time, and concurrent callers share the answer: neither questions nor threads pile up.
After ``stop`` only a thread whose question hangs in the line goes on.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.responses import Response

from agent.doors.http.door import DoorSection
from agent.doors.http.metrics.readings import Histogram, MetricKind
from agent.doors.http.routes import STATUS, RouteRule, route
from agent.doors.http.single_flight import SingleFlight
from experts.daemon_threads import DaemonThreads

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from prometheus_client import Metric as Family

    from agent.doors.http.metrics.readings import Metric, ObservedLine
    from agent.doors.http.routes import Call

    Answer = Callable[[Call], Awaitable[Response]]

PREFIX = "coserve"
PATIENCE_S = 5.0  # Prometheus and health checks wait for 10 s
REQUESTS = 16  # of each address at a time
FAMILIES = {MetricKind.COUNTER: CounterMetricFamily, MetricKind.GAUGE: GaugeMetricFamily}
PATHS = ("/metrics", "/health/live", "/health/ready")

Result = TypeVar("Result")


class Monitoring:
    """The section of the door with the pages; also the last one, for paths of no other section."""

    def __init__(self, line: ObservedLine, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._condition = SingleFlight(line.condition, "web-health")
        self._metrics = SingleFlight(line.metrics, "web-metrics")
        self._writing = DaemonThreads(1, "web-text")  # exposition takes a while
        self._process = ProcessCollector(PREFIX, registry=None)

    def section(self) -> DoorSection:
        answers = (self._exposition, self._live, self._ready)
        routes = [route("GET", path, self._soon(answer), RULE) for path, answer in zip(PATHS, answers, strict=True)]
        return DoorSection(("/metrics", "/health"), routes, _refusal, REQUESTS, stop=self.stop)

    def stop(self) -> None:
        """Stop asking the line; a question that hangs is abandoned."""
        for threads in (self._condition.thread, self._metrics.thread, self._writing):
            threads.stop(0.0)

    def _soon(self, answer: Answer) -> Answer:
        async def answered(call: Call) -> Response:
            try:
                return await answer(call)
            except TimeoutError:
                return _line(503, f"no answer from the line within {self._patience_s:g} s: it hangs")

        return answered

    async def _exposition(self, call: Call) -> Response:
        metrics = await self._metrics.answer(self._patience_s)
        written = self._writing.submit(_written, metrics, self._process, call.request.headers.get("accept", ""))
        return await asyncio.wrap_future(written)

    async def _live(self, call: Call) -> Response:
        wrong = (await self._condition.answer(self._patience_s)).dead
        return _line(200, "alive") if wrong is None else _line(503, " ".join(wrong.split()))

    async def _ready(self, call: Call) -> Response:
        condition = await self._condition.answer(self._patience_s)
        wrong = condition.dead or condition.unready
        return _line(200, "ready") if wrong is None else _line(503, " ".join(wrong.split()))


def _written(metrics: Sequence[Metric | Histogram], process: ProcessCollector, accepted: str) -> Response:
    registry = CollectorRegistry()
    registry.register(_Metrics(metrics))
    registry.register(process)
    encode, kind = choose_encoder(accepted)
    return Response(encode(registry), headers={"content-type": kind, "cache-control": "no-store"})


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


def _line(status: int, line: str) -> Response:
    content = line.encode("utf-8", "backslashreplace") + b"\n"
    return Response(content, status, {"content-type": "text/plain; charset=utf-8", "cache-control": "no-store"})


def _refusal(status: int, reason: str) -> Response:
    return _line(status, f"no such page - there are {', '.join(PATHS)}" if status == 404 else reason)


RULE = RouteRule(refused=lambda refused: _line(STATUS[refused.reason], str(refused)))
