"""Probe: a rough performance matrix in seconds, at start, until a full device profile exists.

One expert of each kind (architecture, input, precision) is loaded over the real path and run on each processor, alone
and in one larger batch; two points give K and B (CoServe, section 4.2). Footprints are exact, workspaces estimated from
shapes, and load times follow from the bytes and the measured speed of each link.
"""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np
import torch

from agent.core.effects import StartLoad
from agent.core.events import Loaded, LoadFailed
from agent.core.performance import SSD, DeviceProfile, ExpertProfile, Footprint, Performance, SharedPart
from agent.runtime.device import DEVICE, HOST, HostMemory, memory_for, torch_device
from agent.runtime.slots import SkeletonShelf, SlotStore
from agent.runtime.transfer import Transfers
from experts import errors
from experts.backends import backend_for
from experts.expert import Precision

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from agent.runtime.device import Box
    from agent.runtime.slots import ExpertCopy, Slot
    from experts.backends.base import Prepared, Skeleton
    from experts.expert import Expert, InputSpec
    from experts.weights import PackedExpert, SegmentStore

BATCH_SIZES = (1, 2, 4, 8)
REPEATS = 2  # each after a run to warm up
KIND_LIMIT_S = 0.6  # spent on running one kind on one processor
PLATEAU = 1.02  # a larger batch has to make an image at least this much cheaper
LEAST_MAX_BATCH = 4  # even so: the images of one batch are decoded at the same time
LEAST_S = 1e-4  # handing a batch over costs about as much, so K and B are never less
UNMEASURED_BYTES_PER_S = 500e6  # arbitrary: a SATA drive, for a line of which nothing can be loaded


@dataclass(frozen=True, slots=True)
class LinkSpeeds:
    """Measured bytes per second; ``copy_bytes_per_s`` is None where memory is unified."""

    ssd_bytes_per_s: float
    copy_bytes_per_s: float | None


@dataclass(frozen=True, slots=True)
class Probed:
    """What a probe found. ``failed``: experts without a profile, as no expert of their kind could be run, and why."""

    profile: DeviceProfile
    links: LinkSpeeds
    failed: Mapping[str, str]
    seconds: float


@dataclass(frozen=True, slots=True)
class Kind:
    """Experts that run alike: one is measured for all."""

    architecture: str
    stem: str | None
    input: InputSpec
    precision: str

    @classmethod
    def of(cls, copy: ExpertCopy) -> Kind:
        """The kind of a copy."""
        expert = copy.expert
        return cls(expert.architecture, expert.stem, expert.input, copy.packed.precision)


def probe(
    box: Box,
    copies: Mapping[str, Sequence[ExpertCopy]],
    segments: SegmentStore,
    usage: Mapping[str, float],
    threads: int,
) -> Probed:
    """Measure a line. ``copies`` by processor; ``threads`` as each of its executors will have.

    Takes about KIND_LIMIT_S for each kind and processor, plus loading one expert of it. Raises BackendUnavailable.
    """
    started = time.monotonic()
    links = measure_links(box, copies, segments)
    experts: dict[str, dict[str, ExpertProfile]] = {}
    failed: dict[str, str] = {}
    for processor, listed in copies.items():
        experts[processor] = {}
        for kind_copies in by_kind(listed).values():
            try:
                performance = _measure_first(box, processor, kind_copies, segments, threads)
            except errors.ExpertError as error:
                failed.update((copy.expert.id, str(error)) for copy in kind_copies)
                continue
            for copy in kind_copies:
                experts[processor][copy.expert.id] = expert_profile(copy, performance, links, box.pool_of(processor))
    return Probed(DeviceProfile(experts, dict(usage)), links, failed, time.monotonic() - started)


def expert_profile(copy: ExpertCopy, performance: Performance, links: LinkSpeeds, pool: str) -> ExpertProfile:
    """An expert's row. Loads are counted by its own bytes: what it shares is there already, as a rule."""
    footprint = footprint_of(copy.packed)
    load_s = {SSD: footprint.own_bytes / links.ssd_bytes_per_s}
    if pool == DEVICE and links.copy_bytes_per_s is not None:
        load_s[HOST] = footprint.own_bytes / links.copy_bytes_per_s
    return ExpertProfile(copy.name, performance, footprint, load_s)


