"""Lines for tests of the core."""

from hypothesis import strategies as st

from agent.core import demand, events, failures
from agent.core.effects import Assigned, StartBatch
from agent.core.engine import Engine
from agent.core.performance import (
    SSD,
    ExecutorSpec,
    ExpertProfile,
    Footprint,
    Limits,
    Performance,
    PerformanceMatrix,
    PoolSpec,
)
from agent.core.policy import PRESETS
from experts.graph import ExpertGraph, RouteStep
from tests.agent.core.script import Script
from tests.agent.core.shell import PASS, Shell

CONSTANTS = {
    "load_attempts": (failures, "LOAD_ATTEMPTS"),
    "load_backoff_s": (failures, "LOAD_BACKOFF_S"),
    "away_s": (failures, "AWAY_S"),
    "longest_away_pause_s": (failures, "LONGEST_AWAY_PAUSE_S"),
    "batch_attempts": (failures, "BATCH_ATTEMPTS"),
    "expert_failures": (failures, "EXPERT_FAILURES"),
    "probation_s": (failures, "PROBATION_S"),
    "longest_pause_s": (failures, "LONGEST_PAUSE_S"),
    "budget_pause_s": (failures, "BUDGET_PAUSE_S"),
    "prefetch_groups": (demand, "PREFETCH_GROUPS"),
    "long_queue_s": (demand, "LONG_QUEUE_S"),
}
OK = frozenset({"ok"})
SPEED = 1.0, 2.0  # K and B
LOAD_S = {SSD: 10.0, "host": 2.0}
LEFT, RIGHT = "abcdefgh", "uvwxyz"


def limits(pools, *args, **chosen):
    """Limits, and constants of the core until the test ends."""
    for key in chosen.keys() & CONSTANTS.keys():
        setattr(*CONSTANTS[key], chosen.pop(key))
    return Limits(pools, *args, **chosen)


def histories(step):
    """Short ones, as small as a failure may be, and long ones, which come to what takes several steps."""
    return st.lists(step, max_size=8) | st.lists(step, min_size=25, max_size=60)


def of(kind, effects):
    return [effect for effect in effects if isinstance(effect, kind)]


def row(expert, own_bytes=1, shared=(), form="fp32", performance=None, load_s=LOAD_S, **more):
    """K = 1 s, B = 2 s; a load takes 10 s from the SSD, 2 s from the host; an image's workspace a byte."""
    performance = performance or Performance(*SPEED, max_batch=4, workspace_bytes=1)
    return ExpertProfile(f"{expert}@{form}", performance, Footprint(own_bytes, shared), load_s, **more)


def graph_of(names, routes, shadows=()):
    """``routes``: component -> experts, each of which passes ``ok``."""
    steps = {name: tuple(RouteStep(expert, OK) for expert in experts) for name, experts in routes.items()}
    return ExpertGraph(names, steps, dict(shadows))


class Line(Script, Shell):
    """A shell whose loads and batches are answered by their experts, the first that began before others.

    ``processors``: experts and memory of each, which has one executor. ``routes``: component -> experts. By expert:
    ``sizes``, ``shared``, ``workspace_base``, ``usage``, ``shadows``, ``prepared``, ``families``, ``performances``; by
    processor: ``forms``, ``speeds``. The rest are limits.
    """

    def __init__(self, pools, processors, policy="coserve", **told):
        sizes, shared, bases = (told.pop(name, {}) for name in ("sizes", "shared", "workspace_base"))
        usage, routes, forms, speeds = (told.pop(name, {}) for name in ("usage", "routes", "forms", "speeds"))
        prepared, families, known = (told.pop(name, {}) for name in ("prepared", "families", "performances"))
        max_batch, load_s, shadows = told.pop("max_batch", 4), told.pop("load_s", LOAD_S), told.pop("shadows", {})
        workspace = told.pop("workspace", 1)

        def made(name, processor):
            form, speed = forms.get(processor, "fp32"), speeds.get(processor, SPEED)
            size = sizes.get(f"{name}@{form}", sizes.get(name, 1))
            performance = known.get(name) or Performance(*speed, max_batch, workspace, bases.get(name, 0))
            more = {"family": families.get(name), "prepared": prepared.get(name)}
            return row(name, size, shared.get(name, ()), form, performance, load_s, **more)

        columns = {each: {name: made(name, each) for name in names} for each, (names, _) in processors.items()}
        specs = [ExecutorSpec(number, name, pool) for number, (name, (_, pool)) in enumerate(processors.items())]
        names = set().union(*(names for names, _ in processors.values()), *routes.values())
        self.matrix, self.graph = PerformanceMatrix(columns, usage), graph_of(names, routes, shadows)
        engine = Engine(self.graph, self.matrix, specs, PRESETS[policy], limits(pools, **told))
        super().__init__(engine, {spec.id: spec for spec in specs})
        self.last_request = 0

    def handle(self, event, at=None):
        """What moved because of the event."""
        super().handle(event, at)
        return self.words()

    @property
    def loads(self):
        return by_expert(self.loading)

    @property
    def batches(self):
        return by_expert(self.running)

    def ask(self, expert, at=None):
        """A request for one expert arrives."""
        self.last_request += 1
        return self.handle(events.Arrived(self.last_request, expert=expert), at)

    def arrive(self, component, at=None):
        self.last_request += 1
        return self.handle(events.Arrived(self.last_request, component), at)

    def asks(self, components, at=None):
        for component in components:
            self.arrive(component, at)

    def serve(self, expert, at=None):
        """A request comes, and the load that it causes is done at once; the batch that starts last."""
        self.ask(expert, at)
        if expert in self.loads:
            self.loaded(expert)
        return next((batch for batch in reversed(self.running.values()) if batch.expert == expert), None)

    def loaded(self, expert, at=None):
        return self.handle(events.Loaded(self.loads[expert].load), at)

    def load_failed(self, expert, at=None, reason="I/O error", **how):
        return self.handle(events.LoadFailed(self.loads[expert].load, reason, **({"permanent": False} | how)), at)

    def bad(self, expert, at=None):
        return self.load_failed(expert, at, permanent=True)

    def finished(self, expert, at=None, result=PASS):
        batch = self.batches[expert]
        return self.handle(events.Finished(batch.id, (result,) * len(batch.requests)), at)

    def failed(self, expert, reason="broke", *, out_of_memory=False, at=None):
        return self.handle(events.BatchFailed(self.batches[expert].id, reason, out_of_memory), at)

    def short(self, expert, at=None):
        return self.failed(expert, out_of_memory=True, at=at)

    def bring(self, experts):
        for expert in experts:
            self.run(expert)
            self.finished(expert)

    def run(self, expert):
        self.ask(expert)
        for _ in range(2):  # in split memory a load to the host, and one on to the device
            if expert in self.loads:
                self.loaded(expert)
        assert expert in self.batches

    def holds(self, pool, experts=""):
        assert self.held_in(pool) == experts

    def held_in(self, pool="host"):
        return next("".join(copy[0] for copy in each.resident) for each in self.pools() if each.name == pool)

    def pools(self):
        return self.engine.statistics().pools

    @property
    def assigned(self):
        """The latest event's only assignment."""
        (assigned,) = of(Assigned, self.effects)
        return assigned


