"""Transfers: carries out StartLoad, SSD -> host -> device, several in flight.

Guarantees: every load has one answer: Loaded after its bytes are in place and its skeleton is bound, LoadFailed after
its room is free again, or a Breakdown if the device is lost. A part shared by several loads is moved once. A corrupt
packed file is dropped and packed again. With ``on_stale``, an expert's source is hashed once, after its first load, on
a thread of low priority.
Assumes: the Engine limits the loads in flight, and evicts only resident, unused copies.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from threading import Event as Flag
from threading import Lock
from typing import TYPE_CHECKING

from agent.core.events import Loaded, LoadFailed
from agent.core.names import expert_of
from agent.core.performance import SSD
from agent.faults.errors import IllegalMove
from agent.runtime.machine.device_loss import NO_ACCELERATOR, Breakdown, DeviceWatch
from agent.runtime.machine.threads import end_team, give_way, use_threads
from experts import errors
from experts.daemon_threads import DaemonThreads
from experts.packed.source_check import drop_if_stale

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from agent.core.effects import StartLoad
    from agent.runtime.expert_copy import ExpertCopy
    from agent.runtime.machine.memories import Memory, Region
    from agent.runtime.weights.drive import Drive
    from agent.runtime.weights.slots import Slot, SlotStore
    from experts.packed.direct_reads import FilePart
    from experts.packed.weights import Segment

logger = logging.getLogger(__name__)

CHECK_WAITS_S = 1.0  # waits for loads, before hashing each piece of a source: arbitrary
COUNTS = ("bytes_read", "bytes_copied", "failed", "in_flight")


@dataclass(frozen=True, slots=True)
class TransferStatistics:
    """Counters since the start. ``loads``, ``seconds``: by path, as "ssd_host"; ``of_experts``: by (expert, pool)."""

    loads: Mapping[str, int]
    of_experts: Mapping[tuple[str, str], int]
    seconds: Mapping[str, float]
    bytes_read: int
    bytes_copied: int
    failed: int
    in_flight: int

    @classmethod
    def sum(cls, each: Iterable[TransferStatistics]) -> TransferStatistics:
        every = tuple(each)
        loads, of_experts, seconds = Counter[str](), Counter[tuple[str, str]](), defaultdict[str, float](float)
        for one in every:
            loads.update(one.loads)
            of_experts.update(one.of_experts)
            for path, path_s in one.seconds.items():
                seconds[path] += path_s
        counts = (sum(getattr(one, name) for one in every) for name in COUNTS)
        return cls(dict(loads), dict(of_experts), dict(seconds), *counts)


NO_TRANSFERS = TransferStatistics.sum(())


class Transfers:
    """Loads of one agent, on ``threads``. ``post`` takes the answers, from any thread."""

    def __init__(
        self,
        drive: Drive,
        stores: Mapping[str, SlotStore],
        copies: Mapping[str, ExpertCopy],
        post: Callable[[Loaded | LoadFailed | Breakdown], None],
        threads: DaemonThreads,
        watches: Mapping[str, DeviceWatch] = {},
    ) -> None:
        self._stores = dict(stores)
        self.repack: Callable[[str], None] | None = None  # repacks an expert later
        self.on_stale: Callable[[str], None] | None = None  # called for experts whose source has changed
        self._checks = DaemonThreads(1, "check-sources", give_way)
        self._checked: set[str] = set()
        self._segments = drive.segments
        self._copies = dict(copies)  # changed by ``know``
        self._staging = drive.staging()
        self._post = post
        self._watches = watches  # by memory
        self._link = drive.link
        self._threads = threads
        self._stopping = Flag()
        self._lock = Lock()
        self._counts: Counter[str] = Counter()
        self._loads: Counter[str] = Counter()
        self._of_experts: Counter[tuple[str, str]] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def know(self, copies: Mapping[str, ExpertCopy]) -> None:
        self._copies = dict(copies)
        self._checked &= {expert_of(name) for name in copies}

    def start_load(self, effect: StartLoad) -> None:
        """Begin a load; its answer is posted."""
        with self._lock:
            self._counts["in_flight"] += 1
        try:
            slot = self._stores[effect.pool].reserve(self._copies[effect.copy])
        except KeyError as error:
            self._answer(self._failed(effect, f"no packed copy or memory named {error}", permanent=True))
        except IllegalMove as error:
            self._answer(self._failed(effect, str(error)))
        else:
            try:
                self._threads.submit(self._carry_out, effect, slot)
            except RuntimeError as error:  # the threads have ended
                self._stores[effect.pool].abandon(slot)
                self._answer(self._failed(effect, str(error)))

    def statistics(self) -> TransferStatistics:
        with self._lock:
            return TransferStatistics(
                dict(self._loads),
                dict(self._of_experts),
                dict(self._seconds),
                **{name: self._counts[name] for name in COUNTS},
            )

    def stop(self, timeout_s: float | None = None) -> bool:
        """End the loads in flight, each with its answer; then the threads. False after the timeout."""
        self._stopping.set()
        self._checks.stop(0.0)
        has_ended = self._threads.stop(timeout_s)
        if has_ended:
            self._staging.close()
        return has_ended

    def _carry_out(self, effect: StartLoad, slot: Slot) -> None:
        store = self._stores[effect.pool]
        started = time.monotonic()
        try:
            self._load(effect, store, slot)
        except Exception as error:  # noqa: BLE001 - the boundary of these threads
            store.abandon(slot)
            self._answer(self._unloaded(effect, error))
        else:
            store.commit(slot)
            path = f"{effect.source}_{effect.pool}"
            with self._lock:
                self._loads[path] += 1
                self._of_experts[effect.expert, effect.pool] += 1
                self._seconds[path] += time.monotonic() - started
            self._answer(Loaded(effect.load))
            self._begin_check(effect)
        finally:
            end_team()

    def _begin_check(self, effect: StartLoad) -> None:
        with self._lock, suppress(RuntimeError, KeyError):  # the agent stops, or the expert has left the line
            if self.on_stale is not None and effect.expert not in self._checked:
                self._checked.add(effect.expert)
                self._checks.submit(self._check_source, effect.expert, self._copies[effect.copy])

    def _check_source(self, expert: str, copy: ExpertCopy) -> None:
        try:
            is_stale = drop_if_stale(self._segments, copy.expert, copy.packed, self._let_loads_pass)
        except (errors.CoServeError, OSError) as error:
            logger.info("source_not_checked expert=%s reason=%s: after its next load", expert, error)
            self._checked.discard(expert)
            return
        if is_stale and self.on_stale is not None:
            self.on_stale(expert)

    def _let_loads_pass(self) -> None:
        """Wait up to CHECK_WAITS_S for loads in flight. Raises CoServeError when stopping."""
        deadline_s = time.monotonic() + CHECK_WAITS_S
        while self._counts["in_flight"] and time.monotonic() < deadline_s and not self._stopping.is_set():
            self._stopping.wait(CHECK_WAITS_S / 20)
        if self._stopping.is_set():
            raise errors.CoServeError("the agent is stopping")

    def _unloaded(self, effect: StartLoad, error: Exception) -> LoadFailed | Breakdown:
        lost = self._watches.get(effect.pool, NO_ACCELERATOR).lost_by(error)
        if lost is not None:
            return Breakdown(lost, load=effect.load)
        if isinstance(error, errors.WeightsCorrupt):
            error = self._looked_into(error, self._copies[effect.copy])
        if isinstance(error, errors.WeightsMissing) and self.repack is not None and self._segments.is_there:
            self.repack(effect.expert)
        if isinstance(error, errors.WeightsError) and not isinstance(error, errors.WeightsMissing):
            return self._failed(effect, error.message, permanent=True)
        reason = str(error) or type(error).__name__
        if errors.is_out_of_memory(error):
            return self._failed(effect, reason, out_of_memory=True)
        if isinstance(error, (errors.CoServeError, OSError)):
            is_away = isinstance(error, OSError) or isinstance(error.__cause__, OSError)
            return self._failed(effect, reason, is_away=is_away)
        logger.error("load_broke expert=%s copy=%s pool=%s", effect.expert, effect.copy, effect.pool, exc_info=error)
        return self._failed(effect, f"{type(error).__name__}: {error}")

    def _load(self, effect: StartLoad, store: SlotStore, slot: Slot) -> None:
        store.materialise(slot)
        with ExitStack() as stack:
            source = None
            if effect.source != SSD:
                source = stack.enter_context(self._stores[effect.source].using(effect.copy))
            for part in slot.parts:
                with part.filling:
                    if not part.is_filled:
                        self._move(store.memory, part.region, part.segment, source, effect.expert)
                        part.is_filled = True
            self._move(store.memory, slot.region, slot.copy.packed.own, source, effect.expert)

    def _move(self, memory: Memory, region: Region, segment: Segment, source: Slot | None, expert: str) -> None:
        if not segment.size_bytes:
            return
        if source is not None:
            memory.fill(region, 0, source.region_of(segment).tensor("cpu")[: segment.size_bytes])
            self._count("bytes_copied", segment.size_bytes)
            return
        with self._link.demanded():
            delivered_at_s = self._link.reserve(segment.size_bytes)
            if region.buffer is not None:
                self._segments.read(segment, region.buffer, expert)
            else:
                self._read_staged(memory, region, segment, expert)
            self._count("bytes_read", segment.size_bytes)
            if self._stopping.wait(max(delivered_at_s - time.monotonic(), 0.0)):
                raise errors.LoadError(expert, "the agent is stopping")

    def _read_staged(self, memory: Memory, region: Region, segment: Segment, expert: str) -> None:
        with self._staging.borrowed() as buffer:
            source = buffer.tensor

            def copy_on(part: FilePart) -> None:
                memory.fill(region, part.start_bytes, source[part.at_bytes : part.at_bytes + len(part.content)])

            self._segments.stream(segment, buffer, expert, copy_on)

    def _looked_into(self, error: errors.WeightsCorrupt, copy: ExpertCopy) -> errors.ExpertError:
        """Verify the packed files again, and drop corrupt ones. Returns the error to report."""
        expert, source = error.expert, copy.expert.weights
        try:
            gone = self._segments.discard_corrupt(copy.packed)
        except (errors.LoadError, FileNotFoundError) as refusal:  # the drive has gone: the file's state is unknown
            away = errors.LoadError(expert, f"{error.message}; it cannot be looked at again: {refusal}")
            away.__cause__ = refusal.__cause__ or refusal
            return away
        except OSError as refusal:
            logger.warning("corrupt_file_kept expert=%s reason=%s: %s", expert, refusal, error.message)
            return error
        if gone is None:
            reason = "it is being packed or looked at"
            logger.warning("corrupt_file_kept expert=%s reason=%s: %s", expert, reason, error.message)
            return errors.LoadError(expert, f"{error.message}; another process works on its files: trying again")
        if not gone:
            return errors.LoadError(expert, f"{error.message}; looked at again it is sound: trying again")
        by = "the next start" if self.repack is None else "the agent"
        for file in gone:
            logger.error("corrupt_file_dropped expert=%s file=%s: %s packs it again from %s", expert, file, by, source)
        found = f"{', '.join(map(str, gone))} was not what was packed"
        if self.repack is None:
            reason = f"{found} and has been removed: start again, and it is packed again from {source}"
            return errors.WeightsCorrupt(expert, reason)
        missing = errors.WeightsMissing(expert, f"{found}: it is packed again from {source}")
        missing.__cause__ = FileNotFoundError(found)
        return missing

    def _failed(
        self, effect: StartLoad, reason: str, *,
        permanent: bool = False, out_of_memory: bool = False, is_away: bool = False,
    ) -> LoadFailed:  # fmt: skip
        self._count("failed", 1)
        level = logging.INFO if self._stopping.is_set() else logging.WARNING
        logger.log(
            level, "load_failed expert=%s pool=%s source=%s permanent=%s reason=%s",
            effect.expert, effect.pool, effect.source, permanent, reason,
        )  # fmt: skip
        return LoadFailed(effect.load, reason, permanent, out_of_memory, is_away)

    def _count(self, name: str, by: int) -> None:
        with self._lock:
            self._counts[name] += by

    def _answer(self, answer: Loaded | LoadFailed | Breakdown) -> None:
        self._count("in_flight", -1)
        self._post(answer)


def load_threads(count: int, operator_threads: int) -> DaemonThreads:
    """Threads of loads. ``operator_threads``: an executor's; some runtimes fix them when a model is built."""
    return DaemonThreads(count, "transfer", lambda: use_threads(operator_threads))
