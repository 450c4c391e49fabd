"""WorkerManager: the workers beside the agent, from their sections of the line file to executors of one Engine.

A worker detects its box. The agent decides its executors, memories and forms as for its own box, packs what it needs,
and has it measured, once for workers of one kind on equal boxes. Language models stay in the agent's process.

Guarantees: a worker that is lost is started again after growing pauses, for as long as the agent runs; one that comes
back on another kind of box is refused.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from threading import Event as Flag
from threading import Thread
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from agent.cluster.extra import SETTINGS, why_absent
from agent.config import PACKED, set_unless_given
from agent.deployment.engine_setup import Given, groundwork
from agent.deployment.executors import are_in_workers
from agent.deployment.packed_copies import copies_of, packed_experts, with_forms
from agent.deployment.performance_matrix import matrix
from agent.deployment.worker_setup import JoinedWorker, WorkerSetup, joined_workers, part_of, with_workers
from agent.device_profile.identity import differences, identity_of
from agent.line_file.cluster import WorkerSection
from agent.runtime.workers.processes import start_process
from agent.runtime.workers.remote import RemoteWorker, share_of
from experts.backends.forms import form_of
from experts.backoff import Backoff
from experts.errors import CoServeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from agent.cluster.ray_cluster import RayCluster
    from agent.config import LineConfig
    from agent.core.performance import ExpertProfile, Limits, PerformanceMatrix
    from agent.deployment.engine_setup import EngineSetup, Groundwork
    from agent.deployment.packed_copies import Precisions
    from agent.device_profile.records import StoredProfile
    from agent.runtime.expert_copy import ExpertCopy
    from agent.runtime.loop import AgentLoop
    from agent.runtime.machine.box import Box
    from agent.runtime.workers.messages import Channel
    from experts.expert import Precision
    from experts.packed.packing import PackingReport
    from experts.packed.weights import SegmentStore

    Progress = Callable[[str, int, int], None]
    Pack = Callable[[LineConfig, Precisions], PackingReport]

log = logging.getLogger(__name__)

WORKERS = "workers"  # folder of workers' packed files, beside those of the agent
PROGRESS_S = 5.0  # between two reports of a start
SOUND_S = 600.0  # a worker that worked so long starts again after the shortest pause
RESTARTS = Backoff(1.0, 60.0)

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """A worker to start. ``node``: of its box, "" for the agent's; ``sharers``: processes that share that box."""

    name: str
    kind: WorkerSection
    start: Callable[[], Channel]
    node: str = ""
    sharers: int = 1


def worker_specs(config: LineConfig, folder: Path) -> tuple[WorkerSpec, ...]:
    """Where the workers of a line start; ``folder``: for their packed files.

    Raises ConfigError without the extra that a cluster needs, ClusterUnreachable.
    """
    cluster = config.cluster
    if cluster.address is not None:
        found = _cluster_of(config).specs(cluster.names, cluster.kinds, folder)
        on_node = Counter(spec.node for spec in found)
        return tuple(WorkerSpec(each.name, each.kind, each.start, each.node, on_node[each.node]) for each in found)
    gpus, sharers = count(), sharers_of_box(config)
    return tuple(
        WorkerSpec(name, kind, partial(start_process, folder / name / PACKED, _environment(kind, gpus)), "", sharers)
        for name, kind in zip(cluster.names, cluster.kinds, strict=True)
    )


def sharers_of_box(config: LineConfig) -> int:
    """Number of processes that share the agent's box: its workers there, and the agent if it has executors."""
    here = len(config.cluster.names) if config.cluster.address is None else 0
    return max(here + (not are_in_workers(config)), 1)


def on_cluster(config: LineConfig, address: str) -> LineConfig:
    """The line with its workers in this cluster; without workers, with one on each node. Raises as ``worker_specs``."""
    there = replace(config, cluster=config.cluster.model_copy(update={"address": address}), executors=None)
    if there.cluster.workers:
        return there
    kind = WorkerSection(count=_cluster_of(there).nodes, device=config.device, memory=config.memory)
    return replace(there, cluster=there.cluster.model_copy(update={"workers": (kind,)}))


