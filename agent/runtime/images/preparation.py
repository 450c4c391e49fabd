"""Preparation: images are decoded and prepared for their experts, ahead of their batches and on threads of their own.

Ahead of its batch a crop is begun on a core that no executor computes on, a photograph on any: at the lowest priority
for executors on the CPU, at the usual one for executors that drive a device, which would stand still for as long as
the CPU computes (see ``LARGE_BYTES``). An executor begins what its batch still lacks.

Guarantees: the earliest due image is begun first, and images of a started batch before all; an image is decoded once
for all the steps that it was told of, unless it was forgotten meanwhile; nothing is held of a forgotten image but what
a batch has; images in decoding take DECODING_BYTES together at most. A MemoryError, which is not the image's fault, is
the future's; every other fault is a Rejected.

A JPEG is decoded smaller for the experts that were found to say the same of it then, to MARGIN times the pixels that
they see to either side; the form's name tells of the reduction. How much smaller follows from image and expert alone,
so that answers do, too: steps that need two sizes decode twice.

For later steps an image's pixels are held where they take no more than what it becomes for all of these, else that:
a crop stays what it is, of a photograph of 12 megapixels two small tensors are left. The present step's tensor counts
among these where a later step has its form, as the Engine counts it.
"""

from __future__ import annotations

import logging
import math
import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from threading import Condition, Lock
from typing import TYPE_CHECKING

from agent.core.request import Rejected
from agent.runtime.expert_copy import prepared_form
from agent.runtime.images.due_threads import DueTask, DueThreads
from agent.runtime.images.sources import decoded, stored_bytes
from agent.runtime.machine.threads import give_way, use_threads
from experts.backends import backend_for
from experts.backends.base import Prepared
from experts.errors import ImageError
from experts.expert import Orientation
from experts.images import DEFAULT_MAX_PIXELS
from experts.orientation import SWAPPED, UPRIGHT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from concurrent.futures import Future
    from contextlib import AbstractContextManager

    from agent.runtime.images.sources import ImageSource
    from agent.runtime.machine.box import Box
    from experts.expert import Expert
    from experts.images import Decoded

logger = logging.getLogger(__name__)

DECODING_BYTES = 512 * 1024 * 1024  # what images in decoding take together; one that takes more is decoded alone
LEAST_THREADS = 2
# An image of this size, or of unknown size, is large: worth decoding on any core, at a priority that gives way, as its
# decoder seldom holds the interpreter's lock. A smaller one takes a millisecond, mostly with the lock: a thread that
# gave way with it would hold up executors, whose operators' threads spin meanwhile. Arbitrary, within a factor.
LARGE_BYTES = 256 * 1024
MARGIN = 2  # times as many pixels to a side as the expert sees: less, and the decoder would do the smoothing
AT_ONCE = -math.inf  # due before everything that is only due some time


def nothing_told(request: int) -> AbstractContextManager[object]:
    return nullcontext()


class ByteGate:
    """Lets in what fits together into so many bytes, in the order of its asking; what is larger goes in alone."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._inside_bytes = 0
        self._changed = Condition()
        self._asking = Lock()

    @contextmanager
    def room_for(self, size_bytes: int) -> Iterator[None]:
        """Wait for room, and keep it while the context is open."""
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
    """What an image becomes for an expert. ``name`` as of PreparedForm; ``least``: enough pixels; None: all of them."""

    name: str
    expert: Expert
    least: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Order:
    """Preparation for an expert, and for those of ``later`` steps; see ``agent.core.effects.Prepare``.

    ``gives_way``: to executors that compute on the CPU, where such an executor waits for the image.
    """

    expert: Expert
    later: Sequence[Expert] = ()
    later_bytes: int = 0
    due_s: float = AT_ONCE
    gives_way: bool = True


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What an image is to be held as: for its step's expert, and by name for later ones."""

    form: _Form
    later: Mapping[str, _Form] = field(default_factory=dict)
    later_bytes: int = 0


