"""Executors: one thread each, which runs batches on images that other threads prepare.

Guarantees: every batch is answered once: with Finished (one Prediction or Rejected per request, in order), Progressed
after a quantum, or BatchFailed. A broken image or text, or an output that is NaN or infinity, rejects its own
request only. After a lost device the answer is a Breakdown, and the batch behind does not run.
Assumes: the Engine starts a batch on a resident copy, and no third one on this executor before an answer.
"""

from __future__ import annotations

import logging
import math
import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, cast

import torch

from agent.core.events import BatchFailed, Finished, Progressed
from agent.core.performance import tier_of
from agent.faults.errors import CopyDamaged
from agent.runtime.images.due_threads import DueTask
from agent.runtime.images.sources import image_name
from agent.runtime.machine.box import exclusive, torch_device
from agent.runtime.machine.device_loss import Breakdown, DeviceWatch, watch_of
from agent.runtime.machine.threads import use_threads
from agent.runtime.texts import TextSource
from experts.backends.base import Prepared
from experts.devices.graphs import DeviceGraphs, Recorder, using_graphs
from experts.errors import CoServeError, OutputInvalid, is_out_of_memory
from experts.expert import Rejected

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from agent.core.performance import ExecutorSpec
    from agent.core.request import Batch
    from agent.runtime.expert_copy import ExpertCopy
    from agent.runtime.images.preparation import Preparation
    from agent.runtime.images.sources import ImageSource
    from agent.runtime.machine.threads import Team
    from agent.runtime.texts import RunningTexts
    from agent.runtime.weights.slots import SlotStore
    from experts.backends.base import Skeleton
    from experts.backends.llm import LlmSkeleton
    from experts.expert import Expert, Prediction
    from experts.llm.model import LanguageModel

    RequestSource = ImageSource | TextSource
    Shown = RequestSource | Prepared | Rejected  # images of a batch: tasks, or prepared images

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ExecutorStatistics:
    """One executor, since the start. ``busy_s``: from taking a batch to its answer; of that ``waited_s`` for images.

    ``texts``: ended texts, not counted as images.
    """

    executor: int
    processor: str
    batches: int = 0
    images: int = 0
    failed: int = 0
    busy_s: float = 0.0
    waited_s: float = 0.0
    texts: int = 0
    read_tokens: int = 0
    written_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Work:
    """Batch with its images, or with the copies of its texts for a quantum."""

    batch: Batch
    images: Sequence[DueTask[Prepared | Rejected]] = ()
    copies: Sequence[ExpertCopy] = ()


@dataclass(frozen=True, slots=True)
class Shared:
    """Parts shared by all executors. ``post`` takes their answers, from any thread; ``texts`` runs quanta.

    ``watch``: finds a processor's device lost.
    """

    preparation: Preparation
    post: Callable[[Finished | Progressed | BatchFailed | Breakdown], None]
    texts: RunningTexts
    watch: Callable[[str], DeviceWatch] = watch_of


