"""WorkerManager: starts the workers of a line, asks them, and starts lost ones again.

A worker detects its box. The agent decides its executors, memories and forms as for its own box, packs what it needs,
and has it measured, once for workers of one kind on one box. Language models stay in the agent's process, or
have ranks: workers that a load starts, and whose return needs no more than a pause.

Guarantees: a lost worker is started again after growing pauses, for as long as the agent runs. A worker that comes back
on another kind of box is refused.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from threading import Event as Flag
from threading import Thread
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from agent.cluster.extra import SETTINGS, why_absent
from agent.config import PACKED
from agent.deployment.deployment import Overrides, decided
from agent.deployment.executors import are_in_workers, gpus_of_ranks, gpus_of_workers
from agent.deployment.packed_copies import packed_experts, with_forms
from agent.deployment.ranked_experts import worker_name
from agent.device_profile.identity import differences, identity_of
from agent.environment import VISIBLE_GPUS, set_unless_given, torchrun_meeting
from agent.faults.backoff import Backoff
from agent.line_file.cluster import WorkerSection
from agent.runtime.machine.detection import gpus_for_ranks
from agent.runtime.workers.processes import start_process
from agent.runtime.workers.ranks import RankWorker
from agent.runtime.workers.remote import RemoteWorker, share_of
from experts.backends.forms import form_of
from experts.errors import CoServeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from agent.cluster.ray_cluster import RayCluster
    from agent.config import LineConfig
    from agent.core.engine import EngineSetup
    from agent.deployment.deployment import Copies, Deployment
    from agent.runtime.loop import AgentLoop
    from agent.runtime.machine.box import Box
    from agent.runtime.measuring.probe import Probed
    from agent.runtime.workers.messages import WorkerChannel
    from experts.packed.weights import SegmentStore

    Progress = Callable[[str, int, int], None]

log = logging.getLogger(__name__)

WORKERS = "workers"  # folder of workers' packed files, beside those of the agent
PROGRESS_S = 5.0  # between two reports of a start
SOUND_S = 600.0  # a worker that worked so long starts again after the shortest pause
RESTARTS = Backoff(1.0, 60.0)

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """A worker to start. ``node``: its box's, "" for the agent's."""

    name: str
    kind: WorkerSection
    start: Callable[[], WorkerChannel]
    node: str = ""


def worker_specs(config: LineConfig, folder: Path) -> tuple[WorkerSpec, ...]:
    """The workers of a line; ``folder``: for their packed files.

    Raises ConfigError without the extra that a cluster needs, ClusterUnreachable.
    """
    cluster = config.cluster
    if not cluster.workers:
        return ()
    if cluster.address is not None:
        found = _cluster_of(config).specs(cluster.kinds, folder)
        return tuple(WorkerSpec(each.name, each.kind, each.start, each.node) for each in found)
    gpus = gpus_of_workers(config)
    environments = {name: {VISIBLE_GPUS: gpus[name]} if name in gpus else {} for name in cluster.kinds}
    return tuple(
        WorkerSpec(name, kind, partial(start_process, folder / name / PACKED, environments[name]))
        for name, kind in cluster.kinds.items()
    )


def processes_on_box(config: LineConfig) -> int:
    """Number of processes that share the agent's box: its workers there, and the agent if it has executors."""
    here = len(config.cluster.kinds) if config.cluster.address is None else 0
    return max(here + (not are_in_workers(config)), 1)


def on_cluster(config: LineConfig, address: str) -> LineConfig:
    """The line with its workers in this cluster; without workers, with one on each node. Raises as ``worker_specs``."""
    cluster = config.cluster.model_copy(update={"address": address})
    there = config.model_copy(update={"cluster": cluster, "executors": None})
    if there.cluster.workers:
        return there
    kind = WorkerSection(count=_cluster_of(there).nodes, device=config.device, memory=config.memory)
    return there.model_copy(update={"cluster": cluster.model_copy(update={"workers": (kind,)})})


