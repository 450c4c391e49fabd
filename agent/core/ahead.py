"""PreparedAhead: whose images are decoded and normalised before their batches start, and in which order.

Preparing begins when a request is queued, in the order in which batches will run: in each queue's order, and across the
queues by predicted start; as far as ``Limits.prepared_bytes`` reaches, which is what queued requests hold prepared, and
what any request holds for later steps of its route; a batch that is held behind another one still counts. What runs is
the batch's own.

The first batch of every queue is *near*, everything behind it *far*. Whoever is far leaves a quarter of the room to the
near ones. One that is near and still finds none takes it: first of what is held for later steps, the oldest first, then
of whoever starts last. So nothing that is decoded is thrown away for one that is not about to run.

Guarantees: the budget is never exceeded; whoever is in a batch of images had Prepare before it started, and no second
one for the same step but to hold less, or after Forget; what a request held is nobody's once it has its outcome, and
what it does not need for the rest of its route is let go of when a step ends. An image that a later step needs is held
for it, as far as there is room, so that it is decoded once. O(queues) an event and O(log n) a request.
Assumes: the shell lets go of what it holds for a request at Forget, Complete and Fail by itself; what runs in quanta or
in the background is not told of here.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from operator import attrgetter
from typing import TYPE_CHECKING

from agent.core.effects import Forget, Prepare

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from agent.core.effects import Effect
    from agent.core.performance import Limits, PreparedForm
    from agent.core.queue import ExecutorQueue, Group

FAR_SHARE = 0.75  # of the budget, at most, for requests of which others run first; arbitrary
LATER_SHARE = 0.125  # of the budget, at most, for the later steps of one request; arbitrary, too


@dataclass(frozen=True, slots=True)
class PreparedStatistics:
    """Images prepared ahead: bytes held now, and counts since the start.

    ``begun_late``: a batch started with them. ``displaced``: they gave their room to others.
    """

    budget_bytes: int = 0
    used_bytes: int = 0
    later_bytes: int = 0
    begun_ahead: int = 0
    begun_late: int = 0
    displaced: int = 0
    displaced_later: int = 0


NOTHING_PREPARED = PreparedStatistics()


@dataclass(frozen=True, slots=True)
class Later:
    """Experts that may still come on a route: one for each form that an image would be needed in, with its bytes."""

    experts: tuple[str, ...] = ()
    forms: Mapping[str, int] = field(default_factory=dict)
    size_bytes: int = 0  # what all of these forms take


NOTHING_LATER = Later()


@dataclass(slots=True, eq=False)
class _Place:
    """A group's images: those that wait to be begun, and those that are, each in the order in which they run."""

    group: Group
    line: _Line
    due_s: float  # when its next batch is predicted to start
    waiting: OrderedDict[int, None] = field(default_factory=OrderedDict)
    begun: OrderedDict[int, None] = field(default_factory=OrderedDict)
    is_listed: bool = False  # in its line's heap

    @property
    def order(self) -> int:
        return self.group.order

    @property
    def next_due_s(self) -> float:
        return self.due_s + self.group.profile.performance.K_s * len(self.begun)

    @property
    def is_near(self) -> bool:
        return self.group is self.line.queue.front and len(self.begun) < self.group.profile.performance.max_batch

    def runs_behind(self, due_s: float, begun: int) -> bool:
        """Would the last of so many that are begun run after that, and in no first batch?"""
        performance = self.group.profile.performance
        is_in_first_batch = self.group is self.line.queue.front and begun <= performance.max_batch
        return self.due_s + performance.K_s * begun > due_s and not is_in_first_batch


@dataclass(slots=True, eq=False)
class _Line:
    """One queue: its places with somebody who waits to be begun, as a heap, and with somebody who is, in order."""

    queue: ExecutorQueue
    waiting: list[tuple[int, int, _Place]] = field(default_factory=list)
    begun: list[_Place] = field(default_factory=list)

    def first_waiting(self) -> _Place | None:
        while self.waiting:
            place = self.waiting[0][2]
            if place.waiting:
                return place
            place.is_listed = False
            heappop(self.waiting)
        return None


@dataclass(slots=True)
class _Image:
    """What is held for a request, and where it stands.

    ``own_bytes`` count while it is queued; ``later``, which may have its own form, for as long as it is in flight.
    ``wanted``: what is to be held for later steps, where there is room. ``form``: what it was begun for, None where it
    was not. ``place``: None once it is in a batch.
    """

    expert: str
    wanted: Later
    place: _Place | None = None
    is_held: bool = False  # in a batch behind the one that runs
    form: str | None = None
    own_bytes: int = 0
    later: Later = NOTHING_LATER

    @property
    def size_bytes(self) -> int:
        return self.own_bytes + self.later.size_bytes

    @property
    def spare_bytes(self) -> int:
        if self.is_held:
            return 0
        if self.place is None:
            return self.size_bytes
        return self.size_bytes - (self.own_bytes or self.later.forms.get(self.form or "", 0))

    def holds(self, form: PreparedForm) -> bool:
        """Is it prepared in this form, or can it be without being decoded again?"""
        return self.form == form.name or form.name in self.later.forms


