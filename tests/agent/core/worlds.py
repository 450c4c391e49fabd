"""Lines for tests of the core."""

import re

import pytest
from hypothesis import strategies as st

from agent.core import demand, events, failures
from agent.core.effects import Assigned, Complete, Evict, Fail, Forget, Prepare, StandingChanged, StartBatch, StartLoad
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
from experts.expert import Prediction
from experts.graph import ExpertGraph, RouteStep

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
PASS = Prediction("ok", 1.0)
SPEED = 1.0, 2.0  # K and B
LOAD_S = {SSD: 10.0, "host": 2.0}
LEFT, RIGHT = "abcdefgh", "uvwxyz"
PLAIN = {
    "started": events.Started,
    "tick": events.Tick,
    "drain": events.Drain,
    "cancelled": lambda request: events.Cancelled(int(request)),
    "wanted": events.Wanted,
    "unwanted": events.Unwanted,
    "quarantined": lambda expert: events.Quarantined(expert, "bad"),
    "reserved": lambda pool, size: events.Reserved(pool, int(size)),
}  # verbs of a script


def played(table):
    """A test by the cases of a table: name | code that makes the line | script, with further lines indented."""
    rows = []
    for each in table.strip().splitlines():
        if each.startswith(" ") and not each.lstrip().startswith("#"):
            rows[-1] += each
        elif each[0] not in " #":
            rows.append(each)
    names, *cases = zip(*(" ".join(row.split()).split(" | ", 2) for row in rows), strict=True)
    return pytest.mark.parametrize(("made", "script"), list(zip(*cases, strict=True)), ids=names)


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


def row(
    expert,
    own_bytes=1,
    shared=(),
    max_batch=4,
    workspace_base=0,
    form="fp32",
    speed=SPEED,
    load_s=LOAD_S,
    workspace=1,
    **more,
):
    """K = 1 s, B = 2 s; a load takes 10 s from the SSD, 2 s from the host; an image's workspace a byte."""
    performance = Performance(*speed, max_batch, workspace, workspace_base)
    return ExpertProfile(f"{expert}@{form}", performance, Footprint(own_bytes, shared), load_s, **more)


def graph_of(names, routes, shadows=()):
    """``routes``: component -> experts, each of which passes ``ok``."""
    steps = {name: tuple(RouteStep(expert, OK) for expert in experts) for name, experts in routes.items()}
    return ExpertGraph(names, steps, dict(shadows))


