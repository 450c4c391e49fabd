"""Lines for tests of the offline phase: under virtual time by hand, and on disk as packed fakes with a profile."""

import json
import random
import resource
from contextlib import closing, contextmanager
from dataclasses import replace

from agent.config import read_line
from agent.core.effects import StartBatch, StartLoad
from agent.core.engine import EngineSetup
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
from agent.deployment.build import build_agent
from agent.deployment.deployment import planned, profiled_box
from agent.device_profile.records import (
    Allocation,
    BatchTimes,
    BoxIdentity,
    KindProfile,
    LinkSpeed,
    PoolAllocation,
    StoredProfile,
    UsageProfile,
)
from agent.runtime.expert_copy import kind_name
from experts.expert import Precision
from experts.graph import ExpertGraph, RouteStep
from experts.packed.packing import pack_line
from experts.packed.weights import SegmentStore
from profiler.simulation.bounds import Resources
from profiler.simulation.simulator import Simulator
from profiler.workload.traces import TracedArrival
from tests.agent import line_files

OK = frozenset({"ok"})
IMAGES = Performance(K_s=0.01, B_s=0.02, max_batch=4, workspace_bytes=0)
TEXTS = Performance(0.001, 0.004, 4, 0, K_prompt_s=0.0005, K_output_s=0.003, lease_bytes=1)
SLOT_BYTES = 262_144  # a multiple of the slots' alignment
SSD_BYTES_PER_S = 2_621_440.0  # reads a slot in 0.1 s


# -- under virtual time --


def row(name, performance=IMAGES, own_bytes=1, load_s=0.1, **more):
    """``load_s``: from the SSD, or by source."""
    loads = load_s if isinstance(load_s, dict) else {SSD: load_s}
    return ExpertProfile(name, performance, Footprint(own_bytes, more.pop("shared", ())), loads, **more)


def graph_of(routes, others=(), **more):
    """``routes``: component -> experts, each of which passes `ok`; ``others``: experts on no route."""
    steps = {name: tuple(RouteStep(expert, OK) for expert in experts) for name, experts in routes.items()}
    return ExpertGraph({*others, *(expert for experts in routes.values() for expert in experts)}, steps, **more)


def setup_of(rows, executors=("cpu",), room=8, *, policy="coserve", routes=None, usage=None, **limits):
    """A line whose routes are named like their experts, unless given.

    ``rows``: by expert, or by processor and expert. ``executors``: processors; those of cuda and gpu have a `device`
    where ``room`` is by memory. ``room``: bytes for experts, or the pools themselves.
    """
    columns = rows if isinstance(next(iter(rows.values())), dict) else dict.fromkeys(executors, rows)
    experts = sorted({expert for column in columns.values() for expert in column})
    pools = (PoolSpec("host", room, 0),) if isinstance(room, int) else tuple(room)
    has_device = any(pool.name == "device" for pool in pools)
    specs = tuple(
        ExecutorSpec(number, name, "device" if has_device and name in ("cuda", "gpu") else "host")
        for number, name in enumerate(executors)
    )
    matrix = PerformanceMatrix(columns, usage or dict.fromkeys(experts, 1 / len(experts)))
    graph = routes if isinstance(routes, ExpertGraph) else graph_of(routes or {name: [name] for name in experts})
    return EngineSetup(graph, policy, specs, matrix, Limits(pools, **limits))


def simulator(setup, **physics):
    return Simulator(setup, **{"check_every_step": True} | physics)


def resources(setup, ssd_bytes_per_s=10.0, speedups=None):
    return Resources(setup.executors, setup.pools, setup.matrix, ssd_bytes_per_s, speedups or {})


def arrivals(components, every_s=0.0, **more):
    return [TracedArrival(every_s * number, component, **more) for number, component in enumerate(components)]


def drawn(components, count, every_s=0.004, seed=1, sigma=2.0):
    """Components by log-normal popularity, as on the paper's boards; and the popularity of each."""
    rng = random.Random(seed)
    weights = [rng.lognormvariate(0, sigma) for _ in components]
    shares = {name: weight / sum(weights) for name, weight in zip(components, weights, strict=True)}
    return arrivals(rng.choices(list(components), weights, k=count), every_s), shares


def merged(*traces):
    return sorted((arrival for trace in traces for arrival in trace), key=lambda arrival: arrival.at_s)


def batches(simulation):
    return [
        (now - simulation.started_s, each.batch) for now, each in simulation.effects if isinstance(each, StartBatch)
    ]


def loads(simulation):
    """Loads since the trace's start."""
    return [each for now, each in simulation.effects if isinstance(each, StartLoad) and now >= simulation.started_s]


