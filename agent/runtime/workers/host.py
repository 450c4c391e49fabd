"""WorkerHost: one worker's end of its channel. It measures and works as it is told, and decides nothing.

Guarantees: messages are carried out in order, each image is decoded here; the host ends when its channel closes, so no
worker outlives its agent. A lost device or a fault of the program is reported as Broken, then the host ends. A beat is
sent every ``BEAT_S``.
Assumes: packed files are only added to its folder, by one worker at a time.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from contextlib import closing, suppress
from threading import Event as Flag
from threading import Thread
from typing import TYPE_CHECKING, Any

from agent.core import effects
from agent.core.performance import tier_of
from agent.runtime.assembly import local_worker
from agent.runtime.images.sources import EncodedImage, Frame, FramePart
from agent.runtime.loop import AgentPlan, LoopOptions
from agent.runtime.machine.box import threads_per_executor
from agent.runtime.machine.detection import detect
from agent.runtime.machine.device_loss import Breakdown
from agent.runtime.machine.threads import end_team
from agent.runtime.measuring.probe import probe
from agent.runtime.texts import expert_name
from agent.runtime.weights.templates import make_templates
from agent.runtime.workers import messages
from agent.runtime.workers.files import FileReceiver, files_of
from experts.backends.forms import FORMS
from experts.errors import CoServeError
from experts.graph import ExpertGraph
from experts.packed.weights import SegmentStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from agent.runtime.images.sources import ImageSource
    from agent.runtime.local_worker import LocalWorker
    from agent.runtime.weights.templates import Templates
    from agent.runtime.workers.messages import Channel

logger = logging.getLogger(__name__)
BEAT_S = 1.0


class WorkerHost:
    """``folder``: of the worker, for packed files."""

    def __init__(self, channel: Channel, folder: Path) -> None:
        self._channel = channel
        self._segments = SegmentStore(folder)
        self._files = FileReceiver(folder)
        self._worker: LocalWorker | None = None
        self._templates: Templates | None = None  # held while skeletons may be made
        self._sources: dict[int, ImageSource] = {}  # by request
        self._frames: dict[int, Frame] = {}
        self._frame_of: dict[int, int] = {}  # request -> frame
        self._ended = Flag()
        self._carry_out: dict[type, Callable[[Any], object]] = {
            messages.Detect: self._detect,
            messages.Offer: lambda offer: self._send(messages.Lacking(self._files.link(offer.files))),
            messages.FilePiece: lambda piece: self._files.write(piece.file, piece.content),
            messages.Measure: self._measure,
            messages.Assemble: self._assemble,
            messages.FrameImage: self._take_frame,
            messages.Given: self._take_image,
            effects.StartLoad: lambda effect: self._working.start_load(effect),
            effects.Prepare: self._prepare,
            messages.RunBatch: self._run_batch,
            messages.Hurry: lambda hurry: self._working.hurry(hurry.batch),
            messages.EvictCopy: self._evict,
            messages.Release: self._release,
            messages.SetBudget: lambda budget: self._working.set_budget(budget.pool, budget.size_bytes),
            messages.Know: lambda known: self._working.know(known.copies, known.matrix),
            messages.Stop: self._stop,
        }

    def serve(self) -> None:
        """Carry out messages until the channel closes, or after a Stop."""
        Thread(target=self._beat, name="beat", daemon=True).start()
        with closing(self._segments):
            while not self._ended.is_set() and (content := self._channel.receive()) is not None:
                try:
                    message = messages.decode(content)
                    self._carry_out[type(message)](message)
                except (CoServeError, OSError, ValueError) as error:
                    logger.exception("worker_broken")
                    self._send(messages.Broken(f"{type(error).__name__}: {error}"))
                    break
        self._ended.set()

    @property
    def _working(self) -> LocalWorker:
        if self._worker is None:
            raise CoServeError("a worker that is not assembled cannot work")
        return self._worker

    def _send(self, message: object) -> None:
        self._channel.send(messages.encode(message))

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            worker = self._worker
            self._send(messages.Beat(None if worker is None else worker.statistics()))

    # -- before the work --

    def _detect(self, wanted: messages.Detect) -> None:
        box = detect(wanted.device)
        reasons = {name: form.why_absent() for name, form in FORMS.items() if form.is_cpu_only}
        absent = {str(name): reason for name, reason in reasons.items() if reason is not None}
        self._send(messages.Detected(box, absent))

    def _measure(self, wanted: messages.Measure) -> None:
        if self._worker is None:
            self._measured(wanted)
        else:  # new experts of a changed line, beside the work
            Thread(target=self._measured, args=(wanted,), name="measure", daemon=True).start()

    def _measured(self, wanted: messages.Measure) -> None:
        threads = threads_per_executor(wanted.box, wanted.executors)
        self._send(probe(wanted.box, wanted.copies, self._segments, wanted.usage, threads))
        end_team()

    def _assemble(self, plan: messages.Assemble) -> None:
        copies = defaultdict(list)
        for spec in plan.executors:
            for row in plan.matrix.experts[spec.processor].values():
                copies[tier_of(spec.processor)].append(plan.copies[row.copy])
        threads = threads_per_executor(plan.box, plan.executors)
        self._templates = make_templates(copies, self._segments, threads, lambda *_: None)
        options = LoopOptions(ssd_bytes_per_s=plan.ssd_bytes_per_s, scaled=plan.scaled)
        routes = ExpertGraph((), {})
        agent_plan = AgentPlan(plan.box, plan.executors, plan.limits, plan.copies, plan.matrix, routes)
        self._worker = local_worker(agent_plan, self._segments, self._post, options)
        self._worker.transfers.mend = self._ask_for_files
        end_team()
        self._worker.start()
        self._send(messages.Ready(self._templates.failed))

    # -- the work --

    def _post(self, answer: object) -> None:
        """Send an answer, from any thread."""
        if isinstance(answer, Breakdown):
            self._send(messages.Broken(f"{type(answer.error).__name__}: {answer.error}"))
            self._ended.set()
            self._channel.kill()
        else:
            self._send(answer)

    def _ask_for_files(self, expert: str) -> None:
        """Ask for an expert's packed files, of which one was not sound."""
        packed = [copy.packed for copy in self._working.copies.values() if expert_name(copy) == expert]
        with suppress(FileNotFoundError):  # a program that is gone; the agent packs it
            self._send(messages.Lacking(self._files.link(files_of(packed, self._segments))))

    def _take_frame(self, frame: messages.FrameImage) -> None:
        image = EncodedImage(frame.content, frame.name, frame.max_pixels)
        self._frames[frame.number] = Frame(image, frame.size)

    def _take_image(self, given: messages.Given) -> None:
        image = given.image
        if isinstance(image, messages.FramePiece):
            self._frame_of[given.request] = image.frame
            self._sources[given.request] = FramePart(self._frames[image.frame], image.box, image.name)
        else:
            self._sources[given.request] = image  # type: ignore[assignment]  # a refusal is taken as an image is

    def _prepare(self, effect: effects.Prepare) -> None:
        self._working.prepare(effect, self._sources[effect.request])

    def _run_batch(self, run: messages.RunBatch) -> None:
        images = [self._sources[request] for request in run.batch.requests]
        self._working.start_batch(run.batch, images, is_next=run.is_next)

    def _evict(self, evicted: messages.EvictCopy) -> None:
        self._working.stores[evicted.pool].evict(evicted.copy)

    def _release(self, release: messages.Release) -> None:
        self._working.forget(release.request)
        if release.ended:
            del self._sources[release.request]
            frame = self._frame_of.pop(release.request, None)
            if frame is not None and frame not in self._frame_of.values():
                del self._frames[frame]

    def _stop(self, stop: messages.Stop) -> None:
        self._ended.set()
        if self._worker is not None and self._worker.stop(stop.timeout_s):
            self._worker.close()