def by_expert(under_way):
    found = {}
    for each in under_way.values():
        found.setdefault(each.expert, each)
    return found


class AnsweringLine(Line):
    """A line whose loads and batches are answered at once, but for faults.

    ``bad_loads``: answers in place of Loaded, by expert, copy or memory; ``bad_batches``: by expert or executor.
    """

    def __init__(self, *args, **told):
        self.bad_loads = {}
        self.bad_batches = {}
        self.result = PASS
        self.held = None  # a list: batches are not answered, but kept here
        self.load_s = 0.0  # passes with each load
        super().__init__(*args, **told)

    def handle(self, event, at=None):
        super().handle(event, at)
        for effect in self.effects:
            if effect in self.loading.values():
                self.now += self.load_s
                self.answer_load(effect.load)
            elif isinstance(effect, StartBatch) and self.held is not None:
                self.held.append(effect.batch)
            elif isinstance(effect, StartBatch):
                self.answer_batch(effect.batch.id)

    def answer_load(self, number):
        load = self.loading[number]
        keys = (load.expert, load.copy, load.pool)
        said = next((self.bad_loads[key] for key in keys if key in self.bad_loads), None)
        self.handle(events.LoadFailed(number, **said) if said else events.Loaded(number))

    def answer_batch(self, number):
        batch = self.running[number]
        said = self.bad_batches.get(batch.expert, self.bad_batches.get(batch.executor))
        results = (self.result,) * len(batch.requests)
        self.handle(events.BatchFailed(number, **said) if said else events.Finished(number, results))

    def release(self):
        held, self.held = self.held, None
        for batch in held:
            self.answer_batch(batch.id)

    def send(self, component):
        self.arrive(component)
        return self.last_request

    def logged(self, kind, expert=None):
        """Everything of one kind, of one expert, since the log began."""
        return [
            each for _, each in self.log if isinstance(each, kind) and expert in (None, getattr(each, "expert", None))
        ]

    @property
    def on_probation(self):
        return self.engine.statistics().on_probation

    # -- verbs of a script: what happens --

    def sends(self, *components):
        for component in components:
            self.send(component)

    def passes(self, seconds):
        self.pass_time(float(seconds))

    def hold(self):
        self.held = []

    def forget(self):
        self.log.clear()

    # -- and what is so then --

    def judges(self, component, *said):
        """A request comes and, as everything is answered at once, ends with this verdict, and this reason."""
        outcome = self.outcomes[self.send(component)]
        assert outcome.verdict == said[0]
        assert len(said) == 1 or outcome.reason == " ".join(said[1:])

    def verdicts(self, *said):
        assert tuple(self.outcomes[request].verdict for request in sorted(self.outcomes)) == said

    def probation(self, expert=None, *reason):
        assert list(self.on_probation) == ([expert] if expert else [])
        assert not reason or self.on_probation[expert] == " ".join(reason)

    def quiet(self):
        assert self.log == []


def unified(host=3, policy="coserve", **more):
    """Executor 0 alone runs experts a to h, executor 1 alone u to z, in one memory."""
    pools = (PoolSpec("host", host, 16),)
    return Line(pools, {"left": (LEFT, "host"), "right": (RIGHT, "host")}, policy, **more)


def split(host=6, device=2, policy="coserve", **more):
    """Executor 0 has a device, with the host in front of it; executor 1 runs in the host."""
    pools = (PoolSpec("host", host, 16), PoolSpec("device", device, 16, cache="host"))
    return Line(pools, {"left": (LEFT, "device"), "right": (RIGHT, "host")}, policy, **more)


def alone(experts="abcd", host=3, policy="coserve", **more):
    """One executor; a component of each expert's name in capitals, beside ``routes``."""
    routes = {name.upper(): name for name in experts} | more.pop("routes", {})
    return Line((PoolSpec("host", host, 8),), {"cpu": (experts, "host")}, policy, routes=routes, **more)
