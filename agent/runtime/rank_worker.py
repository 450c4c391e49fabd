"""RankWorker: the worker that is one language model's ranks, which hold its weights and run its texts.

Its one executor has a thread of this process, which drives the ranks (``experts.llm.parallel``); its memory is that of
the ranks: a load starts them, an eviction ends them.

Guarantees: as ``worker``. A rank that dies loses the worker, not the agent. Texts keep their tokens, and read them
again once the ranks are back.
"""

from __future__ import annotations

import logging
import os
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, cast

from agent.core.events import Loaded, LoadFailed
from agent.runtime.executor import BatchExecutor, Shared
from agent.runtime.machine.device_loss import Breakdown, DeviceWatch
from agent.runtime.machine.threads import Team
from agent.runtime.weights.transfer import TransferStatistics
from agent.runtime.worker import WorkerLost, WorkerStatistics
from experts.backends.forms import form_of
from experts.errors import CoServeError, LoadError, RanksLost, WeightsError
from experts.expert import Precision
from experts.llm.parallel.driver import Ranks
from experts.llm.parallel.messages import RanksSetup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from agent.core.effects import Prepare, StartLoad
    from agent.core.performance import ExecutorSpec, PerformanceMatrix
    from agent.core.request import Batch
    from agent.runtime.executor import RequestSource
    from agent.runtime.expert_copy import ExpertCopy
    from agent.runtime.images.sources import ImageSource
    from agent.runtime.local_worker import LocalWorker
    from agent.runtime.weights.slots import SlotStore
    from experts.llm.parallel.driver import RanksModel
    from experts.llm.parallel.shape import Meeting

logger = logging.getLogger(__name__)

NO_TRANSFERS = TransferStatistics.sum(())


class _RankWatch(DeviceWatch):
    """Lost ranks are a lost device."""

    def lost_by(self, error: Exception) -> CoServeError | None:
        return error if isinstance(error, RanksLost) else None


@dataclass(slots=True)
class _RankMemory:
    """Stands for a SlotStore: the ranks' memory, with one model or none."""

    expert: str = ""
    model: RanksModel | None = None

    @contextmanager
    def using_together(self, copies: Mapping[str, object]) -> Iterator[dict[str, _RankMemory]]:
        if self.model is None:
            raise LoadError(self.expert, "its ranks are not there")
        yield dict.fromkeys(copies, self)

    def skeleton(self, device: str) -> _RankMemory:
        return self


class RankWorker:
    """Ranks of one language model, on the box's cores. ``here``: the agent's own process."""

    def __init__(
        self, name: str, spec: ExecutorSpec, here: LocalWorker, post: Callable[[Any], None], meeting: Meeting | None
    ) -> None:
        self._name = name
        self._spec = spec
        self._here = here
        self._post = post
        self._meeting = meeting
        self._copies: Mapping[str, ExpertCopy] = {}
        self._memory = _RankMemory()
        self._ranks: Ranks | None = None
        self._is_lost = False
        self._changing = Lock()  # guards the three above
        self._executor = self._new_executor()

    def start(self) -> None:
        """Work from now on: at the start, and again after a loss."""
        if self._is_lost:
            self._here.text_engines.by_executor[self._spec.id].lose_all()
            self._executor = self._new_executor()
            self._is_lost = False
        self._executor.start()

    def know(self, copies: Mapping[str, ExpertCopy], matrix: PerformanceMatrix) -> None:
        self._copies = copies
        for row in matrix.experts.get(self._spec.processor, {}).values():
            self._here.text_engines.add_place(row.copy, (self._spec.pool, "cpu"))

    def start_load(self, effect: StartLoad) -> None:
        Thread(target=self._load, args=(effect,), name=f"ranks-of-{self._name}", daemon=True).start()

    def evict(self, copy: str, pool: str) -> None:
        with self._changing:
            ranks, self._ranks, self._memory.model = self._ranks, None, None
        if ranks is not None:
            Thread(target=ranks.close, name=f"end-ranks-of-{self._name}", daemon=True).start()

    def start_quantum(self, batch: Batch) -> None:
        """Run a batch of texts for its quantum."""
        copies = [self._copies[portion.copy] for portion in batch.all_portions for _ in portion.requests]
        self._executor.start_quantum(batch, copies)

    def start_batch(self, batch: Batch, images: Sequence[RequestSource], *, is_next: bool) -> None:
        self._executor.start_batch(batch, self._copies[batch.copy].expert, images)  # which rejects each image

    def hurry(self, batch: Batch) -> None:
        pass

    def prepare(self, effect: Prepare, image: ImageSource) -> None:
        pass

    def forget(self, request: int) -> None:
        pass

    def end(self, request: int) -> None:
        pass

    def set_budget(self, pool: str, size_bytes: int) -> None:
        pass

    def statistics(self) -> WorkerStatistics:
        return WorkerStatistics(NO_TRANSFERS, executors=(self._executor.statistics(),))

    def lose(self, reason: str) -> bool:
        with self._changing:
            ranks = self._ranks
        if ranks is not None:
            ranks.kill(reason)
        else:
            self._lost(reason)
        return True

    def stop(self, timeout_s: float) -> bool:
        has_ended = self._executor.stop(timeout_s)
        with self._changing:
            ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.close()
        return has_ended

    def _load(self, effect: StartLoad) -> None:
        copy = self._copies[effect.copy]
        assert copy.expert.parallel is not None, "only a copy with ranks is placed here"
        dtype = str(form_of(Precision(copy.packed.precision)).dtype).removeprefix("torch.")
        directory, shape = str(copy.expert.weights), copy.expert.parallel
        threads = max((os.cpu_count() or 1) // shape.ranks, 1)
        setup = RanksSetup(copy.expert.id, directory, shape, dtype, threads=threads)
        ranks = Ranks(setup, self._lost, self._meeting)
        with self._changing:
            self._ranks = ranks
        try:
            model = ranks.begin()
        except CoServeError as error:
            with self._changing:
                self._ranks = None
            ranks.close()
            self._post(LoadFailed(effect.load, str(error), permanent=isinstance(error, WeightsError)))
            return
        with self._changing:
            self._memory.expert, self._memory.model = copy.expert.id, model
        logger.info("ranks_ready worker=%s ranks=%d exchange=%s", self._name, len(ranks.processes), model.form)
        self._post(Loaded(effect.load))

    def _lost(self, reason: str) -> None:
        """Report a loss once; one during a load is the load's failure."""
        with self._changing:
            if self._is_lost or self._memory.model is None:
                return
            self._is_lost = True
            ranks, self._ranks, self._memory.model = self._ranks, None, None
        if ranks is not None:
            Thread(target=ranks.close, name=f"end-ranks-of-{self._name}", daemon=True).start()
        self._post(WorkerLost(self._name, reason))

    def _answered(self, answer: Any) -> None:  # noqa: ANN401  any answer of an executor
        if isinstance(answer, Breakdown):
            self._lost(str(answer.error))
        else:
            self._post(answer)

    def _new_executor(self) -> BatchExecutor:
        shared = Shared(self._here.preparation, self._answered, self._here.texts, _RankWatch())
        return BatchExecutor(self._spec, cast("SlotStore", self._memory), Team(1), shared)