def _cluster_of(config: LineConfig) -> RayCluster:
    """Raises as ``worker_specs``."""
    missing = why_absent()
    if missing is not None:
        raise config.document.error(missing, "cluster", "address")
    for name, value in SETTINGS.items():
        set_unless_given({name: value}, {name})
    from agent.cluster.ray_cluster import RayCluster  # of an extra

    return RayCluster(str(config.cluster.address), f"coserve-{config.line}")


def _environment(kind: WorkerSection, gpus: count[int]) -> dict[str, str]:
    """Variables of a worker's process: the GPU that it sees, if it may have one."""
    return {"CUDA_VISIBLE_DEVICES": str(next(gpus))} if kind.device in ("cuda", "auto") else {}


class Detected(NamedTuple):
    """A worker's whole box, and the forms that do not run there, with reasons."""

    box: Box
    absent: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class WorkersRows:
    """Copies of a line, times of new ones, and experts that cannot run, by processor of a worker."""

    copies: Mapping[str, tuple[ExpertCopy, ...]]
    columns: Mapping[str, Mapping[str, ExpertProfile]]
    failed: Mapping[str, str]

    def plus(self, worker: str, rows: WorkersRows) -> WorkersRows:
        """These rows and those of a worker, under its names."""
        copies = {f"{worker}/{processor}": listed for processor, listed in rows.copies.items()}
        columns = {f"{worker}/{processor}": column for processor, column in rows.columns.items()}
        failed = dict(self.failed) | dict(rows.failed)
        return WorkersRows(dict(self.copies) | copies, dict(self.columns) | columns, failed)