@dataclass(slots=True, eq=False)
class _Image:
    """One request's image. ``wanted`` is set on the loop's thread; None once it is forgotten.

    ``held``, ``pixels``: for later steps. ``at_work``: held while a thread works on it; ``changing``: guards these two.
    """

    source: ImageSource
    name: str
    wanted: _Wanted | None
    request: int | None = None  # None: not watched
    task: DueTask[Prepared | Rejected] | None = None
    is_taken: bool = False  # a batch waits for the task
    is_idling: bool = False  # a thread that gives way to executors works on it
    held: dict[str, Prepared] = field(default_factory=dict)
    pixels: Decoded | None = None
    at_work: Lock = field(default_factory=Lock)
    changing: Lock = field(default_factory=Lock)

    @property
    def form(self) -> str:
        """The form for the present step; "" once it is forgotten."""
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

    @property
    def held_bytes(self) -> int:
        """Bytes held for later steps, with its answer where one has that form; not the source's own pixels."""
        with self.changing:
            pixels = 0 if self.pixels is None or self.pixels.pixels is self.source else self.pixels.pixels.nbytes
            tensors: dict[int, int] = {id(each): each.tensor.nbytes for each in self.held.values()}
            own = self._own
            if isinstance(own, Prepared) and self.wanted is not None and self.form in self.wanted.later:
                tensors[id(own)] = own.tensor.nbytes
        return pixels + sum(tensors.values())

    @property
    def _own(self) -> Prepared | Rejected | None:
        future = None if self.task is None else self.task.future
        is_there = future is not None and future.done() and not future.cancelled() and future.exception() is None
        return future.result() if future is not None and is_there else None


def threads_for(box: Box) -> int:
    """One per core, at least two, so that reading one image overlaps with decoding another.

    Large images ahead of their batch give way to executors: two cores, a ResNet50, photographs of 12 megapixels gave
    1.16 of the images/s of decoding at the batch's start; sharing the cores gave 0.84, as operators wait for one
    another.
    """
    return max(box.cores, LEAST_THREADS)


def _begin_giving_way() -> None:
    use_threads(1)
    give_way()


