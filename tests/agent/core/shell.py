"""The shell of an Engine under a test's hand: it keeps what is under way, in memory and over, and answers.

Every driver of an Engine in these tests is one. It asserts what each shell relies on, after each event: a copy comes
only where it is not and from where it is, a batch runs on copies that are there, a request that came ends once, the
Engine's memories hold what was told, and the Engine's own invariants hold.
"""

from collections import defaultdict

from agent.core import events
from agent.core.effects import Complete, Evict, Fail, StartBatch, StartLoad
from agent.core.performance import SSD
from experts.expert import Prediction

PASS = Prediction("ok", 1.0)
BATCH_ENDS = events.Finished | events.BatchFailed | events.Progressed


class Shell:
    """``executors``: specs by id. Effects are logged with their times; an event that answers ends what it is about."""

    def __init__(self, engine, executors):
        self.engine, self.executors, self.now = engine, executors, 0.0
        self.loading = {}  # number -> StartLoad
        self.running = {}  # number -> batch, those that are queued ahead too
        self.resident = defaultdict(set)  # memory -> copies
        self.arrived = {}  # request -> event
        self.outcomes = {}  # by request
        self.effects = []  # of the latest event
        self.log = []  # (time, effect)

    def handle(self, event, at=None):
        self.now = self.now if at is None else at
        self.book(event)
        self.effects = effects = self.engine.handle(event, self.now)
        self.log += [(self.now, effect) for effect in effects]
        for effect in effects:
            self.take(effect)
        self.engine.check_invariants()
        self.check()
        return effects

    def book(self, event):
        if isinstance(event, events.Arrived):
            self.arrived.setdefault(event.request, event)
        elif isinstance(event, events.Loaded) and event.load in self.loading:
            load = self.loading.pop(event.load)
            self.resident[load.pool].add(load.copy)
        elif isinstance(event, events.LoadFailed):
            self.loading.pop(event.load, None)
        elif isinstance(event, BATCH_ENDS) and self.is_running(event.batch):
            del self.running[event.batch]

    def take(self, effect):
        if isinstance(effect, StartLoad):
            assert effect.copy not in self.resident[effect.pool]
            assert effect.source.endswith(SSD) or effect.copy in self.resident[effect.source]
            self.loading[effect.load] = effect
        elif isinstance(effect, Evict):
            self.resident[effect.pool].remove(effect.copy)
        elif isinstance(effect, StartBatch):
            assert set(effect.batch.copies) <= self.resident[self.pool_of(effect.batch.executor)]
            self.running[effect.batch.id] = effect.batch
        elif isinstance(effect, Complete | Fail):
            assert effect.request in self.arrived
            assert effect.request not in self.outcomes
            self.outcomes[effect.request] = effect.outcome

    def check(self):
        pools = self.engine.statistics().pools
        assert all(set(pool.resident) == self.resident[pool.name] for pool in pools)

    def pool_of(self, executor):
        return self.executors[executor].pool

    def on(self, executor):
        """The batch that runs there, or None."""
        return next((batch for batch in self.running.values() if batch.executor == executor), None)

    def is_running(self, number):
        """False also while it is queued ahead."""
        return number in self.running and self.on(self.running[number].executor).id == number

    def answer(self, choose=lambda options: options[0]):
        """Answer a load or a batch that runs, or let the time of the next wake-up come; False where none is."""
        options = [(self.answer_load, number) for number in self.loading]
        options += [(self.answer_batch, number) for number in self.running if self.is_running(number)]
        if options:
            answer, number = choose(options)
            answer(number)
            return True
        wakeup_s = self.engine.next_wakeup_s()
        if wakeup_s is not None:
            self.handle(events.Tick(), max(self.now, wakeup_s))
        return wakeup_s is not None

    def answer_load(self, number):
        self.handle(events.Loaded(number))

    def answer_batch(self, number):
        self.handle(events.Finished(number, (PASS,) * len(self.running[number].requests)))

    def pass_time(self, seconds):
        """The Engine has its Ticks when they are due."""
        end_s = self.now + seconds
        while (wakeup_s := self.engine.next_wakeup_s()) is not None and wakeup_s <= end_s:
            self.handle(events.Tick(), max(self.now, wakeup_s))
        self.now = end_s
