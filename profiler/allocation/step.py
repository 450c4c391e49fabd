"""Last step of a profile: the split of the memories and the number of executors (CoServe, section 4.4).

Guarantees: trials of an earlier search never count; a run on the engine is not repeated after a kill; an unfit expert
or image leaves the sample with a note, and the search begins again without it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from agent.deployment.engine_setup import planned
from agent.deployment.memory_needs import memory_needs
from experts.errors import SampleUnfit
from profiler.allocation.search import (
    EXECUTORS,
    MEMORY,
    SEARCHED_IN_SIMULATION,
    SEARCHED_ON_ENGINE,
    pool_allocations,
    search_allocation,
)
from profiler.allocation.search_runs import SearchRuns
from profiler.allocation.throughput import (
    SAMPLE_REQUESTS,
    busy,
    device_matrix,
    engine_throughput,
    sample_requests,
    simulated_throughput,
)
from profiler.workload.samples import Checked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from agent.config import LineConfig
    from agent.core.performance import ExecutorSpec, PoolSpec
    from agent.device_profile.records import Allocation, StoredProfile, UsageProfile
    from agent.device_profile.store import ProfileDraft
    from agent.runtime.machine.box import Box
    from profiler.allocation.search import SearchedAllocation, SearchOptions, Throughput
    from profiler.workload.samples import LineSamples, Sample
    from profiler.workload.traces import TracedArrival

ENGINE, SIMULATE, CASUAL = "engine", "simulate", "casual"  # where the allocation comes from
ON_ENGINE = "search on the engine"  # a stage


@dataclass(slots=True)
class AllocationStep:
    """Allocation of one line. ``failed``: reasons by expert that cannot be served; the search adds to it."""

    config: LineConfig
    box: Box
    samples: LineSamples
    draft: ProfileDraft
    failed: dict[str, str]
    options: SearchOptions
    notes: list[str] = field(default_factory=list)

    def allocate(self, source: str, interim: StoredProfile, progress: Callable[[str, int, int], None]) -> Allocation:
        """Searches on the ENGINE or in simulation (SIMULATE) and saves the trials, or takes the CASUAL allocation.

        Raises ConfigError naming each expert that does not fit, and where nothing is left to search with.
        """
        for search in (EXECUTORS, *(MEMORY + pool for pool in self.box.pools)):
            self.draft.save_trials(search, ())  # of a search that was killed in its last moment
        if not self.config.catalog.components:
            self.notes.append("no expert takes images, whose throughput is searched for: memories are split by rule")
        if source == CASUAL or not self.config.catalog.components:
            return self._casual(interim)
        if source == SIMULATE:
            found = self.simulated(interim, self._sample(SAMPLE_REQUESTS, interim.usage, {}))
        else:
            found = self._run(interim, progress)
        for search in dict.fromkeys(trial.search for trial in found.trials):
            self.draft.save_trials(search, [trial for trial in found.trials if trial.search == search])
        return found.allocation

    def simulated(self, interim: StoredProfile, trace: Sequence[TracedArrival]) -> SearchedAllocation:
        """Search with these requests, played faster where they would leave executors idle (``busy``)."""
        config, box = self.config, self.box
        device = device_matrix(config, box, interim, self.failed)
        throughput = simulated_throughput(config, box, interim, busy(trace, device, self.options), self.failed)
        return search_allocation(config, box, device, throughput, SEARCHED_IN_SIMULATION, self.options)

    def _run(self, interim: StoredProfile, progress: Callable[[str, int, int], None]) -> SearchedAllocation:
        """Searches on the engine, without experts and images that prove unfit. Raises ConfigError for an empty rest."""
        images = _SearchImages(self.samples.mix)
        counted = _CountedRuns(progress)
        while True:
            trace = self._sample(self.options.engine_requests, interim.usage, images.by_component())
            runs = SearchRuns(self.draft, self.config, self.box, interim, trace)
            try:
                device = device_matrix(self.config, runs.box, interim, self.failed)
                engine = engine_throughput(self.config, interim, busy(trace, device, self.options))
                throughput = runs.remembered(counted.told(engine))
                found = search_allocation(self.config, runs.box, device, throughput, SEARCHED_ON_ENGINE, self.options)
                counted.end()
                self.notes += images.notes()
                return found
            except SampleUnfit as error:
                self._leave_out(error.experts)
                images.leave_out(error.images)

    def _sample(
        self, count: int, usage: UsageProfile, images: Mapping[str, Iterable[Path]]
    ) -> tuple[TracedArrival, ...]:
        return sample_requests(self.config, count, images=images, without=self.failed, usage=usage)

    def _leave_out(self, experts: Mapping[str, str]) -> None:
        for name, reason in sorted(experts.items()):
            self.failed.setdefault(name, reason)
            self.notes.append(
                f"the allocation was searched without {name} and the components on whose routes it stands, as it did "
                "not judge there what it was given: put it right and profile again, or take it off the line"
            )

    def _casual(self, interim: StoredProfile) -> Allocation:
        """Raises ConfigError naming each expert that does not fit."""
        found = planned(self.config, self.box, interim, without=self.failed)
        needs = memory_needs(
            interim.allocation.budget_bytes, found.executors, found.matrix, found.limits.pinned, self.config.texts.kv
        )
        counts = Counter(spec.processor for spec in found.executors)
        return replace(interim.allocation, pools=pool_allocations(found.pools, needs), executors=dict(counts))


class _SearchImages:
    """Images for the engine search: each component's files in their own mix, decoded when they are taken."""

    def __init__(self, mix: Mapping[str, Sequence[Sample]]) -> None:
        self._mix = mix
        self._checked = Checked()
        self._unfit: dict[Path, str] = {}  # broken since they were checked

    def by_component(self) -> dict[str, Iterator[Path]]:
        return {component: self._sound(samples) for component, samples in self._mix.items()}

    def leave_out(self, unfit: Mapping[Path, str]) -> None:
        self._unfit |= unfit

    def notes(self) -> Iterator[str]:
        left_out = {path: error.message for path, error in self._checked.broken.items()} | self._unfit
        for path, reason in sorted(left_out.items()):
            said = f"sample image {path} was left out of the search: {reason}"
            yield f"{said} - remove it from the samples, or replace it"

    def _sound(self, samples: Iterable[Sample]) -> Iterator[Path]:
        return (each.path for each in samples if each.path not in self._unfit and self._checked.is_sound(each))


class _CountedRuns:
    """Reports the runs that a search has made; their total is known only at the end."""

    def __init__(self, progress: Callable[[str, int, int], None]) -> None:
        self._progress = progress
        self._runs = 0

    def told(self, throughput: Throughput) -> Throughput:

        def images_per_s(executors: Sequence[ExecutorSpec], pools: Sequence[PoolSpec]) -> float:
            self._progress(ON_ENGINE, self._runs, self._runs + 1)
            found = throughput(executors, pools)
            self._runs += 1
            return found

        return images_per_s

    def end(self) -> None:
        if self._runs:
            self._progress(ON_ENGINE, self._runs, self._runs)
