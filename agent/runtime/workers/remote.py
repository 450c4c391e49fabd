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
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from agent.core.request import Rejected
from agent.runtime.images.sources import EncodedImage, FramePart, ImageFile, image_name
from agent.runtime.texts import TextSource
from agent.runtime.weights.transfer import TransferStatistics
from agent.runtime.worker import WorkerLost, WorkerStatistics
from agent.runtime.workers.files import files_of, pieces_of
from agent.runtime.workers.messages import decode, encode
from experts.errors import WorkerBroken
from experts.images import DEFAULT_MAX_PIXELS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from agent.core.effects import Evict, Prepare, StartLoad
    from agent.core.performance import ExecutorSpec, PerformanceMatrix
    from agent.core.request import Batch
    from agent.runtime.expert_copy import ExpertCopy
    from agent.runtime.images.sources import Frame, ImageSource
    from agent.runtime.workers.files import PackedFile
    from agent.runtime.workers.messages import Channel
    from experts.packed.weights import PackedExpert, SegmentStore

logger = logging.getLogger(__name__)

SILENT_S = 30.0  # beats come every second
START_S = 300.0  # until the first: a cold disk takes minutes to read the libraries
POLL_S = 1.0
PAUSED_S = 5.0  # between two looks at a worker: the agent itself did not run
ANSWER_S = 3600.0  # for what a worker measures or builds
NO_TRANSFERS = TransferStatistics({}, {}, {}, 0, 0, 0, 0)


