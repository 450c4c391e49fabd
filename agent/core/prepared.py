"""PreparedImages: order in which images are decoded and normalised before their batches start.

Preparation begins when a request is queued, in order of predicted start, within a budget for each worker. The budget
covers images of queued requests, of batches queued ahead, and forms kept for later steps of a route. The first batch of
every queue is *near*, all others *far*; far images leave a quarter of the budget to near ones.

Example: A goes to a and then to c, B to b; c takes images of another size.

    A and B come    prepare A for a, B for b       in the order of their predicted starts
    a has run       forget A's, prepare A for c    c needs what a did not

Guarantees: no budget is exceeded. Each request in a batch of images had Prepare before that batch started; a batch
itself prepares a request that ran on a lost executor. A second Prepare for a step only keeps less, or follows a Forget.
A request's bytes are free once it has its outcome; forms that the rest of its route does not need are released when a
step ends. O(queues) per event and O(log n) per request. Assumes: at Forget, Complete and Fail the shell releases a
request's images; texts are not reported here.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from typing import TYPE_CHECKING

from agent.core.effects import Forget, Prepare

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from agent.core.effects import Effect
    from agent.core.performance import PerformanceMatrix, PreparedForm
    from agent.core.queue import ExecutorQueue, Group
    from agent.core.request import Batch
    from experts.graph import ExpertGraph

FAR_SHARE = 0.75  # of the budget, at most, for requests behind the first batches; arbitrary
LATER_FORMS_SHARE = 0.125  # of the budget, at most, for the later steps of one request; arbitrary


@dataclass(frozen=True, slots=True)
class PreparedStatistics:
    """Images prepared ahead: bytes now, and counts since the start. ``begun_late``: not before the batch started.

    Bytes are of all workers.
    """

    budget_bytes: int = 0
    used_bytes: int = 0
    later_bytes: int = 0
    begun_ahead: int = 0
    begun_late: int = 0


@dataclass(frozen=True, slots=True)
class LaterForms:
    """Experts that may follow on a route: one for each form that the image may need, with its bytes."""

    experts: tuple[str, ...] = ()
    forms: Mapping[str, int] = field(default_factory=dict)
    size_bytes: int = 0  # of all of these forms


NO_LATER_FORMS = LaterForms()


@dataclass(slots=True, eq=False)
class _Place:
    """Images of a group: ``waiting`` in the order they run, and the number ``begun``."""

    group: Group
    queue: ExecutorQueue
    due_s: float  # predicted start of its next batch
    waiting: OrderedDict[int, None] = field(default_factory=OrderedDict)
    begun: int = 0
    is_listed: bool = False  # in its queue's heap

    @property
    def next_due_s(self) -> float:
        return self.due_s + self.group.profile.performance.K_s * self.begun

    @property
    def is_near(self) -> bool:
        return self.group is self.queue.front and self.begun < self.group.profile.performance.max_batch

    @property
    def form(self) -> PreparedForm:
        form = self.group.profile.prepared
        assert form is not None  # a place is made for a form
        return form


@dataclass(slots=True)
class _Image:
    """Prepared forms of a request's image, at one worker.

    ``form_bytes`` count while the request is queued, ``later`` while it is in flight. ``wanted``: forms to keep for
    later steps if there is room. ``form``: the begun form, or None. ``place``: None in a batch.
    """

    expert: str
    wanted: LaterForms
    worker: str
    place: _Place | None = None
    form: str | None = None
    form_bytes: int = 0
    later: LaterForms = NO_LATER_FORMS

    @property
    def size_bytes(self) -> int:
        return self.form_bytes + self.later.size_bytes

    def gives(self, form: PreparedForm) -> bool:
        """True if the form exists, or can be made without a second decoding."""
        return self.form == form.name or form.name in self.later.forms


class PreparedImages:
    """Images of one Engine. Methods append to ``effects``."""

    def __init__(self, budget_bytes: int) -> None:
        self._queues_at: Mapping[str, Sequence[ExecutorQueue]] = {}  # by worker
        self._waiting: defaultdict[int, list[tuple[int, int, _Place]]] = defaultdict(list)  # executor -> heap
        self._budget_bytes = budget_bytes
        self._far_bytes = int(budget_bytes * FAR_SHARE)
        self._used_bytes = Counter[str]()  # by worker
        self._later_bytes = 0
        self._images: dict[int, _Image] = {}
        self._places: dict[Group, _Place] = {}
        self._number = count()
        self._changed: set[str] = set()  # workers with new images, or new room
        self._begun_ahead = self._begun_late = 0

    def connect(self, queues_at: Mapping[str, Sequence[ExecutorQueue]]) -> None:
        """Know the queues of each worker. Lost executors have no images left."""
        self._queues_at = queues_at

    @property
    def is_on(self) -> bool:
        return self._budget_bytes > 0

    def later_forms(self, matrix: PerformanceMatrix, graph: ExpertGraph, component: str, step: int) -> LaterForms:
        """Forms of an image for later steps of its route; NO_LATER_FORMS beyond their share of the budget."""
        columns, forms = matrix.experts.values(), {}
        experts: list[str] = []
        for expert in graph.experts_after(component, step):
            row = next((column[expert] for column in columns if expert in column), None)
            if row is not None and row.prepared is not None and row.prepared.name not in forms:
                forms[row.prepared.name] = row.prepared.size_bytes
                experts.append(expert)
        size_bytes = sum(forms.values())
        if not experts or size_bytes > self._budget_bytes * LATER_FORMS_SHARE:
            return NO_LATER_FORMS
        return LaterForms(tuple(experts), forms, size_bytes)

    # -- lifecycle of a request --

    def queued(
        self, request: int, group: Group, later: LaterForms, queue: ExecutorQueue, now: float, effects: list[Effect]
    ) -> None:
        worker = queue.spec.worker
        form, image = group.profile.prepared, self._images.get(request)
        if image is not None and image.worker != worker:
            self.forget(request, effects)
            image = None
        if form is None or form.size_bytes > self._budget_bytes:
            self.forget(request, effects)
            return
        place = self._places.get(group)
        if place is None:
            place = self._places[group] = _Place(group, queue, self._predicted_s(group, queue, now))
        if image is not None and image.gives(form) and self._reuse(image, place, later):
            if (image.expert, image.wanted) != (group.expert, later):
                image.expert, image.wanted = group.expert, later
                effects.append(self._prepare(request, image, place, place.next_due_s))
            place.begun += 1
        else:
            if image is not None:
                self.forget(request, effects)
            self._images[request] = _Image(group.expert, later, worker, place)
            place.waiting[request] = None
            if not place.is_listed:
                place.is_listed = True
                heappush(self._waiting[queue.spec.id], (group.order, next(self._number), place))
            least_bytes = form.size_bytes if later is NO_LATER_FORMS else later.size_bytes
            if self._used_bytes[worker] + least_bytes <= self._far_bytes or place.is_near:
                self._changed.add(worker)

    def left(self, request: int) -> None:
        image = self._images.get(request)
        if image is not None and image.place is not None:
            self._leave(request, image)

    def started(self, batch: Batch, now: float, effects: list[Effect]) -> None:
        """A batch starts: its requests' own forms leave the budget. Prepares images that are not begun."""
        for request in batch.requests:
            image = self._images.get(request)
            if image is None:
                continue
            place = self._leave(request, image)
            if image.form is None:
                self._begun_late += 1
                has_room = self._used_bytes[image.worker] + image.wanted.size_bytes <= self._budget_bytes
                self._keep(image, place.form.name, 0, image.wanted if has_room else NO_LATER_FORMS)
                effects.append(self._prepare(request, image, place, now))
            else:
                self._keep(image, image.form, 0, image.later)
            place.due_s = place.queue.next_start_s(now)  # the others run after this batch
            self._changed.add(image.worker)

    def are_begun(self, requests: Iterable[int]) -> bool:
        images = (self._images.get(request) for request in requests)
        return all(image is not None and image.form is not None for image in images)

    def queued_ahead(self, batch: Batch, now: float) -> None:
        """A batch is queued behind the running one; its images still count."""
        for request in batch.requests:
            place = self._leave(request, self._images[request])
            place.due_s = place.queue.next_start_s(now)
            self._changed.add(place.queue.spec.worker)

    def run(self, batch: Batch) -> None:
        """A batch that was queued ahead starts."""
        for request in batch.requests:
            image = self._images[request]
            assert image.form is not None  # a batch is queued ahead once its images are begun
            self._keep(image, image.form, 0, image.later)
            self._changed.add(image.worker)

    def ended(self, request: int) -> None:
        """A request has its outcome; the shell releases its image."""
        image = self._images.pop(request, None)
        if image is not None:
            assert image.place is None  # a queued request leaves its queue before it ends
            self._release(image)

    def advance(self, effects: list[Effect]) -> None:
        """Begin images in order of predicted start, while there is room."""
        for worker in sorted(self._changed) if len(self._changed) > 1 else tuple(self._changed):
            self._advance([queue.spec.id for queue in self._queues_at.get(worker, ())], effects)
        self._changed.clear()

    def _advance(self, executors: Sequence[int], effects: list[Effect]) -> None:
        waiting = ((self._first_waiting(executor), executor) for executor in executors)
        firsts = [(place.next_due_s, executor, place) for place, executor in waiting if place is not None]
        heapify(firsts)
        while firsts:
            due_s, executor, place = firsts[0]
            following = self._first_waiting(executor) if self._begin(place, due_s, effects) else None
            if following is None:
                heappop(firsts)
            else:
                heapreplace(firsts, (following.next_due_s, executor, following))

    def statistics(self) -> PreparedStatistics:
        return PreparedStatistics(
            self._budget_bytes * len(self._queues_at), self._used_bytes.total(), self._later_bytes,
            self._begun_ahead, self._begun_late,
        )  # fmt: skip

    def check_invariants(self, in_flight: Collection[int], ahead: Collection[int]) -> None:
        """``ahead``: requests in batches that are queued ahead."""
        images = self._images
        assert images.keys() <= set(in_flight), "an image is kept for a request that has its outcome"
        used_bytes = Counter[str]()
        for image in images.values():
            used_bytes[image.worker] += image.size_bytes
        assert +self._used_bytes == +used_bytes, "prepared bytes miscounted"
        assert self._later_bytes == sum(image.later.size_bytes for image in images.values()), "later bytes miscounted"
        assert all(0 <= each <= self._budget_bytes for each in used_bytes.values()), "more is prepared than has room"
        for request, image in images.items():
            place = image.place
            if place is None:
                assert request in ahead or image.form_bytes == 0, (
                    f"request {request} runs, and counts as prepared ahead"
                )
                continue
            assert self._places[place.group] is place, "a place is lost"
            assert request in place.group.requests, f"request {request} stands where it is not queued"
            assert (request in place.waiting) == (image.form is None), f"request {request} waits and is begun"
        for place in self._places.values():
            begun = [each for each in images.values() if each.place is place and each.form is not None]
            assert place.begun == len(begun), "begun images are miscounted"
            assert place.is_listed or not place.waiting, "a place with waiting images is not listed"
            assert place.waiting or place.begun, "an empty place is kept"

    # -- room --

    def _begin(self, place: _Place, due_s: float, effects: list[Effect]) -> bool:
        """Begin a place's next image; False without room."""
        request = next(iter(place.waiting))
        image, form = self._images[request], place.form
        most_bytes = self._budget_bytes if place.is_near else self._far_bytes
        later = image.wanted
        form_bytes, used_bytes = _form_bytes(form, later), self._used_bytes[image.worker]
        free_bytes = most_bytes - used_bytes if place.is_near else most_bytes
        if form_bytes + later.size_bytes > free_bytes:  # a far image waits for room for both, unless they never fit
            form_bytes, later = form.size_bytes, NO_LATER_FORMS
        if used_bytes + form_bytes + later.size_bytes > most_bytes:
            return False
        del place.waiting[request]
        place.begun += 1
        self._keep(image, form.name, form_bytes, later)
        self._begun_ahead += 1
        effects.append(self._prepare(request, image, place, due_s))
        return True

    def _reuse(self, image: _Image, place: _Place, later: LaterForms) -> bool:
        """Reuse a request's forms for its present step, and release the others; False without room."""
        form = place.form
        kept = later if later.forms.keys() <= image.later.forms.keys() else NO_LATER_FORMS
        form_bytes = _form_bytes(form, kept)
        if self._used_bytes[image.worker] - image.size_bytes + form_bytes + kept.size_bytes > self._budget_bytes:
            return False
        image.place = place
        self._keep(image, form.name, form_bytes, kept)
        return True

    def _keep(self, image: _Image, form: str | None, form_bytes: int, later: LaterForms) -> None:
        more_bytes = form_bytes + later.size_bytes - image.size_bytes
        self._used_bytes[image.worker] += more_bytes
        if more_bytes < 0:
            self._changed.add(image.worker)
        self._later_bytes += later.size_bytes - image.later.size_bytes
        image.form, image.form_bytes, image.later = form, form_bytes, later

    def _release(self, image: _Image) -> None:
        self._keep(image, None, 0, NO_LATER_FORMS)
        self._changed.add(image.worker)

    def forget(self, request: int, effects: list[Effect]) -> None:
        """Release the image of a request that is in no queue."""
        image = self._images.pop(request, None)
        if image is not None and image.form is not None:
            self._release(image)
            effects.append(Forget(request, image.worker))

    # -- places --

    def _first_waiting(self, executor: int) -> _Place | None:
        heap = self._waiting[executor]
        while heap:
            place = heap[0][2]
            if place.waiting:
                return place
            place.is_listed = False
            heappop(heap)
        return None

    def _leave(self, request: int, image: _Image) -> _Place:
        place, image.place = image.place, None
        assert place is not None  # a request of a new batch was queued
        if request in place.waiting:
            del place.waiting[request]
        else:
            place.begun -= 1
        if not (place.waiting or place.begun):
            del self._places[place.group]
        return place

    def _prepare(self, request: int, image: _Image, place: _Place, due_s: float) -> Prepare:
        later, executor = image.later, place.queue.spec.id
        return Prepare(request, image.expert, later.experts, later.size_bytes, due_s, executor)

    def _predicted_s(self, group: Group, queue: ExecutorQueue, now: float) -> float:
        """Predicted start of a group's first batch, after the group before it if that has a prediction."""
        before = group.previous
        if before is None:
            return queue.next_start_s(now)
        earlier = self._places.get(before)
        if earlier is None:
            return max(group.starts_s, now)
        performance = before.profile.performance
        return earlier.due_s + performance.B_s + performance.K_s * len(before.requests)


def _form_bytes(form: PreparedForm, later: LaterForms) -> int:
    """Bytes in addition to those for later steps: none if a later step needs this form."""
    return 0 if form.name in later.forms else form.size_bytes
