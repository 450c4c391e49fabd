"""A line and a trace on the real engine: any policies side by side, with the floor measured in the same run.

Guarantees: policies and repeats take turns, so that what changes on the machine meanwhile touches all of them alike;
each is told by its medians, and every value is kept; what was not judged is counted, with its reasons, and never makes
a run faster. One run that counts for nothing goes first: it leaves the runtimes' kernels built.

A row's floor is that of its own executors, the naive server's that of the first policy's. Around the first policy of a
round it is measured before and after, as a machine's speed moves within a minute, and the mean counts.

Cold and warm: packed files are read past the page cache wherever the filesystem lets them be (``direct_io``), so a load
costs the same in every run; memories begin as the policy's initial placement leaves them, those of the naive server
with the models most used.
"""

from __future__ import annotations

import statistics
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agent.commands.judged_images import outputs_sha256
from agent.core.effects import StartBatch
from agent.core.performance import SSD
from agent.core.policy import PRESETS
from agent.deployment.build import AgentOptions
from agent.records.database import StateLock
from agent.runtime.loop import LoopOptions
from agent.runtime.machine.box import torch_device
from experts.errors import ConfigError
from profiler.bench.measured import software
from profiler.bench.naive import NAIVE, NaiveServer, naive_files
from profiler.bench.roofline import io_bytes, measure_bandwidth, measure_compute, reads_directly, work_of
from profiler.bench.rows import (
    Figures,
    Floor,
    Measurement,
    PolicyRow,
    Predicted,
    engine_figures,
    medians,
    naive_figures,
)
from profiler.replay.images import experts_of, images_of
from profiler.replay.player import player
from profiler.simulation.forecast import sharing_speedups
from profiler.simulation.simulator import PASSES, simulator_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from agent.config import LineConfig
    from agent.core.performance import ExecutorSpec
    from agent.deployment.build import Agent
    from agent.line_file.machine import GivenPrecision
    from profiler.bench.roofline import Compute, Work
    from profiler.replay.player import Played, Progress
    from profiler.workload.traces import TracedArrival

