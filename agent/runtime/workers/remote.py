"""RemoteWorker: the agent's end of a worker in another process.

Guarantees: as ``agent.runtime.worker``. No method waits for the worker: one thread sends, another receives. Calls of
the contract keep their order, and pass whatever else is sent: packed files (piece by piece), and what is asked. A
worker that ends, breaks, or has been silent for ``SILENT_S`` is lost, and killed.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from pathlib import Path
from queue import Empty, PriorityQueue
from threading import Event as Flag
from threading import Thread
from typing import TYPE_CHECKING, Any, NamedTuple

from agent.faults.errors import WorkerBroken
from agent.runtime.images.sources import EncodedImage, FramePart, ImageFile
from agent.runtime.texts import TextSource
from agent.runtime.weights.transfer import NO_TRANSFERS
from agent.runtime.worker import Worker, WorkerLost, WorkerStatistics
from agent.runtime.workers.files import files_of, piece_of
from agent.runtime.workers.messages import decode, encode
from experts.errors import ImageError
from experts.expert import Rejected
from experts.images import DEFAULT_MAX_PIXELS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from agent.core.effects import Prepare, StartLoad
    from agent.core.performance import ExecutorSpec, PerformanceMatrix
    from agent.core.request import Batch
    from agent.runtime.executor import RequestSource
    from agent.runtime.expert_copy import ExpertCopy
    from agent.runtime.images.sources import ImageSource
    from agent.runtime.workers.files import PackedFile
    from agent.runtime.workers.messages import WorkerChannel
    from experts.packed.weights import PackedExpert, SegmentStore

logger = logging.getLogger(__name__)

SILENT_S = 30.0  # beats come every second
START_S = 300.0  # until the first: a cold disk takes minutes to read the libraries
POLL_S = 1.0
PAUSED_S = 5.0  # between two looks at a worker: the agent itself did not run
ANSWER_S = 3600.0  # for what a worker measures or builds
TOGETHER = 16  # messages, each with an image at most
END, CALLS, OTHER = range(3)  # lanes of the outbox, each in order


class _Message(NamedTuple):
    """A message that waits; in order of lane and number."""

    lane: int
    number: int
    name: str
    arguments: tuple[Any, ...]


class RemoteWorker(Worker):
    """``segments``: the agent's packed files. Not started: only ``ask`` and ``give_files`` may be called.

    ``post`` takes events and WorkerLost, from any thread, after ``start``.
    """

    def __init__(self, name: str, channel: WorkerChannel, segments: SegmentStore) -> None:
        self.name = name
        self.executors: Sequence[ExecutorSpec] = ()  # set before ``start``
        self.post: Callable[[Any], None] = lambda _: None  # likewise
        self.repack: Callable[[str], None] = lambda _: None  # likewise: packs an expert's missing files anew
        self._channel = channel
        self._segments = segments
        self._outbox: PriorityQueue[_Message] = PriorityQueue()
        self._numbers = count()
        self._asked: dict[str, Future[Any]] = {}  # by name of the call
        self._statistics = WorkerStatistics(NO_TRANSFERS)
        self._heard_s, self._limit_s = time.monotonic(), START_S
        self._why_lost: str | None = None
        self._has_started = False
        self._is_stopping = False
        self._ended = Flag()
        self._images: dict[int, RequestSource] = {}  # by request
        self._frame_uses: Counter[int] = Counter()  # by identity of the frame
        for work in (self._send_all, self._receive_all, self._watch):
            Thread(target=work, name=f"{name}{work.__name__}", daemon=True).start()

    # -- before the work, on a thread that may wait --

    def ask(self, name: str, *arguments: object) -> Any:  # noqa: ANN401 - of the call
        """Reply to a call of the host. Raises WorkerBroken."""
        reply = self._asked[name] = Future[Any]()
        self._put(OTHER, name, *arguments)
        try:
            if not self._ended.is_set():
                return reply.result(ANSWER_S)
        except TimeoutError:
            self._fail(f"it has not answered {name} for {ANSWER_S:.0f} s")
        raise self._broken()

    def give_files(self, packed: Sequence[PackedExpert]) -> None:
        """Give the packed files that the worker cannot link; they precede what is asked next.

        Raises WorkerBroken, FileNotFoundError.
        """
        self._send_files(self.ask("offer", files_of(packed, self._segments)))

    # -- the loop's thread --

    def start(self) -> None:
        self._has_started = True
        if self._ended.is_set():
            self.post(WorkerLost(self.name, str(self._why_lost)))

    def start_load(self, effect: StartLoad) -> None:
        self._put(CALLS, "start_load", effect)

    def evict(self, copy: str, pool: str) -> None:
        self._put(CALLS, "evict", copy, pool)

    def start_batch(self, batch: Batch, images: Sequence[RequestSource], *, is_next: bool) -> None:
        for request, image in zip(batch.requests, images, strict=True):
            self._give(request, image)
        self._put(CALLS, "start_batch", batch, is_next)

    def prioritise(self, batch: Batch) -> None:
        self._put(CALLS, "prioritise", batch)

    def prepare(self, effect: Prepare, image: ImageSource) -> None:
        self._give(effect.request, image)
        self._put(CALLS, "prepare", effect)

    def forget(self, request: int) -> None:
        if request in self._images:
            self._put(CALLS, "forget", request)

    def end(self, request: int) -> None:
        image = self._images.pop(request, None)
        if image is None:
            return
        self._put(CALLS, "end", request)
        if isinstance(image, FramePart):
            self._frame_uses[id(image.frame)] -= 1
            if not self._frame_uses[id(image.frame)]:
                del self._frame_uses[id(image.frame)]

    def set_budget(self, pool: str, size_bytes: int) -> None:
        self._put(CALLS, "set_budget", pool, size_bytes)

    def know(self, copies: Mapping[str, ExpertCopy], matrix: PerformanceMatrix) -> None:
        own, columns = share_of(self.executors, copies, matrix)
        with suppress(FileNotFoundError):  # its load fails, and says so
            self._put(CALLS, "link", files_of([copy.packed for copy in own.values()], self._segments))
        self._put(CALLS, "know", own, columns)

    def statistics(self) -> WorkerStatistics:
        return self._statistics

    def lose(self, reason: str) -> bool:
        self._fail(reason)
        return True

    def stop(self, timeout_s: float) -> bool:
        self._is_stopping = True
        self._put(CALLS, "stop", timeout_s)
        has_ended = self._ended.wait(timeout_s + POLL_S)
        self._channel.kill()
        return has_ended

    def _put(self, lane: int, name: str, *arguments: object) -> None:
        self._outbox.put(_Message(lane, next(self._numbers), name, arguments))

    def _send_files(self, files: Sequence[PackedFile]) -> None:
        for file in files:
            self._put(OTHER, "write", file, 0)

    def _give(self, request: int, image: RequestSource) -> None:
        """Send a request's image, once; a frame with the first of its parts that is here."""
        if request in self._images:
            return
        self._images[request] = image  # its frame is no other's identity until the end
        if isinstance(image, FramePart):
            frame, number = image.frame, id(image.frame)
            content = None if self._frame_uses[number] else (frame.image, frame.size)
            self._frame_uses[number] += 1
            self._put(CALLS, "take_part", request, number, content, image.box, image.name)
        else:
            self._put(CALLS, "take_image", request, image)

    # -- the threads of the channel --

    def _send_all(self) -> None:
        try:
            while messages := self._next_messages():
                self._channel.send(*messages)
        except Exception as error:  # noqa: BLE001 - the boundary of this thread
            self._fail(f"its channel broke: {type(error).__name__}: {error}")

    def _next_messages(self) -> list[bytes]:
        """Calls that wait, or else one other message; none at the end."""
        waiting = [self._outbox.get()]
        with suppress(Empty):
            while waiting[-1].lane == CALLS and len(waiting) < TOGETHER:
                waiting.append(self._outbox.get_nowait())
        if len(waiting) > 1 and waiting[-1].lane != CALLS:
            self._outbox.put(waiting.pop())
        return [self._encoded(each) for each in waiting if each.lane != END]

    def _encoded(self, message: _Message) -> bytes:
        arguments = message.arguments
        if message.name == "take_image":
            request, image = arguments
            arguments = request, on_the_wire(image, request)
        if message.name == "write":
            file, offset = arguments
            piece = piece_of(file, offset, self._segments)
            arguments = file, offset, piece
            if not piece:
                logger.warning("packed_file_missing worker=%s file=%s/%s", self.name, file.kind, file.sha256)
            elif offset + len(piece) < file.size_bytes:  # its next piece keeps its place
                self._outbox.put(message._replace(arguments=(file, offset + len(piece))))
        return encode(message.name, *arguments)

    def _receive_all(self) -> None:
        try:
            while (content := self._channel.receive()) is not None:
                self._heard_s, self._limit_s = time.monotonic(), SILENT_S
                self._take(*decode(content))
        except Exception as error:  # noqa: BLE001 - the boundary of this thread
            self._why_lost = self._why_lost or f"{type(error).__name__}: {error}"
        self._fail("its process ended")
        self._ended.set()
        for reply in list(self._asked.values()):
            reply.set_exception(self._broken())
        if self._has_started and not self._is_stopping:
            self.post(WorkerLost(self.name, str(self._why_lost)))
        self._channel.close()

    def _take(self, name: str, arguments: tuple[Any, ...]) -> None:
        if name == "answer":
            self.post(*arguments)
        elif name == "beat":
            self._statistics = arguments[0] or self._statistics
        elif name == "lacking":
            self._send_files(*arguments)
        elif name == "damaged":
            Thread(target=self._look_at, args=arguments, name=f"{self.name}_look_at", daemon=True).start()
        elif name == "broken":
            self._why_lost = arguments[0]  # rather than the end of the channel, which may be noticed before
        elif name == "failed":
            call, reason = arguments
            self._asked.pop(call).set_exception(WorkerBroken(self.name, reason))
        else:
            self._asked.pop(name).set_result(*arguments)

    def _look_at(self, expert: str, packed: Sequence[PackedExpert]) -> None:
        """Drop corrupt files of the agent, whose inodes the worker may have linked; give sound ones."""
        files: tuple[PackedFile, ...] = ()
        try:
            found = [self._segments.discard_corrupt(each) for each in packed]
            for file in {path for gone in found for path in gone or ()}:
                logger.error(
                    "corrupt_file_dropped worker=%s expert=%s file=%s: it is packed again", self.name, expert, file
                )
            if any(found):
                self.repack(expert)
            elif None not in found:  # else a packing is under way
                files = files_of(packed, self._segments)
        except Exception as error:  # noqa: BLE001 - the boundary of this thread
            logger.warning("packed_files_not_looked_at worker=%s expert=%s reason=%s", self.name, expert, error)
        self._put(CALLS, "looked_at", expert, files)

    def _watch(self) -> None:
        looked_s = time.monotonic()
        while not self._ended.wait(POLL_S):
            before_s, looked_s = looked_s, time.monotonic()
            if looked_s - before_s > PAUSED_S:  # this process was suspended, and reads the beats since then
                self._heard_s = looked_s
            silent_s = looked_s - self._heard_s
            if silent_s > self._limit_s:
                self._fail(f"it has not been heard for {silent_s:.0f} s")

    def _broken(self) -> WorkerBroken:
        return WorkerBroken(self.name, str(self._why_lost))

    def _fail(self, reason: str) -> None:
        self._why_lost = self._why_lost or reason
        self._put(END, "")
        self._channel.kill()


def on_the_wire(image: object, request: int) -> object:
    """The image as it is sent: read from its file, not decoded."""
    if isinstance(image, TextSource):
        return Rejected(f"a worker takes images, and request {request} is a text")
    if isinstance(image, Path):
        image = ImageFile(image, DEFAULT_MAX_PIXELS)
    if not isinstance(image, ImageFile):
        return image
    try:
        return EncodedImage(image.read(image.path.name), image.path.name, image.max_pixels)
    except ImageError as error:
        return Rejected(str(error))


def share_of(
    executors: Sequence[ExecutorSpec], copies: Mapping[str, ExpertCopy], matrix: PerformanceMatrix
) -> tuple[dict[str, ExpertCopy], PerformanceMatrix]:
    """Copies that these executors may run, and their columns."""
    columns = {spec.processor: matrix.experts[spec.processor] for spec in executors}
    names = {row.copy for column in columns.values() for row in column.values()}
    return {name: copy for name, copy in copies.items() if name in names}, type(matrix)(columns)
