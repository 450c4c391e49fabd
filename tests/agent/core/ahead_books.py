"""Books of a shell's prepared images, kept from the Engine's effects, which check the Engine's promises."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agent.core.effects import Assigned, Complete, Fail, Forget, Prepare, StartBatch
from agent.core.prepared import FAR_SHARE

if TYPE_CHECKING:
    from agent.core.performance import PreparedForm


@dataclass
class AheadBooks:
    """Books of one Engine. ``images``: the requests that have one."""

    budget_bytes: int
    images: set[int] = field(default_factory=set)
    queued: dict[int, str] = field(default_factory=dict)  # request -> expert
    told: dict[int, Prepare] = field(default_factory=dict)  # request -> the latest
    held: dict[int, set[str]] = field(default_factory=dict)  # request -> forms that need no decoding
    forms: dict[str, PreparedForm | None] = field(default_factory=dict)  # of every expert there ever was
    behind: set[int] = field(default_factory=set)  # requests in batches that are held behind others
    decoded: int = 0

    def know(self, matrix):
        for column in matrix.experts.values():
            self.forms.update((expert, row.prepared) for expert, row in column.items())

    def take(self, effect):
        if isinstance(effect, Prepare):
            self.prepare(effect)
        elif isinstance(effect, Forget):
            del self.told[effect.request], self.held[effect.request]
        elif isinstance(effect, Assigned):
            self.queued[effect.request] = effect.expert
        elif isinstance(effect, Complete | Fail):
            for book in (self.told, self.held, self.queued):
                book.pop(effect.request, None)
        elif isinstance(effect, StartBatch):
            self.start(effect.batch)

    def prepare(self, effect):
        """A begun image is decoded no second time unless it was forgotten."""
        assert self.budget_bytes
        assert effect.request in self.images
        assert self.queued[effect.request] == effect.expert
        own, later = self.form(effect.expert), [self.form(expert) for expert in effect.later]
        assert effect.later_bytes == sum(form.size_bytes for form in later)
        forms = {own.name, *(form.name for form in later)}
        assert len({form.name for form in later}) == len(later)
        if effect.request in self.held:
            assert forms <= self.held[effect.request]
        else:
            self.decoded += 1
        self.told[effect.request], self.held[effect.request] = effect, forms

    def start(self, batch):
        """Each image of a batch was begun."""
        for request in batch.requests:
            expert = self.queued.pop(request, None)
            form = self.forms.get(expert)
            if request in self.images and form is not None and 0 < form.size_bytes <= self.budget_bytes:
                assert self.told[request].expert == batch.expert == expert

    def hold(self, batch):
        self.behind.update(batch.requests)

    def run(self, batch):
        self.behind.difference_update(batch.requests)

    def give_back(self, request, expert):
        self.queued[request] = expert

    def check(self, used_bytes, graph, lines):
        """After an event. ``lines``: the requests of each queue whose routes are this graph's."""
        for request, told in self.told.items():
            assert told.expert == self.queued.get(request, told.expert), "held for a step that is over"
        held_bytes = sum(self.counted(request) for request in self.told)
        assert held_bytes == used_bytes <= self.budget_bytes
        for line in lines.values():
            waiting = [request for request in line if self.could_be_begun(request)]
            least_bytes = FAR_SHARE * self.budget_bytes - held_bytes
            assert not waiting or any(self.most_needed(request, graph) > least_bytes for request in waiting)

    def could_be_begun(self, request):
        form = self.forms[self.queued[request]]
        return request in self.images and form is not None and request not in self.told and self.fits(form)

    def fits(self, form):
        return form.size_bytes <= self.budget_bytes

    def most_needed(self, request, graph):
        """Bytes with all that may follow on any route."""
        expert = self.queued[request]
        after = set(graph.subsequents(expert)).union(*(graph.subsequents(each) for each in graph.subsequents(expert)))
        later = {form.name: form.size_bytes for each in after if (form := self.forms.get(each)) is not None}
        return self.form(expert).size_bytes + sum(later.values())

    def counted(self, request):
        """Bytes of a request that count: in a queue all of them, in a batch those for later steps."""
        told = self.told[request]
        sizes = {self.form(expert).name: self.form(expert).size_bytes for expert in told.later}
        own = self.form(told.expert)
        if (request in self.queued or request in self.behind) and own.name not in sizes:
            return told.later_bytes + own.size_bytes
        return told.later_bytes

    def form(self, expert):
        form = self.forms[expert]
        assert form is not None
        return form