class Line:
    """An Engine, its loads and batches in flight by their experts, its outcomes, and the time.

    ``processors``: experts and memory of each, which has one executor. ``routes``: component -> experts. By expert:
    ``sizes``, ``shared``, ``workspace_base``, ``usage``, ``shadows``; by processor: ``forms``, ``speeds``. The rest are
    limits.
    """

    def __init__(self, pools, processors, policy="coserve", **told):
        sizes, shared, bases = (told.pop(name, {}) for name in ("sizes", "shared", "workspace_base"))
        usage, routes, forms, speeds = (told.pop(name, {}) for name in ("usage", "routes", "forms", "speeds"))
        max_batch, load_s, shadows = told.pop("max_batch", 4), told.pop("load_s", LOAD_S), told.pop("shadows", {})
        prepared, workspace = told.pop("prepared", {}), told.pop("workspace", 1)

        def made(name, processor):
            form, speed = forms.get(processor, "fp32"), speeds.get(processor, SPEED)
            size = sizes.get(f"{name}@{form}", sizes.get(name, 1))
            more = {"workspace": workspace, "prepared": prepared.get(name)}
            return row(name, size, shared.get(name, ()), max_batch, bases.get(name, 0), form, speed, load_s, **more)

        columns = {each: {name: made(name, each) for name in names} for each, (names, _) in processors.items()}
        specs = [ExecutorSpec(number, name, pool) for number, (name, (_, pool)) in enumerate(processors.items())]
        names = set().union(*(names for names, _ in processors.values()), *routes.values())
        self.matrix, self.graph = PerformanceMatrix(columns, usage), graph_of(names, routes, shadows)
        self.engine = Engine(self.graph, self.matrix, specs, PRESETS[policy], limits(pools, **told))
        self.now = 0.0
        self.loads = {}
        self.batches = {}
        self.outcomes = {}
        self.last_request = 0

    def handle(self, event, at=None):
        """What moved because of the event; each load and each batch is remembered by its expert."""
        self.now = self.now if at is None else at
        self.effects = self.engine.handle(event, self.now)
        self.engine.check_invariants()
        for effect in self.effects:
            if isinstance(effect, StartLoad):
                self.loads[effect.expert] = effect
            elif isinstance(effect, StartBatch):
                self.batches[effect.batch.expert] = effect.batch
            elif isinstance(effect, Complete | Fail):
                self.outcomes[effect.request] = effect.outcome
        return [moved for effect in self.effects if (moved := told(effect))]

    def ask(self, expert, at=None):
        """A request for one expert arrives."""
        self.last_request += 1
        return self.handle(events.Arrived(self.last_request, expert=expert), at)

    def arrive(self, component, at=None):
        self.last_request += 1
        self.now = self.now if at is None else at
        return self.handle(events.Arrived(self.last_request, component))

    def serve(self, expert, at=None):
        """A request comes, and the load that it causes is done at once; the batch that starts."""
        self.ask(expert, at)
        if expert in self.loads:
            self.loaded(expert)
        return self.batches.get(expert)

    def loaded(self, expert, at=None):
        return self.handle(events.Loaded(self.loads.pop(expert).load), at)

    def load_failed(self, expert, at=None, reason="I/O error", **how):
        failed = events.LoadFailed(self.loads.pop(expert).load, reason, **({"permanent": False} | how))
        return self.handle(failed, at)

    def finished(self, expert, at=None, result=PASS):
        batch = self.batches.pop(expert)
        return self.handle(events.Finished(batch.id, (result,) * len(batch.requests)), at)

    def failed(self, expert, reason="broke", *, out_of_memory=False, at=None):
        return self.handle(events.BatchFailed(self.batches.pop(expert).id, reason, out_of_memory), at)

    def play(self, script):
        """Steps of a script, divided by semicolons: a verb, experts, `@` a time, `->` everything that moves for it.

        After `=>`, divided by `|`: all effects, with requests and reasons.
        """
        for step in script.split(";"):
            did, arrow, effects = (part.strip() for part in [*re.split("(->|=>)", step, maxsplit=1), "", ""][:3])
            verb, *args = did.split()
            at = float(args.pop()[1:]) if args and args[-1].startswith("@") else None
            moved, divider = self.step(verb, args, at), ", "
            if arrow == "=>":
                moved, divider = [said for effect in self.effects if (said := told(effect, in_full=True))], " | "
            if arrow:
                assert moved == ([] if effects == "nothing" else effects.split(divider)), step

    def step(self, verb, args, at):
        if verb in ("bring", "run"):
            return self.bring(*args[0]) if verb == "bring" else self.run(*args)
        if verb == "resident":
            assert self.resident(args[0]) == args[1]
            return None
        if verb == "asks":  # requests to these components
            for component in args[0]:
                self.arrive(component, at)
            return None
        if verb == "bad":
            return self.load_failed(*args, at, permanent=True)
        if verb == "short":
            return self.failed(*args, out_of_memory=True, at=at)
        return self.handle(PLAIN[verb](*args), at) if verb in PLAIN else getattr(self, verb)(*args, at=at)

    def bring(self, *experts):
        for expert in experts:
            self.run(expert)
            self.finished(expert)

    def run(self, expert):
        self.ask(expert)
        for _ in range(2):  # in split memory a load to the host, and one on to the device
            if expert in self.loads:
                self.loaded(expert)
        assert expert in self.batches

    def resident(self, pool="host"):
        return next("".join(copy[0] for copy in each.resident) for each in self.pools() if each.name == pool)

    def pools(self):
        return self.engine.statistics().pools

    @property
    def assigned(self):
        """The latest event's only assignment."""
        (assigned,) = of(Assigned, self.effects)
        return assigned


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
        self.log = []  # (time, effect)
        super().__init__(*args, **told)

    def handle(self, event):
        self.effects = effects = self.engine.handle(event, self.now)
        for effect in effects:
            self.log.append((self.now, effect))
            if isinstance(effect, Complete | Fail):
                self.outcomes[effect.request] = effect.outcome
            elif isinstance(effect, StartLoad):
                said = next((self.bad_loads[key] for key in (effect.expert, effect.copy, effect.pool)
                             if key in self.bad_loads), None)  # fmt: skip
                self.now += self.load_s
                self.handle(events.LoadFailed(effect.load, **said) if said else events.Loaded(effect.load))
            elif isinstance(effect, StartBatch) and self.held is not None:
                self.held.append(effect.batch)
            elif isinstance(effect, StartBatch):
                self.answer(effect.batch)
        self.engine.check_invariants()

    def answer(self, batch):
        said = self.bad_batches.get(batch.expert, self.bad_batches.get(batch.executor))
        results = (self.result,) * len(batch.requests)
        self.handle(events.BatchFailed(batch.id, **said) if said else events.Finished(batch.id, results))

    def release(self):
        held, self.held = self.held, None
        for batch in held:
            self.answer(batch)

    def send(self, component):
        self.arrive(component)
        return self.last_request

    def pass_time(self, seconds):
        """The Engine has its Ticks when they are due."""
        end_s = self.now + seconds
        while (wakeup_s := self.engine.next_wakeup_s()) is not None and wakeup_s <= end_s:
            self.now = max(self.now, wakeup_s)
            self.handle(events.Tick())
        self.now = end_s

    def told(self, kind, expert=None):
        """Everything of one kind, of one expert, since the log began."""
        return [
            each for _, each in self.log if isinstance(each, kind) and expert in (None, getattr(each, "expert", None))
        ]

    @property
    def on_probation(self):
        return self.engine.statistics().on_probation

    def step(self, verb, args, at):
        self.handle(PLAIN[verb](*args)) if verb in PLAIN else getattr(self, verb)(*args)

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

    def holds(self, pool, experts=""):
        assert self.resident(pool) == experts

    def quiet(self):
        assert self.log == []


def told(effect, in_full=False):
    if isinstance(effect, StartLoad):
        return f"load {effect.expert} {effect.source}>{effect.pool}"
    if isinstance(effect, Evict):
        return f"evict {effect.expert} {effect.pool} stage {effect.stage}"
    if isinstance(effect, StartBatch):
        return f"run {effect.batch.expert}" + (f" {','.join(map(str, effect.batch.requests))}" if in_full else "")
    if in_full and isinstance(effect, Complete | Fail):
        steps = "".join(step.expert for step in effect.outcome.steps)
        said = [effect.outcome.verdict, str(effect.request), *([f"after {steps}"] if steps else [])]
        return " ".join(said) + (f": {effect.outcome.reason}" if effect.outcome.reason else "")
    if in_full and isinstance(effect, StandingChanged):
        pause = "" if effect.retry_s is None else f" for {effect.retry_s} s"
        return f"{effect.standing} {effect.expert}{pause}: {effect.reason}"
    if in_full and isinstance(effect, Prepare):
        forms = "+".join((effect.expert, *effect.later))
        return f"prepare {effect.request} {forms} by {effect.executor} @{effect.due_s:g}"
    return f"forget {effect.request}" if in_full and isinstance(effect, Forget) else None


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
