"""How long an expert takes from SSD to runnable, over a raw read of the same bytes.

Both are measured in one run, file by file in turn, past the page cache; the targets are in the project's list of
figures. "raw" is the parallel direct read alone, into an aligned buffer. "load" is what the agent does to switch
experts: all segments read into the slot that a skeleton is bound to, each file checked against what was verified; of
an ONNX graph also the binding of the skeleton, as a slot's former expert may have been of another program, and the
handing of all addresses to the session that experts of one program share, which every batch does anew. The first load
of a file in a process also hashes it, and is told apart.

Experts are measured beside those of their layout (architecture, form, program, shapes): what an agent switches between
in one slot.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections import defaultdict
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from agent.deployment.build import AS_SERVED, groundwork_of
from experts.backends import backend_for, family
from experts.document import suggestion
from experts.errors import ConfigError
from experts.expert import Precision
from experts.packed.direct_reads import DirectReader
from experts.packed.packing import pack_line
from experts.packed.weights import AlignedBuffer, SegmentStore, tensor_views
from profiler.bench.software import software
from profiler.targets import Target
from profiler.workload.generated_graphs import write_graph_experts
from profiler.workload.generated_line import removed_afterwards, require_disk, write_experts
from profiler.workload.graph_kinds import GraphKind

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from pathlib import Path

    from agent.config import LineConfig
    from experts.backends.base import Skeleton
    from experts.expert import Expert
    from experts.packed.weights import PackedExpert

TARGET_RATIO, GRAPH_TARGET_RATIO = 1.15, 1.3
GRAPH_NAMES = {GraphKind.DETECTOR: "ONNX detectors", GraphKind.ANOMALY: "ONNX anomaly experts"}
NAMES_TOLD = 4  # of experts, in a line of the report


@dataclass(frozen=True, slots=True)
class LoadingTimes:
    """Experts of one layout: medians over files and repeats, in seconds; ``file_bytes``: read by one load.

    ``shared_bytes``: of these, what lies in files that several experts have in common. ``program_bytes``: of the one
    program of all of them, 0 where they have none. ``name``: what they are beside their architecture.
    """

    architecture: str
    files: int
    repeats: int
    file_bytes: int
    raw_s: float
    load_s: float
    first_load_s: float
    bind_s: float
    precision: str = Precision.FP32
    shared_bytes: int = 0
    program_bytes: int = 0
    name: str = ""

    @property
    def ratio(self) -> float:
        return self.load_s / self.raw_s

    @property
    def target_ratio(self) -> float:
        """Highest ratio allowed: more where an ONNX Runtime session has to be told of each switch."""
        return GRAPH_TARGET_RATIO if _is_graph(self.architecture) else TARGET_RATIO

    @property
    def targets(self) -> tuple[Target, ...]:
        of, wanted = f", {self.name}" if self.name else "", f"at most {self.target_ratio}"
        what = f"SSD to runnable over a raw direct read{of}"
        return (Target(what, wanted, f"{self.ratio:.3f}", self.ratio <= self.target_ratio),)


@dataclass(frozen=True, slots=True)
class _Form:
    """An expert in one form, as it lies packed."""

    expert: Expert
    packed: PackedExpert


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
    (times,) = _measured(
        directory, lambda folder: write_experts(folder, architecture, files), lambda _: {precision}, repeats
    )
    return times


def measure_graph_loading(directory: Path, kind: GraphKind, files: int = 8, repeats: int = 3) -> LoadingTimes:
    """With ONNX graphs of a kind, of one program. Raises as ``measure_loading`` for disk and room."""
    (times,) = _measured(
        directory, lambda folder: write_graph_experts(folder, kind, files), lambda _: {Precision.FP32}, repeats
    )
    return replace(times, name=GRAPH_NAMES[kind])


def measure_line_loading(
    directory: Path, config: LineConfig, names: Sequence[str] = (), repeats: int = 3
) -> tuple[LoadingTimes, ...]:
    """Experts of a line, all of them where none is named, in each form that its agent would run.

    They are packed anew under ``directory``: what the line has packed is not touched. Raises ConfigError for a name
    that is none of its experts, for a profile that does not hold any more, or without room; CoServeError for an expert
    that cannot be packed; OSError for what the disk refuses.
    """
    for name in names:
        if name not in config.catalog.experts:
            raise ConfigError(f"no expert {name!r} - {suggestion(name, config.catalog.experts)}")
    chosen = [config.catalog.experts[name] for name in dict.fromkeys(names or config.catalog.experts)]
    columns = groundwork_of(config, config.packed_folder, AS_SERVED).precisions.values()
    forms = {expert.id: {column[expert.id] for column in columns} for expert in chosen}
    needed_bytes = sum(len(forms[expert.id]) * _source_bytes(expert) for expert in chosen)
    require_disk(directory, needed_bytes, f"{len(chosen)} experts, packed")
    return _measured(directory, lambda _: chosen, forms.__getitem__, repeats, is_named=True)


def report(times: LoadingTimes) -> str:
    """The figures in words, with the machine they come from, and whether they reach the target."""
    (ratio,) = times.targets
    verdict = "reaches" if ratio.reached else "is short of"
    raw, load = (
        f"{seconds * 1e3:.1f} ms, {times.file_bytes / seconds / 1e6:.0f} MB/s"
        for seconds in (times.raw_s, times.load_s)
    )
    graph = _is_graph(times.architecture)
    rows = (
        ("machine", f"{platform.machine()}, {software()}"),
        *([("experts", times.name)] if times.name else []),
        ("files", f"{times.files} x {_size_text(times)}, {times.repeats} repeats"),
        *([("program", _program_text(times))] if times.program_bytes else []),
        ("raw read", raw),
        ("load", f"{load}, SSD to runnable{', bound and handed to the session' if graph else ''}"),
        ("first load", f"{times.first_load_s * 1e3:.1f} ms, with its sha256"),
        ("binding", f"{times.bind_s * 1e3:.2f} ms, {'in each load' if graph else 'once per slot and skeleton'}"),
        ("ratio", f"{ratio.found}: {verdict} its target of {times.target_ratio}"),
    )
    return "\n".join(f"{what:<10} {told}" for what, told in rows)


def _size_text(times: LoadingTimes) -> str:
    form = "" if times.precision == Precision.FP32 else f" in {times.precision}"
    shared = f", {times.shared_bytes / 1e6:.1f} MB of it shared" if times.shared_bytes else ""
    return f"{times.file_bytes / 1e6:.1f} MB {times.architecture}{form}{shared}"


def _program_text(times: LoadingTimes) -> str:
    whose = "its own" if times.files == 1 else f"one for all {times.files}"
    return f"{whose}, {times.program_bytes / 1e3:.0f} kB: a switch constructs nothing"


def _is_graph(architecture: str) -> bool:
    return family(architecture) == "onnx"


def _source_bytes(expert: Expert) -> int:
    if expert.weights.is_dir():
        return sum(path.stat().st_size for path in expert.weights.iterdir())
    return expert.weights.stat().st_size if expert.weights.is_file() else 0


def _measured(
    directory: Path,
    experts_in: Callable[[Path], Sequence[Expert]],
    precisions: Callable[[str], Collection[Precision]],
    repeats: int,
    *,
    is_named: bool = False,
) -> tuple[LoadingTimes, ...]:
    """Pack experts in a folder that is removed afterwards, and measure them layout by layout."""
    with removed_afterwards(directory, "loading-") as folder, closing(SegmentStore(folder / "packed")) as store:
        experts = experts_in(folder)
        report = pack_line(experts, precisions, store)
        for error in report.failed.values():
            raise error
        layouts: defaultdict[str, list[_Form]] = defaultdict(list)
        for expert in experts:
            for packed in report.packed[expert.id].values():
                layouts[packed.layout].append(_Form(expert, packed))
        found = [(forms, _measure(forms, store, repeats)) for forms in layouts.values()]
        return tuple(replace(times, name=_names(forms)) if is_named else times for forms, times in found)


def _names(forms: Sequence[_Form]) -> str:
    told = ", ".join(form.expert.id for form in forms[:NAMES_TOLD])
    return told if len(forms) <= NAMES_TOLD else f"{told} and {len(forms) - NAMES_TOLD} more"


def _measure(forms: Sequence[_Form], store: SegmentStore, repeats: int) -> LoadingTimes:
    with ExitStack() as stack:
        reader = stack.enter_context(closing(DirectReader()))
        slot, beside = (
            [stack.enter_context(closing(AlignedBuffer(size_bytes))) for size_bytes in _slot_sizes(forms)]
            for _ in range(2)
        )
        switching = _Switching(forms[0], store, slot)
        for buffer in (*slot, *beside):
            buffer.tensor.zero_()  # memory that was never touched would be paid for by whoever comes first
        first = [switching.load_s(form) for form in forms]
        raw, load = [], []
        for turn, form in enumerate(form for _ in range(repeats) for form in forms):
            if turn % 2:  # whichever reads a file second finds the drive's own cache warm
                load.append(switching.load_s(form))
                raw.append(_raw_s(reader, store, form, beside))
            else:
                raw.append(_raw_s(reader, store, form, beside))
                load.append(switching.load_s(form))
    packed = forms[0].packed
    return LoadingTimes(
        architecture=packed.architecture,
        files=len(forms),
        repeats=repeats,
        file_bytes=sum(segment.size_bytes for segment in packed.segments),
        raw_s=statistics.median(raw),
        load_s=statistics.median(load),
        first_load_s=statistics.median(first),
        bind_s=statistics.median(switching.binds_s),
        precision=packed.precision,
        shared_bytes=sum(segment.size_bytes for segment in packed.shared),
        program_bytes=len(store.program(packed)),
    )


def _slot_sizes(forms: Sequence[_Form]) -> list[int]:
    return [max(sizes) for sizes in zip(*([s.slot_bytes for s in f.packed.segments] for f in forms), strict=True)]


class _Switching:
    """One slot, and the skeleton that is bound to it. ``binds_s``: how long that took each time."""

    def __init__(self, first: _Form, store: SegmentStore, slot: Sequence[AlignedBuffer]) -> None:
        self._store = store
        self._slot = slot
        self._hand_over: Callable[[], object] | None = None
        self.binds_s: list[float] = []
        expert, packed = first.expert, first.packed
        self._skeleton = backend_for(expert.architecture).skeleton(
            expert, Precision(packed.precision), store.program(packed), "cpu"
        )
        self._bind(packed)
        if _is_graph(expert.architecture):
            self._hand_over = _session_of(self._skeleton, expert)

    def load_s(self, form: _Form) -> float:
        """The seconds until this expert could run from the slot."""
        started = time.perf_counter()
        for segment, buffer in zip(form.packed.segments, self._slot, strict=True):
            if segment.size_bytes:
                self._store.read(segment, buffer, form.expert.id)
        if self._hand_over is not None:
            self._bind(form.packed)
        return time.perf_counter() - started

    def _bind(self, packed: PackedExpert) -> None:
        started = time.perf_counter()
        places = zip(packed.segments, self._slot, strict=True)
        views = (tensor_views(buffer.tensor, segment).items() for segment, buffer in places)
        self._skeleton.bind(dict(chain.from_iterable(views)))
        if self._hand_over is not None:
            self._hand_over()
        self.binds_s.append(time.perf_counter() - started)


def _session_of(skeleton: Skeleton, expert: Expert) -> Callable[[], object]:
    """Hands the addresses of an image and of all weights that are bound to an ONNX graph's session."""
    from experts.backends.onnx.backend import OnnxSkeleton

    assert isinstance(skeleton, OnnxSkeleton), "another backend's"
    black = np.zeros((expert.pixels.height, expert.pixels.width, 3), np.uint8)
    images = backend_for(expert.architecture).prepare(expert, black).tensor[None]
    return lambda: skeleton.fed(images)


def _raw_s(reader: DirectReader, store: SegmentStore, form: _Form, buffers: Sequence[AlignedBuffer]) -> float:
    paths = [store.segment_path(segment.sha256) for segment in form.packed.segments]
    targets = [buffer.view[: segment.size_bytes] for segment, buffer in zip(form.packed.segments, buffers, strict=True)]
    started = time.perf_counter()
    for path, target in zip(paths, targets, strict=True):
        if target:
            reader.read(path, target, form.expert.id)
    return time.perf_counter() - started