class RemoteWorker:
    """``segments``: the agent's packed files. Not started: only ``ask`` and ``give_files`` may be called.

    ``post`` takes events and WorkerLost, from any thread, after ``start``.
    """

    def __init__(self, name: str, channel: Channel, segments: SegmentStore) -> None:
        self.name = name
        self.executors: Sequence[ExecutorSpec] = ()  # set before ``start``
        self.post: Callable[[Any], None] = lambda _: None  # likewise
        self._channel = channel
        self._segments = segments
        self._outbox: SimpleQueue[tuple[Any, ...] | None] = SimpleQueue()
        self._replies: SimpleQueue[tuple[str, tuple[Any, ...]]] = SimpleQueue()
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

    def ask(self, reply: str, name: str, *arguments: object) -> tuple[Any, ...]:
        """Arguments of the reply to a message. Raises WorkerBroken."""
        self._put(name, *arguments)
        deadline_s = time.monotonic() + ANSWER_S
        while True:
            with suppress(Empty):
                answer, found = self._replies.get(timeout=POLL_S)
                if answer == reply:
                    return found
                if answer in ("broken", "failed"):
                    raise WorkerBroken(self.name, *found)
            if time.monotonic() > deadline_s:
                self._fail(f"it has not answered {name} for {ANSWER_S:.0f} s")
            if self._ended.is_set() and self._replies.empty():
                raise WorkerBroken(self.name, str(self._why_lost))

    def give_files(self, packed: Sequence[PackedExpert]) -> None:
        """Give the packed files that the worker cannot link. Raises WorkerBroken, FileNotFoundError."""
        self.ask("offered", "offer", files_of(packed, self._segments), True)

    # -- the loop's thread --

    def start(self) -> None:
        self._has_started = True
        if self._ended.is_set():
            self.post(WorkerLost(self.name, str(self._why_lost)))

    def start_load(self, effect: StartLoad) -> None:
        self._put("load", effect)

    def evict(self, effect: Evict) -> None:
        self._put("evict", effect.copy, effect.pool)

    def start_batch(self, batch: Batch, images: Sequence[ImageSource], *, is_next: bool) -> None:
        for request, image in zip(batch.requests, images, strict=True):
            self._give(request, image)
        self._put("run", batch, is_next)

    def hurry(self, batch: Batch) -> None:
        self._put("hurry", batch)

    def prepare(self, effect: Prepare, image: ImageSource) -> None:
        self._give(effect.request, image)
        self._put("prepare", effect)

    def forget(self, request: int) -> None:
        if request in self._images:
            self._put("forget", request)

    def end(self, request: int) -> None:
        if request not in self._images:
            return
        self._put("end", request)
        frame = self._images.pop(request)
        if frame is not None:
            self._frame_uses[frame] -= 1
            if not self._frame_uses[frame]:
                del self._frame_uses[frame]

    def set_budget(self, pool: str, size_bytes: int) -> None:
        self._put("budget", pool, size_bytes)

    def know(self, copies: Mapping[str, ExpertCopy], matrix: PerformanceMatrix) -> None:
        own = share_of(self.executors, copies, matrix)
        with suppress(FileNotFoundError):  # its load fails, and says so
            self._put("offer", files_of([copy.packed for copy in own[0].values()], self._segments), False)
        self._put("know", *own)

    def statistics(self) -> WorkerStatistics:
        return self._statistics

    def lose(self, reason: str) -> bool:
        self._fail(reason)
        return True

    def stop(self, timeout_s: float) -> bool:
        self._is_stopping = True
        self._put("stop", timeout_s)
        has_ended = self._ended.wait(timeout_s + POLL_S)
        self._channel.kill()
        return has_ended

    def _put(self, name: str, *arguments: object) -> None:
        self._outbox.put((name, *arguments))

    def _give(self, request: int, image: ImageSource) -> None:
        """Send a request's image, once; a frame once for all of its parts."""
        if request in self._images:
            return
        frame = None
        if isinstance(image, FramePart):
            frame = self._frames.setdefault(image.frame, next(self._numbers))
            if not self._frame_uses[frame]:
                self._put("frame", frame, image.frame.image, image.frame.size)
            self._frame_uses[frame] += 1
            self._put("part", request, frame, image.box, image.name)
        else:
            self._put("image", request, image)
        self._images[request] = frame

    # -- the threads of the channel --

    def _send_all(self) -> None:
        try:
            while (message := self._outbox.get()) is not None:
                name, *arguments = message
                if name == "lacking":
                    self._send_files(*arguments)
                    continue
                if name == "image":
                    request, image = arguments
                    arguments = [request, on_the_wire(image, request)]
                self._channel.send(encode(name, *arguments))
        except Exception as error:  # noqa: BLE001 - the boundary of this thread
            self._fail(f"its channel broke: {type(error).__name__}: {error}")

    def _send_files(self, files: Sequence[PackedFile]) -> None:
        for file in files:
            try:
                for piece in pieces_of(file, self._segments):
                    self._channel.send(encode("write", file, piece))
            except FileNotFoundError as error:
                logger.warning("packed_file_missing worker=%s file=%s", self.name, error.filename)

    def _receive_all(self) -> None:
        try:
            while (content := self._channel.receive()) is not None:
                self._heard_s, self._limit_s = time.monotonic(), SILENT_S
                self._take(*decode(content))
        except Exception as error:  # noqa: BLE001 - the boundary of this thread
            self._why_lost = self._why_lost or f"{type(error).__name__}: {error}"
        self._fail("its process ended")
        self._ended.set()
        if self._has_started and not self._is_stopping:
            self.post(WorkerLost(self.name, str(self._why_lost)))
        self._channel.close()

    def _take(self, name: str, arguments: tuple[Any, ...]) -> None:
        if name == "answer":
            self.post(*arguments)
        elif name == "beat":
            self._statistics = arguments[0] or self._statistics
        elif name == "broken" and self._has_started:
            self._why_lost = self._why_lost or arguments[0]
        elif name == "lacking":
            self._put(name, *arguments)
        else:
            self._replies.put((name, arguments))

    def _watch(self) -> None:
        looked_s = time.monotonic()
        while not self._ended.wait(POLL_S):
            before_s, looked_s = looked_s, time.monotonic()
            if looked_s - before_s > PAUSED_S:  # this process was suspended, and reads the beats since then
                self._heard_s = looked_s
            silent_s = looked_s - self._heard_s
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
