"""Preparation: decodes and normalises images on separate threads, ahead of their batches.

A crop starts on a core without a computing executor, a photograph on any core: at low priority beside executors on the
CPU, which else wait (see ``LARGE_BYTES``). An executor itself starts the missing crops of its batch.

Guarantees: images start by deadline, images of a started batch first. An image is decoded once for all its steps, and
forgotten images hold no memory. Images in decoding take DECODING_BYTES at most. A lack of memory is set on the
future; any other error gives a Rejected.

A JPEG is decoded smaller for experts whose answers proved equal, to MARGIN times their input size. For later steps the
pixels are held, or the tensors of these steps if smaller.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from threading import Condition, Lock, current_thread
from typing import TYPE_CHECKING, Any

from agent.runtime.expert_copy import prepared_form
from agent.runtime.images.due_threads import DueTask, DueThreads
from agent.runtime.images.sources import decoded, stored_bytes
from agent.runtime.machine.threads import give_way, use_threads
from experts.backends import prepare
from experts.errors import ImageError, is_out_of_memory
from experts.expert import Orientation, Rejected

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from agent.runtime.images.sources import ImageSource
    from experts.backends.base import Prepared
    from experts.expert import Expert
    from experts.images import Decoded

logger = logging.getLogger(__name__)

DECODING_BYTES = 512 * 1024 * 1024  # a larger image is decoded alone
LEAST_THREADS = 2
# From this size on, or of unknown size, an image is decoded on any core at low priority: the decoder seldom holds the
# GIL. A smaller image takes a millisecond with the GIL, for which executors would wait. Arbitrary, within a factor.
LARGE_BYTES = 256 * 1024
MARGIN = 2  # with less, the decoder's smoothing would show
AT_ONCE = -math.inf
LATEST = 8_192  # preparations that are kept for the flight record


def unwatched(request: int) -> AbstractContextManager[object]:
    return nullcontext()


class ByteGate:
    """Admits callers in order, while their bytes fit together; a caller above the limit is admitted alone."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._inside_bytes = 0
        self._changed = Condition()
        self._asking = Lock()

    @contextmanager
    def room_for(self, size_bytes: int) -> Iterator[None]:
        taken_bytes = min(size_bytes, self._limit_bytes)
        with self._asking, self._changed:
            self._changed.wait_for(lambda: self._inside_bytes + taken_bytes <= self._limit_bytes)
            self._inside_bytes += taken_bytes
        try:
            yield
        finally:
            with self._changed:
                self._inside_bytes -= taken_bytes
                self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class _Form:
    """``name``: the PreparedForm's; ``least``: sufficient pixels; None: all pixels."""

    name: str
    expert: Expert
    least: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Order:
    """Preparation for an expert, and for experts of ``later`` steps; see ``agent.core.effects.Prepare``.

    ``gives_way``: run at low priority, as the image is for an executor that computes on the CPU.
    """

    expert: Expert
    later: Sequence[Expert] = ()
    later_bytes: int = 0
    due_s: float = AT_ONCE
    gives_way: bool = True


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Forms to hold of an image: for the current step's expert, and by name for later steps."""

    form: _Form
    later: Mapping[str, _Form] = field(default_factory=dict)
    later_bytes: int = 0


@dataclass(slots=True, eq=False)
class _Image:
    """Image of one request. ``wanted`` is set on the loop's thread; None once the image is forgotten.

    ``held``, ``pixels``: for later steps, guarded by ``changing``. ``at_work``: held while a thread works on it.
    """

    source: ImageSource
    name: str
    wanted: _Wanted | None
    request: int | None = None  # None: not watched
    task: DueTask[Prepared | Rejected] | None = None
    is_taken: bool = False  # a batch waits for the task
    is_idling: bool = False  # a thread of low priority works on it
    held: dict[str, Prepared] = field(default_factory=dict)
    pixels: Decoded | None = None
    at_work: Lock = field(default_factory=Lock)
    changing: Lock = field(default_factory=Lock)

    @property
    def form(self) -> str:
        return "" if self.wanted is None else self.wanted.form.name

    def let_go(self) -> None:
        with self.changing:
            needed = set() if self.wanted is None else set(self.wanted.later)
            is_ready = self.wanted is None or (self.task is not None and self.task.future.done())
            if is_ready and not needed:
                self.pixels = None
            if not is_ready:
                needed.add(self.form)
            self.held = {form: prepared for form, prepared in self.held.items() if form in needed}


