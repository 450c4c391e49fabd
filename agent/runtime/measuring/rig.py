"""MeasuringRig: real memories, transfers and executors, just large enough to measure experts over the agent's path.

Guarantees: times of loads include staging and binding; times of batches include the hand-over, but no decoding.
A failed measurement raises LoadError with the expert's id, a lost device DeviceLost. One thread uses a rig.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np

from agent.core.effects import StartLoad
from agent.core.events import BatchFailed, Finished, Loaded, LoadFailed, Progressed
from agent.core.performance import HOST, SSD, ExecutorSpec
from agent.core.request import Batch
from agent.runtime.executor import BatchExecutor, Shared, model_of
from agent.runtime.images.due_threads import DueTask
from agent.runtime.images.preparation import Preparation
from agent.runtime.images.sources import image_name
from agent.runtime.machine.box import torch_device
from agent.runtime.machine.detection import host_memory
from agent.runtime.machine.device_loss import Breakdown, DeviceContext, watch_of, watch_of_memory
from agent.runtime.machine.memories import HostMemory, memory_for
from agent.runtime.machine.threads import end_team, teams
from agent.runtime.measuring.fits import LEAST_S
from agent.runtime.texts import RunningTexts
from agent.runtime.weights.drive import Drive, PacedLink
from agent.runtime.weights.moe_loads import MoeLoads
from agent.runtime.weights.skeletons import SkeletonShelf
from agent.runtime.weights.slots import SlotStore
from agent.runtime.weights.transfer import Transfers, load_threads
from experts import errors
from experts.backends.base import Prepared
from experts.expert import Rejected, Task
from experts.llm.serving.iteration import OutputLengths

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from agent.runtime.expert_copy import ExpertCopy
    from agent.runtime.images.sources import ImageSource
    from agent.runtime.machine.box import Box
    from experts.backends.base import Skeleton
    from experts.expert import Expert, Prediction
    from experts.llm.model import LanguageModel
    from experts.packed.weights import SegmentStore

    Answered = Loaded | LoadFailed | Finished | Progressed | BatchFailed
    Shown = ImageSource | Prepared | Rejected  # an image of a batch: prepared by the rig, or already


@dataclass(frozen=True, slots=True)
class TimedBatch:
    """Batch with one answer per image, in order, and the seconds from its start to its answer."""

    results: tuple[Prediction | Rejected, ...]
    seconds: float


class MeasuringRig:
    """Memories for one expert per executor, with the agent's transfers and executors.

    ``executors`` of one processor run at once, each with ``threads``. Only these copies can be loaded.
    """

    def __init__(
        self,
        box: Box,
        processor: str,
        copies: Sequence[ExpertCopy],
        segments: SegmentStore,
        threads: int,
        executors: int = 1,
    ) -> None:
        largest_bytes = max((copy.footprint.total_bytes for copy in copies), default=0)
        budget_bytes = min(executors, len(copies)) * largest_bytes
        shelf = SkeletonShelf(segments)
        self._box = box
        self.target = box.pool_of(processor)
        self.device = torch_device(processor)
        self.threads = threads
        context = DeviceContext()
        drive = Drive(segments, HostMemory(pinned=box.name == "cuda", context=context), PacedLink(None))
        moe_loads = MoeLoads(drive)
        devices = {self.target: [self.device]}
        try:
            memories = {pool: memory_for(box, pool, budget_bytes, context=context) for pool in box.pools}
        except errors.MemoryExceeded as error:
            raise errors.LoadError(copies[0].expert.id, str(error)) from error
        self._stores: Mapping[str, SlotStore] = {
            pool: SlotStore(memory, budget_bytes, devices.get(pool, []), shelf, moe_loads)
            for pool, memory in memories.items()
        }
        self._answers: SimpleQueue[Answered | Breakdown] = SimpleQueue()
        named = {copy.name: copy for copy in copies}
        watches = {pool: watch_of_memory(box, pool, context) for pool in box.pools}
        loads = load_threads(1, threads)
        self._transfers = Transfers(drive, self._stores, named, self._answers.put, loads, watches)
        self._preparation = Preparation(box.cores)
        texts = RunningTexts({}, OutputLengths())
        shared = Shared(self._preparation, self._answers.put, texts, partial(watch_of, context=context))
        specs = [ExecutorSpec(number, processor, self.target) for number in range(executors)]
        team = teams(specs, threads)
        self._executors = [BatchExecutor(spec, self._stores[self.target], team[spec.id], shared) for spec in specs]

    @contextmanager
    def opened(self) -> Iterator[MeasuringRig]:
        end_team()  # as at the start of an agent
        for executor in self._executors:
            executor.start()
        try:
            yield self
        finally:
            for executor in self._executors:
                executor.stop()
            self._preparation.stop()
            self._transfers.stop()
            for store in self._stores.values():
                store.close()

    @property
    def free_bytes(self) -> int:
        """Free bytes now of the memory that the processor runs from."""
        return (host_memory() if self.target == HOST else self._box.size_of(self.target)).available_bytes

    def bring(self, copy: ExpertCopy) -> None:
        """Load a copy into the processor's memory. Raises LoadError."""
        self.load(copy, HOST)
        if self.target != HOST:
            self.load(copy, self.target)

    def load(self, copy: ExpertCopy, pool: str, source: str | None = None) -> float:
        """Seconds of a load into a memory, from ``source`` or the memory in front of it. Raises LoadError."""
        started = time.monotonic()
        origin = source or (SSD if pool == HOST else HOST)
        self._transfers.start_load(StartLoad(0, copy.expert.id, copy.name, origin, pool, 0))
        answer = self._next_answer()
        if isinstance(answer, LoadFailed):
            raise errors.LoadError(copy.expert.id, answer.reason)
        return max(time.monotonic() - started, LEAST_S)

    def evict(self, copy: ExpertCopy, pool: str) -> None:
        self._stores[pool].evict(copy.name)

    def scale_images(self, copy: ExpertCopy) -> None:
        self._preparation.scaled |= {copy.expert.id}

    def clear(self) -> None:
        for store in self._stores.values():
            for name in store.ready():
                store.evict(name)

    @contextmanager
    def skeleton_of(self, copy: ExpertCopy) -> Iterator[Skeleton]:
        with self._stores[self.target].using(copy.name) as slot:
            yield slot.skeleton(self.device)

    @contextmanager
    def model_of(self, copy: ExpertCopy) -> Iterator[LanguageModel]:
        with self.skeleton_of(copy) as skeleton:
            yield model_of(skeleton)

    def prepared(self, copy: ExpertCopy, images: Sequence[Shown]) -> list[Prepared | Rejected]:
        """Prepared images for a copy's expert, each in separate memory. Raises MemoryError."""
        tasks = [
            DueTask.done(image)
            if isinstance(image, Prepared | Rejected)
            else self._preparation.take(number, image, image_name(image, number), copy.expert)
            for number, image in enumerate(images)
        ]
        return [task.future.result() for task in tasks]

    def timed_s(self, copy: ExpertCopy, images: Sequence[Shown]) -> float:
        """Seconds of one batch. Raises LoadError unless every image was judged."""
        batch = self.run(copy, images)
        _require_judged(copy, batch.results)
        return batch.seconds

    def run(self, copy: ExpertCopy, images: Sequence[Shown]) -> TimedBatch:
        """Run one batch on the first executor. Raises LoadError if the whole batch fails."""
        answer = self.attempt(copy, images)
        if isinstance(answer, BatchFailed):
            raise errors.LoadError(copy.expert.id, answer.reason)
        return answer

    def attempt(self, copy: ExpertCopy, images: Sequence[Shown]) -> TimedBatch | BatchFailed:
        """Run one batch on the first executor; returns the batch or its failure."""
        try:
            ready = self.prepared(copy, images)
        except MemoryError as error:
            return BatchFailed(0, str(error) or "no memory to prepare its images", out_of_memory=True)
        started = time.monotonic()
        self._start(0, copy, ready, number=0)
        answer = self._answer()
        seconds = time.monotonic() - started
        return TimedBatch(answer.results, seconds) if isinstance(answer, Finished) else answer

    def all_s(self, copies: Sequence[ExpertCopy], works: Sequence[Sequence[Shown]]) -> float:
        """Seconds until all these batches are done; each idle executor takes the next one.

        Executor n runs ``copies[n % len(copies)]``. Raises LoadError unless every image was judged.
        """
        ready = [self.prepared(copies[0], images) for images in works]  # one kind, so one input for all
        started = time.monotonic()
        waiting = list(enumerate(ready))[::-1]
        free = list(range(len(self._executors)))[::-1]
        running: dict[int, int] = {}  # executor by batch
        while waiting or running:
            while waiting and free:
                number, images = waiting.pop()
                running[number] = free.pop()
                self._start(running[number], copies[running[number] % len(copies)], images, number)
            answer = self._answer()
            executor = running.pop(answer.batch)
            copy = copies[executor % len(copies)]
            if isinstance(answer, BatchFailed):
                raise errors.LoadError(copy.expert.id, answer.reason)
            _require_judged(copy, answer.results)
            free.append(executor)
        return max(time.monotonic() - started, LEAST_S)

    def _start(self, executor: int, copy: ExpertCopy, images: Sequence[Prepared | Rejected], number: int) -> None:
        batch = Batch(number, executor, copy.expert.id, copy.name, tuple(range(len(images))), 0)
        self._executors[executor].start_batch(batch, _answering(copy.expert), images)

    def _answer(self) -> Finished | BatchFailed:
        answer = self._next_answer()
        assert isinstance(answer, Finished | BatchFailed), "no load is under way while batches run"
        return answer

    def _next_answer(self) -> Answered:
        answer = self._answers.get()
        if isinstance(answer, Breakdown):
            raise answer.error
        return answer


def seconds_of(run: Callable[[], object]) -> float:
    started = time.monotonic()
    run()
    return max(time.monotonic() - started, LEAST_S)


def noise(copy: ExpertCopy) -> np.ndarray:
    """Random image of the expert's input size, equal at each call."""
    shape = (copy.expert.pixels.height, copy.expert.pixels.width, 3)
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def _answering(expert: Expert) -> Expert:
    """Give an anomaly expert a threshold: any value serves for measuring."""
    return replace(expert, threshold=0.0) if expert.task is Task.ANOMALY and expert.threshold is None else expert


def _require_judged(copy: ExpertCopy, results: Sequence[Prediction | Rejected]) -> None:
    for result in results:
        if isinstance(result, Rejected):
            raise errors.LoadError(copy.expert.id, result.reason)
