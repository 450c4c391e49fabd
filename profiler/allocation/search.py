"""Search of memory allocation and executor count by any throughput, measured or simulated (section 4.4).

Guarantees: deterministic as far as the throughput is; an Engine accepts every configuration that is tried or found; the
result is at least as good as the casual split with the same executors.
Executors are searched first, at the casual split of the memories. Then the decay window searches each memory in which
maximum batches take a substantial part, the device's first. In other memories batches get their maximum and experts the
rest.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

from agent.core.policy import PRESETS, Assigning
from agent.deployment.executors import CORES_PER_CPU_EXECUTOR, executor_specs, executors_on
from agent.deployment.memory_needs import MemoryNeeds, memory_needs
from agent.deployment.memory_split import beside_libraries, pinned_experts, pool_budgets
from agent.device_profile.records import Allocation, PoolAllocation, SearchTrial
from experts.errors import ConfigError
from experts.sizes import mib
from profiler.allocation.decay_window import (
    AS_IN_THE_PAPER,
    ExecutorCounts,
    WindowOptions,
    WindowSearch,
    decay_window_search,
    executor_sweep,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from agent.config import LineConfig
    from agent.core.performance import ExecutorSpec, PerformanceMatrix, PoolSpec
    from agent.runtime.machine.box import Box

    Throughput: TypeAlias = Callable[[Sequence[ExecutorSpec], Sequence[PoolSpec]], float]

SEARCHED_ON_ENGINE = "searched on the engine"
SEARCHED_IN_SIMULATION = "searched in simulation"
EXECUTORS = "executors"  # SearchTrial.search
MEMORY = "memory:"  # and the name of the memory


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """Limits of the decay window and of the sweep. ``engine_requests``: requests in one run on the real engine."""

    window: WindowOptions = AS_IN_THE_PAPER
    most_device_executors: int = 6
    most_cpu_executors: int = 4
    engine_requests: int = 200

    def on(self, box: Box) -> SearchOptions:
        """Options for a box: on a CPU alone at least the executors that an agent starts without a profile."""
        if box.processors != ("cpu",):
            return self
        return replace(self, most_cpu_executors=max(self.most_cpu_executors, box.cores // CORES_PER_CPU_EXECUTOR))


DEFAULTS = SearchOptions()


@dataclass(frozen=True, slots=True)
class SearchedAllocation:
    """Allocation found, its throughput, and all runs of the search."""

    allocation: Allocation
    trials: tuple[SearchTrial, ...]
    images_per_s: float


def search_allocation(
    config: LineConfig,
    box: Box,
    device: PerformanceMatrix,
    throughput: Throughput,
    origin: str,
    options: SearchOptions = DEFAULTS,
) -> SearchedAllocation:
    """The executors of a line, and how they share its memories (sections 4.4, 5.3; Figures 11, 17, 18).

    ``throughput``: images/s with these executors and memories. Executors or a workspace of the line file stay
    unchanged. Raises ConfigError if a memory's budget does not hold the largest expert.
    """
    search = _Search(config, box, device, throughput, pool_budgets(config, box), options)
    executors = search.executors()
    split = search.split(executors)
    counts = {processor: 0 for processor in box.processors if processor in device.experts}
    for spec in executors:
        counts[spec.processor] += 1
    found = Allocation(origin, search.budgets, pool_allocations(split, search.needs(executors)), counts)
    return SearchedAllocation(found, tuple(search.trials), search.run(executors, split))


def pool_allocations(split: Sequence[PoolSpec], needs: Mapping[str, MemoryNeeds]) -> tuple[PoolAllocation, ...]:
    return tuple(
        PoolAllocation(spec.name, spec.expert_bytes, spec.workspace_bytes, needs[spec.name].count_in(spec.expert_bytes))
        for spec in split
    )


def executors_of(box: Box, counts: ExecutorCounts) -> tuple[ExecutorSpec, ...]:
    device = next((processor for processor in box.processors if processor != "cpu"), "cpu")
    return executors_on(box, [device] * counts.device + ["cpu"] * counts.cpu)


@dataclass(slots=True)
class _Search:
    """State of a search. No configuration is run twice."""

    config: LineConfig
    box: Box
    device: PerformanceMatrix
    throughput: Throughput
    budgets: dict[str, int]
    options: SearchOptions
    trials: list[SearchTrial] = field(default_factory=list)
    _runs: dict[tuple[tuple[ExecutorSpec, ...], tuple[PoolSpec, ...]], float] = field(default_factory=dict)

    def executors(self) -> tuple[ExecutorSpec, ...]:
        is_alone = PRESETS[self.config.policy].assigning is Assigning.FIRST
        if self.config.executors is not None or is_alone:
            given = executor_specs(self.config, self.box)
            for spec in given:
                if spec.processor not in self.device.experts:
                    wrong = f"the device profile has no times on {spec.processor} - run `coserve profile` on this box"
                    raise self.config.document.error(wrong, "executors", spec.processor)
            return given
        able = [name for name in self.box.processors if name in self.device.experts]
        most_cpu = min(self.options.most_cpu_executors, self.box.cores) if "cpu" in able else 0
        most_device = {"mps": 1}.get(able[0], self.options.most_device_executors) if set(able) - {"cpu"} else 0
        sweep = executor_sweep(self._sweep_value, most_device, most_cpu)
        for number, (counts, value) in enumerate(sweep.steps.items(), start=1):
            note = "does not fit" if value is None else "best" if counts == sweep.best else ""
            self.trials.append(SearchTrial(EXECUTORS, number, self._text(counts), value or 0.0, note))
        if sweep.best is None:
            self._require(executors_of(self.box, ExecutorCounts(min(most_device, 1), 0 if most_device else 1)))
            raise ConfigError("no executors run every expert of this line - give `executors` in the line file")
        return executors_of(self.box, sweep.best)

    def split(self, executors: tuple[ExecutorSpec, ...]) -> tuple[PoolSpec, ...]:
        self._require(executors)
        split = self._casual(executors)
        for place, needs in reversed(list(enumerate(self.needs(executors).values()))):
            if self.config.memory.workspace is None and not needs.is_limited:
                split = self._searched(executors, split, place, needs)
        return split

    def needs(self, executors: Sequence[ExecutorSpec]) -> dict[str, MemoryNeeds]:
        pinned = pinned_experts(self.config)
        return memory_needs(
            beside_libraries(self.budgets, executors), executors, self.device, pinned, self.config.texts.kv
        )

    def run(self, executors: tuple[ExecutorSpec, ...], pools: tuple[PoolSpec, ...]) -> float:
        key = (executors, pools)
        if key not in self._runs:
            self._runs[key] = self.throughput(executors, pools)
        return self._runs[key]

    def _sweep_value(self, counts: ExecutorCounts) -> float | None:
        executors = executors_of(self.box, counts)
        able = {expert for spec in executors for expert in self.device.experts.get(spec.processor, {})}
        everything = {expert for column in self.device.experts.values() for expert in column}
        if able != everything or not all(needs.is_enough for needs in self.needs(executors).values()):
            return None
        return self.run(executors, self._casual(executors))

    def _casual(self, executors: Sequence[ExecutorSpec]) -> tuple[PoolSpec, ...]:
        """A quarter for workspaces (section 5.2), but no more than the maximum batches can use."""
        given = self.config.memory.workspace
        return tuple(
            needs.leaving(needs.casual_workspace_bytes if given is None else given)
            for needs in self.needs(executors).values()
        )

    def _searched(
        self, executors: tuple[ExecutorSpec, ...], split: tuple[PoolSpec, ...], place: int, needs: MemoryNeeds
    ) -> tuple[PoolSpec, ...]:
        """The split with this memory searched by the decay window, or ``split`` where that is better.

        Bytes that no batch can use go to experts in any case: a throughput that falls by that is chance.
        """

        def pools(spec: PoolSpec) -> tuple[PoolSpec, ...]:
            return (*split[:place], spec, *split[place + 1 :])

        found = decay_window_search(
            lambda experts: self.run(executors, pools(needs.keeping(experts))),
            needs.most,
            needs.least,
            self.options.window,
        )
        chosen = pools(needs.keeping(found.chosen))
        best = pools(needs.leaving(min(needs.maximum_batch_bytes, chosen[place].workspace_bytes)))
        self.trials += window_trials(needs.pool, found)
        if best != chosen:
            self._note(needs, best[place], self.run(executors, best), "what no batch can use given to experts")
        is_kept = self.run(executors, split) > self.run(executors, best)
        if split not in (chosen, best):
            note = "the casual split, a quarter for workspaces" + (", kept as the best" if is_kept else "")
            self._note(needs, split[place], self.run(executors, split), note)
        return split if is_kept else best

    def _note(self, needs: MemoryNeeds, spec: PoolSpec, images_per_s: float, note: str) -> None:
        search = MEMORY + needs.pool
        number = sum(trial.search == search for trial in self.trials) + 1
        setting = f"{needs.count_in(spec.expert_bytes)} experts"
        self.trials.append(SearchTrial(search, number, setting, images_per_s, note))

    def _require(self, executors: Sequence[ExecutorSpec]) -> None:
        problems = []
        for needs in self.needs(executors).values():
            given = self.config.memory.workspace
            workspace = f"{mib(needs.one_image_bytes)} for one image on each of its executors"
            if not needs.is_enough:
                short = f"{mib(needs.budget_bytes)} are too little: {needs.largest} needs {mib(needs.largest_bytes)}"
                advice = f"raise memory.{needs.pool}, or take a smaller model"
                wrong = f"{short} beside what is pinned, and batches {workspace} - {advice}"
                problems.append(self.config.document.error(wrong, "memory", needs.pool))
            elif given is not None and not needs.one_image_bytes <= given <= needs.budget_bytes - needs.largest_bytes:
                most = f"{mib(needs.budget_bytes - needs.largest_bytes)} that {needs.largest} leaves of {needs.pool}"
                wrong = f"{mib(given)} is not between {workspace} and the {most} - correct it, or write auto"
                problems.append(self.config.document.error(wrong, "memory", "workspace"))
        if problems:
            raise ConfigError.of(problems)

    def _text(self, counts: ExecutorCounts) -> str:
        device = next((processor for processor in self.box.processors if processor != "cpu"), None)
        named = [f"{counts.device} {device}"] if device else []
        return " + ".join([*named, f"{counts.cpu} cpu"] if "cpu" in self.box.processors else named)


def window_trials(pool: str, search: WindowSearch) -> list[SearchTrial]:
    """Runs of a window search as trials: upper bounds in order, then within the chosen window."""
    trials: list[SearchTrial] = []
    for step in search.steps:
        note = f"window {step.window.lower}-{step.window.upper}"
        if step.predicted is not None and step.error is not None:
            side = "short of" if step.error > 0 else "above"
            note += f", {abs(step.error):.1%} {side} the line's {step.predicted:.2f}"
        trials.append(_trial(pool, len(trials) + 1, search, step.window.upper, note))
    bounds = {step.window.upper for step in search.steps}
    for experts in sorted(search.tried.keys() - bounds):
        note = f"the middle of window {search.window.lower}-{search.window.upper}"
        trials.append(_trial(pool, len(trials) + 1, search, experts, note))
    return trials


def _trial(pool: str, number: int, search: WindowSearch, experts: int, note: str) -> SearchTrial:
    chosen = ", chosen" if experts == search.chosen else ""
    return SearchTrial(MEMORY + pool, number, f"{experts} experts", search.tried[experts], note + chosen)
