"""ExecutorQueue against a plain list of groups: order, first groups, and predicted length."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.performance import ExecutorSpec, ExpertProfile, Footprint, Performance
from agent.core.queue import ExecutorQueue
from tests.agent.core.worlds import histories


def row(expert, K_s=1.0, B_s=4.0, **more):
    performance = Performance(K_s, B_s, max_batch=8, workspace_bytes=0, **more)
    return ExpertProfile(f"{expert}@fp32", performance, Footprint(1), {})


ROWS = {"a": row("a"), "b": row("b", 2.0, 16.0), "c": row("c", 0.1, 0.25), "t": row("t", 1.0, 1.0, lease_bytes=1)}


class ListedGroup:
    """``tokens_s``: of each request that stands here; ``since_s``: when it was queued."""

    def __init__(self, expert, now, starts_s, fixed_s, alone=False, is_ongoing=False):
        self.expert, self.opened_s, self.starts_s, self.fixed_s = expert, now, starts_s, fixed_s
        self.alone, self.is_ongoing = alone, is_ongoing
        self.since_s, self.tokens_s = {}, {}

    def add(self, request, since_s, tokens_s):
        self.since_s[request], self.tokens_s[request] = since_s, tokens_s

    @property
    def length_s(self):
        return self.fixed_s + len(self.since_s) * ROWS[self.expert].performance.K_s + sum(self.tokens_s.values())


class ListedQueue:
    """A queue and its list, which take the same steps."""

    def __init__(self):
        self.queue, self.groups, self.now, self.last = ExecutorQueue(ExecutorSpec(3, "cpu", "host")), [], 0.0, 0

    @property
    def length_s(self):
        queue = self.queue
        running_s = max((queue.running_until_s or 0.0) - self.now, 0.0)
        return running_s + queue.unfinished_s + queue.ahead_s + sum(group.length_s for group in self.groups)

    def new(self, count):
        self.last += count
        return range(self.last - count + 1, self.last + 1)

    def open(self, expert, amount):
        (request,), B_s, tokens_s = self.new(1), ROWS[expert].performance.B_s, amount % 2 * 0.5
        starts_s = max([self.now + self.length_s, *(group.starts_s for group in self.groups[-1:])])
        self.queue.open(expert, ROWS[expert], request, self.now, float(amount), tokens_s)
        self.groups.append(ListedGroup(expert, self.now, starts_s, B_s + amount))
        self.groups[-1].add(request, self.now, tokens_s)

    def join(self, _, amount):
        here = [number for number, group in enumerate(self.groups) if not group.is_ongoing]
        if here:
            (request,), number = self.new(1), here[amount % len(here)]
            self.queue.join(list(self.queue.groups())[number], request, self.now, amount % 3 * 0.25)
            self.groups[number].add(request, self.now, amount % 3 * 0.25)

    def take(self, _, amount):
        if self.groups:
            number = amount % len(self.groups)
            group, count = self.groups[number], 1 + amount % len(self.groups[number].since_s)
            first = tuple(group.since_s)[:count]
            assert self.queue.take(list(self.queue.groups())[number], count) == first
            group.fixed_s = 0.0
            self.leave(group, first)

    def remove(self, _, amount):
        if self.groups:
            number = amount % len(self.groups)
            group = self.groups[number]
            request = list(group.since_s)[amount % len(group.since_s)]
            self.queue.remove(list(self.queue.groups())[number], request)
            self.leave(group, (request,))

    def leave(self, group, requests):
        for request in requests:
            del group.since_s[request], group.tokens_s[request]
        if not group.since_s:
            self.groups.remove(group)

    def go_on(self, expert, amount):
        left_s = dict.fromkeys(self.new(1 + amount % 2), amount * 0.5)
        before = [group for group in self.groups if group.is_ongoing and group.expert == expert]
        group = before[0] if before else ListedGroup(expert, 0.0, 0.0, 0.0, is_ongoing=True)
        self.groups = [each for each in self.groups if each is not group] + [group]
        group.opened_s = group.starts_s = self.now
        group.fixed_s = ROWS[expert].performance.B_s
        for request, tokens_s in left_s.items():
            group.add(request, self.now, tokens_s)
        self.queue.go_on(expert, ROWS[expert], left_s, self.now)

    def give_back(self, expert, amount):
        since_s = {request: self.now - 3.0 + request / 100 for request in self.new(1 + amount % 2)}
        tokens_s = dict.fromkeys(since_s, amount * 0.5) if amount % 3 else None
        self.queue.give_back(expert, ROWS[expert], since_s, self.now, tokens_s)
        group = ListedGroup(expert, self.now, self.now, ROWS[expert].performance.B_s, alone=True)
        for request, at_s in since_s.items():
            group.add(request, at_s, tokens_s[request] if tokens_s else 0.0)
        self.groups.insert(0, group)

    def run(self, _, amount):
        self.queue.running_until_s = self.now + amount - 2 if amount else None
        self.queue.unfinished_s, self.queue.ahead_s = amount % 2 * 0.5, amount % 3 * 0.25

    def pass_over(self, _, amount):
        for number, group in enumerate(self.queue.groups()):
            group.is_passed_over = bool(amount >> number & 1)

    def check(self):
        queue, forth, back = self.queue, list(self.queue.groups()), []
        group = queue.tail
        while group is not None:
            back.insert(0, group)
            group = group.previous
        assert forth == back
        assert [each.order for each in forth] == sorted({each.order for each in forth})
        assert [
            (each.expert, each.profile, each.alone, each.is_ongoing, dict(each.requests), each.opened_s)
            for each in forth
        ] == [
            (each.expert, ROWS[each.expert], each.alone, each.is_ongoing, each.since_s, each.opened_s)
            for each in self.groups
        ]
        assert [each.fixed_s for each in forth] == [each.fixed_s for each in self.groups]
        assert [each.starts_s for each in forth] == pytest.approx([each.starts_s for each in self.groups])
        assert [(each.oldest_s, each.newest_s) for each in forth] == [
            (min(each.since_s.values()), max(each.since_s.values())) for each in self.groups
        ]
        assert queue.length_s(self.now) == pytest.approx(self.length_s)
        if not self.groups:  # no rounding error outlives them
            assert queue.length_s(self.now) == self.length_s
        assert queue.request_count == sum(len(each.since_s) for each in self.groups)
        assert queue.front is next((each for each in forth if not each.is_passed_over), None)
        assert set(queue.begins) == {each for each in forth if each.expert == "t" and not each.is_ongoing}
        assert set(queue.awaited) == {each.expert for each in forth}
        for expert in ROWS:
            to_begin = [each for each in forth if each.expert == expert and not each.is_ongoing]
            ongoing = [each for each in forth if each.expert == expert and each.is_ongoing]
            assert list(queue.all_to_begin(expert)) == to_begin
            assert (queue.first_to_begin(expert), queue.last_group(expert)) == (
                (to_begin[0], to_begin[-1]) if to_begin else (None, None)
            )
            assert queue.first_group(expert) is next(iter(ongoing + to_begin), None)
            assert [queue.ongoing[f"{expert}@fp32"]] == ongoing if ongoing else f"{expert}@fp32" not in queue.ongoing


STEPS = (ListedQueue.open, ListedQueue.open, ListedQueue.join, ListedQueue.take, ListedQueue.take, ListedQueue.remove,
         ListedQueue.go_on, ListedQueue.give_back, ListedQueue.run, ListedQueue.pass_over)  # fmt: skip


@given(histories(st.tuples(st.sampled_from(STEPS), st.sampled_from(sorted(ROWS)), st.integers(0, 9))))
def test_queue_equals_a_naive_model_under_any_steps(steps):
    listed = ListedQueue()
    listed.check()
    for step, expert, amount in steps:
        listed.now += amount * 0.25
        step(listed, expert, amount)
        listed.check()
