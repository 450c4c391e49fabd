"""Ray Serve as the peer: its model multiplexing and dynamic batching, as its documentation shows them.

A replica on each node keeps its share of the memory as the count of models that fit. Ray Serve groups a batch by model
itself, and loads missing models one after the other, least recently used out first. A replica's models come from the
same packed files through the same reader, held to the same rate; batches sleep as long, one after the other, as on one
GPU. A deployment for each expert would need memory for all of them, and is no contestant.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import time
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import ray
from ray import serve

from agent.deployment.packed_copies import packed_experts
from agent.runtime.weights.drive import PacedLink
from experts.errors import CoServeError
from experts.images import read_image
from experts.packed.weights import SegmentStore
from proof.cluster.nodes import BOX
from proof.cluster.turns import turn_of
from proof.cluster.workload import expert_of, tiny_image

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from agent.config import LineConfig
    from experts.packed.weights import Segment
    from profiler.workload.traces import TracedArrival
    from proof.cluster.turns import ClusterTurn
    from proof.cluster.workload import Workload

APP = "experts"
ROUTER = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"  # a model's requests to one replica
ANSWER_LIMIT_S = 1200.0


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """Settings of a user of Ray Serve. ``window``: max_batch_size; larger than a GPU's batch it is run in several."""

    window: int
    wait_s: float
    at_once: int  # max_concurrent_batches

    def __str__(self) -> str:
        return f"ray serve: batch {self.window}, wait {self.wait_s:g} s, {self.at_once} at once"


def best_settings(workload: Workload) -> tuple[ServeSettings, ...]:
    """The best of all that were tried, and the best whose batches are no larger than the GPU's."""
    return ServeSettings(1024, 5.0, 2), ServeSettings(workload.device.max_batch, 0.1, 64)


@dataclass(frozen=True, slots=True)
class ServeAnswer:
    """``at_s``: monotonic, which is one clock for all processes of a machine; ``loads``: the replica's loads so far."""

    replica: str
    at_s: float
    loads: int


def application(folder: Path, segments: Mapping[str, Segment], workload: Workload, settings: ServeSettings) -> Any:  # noqa: ANN401 - Ray's
    device = workload.device

    class Experts:
        def __init__(self) -> None:
            self._store, self._link = SegmentStore(folder), PacedLink(device.ssd_bytes_per_s)
            self._gpu = asyncio.Lock()
            self._replica = serve.get_replica_context().replica_id.unique_id
            self._loads = 0

        @serve.multiplexed(max_num_models_per_replica=workload.held_each)  # type: ignore[untyped-decorator]
        async def model(self, name: str) -> mmap.mmap:
            self._loads += 1
            return await asyncio.to_thread(self._load, segments[name])

        def _load(self, segment: Segment) -> mmap.mmap:
            delivered_at_s = self._link.reserve(segment.size_bytes)
            weights = mmap.mmap(-1, segment.size_bytes)  # given back at once when the model is dropped
            with memoryview(weights) as content:
                self._store.read(segment, content, "expert")
            time.sleep(max(delivered_at_s - time.monotonic(), 0.0))
            return weights

        @serve.batch(  # type: ignore[untyped-decorator]
            max_batch_size=settings.window,
            batch_wait_timeout_s=settings.wait_s,
            max_concurrent_batches=settings.at_once,
        )
        async def __call__(self, images: list[bytes]) -> list[ServeAnswer]:
            """Answers to images of one model: Ray Serve has grouped them."""
            await self.model(serve.get_multiplexed_model_id())
            for start in range(0, len(images), device.max_batch):
                part = images[start : start + device.max_batch]
                async with self._gpu:
                    await asyncio.to_thread(self._run, part)
            return [ServeAnswer(self._replica, time.monotonic(), self._loads)] * len(images)

        def _run(self, images: list[bytes]) -> None:
            for image in images:
                read_image(image, "image")
            time.sleep(device.K_s * len(images) + device.B_s)

    options = serve.deployment(
        num_replicas=workload.workers,
        max_ongoing_requests=100_000,
        graceful_shutdown_timeout_s=1.0,
        ray_actor_options={"num_cpus": 0, "resources": {BOX: 1}},
        request_router_config=serve.config.RequestRouterConfig(request_router_class=ROUTER),
    )
    return options(Experts).bind()


def serve_turn(
    case: str, config: LineConfig, workload: Workload, trace: Sequence[TracedArrival], settings: ServeSettings
) -> ClusterTurn:
    """Ray Serve on the packed files of a line, with warm caches, the most used models loaded last.

    Raises CoServeError.
    """
    folder, image = config.packed_folder, tiny_image()
    segments = {packed.expert: packed.own for packed in packed_experts(config, folder)}
    serve.start(proxy_location="Disabled")
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    try:
        handle = serve.run(application(folder, segments, workload, settings), name=APP, route_prefix=None)
        handles = {
            name: handle.options(multiplexed_model_id=expert_of(name), session_id=expert_of(name))
            for name in workload.by_usage
        }
        warm = [handles[name].remote(image) for name in reversed(workload.by_usage)]
        before = _loads([each.result(timeout_s=ANSWER_LIMIT_S) for each in warm])
        sent: list[Any] = []
        started_s = time.monotonic()
        for arrival in trace:
            time.sleep(max(started_s + arrival.at_s - time.monotonic(), 0.0))
            sent.append(handles[str(arrival.component)].remote(image))
        answers = [each.result(timeout_s=ANSWER_LIMIT_S) for each in sent]
    except (ray.exceptions.RayError, TimeoutError) as error:
        raise CoServeError(f"Ray Serve did not answer: {error}") from error
    finally:
        serve.shutdown()
    waits_s = [answer.at_s - started_s - arrival.at_s for answer, arrival in zip(answers, trace, strict=True)]
    seconds = max(answer.at_s for answer in answers) - started_s
    return turn_of(case, str(settings), seconds, waits_s, _loads(answers) - before)


def _loads(answers: Sequence[ServeAnswer]) -> int:
    """Loads of all replicas; each replica counts its own."""
    return sum({answer.replica: answer.loads for answer in sorted(answers, key=attrgetter("loads"))}.values())
