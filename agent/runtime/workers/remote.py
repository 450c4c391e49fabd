"""RemoteWorker: the agent's end of a worker in another process.

Guarantees: as ``agent.runtime.worker``. No method waits for the worker: one thread sends, another receives. A worker
that ends, breaks, or has been silent for ``SILENT_S`` is lost, and killed.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from contextlib import suppress
from itertools import count
from queue import Empty, SimpleQueue
from threading import Event as Flag
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from agent.core import effects, events
from agent.core.request import Rejected
from agent.runtime.images.sources import EncodedImage, FramePart, ImageFile, image_name
from agent.runtime.texts import TextSource
from agent.runtime.weights.transfer import TransferStatistics
from agent.runtime.worker import WorkerLost, WorkerStatistics
from agent.runtime.workers import messages
from agent.runtime.workers.files import files_of, pieces_of
from experts.errors import WorkerBroken
from experts.images import DEFAULT_MAX_PIXELS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from agent.core.performance import ExecutorSpec, PerformanceMatrix
    from agent.core.request import Batch
    from agent.runtime.expert_copy import ExpertCopy
    from agent.runtime.images.sources import Frame, ImageSource
    from experts.packed.weights import PackedExpert, SegmentStore

logger = logging.getLogger(__name__)

SILENT_S = 30.0  # beats come every second
START_S = 300.0  # until the first: a cold disk takes minutes to read the libraries
POLL_S = 1.0
ANSWERS = (events.Loaded, events.LoadFailed, events.Finished, events.BatchFailed)
NO_TRANSFERS = TransferStatistics({}, {}, {}, 0, 0, 0, 0)

Reply = TypeVar("Reply")


class RemoteWorker:
    """``segments``: the agent's packed files. Not started: only ``ask`` and ``give_files`` may be called.

    ``post`` takes events and WorkerLost, from any thread, after ``start``.
    """

    def __init__(self, name: str, channel: messages.Channel, segments: SegmentStore) -> None:
        self.name = name
        self.executors: Sequence[ExecutorSpec] = ()  # set before ``start``
        self.post: Callable[[Any], None] = lambda _: None  # likewise
        self._channel = channel
        self._segments = segments
        self._outbox: SimpleQueue[object | None] = SimpleQueue()
        self._replies: SimpleQueue[Any] = SimpleQueue()
        self._statistics = WorkerStatistics(NO_TRANSFERS)
        self._heard_s, self._limit_s = time.monotonic(), START_S
        self._why_lost: str | None = None
        self._has_started = False
        self._is_stopping = False
        self._ended = Flag()
        self._images: dict[int, int | None] = {}  # request -> number of its frame
        self._numbers = count(1)
        self._frames: WeakKeyDictionary[Frame, int] = WeakKeyDictionary()
        self._frame_uses: Counter[int] = Counter()
        self._threads = [
            Thread(target=work, name=f"{name}-{what}", daemon=True)
            for what, work in (("send", self._send_all), ("receive", self._receive_all), ("watch", self._watch))
        ]
        for thread in self._threads:
            thread.start()

    # -- before the work, on a thread that may wait --

    def ask(self, message: object, reply: type[Reply]) -> Reply:
        """Reply to a message. Raises WorkerBroken."""
        self._outbox.put(message)
        while True:
            with suppress(Empty):
                answer = self._replies.get(timeout=POLL_S)
                if isinstance(answer, reply):
                    return answer
                if isinstance(answer, messages.Broken):
                    raise WorkerBroken(self.name, answer.reason)
            if self._ended.is_set() and self._replies.empty():
                raise WorkerBroken(self.name, str(self._why_lost))

    def give_files(self, packed: Sequence[PackedExpert]) -> None:
        """Give the packed files that the worker cannot link. Raises WorkerBroken, FileNotFoundError."""
        self.ask(messages.Offer(files_of(packed, self._segments)), messages.Lacking)

    # -- the loop's thread --

    def start(self) -> None:
        self._has_started = True
        if self._ended.is_set():
            self.post(WorkerLost(self.name, str(self._why_lost)))

    def start_load(self, effect: effects.StartLoad) -> None:
        self._outbox.put(effect)

    def evict(self, effect: effects.Evict) -> None:
        self._outbox.put(messages.EvictCopy(effect.copy, effect.pool))

    def start_batch(self, batch: Batch, images: Sequence[ImageSource], *, is_next: bool) -> None:
        for request, image in zip(batch.requests, images, strict=True):
            self._give(request, image)
        self._outbox.put(messages.RunBatch(batch, is_next))

    def hurry(self, batch: Batch) -> None:
        self._outbox.put(messages.Hurry(batch))

    def prepare(self, effect: effects.Prepare, image: ImageSource) -> None:
        self._give(effect.request, image)
        self._outbox.put(effect)

    def forget(self, request: int) -> None:
        if request in self._images:
            self._outbox.put(messages.Release(request, ended=False))

    def end(self, request: int) -> None:
        if request not in self._images:
            return
        self._outbox.put(messages.Release(request, ended=True))
        frame = self._images.pop(request)
        if frame is not None:
            self._frame_uses[frame] -= 1

    def set_budget(self, pool: str, size_bytes: int) -> None:
        self._outbox.put(messages.SetBudget(pool, size_bytes))

    def know(self, copies: Mapping[str, ExpertCopy], matrix: PerformanceMatrix) -> None:
        own = share_of(self.executors, copies, matrix)
        packed = [copy.packed for copy in own[0].values()]
        with suppress(FileNotFoundError):  # its load fails, and says so
            self._outbox.put(messages.Offer(files_of(packed, self._segments)))
        self._outbox.put(messages.Know(*own))

    def statistics(self) -> WorkerStatistics:
        return self._statistics

    def lose(self, reason: str) -> bool:
        self._fail(reason)
        return True

    def stop(self, timeout_s: float) -> bool:
        self._is_stopping = True
        self._outbox.put(messages.Stop(timeout_s))
        has_ended = self._ended.wait(timeout_s + POLL_S)
        self._channel.kill()
        return has_ended

    def _give(self, request: int, image: ImageSource) -> None:
        """Send a request's image, once; a frame once for all of its parts."""
        if request in self._images:
            return
        frame = None
        if isinstance(image, FramePart):
            frame = self._frames.setdefault(image.frame, next(self._numbers))
            if not self._frame_uses[frame]:
                encoded, size = image.frame.image, image.frame.size
                self._outbox.put(messages.FrameImage(frame, encoded.content, encoded.name, encoded.max_pixels, size))
            self._frame_uses[frame] += 1
            self._outbox.put(messages.Given(request, messages.FramePiece(frame, image.box, image.name)))
        else:
            self._outbox.put(messages.Given(request, image))  # type: ignore[arg-type]  # a file is read by the sender
        self._images[request] = frame

    # -- the threads of the channel --

    def _send_all(self) -> None:
        try:
            while (message := self._outbox.get()) is not None:
                if isinstance(message, messages.Lacking):
                    self._send_files(message)
                    continue
                if isinstance(message, messages.Given) and not isinstance(message.image, messages.FramePiece):
                    message = messages.Given(message.request, on_the_wire(message.image, message.request))
                self._channel.send(messages.encode(message))
        except OSError as error:
            self._fail(f"its channel broke: {error}")

    def _send_files(self, lacking: messages.Lacking) -> None:
        for file in lacking.files:
            is_segment = file.kind == "segments"
            path = (self._segments.segment_path if is_segment else self._segments.program_path)(file.sha256)
            here = messages.PackedFile(file.kind, file.sha256, file.size_bytes, str(path))
            try:
                for piece in pieces_of(here):
                    self._channel.send(messages.encode(piece))
            except FileNotFoundError as error:
                logger.warning("packed_file_missing worker=%s file=%s", self.name, error.filename)

    def _receive_all(self) -> None:
        try:
            while (content := self._channel.receive()) is not None:
                self._heard_s, self._limit_s = time.monotonic(), SILENT_S
                message = messages.decode(content)
                if isinstance(message, messages.Beat):
                    self._statistics = message.statistics or self._statistics
                elif isinstance(message, ANSWERS):
                    self.post(message)
                elif isinstance(message, messages.Broken) and self._has_started:
                    self._why_lost = self._why_lost or message.reason
                else:
                    if isinstance(message, messages.Lacking):
                        self._outbox.put(message)
                    self._replies.put(message)
        except (OSError, ValueError) as error:
            self._why_lost = self._why_lost or str(error)
        self._fail("its process ended")
        self._channel.close()
        self._ended.set()
        if self._has_started and not self._is_stopping:
            self.post(WorkerLost(self.name, str(self._why_lost)))

    def _watch(self) -> None:
        while not self._ended.wait(POLL_S):
            silent_s = time.monotonic() - self._heard_s
            if silent_s > self._limit_s:
                self._fail(f"it has not been heard for {silent_s:.0f} s")

    def _fail(self, reason: str) -> None:
        self._why_lost = self._why_lost or reason
        self._outbox.put(None)
        self._channel.kill()


