"""Statistics of the Open Inference Protocol: calls of each model since the start, over all wires.

Guarantees: any thread may count and read. A call of an unknown model counts too, for a bounded number of names.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING

from agent.doors.orders import NAME_CHARACTERS
from agent.doors.proto import inference_pb2 as pb
from agent.doors.refusals import text
from agent.faults.errors import OrderRefused

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from agent.doors.desk import VerdictView

VERSION = "1"  # of every model, as weights change in place
MODELS_COUNTED = 10_000  # names, unknown models included


class CallStatistics:
    def __init__(self) -> None:
        self._lock = Lock()
        self._of: dict[str, pb.ModelStatistics] = {}

    def of(self, models: Iterable[str]) -> pb.ModelStatisticsResponse:
        with self._lock:
            return pb.ModelStatisticsResponse(model_stats=[self._of.get(name) or _no_calls(name) for name in models])

    @contextmanager
    def timed(self, model: str) -> Iterator[list[VerdictView]]:
        """Context that counts a call by its end. The call adds its verdicts to the list."""
        began_s = time.perf_counter()
        parts: list[VerdictView] = []
        try:
            yield parts
        except (OrderRefused, asyncio.CancelledError):
            with self._lock:
                if model in self._of or (len(self._of) < MODELS_COUNTED and len(model) <= NAME_CHARACTERS):
                    statistics = self._of.setdefault(model, _no_calls(model))
                    _add(statistics.inference_stats.fail, time.perf_counter() - began_s)
            raise
        with self._lock:
            _add_judged(self._of.setdefault(model, _no_calls(model)), parts, time.perf_counter() - began_s)


def _no_calls(model: str) -> pb.ModelStatistics:
    nothing = pb.InferStatistics(**{field.name: {} for field in pb.InferStatistics.DESCRIPTOR.fields})
    return pb.ModelStatistics(name=text(model), version=VERSION, inference_stats=nothing)


def _add_judged(statistics: pb.ModelStatistics, parts: Sequence[VerdictView], seconds: float) -> None:
    """Count an answered call. Each of its ``parts`` counts, except in ``success``."""
    times = statistics.inference_stats
    _add(times.success, seconds)
    statistics.last_inference = round(time.time() * 1000)
    statistics.inference_count += len(parts)
    statistics.execution_count += len(parts)
    for part in parts:
        _add(times.queue, part.queue_s)
        _add(times.compute_input, 0.0)
        _add(times.compute_infer, part.compute_s)
        _add(times.compute_output, 0.0)


def _add(duration: pb.StatisticDuration, seconds: float) -> None:
    duration.count += 1
    duration.ns += round(seconds * 1e9)
