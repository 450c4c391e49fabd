"""Dispatcher: gives an Engine's loads and batches to workers, and closes those of lost workers and devices.

Guarantees: each batch is watched from its start in this process to its answer or loss. At most one batch is queued
ahead on an executor; its start is the answer of the batch before it. Executors of a lost or hung worker are lost once,
and so are those of a lost or hung device if other executors can run every expert of the line. Any other lost device,
and any other work past its age limits, raises its error. Assumes: called on the loop's thread.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agent.core import effects, events
from agent.core.names import expert_of
from agent.faults.errors import DeviceLost, WorkOverdue
from agent.runtime.effect_log import log_effect
from agent.runtime.flight_record import FlightRecord
from agent.runtime.images.preparation import unwatched
from agent.runtime.texts import TextSource

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from contextlib import AbstractContextManager

    from agent.core.engine import EngineSetup
    from agent.core.performance import ExecutorSpec, PoolSpec
    from agent.core.request import Batch
    from agent.runtime.ages import OpenWork
    from agent.runtime.executor import RequestSource
    from agent.runtime.expert_copy import ExpertCopy
    from agent.runtime.local_worker import LocalWorker
    from agent.runtime.machine.device_loss import Breakdown
    from agent.runtime.worker import Worker, WorkerLost

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BatchWatch:
    """Callbacks on the loop's thread: a batch's requests start in this process (``begun``), or have their answer there
    (``ended``).

    ``given``: before the executor receives the batch. ``preparing``: a context, on any thread, around the preparation
    of an image ahead of its batch. ``ran``: a batch was answered, with its seconds. ``idle``: no work is under way.
    """

    begun: Callable[[Sequence[int]], None] = lambda _: None
    ended: Callable[[Sequence[int]], None] = lambda _: None
    preparing: Callable[[int], AbstractContextManager[object]] = unwatched
    given: Callable[[Sequence[int]], None] = lambda _: None
    ran: Callable[[Batch, float], None] = lambda *_: None
    idle: Callable[[], None] = lambda: None


class Dispatcher:
    """See the module. ``sources``: images and texts in flight, by request; ``lost``: the reason, by worker or
    device."""

    def __init__(
        self,
        setup: EngineSetup,
        copies: Mapping[str, ExpertCopy],
        here: LocalWorker,
        open_work: OpenWork,
        sources: Mapping[int, RequestSource],
        clock: Callable[[], float],
    ) -> None:
        self.here = here
        self.workers: dict[str, Worker] = {"": here}
        self.lost: dict[str, str] = {}
        self.copies, self.matrix = copies, setup.matrix
        self.watch = BatchWatch()
        self.record = FlightRecord(setup.executors, setup.pools, here.preparation.latest, clock)
        self._open = open_work
        self._sources = sources
        self._clock = clock
        self._specs = {spec.id: spec for spec in setup.executors}
        self._pools = {pool.name: pool for pool in setup.pools}
        self._queued_ahead: dict[int, effects.StartBatch] = {}  # by executor
        self.actions: Mapping[type, Callable[..., None]] = {  # by effect
            effects.StartLoad: self._start_load,
            effects.StartBatch: self._start_batch,
            effects.Prepare: self._prepare,
            effects.Forget: self._forget,
            effects.Preempt: self._preempt,
            effects.Evict: self._evict,
            effects.Assigned: self.record.assigned,
            effects.BudgetChanged: self._change_budget,
            effects.LeasesChanged: self._change_leases,
        }

    def start(self) -> None:
        for worker in self.workers.values():
            worker.start()

    def stop(self, timeout_s: float) -> bool:
        """End all workers; False if this process's own leaves threads behind."""
        others = [worker for name, worker in self.workers.items() if name]
        with ThreadPoolExecutor(max(len(others), 1), "stop") as threads:  # beside this process's own
            for worker in others:
                threads.submit(worker.stop, timeout_s)
            return self.here.stop(timeout_s)

    def change_line(self, change: events.LineChanged, copies: Mapping[str, ExpertCopy]) -> None:
        """Replace the served experts; ``copies``: new ones."""
        known = {**self.copies, **copies}
        self.copies = {name: copy for name, copy in known.items() if expert_of(copy.name) in change.graph.experts}
        self.matrix = change.matrix
        for worker in self.workers.values():
            worker.know(self.copies, change.matrix)
        self._open.predict_by(change.matrix)

    # -- effects --

    def _worker_of(self, pool: str) -> Worker:
        return self.workers[self._pools[pool].worker]

    def _worker_at(self, executor: int) -> str:
        return self._pools[self._specs[executor].pool].worker

    def _start_load(self, effect: effects.StartLoad) -> None:
        self.record.load_began(effect)
        self._open.open_load(effect, self._clock())
        self._worker_of(effect.pool).start_load(effect)

    def _start_batch(self, effect: effects.StartBatch) -> None:
        batch, name = effect.batch, self._worker_at(effect.batch.executor)
        if not name:
            self.watch.given(batch.requests)
        if is_behind := self._open.runs_on(batch.executor):
            self._queued_ahead[batch.executor] = effect
        else:
            self._begin_batch(effect)
        if batch.quantum_s is not None:
            self.workers[name].start_quantum(batch)
            return
        images = [self._sources[request] for request in batch.requests]
        self.workers[name].start_batch(batch, images, is_next=not is_behind)

    def _begin_batch(self, effect: effects.StartBatch) -> None:
        now_s = self._clock()
        self._open.open_batch(effect.batch, now_s)
        self.record.batch_began(effect.batch, now_s)
        if not self._worker_at(effect.batch.executor):
            self.watch.begun(effect.batch.requests)

    def _prepare(self, effect: effects.Prepare) -> None:
        source = self._sources[effect.request]
        if not isinstance(source, TextSource):  # its batch rejects a text
            self.workers[self._worker_at(effect.executor)].prepare(effect, source)

    def _forget(self, effect: effects.Forget) -> None:
        worker = self.workers.get(effect.worker)
        if worker is not None:
            worker.forget(effect.request)

    def _preempt(self, effect: effects.Preempt) -> None:
        self.here.texts.preempt(effect.request, effect.executor)
        log_effect(effect)

    def _evict(self, effect: effects.Evict) -> None:
        self._worker_of(effect.pool).evict(effect.copy, effect.pool)
        self.record.evicted(effect)
        log_effect(effect)

    def _change_budget(self, effect: effects.BudgetChanged) -> None:
        self._worker_of(effect.pool).set_budget(effect.pool, effect.after_bytes)
        log_effect(effect)

    def _change_leases(self, effect: effects.LeasesChanged) -> None:
        self.here.text_engines.set_budget(effect.pool, effect.after_bytes)
        log_effect(effect)

    def batch_answered(self, event: events.Finished | events.Progressed | events.BatchFailed) -> None:
        """Close the answered batch, and start the one queued ahead. Call before the Engine has the answer."""
        closed, now_s = self._open.close_batch(event.batch), self._clock()
        if closed is None:
            return
        answered = closed.work
        self.record.batch_ended(answered.id, now_s, has_failed=isinstance(event, events.BatchFailed))
        ahead, name = self._queued_ahead.pop(answered.executor, None), self._worker_at(answered.executor)
        if ahead is not None:
            self.workers[name].prioritise(ahead.batch)
        if not name:
            self.watch.ended(answered.requests)
        self.watch.ran(answered, now_s - closed.opened_at_s)
        if ahead is not None:
            self._begin_batch(ahead)

    # -- workers and devices that are lost, and come back --

    def join(
        self, name: str, worker: Worker, executors: Sequence[ExecutorSpec], pools: Sequence[PoolSpec]
    ) -> events.ExecutorsJoined:
        self.workers[name] = worker
        worker.start()
        worker.know(self.copies, self.matrix)
        self._specs |= {spec.id: spec for spec in executors}
        self._pools |= {pool.name: pool for pool in pools}
        self._open.know_executors(executors)
        self.record.know(executors, pools)
        self.lost.pop(name, None)
        logger.info("executors_joined worker=%s executors=%s", name, [spec.id for spec in executors])
        return events.ExecutorsJoined(tuple(executors), tuple(pools))

    def lose_worker(self, lost: WorkerLost) -> events.ExecutorsLost | None:
        """Close the worker's batches; None if the loss is known."""
        if self.workers.pop(lost.worker, None) is None:
            return None
        executors = {each for each in self._specs if self._worker_at(each) == lost.worker}
        return self._lose(lost.worker, executors, lost.reason, may_return=True)

    def lose_device(self, breakdown: Breakdown) -> events.ExecutorsLost | None:
        """Close the batches of this process's accelerator; None if the loss is known. Raises the error if the other
        executors cannot run every expert.

        Every executor and load of a lost device may find it lost: after the first one they are gone.
        """
        error, executor, load = breakdown.error, breakdown.executor, breakdown.load
        if executor in self.here.lost or (load is not None and load not in self._open.loads):
            logger.info("lost_again executor=%s load=%s reason=%s", executor, load, error)
            return None
        if not isinstance(error, DeviceLost):
            raise error
        if executor is None and self.here.lost:
            return None
        loss = self._device_loss(str(error), set() if executor is None else {executor})
        if loss is None:
            raise error
        return loss

    def lose_overdue(self) -> events.ExecutorsLost | None:
        """Lose a worker or a device whose work is overdue. Raises WorkOverdue for any other overdue work."""
        try:
            self._open.look(self._clock())
        except WorkOverdue as overdue:
            if self._worker_of(overdue.pool).lose(str(overdue)):  # it posts the loss
                return None
            executors = self.here.executors.values()
            is_device = any(each.spec.pool == overdue.pool and not each.is_on_plain_cpu for each in executors)
            loss = self._device_loss(str(overdue)) if overdue.is_batch and is_device else None
            if loss is None:
                raise
            return loss
        return None

    def _device_loss(self, reason: str, ended: Collection[int] = ()) -> events.ExecutorsLost | None:
        """Loss of this process's accelerator, with ``ended`` executors; None if an expert can run nowhere else."""
        devices = {number for number, each in self.here.executors.items() if not each.is_on_plain_cpu}
        executors = devices - self.here.lost
        left = [each for each in self._specs.keys() - devices.union(ended) if self._worker_at(each) in self.workers]
        able = {expert for each in left for expert in self.matrix.experts[self._specs[each].processor]}
        wanted = {expert for column in self.matrix.experts.values() for expert in column}
        if not executors or not wanted <= able:
            return None
        executors |= {*ended}
        self.here.lose_executors(executors)
        processors = sorted({self._specs[each].processor for each in executors})
        return self._lose(", ".join(processors), executors, reason, may_return=False)

    def _lose(self, name: str, executors: set[int], reason: str, *, may_return: bool) -> events.ExecutorsLost:
        logger.error("executors_lost worker=%s executors=%s reason=%s", name or "-", sorted(executors), reason)
        self.lost[name] = reason
        for executor in executors:
            self._queued_ahead.pop(executor, None)
        for batch in [each.work for each in self._open.batches.values() if each.work.executor in executors]:
            self._open.close_batch(batch.id)
            self.record.batch_ended(batch.id, self._clock(), has_failed=True)
            if not self._worker_at(batch.executor):
                self.watch.ended(batch.requests)
        return events.ExecutorsLost(frozenset(executors), reason, may_return)

    def keep_pools(self, left: Collection[str]) -> None:
        """Forget memories that the Engine dropped with a loss, and loads into them."""
        self.record.forget_pools(self._pools.keys() - left)
        for load in [each.work for each in self._open.loads.values() if each.work.pool not in left]:
            self._open.close_load(load.load)