def on_the_wire(image: object, request: int) -> EncodedImage | np.ndarray | Rejected:
    """The image as it is sent: read from its file, not decoded."""
    if isinstance(image, TextSource):
        return Rejected(f"a worker takes images, and request {request} is a text")
    if isinstance(image, EncodedImage | np.ndarray | Rejected):
        return image
    if isinstance(image, bytes):
        return EncodedImage(image, f"image of request {request}", DEFAULT_MAX_PIXELS)
    path, max_pixels = (image.path, image.max_pixels) if isinstance(image, ImageFile) else (image, DEFAULT_MAX_PIXELS)
    return _read(path, image_name(path, request), max_pixels)  # type: ignore[arg-type]  # all else is a path


def _read(path: Path, name: str, max_pixels: int) -> EncodedImage | Rejected:
    try:
        return EncodedImage(path.read_bytes(), name, max_pixels)
    except OSError as error:
        return Rejected(f"{name}: {error.strerror}")


def share_of(
    executors: Sequence[ExecutorSpec], copies: Mapping[str, ExpertCopy], matrix: PerformanceMatrix
) -> tuple[dict[str, ExpertCopy], PerformanceMatrix]:
    """Copies that these executors may run, and their columns."""
    columns = {spec.processor: matrix.experts[spec.processor] for spec in executors}
    names = {row.copy for column in columns.values() for row in column.values()}
    return {name: copy for name, copy in copies.items() if name in names}, type(matrix)(columns)
