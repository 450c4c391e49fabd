"""How long an expert takes from SSD to runnable, over a raw read of the same bytes.

Both are measured in one run, file by file in turn, past the page cache; the target is in the project's list of figures.
"raw" is the parallel direct read alone, into an aligned buffer. "load" is what the agent does: the segment read into
the slot that a skeleton is bound to, its file checked against what was verified. The first load of a file in a process
also hashes it, and is told apart.
"""

from __future__ import annotations

import platform
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from experts.backends import backend_for
from experts.expert import Precision
from experts.packed.direct_reads import DirectReader
from experts.packed.packing import pack_line
from experts.packed.weights import AlignedBuffer, SegmentStore, tensor_views
from profiler.bench.parts.software import software
from profiler.targets import Target
from profiler.workload.generated_line import removed_afterwards, write_experts

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from experts.expert import Expert
    from experts.packed.weights import PackedExpert

TARGET_RATIO = 1.15


@dataclass(frozen=True, slots=True)
class LoadingTimes:
    """Medians over files and repeats, in seconds; ``file_bytes`` is what one load reads."""

    architecture: str
    files: int
    repeats: int
    file_bytes: int
    raw_s: float
    load_s: float
    first_load_s: float
    bind_s: float
    precision: str = Precision.FP32

    @property
    def ratio(self) -> float:
        """Load over raw read."""
        return self.load_s / self.raw_s

    @property
    def targets(self) -> tuple[Target, ...]:
        """The one that it has."""
        what, wanted = "SSD to runnable over a raw direct read", f"at most {TARGET_RATIO}"
        return (Target(what, wanted, f"{self.ratio:.3f}", self.ratio <= TARGET_RATIO),)


def measure_loading(
    directory: Path,
    architecture: str = "resnet101",
    files: int = 8,
    repeats: int = 3,
    precision: Precision = Precision.FP32,
) -> LoadingTimes:
    """Pack ``files`` random experts of an architecture under ``directory``, load each ``repeats`` times.

    Needs about twice the experts' bytes of disk; everything is removed afterwards, also after Ctrl-C and SIGTERM.
    Raises ConfigError for what is neither a torchvision classifier nor an ultralytics YAML, or without room; OSError
    for what the disk refuses.
    """
    with removed_afterwards(directory, "loading-") as folder:
        experts = write_experts(folder, architecture, files)
        store = SegmentStore(folder / "packed")
        try:
            report = pack_line(experts, lambda expert: {precision}, store)
            for error in report.failed.values():
                raise error
            packed = [report.packed[expert.id][precision] for expert in experts]
            return _measure(experts[0], packed, store, repeats)
        finally:
            store.close()


def report(times: LoadingTimes) -> str:
    """The figures in words, with the machine they come from, and whether they reach the target."""
    (ratio,) = times.targets
    verdict = "reaches" if ratio.reached else "is short of"
    raw, load = (
        f"{seconds * 1e3:.1f} ms, {times.file_bytes / seconds / 1e6:.0f} MB/s"
        for seconds in (times.raw_s, times.load_s)
    )
    return "\n".join(
        (
            f"machine    {platform.machine()}, {software()}",
            f"files      {times.files} x {times.file_bytes / 1e6:.1f} MB {times.architecture} in {times.precision}, "
            f"{times.repeats} repeats",
            f"raw read   {raw}",
            f"load       {load}, SSD to runnable",
            f"first load {times.first_load_s * 1e3:.1f} ms, with its sha256",
            f"binding    {times.bind_s * 1e3:.2f} ms, once per slot and skeleton",
            f"ratio      {ratio.found}: {verdict} its target of {TARGET_RATIO}",
        )
    )


def _measure(expert: Expert, packed: Sequence[PackedExpert], store: SegmentStore, repeats: int) -> LoadingTimes:
    segments, form = [one.own for one in packed], Precision(packed[0].precision)
    slot = AlignedBuffer(max(segment.slot_bytes for segment in segments))
    raw_buffer = AlignedBuffer(slot.size_bytes)
    reader = DirectReader()
    try:
        skeleton = backend_for(expert.architecture).skeleton(expert, form, store.program(packed[0]), "cpu")
        started = time.perf_counter()
        skeleton.bind(tensor_views(slot.tensor, segments[0]))
        bind_s = time.perf_counter() - started
        for buffer in (slot, raw_buffer):
            buffer.tensor.zero_()  # memory that was never touched would be paid for by whoever comes first
        first = [_load_s(store, one, slot) for one in packed]
        raw, load = [], []
        for turn, one in enumerate(one for _ in range(repeats) for one in packed):
            if turn % 2:  # whichever reads a file second finds the drive's own cache warm
                load.append(_load_s(store, one, slot))
                raw.append(_raw_s(reader, store, one, raw_buffer))
            else:
                raw.append(_raw_s(reader, store, one, raw_buffer))
                load.append(_load_s(store, one, slot))
        return LoadingTimes(
            architecture=expert.architecture,
            files=len(packed),
            repeats=repeats,
            file_bytes=segments[0].size_bytes,
            raw_s=statistics.median(raw),
            load_s=statistics.median(load),
            first_load_s=statistics.median(first),
            bind_s=bind_s,
            precision=form,
        )
    finally:
        reader.close()
        slot.close()
        raw_buffer.close()


def _raw_s(reader: DirectReader, store: SegmentStore, form: PackedExpert, buffer: AlignedBuffer) -> float:
    path, target = store.segment_path(form.own.sha256), buffer.view[: form.own.size_bytes]
    started = time.perf_counter()
    reader.read(path, target, form.expert)
    return time.perf_counter() - started


def _load_s(store: SegmentStore, form: PackedExpert, slot: AlignedBuffer) -> float:
    started = time.perf_counter()
    store.read(form.own, slot, form.expert)
    return time.perf_counter() - started