class BatchExecutor:
    """One executor: a running batch, at most one queued behind it, and their thread.

    ``store``: its memory; None for one whose memory is elsewhere, which runs texts alone.
    """

    def __init__(self, spec: ExecutorSpec, store: SlotStore | None, team: Team, shared: Shared) -> None:
        self.spec = spec
        self._store = store
        self._preparation = shared.preparation
        self._post = shared.post
        self._texts = shared.texts
        self._watch = shared.watch(spec.processor)
        self._team = team
        self._device = torch_device(spec.processor)
        self._computing_threads = team.threads if self.is_on_cpu else 1  # else the thread feeds a device
        self._is_stopping = False
        self._inbox: SimpleQueue[_Work | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name=f"executor-{spec.id}", daemon=True)
        self._statistics = ExecutorStatistics(spec.id, spec.processor)

    @property
    def is_on_cpu(self) -> bool:
        return self._device == "cpu"

    @property
    def is_on_plain_cpu(self) -> bool:
        """False for an executor of a device, also of an emulated one."""
        return tier_of(self.spec.processor) == "cpu"

    def start(self) -> None:
        self._thread.start()

    def start_batch(self, batch: Batch, expert: Expert, images: Sequence[Shown]) -> None:
        """Run a batch on its images, in order, at once or after the running batch."""
        shown = zip(batch.requests, images, strict=True)
        self._inbox.put(_Work(batch, [self._prepare(expert, image, request) for request, image in shown]))

    def prioritise(self, batch: Batch) -> None:
        """Prepare the batch's images first: the batch is next, or runs."""
        for request in batch.requests:
            self._preparation.prioritise(request)

    def start_quantum(self, batch: Batch, copies: Sequence[ExpertCopy]) -> None:
        """Run a batch of texts for its quantum; ``copies``: one per text."""
        self._inbox.put(_Work(batch, copies=copies))

    def statistics(self) -> ExecutorStatistics:
        engine = self._texts.statistics(self.spec.id)
        if engine is None:
            return self._statistics
        return replace(
            self._statistics, read_tokens=engine.read_tokens, written_tokens=engine.written_tokens,
            drafted_tokens=engine.drafted_tokens, accepted_tokens=engine.accepted_tokens,
        )  # fmt: skip

    def stop(self, timeout_s: float | None = None) -> bool:
        """Finish the running batch only, then end the thread; False after the timeout."""
        self._is_stopping = True
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _prepare(self, expert: Expert, image: Shown, request: int) -> DueTask[Prepared | Rejected]:
        if isinstance(image, TextSource):
            image = Rejected(f"{expert.id} takes images, and request {request} is a text")
        if not isinstance(image, Prepared | Rejected):
            return self._preparation.take(request, image, image_name(image, request), expert)
        return DueTask.done(image)

    def _run(self) -> None:
        try:
            use_threads(self._team.threads)
            most_bytes = self.spec.graphs_bytes
            graphs = DeviceGraphs(Recorder(), most_bytes) if most_bytes else None
            with own_stream(self._device), using_graphs(graphs):
                while (work := self._inbox.get()) is not None and not self._is_stopping:
                    self._team.keep()
                    answer = self._answer(work)
                    self._post(answer)
                    if isinstance(answer, Breakdown):
                        return  # queued batches wait for the next agent: a lost device may hang
        except Exception as error:  # without this answer the agent would wait forever
            logger.exception("executor_broke executor=%d", self.spec.id)
            self._post(Breakdown(self._watch.lost_by(error) or error, executor=self.spec.id))

    def _answer(self, work: _Work) -> Finished | Progressed | BatchFailed | Breakdown:
        batch = work.batch
        started = time.monotonic()
        try:
            if work.copies:
                with self._preparation.computing(self._computing_threads):
                    return self._run_quantum(work, started)
            prepared = _prepared(work.images)
            self._add(waited_s=time.monotonic() - started)
            with self._preparation.computing(self._computing_threads):
                results = self._execute(batch, prepared)
        except Exception as error:
            lost = self._watch.lost_by(error)
            if lost is not None:
                return Breakdown(lost, executor=self.spec.id)
            out_of_memory = is_out_of_memory(error)
            expected = isinstance(error, CoServeError) or out_of_memory
            logger.warning(
                "batch_failed expert=%s executor=%d requests=%d out_of_memory=%s reason=%s",
                batch.expert, self.spec.id, len(batch.requests), out_of_memory, error, exc_info=not expected,
            )  # fmt: skip
            self._add(batches=1, failed=1, busy_s=time.monotonic() - started)
            is_damaged = isinstance(error, CopyDamaged)
            return BatchFailed(batch.id, str(error) or type(error).__name__, out_of_memory, is_damaged)
        self._add(batches=1, images=len(results), busy_s=time.monotonic() - started)
        return Finished(batch.id, results)

    def _run_quantum(self, work: _Work, started: float) -> Progressed:
        with self.models({copy.name: None for copy in work.copies}) as models, exclusive(self._device):
            progressed = self._texts.run(work.batch, work.copies, models)
        self._add(batches=1, texts=len(progressed.finished), busy_s=time.monotonic() - started)
        return progressed

    @contextmanager
    def models(self, copies: Collection[str]) -> Iterator[Mapping[str, LanguageModel]]:
        """Context in which these copies are not evicted. Raises IllegalMove, CopyDamaged, LoadError."""
        assert self._store is not None, "its memory is here"
        with self._store.using_together(copies) as slots:
            yield {name: model_of(slot.skeleton(self._device)) for name, slot in slots.items()}

    def _execute(self, batch: Batch, prepared: Sequence[Prepared | Rejected]) -> tuple[Prediction | Rejected, ...]:
        good = [each for each in prepared if isinstance(each, Prepared)]
        if not good:
            return tuple(each for each in prepared if isinstance(each, Rejected))
        assert self._store is not None, "its memory is here"
        with self._store.using(batch.copy) as slot, torch.inference_mode():
            skeleton = slot.skeleton(self._device)
            with exclusive(self._device):
                judged = iter(judge(skeleton, slot.copy.expert, good))
        return tuple(each if isinstance(each, Rejected) else next(judged) for each in prepared)

    def _add(self, **more: float) -> None:
        counts: dict[str, Any] = {name: getattr(self._statistics, name) + count for name, count in more.items()}
        self._statistics = replace(self._statistics, **counts)


def _prepared(images: Sequence[DueTask[Prepared | Rejected]]) -> list[Prepared | Rejected]:
    """Prepared images of a batch. The executor's thread begins waiting crops: waking another thread costs more."""
    for task in images:
        if task.is_short:
            task.begin()
    return [task.future.result() for task in images]


def model_of(skeleton: Skeleton) -> LanguageModel:
    return cast("LlmSkeleton", skeleton).model


def own_stream(device: str) -> AbstractContextManager[object]:
    """Separate CUDA stream, so that executors of one device overlap."""
    if device == "cuda":
        return torch.cuda.stream(torch.cuda.Stream())  # type: ignore[no-any-return]
    return nullcontext()


def judge(skeleton: Skeleton, expert: Expert, images: Sequence[Prepared]) -> list[Prediction | Rejected]:
    """One answer per image, in order. After an invalid output each image is run alone."""
    try:
        predictions = skeleton.infer(expert, images)
    except OutputInvalid as error:
        if len(images) == 1:
            return [Rejected(str(error))]
        return [judge(skeleton, expert, [image])[0] for image in images]
    if len(predictions) != len(images):
        raise ValueError(f"{len(predictions)} predictions for {len(images)} images")
    return [checked(prediction, expert) for prediction in predictions]


def checked(prediction: Prediction, expert: Expert) -> Prediction | Rejected:
    """Prediction, or a rejection if a score is NaN or infinity."""
    scores = (prediction.score, *(box.score for box in prediction.boxes))
    if all(math.isfinite(score) for score in scores):
        return prediction
    return Rejected(f"expert {expert.id}: its score is not a number: check its weights, then pack them again")