def footprint_of(packed: PackedExpert) -> Footprint:
    """What holding a packed expert costs, exactly as the slots hold it."""
    shared = tuple(SharedPart(segment.sha256, segment.slot_bytes) for segment in packed.shared)
    return Footprint(packed.own.slot_bytes, shared)


def by_kind(copies: Sequence[ExpertCopy]) -> dict[Kind, list[ExpertCopy]]:
    """The copies of each kind, in their order."""
    kinds: defaultdict[Kind, list[ExpertCopy]] = defaultdict(list)
    for copy in copies:
        kinds[Kind.of(copy)].append(copy)
    return dict(kinds)


def measure_links(box: Box, copies: Mapping[str, Sequence[ExpertCopy]], segments: SegmentStore) -> LinkSpeeds:
    """The speed of each link, over the largest expert that loads; its second load counts, the first one is hashed."""
    everything = {copy.name: copy for listed in copies.values() for copy in listed}
    largest_first = sorted(everything.values(), key=lambda copy: -copy.packed.own.size_bytes)
    with _Rig(box, None, largest_first, segments).opened() as rig:
        for copy in largest_first:
            try:
                rig.load(copy, HOST)
                rig.evict(copy, HOST)
                ssd_s = rig.load(copy, HOST)
                copy_s = rig.load(copy, DEVICE) if box.is_split else None
            except errors.ExpertError:
                continue
            size_bytes = footprint_of(copy.packed).total_bytes
            return LinkSpeeds(size_bytes / ssd_s, None if copy_s is None else size_bytes / copy_s)
    return LinkSpeeds(UNMEASURED_BYTES_PER_S, UNMEASURED_BYTES_PER_S if box.is_split else None)


def fit(alone_s: float, larger_s: float, larger: int) -> tuple[float, float]:
    """K and B, in seconds, from one image alone and a batch of ``larger`` (section 4.2: K * n + B)."""
    if larger == 1:
        return alone_s, LEAST_S
    per_image_s = max((larger_s - alone_s) / (larger - 1), LEAST_S)
    return per_image_s, max(alone_s - per_image_s, LEAST_S)


def plateau(per_image_s: float, fixed_s: float) -> int:
    """The smallest batch beyond which an image gets no cheaper worth mentioning."""
    best_s = per_image_s + fixed_s / BATCH_SIZES[-1]
    enough = next(size for size in BATCH_SIZES if per_image_s + fixed_s / size <= PLATEAU * best_s)
    return max(enough, LEAST_MAX_BATCH)


def larger_batch(alone_s: float, limit_s: float) -> int:
    """The largest batch whose runs fit into the time, were it no faster than its images alone."""
    runs = 2 * REPEATS
    return max((size for size in BATCH_SIZES if runs * (size + 1) * alone_s <= limit_s), default=1)


def _measure_first(
    box: Box, processor: str, copies: Sequence[ExpertCopy], segments: SegmentStore, threads: int
) -> Performance:
    """The performance of a kind, measured on its first expert that can be loaded. Raises the last one's error."""
    with _Rig(box, processor, copies, segments).opened() as rig:
        for copy in copies:
            try:
                slot = rig.bring(copy)
            except errors.ExpertError as error:
                broken = error
                continue
            return _measure(copy, slot.skeleton(torch_device(processor)), threads)
    raise broken


