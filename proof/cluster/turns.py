"""Turns of both contestants: the same arrivals, sent at the same times, and answered every one."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from agent.deployment.build import AgentOptions, agent_with_requests
from agent.runtime.images.sources import EncodedImage
from agent.runtime.loop import LoopOptions
from experts.errors import CoServeError
from experts.expert import Verdict
from experts.images import DEFAULT_MAX_PIXELS
from proof.cluster.workload import tiny_image

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from agent.config import LineConfig
    from profiler.workload.traces import TracedArrival

OURS = "coserve"
PLACEMENT_LIMIT_S = 300.0


@dataclass(frozen=True, slots=True)
class ClusterTurn:
    """One run. ``loads``, ``switches``: after the first loads; a switch is a load that a waiting request needed."""

    case: str
    contestant: str
    images: int
    seconds: float
    wait_p99_s: float
    loads: int
    switches: int | None = None

    @property
    def images_per_s(self) -> float:
        return self.images / self.seconds


def send(trace: Sequence[TracedArrival], submit: Callable[[str], None]) -> float:
    """Send each arrival at its time; the monotonic time of the first."""
    started_s = time.monotonic()
    for arrival in trace:
        time.sleep(max(started_s + arrival.at_s - time.monotonic(), 0.0))
        submit(str(arrival.component))
    return started_s


def turn_of(
    case: str, contestant: str, trace: Sequence[TracedArrival], ended_s: Sequence[float], loads: int
) -> ClusterTurn:
    """``ended_s``: of each image, since the first arrival."""
    waits_s = [end_s - arrival.at_s for end_s, arrival in zip(ended_s, trace, strict=True)]
    return ClusterTurn(case, contestant, len(trace), max(ended_s), float(np.percentile(waits_s, 99)), loads)


def our_turn(case: str, config: LineConfig, trace: Sequence[TracedArrival], ssd_bytes_per_s: float) -> ClusterTurn:
    """The agent and its workers, once they hold the experts of the initial placement. Raises CoServeError."""
    image = EncodedImage(tiny_image(), "image", DEFAULT_MAX_PIXELS)
    options = AgentOptions(loop=LoopOptions(ssd_bytes_per_s=ssd_bytes_per_s))
    with agent_with_requests(config, lambda *_: None, options) as (agent, requests):
        agent.start()
        if not agent.loop.wait_until_idle(PLACEMENT_LIMIT_S):
            raise CoServeError(f"experts were not placed within {PLACEMENT_LIMIT_S:.0f} s")
        before = agent.loop.statistics().engine
        started_s = send(trace, lambda component: requests.submit(image, component=component))
        ended = requests.collect()
        after = agent.loop.statistics().engine
    if unjudged := [end.outcome.reason for end in ended if end.outcome.verdict is not Verdict.OK]:
        raise CoServeError(f"{len(unjudged)} images were not judged: {unjudged[0]}")
    loads = sum(after.loads.values()) - sum(before.loads.values())
    turn = turn_of(case, OURS, trace, [end.at_s - started_s for end in ended], loads)
    return replace(turn, switches=after.switches - before.switches)
