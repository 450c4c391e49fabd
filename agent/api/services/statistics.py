"""Counts of the Open Inference Protocol: calls of each model and their seconds. Counts only grow."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agent.api.proto import inference_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent.api.calls.desk import VerdictView


@dataclass(slots=True)
class Duration:
    """Count and sum of seconds."""

    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.seconds += seconds

    def message(self) -> pb.StatisticDuration:
        return pb.StatisticDuration(count=self.count, ns=round(self.seconds * 1e9))


@dataclass(slots=True)
class ModelCounts:
    """Counts of one model. ``success`` and ``fail`` count calls, the others images."""

    images: int = 0
    last_at_s: float = 0.0  # Unix time
    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    queue: Duration = field(default_factory=Duration)
    compute: Duration = field(default_factory=Duration)

    def judged(self, parts: Sequence[VerdictView], seconds: float) -> None:
        """A call that was answered."""
        self.success.add(seconds)
        self.images += len(parts)
        self.last_at_s = time.time()
        for part in parts:
            self.queue.add(part.queue_s)
            self.compute.add(part.compute_s)

    def message(self, name: str, version: str) -> pb.ModelStatistics:
        nothing = Duration(self.images).message()
        return pb.ModelStatistics(
            name=name,
            version=version,
            last_inference=round(self.last_at_s * 1000),
            inference_count=self.images,
            execution_count=self.images,
            inference_stats=pb.InferStatistics(
                success=self.success.message(),
                fail=self.fail.message(),
                queue=self.queue.message(),
                compute_input=nothing,
                compute_infer=self.compute.message(),
                compute_output=nothing,
            ),
        )