def _measure(copy: ExpertCopy, skeleton: Skeleton, threads: int) -> Performance:
    backend, expert = backend_for(copy.expert.architecture), copy.expert
    with _torch_threads(threads), torch.inference_mode():
        prepared, prepare_s = _prepared(expert)
        runs = _Runs(skeleton, expert, prepared)
        larger = larger_batch(runs.seconds_of(1), KIND_LIMIT_S)
        alone_s, larger_s = runs.alternating(1, larger)
    per_image_s, fixed_s = fit(alone_s, larger_s, larger)
    precision = Precision(copy.packed.precision)
    workspace_of_one = backend.workspace_bytes(expert, precision, 1)
    per_image_bytes = backend.workspace_bytes(expert, precision, 2) - workspace_of_one
    return Performance(
        K_s=per_image_s + prepare_s,
        B_s=fixed_s,
        max_batch=plateau(per_image_s, fixed_s),
        workspace_bytes=per_image_bytes,
        workspace_base_bytes=max(workspace_of_one - per_image_bytes, 0),
    )


def _prepared(expert: Expert) -> tuple[Prepared, float]:
    """An image of the expert's own size, prepared, and the seconds that took once warm."""
    image = np.random.default_rng(0).integers(0, 256, (expert.input.height, expert.input.width, 3), dtype=np.uint8)
    backend = backend_for(expert.architecture)
    backend.prepare(expert, image)
    started = time.monotonic()
    prepared = backend.prepare(expert, image)
    return prepared, time.monotonic() - started


@dataclass(frozen=True, slots=True)
class _Runs:
    """Timed batches of one image."""

    skeleton: Skeleton
    expert: Expert
    prepared: Prepared

    def seconds_of(self, size: int) -> float:
        """One batch, once warm."""
        for _ in range(2):
            started = time.monotonic()
            self.skeleton.infer(self.expert, [self.prepared] * size)
            seconds = time.monotonic() - started
        return seconds

    def alternating(self, alone: int, larger: int) -> tuple[float, float]:
        """The fastest of a few runs of each size, in turns, so that a busy moment meets both."""
        found = [(self.seconds_of(alone), self.seconds_of(larger)) for _ in range(REPEATS)]
        return min(pair[0] for pair in found), min(pair[1] for pair in found)


@contextmanager
def _torch_threads(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Rig:
    """Memories just large enough for one expert at a time, and the loads into them, as the agent does them."""

    def __init__(self, box: Box, processor: str | None, copies: Sequence[ExpertCopy], segments: SegmentStore) -> None:
        budget_bytes = max((footprint_of(copy.packed).total_bytes for copy in copies), default=0)
        shelf = SkeletonShelf(segments)
        self._target = HOST if processor is None else box.pool_of(processor)
        self._stores = {}
        for pool in box.pools:
            devices = [torch_device(processor)] if processor is not None and pool == self._target else []
            self._stores[pool] = SlotStore(memory_for(box, pool, budget_bytes), budget_bytes, devices, shelf)
        self._answers: SimpleQueue[Loaded | LoadFailed] = SimpleQueue()
        by_name = {copy.name: copy for copy in copies}
        staging = HostMemory(pinned=box.name == "cuda")
        self._transfers = Transfers(self._stores, segments, by_name, staging, self._answers.put, workers=1)

    @contextmanager
    def opened(self) -> Iterator[_Rig]:
        """The rig, until its memory is given back."""
        try:
            yield self
        finally:
            self._transfers.stop()
            for store in self._stores.values():
                store.close()

    def bring(self, copy: ExpertCopy) -> Slot:
        """A copy, bound and ready where its processor runs from. Raises LoadFailed."""
        self.load(copy, HOST)
        if self._target != HOST:
            self.load(copy, self._target)
        with self._stores[self._target].using(copy.name) as slot:
            return slot

    def load(self, copy: ExpertCopy, pool: str) -> float:
        """Load into a memory, from the one in front of it; how long it took, in seconds. Raises LoadFailed."""
        started = time.monotonic()
        source = SSD if pool == HOST else HOST
        self._transfers.start_load(StartLoad(0, copy.expert.id, copy.name, source, pool, 0))
        answer = self._answers.get()
        if isinstance(answer, LoadFailed):
            raise errors.LoadFailed(copy.expert.id, answer.reason)
        return max(time.monotonic() - started, LEAST_S)

    def evict(self, copy: ExpertCopy, pool: str) -> None:
        """Make room for the next one."""
        self._stores[pool].evict(copy.name)