REASONS_SHOWN = 5
WARMING_UP = "warming up"


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Policies to run, and replacements of the line's own values; None or empty: the line's own.

    ``policies`` are presets, or "naive". ``memory`` in bytes by name: host, device, workspace. ``precision``: may be
    auto, whatever the file says. ``with_roofline``: also measure the compute alone, which takes as long as another
    policy. ``is_locked``: the caller holds the line's StateLock.
    """

    policies: tuple[str, ...] = ()
    repeats: int = 1
    memory: Mapping[str, int] = field(default_factory=dict)
    precision: GivenPrecision | None = None
    executors: Mapping[str, int] | None = None
    ssd_bytes_per_s: float | None = None
    with_roofline: bool = True
    is_locked: bool = False

    def on(self, config: LineConfig) -> LineConfig:
        """The line with what these replace of it. Raises ConfigError for a memory that no line has."""
        return config.having(memory=self.memory, precision=self.precision, executors=self.executors)


def run_line(
    config: LineConfig,
    trace: Sequence[TracedArrival],
    options: RunOptions | None = None,
    progress: Progress = lambda *_: None,
) -> Measurement:
    """Play a trace on a line, every policy ``repeats`` times.

    Raises ConfigError for what cannot be run, an expert that the trace needs included, AlreadyRunning when the line's
    agent runs, ImageError for an image that cannot be decoded, and AgentCrashed.
    """
    options = options or RunOptions()
    with ExitStack() as ending:
        if not options.is_locked:
            ending.enter_context(StateLock(config.state))
        bench = _Bench(config, tuple(trace), options, progress)
        if NAIVE in bench.policies:
            bench.files = ending.enter_context(naive_files(config, bench.experts))
        return bench.run()


class _Bench:
    """One measurement: a run to warm up, then rounds of all policies."""

    def __init__(
        self, config: LineConfig, trace: tuple[TracedArrival, ...], options: RunOptions, progress: Progress
    ) -> None:
        if not trace or options.repeats < 1:
            raise ConfigError(f"{config.document.file}: nothing to measure - give a trace with arrivals, and repeats")
        self.policies = options.policies or (config.policy,)
        for policy in self.policies:
            if policy not in PRESETS and policy != NAIVE:
                raise ConfigError(f"no policy {policy!r} - choose of {', '.join((*PRESETS, NAIVE))}")
        self.experts = experts_of(trace, config.catalog)
        self.files: Mapping[str, Path] = {}
        self._config = options.on(config)
        self._trace = trace
        self._images = images_of(trace, config.catalog)
        self._options = options
        self._agent_options = AgentOptions(loop=LoopOptions(ssd_bytes_per_s=options.ssd_bytes_per_s))
        self._progress = progress
        self._runs: dict[str, list[Figures]] = {policy: [] for policy in self.policies}
        self._reasons: dict[str, tuple[str, ...]] = dict.fromkeys(self.policies, ())
        self._agents: dict[str, Agent] = {}
        self._compute: list[Compute] = []  # of the first policy's executors
        self._notes: list[str] = []
        self._bandwidths: list[float] = []

    def run(self) -> Measurement:
        repeats = self._options.repeats
        self._progress(WARMING_UP, 0, 1)
        agent, work = self._warm_up()
        self._progress(WARMING_UP, 1, 1)
        for repeat in range(1, repeats + 1):
            bandwidth = self._bandwidth(agent)
            floors = _Floors(self._options.with_roofline, work, quiet(self._progress))
            floors.measure(agent)
            for policy in self.policies:
                self._runs[policy].append(self._figures(policy, bandwidth, floors, agent))
                self._progress(policy, repeat, repeats)
            self._compute += floors.of(agent)
            self._notes += floors.notes
        first = next(iter(agent.packed.values()))
        return Measurement(
            line=self._config.line,
            machine=machine(agent),
            rows=tuple(self._row(policy, agent) for policy in self.policies),
            direct_io=reads_directly(agent.segments.segment_path(first.own.sha256)),
            ssd_bytes_per_s=statistics.median(self._bandwidths),
            is_held=self._is_held(),
            compute_s=statistics.median(each.seconds for each in self._compute) if self._compute else None,
            notes=tuple(dict.fromkeys((*self._rate_notes(), *self._notes))),
        )

    def _is_held(self) -> bool:
        rate = self._options.ssd_bytes_per_s
        return rate is not None and statistics.median(self._bandwidths) >= rate

    def _rate_notes(self) -> list[str]:
        if self._options.ssd_bytes_per_s is None or self._is_held():
            return []
        rate = self._options.ssd_bytes_per_s
        return [f"loads were not held: {rate / 1e6:.0f} MB/s is more than this SSD reaches"]

    def _warm_up(self) -> tuple[Agent, Work]:
        policy = next((policy for policy in self.policies if policy != NAIVE), self._config.policy)
        config = self._config.having(policy=policy)
        with player(config, self.experts, progress=quiet(self._progress)) as stage:
            played = stage.play(self._trace, self._images)
            return stage.agent, work_of(played, self._images)

    def _bandwidth(self, agent: Agent) -> float:
        bandwidth = min(measure_bandwidth(agent), self._options.ssd_bytes_per_s or float("inf"))
        self._bandwidths.append(bandwidth)
        return bandwidth

    def _figures(self, policy: str, bandwidth: float, floors: _Floors, agent: Agent) -> Figures:
        """One run. ``agent``: of the first policy, around whose run the floor is measured twice."""
        if policy == NAIVE:
            return self._naive_figures(bandwidth, floors.seconds(agent), agent)
        config = self._config.having(policy=policy)
        with player(config, self.experts, self._agent_options, quiet(self._progress)) as stage:
            played = stage.play(self._trace, self._images)
            self._agents[policy] = stage.agent
        if config.policy == agent.config.policy or not floors.of(stage.agent):
            floors.measure(stage.agent)
        reasons = played.unknown_reasons(self._trace)
        self._reasons[policy] = tuple(dict.fromkeys((*self._reasons[policy], *reasons)))[:REASONS_SHOWN]
        io_s = io_bytes(stage.agent, played, work_of(played, self._images)) / bandwidth
        forecast = predicted(stage.agent, self._trace, played, bandwidth)
        digest = outputs_sha256(played.labels)
        return engine_figures(played, len(reasons), digest, forecast, _floor(floors.seconds(stage.agent), io_s))

    def _naive_figures(self, bandwidth: float, compute_s: float | None, agent: Agent) -> Figures:
        processor = agent.box.processors[0]
        pool = next(pool for pool in agent.setup.pools if pool.name == agent.box.pool_of(processor))
        server = NaiveServer(
            experts=self._config.catalog.experts,
            graph=self._config.catalog.graph,
            files={expert: self.files[expert] for expert in self.experts},
            expert_bytes=pool.expert_bytes,
            usage=agent.setup.matrix.usage,
            device=torch_device(processor),
            threads=agent.box.cores,
            ssd_bytes_per_s=self._options.ssd_bytes_per_s,
        )
        played = server.play(self._trace, self._images)
        floor = _floor(compute_s, played.missing_bytes / bandwidth)
        return naive_figures(played, outputs_sha256(played.labels), floor)

    def _row(self, policy: str, agent: Agent) -> PolicyRow:
        agent = self._agents.get(policy, agent)
        counts = Counter(spec.processor for spec in agent.setup.executors)
        memory = {pool.name: pool.expert_bytes for pool in agent.setup.pools}
        return PolicyRow(
            policy=policy,
            requests=len(self._trace),
            precision="fp32" if policy == NAIVE else precision_text(agent),
            memory=memory | {f"{pool.name}_workspace": pool.workspace_bytes for pool in agent.setup.pools},
            executors={agent.box.processors[0]: 1} if policy == NAIVE else dict(counts),
            medians=medians(self._runs[policy]),
            runs=tuple(self._runs[policy]),
            unknown_reasons=self._reasons[policy],
        )


class _Floors:
    """The compute alone in one round, by the executors that it was measured on."""

    def __init__(self, is_wanted: bool, work: Work, progress: Progress) -> None:
        self._is_wanted = is_wanted
        self._work = work
        self._progress = progress
        self._found: dict[tuple[ExecutorSpec, ...], list[Compute]] = {}

    @property
    def notes(self) -> list[str]:
        return [each.note for found in self._found.values() for each in found if each.note]

    def measure(self, agent: Agent) -> None:
        if self._is_wanted:
            found = measure_compute(agent, self._work, self._progress)
            self._found.setdefault(tuple(agent.setup.executors), []).append(found)

    def of(self, agent: Agent) -> Sequence[Compute]:
        return self._found.get(tuple(agent.setup.executors), ())

    def seconds(self, agent: Agent) -> float | None:
        found = self.of(agent)
        return statistics.fmean(each.seconds for each in found) if found else None


def predicted(agent: Agent, trace: Sequence[TracedArrival], played: Played, ssd_bytes_per_s: float) -> Predicted:
    """Simulated times of a trace, from this agent's own profile and limits.

    Experts answer as they did when it was played, so that requests take the same routes.
    """
    seen = {
        (number, step.expert): step.prediction
        for number, outcome in enumerate(played.outcomes)
        for step in outcome.steps
    }
    links = {} if agent.stored is None else agent.stored.link_bytes_per_s
    simulation = simulator_of(
        agent.setup,
        lambda request, expert: seen.get((request, expert), PASSES),
        links | {SSD: ssd_bytes_per_s},
        {} if agent.stored is None else sharing_speedups(agent.stored),
    ).run(trace)
    processors = {spec.id: spec.processor for spec in agent.setup.executors}
    batches = (effect.batch for _, effect in simulation.effects if isinstance(effect, StartBatch))
    experts = agent.setup.matrix.experts
    busy_s = sum(
        experts[processors[batch.executor]][batch.expert].performance.latency_s(len(batch.requests))
        for batch in batches
    )
    return Predicted(max(simulation.finished_s.values()), busy_s)


def precision_text(agent: Agent) -> str:
    """The precisions that an agent runs in, such as ``bf16``, or ``bf16+fp32`` where experts differ."""
    return "+".join(sorted({packed.precision for packed in agent.packed.values()}))


def machine(agent: Agent) -> str:
    return f"{agent.box.model}, {agent.box.name}, {agent.box.cores} cores, {software()}"


def _floor(compute_s: float | None, io_s: float) -> Floor | None:
    return None if compute_s is None else Floor(compute_s, io_s)


def quiet(progress: Progress) -> Progress:
    """Packing is worth telling; each agent's probe is not."""

    def tell(stage: str, done: int, total: int) -> None:
        if stage == "pack":
            progress(stage, done, total)

    return tell
