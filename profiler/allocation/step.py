"""Last step of a profile: the split of the memories and the number of executors (CoServe, section 4.4).

Guarantees: trials of an earlier search never count; a note names each expert or image that proves unfit, and the search
restarts without it. A resumed search repeats no run on the engine: a run is stored with all its inputs, to the byte.
Free memory differs a little between starts, so a resumed search with automatic budgets keeps its first budgets while
they are within DRIFT of the current ones.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

from agent.core.performance import DEVICE, HOST
from agent.deployment.deployment import planned
from agent.deployment.memory_needs import memory_needs
from agent.deployment.memory_split import beside_libraries, pool_budgets
from agent.device_profile.records import SearchTrial
from agent.faults.errors import SampleUnfit
from profiler.allocation.search import (
    EXECUTORS,
    MEMORY,
    SEARCHED_IN_SIMULATION,
    SEARCHED_ON_ENGINE,
    pool_allocations,
    search_allocation,
)
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

RUNS = "runs"  # SearchTrial.search of runs that are kept until the search ends
DRIFT = 0.1
ENGINE, SIMULATE, CASUAL = "engine", "simulate", "casual"  # source of the allocation
ON_ENGINE = "search on the engine"  # a stage


class SearchRuns:
    """Runs of one search, kept in the draft. ``box``: this box, with the memory that was free when the search began.

    The note of a run holds a digest of its situation, and that free memory.
    """

    def __init__(
        self, draft: ProfileDraft, config: LineConfig, box: Box, profile: StoredProfile, trace: Sequence[TracedArrival]
    ) -> None:
        self._draft = draft
        self._situation = _digest(config, profile, trace)
        kept = [each for each in draft.trials(RUNS) if json.loads(each.note)["situation"] == self._situation]
        self.box = box
        if kept:
            free_bytes = json.loads(kept[0].note)["available_bytes"]
            host = replace(box.host, available_bytes=free_bytes[HOST])
            device = None if box.device is None else replace(box.device, available_bytes=free_bytes[DEVICE])
            self.box = replace(box, host=host, device=device)
        then, now = pool_budgets(config, self.box), pool_budgets(config, box)
        if any(abs(now[pool] - then[pool]) > DRIFT * then[pool] for pool in now):
            kept, self.box = [], box
        self._trials = kept

    def remembered(self, throughput: Throughput) -> Throughput:
        """Throughput that calls the given one only for runs that are not remembered."""

        def images_per_s(executors: Sequence[ExecutorSpec], pools: Sequence[PoolSpec]) -> float:
            processors = [spec.processor for spec in executors]
            memories = [[pool.name, pool.expert_bytes, pool.workspace_bytes] for pool in pools]
            setting = json.dumps([processors, memories])
            for trial in self._trials:
                if trial.setting == setting:
                    return trial.images_per_s
            measured = throughput(executors, pools)
            self._trials.append(SearchTrial(RUNS, len(self._trials) + 1, setting, measured, json.dumps(note)))
            self._draft.save_trials(RUNS, self._trials)
            return measured

        available_bytes = {pool: self.box.size_of(pool).available_bytes for pool in self.box.pools}
        note = {"situation": self._situation, "available_bytes": available_bytes}
        return images_per_s


def _digest(config: LineConfig, profile: StoredProfile, trace: Sequence[TracedArrival]) -> str:
    parts = [
        config.document.sha256,
        config.policy,
        sorted(profile.packed.items()),
        sorted(profile.precisions.items()),
        sorted(profile.usage.probabilities.items()),
        sorted(profile.usage.pass_rates.items()),
        [asdict(kind) for kind in profile.kinds],
        [asdict(link) for link in profile.links],
        sorted(profile.speedups.items()),
        [asdict(arrival) for arrival in trace],
    ]
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()


@dataclass(slots=True)
class AllocationStep:
    """Allocation of one line. ``failed``: reasons by expert that cannot be served; searches add to it."""

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
            self.draft.save_trials(search, ())  # those of a killed search
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
        images = _SearchImages(self.samples.mix)
        done: list[float] = []
        while True:
            trace = self._sample(self.options.engine_requests, interim.usage, images.by_component())
            runs = SearchRuns(self.draft, self.config, self.box, interim, trace)
            try:
                device = device_matrix(self.config, runs.box, interim, self.failed)
                engine = engine_throughput(self.config, interim, busy(trace, device, self.options))
                throughput = runs.remembered(_counted(engine, done, progress))
                found = search_allocation(self.config, runs.box, device, throughput, SEARCHED_ON_ENGINE, self.options)
                if done:
                    progress(ON_ENGINE, len(done), len(done))
                self.notes += images.notes()
                return found
            except SampleUnfit as error:
                for name, reason in sorted(error.experts.items()):
                    self.failed.setdefault(name, reason)
                    self.notes.append(
                        f"the allocation was searched without {name} and the components whose routes contain it, as "
                        "it failed to judge sample images: correct it and profile again, or remove it from the line"
                    )
                images.unfit |= error.images

    def _sample(
        self, count: int, usage: UsageProfile, images: Mapping[str, Iterable[Path]]
    ) -> tuple[TracedArrival, ...]:
        return sample_requests(self.config, count, images=images, without=self.failed, usage=usage)

    def _casual(self, interim: StoredProfile) -> Allocation:
        found = planned(self.config, self.box, interim, without=self.failed)
        needs = memory_needs(
            beside_libraries(interim.allocation.budget_bytes, found.executors),
            found.executors,
            found.matrix,
            found.limits.pinned,
            self.config.texts.kv,
        )
        counts = Counter(spec.processor for spec in found.executors)
        return replace(interim.allocation, pools=pool_allocations(found.pools, needs), executors=dict(counts))


class _SearchImages:
    """Images for the search on the engine: each component's files in their own mix, decoded when they are drawn."""

    def __init__(self, mix: Mapping[str, Sequence[Sample]]) -> None:
        self._mix = mix
        self._checked = Checked()
        self.unfit: dict[Path, str] = {}  # broken after they were checked

    def by_component(self) -> dict[str, Iterator[Path]]:
        def sound(samples: Iterable[Sample]) -> Iterator[Path]:
            return (each.path for each in samples if each.path not in self.unfit and self._checked.is_sound(each))

        return {component: sound(samples) for component, samples in self._mix.items()}

    def notes(self) -> Iterator[str]:
        left_out = {path: error.message for path, error in self._checked.broken.items()} | self.unfit
        for path, reason in sorted(left_out.items()):
            left_out_text = f"sample image {path} was left out of the search: {reason}"
            yield f"{left_out_text} - remove it from the samples, or replace it"


def _counted(throughput: Throughput, done: list[float], progress: Callable[[str, int, int], None]) -> Throughput:
    def images_per_s(executors: Sequence[ExecutorSpec], pools: Sequence[PoolSpec]) -> float:
        progress(ON_ENGINE, len(done), len(done) + 1)
        done.append(throughput(executors, pools))
        return done[-1]

    return images_per_s
