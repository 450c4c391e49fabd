"""WorkerHost: one worker's end of its channel. It measures and works as it is told, and decides nothing.

Guarantees: messages are carried out in order, each image is decoded here; a load waits for files that are on their way.
The host ends when its channel closes, so no worker outlives its agent. A lost device or a fault of the program is
reported, then the host ends. A beat is sent every ``BEAT_S``.
Assumes: no other process changes its folder.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from contextlib import closing, suppress
from threading import Event as Flag
from threading import Thread
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from agent.core.engine import EngineSetup
from agent.core.names import expert_of
from agent.core.performance import SSD, tier_of
from agent.faults.housekeeping import Housekeeper
from agent.runtime.assembly import local_worker
from agent.runtime.images.sources import Frame, FramePart
from agent.runtime.loop import AgentPlan, LoopOptions
from agent.runtime.machine.box import threads_per_executor
from agent.runtime.machine.detection import detect
from agent.runtime.machine.device_loss import Breakdown
from agent.runtime.machine.garbage import keep_what_is_here
from agent.runtime.machine.heap import GIVEN_BACK_EVERY_S, bound_heaps, give_back_unused
from agent.runtime.machine.threads import end_team
from agent.runtime.measuring.probe import probe
from agent.runtime.weights.skeletons import make_templates
from agent.runtime.worker import Worker
from agent.runtime.workers.files import FileReceiver, files_in, files_of
from agent.runtime.workers.messages import decode, encode
from experts.backends.forms import FORMS
from experts.errors import CoServeError
from experts.expert import Rejected
from experts.graph import ExpertGraph
from experts.packed.weights import SegmentStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from agent.core.effects import Prepare, StartLoad
    from agent.core.performance import ExecutorSpec, Limits, PerformanceMatrix
    from agent.core.request import Batch
    from agent.runtime.executor import Shown
    from agent.runtime.expert_copy import ExpertCopy
    from agent.runtime.images.sources import EncodedImage
    from agent.runtime.local_worker import LocalWorker
    from agent.runtime.machine.box import Box
    from agent.runtime.weights.skeletons import Templates
    from agent.runtime.workers.files import PackedFile
    from agent.runtime.workers.messages import WorkerChannel
    from experts.packed.weights import PackedExpert

logger = logging.getLogger(__name__)
BEAT_S = 1.0
CONTRACT = {name for name in vars(Worker) if not name.startswith("_")}


class WorkerHost:
    """``folder``: the worker's, for packed files.

    A message names a ``do_`` method, or one of the contract of a worker, with its arguments. A result is the reply.
    """

    def __init__(self, channel: WorkerChannel, folder: Path) -> None:
        self._channel = channel
        self._segments = SegmentStore(folder)
        self._files = FileReceiver(folder)
        self._assembled: LocalWorker | None = None
        self._templates: Templates | None = None  # held while skeletons may be made
        self._images: dict[int, Shown] = {}  # by request
        self._frames: WeakValueDictionary[int, Frame] = WeakValueDictionary()  # of the images
        self._waiting: list[StartLoad] = []  # for files that are on their way
        self._ended = Flag()
        self._heap_keeper = Housekeeper({"heap": give_back_unused}, "heap-keeper", GIVEN_BACK_EVERY_S)

    def serve(self) -> None:
        """Carry out messages until the channel closes, or after a stop."""
        bound_heaps()  # of an actor's process: a child has them
        Thread(target=self._beat, name="beat", daemon=True).start()
        self._heap_keeper.start()
        with closing(self._segments):
            while not self._ended.is_set() and (content := self._channel.receive()) is not None:
                try:
                    name, arguments = decode(content)
                    reply = self._call_of(name)(*arguments)
                    if reply is not None:
                        self._send(name, reply)
                except Exception as error:  # the boundary of the process: the agent has to know why it ends
                    logger.exception("worker_broken")
                    self._send("broken", f"{type(error).__name__}: {error}")
                    break
        self._ended.set()
        self._heap_keeper.stop(0.0)

    def _call_of(self, name: str) -> Callable[..., object]:
        own: Callable[..., object] | None = getattr(self, f"do_{name}", None)
        if own is None and name not in CONTRACT:
            raise ValueError(f"no worker knows {name!r}: install the same version everywhere")
        return own or getattr(self._worker, name)

    @property
    def _worker(self) -> LocalWorker:
        if self._assembled is None:
            raise CoServeError("a worker that is not assembled cannot work")
        return self._assembled

    def _send(self, name: str, *arguments: object) -> None:
        self._channel.send(encode(name, *arguments))

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            self._send("beat", None if self._assembled is None else self._assembled.statistics())

    # -- before the work --

    def do_detect(self, device: str) -> tuple[Box, Mapping[str, str]]:
        """The box as this device, and the forms that do not run there, with reasons."""
        reasons = {str(name): form.why_absent() for name, form in FORMS.items() if form.is_cpu_only}
        return detect(device), {name: each for name, each in reasons.items() if each is not None}

    def do_link(self, files: Iterable[PackedFile]) -> None:
        """Link the agent's packed files, and ask for the others."""
        self._send("lacking", self._files.link(files))

    def do_offer(self, files: Iterable[PackedFile]) -> tuple[PackedFile, ...]:
        """Link the agent's packed files; those that it has to send."""
        return self._files.link(files)

    def do_write(self, file: PackedFile, offset: int, content: bytes) -> None:
        self._files.write(file, offset, content)
        if file.sha256 not in self._files.awaited:
            self._begin_waiting()

    def do_looked_at(self, expert: str, files: Iterable[PackedFile]) -> None:
        """Link an expert's files, which the agent has found sound; without any, its loads fail and come again."""
        for packed in self._packed_of(expert):
            self._files.awaited -= files_in(packed)
        self.do_link(files)
        self._begin_waiting()

    def _begin_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for effect in waiting:
            self.do_start_load(effect)

    def do_measure(self, *arguments: Any) -> None:  # noqa: ANN401 - of the thread's work
        """Measure these copies, by processor, beside the work; the reply follows."""
        Thread(target=self._measure, args=arguments, name="measure", daemon=True).start()

    def _measure(
        self, box: Box, copies: Mapping[str, Sequence[ExpertCopy]], usage: Mapping[str, float],
        executors: Sequence[ExecutorSpec],
    ) -> None:  # fmt: skip
        try:
            self._send("measure", probe(box, copies, self._segments, usage, threads_per_executor(box, executors)))
        except Exception as error:
            logger.exception("not_measured")
            self._send("failed", "measure", f"{type(error).__name__}: {error}")
        finally:
            end_team()

    def do_assemble(
        self, box: Box, executors: Sequence[ExecutorSpec], limits: Limits, copies: Mapping[str, ExpertCopy],
        matrix: PerformanceMatrix, options: tuple[frozenset[str], float | None],
    ) -> Mapping[str, str]:  # fmt: skip
        """Build memories, executors and templates; experts that cannot run, with reasons.

        ``options``: experts with scaled JPEGs, limit of the SSD.
        """
        by_processor: defaultdict[str, list[ExpertCopy]] = defaultdict(list)
        for spec in executors:
            rows = matrix.experts[spec.processor].values()
            by_processor[tier_of(spec.processor)] += [copies[row.copy] for row in rows]
        threads = threads_per_executor(box, executors)
        self._templates = make_templates(by_processor, self._segments, threads, lambda *_: None)
        setup = EngineSetup(ExpertGraph((), {}), "", tuple(executors), matrix, limits)  # the Engine is the agent's
        plan = AgentPlan(box, setup, copies)
        loop_options = LoopOptions(scaled=options[0], ssd_bytes_per_s=options[1])
        self._assembled = local_worker(plan, self._segments, self._post, loop_options)
        self._assembled.transfers.repack = self._ask_for_files
        end_team()
        self._assembled.start()
        self._drop_other_files(copies)
        keep_what_is_here()
        return self._templates.failed

    # -- the work --

    def do_take_image(self, request: int, image: Shown) -> None:
        self._images[request] = image

    def do_take_part(
        self, request: int, number: int, frame: tuple[EncodedImage, tuple[int, int] | None] | None,
        box: tuple[int, int, int, int], name: str,
    ) -> None:  # fmt: skip
        """Take a part of a frame. ``frame``: None if another part of it is here."""
        found = self._frames[number] if frame is None else Frame(*frame)
        self._frames[number] = found
        self._images[request] = FramePart(found, box, name)

    def do_start_load(self, effect: StartLoad) -> None:
        copy = self._worker.copies.get(effect.copy)
        if copy is not None and effect.source == SSD and self._files.awaited.intersection(files_in(copy.packed)):
            self._waiting.append(effect)
        else:
            self._worker.start_load(effect)

    def do_start_batch(self, batch: Batch, is_next: bool) -> None:
        self._worker.start_batch(batch, [self._images[request] for request in batch.requests], is_next=is_next)

    def do_prepare(self, effect: Prepare) -> None:
        image = self._images[effect.request]
        if not isinstance(image, Rejected):  # its batch answers with the refusal
            self._worker.prepare(effect, image)  # type: ignore[arg-type]

    def do_end(self, request: int) -> None:
        self._worker.end(request)
        del self._images[request]

    def do_know(self, copies: Mapping[str, ExpertCopy], matrix: PerformanceMatrix) -> None:
        self._worker.know(copies, matrix)
        self._drop_other_files(copies)

    def do_stop(self, timeout_s: float) -> None:
        self._ended.set()
        if self._assembled is not None and self._assembled.stop(timeout_s):
            self._assembled.close()

    def _post(self, answer: object) -> None:
        """Send an answer, from any thread."""
        if isinstance(answer, Breakdown):
            self._send("broken", f"{type(answer.error).__name__}: {answer.error}")
            self._ended.set()
            self._channel.kill()
        else:
            self._send("answer", answer)

    def _drop_other_files(self, copies: Mapping[str, ExpertCopy]) -> None:
        """Remove packed files of experts that are served no more."""
        with suppress(FileNotFoundError):  # some are on their way
            self._files.keep(files_of([copy.packed for copy in copies.values()], self._segments))

    def _ask_for_files(self, expert: str) -> None:
        """Report an expert's packed files, of which one is missing or was corrupt: the agent looks at its own."""
        packed = self._packed_of(expert)
        self._files.awaited.update(*map(files_in, packed))
        self._send("damaged", expert, packed)

    def _packed_of(self, expert: str) -> list[PackedExpert]:
        return [copy.packed for copy in self._worker.copies.values() if expert_of(copy.name) == expert]
