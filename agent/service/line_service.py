"""Composition root of ``coserve serve``: sources -> inspector -> verdicts -> boards, and their ordered end.

Guarantees: on stop no new image is taken, taken images are finished within ``DRAIN_S``, the rest waits for the next
start: files in their folder's ``.work``, all other images in the journal. After a crash no image is taken, and all
ends.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from agent.config import line_of, read_line
from agent.core.names import expert_of, line_name
from agent.deployment.build import pack
from agent.deployment.line_change import keys_for_restart, plan_change, taken_over
from agent.doors.desk import ReloadView
from agent.faults.errors import OrderRefused, Reason
from agent.faults.housekeeping import Housekeeper
from agent.line_file.promotions import keeping_promotions
from agent.lines.promotion import promotions_serving
from agent.records.station.alarms import Alarm
from agent.records.station.audit import AuditTrail
from agent.service.alarms import (
    LOOK_S,
    AlarmWatch,
    budget_alarms,
    loss_alarms,
    source_alarms,
    standing_alarms,
)
from agent.service.desk.line_desk import LineDesk
from agent.service.desk.line_state import LineParts
from agent.service.inspections.admission import Admission
from agent.service.inspections.drift import DriftAlarm
from agent.service.inspections.golden_source import GoldenSource
from agent.service.inspections.inspector import Inspector, models_of
from agent.service.inspections.journaled import JournaledImages
from agent.service.inspections.line import SourceLine
from agent.service.inspections.line_boards import LineBoards, wall_clock
from agent.service.inspections.shadow_source import ShadowSource
from agent.service.inspections.tally import Tally
from agent.service.inspections.verdicts import Verdicts
from agent.service.texts.text_door import TextDoor
from agent.service.upkeep import Upkeep
from agent.service.wires import LineWires
from agent.sources.registry import sources_of
from experts.daemon_threads import DaemonThreads
from experts.document import read_document
from experts.errors import ConfigError, WeightsError, WeightsMissing
from experts.expert import Precision

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from datetime import datetime

    from agent.config import LineConfig
    from agent.deployment.build import Agent
    from agent.doors.grpc.server import ApiServer
    from agent.service.inspections.drift import DriftStatistics
    from agent.subject import SourceStatus

log = logging.getLogger(__name__)

DRAIN_S = 8.0  # plus 8 s for callers, 5 s for hanging parts of the agent, and all limits below: within systemd's 40 s
API_STOP_S = 5.0
SOURCES_STOP_S = 2.0  # of all together; hanging threads are abandoned, hanging processes killed
COMMIT_S = 2.0
FILING_S = 2.0  # of all folders together
STORE_CLOSE_S = 1.5  # and as long again for a commit in progress
IN_FLIGHT_LIMIT = 2000  # files that folders took or refused, and have not moved yet; other files stay in place
HOUSEKEEPER_STOP_S = 0.5
KEEPER_STOP_S = 1.0
STORE_ALARMS = {"store": "results are not stored: {}", "store/log": "results: {}", "store/damage": "results: {}"}


class LineService:
    """Served line. Call ``start`` and ``stop`` once. ``on_crash``: called from any thread; then call ``stop``.

    ``clock``: monotonic seconds, by which boards age and warnings are spaced; ``wall``: dates of boards that expire.
    """

    def __init__(
        self,
        config: LineConfig,
        progress: Callable[[str, int, int], None],
        *,
        on_crash: Callable[[], None] = lambda: None,
        in_flight_limit: int = IN_FLIGHT_LIMIT,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], datetime] = wall_clock,
    ) -> None:
        self._config = self._started_with = config
        self._clock = clock
        self.inspector = Inspector(config, progress, on_crash)
        self._device_alarms = _device_alarms(self.inspector.agent)
        self._drift_alarm = DriftAlarm()
        self._upkeep = Upkeep(config, lambda key: any(source.holds(key) for source in self.sources), wall)
        self.store = self._upkeep.store
        self.boards = LineBoards(config.boards, self.store, config.layouts, clock=clock, wall=wall)
        self._verdicts = Verdicts(self.store, self.boards)
        self._shadows = ShadowSource(self.inspector, self.store)
        self._golden = GoldenSource(self.inspector, wall)
        self._golden_keeper = Housekeeper({"golden": self._golden.step}, "golden")  # its folders may hang
        self._journaled = JournaledImages(self.inspector, self._verdicts, self.store, self._upkeep.images)
        line = SourceLine(self.inspector, self._verdicts, self._journaled, self.store, in_flight_limit)
        self.sources = line.sources = sources_of(config, line)
        for source in self.sources:
            source.placed = self.store.place
        admission = Admission(config.api.limits, lambda: self.inspector.ended_per_s)
        self._texts = TextDoor(self.inspector, admission)
        self._tally = Tally()
        self._verdicts.subscribe(self._tally.stored)
        self._phase: str | None = "it starts"
        parts = LineParts(
            self.inspector, admission, self._journaled, self._verdicts, self.boards, self.store, self._upkeep.images,
            self._upkeep.deliveries, self._texts, self._tally, self._source_views, self._trigger, self._reload,
            self._promote, self._alarms, phase=lambda: self._phase, open_alarms=lambda: self.alarms.open,
        )  # fmt: skip
        self.desk = LineDesk(parts)
        self._wires = LineWires(parts, self.desk, AuditTrail(self.store, wall))
        self.web, self.audit = self._wires.web, self._wires.audit
        self._reloading = threading.Lock()
        self._damaged: set[str] = set()  # experts to repack, by the Engine's names
        self._packers = DaemonThreads(1, "repack")
        self._stale: dict[str, Alarm] = {}  # experts whose source differs, by the Engine's names
        self.agent.loop.watch_weights(self._repack, self._quarantine_stale)
        self.alarms = AlarmWatch(self._watched_alarms, self.store, self._upkeep.outbox, clock=clock, wall=wall)
        self._watcher = Housekeeper({"alarms": self._watch_alarms}, "alarms", LOOK_S)  # waits for loop and disk
        self._housekeeper = Housekeeper(
            {
                "boards": self.boards.expire,
                "proofs": self.inspector.trust.step,
                "drift": self._warn_of_drift,
                "sources": self._report_hangs,
                "texts": self._texts.end_overdue,
            }
        )

    @property
    def judged(self) -> int:
        """Images whose verdict is stored, refused files included, since the start."""
        return sum(self._tally.verdicts.values())

    @property
    def agent(self) -> Agent:
        return self.inspector.agent

    @property
    def api(self) -> ApiServer | None:
        return self._wires.api

    def status_line(self) -> str:
        """Status in one line, for the watchdog: blocks while the agent's loop makes no progress."""
        status = self.desk.status()
        resident = {copy for pool in status.pools for copy in pool.experts}
        queued = sum(queue.requests for queue in status.queues)
        up = sum(source.alarm is None for source in status.sources)
        counts = " ".join(f"{verdict} {count}" for verdict, count in status.verdicts.items())
        return (
            f"{len(resident)}/{len(self._config.catalog.experts)} experts in memory, {queued} queued, "
            f"{up}/{len(status.sources)} sources up, {counts}" + (f"; {status.alarms[0]}" if status.alarms else "")
        )

    def start(self) -> None:
        """Restore open boards, start the agent, sources and servers. An address in use is retried, with an alarm."""
        self.boards.take_up()
        self.agent.start()
        self._upkeep.start()
        self._journaled.take_up()
        self._wires.start()
        for source in self.sources:
            source.start()
        self._housekeeper.start()
        self._golden_keeper.start()
        self._watcher.start()
        self._phase = None
        watched = ", ".join(view.name for view in self._source_views())
        log.info("ready line=%s experts=%d watching=%s", self._config.line, len(self._config.catalog.experts), watched)

    def stop(self) -> dict[str, Any]:
        """Finish and store taken images, then end; returns counts. Raises AgentCrashed, last, after a crash."""
        self._phase = "it stops: the next one will take work"
        self._watcher.stop(0.0)
        for source in self.sources:
            source.stop(0.0)  # sources end while callers get their answers
        self._stop_api()
        _stop_all([source.stop for source in self.sources], SOURCES_STOP_S)
        self.inspector.take_no_more()
        with ExitStack() as ending:  # in the order from below
            ending.callback(self.inspector.close)
            ending.callback(self._close_store)
            ending.callback(self._upkeep.stop)
            ending.callback(_stop_all, [source.close for source in self.sources], FILING_S)
            ending.callback(self._wait_for_commits)
            ending.callback(self._shadows.flush)
            ending.callback(self._upkeep.images.stop, KEEPER_STOP_S)  # before the store closes: verdicts wait for it
            ending.callback(self._housekeeper.stop, HOUSEKEEPER_STOP_S)
            ending.callback(self._golden_keeper.stop, HOUSEKEEPER_STOP_S)
            ending.callback(self.inspector.forgive)
            ending.callback(lambda: self.agent.stop())  # a reload may replace it meanwhile
            ending.callback(self._wires.stop)  # until then the web reports that no work is taken
            if not self.inspector.drain(DRAIN_S):
                log.warning("not_drained images=%d they wait for the next start", self.inspector.in_flight)
            engine = self.agent.loop.statistics().engine
        counts = {str(verdict).lower(): count for verdict, count in self._tally.verdicts.items()}
        return {
            "requests": sum(counts.values()),
            **counts,
            "switches": engine.switches,
            "loads": engine.loads,
            "evictions": engine.evictions,
            "bytes_read": engine.bytes_read,
            "threads_left_behind": self.agent.loop.leaves_threads or self._reloading.locked(),
        }

    def _stop_api(self) -> None:
        """Refuse new callers; waiting callers get their answers within the timeout."""
        deadline_s = time.monotonic() + API_STOP_S
        self._wires.stop_calls(API_STOP_S)
        self._texts.stop(max(deadline_s - time.monotonic(), 0.0))

    def _wait_for_commits(self) -> None:
        deadline = time.monotonic() + COMMIT_S
        while self.store.statistics().pending and time.monotonic() < deadline:
            time.sleep(0.01)

    def _close_store(self) -> None:
        if not self.store.close(STORE_CLOSE_S):
            log.error("results_not_stored: their images wait for the next start")

    # -- for the desk --

    def _source_views(self) -> list[SourceStatus]:
        return [status for source in self.sources if (status := source.status()) is not None]

    def _trigger(self, camera: str, board: str | None, board_type: str | None, key: str | None) -> str:
        found = next((source for source in self.sources if source.name == camera), None)
        if found is None:
            raise OrderRefused(Reason.NOT_FOUND, f"no camera {camera!r}")
        return found.trigger(board, board_type, key)

    def _reload(self) -> ReloadView:
        """Reload the line file. The old line is served until the reload succeeds."""
        return self._changed(lambda: self._reloaded(read_line(self._config.document.file)))

    def _promote(self, who: str, expert: str, sha256: str) -> ReloadView:
        """Serve the version of an expert with these weights: its shadow's, or its own, which changes nothing.

        The promotion is kept in the state once it is served. Raises OrderRefused; then nothing has changed."""
        return self._changed(lambda: self._promoted(who, expert, sha256))

    def _changed(self, change: Callable[[], ReloadView]) -> ReloadView:
        """One change of the line at a time. Raises OrderRefused."""
        if not self._reloading.acquire(blocking=False):
            raise OrderRefused(Reason.NOT_NOW, "the line is being changed already", 5.0)
        try:
            return change()
        except ConfigError as error:
            return ReloadView(False, tuple(str(problem) for problem in error.problems))
        except OrderRefused:
            raise
        except Exception as error:  # such as a disk error: the agent continues
            log.exception("reload_failed file=%s", self._config.document.file)
            reason = f"{type(error).__name__}: {error}"
            return ReloadView(False, (f"{reason} - the log has more; correct the cause, then reload again",))
        finally:
            self._reloading.release()

    def _promoted(self, who: str, expert: str, sha256: str) -> ReloadView:
        document = read_document(self._config.document.file)
        if line_of(document).catalog.sha256 != self._config.catalog.sha256:
            raise OrderRefused(Reason.NOT_NOW, "the line file has changes that are not served - reload it first")
        wanted = promotions_serving(self._config, self.inspector.weights_of, expert, sha256, who)
        if wanted is None:
            return ReloadView(True, ())
        read = line_of(document, promotions=wanted)
        return self._reloaded(read, {expert: sha256}, keeping_promotions(self._config.state, wanted))

    def _reloaded(
        self,
        read: LineConfig,
        serving: Mapping[str, str] = MappingProxyType({}),
        keeping: AbstractContextManager[None] | None = None,
    ) -> ReloadView:
        """``serving``: sha256 of weights that must be those of an expert; ``keeping``: entered before the change."""
        for_restart = keys_for_restart(self._started_with, read)
        config = taken_over(self._config, read)
        for source in self.sources:
            source.check(config)
        change = plan_change(self.agent, config, lambda stage, done, total: None)
        models = models_of(change.agent)
        for expert, sha256 in serving.items():
            name = change.agent.expert(expert)
            if name in change.quarantined or models.get(name) != sha256:  # its file was written meanwhile
                reason = change.quarantined.get(name, f"its weights file has other bytes now than {sha256}")
                raise ConfigError(f"{expert}: {reason}")
        if not self.inspector.takes:  # a stop was requested meanwhile
            raise OrderRefused(Reason.STOPPING, "the agent is stopping - the next one reads the line file", 5.0)
        with keeping or nullcontext():
            self._wires.reload(config.api)  # only after all checks: a refused reload changes nothing
            self.inspector.change_line(change)
        self._shadows.refuse_enders()
        self._config = config
        self.boards.change(config.boards, config.layouts)
        for source in self.sources:
            source.reload(config)
        return ReloadView(True, (), change.added, change.replaced, change.removed, for_restart)

    def _repack(self, expert: str) -> None:
        """Callback, on any thread: an expert's packed files are damaged or missing."""
        if expert not in self._damaged:
            self._damaged.add(expert)
            self._packers.submit(self._pack_anew, expert)

    def _quarantine_stale(self, expert: str) -> None:
        """Callback, on any thread: packed weights differ from their source; quarantine the expert."""
        name = line_name(expert)
        reason = "its weights file has other bytes than it was packed from: reload, and it is packed again"
        log.error("packed_weights_stale expert=%s reason=%s", name, reason)
        self._stale[expert] = Alarm(f"expert/{name}", f"expert {name}: {reason}")
        self.agent.loop.quarantine(expert, reason)

    def _pack_anew(self, expert: str) -> None:
        """Restore the files from the expert's source; quarantine it if the source has changed."""
        name = line_name(expert)
        with self._reloading:
            try:
                agent = self.agent
                used, wanted = agent.packed.values(), dict(agent.setup.precisions)
                for copy in agent.copies.values():  # of workers, too
                    form = Precision(copy.packed.precision)
                    wanted[form] = {**wanted.get(form, {}), line_name(expert_of(copy.name)): form}
                report = pack(agent.config, agent.segments, wanted, lambda *_: None, used)
                failure, there = report.failed.get(name), report.packed.get(name, {})
                gone = [copy.packed for copy in agent.copies.values() if expert_of(copy.name) == expert]
                if all(there.get(Precision(packed.precision)) == packed for packed in gone):
                    log.warning("packed_anew expert=%s: it is served again", name)
                elif failure is None:
                    agent.loop.quarantine(expert, "its packed weights are gone, its weights file is another: reload")
                elif isinstance(failure, WeightsError) and not isinstance(failure, WeightsMissing):
                    agent.loop.quarantine(expert, failure.message)
                else:
                    log.error("not_packed_anew expert=%s reason=%s: it is tried again", name, failure.message)
            except Exception:  # such as a disk error: the next load reports it again
                log.exception("not_packed_anew expert=%s", name)
            finally:
                self._damaged.discard(expert)

    def _alarms(self) -> list[Alarm]:
        """Alarms that are there now, without those of experts that do not serve, which a status lists by name."""
        agent, listed = self.agent, self._config.catalog.experts
        store = self.store.statistics()
        of_store = {"store": store.alarm, "store/log": store.log_alarm, "store/damage": store.damage_alarm}
        failing = {**self._housekeeper.failing, **self._golden_keeper.failing, **self._wires.failing}
        calls = self._upkeep.false_calls.alarms
        return [
            *self._device_alarms,
            *(Alarm("setup", alarm) for alarm in agent.alarms),
            *loss_alarms(agent),
            *budget_alarms(agent),
            *(alarm for expert, alarm in self._stale.items() if expert in agent.setup.graph.experts),
            *(Alarm(name, STORE_ALARMS[name].format(alarm)) for name, alarm in of_store.items() if alarm is not None),
            *self._upkeep.alarms(),
            *(alarm for expert, alarm in calls.items() if expert in listed),
            *self.boards.alarms(),
            *self._drift_alarms(),
            *source_alarms(self._source_views()),
            *self._golden.alarms(),
            *(Alarm(f"duty/{duty}", f"{duty}: {reason}") for duty, reason in failing.items()),
        ]

    def _watched_alarms(self) -> list[Alarm]:
        alarms = self._alarms()
        named = {alarm.name for alarm in alarms}
        return [*alarms, *(alarm for alarm in standing_alarms(self.agent) if alarm.name not in named)]

    def _watch_alarms(self) -> None:
        if self._phase is None:  # what ends with the agent is no fault
            self.alarms.step()

    # -- by time: on the housekeeper's thread --

    def _report_hangs(self) -> None:
        for source in self.sources:
            source.report_hangs()

    def _warn_of_drift(self) -> None:
        found = self._drift_alarm.due_warning(self._clock(), self.inspector.drift)
        if found is not None:
            log.warning(
                "usage_drift distance=%.2f chance=%.2f steps=%d %s",
                found.distance, found.chance, found.steps, self._drift_text(found),
            )  # fmt: skip

    def _drift_alarms(self) -> Iterator[Alarm]:
        found = self._drift_alarm.found
        if found is not None:
            yield Alarm("drift", f"usage: {self._drift_text(found)}")

    def _drift_text(self, drift: DriftStatistics) -> str:
        experts = ",".join(moved.expert for moved in drift.experts)
        learning = f"coserve profile {self._config.document.file} --usage-from {self._config.results_file}"
        simulated = " --simulate" if self.agent.stored is None else ""
        return f"experts={experts}: experts are used otherwise than expected; learn how: {learning}{simulated}"


def _device_alarms(agent: Agent) -> list[Alarm]:
    """Alarm for an accelerator that should serve and does not: its driver was missing at boot, or is broken."""
    faults = {"device": agent.box.fault} | {f"device/{name}": box.fault for name, box in agent.workers.boxes.items()}
    alarms = [
        Alarm(name, f"{name}: {fault}; the CPU serves until the agent starts again")
        for name, fault in faults.items()
        if fault
    ]
    for alarm in alarms:
        log.error("gpu_not_used %s", alarm.message)
    return alarms


def _stop_all(stops: Sequence[Callable[[float], object]], timeout_s: float) -> None:
    """Stop all before waiting for any: hanging parts together take one timeout."""
    deadline_s = time.monotonic() + timeout_s
    for stop in stops:
        stop(0.0)
    for stop in stops:
        stop(max(deadline_s - time.monotonic(), 0.0))
