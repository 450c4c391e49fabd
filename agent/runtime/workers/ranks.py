"""RankWorker: the worker that is one language model's ranks, which hold its weights and run its texts.

Its one executor has a thread of this process, which drives the ranks (``experts.llm.parallel``); its memory is that of
the ranks: a load starts them, an eviction ends them.

Guarantees: as ``worker``. A rank that dies loses the worker, not the agent, and another RankWorker follows it. Texts
keep their tokens, and read them again there.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any

from agent.core.events import Loaded, LoadFailed
from agent.runtime.executor import BatchExecutor, Shared
from agent.runtime.machine.device_loss import Breakdown, DeviceWatch
from agent.runtime.machine.threads import Team
from agent.runtime.weights.transfer import NO_TRANSFERS
from agent.runtime.worker import Worker, WorkerLost, WorkerStatistics
from experts.backends.control_groups import cores
from experts.backends.forms import form_of
from experts.errors import CoServeError, LoadError, RanksLost, WeightsError
from experts.expert import Precision
from experts.llm.parallel.driver import Ranks
from experts.llm.parallel.messages import RanksSetup
from experts.llm.parallel.shape import shape_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from agent.core.effects import StartLoad
    from agent.core.performance import ExecutorSpec, PerformanceMatrix
    from agent.core.request import Batch
    from agent.runtime.executor import RequestSource
    from agent.runtime.expert_copy import ExpertCopy
    from agent.runtime.local_worker import LocalWorker
    from experts.llm.model import LanguageModel
    from experts.llm.parallel.driver import RanksModel
    from experts.llm.parallel.shape import Meeting

logger = logging.getLogger(__name__)


class _RankWatch(DeviceWatch):
    """Lost ranks are a lost device."""

    def lost_by(self, error: Exception) -> CoServeError | None:
        return error if isinstance(error, RanksLost) else None


@dataclass(slots=True)
class _RankedCopy:
    """The ranks of one copy. ``model``: None until they have loaded it."""

    ranks: Ranks
    model: RanksModel | None = None


class _RankExecutor(BatchExecutor):
    """An executor whose memory is its ranks'. ``held``: by copy."""

    def __init__(self, spec: ExecutorSpec, shared: Shared) -> None:
        super().__init__(spec, None, Team(1), shared)
        self.held: dict[str, _RankedCopy] = {}

    @contextmanager
    def models(self, copies: Collection[str]) -> Iterator[Mapping[str, LanguageModel]]:
        models: dict[str, LanguageModel] = {}
        for copy in copies:
            if (held := self.held.get(copy)) is None or held.model is None:
                raise LoadError(copy, "its ranks are not there")
            models[copy] = held.model
        yield models


