"""A line and a trace on the real engine: policies and precisions alternate, with the floor measured in the same run.

Guarantees: policies and precisions alternate, round by round; medians are shown and every value is kept. Unjudged
requests are counted, with their reasons, and never make a run faster. A first run of each precision warms up. Packed
files are read past the page cache where the filesystem allows it (``direct_io``).

A row's floor is that of its own executors, the naive server's that of the first policy's. The floor is measured before
and after the first policy of a round, as a machine's speed changes within a minute, and their mean counts.
"""

from __future__ import annotations

import statistics
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING

from agent.core.effects import StartBatch
from agent.core.performance import SSD
from agent.core.policy import PRESETS
from agent.deployment.build import AgentOptions
from agent.records.database import state_held
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
from profiler.replay.player import experts_of, images_of, player
from profiler.simulation.forecast import sharing_speedups
from profiler.simulation.simulator import PASSES, Simulator

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from agent.config import LineConfig
    from agent.core.performance import ExecutorSpec
    from agent.deployment.build import Agent
    from agent.line_file.machine import GivenPrecision
    from profiler.bench.roofline import Compute
    from profiler.replay.player import Played, Progress
    from profiler.workload.traces import TracedArrival

REASONS_SHOWN = 5
WARMING_UP = "warming up"


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Policies and precisions to run, and replacements of the line's own values; None or empty: the line's own.

    ``policies``: presets, or "naive". ``precisions``: auto is what the profile found. ``memory``: bytes by host, device
    and workspace. ``with_roofline``: also measure the compute alone, which takes as long as another policy.
    """

    policies: tuple[str, ...] = ()
    repeats: int = 1
    memory: Mapping[str, int] = field(default_factory=dict)
    precisions: tuple[GivenPrecision, ...] = ()
    executors: Mapping[str, int] | None = None
    ssd_bytes_per_s: float | None = None
    with_roofline: bool = True

    def on(self, config: LineConfig, precision: GivenPrecision | None = None) -> LineConfig:
        return config.having(memory=self.memory, precision=precision, executors=self.executors)

    @property
    def agent_options(self) -> AgentOptions:
        return AgentOptions(loop=LoopOptions(ssd_bytes_per_s=self.ssd_bytes_per_s))


@dataclass(frozen=True, slots=True)
class _Workload:
    trace: tuple[TracedArrival, ...]
    images: Sequence[NDArray[np.uint8]]
    experts: set[str]
    files: Mapping[str, Path]


def run_line(
    config: LineConfig,
    trace: Sequence[TracedArrival],
    options: RunOptions | None = None,
    progress: Progress = lambda *_: None,
) -> Measurement:
    """Play a trace on a line, every policy in every precision ``repeats`` times.

    Raises ConfigError for an invalid policy, trace or expert, AlreadyRunning if the line's agent runs, ImageError for
    an undecodable image, and AgentCrashed.
    """
    options = options or RunOptions()
    policies = options.policies or (config.policy,)
    for policy in policies:
        if policy not in PRESETS and policy != NAIVE:
            raise ConfigError(f"no policy {policy!r} - choose of {', '.join((*PRESETS, NAIVE))}")
    if not trace or options.repeats < 1:
        raise ConfigError(f"{config.document.file}: nothing to measure - give a trace with arrivals, and repeats")
    with ExitStack() as ending:
        ending.enter_context(state_held(config.state))
        experts = experts_of(trace, config.catalog)
        files = ending.enter_context(naive_files(config, experts)) if NAIVE in policies else {}
        workload = _Workload(tuple(trace), images_of(trace, config.catalog), experts, files)
        engines = tuple(policy for policy in policies if policy != NAIVE)
        sides = [
            _Side(options, precision, engines if number else policies, config, workload, progress)
            for number, precision in enumerate(options.precisions or (None,))
        ]
        sides = [side for side in sides if side.policies]
        for side in sides:
            side.warm_up()
        for repeat in range(1, options.repeats + 1):
            for side in sides:
                side.round(repeat)
    found = [side.measurement() for side in sides]
    ran_in = [note for side in sides for note in side.notes()]
    notes = dict.fromkeys(chain(ran_in, *(each.notes for each in found)))
    return replace(found[0], rows=tuple(chain(*(each.rows for each in found))), notes=tuple(notes))


class _Side:
    """One precision: a run to warm up, then rounds of its policies."""

    def __init__(
        self,
        options: RunOptions,
        precision: GivenPrecision | None,
        policies: Sequence[str],
        config: LineConfig,
        workload: _Workload,
        progress: Progress,
    ) -> None:
        self.policies = policies
        self._precision = precision
        self._config = options.on(config, precision)
        self._options = options
        self._workload = workload
        self._progress = progress
        self._runs: dict[str, list[Figures]] = {policy: [] for policy in policies}
        self._reasons: dict[str, tuple[str, ...]] = dict.fromkeys(policies, ())
        self._agents: dict[str, Agent] = {}
        self._floors: dict[tuple[ExecutorSpec, ...], list[Compute]] = {}  # of this round, by executors
        self._compute: list[Compute] = []  # of the first policy's executors
        self._notes: list[str] = []
        self._bandwidths: list[float] = []

    def warm_up(self) -> None:
        self._report(WARMING_UP, 0, 1)
        policy = next((policy for policy in self.policies if policy != NAIVE), self._config.policy)
        with player(self._config.having(policy=policy), self._workload.experts, progress=self._report_packing) as stage:
            played = stage.play(self._workload.trace, self._workload.images)
            self._first, self._work = stage.agent, work_of(played, self._workload.images)
        self._report(WARMING_UP, 1, 1)

    def round(self, repeat: int) -> None:
        limit = self._options.ssd_bytes_per_s or float("inf")
        self._bandwidths.append(min(measure_bandwidth(self._first), limit))
        self._floors.clear()
        self._measure_floor(self._first)
        for policy in self.policies:
            run = self._naive_figures() if policy == NAIVE else self._engine_figures(policy)
            self._runs[policy].append(run)
            self._report(policy, repeat, self._options.repeats)
        self._compute += self._floors.get(tuple(self._first.setup.executors), ())
        self._notes += [each.note for found in self._floors.values() for each in found if each.note]

    def notes(self) -> list[str]:
        ran_in = next((precision_text(agent) for agent in self._agents.values()), None)
        return [] if None in (self._precision, ran_in) else [f"--precision {self._precision}: ran in {ran_in}"]

    def measurement(self) -> Measurement:
        packed = next(iter(self._first.packed.values()))
        limit, reached = self._options.ssd_bytes_per_s, statistics.median(self._bandwidths)
        is_held = limit is not None and reached >= limit
        notes = list(self._notes)
        if limit is not None and not is_held:
            notes = [f"loads were not held: {limit / 1e6:.0f} MB/s is more than this SSD reaches", *notes]
        return Measurement(
            line=self._config.line,
            machine=machine(self._first),
            rows=tuple(self._row(policy) for policy in self.policies),
            direct_io=reads_directly(self._first.segments.segment_path(packed.own.sha256)),
            ssd_bytes_per_s=reached,
            is_held=is_held,
            compute_s=statistics.median(each.seconds for each in self._compute) if self._compute else None,
            notes=tuple(dict.fromkeys(notes)),
        )

    def _report(self, stage: str, done: int, total: int) -> None:
        self._progress(stage if self._precision is None else f"{self._precision}: {stage}", done, total)

    def _report_packing(self, stage: str, done: int, total: int) -> None:
        if stage == "pack":  # each agent's probe would repeat itself
            self._report(stage, done, total)

    def _measure_floor(self, agent: Agent) -> None:
        if self._options.with_roofline:
            found = measure_compute(agent, self._work, self._report_packing)
            self._floors.setdefault(tuple(agent.setup.executors), []).append(found)

    def _floor(self, agent: Agent, io_s: float) -> Floor | None:
        found = self._floors.get(tuple(agent.setup.executors))
        return Floor(statistics.fmean(each.seconds for each in found), io_s) if found else None

    def _engine_figures(self, policy: str) -> Figures:
        config, workload = self._config.having(policy=policy), self._workload
        with player(config, workload.experts, self._options.agent_options, self._report_packing) as stage:
            played = stage.play(workload.trace, workload.images)
            self._agents[policy] = agent = stage.agent
        if config.policy == self._first.config.policy or tuple(agent.setup.executors) not in self._floors:
            self._measure_floor(agent)
        reasons = played.unknown_reasons(workload.trace)
        self._reasons[policy] = tuple(dict.fromkeys((*self._reasons[policy], *reasons)))[:REASONS_SHOWN]
        bandwidth = self._bandwidths[-1]
        io_s = io_bytes(agent, played, work_of(played, workload.images)) / bandwidth
        forecast = predicted(agent, workload.trace, played, bandwidth)
        return engine_figures(played, len(reasons), forecast, self._floor(agent, io_s))

    def _naive_figures(self) -> Figures:
        agent, workload = self._first, self._workload
        processor = agent.box.processors[0]
        pool = next(pool for pool in agent.setup.pools if pool.name == agent.box.pool_of(processor))
        server = NaiveServer(
            experts=self._config.catalog.experts,
            graph=self._config.catalog.graph,
            files={expert: workload.files[expert] for expert in workload.experts},
            expert_bytes=pool.expert_bytes,
            usage=agent.setup.matrix.usage,
            device=torch_device(processor),
            threads=agent.box.cores,
            ssd_bytes_per_s=self._options.ssd_bytes_per_s,
        )
        played = server.play(workload.trace, workload.images)
        return naive_figures(played, self._floor(agent, played.missing_bytes / self._bandwidths[-1]))

    def _row(self, policy: str) -> PolicyRow:
        agent = self._agents.get(policy, self._first)
        counts = Counter(spec.processor for spec in agent.setup.executors)
        memory = {pool.name: pool.expert_bytes for pool in agent.setup.pools}
        return PolicyRow(
            policy=policy,
            requests=len(self._workload.trace),
            precision="fp32" if policy == NAIVE else precision_text(agent),
            memory=memory | {f"{pool.name}_workspace": pool.workspace_bytes for pool in agent.setup.pools},
            executors={agent.box.processors[0]: 1} if policy == NAIVE else dict(counts),
            medians=medians(self._runs[policy]),
            runs=tuple(self._runs[policy]),
            unknown_reasons=self._reasons[policy],
        )


def predicted(agent: Agent, trace: Sequence[TracedArrival], played: Played, ssd_bytes_per_s: float) -> Predicted:
    """Simulated times of a played trace, by this agent's profile and limits; its requests take the same routes."""
    seen = {
        (number, step.expert): step.prediction
        for number, outcome in enumerate(played.outcomes)
        for step in outcome.steps
    }
    links = ({} if agent.stored is None else agent.stored.link_bytes_per_s) | {SSD: ssd_bytes_per_s}
    speedups = {} if agent.stored is None else sharing_speedups(agent.stored)
    simulator = Simulator(agent.setup, lambda request, expert: seen.get((request, expert), PASSES), links, speedups)
    simulation = simulator.run(trace)
    columns = {spec.id: agent.setup.matrix.experts[spec.processor] for spec in agent.setup.executors}
    batches = (effect.batch for _, effect in simulation.effects if isinstance(effect, StartBatch))
    busy_s = sum(columns[batch.executor][batch.expert].performance.latency_s(len(batch.requests)) for batch in batches)
    return Predicted(max(simulation.finished_s.values()), busy_s)


def precision_text(agent: Agent) -> str:
    """Precisions that an agent runs in: ``bf16``, or ``bf16+fp32`` where experts differ."""
    return "+".join(sorted({packed.precision for packed in agent.packed.values()}))


def machine(agent: Agent) -> str:
    return f"{agent.box.model}, {agent.box.name}, {agent.box.cores} cores, {software()}"