def _begin_giving_way() -> None:
    use_threads(1)
    give_way()


class Preparation:
    """Threads for a number of cores. ``scaled``: experts with JPEGs decoded smaller.

    Each kind has one thread per core, at least two: reading one image overlaps with decoding another. On two
    cores, with a ResNet50 and photographs of 12 megapixels, decoding ahead at low priority gave 6.6 to 7.9 images/s,
    at idle priority 6.7 to 7.2, at normal priority 4.7. Only the loop's thread calls ``prepare``, ``take`` and
    ``forget``.
    """

    def __init__(self, cores: int, scaled: frozenset[str] = frozenset()) -> None:
        threads = max(cores, LEAST_THREADS)
        self._cores = cores
        self._computing = 0  # threads that executors compute on
        self._changing = Lock()
        self._ahead = DueThreads(threads, "prepare", lambda: use_threads(1))
        self._large = DueThreads(threads, "prepare-large", _begin_giving_way)
        self._awaited = DueThreads(threads, "prepare-now", lambda: use_threads(1))
        self.scaled = scaled
        self._gate = ByteGate(DECODING_BYTES)
        self._images: dict[int, _Image] = {}
        self.watch: Callable[[int], AbstractContextManager[object]] = unwatched  # entered ahead of batches
        self.latest: deque[tuple[Any, ...]] = deque(maxlen=LATEST)  # see FlightRecord

    def prepare(self, request: int, image: ImageSource, name: str, order: Order) -> None:
        known = self._images.get(request)
        form, forms = self._form(order.expert), [self._form(each) for each in order.later]
        wanted = _Wanted(form, {each.name: each for each in forms}, order.later_bytes)
        if known is None:
            known = self._images[request] = _Image(image, name, wanted, request)
        is_the_same = known.task is not None and known.form == form.name
        known.wanted = wanted
        if not is_the_same:
            ready = known.held.get(form.name)
            known.task = self._begin(known, form, order) if ready is None else DueTask.done(ready)
            known.is_taken = False
        known.let_go()

    def take(self, request: int, image: ImageSource, name: str, expert: Expert) -> DueTask[Prepared | Rejected]:
        """Task of a request's image in a batch; starts at once unless prepared ahead."""
        known, form = self._images.get(request), self._form(expert)
        if known is None or known.task is None or known.form != form.name:
            return self._begin(_Image(image, name, _Wanted(form)), form)
        future = known.task.future
        if future.done() and (future.cancelled() or future.exception() is not None):
            known.task = self._begin(known, form)  # retry: memory may be free now
        known.is_taken = True
        return known.task

    def prioritise(self, request: int) -> None:
        known = self._images.get(request)
        if known is not None and known.task is not None:
            self._awaited.prioritise(known.task)

    @contextmanager
    def computing(self, threads: int) -> Iterator[None]:
        """Context: prepare fewer crops ahead while an executor computes on ``threads``."""
        self._compute(threads)
        try:
            yield
        finally:
            self._compute(-threads)

    def _compute(self, more: int) -> None:
        with self._changing:
            self._computing += more
            self._ahead.allow(max(self._cores - self._computing, 0))

    def forget(self, request: int) -> None:
        image = self._images.pop(request, None)
        if image is None:
            return
        image.wanted = None
        if image.task is not None and not image.is_taken:
            image.task.cancel()
        image.task = None
        image.let_go()

    @property
    def requests(self) -> int:
        return len(self._images)

    def stop(self, timeout_s: float | None = None) -> bool:
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        has_ended = True
        for threads in (self._awaited, self._ahead, self._large):
            left_s = None if deadline_s is None else max(deadline_s - time.monotonic(), 0.0)
            has_ended &= threads.stop(left_s)
        return has_ended

    def _form(self, expert: Expert) -> _Form:
        is_reduced = expert.id in self.scaled
        form = prepared_form(expert, is_reduced=is_reduced)
        return _Form(expert.id if form is None else form.name, expert, least_pixels(expert) if is_reduced else None)

    def _begin(self, image: _Image, form: _Form, order: Order | None = None) -> DueTask[Prepared | Rejected]:
        """Submit the preparation; without an order at once, as a batch waits."""
        due_s, gives_way = (AT_ONCE, True) if order is None else (order.due_s, order.gives_way)
        size_bytes = stored_bytes(image.source)
        is_crop = size_bytes is not None and size_bytes < LARGE_BYTES
        is_awaited = due_s == AT_ONCE or not (is_crop or gives_way)
        threads = self._awaited if is_awaited else self._ahead if is_crop else self._large
        idles = threads is self._large

        def work(answer: Callable[[Prepared | Rejected], None]) -> None:
            if image.is_idling and not gives_way:  # the idle thread may not run while executors compute
                self._work(image, form, answer)
                return
            with image.at_work:
                image.is_idling = idles
                try:
                    self._work(image, form, answer)
                finally:
                    image.is_idling = False

        return threads.submit(work, due_s, is_short=is_crop)

    def _work(self, image: _Image, form: _Form, answer: Callable[[Prepared | Rejected], None]) -> None:
        began_s = time.monotonic()
        try:
            with nullcontext() if image.request is None or image.is_taken else self.watch(image.request):
                prepared, pixels = self._prepared(image, form)
        except ImageError as error:
            answer(Rejected(str(error)))
        except Exception as error:
            if is_out_of_memory(error):  # of OpenCV or torch, too: it says nothing of the image
                raise
            logger.exception("preparation_broke expert=%s image=%s", form.expert.id, image.name)
            reason = f"{image.name}: cannot be prepared for {form.expert.id}: {type(error).__name__}: {error}"
            answer(Rejected(reason))
        else:
            answer(prepared)
            self._hold(image, form.name, prepared, pixels)
            by = current_thread().name
            self.latest.append((image.request, form.expert.id, by, began_s, time.monotonic()))
        image.let_go()

    def _prepared(self, image: _Image, form: _Form) -> tuple[Prepared, Decoded | None]:
        with image.changing:
            prepared, pixels = image.held.get(form.name), image.pixels
        if prepared is not None:
            return prepared, pixels
        if pixels is None or not pixels.serves(form.least):
            pixels = decoded(image.source, image.name, self._gate.room_for, form.least)
        return prepare(form.expert, pixels), pixels

    def _hold(self, image: _Image, name: str, ready: Prepared, pixels: Decoded | None) -> None:
        """Hold pixels or tensors for later steps."""
        wanted = image.wanted
        if wanted is None or not wanted.later:
            return
        beside_bytes = wanted.later_bytes - (ready.tensor.nbytes if name in wanted.later else 0)
        if pixels is not None and (pixels.pixels is image.source or pixels.pixels.nbytes <= beside_bytes):
            with image.changing:
                image.pixels, image.held = pixels, {}
            return
        with nullcontext() if image.request is None else self.watch(image.request):  # its batch may have ended
            for each, form in wanted.later.items():
                prepared = ready if each == name else None
                if prepared is None and pixels is not None and each not in image.held:
                    prepared = prepare(form.expert, pixels) if pixels.serves(form.least) else None
                if prepared is not None:
                    with image.changing:
                        image.held[each] = prepared
        with image.changing:
            image.pixels = None


def least_pixels(expert: Expert) -> tuple[int, int] | None:
    """Smallest sufficient height and width of a JPEG for an expert; None where only all pixels are."""
    pixels = expert.pixels
    if not pixels.is_antialiased:
        return None
    resize = pixels.resize or (pixels.height, pixels.width)
    height, width = (resize, resize) if isinstance(resize, int) else resize
    if pixels.orientation is Orientation.EXIF:  # an orientation tag may swap height and width
        height = width = max(height, width)
    return MARGIN * height, MARGIN * width