class WorkerManager:
    """Workers of one line. ``segments``: the agent's packed files; ``ssd_bytes_per_s``: limit for each worker."""

    def __init__(
        self, config: LineConfig, specs: Sequence[WorkerSpec], segments: SegmentStore, ssd_bytes_per_s: float | None,
        progress: Progress,
    ) -> None:  # fmt: skip
        self._config = config
        self._specs = {spec.name: spec for spec in specs}
        self._segments = segments
        self._ssd_bytes_per_s = ssd_bytes_per_s
        self._progress = progress
        self._workers: dict[str, RemoteWorker] = {}
        self._joined: tuple[JoinedWorker, ...] = ()
        self._limits: Limits | None = None
        self._began_s: dict[str, float] = {}  # when each worker began to work
        self._pauses_s: dict[str, float] = {}
        self._loop: AgentLoop | None = None
        self._stopping = Flag()

    def start(self, ground: Groundwork, local: EngineSetup, pack: Pack) -> tuple[EngineSetup, dict[str, ExpertCopy]]:
        """Start the workers; the setup of the Engine over all executors, and their copies by name.

        Raises ConfigError for a worker that cannot run its part, WorkerBroken for one that does not start.
        """
        found = dict(zip(self._specs, self._all(self._specs.values(), self._detect), strict=True))
        setup: list[WorkerSetup] = []
        for spec in self._specs.values():
            like = next((each for each in setup if self._are_alike(each, spec, found[spec.name].box)), None)
            if like is None:
                (like,) = self._all([spec], lambda each: self._set_up(each, found[each.name], ground, pack))
            setup.append(replace(like, name=spec.name))
        self._joined = joined_workers(local, setup)
        copies = {copy.name: copy for each in setup for listed in each.copies.values() for copy in listed}
        return with_workers(local, self._joined), copies

    def assemble(self, setup: EngineSetup, copies: Mapping[str, ExpertCopy], scaled: frozenset[str]) -> None:
        """Make every worker ready. Raises WorkerBroken."""
        self._limits = setup.limits
        self._all(self._joined, lambda each: self._make_ready(each, copies, setup.matrix, scaled))

    def attach(self, loop: AgentLoop) -> None:
        """Work for a loop that has not started."""
        self._loop = loop
        for worker in self._workers.values():
            worker.post = loop.post
        loop.attach({name: self._workers[name] for name in self._specs}, self._bring_back)

    def measured(
        self, config: LineConfig, ground: Groundwork, pack: Pack, is_new: Callable[[ExpertCopy], bool]
    ) -> WorkersRows:
        """Copies of a changed line for each processor of the workers, and times of the new ones.

        Raises ConfigError as ``start`` does; WorkerBroken.
        """
        rows = WorkersRows({}, {}, {})
        found: dict[str, tuple[WorkersRows, WorkerSetup]] = {}
        for each in self._joined:
            like = next((known for known, setup in found.values() if setup.setup is each.setup.setup), None)
            if like is None:
                like = self._rows(self._specs[each.setup.name], each.setup, ground, (config, pack), is_new)
            found[each.setup.name] = like, each.setup
            rows = rows.plus(each.setup.name, like)
        return rows

    def stop(self) -> None:
        """Bring back no lost worker any more; the loop stops the others."""
        self._stopping.set()

    def close(self) -> None:
        """End the workers of an agent that does not start."""
        self.stop()
        for worker in self._workers.values():
            worker.lose("the agent does not start")

    def _all(self, items: Iterable[Item], work: Callable[[Item], Result]) -> list[Result]:
        """Work on all at once, and report progress meanwhile: a service manager waits for it."""
        listed = list(items)
        with ThreadPoolExecutor(max(len(listed), 1), "workers") as threads:
            futures = [threads.submit(work, item) for item in listed]
            while waiting := wait(futures, PROGRESS_S).not_done:
                self._progress("workers", len(listed) - len(waiting), len(listed))
            return [future.result() for future in futures]

    def _detect(self, spec: WorkerSpec) -> Detected:
        worker = self._workers[spec.name] = RemoteWorker(spec.name, spec.start(), self._segments)
        return Detected(*worker.ask("detected", "detect", spec.kind.device))

    def _are_alike(self, setup: WorkerSetup, spec: WorkerSpec, box: Box) -> bool:
        other = self._specs[setup.name]
        is_same_kind = (other.kind, other.node, other.sharers) == (spec.kind, spec.node, spec.sharers)
        return is_same_kind and is_like(setup.found, box)

    def _set_up(self, spec: WorkerSpec, found: Detected, ground: Groundwork, pack: Pack) -> WorkerSetup:
        """Decide, pack and measure a worker's part."""
        own, copies = self._decide(spec, found, ground, (self._config, pack))
        times, failed = self._times(spec, own, copies)
        return WorkerSetup(spec.name, spec.node, found.box, own.box, found.absent, own.setup(times, failed), copies)

    def _rows(
        self, spec: WorkerSpec, setup: WorkerSetup, ground: Groundwork, line: tuple[LineConfig, Pack],
        is_new: Callable[[ExpertCopy], bool],
    ) -> WorkersRows:  # fmt: skip
        own, copies = self._decide(spec, Detected(setup.found, setup.absent), ground, line)
        new = {processor: tuple(copy for copy in listed if is_new(copy)) for processor, listed in copies.items()}
        if not any(new.values()):
            return WorkersRows(copies, {}, {})
        times, failed = self._times(spec, own, new)
        return WorkersRows(copies, times.experts, failed)

    def _decide(
        self, spec: WorkerSpec, found: Detected, ground: Groundwork, line: tuple[LineConfig, Pack]
    ) -> tuple[Groundwork, dict[str, tuple[ExpertCopy, ...]]]:
        """A worker's executors and forms, and its copies by processor, packed."""
        config, pack = line[0].of_worker(spec.kind), line[1]
        profile = _profile_for(ground.profile, found.box)
        packed = packed_experts(config, self._segments.directory)
        own = groundwork(config, part_of(found.box, spec.sharers), profile, packed, Given(usage=ground.usage))
        own = replace(own, precisions=_executable(own.precisions, found.absent))
        packed_now = pack(config, own.precisions).packed
        return own, {
            processor: tuple(copy for copy in listed if not copy.expert.takes_texts)
            for processor, listed in copies_of(config, own.precisions, packed_now).items()
        }

    def _times(
        self, spec: WorkerSpec, own: Groundwork, copies: Mapping[str, tuple[ExpertCopy, ...]]
    ) -> tuple[PerformanceMatrix, Mapping[str, str]]:
        if own.profile is not None:
            return matrix(own.profile, own.box, copies, own.usage, own.executors * spec.sharers), {}
        worker = self._workers[spec.name]
        worker.give_files([copy.packed for listed in copies.values() for copy in listed])
        (probed,) = worker.ask("probed", "measure", own.box, copies, own.usage, own.executors)
        return probed.matrix, probed.failed

    def _make_ready(
        self, each: JoinedWorker, copies: Mapping[str, ExpertCopy], times: PerformanceMatrix, scaled: frozenset[str]
    ) -> None:
        assert self._limits is not None, "the Engine's setup comes first"
        worker = self._workers[each.setup.name]
        worker.executors = each.executors
        own, columns = share_of(each.executors, copies, times)
        limits = replace(self._limits, pools=each.pools, placement={})
        worker.give_files([copy.packed for copy in own.values()])
        options = scaled, self._ssd_bytes_per_s
        part = each.setup.box, each.executors, limits, own, columns, options
        (failed,) = worker.ask("ready", "assemble", *part)
        for expert, reason in failed.items():
            log.warning("worker_cannot_run worker=%s expert=%s reason=%s", each.setup.name, expert, reason)
        self._began_s[each.setup.name] = time.monotonic()

    def _bring_back(self, name: str) -> None:
        """Start a lost worker again, on a thread of its own."""
        joined = next(each for each in self._joined if each.setup.name == name)
        Thread(target=self._restart, args=(joined,), name=f"restart-{name}", daemon=True).start()

    def _restart(self, joined: JoinedWorker) -> None:
        name = joined.setup.name
        if time.monotonic() - self._began_s[name] > SOUND_S:
            self._pauses_s[name] = 0.0
        pause_s = RESTARTS.next_pause_s(self._pauses_s.get(name, 0.0))
        while not self._stopping.wait(pause_s):
            self._pauses_s[name], pause_s = pause_s, RESTARTS.next_pause_s(pause_s)
            try:
                found = self._detect(self._specs[name]).box
                if not is_like(found, joined.setup.found):
                    raise CoServeError(f"it is on another kind of box now: {found.model}")
                assert self._loop is not None, "only a loop loses workers"
                self._make_ready(joined, *self._loop.served, self._loop.scaled)
            except Exception as error:  # noqa: BLE001 - the boundary of this thread
                log.error("worker_not_back worker=%s retry_s=%.0f reason=%s", name, pause_s, error)
                if name in self._workers:
                    self._workers[name].lose(str(error))
                continue
            worker = self._workers[name]
            worker.post = self._loop.post
            self._loop.join(name, worker, joined.executors, joined.pools)
            return


def is_like(box: Box, other: Box) -> bool:
    """True for boxes of one kind; free memory aside."""
    return replace(box, host=other.host, device=other.device) == other


def _profile_for(profile: StoredProfile | None, box: Box) -> StoredProfile | None:
    """The line's device profile, for a worker on such a box."""
    if profile is None or any(differences(profile.box, identity_of(box))):
        return None
    return profile


def _executable(precisions: Precisions, absent: Mapping[str, str]) -> Precisions:
    """The precisions, with torch's forms for those that do not run on the worker, or cannot be packed here."""

    def form(_: str, name: Precision) -> Precision:
        return form_of(name).plain if name in absent or form_of(name).why_absent() is not None else name

    return with_forms(precisions, form)
