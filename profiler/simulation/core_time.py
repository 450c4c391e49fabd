"""What a trace takes of the box's cores: images are decoded on those that CPU executors compute on.

Pure. A bound, whatever the schedule: N cores have N seconds of one core in a second, and have to spend on each image
what its decoding takes and, on all its steps, the threads of a CPU executor for as long as that computes, in batches as
large as may be. What an executor of an accelerator can run may be computed there, which takes no core. It assumes that
an executor has its threads' cores for itself while it computes; where its threads wait for one another, somewhat more
can be reached.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from agent.core.request import IMAGE
from agent.runtime.machine.box import torch_device
from profiler.simulation.bounds import tokens_of
from profiler.simulation.decoders import core_share

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agent.core.performance import Performance
    from agent.core.request import Work
    from profiler.simulation.bounds import RequestSteps, Resources


@dataclass(frozen=True, slots=True)
class CoreTime:
    """Of all requests together, in seconds of one core: what decoding takes, and what computing takes at the least."""

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

    def decoding_in(self, decoding_s: float) -> CoreTime:
        return replace(self, decoding_s=decoding_s)

    def on(self, cores: int) -> CoreTime:
        return replace(self, cores=cores)


def core_time(requests: Sequence[RequestSteps], resources: Resources, cores: int, decoding_s: float) -> CoreTime:
    """Of these requests. ``decoding_s``: of all their images, each once."""
    return CoreTime(cores, len(requests), decoding_s, compute_core_s(requests, resources, cores))


def compute_core_s(requests: Sequence[RequestSteps], resources: Resources, cores: int) -> float:
    """The least that computing takes of the cores, in seconds of one; each expert where that is least."""
    on_cpu = sum(count for name, count in resources.processors.items() if torch_device(name) == "cpu")
    threads = core_share(cores, on_cpu)
    counts, tokens = Counter(expert for request in requests for expert in request.experts), tokens_of(requests)
    return sum(
        min(
            (
                threads * _alone_s(performance, count, tokens.get(expert, IMAGE))
                if torch_device(name) == "cpu"
                else 0.0
                for name, performance in _performances(expert, resources).items()
            ),
            default=0.0,
        )
        for expert, count in counts.items()
    )


def _performances(expert: str, resources: Resources) -> Mapping[str, Performance]:
    columns = {name: resources.profile.experts.get(name, {}) for name in resources.processors}
    return {name: column[expert].performance for name, column in columns.items() if expert in column}


def _alone_s(performance: Performance, count: int, tokens: Work) -> float:
    """So many requests on one executor, in batches as large as may be (CoServe, section 4.2)."""
    batches = -(-count // performance.max_batch)
    return performance.K_s * count + performance.B_s * batches + performance.tokens_s(tokens)
