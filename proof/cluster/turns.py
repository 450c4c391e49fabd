"""Turns of both contestants: the same arrivals, sent at the same times, and answered every one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from agent.deployment.build import AgentOptions
from agent.runtime.images.sources import EncodedImage
from agent.runtime.loop import LoopOptions
from experts.errors import CoServeError
from experts.images import DEFAULT_MAX_PIXELS
from profiler.bench.rows import quantile
from profiler.replay.player import experts_of, player
from proof.cluster.workload import tiny_image

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent.config import LineConfig
    from profiler.workload.traces import TracedArrival

OURS = "coserve"


@dataclass(frozen=True, slots=True)
class ClusterTurn:
    """One run. ``loads``, ``switches``: after the first loads; a switch is a load that a waiting request needed."""

    case: str
    contestant: str
    images: int
    seconds: float
    wait_p50_s: float
    wait_p99_s: float
    loads: int
    switches: int | None = None

    @property
    def images_per_s(self) -> float:
        return self.images / self.seconds


def turn_of(
    case: str, contestant: str, seconds: float, waits_s: Sequence[float], loads: int, switches: int | None = None
) -> ClusterTurn:
    p50_s, p99_s = quantile(waits_s, 0.5), quantile(waits_s, 0.99)
    return ClusterTurn(case, contestant, len(waits_s), seconds, p50_s, p99_s, loads, switches)


def our_turn(case: str, config: LineConfig, trace: Sequence[TracedArrival], ssd_bytes_per_s: float) -> ClusterTurn:
    """The agent and its workers, once they hold the experts of the initial placement. Raises CoServeError."""
    image = EncodedImage(tiny_image(), "image", DEFAULT_MAX_PIXELS)
    options = AgentOptions(loop=LoopOptions(ssd_bytes_per_s=ssd_bytes_per_s))
    with player(config, experts_of(trace, config.catalog), options) as placed:
        played = placed.play(trace, [image] * len(trace))
    if unjudged := played.unknown_reasons(trace):
        raise CoServeError(f"{len(unjudged)} images were not judged: {unjudged[0]}")
    switches = played.counted(lambda each: each.engine.switches)
    return turn_of(case, OURS, played.seconds, played.waits_s, sum(played.loads().values()), switches)
