"""Runs of the real engine that outlive a kill: a resumed allocation search repeats none of them.

Guarantees: a run is remembered under everything that it was made with: line file, weights, precisions, times, usage,
requests, executors and memories, to the byte. Free memory differs a little from start to start, so a resumed search
with automatic budgets keeps its first ones while they are within DRIFT of today's.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from pydantic import NonNegativeInt, TypeAdapter, ValidationError

from agent.core.performance import DEVICE, HOST
from agent.deployment.memory_split import pool_budgets
from agent.device_profile.records import SearchTrial

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agent.config import LineConfig
    from agent.core.performance import ExecutorSpec, PoolSpec
    from agent.device_profile.records import StoredProfile
    from agent.device_profile.store import ProfileDraft
    from agent.runtime.machine.box import Box
    from profiler.allocation.search import Throughput
    from profiler.workload.traces import TracedArrival

RUNS = "runs"  # SearchTrial.search of runs that are kept until the search ends
DRIFT = 0.1


@dataclass(frozen=True, slots=True)
class _Note:
    """Situation of a run, and the memory free when the search began."""

    situation: str
    available_bytes: dict[str, NonNegativeInt]


_NOTES = TypeAdapter(_Note)


class SearchRuns:
    """Runs of one search, kept in the draft. ``box``: this box, with the free memory that the search began with."""

    def __init__(
        self, draft: ProfileDraft, config: LineConfig, box: Box, profile: StoredProfile, trace: Sequence[TracedArrival]
    ) -> None:
        self._draft = draft
        self._situation = _digest(config, profile, trace)
        notes = {trial: _note(trial, box) for trial in draft.trials(RUNS)}
        kept = [trial for trial, note in notes.items() if note is not None and note.situation == self._situation]
        first = notes[kept[0]] if kept else None
        self.box = box if first is None else _with_available(box, first.available_bytes)
        then, now = pool_budgets(config, self.box), pool_budgets(config, box)
        if any(abs(now[pool] - then[pool]) > DRIFT * then[pool] for pool in now):
            kept, self.box = [], box
        self._trials = kept

    def remembered(self, throughput: Throughput) -> Throughput:
        """Wraps ``throughput``, which is called only for runs that are not remembered."""

        def images_per_s(executors: Sequence[ExecutorSpec], pools: Sequence[PoolSpec]) -> float:
            processors = [spec.processor for spec in executors]
            memories = [[pool.name, pool.expert_bytes, pool.workspace_bytes] for pool in pools]
            setting = json.dumps([processors, memories])
            for trial in self._trials:
                if trial.setting == setting:
                    return trial.images_per_s
            measured = throughput(executors, pools)
            self._keep(setting, measured)
            return measured

        return images_per_s

    def _keep(self, setting: str, images_per_s: float) -> None:
        available = {pool: self.box.size_of(pool).available_bytes for pool in self.box.pools}
        note = json.dumps(asdict(_Note(self._situation, available)))
        self._trials.append(SearchTrial(RUNS, len(self._trials) + 1, setting, images_per_s, note))
        self._draft.save_trials(RUNS, self._trials)


def _note(trial: SearchTrial, box: Box) -> _Note | None:
    """Note of a trial; None where the trial says nothing of this box."""
    try:
        note = _NOTES.validate_json(trial.note, strict=True)
    except ValidationError:
        return None
    return note if note.available_bytes.keys() >= set(box.pools) else None


def _with_available(box: Box, available_bytes: Mapping[str, int]) -> Box:
    host = replace(box.host, available_bytes=available_bytes[HOST])
    device = None if box.device is None else replace(box.device, available_bytes=available_bytes[DEVICE])
    return replace(box, host=host, device=device)


def _digest(config: LineConfig, profile: StoredProfile, trace: Sequence[TracedArrival]) -> str:
    """Digest of everything that throughputs depend on beside executors and memories."""
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