# -- a stored profile --


def box_of(device_bytes=None, cores=1):
    return BoxIdentity("cpu", "test", ("cpu",), cores, 2**30, device_bytes, {})


def profile_of(**changes):
    """A profile of an SSD's speed, and of no kind."""
    empty = StoredProfile(
        line="test",
        written_at="2026-01-01T00:00:00+00:00",
        box=box_of(),
        links=(LinkSpeed(SSD, SSD_BYTES_PER_S),),
        kinds=(),
        agreements=(),
        precisions={},
        packed={},
        usage=UsageProfile({}, {}, "computed from quantities"),
        allocation=Allocation("casual", {}, (), {"cpu": 1}),
    )
    return replace(empty, **changes)


def kind_of(kind, form="fp32", factor=1.0, **changes):
    """A kind of fakes of SLOT_BYTES; ``factor``: of its bytes and times."""
    found = KindProfile(
        kind=kind,
        architecture="fake",
        processor="cpu",
        precision=str(form),
        threads=1,
        K_s=0.01 * factor,
        B_s=0.02 * factor,
        fit_error=0.0,
        max_batch=4,
        weight_bytes=int(SLOT_BYTES * factor),
        workspace_base_bytes=0,
        workspace_bytes=1_000,
        load_s={SSD: SLOT_BYTES * factor / SSD_BYTES_PER_S},
        batches=(BatchTimes(1, (0.03 * factor,), 1_000),),
        samples="synthetic",
    )
    return replace(found, **changes)


# -- on disk --


def fakes(count, weights="fake.yaml", **more):
    """A line file's document; its experts know one label."""
    return {"line": "test", "state": "./state"} | line_files.fakes(count, weights, **{"labels": ["ok"]} | more)


def write_line(folder, document, **declared):
    """The line's file beside the fake's declaration."""
    (folder / "fake.yaml").write_text(json.dumps({"weight_bytes": SLOT_BYTES, "workspace_bytes": 1_000} | declared))
    (folder / "line.yaml").write_text(json.dumps(document))
    return read_line(folder / "line.yaml", {})


class PackedFakes:
    """Packed fakes of SLOT_BYTES with the profile of a box that they were measured on."""

    WORKSPACE_BYTES = 4_000

    def __init__(self, folder, count=4, *, places=2, declared=None, **sections):
        self.folder, self.count = folder, count
        self.document = fakes(count) | {"memory": self.memory(places)} | sections
        config = write_line(folder, self.document, **declared or {})
        with closing(SegmentStore(config.packed_folder)) as store:
            report = pack_line(config.catalog.experts.values(), lambda _: {Precision.FP32}, store)
        packed = report.packed["cls/f0"][Precision.FP32]
        assert packed.own.slot_bytes == SLOT_BYTES
        self.kind = kind_name(config.catalog.experts["cls/f0"], packed.program_sha256)
        self.profile = profile_of(
            kinds=(kind_of(self.kind),),
            packed={(name, "fp32"): "sha" for name in config.catalog.experts},
            allocation=Allocation(
                "casual", {"host": 2**20}, (PoolAllocation("host", 2**19, self.WORKSPACE_BYTES, count),), {"cpu": 1}
            ),
        )

    def memory(self, places):
        size = f"{places * SLOT_BYTES + self.WORKSPACE_BYTES}B"
        return {"host": size, "workspace": f"{self.WORKSPACE_BYTES}B"}

    def room(self, places):
        return {"host": places * SLOT_BYTES + self.WORKSPACE_BYTES}

    @property
    def config(self):
        return self.changed()

    def changed(self, **sections):
        """The line with other sections of its file."""
        file = self.folder / f"line-{len(sections)}-{'-'.join(sections)}.yaml"
        file.write_text(json.dumps(self.document | sections))
        return read_line(file, {})

    def split(self, budget_bytes):
        return planned(self.config.having(memory=budget_bytes), profiled_box(self.profile), self.profile)


@contextmanager
def files_up_to(size_bytes):
    """No file of this process grows beyond it meanwhile, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def built_agent(config):
    """An agent of the line, and the stages of its start."""
    stages = []
    agent = build_agent(config, lambda *_: None, lambda stage, *_: stages.append(stage))
    try:
        yield agent, stages
    finally:
        agent.stop()


def as_fast(kind, seconds):
    """The kind as if K and B took so many seconds each, without any noise."""
    batches = tuple(replace(batch, seconds=(seconds * (batch.batch_size + 1),)) for batch in kind.batches)
    return replace(kind, K_s=seconds, B_s=seconds, batches=batches)
