"""Images are prepared before their batches start: in the order in which these run, within the budget, once."""

from agent.core import events
from agent.core.effects import Assigned, Forget, Prepare, StartBatch, StartLoad
from agent.core.performance import SSD, PoolSpec, PreparedForm
from experts.expert import Prediction
from tests.agent.core import worlds

SMALL, LARGE = PreparedForm("small", 1), PreparedForm("large", 5)
GOOD = Prediction("ok", 0.9)
ROUTES = {"a": "a", "b": "b", "twice": "ac", "alike": "ab"}  # another form, the same form


class Line(worlds.Line):
    """An Engine whose shell answers when it is told to. Memory has room for ``memory`` experts."""

    def __init__(self, prepared_bytes, executors=1, memory=9, max_batch=2):
        processors = {f"cpu{number}": ("abc", "host") for number in range(executors)}
        super().__init__(
            (PoolSpec("host", memory, 99),), processors, routes=ROUTES, prepared_bytes=prepared_bytes,
            max_batch=max_batch, load_s={SSD: 0.1}, speeds=dict.fromkeys(processors, (0.1, 0.0)),
            workspace=0, prepared={"a": SMALL, "b": SMALL, "c": LARGE},
        )  # fmt: skip
        self.running = {}

    def handle(self, event, at=None):
        super().handle(event, at)
        self.running |= {each.batch.executor: each.batch for each in self.told(StartBatch)}
        return self.effects

    def arrive(self, *components):
        for component in components:
            super().arrive(component)

    def ask(self, *experts):
        for expert in experts:
            super().ask(expert)

    def load(self):
        """Every load that is under way, the latest one first."""
        effects = []
        while self.loads:
            effects += self.handle(events.Loaded(self.loads.popitem()[1].load))
        self.effects = effects

    def finish(self, executor=0):
        batch = self.running.pop(executor)
        self.now += 0.1
        self.handle(events.Finished(batch.id, (GOOD,) * len(batch.requests)))

    def told(self, kind=Prepare):
        return worlds.of(kind, self.effects)

    @property
    def prepared(self):
        """Requests and experts, as the latest event had them prepared."""
        return [(each.request, each.expert) for each in self.told()]

    @property
    def statistics(self):
        return self.engine.statistics().prepared


def test_an_image_is_prepared_when_it_is_queued_while_its_expert_is_loaded():
    line = Line(prepared_bytes=100)
    line.arrive("a")
    assert [type(effect) for effect in line.effects] == [Assigned, StartLoad, Prepare]
    line.load()
    assert not line.told()
    assert line.running[0].requests == (1,)


def test_whoever_runs_at_once_is_told_before_its_batch():
    line = Line(prepared_bytes=100)
    line.arrive("a")
    line.load()
    line.finish()
    line.arrive("a")
    assert [type(effect) for effect in line.effects] == [Assigned, Prepare, StartBatch]
    assert line.statistics.begun_late == 1


def test_far_requests_leave_a_quarter_of_the_room_to_near_ones():
    line = Line(prepared_bytes=8, max_batch=1)
    line.arrive(*"a" * 10)
    assert line.statistics.used_bytes == 6
    line.load()  # one runs, whose room is free: the next is prepared
    assert line.prepared == [(7, "a")]
    assert line.statistics.used_bytes == 6


def test_across_queues_whoever_is_predicted_to_start_first_is_first():
    line = Line(prepared_bytes=8, executors=2, max_batch=1)
    line.arrive(*"ab" * 10)
    due_s = []
    while line.running or line.loads:
        line.load()
        due_s += [each.due_s for each in line.told() if each.due_s > line.now]
        line.finish(executor=min(line.running, key=lambda each: line.running[each].id))
        due_s += [each.due_s for each in line.told() if each.due_s > line.now]
    assert due_s == sorted(due_s)


def test_what_a_later_step_needs_is_held_from_the_first_on():
    line = Line(prepared_bytes=100)
    line.arrive("twice")
    (prepare,) = line.told()
    assert (prepare.expert, prepare.later, prepare.later_bytes) == ("a", ("c",), 5)
    assert line.statistics.used_bytes == 6
    line.load()
    assert line.statistics.used_bytes == 5  # the batch has its own
    line.finish()
    (again,) = line.told()
    assert (again.request, again.expert, again.later) == (1, "c", ())
    assert not line.told(Forget)
    line.load()
    assert line.statistics.used_bytes == 0


def test_steps_of_one_form_share_what_is_prepared():
    line = Line(prepared_bytes=100)
    line.arrive("alike")
    (prepare,) = line.told()
    assert (prepare.later, prepare.later_bytes) == (("b",), 1)
    assert line.statistics.used_bytes == 1
    line.load()
    assert line.statistics.used_bytes == 1
    line.finish()
    assert line.prepared == [(1, "b")]


def test_a_failed_batch_is_not_decoded_again():
    line = Line(prepared_bytes=100, max_batch=2)
    line.arrive("a", "a")
    line.load()
    line.handle(events.BatchFailed(line.running[0].id, "broke"))
    assert not line.told()
    assert not line.told(Forget)
    assert [effect.batch.requests for effect in line.told(StartBatch)] == [(1,)]
    assert line.statistics.used_bytes == 1
