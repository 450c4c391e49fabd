"""LocalWorker: the worker that is this process, with threads for executors, loads and preparation.

Guarantees: as ``worker``. Texts run here, or on ranks (``workers.ranks``). Memories of lost executors stay allocated: a
thread that hangs may still write there.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agent.core.names import expert_of
from agent.faults.errors import IllegalMove
from agent.runtime.images.preparation import Order
from agent.runtime.images.sources import image_name
from agent.runtime.machine.box import torch_device
from agent.runtime.worker import Worker, WorkerStatistics

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from agent.core.effects import Prepare, StartLoad
    from agent.core.performance import PerformanceMatrix
    from agent.core.request import Batch
    from agent.runtime.executor import BatchExecutor, Shown
    from agent.runtime.expert_copy import ExpertCopy
    from agent.runtime.images.preparation import Preparation
    from agent.runtime.images.sources import ImageSource
    from agent.runtime.machine.device_loss import DeviceContext
    from agent.runtime.text_engines import TextEngines
    from agent.runtime.texts import RunningTexts
    from agent.runtime.weights.skeletons import SkeletonShelf
    from agent.runtime.weights.slots import SlotStore
    from agent.runtime.weights.transfer import Transfers
    from experts.expert import Expert

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class LocalWorker(Worker):
    """``stores``: by memory. ``copies``: by name. ``lost``: executors of ``context``, whose threads are left alone."""

    stores: Mapping[str, SlotStore]
    shelf: SkeletonShelf
    transfers: Transfers
    preparation: Preparation
    executors: Mapping[int, BatchExecutor]
    texts: RunningTexts
    text_engines: TextEngines
    copies: Mapping[str, ExpertCopy]
    context: DeviceContext
    lost: set[int] = field(default_factory=set)
    _experts: Mapping[str, Expert] = field(default_factory=dict)  # by the Engine's name
    _runs_on: dict[str, set[tuple[str, str]]] = field(default_factory=dict)  # memory and torch device, by copy
    _postponed: list[tuple[str, str]] = field(default_factory=list)  # copies to evict, with the pool

    def start(self) -> None:
        for executor in self.executors.values():
            executor.start()

    def know(self, copies: Mapping[str, ExpertCopy], matrix: PerformanceMatrix) -> None:
        """Serve these copies, each bound only on devices of executors with a row for it."""
        fresh = {copy.expert.id for name, copy in copies.items() if self.copies.get(name) != copy}
        self.preparation.scaled -= fresh  # decided for the experts that these copies replace
        self.copies = copies
        self._experts = {expert_of(copy.name): copy.expert for copy in copies.values()}
        self.transfers.know(copies)
        runs_on: dict[str, set[tuple[str, str]]] = {}
        for executor in self.executors.values():
            spec = executor.spec
            for row in matrix.experts[spec.processor].values():
                runs_on.setdefault(row.copy, set()).add((spec.pool, torch_device(spec.processor)))
        self.text_engines.runs_on = self._runs_on = runs_on
        self._choose_devices()

    def _choose_devices(self) -> None:
        """Bind each copy only on devices that are left."""
        left = self._places_left()
        for pool, store in self.stores.items():
            devices: defaultdict[str, list[str]] = defaultdict(list)
            for copy, places in self._runs_on.items():
                devices[copy] = sorted(device for name, device in places & left if name == pool)
            store.devices_of = devices.__getitem__

    def lose_executors(self, executors: Collection[int]) -> None:
        """Leave these executors alone, and the engines of their texts: their device is lost."""
        self.context.lose()
        places = self._places_left()
        self.lost |= {*executors}
        self.texts.lose(executors)
        self.text_engines.lose_places(places - self._places_left())
        self._choose_devices()

    def _places_left(self) -> set[tuple[str, str]]:
        left = [each.spec for number, each in self.executors.items() if number not in self.lost]
        return {(spec.pool, torch_device(spec.processor)) for spec in left}

    def start_load(self, effect: StartLoad) -> None:
        self._evict_postponed()
        self.transfers.start_load(effect)

    def evict(self, copy: str, pool: str) -> None:
        """Evict a copy; one that a load into a lost device still reads, later."""
        self._postponed.append((copy, pool))
        self._evict_postponed()

    def _evict_postponed(self) -> None:
        waiting, self._postponed = self._postponed, []
        for copy, pool in waiting:
            try:
                self.stores[pool].evict(copy)
            except IllegalMove:
                if not self.lost:
                    raise
                self._postponed.append((copy, pool))

    def start_batch(self, batch: Batch, images: Sequence[Shown], *, is_next: bool) -> None:
        executor = self.executors[batch.executor]
        executor.start_batch(batch, self.copies[batch.copy].expert, images)
        if is_next:
            executor.prioritise(batch)

    def start_quantum(self, batch: Batch) -> None:
        copies = [self.copies[portion.copy] for portion in batch.all_portions for _ in portion.requests]
        self.executors[batch.executor].start_quantum(batch, copies)

    def prioritise(self, batch: Batch) -> None:
        self.executors[batch.executor].prioritise(batch)

    def prepare(self, effect: Prepare, image: ImageSource) -> None:
        later = [self._experts[expert] for expert in effect.later]
        gives_way = self.executors[effect.executor].is_on_cpu
        order = Order(self._experts[effect.expert], later, effect.later_bytes, effect.due_s, gives_way)
        self.preparation.prepare(effect.request, image, image_name(image, effect.request), order)

    def forget(self, request: int) -> None:
        self.preparation.forget(request)

    def end(self, request: int) -> None:
        self.texts.forget(request)
        self.preparation.forget(request)

    def set_budget(self, pool: str, size_bytes: int) -> None:
        self.stores[pool].set_budget(size_bytes)

    def statistics(self) -> WorkerStatistics:
        return WorkerStatistics(
            transfers=self.transfers.statistics(),
            slots=tuple(store.statistics() for store in self.stores.values()),
            executors=tuple(executor.statistics() for executor in self.executors.values()),
            skeletons_constructed=self.shelf.constructed,
        )

    def stop(self, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s  # real clock, as running threads need real time
        executors = [each.stop for number, each in self.executors.items() if number not in self.lost]
        stops = [*executors, self.preparation.stop, self.transfers.stop]
        have_ended = [stop(max(deadline_s - time.monotonic(), 0.0)) for stop in stops]
        if not all(have_ended):
            logger.error("threads_left_behind: a batch, load or image does not end; its memory ends with the process")
        return all(have_ended) and not self.lost

    def close(self) -> None:
        """Release the memories, after all threads have ended."""
        for arena in self.text_engines.arenas.values():
            arena.close()
        for store in self.stores.values():
            store.close()