class RankWorker(Worker):
    """Ranks of one language model, until they are lost: on ``gpus``, one for each, or on the box's cores.

    ``here``: the agent's own process.

    A reload may bring a second copy of the model, whose ranks are others.
    """

    def __init__(
        self, name: str, spec: ExecutorSpec, here: LocalWorker, post: Callable[[Any], None], meeting: Meeting | None,
        gpus: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self._name = name
        self._spec = spec
        self._here = here
        self._post = post
        self._meeting = meeting
        self._gpus = gpus
        self._copies: Mapping[str, ExpertCopy] = {}
        self._is_over = False  # lost, or stopped
        self._changing = Lock()  # guards ``_is_over``, and that no copy and no answer comes after it
        shared = Shared(here.preparation, self._answered, here.texts, lambda _: _RankWatch())
        self._executor = _RankExecutor(spec, shared)

    def start(self) -> None:
        self._here.text_engines.by_executor[self._spec.id].lose_all()  # the ranks before held them
        self._executor.start()

    def know(self, copies: Mapping[str, ExpertCopy], matrix: PerformanceMatrix) -> None:
        self._copies = copies
        for row in matrix.experts.get(self._spec.processor, {}).values():
            self._here.text_engines.add_place(row.copy, (self._spec.pool, "cpu"))

    def start_load(self, effect: StartLoad) -> None:
        load = effect, self._copies[effect.copy]  # now: a reload may take the copy away
        Thread(target=self._load, args=load, name=f"ranks-of-{self._name}", daemon=True).start()

    def evict(self, copy: str, pool: str) -> None:
        ranked = self._executor.held.pop(copy, None)
        if ranked is not None:
            Thread(target=ranked.ranks.close, name=f"end-ranks-of-{self._name}", daemon=True).start()

    def start_quantum(self, batch: Batch) -> None:
        copies = [self._copies[portion.copy] for portion in batch.all_portions for _ in portion.requests]
        self._executor.start_quantum(batch, copies)

    def start_batch(self, batch: Batch, images: Sequence[RequestSource], *, is_next: bool) -> None:
        self._executor.start_batch(batch, self._copies[batch.copy].expert, images)  # which rejects each image

    def statistics(self) -> WorkerStatistics:
        return WorkerStatistics(NO_TRANSFERS, executors=(self._executor.statistics(),))

    def lose(self, reason: str) -> bool:
        held = list(self._executor.held.values())
        for ranked in held:
            ranked.ranks.kill(reason)
        if not held:
            self._lost(reason)
        return True

    def stop(self, timeout_s: float) -> bool:
        with self._changing:
            self._is_over = True
        has_ended = self._executor.stop(timeout_s)
        self._close_all()
        return has_ended

    def _load(self, effect: StartLoad, copy: ExpertCopy) -> None:
        try:
            ranks = Ranks(
                _setup_of(copy, self._meeting), partial(self._ranks_ended, effect.copy), self._meeting, gpus=self._gpus
            )
            ranked = _RankedCopy(ranks)
            with self._changing:
                if self._is_over:
                    ranks.close()
                    return
                self._executor.held[effect.copy] = ranked
            ranked.model = ranks.begin()
        except Exception as error:  # the boundary of this thread
            is_expected = isinstance(error, (CoServeError, OSError, ValueError))
            reason = str(error) if is_expected else f"{type(error).__name__}: {error}"
            logger.warning("ranks_not_ready worker=%s reason=%s", self._name, reason, exc_info=not is_expected)
            self.evict(effect.copy, effect.pool)
            self._tell(LoadFailed(effect.load, reason, permanent=isinstance(error, WeightsError | ValueError)))
            return
        form, processes = ranked.model.form, len(ranks.processes)
        logger.info("ranks_ready worker=%s processes=%d exchange=%s", self._name, processes, form)
        self._tell(Loaded(effect.load))

    def _ranks_ended(self, copy: str, reason: str) -> None:
        ranked = self._executor.held.get(copy)
        if ranked is not None and ranked.model is not None:  # else it is the load's failure
            self._lost(reason)

    def _lost(self, reason: str) -> None:
        """Report the loss, and nothing from then on."""
        with self._changing:
            if self._is_over:
                return
            self._is_over = True
            self._post(WorkerLost(self._name, reason))
        Thread(target=self._end, name=f"end-{self._name}", daemon=True).start()

    def _end(self) -> None:
        self._close_all()
        self._executor.stop()

    def _close_all(self) -> None:
        for ranked in list(self._executor.held.values()):
            ranked.ranks.close()

    def _answered(self, answer: Any) -> None:  # noqa: ANN401  any answer of an executor
        if isinstance(answer, Breakdown):
            self._lost(answer.error.reason if isinstance(answer.error, RanksLost) else str(answer.error))
        else:
            self._tell(answer)

    def _tell(self, answer: Any) -> None:  # noqa: ANN401  any event
        with self._changing:
            if not self._is_over:
                self._post(answer)


def _setup_of(copy: ExpertCopy, meeting: Meeting | None) -> RanksSetup:
    """Raises ValueError for ranks that do not fill their boxes."""
    shape = shape_of(copy.expert)
    here = shape.ranks
    if meeting is not None:
        here, shape = meeting.ranks_here, shape.on_boxes(meeting.ranks_here)
    dtype = str(form_of(Precision(copy.packed.precision)).dtype).removeprefix("torch.")
    threads = max(cores() // here, 1)
    return RanksSetup(copy.expert.id, str(copy.expert.weights), shape, dtype, threads=threads)