class Preparation:
    """Of one agent: ``threads`` of each kind, on ``cores``, by default as many.

    ``scaled``: experts for which JPEGs are made smaller while they are decoded.
    Requests' images are told of, taken and forgotten on one thread, the loop's.
    """

    def __init__(
        self,
        threads: int,
        max_pixels: int = DEFAULT_MAX_PIXELS,
        scaled: frozenset[str] = frozenset(),
        cores: int | None = None,
    ) -> None:
        self._cores = threads if cores is None else cores
        self._computing = 0  # threads that executors compute on
        self._changing = Lock()
        self._ahead = DueThreads(threads, "prepare", lambda: use_threads(1))
        self._large = DueThreads(threads, "prepare-large", _begin_giving_way)
        self._awaited = DueThreads(threads, "prepare-now", lambda: use_threads(1))
        self._max_pixels = max_pixels
        self.scaled = scaled
        self._gate = ByteGate(DECODING_BYTES)
        self._images: dict[int, _Image] = {}
        self.watch: Callable[[int], AbstractContextManager[object]] = nothing_told  # entered ahead of batches

    def start(self, expert: Expert, image: ImageSource, name: str) -> Future[Prepared | Rejected]:
        """Prepare an image for an expert at once. ``name`` is what a rejection calls it."""
        form = self._form(expert)
        return self._begin(_Image(image, name, _Wanted(form)), form).future

    def prepare(self, request: int, image: ImageSource, name: str, order: Order) -> None:
        """Have a request's image prepared."""
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
        """The task that a batch will wait for; see ``hurry``."""
        known, form = self._images.get(request), self._form(expert)
        if known is None or known.task is None or known.form != form.name:
            return self._begin(_Image(image, name, _Wanted(form)), form)
        future = known.task.future
        if future.done() and (future.cancelled() or future.exception() is not None):
            known.task = self._begin(known, form)  # there may be memory for it now
        known.is_taken = True
        return known.task

    def hurry(self, request: int) -> None:
        known = self._images.get(request)
        if known is not None and known.task is not None:
            self._awaited.hurry(known.task)

    @contextmanager
    def computing(self, threads: int) -> Iterator[None]:
        """An executor computes on so many threads: fewer crops are prepared ahead meanwhile."""
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

    @property
    def held_bytes(self) -> int:
        return sum(image.held_bytes for image in self._images.values())

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
        """Without an order at once: a batch waits."""
        due_s, gives_way = (AT_ONCE, True) if order is None else (order.due_s, order.gives_way)
        size_bytes = stored_bytes(image.source)
        is_crop = size_bytes is not None and size_bytes < LARGE_BYTES
        is_awaited = due_s == AT_ONCE or not (is_crop or gives_way)
        threads = self._awaited if is_awaited else self._ahead if is_crop else self._large
        idles = threads is self._large

        def work(answer: Callable[[Prepared | Rejected], None]) -> None:
            if image.is_idling and not gives_way:  # that thread may stand still while executors compute
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
        try:
            with self._watching(image):
                prepared, pixels = self._prepared(image, form)
        except ImageError as error:
            answer(Rejected(str(error)))
        except MemoryError:
            raise
        except Exception as error:
            logger.exception("preparation_broke expert=%s image=%s", form.expert.id, image.name)
            told = f"{image.name}: cannot be prepared for {form.expert.id}: {type(error).__name__}: {error}"
            answer(Rejected(told))
        else:
            answer(prepared)
            self._hold(image, form.name, prepared, pixels)
        image.let_go()

    def _watching(self, image: _Image) -> AbstractContextManager[object]:
        """A batch's requests are known to the watch already."""
        return nullcontext() if image.request is None or image.is_taken else self.watch(image.request)

    def _prepared(self, image: _Image, form: _Form) -> tuple[Prepared, Decoded | None]:
        with image.changing:
            prepared, pixels = image.held.get(form.name), image.pixels
        if prepared is not None:
            return prepared, pixels
        if pixels is None or not pixels.serves(form.least):
            pixels = decoded(image.source, image.name, self._max_pixels, self._gate.room_for, form.least)
        return prepare(form.expert, pixels), pixels

    def _hold(self, image: _Image, name: str, ready: Prepared, pixels: Decoded | None) -> None:
        """Hold what later steps need: the pixels, or what they become. An error here is left to the later step."""
        wanted = image.wanted
        if wanted is None or not wanted.later:
            return
        beside_bytes = wanted.later_bytes - (ready.tensor.nbytes if name in wanted.later else 0)
        if pixels is not None and (pixels.pixels is image.source or pixels.pixels.nbytes <= beside_bytes):
            with image.changing:
                image.pixels, image.held = pixels, {}
            return
        with nullcontext() if image.request is None else self.watch(image.request):  # its batch may be over meanwhile
            for each, form in wanted.later.items():
                prepared = ready if each == name else None
                if prepared is None and pixels is not None and each not in image.held:
                    prepared = prepare(form.expert, pixels) if pixels.serves(form.least) else None
                if prepared is not None:
                    with image.changing:
                        image.held[each] = prepared
        with image.changing:
            image.pixels = None


def least_pixels(expert: Expert) -> tuple[int, int]:
    """Height and width that are enough for an expert before cropping, where it may have JPEGs smaller."""
    pixels = expert.pixels
    resize = pixels.resize or (pixels.height, pixels.width)
    height, width = (resize, resize) if isinstance(resize, int) else resize
    if pixels.orientation is Orientation.EXIF:  # either may be the other
        height = width = max(height, width)
    return MARGIN * height, MARGIN * width


def prepare(expert: Expert, image: Decoded) -> Prepared:
    """An image as its expert wants it; scales lead back to the file's pixels, however it was decoded."""
    pixels = image.turned(expert.pixels.orientation)
    left_to_turn = UPRIGHT if expert.pixels.orientation is Orientation.EXIF else image.orientation
    prepared = replace(backend_for(expert.architecture).prepare(expert, pixels), orientation=left_to_turn)
    if image.reduction == 1:
        return prepared
    height, width = pixels.shape[:2]
    is_swapped = left_to_turn < SWAPPED <= image.orientation
    full_height, full_width = (image.width, image.height) if is_swapped else (image.height, image.width)
    return replace(
        prepared,
        image_height=full_height,
        image_width=full_width,
        scale_x=prepared.scale_x * width / full_width,
        scale_y=prepared.scale_y * height / full_height,
    )
