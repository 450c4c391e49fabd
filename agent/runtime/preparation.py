"""Preparation: images are decoded and prepared for their experts, ahead of their batches and on threads of their own.

Ahead of their batches, crops are begun on cores that no executor computes on, photographs on all of them, at the lowest
priority: see ``LARGE_BYTES``. What a batch still lacks its executor begins, too.

Guarantees: what is due first is begun first, of either, and what a started batch waits for before all; an image is
decoded once for all the steps that it was told of, unless it was forgotten meanwhile; of one that is forgotten nothing
is held but what a batch has; images in decoding take DECODING_BYTES together at most. What the box has no memory for
is not the image's fault: such a MemoryError is the future's, all else is a Prepared or Rejected.

A JPEG is made smaller while it is decoded for the experts that were found to say the same of it then, as far as leaves
MARGIN times the pixels that they see to either side: what makes them smaller still is smoothed as ever. How much
smaller is a matter of the image and the expert alone, so that their answers are, too: steps that need it in two sizes
decode it twice.

For later steps an image's pixels are held where they take no more than what it becomes for all of these, else that:
a crop stays what it is, of a photograph of 12 megapixels two small tensors are left.
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
from agent.runtime.due_threads import DueTask, DueThreads
from agent.runtime.expert_copy import prepared_form
from agent.runtime.image_sources import decoded, stored_bytes
from agent.runtime.threads import give_way, use_threads
from experts.backends import backend_for
from experts.errors import ImageError
from experts.images import DEFAULT_MAX_PIXELS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future
    from contextlib import AbstractContextManager

    from agent.runtime.image_sources import ImageSource
    from agent.runtime.machine.box import Box
    from experts.backends.base import Prepared
    from experts.expert import Expert
    from experts.images import Decoded

logger = logging.getLogger(__name__)

DECODING_BYTES = 512 * 1024 * 1024  # what images in decoding take together; one that takes more is decoded alone
LEAST_THREADS = 2
# From here on, and where nobody knows, an image is large: decoding it is worth being begun anywhere, at a priority that
# gives way to executors. Little of that holds the interpreter's lock. What is smaller costs a millisecond, mostly with
# the lock: a thread that had it and gave way held up executors, whose operators' threads spin on all cores meanwhile.
# arbitrary, within a factor
LARGE_BYTES = 256 * 1024
MARGIN = 2  # times as many pixels to a side as the expert sees: less, and the decoder would do the smoothing
AT_ONCE = -math.inf  # due before everything that is only due some time


def nothing_told(request: int) -> AbstractContextManager[object]:
    """Where nobody watches which requests' images are being prepared."""
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
class _Wanted:
    """What an image is to be held for: the expert of its step, and those that may come after it."""

    expert: Expert
    later: tuple[Expert, ...] = ()
    later_bytes: int = 0

    @property
    def later_forms(self) -> dict[str, Expert]:
        return {form_name(expert): expert for expert in self.later}


@dataclass(slots=True, eq=False)
class _Image:
    """One request's image. ``wanted`` is set on the loop's thread; None once it is forgotten.

    ``held`` and ``pixels``: for later steps; ``at_work`` is held by the thread that works on it, ``changing`` by
    whoever looks at the two or changes them.
    """

    source: ImageSource
    name: str
    wanted: _Wanted | None
    request: int | None = None  # None: of nobody who is watched
    task: DueTask[Prepared | Rejected] | None = None
    is_taken: bool = False  # a batch waits for the task
    held: dict[str, Prepared] = field(default_factory=dict)
    pixels: Decoded | None = None
    at_work: Lock = field(default_factory=Lock)
    changing: Lock = field(default_factory=Lock)

    @property
    def form(self) -> str:
        """What it is prepared as for the step that it is at; nothing once it is forgotten."""
        return "" if self.wanted is None else form_name(self.wanted.expert)

    def let_go(self) -> None:
        """Of what its steps do not need, or not any more."""
        with self.changing:
            needed = set() if self.wanted is None else set(self.wanted.later_forms)
            is_ready = self.wanted is None or (self.task is not None and self.task.future.done())
            if is_ready and not needed:
                self.pixels = None
            if not is_ready:
                needed.add(self.form)
            self.held = {form: prepared for form, prepared in self.held.items() if form in needed}

    @property
    def held_bytes(self) -> int:
        """Of what it holds for later steps. Its source's own pixels are the source's."""
        with self.changing:
            pixels = 0 if self.pixels is None or self.pixels.pixels is self.source else self.pixels.pixels.nbytes
            tensors: dict[int, int] = {id(each): each.tensor.nbytes for each in self.held.values()}
        return pixels + sum(tensors.values())