def _cluster_of(config: LineConfig) -> RayCluster:
    """Raises as ``worker_specs``."""
    missing = why_absent()
    if missing is not None:
        raise config.document.error(missing, "cluster", "address")
    for name, value in SETTINGS.items():
        set_unless_given({name: value}, {name})
    from agent.cluster.ray_cluster import RayCluster  # of an extra

    return RayCluster(str(config.cluster.address), f"coserve-{config.line}")


class Detected(NamedTuple):
    """A worker's whole box, and the forms that do not run there, with reasons."""

    box: Box
    absent: Mapping[str, str]


class WorkerManager:
    """Workers of one line. ``segments``: the agent's packed files; ``ssd_bytes_per_s``: limit for each worker."""

    def __init__(self, config: LineConfig, segments: SegmentStore, ssd_bytes_per_s: float | None) -> None:
        self._config = config
        self._specs = {spec.name: spec for spec in worker_specs(config, segments.directory / WORKERS)}
        self._processes = {**Counter(spec.node for spec in self._specs.values()), "": processes_on_box(config)}
        self._segments = segments
        self._ssd_bytes_per_s = ssd_bytes_per_s
        self._workers: dict[str, RemoteWorker] = {}
        self._detected: dict[str, Detected] = {}
        self._setup: EngineSetup
        self._loop: AgentLoop
        self._began_s: dict[str, float] = {}  # when each worker began to work
        self._failures: Counter[str] = Counter()  # losses and failed restarts in a row
        self._stopping = Flag()

    def start(self, progress: Progress) -> None:
        """Start the workers, which detect their boxes. Raises WorkerBroken for one that does not start."""
        self._detected = dict(zip(self._specs, _at_once(self._specs, self._detect, progress), strict=True))

    def for_each(self, work: Callable[[str], Result]) -> dict[str, Result]:
        """Result of each worker by name, worked out once for workers of one kind on one box."""
        found: dict[str, Result] = {}
        for name in self._specs:
            like = next((other for other in found if self._are_alike(other, name)), None)
            found[name] = work(name) if like is None else found[like]
        return found

    @property
    def boxes(self) -> dict[str, Box]:
        return {name: found.box for name, found in self._detected.items()}

    def node(self, name: str) -> str:
        return self._specs[name].node if name in self._specs else ""

    def deployment(self, name: str, line: Deployment) -> Deployment:
        """A worker's executors and forms for a line, whose device profile counts if its box is such a box."""
        spec, found = self._specs[name], self._detected[name]
        config, profile = line.config.of_worker(spec.kind), line.profile
        if profile is not None and any(differences(profile.box, identity_of(found.box))):
            profile = None
        packed = packed_experts(config, self._segments.directory)
        own = decided(config, self._part_of_box(name), profile, packed, Overrides(usage=line.usage))
        forms = with_forms(own.precisions, lambda _, name: form_of(name).plain if name in found.absent else name)
        return replace(own, precisions=forms, takes_any=line.takes_any, processes=self._processes[spec.node])

    def measure(self, name: str, part: Deployment, copies: Copies, progress: Progress) -> Probed:
        """Have copies measured by a worker. Raises WorkerBroken."""
        worker = self._workers[name]

        def ask(copies: Copies) -> Probed:
            worker.give_files([copy.packed for listed in copies.values() for copy in listed])
            probed: Probed = worker.ask("measure", part.box, copies, part.usage, part.executors)
            return probed

        (probed,) = _at_once([copies], ask, progress)
        return probed

    def attach(self, loop: AgentLoop, setup: EngineSetup, progress: Progress) -> None:
        """Make every worker ready, and let it work for a loop that has not started. Raises WorkerBroken."""
        self._loop, self._setup = loop, setup
        _at_once(self._specs, self._make_ready, progress)
        ranked = {name: self._rank_worker(name) for name in setup.workers if name not in self._specs}
        self._began_s = dict.fromkeys(setup.workers, time.monotonic())
        remote = {name: self._workers[name] for name in self._specs}
        for name, worker in ranked.items():
            (executor,), (pool,) = setup.at(name).executors, setup.at(name).pools
            loop.here.text_engines.add(executor, pool.lease_bytes)
            worker.know(*loop.served)
        loop.attach({**remote, **ranked}, self._restart_in_background)

    def stop(self) -> None:
        """Restart no more lost workers; the loop stops the others."""
        self._stopping.set()

    def close(self) -> None:
        """End the workers of an agent that does not start."""
        self.stop()
        for worker in self._workers.values():
            worker.lose("the agent does not start")

    def _detect(self, name: str) -> Detected:
        spec = self._specs[name]
        worker = self._workers[name] = RemoteWorker(name, spec.start(), self._segments)
        return Detected(*worker.ask("detect", spec.kind.device))

    def _rank_worker(self, name: str) -> RankWorker:
        (executor,) = self._setup.at(name).executors
        on_gpus = gpus_of_ranks(self._config, gpus_for_ranks())
        gpus = next((own for expert, own in on_gpus.items() if worker_name(expert) == name), ())
        return RankWorker(name, executor, self._loop.here, self._loop.post, torchrun_meeting(), gpus)

    def _part_of_box(self, name: str) -> Box:
        return self._detected[name].box.shared_by(self._processes[self._specs[name].node])

    def _are_alike(self, name: str, other: str) -> bool:
        one, two = self._specs[name], self._specs[other]
        boxes = self._detected[name].box, self._detected[other].box
        return (one.kind, one.node) == (two.kind, two.node) and _is_of_one_kind(*boxes)

    def _make_ready(self, name: str) -> None:
        worker, part = self._workers[name], self._setup.at(name)
        worker.executors, worker.post, worker.repack = part.executors, self._loop.post, self._loop.repack
        own, columns = share_of(part.executors, *self._loop.served)
        worker.give_files([copy.packed for copy in own.values()])
        options = self._loop.scaled, self._ssd_bytes_per_s
        failed = worker.ask("assemble", self._part_of_box(name), part.executors, part.limits, own, columns, options)
        for expert, reason in failed.items():
            log.warning("worker_cannot_run worker=%s expert=%s reason=%s", name, expert, reason)

    def _restart_in_background(self, name: str) -> None:
        Thread(target=self._restart, args=(name,), name=f"restart-{name}", daemon=True).start()

    def _restart(self, name: str) -> None:
        """Start a lost worker again, after growing pauses until it is ready."""
        if time.monotonic() - self._began_s[name] > SOUND_S:
            self._failures[name] = 0
        self._failures[name] += 1
        while not self._stopping.wait(RESTARTS.pause_s(self._failures[name])):
            try:
                worker = self._started_again(name) if name in self._specs else self._rank_worker(name)
                part = self._setup.at(name)
                self._began_s[name] = time.monotonic()
                self._loop.join(name, worker, part.executors, part.pools)
                return
            except Exception as error:  # noqa: BLE001 - the boundary of this thread
                self._failures[name] += 1
                pause_s = RESTARTS.pause_s(self._failures[name])
                log.error("worker_not_back worker=%s retry_s=%.0f reason=%s", name, pause_s, error)
                if (begun := self._workers.get(name)) is not None:  # ranks have no process yet
                    begun.lose(str(error))

    def _started_again(self, name: str) -> RemoteWorker:
        """A lost worker, ready again. Raises CoServeError."""
        found = self._detect(name).box
        if not _is_of_one_kind(found, self._detected[name].box):
            raise CoServeError(f"it is on another kind of box now: {found.model}")
        self._make_ready(name)
        return self._workers[name]


def _is_of_one_kind(box: Box, other: Box) -> bool:
    """True for boxes that differ in memory, or in what is said of a fault, alone."""
    return replace(box, host=other.host, device=other.device, fault=other.fault) == other


def _at_once(items: Iterable[Item], work: Callable[[Item], Result], progress: Progress) -> list[Result]:
    """Work on all items at once, and report progress meanwhile: a service manager waits for it."""
    listed = list(items)
    with ThreadPoolExecutor(max(len(listed), 1), "workers") as threads:
        futures = [threads.submit(work, item) for item in listed]
        while waiting := wait(futures, PROGRESS_S).not_done:
            progress("workers", len(listed) - len(waiting), len(listed))
        return [future.result() for future in futures]
