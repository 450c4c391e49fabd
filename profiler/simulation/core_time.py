"""Core time of a trace: images are decoded on the cores that CPU executors compute on.

Pure. A bound for any schedule: N cores have N core seconds in a second. Each image costs its decoding and, on its
steps, the threads of a CPU executor while it computes in the largest batches. An expert that an accelerator can run
costs no core. Executors are assumed to use their threads' cores exclusively while they compute; if threads wait for one
another, slightly more is reachable.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agent.core.request import IMAGE
from agent.runtime.machine.box import torch_device
from profiler.simulation.bounds import tokens_of
from profiler.simulation.decoders import core_share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from profiler.simulation.bounds import RequestSteps, Resources


@dataclass(frozen=True, slots=True)
class CoreTime:
    """Core seconds of all requests together: decoding, and the least for computing."""

    cores: int
    requests: int
    decoding_s: float
    compute_s: float

    @property
    def images_per_s(self) -> float:
        spent_s = self.decoding_s + self.compute_s
        return self.requests * self.cores / spent_s if spent_s > 0.0 else math.inf

    @property
    def decoding_share(self) -> float:
        spent_s = self.decoding_s + self.compute_s
        return self.decoding_s / spent_s if spent_s > 0.0 else 0.0


def core_time(requests: Sequence[RequestSteps], resources: Resources, cores: int, decoding_s: float) -> CoreTime:
    """``decoding_s``: core seconds of all images, each once."""
    return CoreTime(cores, len(requests), decoding_s, compute_core_s(requests, resources, cores))


def compute_core_s(requests: Sequence[RequestSteps], resources: Resources, cores: int) -> float:
    """Least core seconds of computing; each expert on its cheapest processor."""
    on_cpu = sum(count for name, count in resources.processors.items() if torch_device(name) == "cpu")
    threads = core_share(cores, on_cpu)
    counts, tokens = Counter(expert for request in requests for expert in request.experts), tokens_of(requests)
    least_s = 0.0
    for expert, count in counts.items():
        costs_s = []
        for name, performance in resources.performances(expert).items():
            batches, tokens_s = -(-count // performance.max_batch), performance.tokens_s(tokens.get(expert, IMAGE))
            alone_s = performance.K_s * count + performance.B_s * batches + tokens_s  # CoServe, section 4.2
            costs_s.append(threads * alone_s if torch_device(name) == "cpu" else 0.0)
        least_s += min(costs_s, default=0.0)
    return least_s