class PreparedAhead:
    """Of one Engine. Every method that has ``effects`` appends what the shell is to be told."""

    def __init__(self, queues: Sequence[ExecutorQueue], limits: Limits) -> None:
        self._lines = {queue.spec.id: _Line(queue) for queue in queues}
        self._budget_bytes = limits.prepared_bytes
        self._far_bytes = int(limits.prepared_bytes * FAR_SHARE)
        self._used_bytes = self._later_bytes = 0
        self._images: dict[int, _Image] = {}
        self._places: dict[Group, _Place] = {}
        self._holding_later: OrderedDict[int, None] = OrderedDict()  # the oldest first
        self._number = count()
        self._has_changed = False
        self._begun_ahead = self._begun_late = self._displaced = self._displaced_later = 0

    @property
    def is_on(self) -> bool:
        return self._budget_bytes > 0

    def fitting(self, later: Later) -> Later:
        return later if later.size_bytes <= self._budget_bytes * LATER_SHARE else NOTHING_LATER

    # -- what becomes of requests --

    def queued(
        self, request: int, queue: ExecutorQueue, group: Group, later: Later, now: float, effects: list[Effect]
    ) -> None:
        form, image = group.profile.prepared, self._images.get(request)
        if form is None or form.size_bytes > self._budget_bytes:
            self._forget(request, effects)
            return
        place = self._place_of(group, queue, now)
        if image is not None and image.holds(form) and self._goes_on(request, image, place, later):
            if (image.expert, image.wanted) != (group.expert, later):
                image.expert, image.wanted = group.expert, later
                effects.append(self._prepare(request, image, place, place.next_due_s))
            self._list_begun(request, place)
        else:
            if image is not None:
                self._forget(request, effects)
            self._images[request] = _Image(group.expert, later, place)
            self._wait(request, place)
            least_bytes = form.size_bytes if later is NOTHING_LATER else later.size_bytes
            if self._used_bytes + least_bytes <= self._far_bytes or place.is_near:
                self._has_changed = True

    def left(self, request: int) -> None:
        image = self._images.get(request)
        if image is not None and image.place is not None:
            self._leave(request, image)

    def started(self, requests: Iterable[int], now: float, effects: list[Effect]) -> None:
        """Requests run from now on: what each of them needs for that is the batch's own. To be called first."""
        for request in requests:
            image = self._images.get(request)
            if image is None:
                continue
            place = image.place
            assert place is not None, "it was queued"
            form = place.group.profile.prepared
            assert form is not None, "it stands in a place"
            self._leave(request, image)
            if image.form is None:
                self._begun_late += 1
                has_room = self._used_bytes + image.wanted.size_bytes <= self._budget_bytes
                self._hold(request, image, form.name, 0, image.wanted if has_room else NOTHING_LATER)
                effects.append(self._prepare(request, image, place, now))
            else:
                self._hold(request, image, image.form, 0, image.later)
            place.due_s = place.line.queue.next_start_s(now)  # the others run after this batch
        self._has_changed = True

    def are_begun(self, requests: Iterable[int]) -> bool:
        images = (self._images.get(request) for request in requests)
        return all(image is not None and image.form is not None for image in images)

    def held(self, requests: Iterable[int], now: float) -> None:
        for request in requests:
            image = self._images[request]
            place = image.place
            assert place is not None, "it was queued"
            assert image.form is not None, "it is begun"
            self._leave(request, image)
            image.is_held = True
            self._hold(request, image, image.form, image.own_bytes, image.later)
            place.due_s = place.line.queue.next_start_s(now)
        self._has_changed = True

    def run(self, requests: Iterable[int]) -> None:
        for request in requests:
            image = self._images[request]
            assert image.form is not None, "nothing was taken from it"
            image.is_held = False
            self._hold(request, image, image.form, 0, image.later)
        self._has_changed = True

    def ended(self, request: int) -> None:
        """A request has its outcome, which tells the shell enough."""
        image = self._images.pop(request, None)
        if image is not None:
            if image.place is not None:
                self._leave(request, image)
            self._release(request, image)

    def advance(self, effects: list[Effect]) -> None:
        while self._has_changed:  # again where room was made for one that is near, and more of it than that took
            self._has_changed = False
            self._begin_all(effects)

    def _begin_all(self, effects: list[Effect]) -> None:
        firsts = [
            (place.next_due_s, number, place)
            for number, line in self._lines.items()
            if (place := line.first_waiting()) is not None
        ]
        heapify(firsts)
        while firsts:
            due_s, number, place = firsts[0]
            following = self._lines[number].first_waiting() if self._begin(place, due_s, effects) else None
            if following is None:
                heappop(firsts)
            else:
                heapreplace(firsts, (following.next_due_s, number, following))

    def statistics(self) -> PreparedStatistics:
        return PreparedStatistics(
            self._budget_bytes,
            self._used_bytes,
            self._later_bytes,
            self._begun_ahead,
            self._begun_late,
            self._displaced,
            self._displaced_later,
        )

    def check_invariants(self, in_flight: Iterable[int]) -> None:
        images = self._images
        assert images.keys() <= set(in_flight), "something is held for a request that has its outcome"
        assert self._used_bytes == sum(image.size_bytes for image in images.values()), "prepared bytes miscounted"
        assert self._later_bytes == sum(image.later.size_bytes for image in images.values()), "later bytes miscounted"
        assert 0 <= self._used_bytes <= self._budget_bytes, "more is prepared than there is room for"
        assert self._holding_later.keys() == {r for r, each in images.items() if each.spare_bytes}, "spare miscounted"
        for request, image in images.items():
            place = image.place
            if place is None:
                assert image.is_held or image.own_bytes == 0, f"request {request} runs, and counts as prepared ahead"
                continue
            assert self._places[place.group] is place, "a place is lost"
            assert request in place.group.requests, f"request {request} stands where it is not queued"
            assert (request in place.waiting) == (image.form is None), f"request {request} waits and is begun"
            assert (request in place.begun) == (image.form is not None), f"request {request} is not listed"
        for line in self._lines.values():
            here = [place for place in self._places.values() if place.line is line]
            listed = sorted((place for place in here if place.begun), key=attrgetter("order"))
            assert line.begun == listed, "places with somebody who is begun are miscounted"
            assert all(place.is_listed for place in here if place.waiting), "a place that waits is not listed"
            assert all(place.waiting or place.begun for place in here), "an empty place is kept"

    # -- room --

    def _begin(self, place: _Place, due_s: float, effects: list[Effect]) -> bool:
        """Begin the next one of a place; False where it finds no room."""
        request = next(iter(place.waiting))
        image, form = self._images[request], place.group.profile.prepared
        assert form is not None, "it waits to be prepared"
        own_bytes = _own_bytes(form, image.wanted)
        if place.is_near:
            later = image.wanted
            if self._used_bytes + own_bytes + later.size_bytes > self._budget_bytes:
                own_bytes, later = form.size_bytes, NOTHING_LATER
            if not self._make_room(own_bytes, place, effects):
                return False
        else:
            later = image.wanted if own_bytes + image.wanted.size_bytes <= self._far_bytes else NOTHING_LATER
            own_bytes = _own_bytes(form, later)
            if self._used_bytes + own_bytes + later.size_bytes > self._far_bytes:
                return False
        del place.waiting[request]
        self._list_begun(request, place)
        self._hold(request, image, form.name, own_bytes, later)
        self._begun_ahead += 1
        effects.append(self._prepare(request, image, place, due_s))
        return True

    def _make_room(self, size_bytes: int, place: _Place, effects: list[Effect]) -> bool:
        """Make room for a near image: from what later steps hold, then from far images. False changes nothing."""
        if not self._can_make_room(size_bytes, place):
            return False
        while self._used_bytes + size_bytes > self._budget_bytes:
            if self._holding_later:
                self._give_up_later(next(iter(self._holding_later)), effects)
            else:
                self._displace(place, effects)
        return True

    def _can_make_room(self, size_bytes: int, place: _Place) -> bool:
        lacking_bytes = self._used_bytes + size_bytes - self._budget_bytes
        if lacking_bytes <= 0:
            return True
        lacking_bytes -= sum(self._images[request].spare_bytes for request in self._holding_later)
        for line in self._lines.values():
            for request in _behind(line, place.next_due_s):
                if lacking_bytes <= 0:
                    return True
                lacking_bytes -= self._images[request].size_bytes - self._images[request].spare_bytes
        return lacking_bytes <= 0

    def _give_up_later(self, request: int, effects: list[Effect]) -> None:
        image = self._images[request]
        self._displaced_later += 1
        if image.place is None:
            self._release(request, image)
            effects.append(Forget(request))
            return
        form = image.place.group.profile.prepared
        assert form is not None, "it is prepared"
        self._hold(request, image, form.name, form.size_bytes, NOTHING_LATER)
        effects.append(self._prepare(request, image, image.place, image.place.due_s))

    def _displace(self, place: _Place, effects: list[Effect]) -> None:
        """The far image that is predicted to start last gives up its room; the caller knows that there is one."""
        lasts = [line.begun[-1] for line in self._lines.values() if line.begun]
        far = [each for each in lasts if each.runs_behind(place.next_due_s, len(each.begun))]
        last = max(far, key=attrgetter("next_due_s"))
        request = next(reversed(last.begun))
        self._displaced += 1
        self._take_off_begun(request, last)
        self._release(request, self._images[request])
        self._wait(request, last)
        last.waiting.move_to_end(request, last=False)
        effects.append(Forget(request))

    def _goes_on(self, request: int, image: _Image, place: _Place, later: Later) -> bool:
        """Can what is held for a request serve it where it is queued now? The rest of what is held is released."""
        form = place.group.profile.prepared
        assert form is not None, "it holds something for that"
        kept = later if later.forms.keys() <= image.later.forms.keys() else NOTHING_LATER
        own_bytes = _own_bytes(form, kept)
        if self._used_bytes - image.size_bytes + own_bytes + kept.size_bytes > self._budget_bytes:
            return False
        image.place = place
        self._hold(request, image, form.name, own_bytes, kept)
        return True

    def _hold(self, request: int, image: _Image, form: str, own_bytes: int, later: Later) -> None:
        more_bytes = own_bytes + later.size_bytes - image.size_bytes
        self._used_bytes += more_bytes
        self._has_changed |= more_bytes < 0
        self._later_bytes += later.size_bytes - image.later.size_bytes
        image.form, image.own_bytes, image.later = form, own_bytes, later
        if image.spare_bytes:
            self._holding_later.setdefault(request)
        else:
            self._holding_later.pop(request, None)

    def _release(self, request: int, image: _Image) -> None:
        self._hold(request, image, "", 0, NOTHING_LATER)
        image.form = None
        self._has_changed = True

    def _forget(self, request: int, effects: list[Effect]) -> None:
        image = self._images.pop(request, None)
        if image is not None and image.form is not None:
            self._release(request, image)
            effects.append(Forget(request))

    # -- places --

    def _place_of(self, group: Group, queue: ExecutorQueue, now: float) -> _Place:
        place = self._places.get(group)
        if place is None:
            place = _Place(group, self._lines[queue.spec.id], self._predicted_s(group, queue, now))
            self._places[group] = place
        return place

    def _wait(self, request: int, place: _Place) -> None:
        place.waiting[request] = None
        if not place.is_listed:
            place.is_listed = True
            heappush(place.line.waiting, (place.order, next(self._number), place))

    def _list_begun(self, request: int, place: _Place) -> None:
        if not place.begun:
            insort(place.line.begun, place, key=attrgetter("order"))
        place.begun[request] = None

    def _take_off_begun(self, request: int, place: _Place) -> None:
        del place.begun[request]
        if not place.begun:
            listed = place.line.begun
            del listed[bisect_left(listed, place.order, key=attrgetter("order"))]

    def _leave(self, request: int, image: _Image) -> None:
        place, image.place = image.place, None
        assert place is not None, "it was queued"
        if request in place.begun:
            self._take_off_begun(request, place)
        else:
            del place.waiting[request]
        if not (place.waiting or place.begun):
            del self._places[place.group]

    def _prepare(self, request: int, image: _Image, place: _Place, due_s: float) -> Prepare:
        executor = place.line.queue.spec.id
        return Prepare(request, image.expert, image.later.experts, image.later.size_bytes, due_s, executor)

    def _predicted_s(self, group: Group, queue: ExecutorQueue, now: float) -> float:
        """When a group's first batch starts: behind the group before it, where that was predicted, too."""
        before = group.previous
        if before is None:
            return queue.next_start_s(now)
        earlier = self._places.get(before)
        if earlier is None:
            return max(group.starts_s, now)
        performance = before.profile.performance
        return earlier.due_s + performance.B_s + performance.K_s * len(before.requests)


def _behind(line: _Line, due_s: float) -> Iterator[int]:
    """Whoever is begun there and runs after that moment, the last first; nobody of the first batch."""
    for place in reversed(line.begun):
        for begun, request in zip(range(len(place.begun), 0, -1), reversed(place.begun), strict=True):
            if not place.runs_behind(due_s, begun):
                return
            yield request


def _own_bytes(form: PreparedForm, later: Later) -> int:
    """What being prepared takes beside what is held for later steps: nothing where one of these has the same form."""
    return 0 if form.name in later.forms else form.size_bytes