def threads_for(box: Box) -> int:
    """As many as the box has cores, at least two, so that reading one image overlaps with decoding another.

    What is large and prepared ahead gives way to executors; what a batch waits for does not. Each has so many threads.
    Decoders that share their cores make an executor's operators wait for one another: two cores with a ResNet50 and
    photographs of 12 megapixels gave 0.84 of the images/s of decoding when the batch starts, and 1.16 giving way; more
    of the time is spent waiting then, as what is decoded on these cores is not computed on them.
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
        return self._begin(_Image(image, name, _Wanted(expert)), expert, AT_ONCE).future

    def prepare(
        self,
        request: int,
        image: ImageSource,
        name: str,
        expert: Expert,
        later: Sequence[Expert] = (),
        later_bytes: int = 0,
        due_s: float = AT_ONCE,
    ) -> None:
        """Have a request's image prepared for an expert; see ``agent.core.effects.Prepare``."""
        known = self._images.get(request)
        wanted = _Wanted(expert, tuple(later), later_bytes)
        if known is None:
            known = self._images[request] = _Image(image, name, wanted, request)
        is_the_same = known.task is not None and known.form == form_name(expert)
        known.wanted = wanted
        if not is_the_same:
            ready = known.held.get(known.form)
            known.task = self._begin(known, expert, due_s) if ready is None else DueTask.done(ready)
            known.is_taken = False
        known.let_go()

    def take(self, request: int, image: ImageSource, name: str, expert: Expert) -> DueTask[Prepared | Rejected]:
        """What a batch has from now on, and soon asks for; see ``hurry``."""
        known = self._images.get(request)
        if known is None or known.task is None:
            return self._begin(_Image(image, name, _Wanted(expert)), expert, AT_ONCE)
        future = known.task.future
        if future.done() and (future.cancelled() or future.exception() is not None):
            known.task = self._begin(known, expert, AT_ONCE)  # there may be memory for it now
        known.is_taken = True
        return known.task

    def hurry(self, request: int) -> None:
        """A batch waits for its image: before everything that is only due some time."""
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
        """Nothing is held for a request any more but what a batch has of it."""
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
        """For how many requests something is held, or being prepared."""
        return len(self._images)

    @property
    def held_bytes(self) -> int:
        """Of images that are held for later steps, now."""
        return sum(image.held_bytes for image in self._images.values())

    def stop(self, timeout_s: float | None = None) -> bool:
        """End the threads, after what is in preparation; False if that took longer."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        has_ended = True
        for threads in (self._awaited, self._ahead, self._large):
            left_s = None if deadline_s is None else max(deadline_s - time.monotonic(), 0.0)
            has_ended &= threads.stop(left_s)
        return has_ended

    def _begin(self, image: _Image, expert: Expert, due_s: float) -> DueTask[Prepared | Rejected]:
        size_bytes = stored_bytes(image.source)
        is_crop = size_bytes is not None and size_bytes < LARGE_BYTES
        threads = self._awaited if due_s == AT_ONCE else self._ahead if is_crop else self._large
        return threads.submit(lambda answer: self._work(image, expert, answer), due_s, is_short=is_crop)

    def _work(self, image: _Image, expert: Expert, answer: Callable[[Prepared | Rejected], None]) -> None:
        """On one of the threads: first what is waited for, then what later steps need."""
        with image.at_work:
            try:
                with self._watching(image):
                    prepared, pixels = self._prepared(image, expert)
            except ImageError as error:
                answer(Rejected(str(error)))
            except MemoryError:
                raise
            except Exception as error:
                logger.exception("preparation_broke expert=%s image=%s", expert.id, image.name)
                told = f"{image.name}: cannot be prepared for {expert.id}: {type(error).__name__}: {error}"
                answer(Rejected(told))
            else:
                answer(prepared)
                self._hold(image, {form_name(expert): prepared}, pixels)
            image.let_go()

    def _watching(self, image: _Image) -> AbstractContextManager[object]:
        """Whoever watches knows of a batch's requests already, and is not to be waited for again."""
        return nullcontext() if image.request is None or image.is_taken else self.watch(image.request)

    def _prepared(self, image: _Image, expert: Expert) -> tuple[Prepared, Decoded | None]:
        """With the pixels, where it was made from them."""
        with image.changing:
            prepared, pixels = image.held.get(form_name(expert)), image.pixels
        if prepared is not None:
            return prepared, pixels
        least = self._least(expert)
        if pixels is None or not pixels.serves(least):
            pixels = decoded(image.source, image.name, self._max_pixels, self._gate.room_for, least)
        return prepare(expert, pixels), pixels

    def _least(self, expert: Expert) -> tuple[int, int] | None:
        """How many pixels are enough; None where all of them are to be had."""
        return least_pixels(expert) if expert.id in self.scaled else None

    def _hold(self, image: _Image, ready: dict[str, Prepared], pixels: Decoded | None) -> None:
        """What later steps need: the pixels, or what they become for these. Where that breaks, a later step tells."""
        wanted = image.wanted
        if wanted is None or not wanted.later:
            return
        if pixels is not None and (pixels.pixels is image.source or pixels.pixels.nbytes <= wanted.later_bytes):
            with image.changing:
                image.pixels = pixels
            return
        with nullcontext() if image.request is None else self.watch(image.request):  # its batch may be over meanwhile
            for form, expert in wanted.later_forms.items():
                prepared = ready.get(form)
                if prepared is None and pixels is not None and form not in image.held:
                    prepared = prepare(expert, pixels) if pixels.serves(self._least(expert)) else None
                if prepared is not None:
                    with image.changing:
                        image.held[form] = prepared
        with image.changing:
            image.pixels = None


def least_pixels(expert: Expert) -> tuple[int, int]:
    """Height and width that are enough for an expert, where it may have JPEGs smaller."""
    return MARGIN * expert.pixels.height, MARGIN * expert.pixels.width


def prepare(expert: Expert, image: Decoded) -> Prepared:
    """An image as its expert wants it; scales lead back to the file's pixels, however it was decoded."""
    prepared = backend_for(expert.architecture).prepare(expert, image.pixels)
    if image.reduction == 1:
        return prepared
    height, width = image.pixels.shape[:2]
    return replace(
        prepared,
        image_height=image.height,
        image_width=image.width,
        scale_x=prepared.scale_x * width / image.width,
        scale_y=prepared.scale_y * height / image.height,
    )


def form_name(expert: Expert) -> str:
    """What its images become: experts with the same name for it share them."""
    form = prepared_form(expert)
    return expert.id if form is None else form.name
