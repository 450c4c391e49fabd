"""Time of an expert from SSD to runnable, over a raw direct read of the same bytes.

Both take turns file by file in one run, past the page cache. "raw" is the parallel direct read alone, into an aligned
buffer. "load" switches experts like the agent: all segments are read into the slot that a skeleton is bound to. An ONNX
graph is also bound again and its addresses handed to the session, as the slot's former expert may have had another
program. The first load of a file in a process also hashes it. Experts of one layout share a slot and a row.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from agent.deployment.build import AS_SERVED, deployment_of
from experts.backends import backend_for, family
from experts.document import suggestion
from experts.errors import ConfigError
from experts.expert import Precision
from experts.packed.direct_reads import DirectReader
from experts.packed.packing import pack_line
from experts.packed.weights import AlignedBuffer, SegmentStore, tensor_views
from profiler.bench.measured import Column, Measured, Target, this_machine
from profiler.workload.generated_line import removed_afterwards, require_disk, write_experts
from profiler.workload.synthetic_graphs import write_graph_experts

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from pathlib import Path

    from agent.config import LineConfig
    from experts.expert import Expert
    from experts.packed.weights import PackedExpert
    from profiler.workload.synthetic_graphs import GraphKind

TARGET_RATIO, GRAPH_TARGET_RATIO = 1.15, 1.3  # a session is given new addresses at each switch of a graph
GRAPH_NAMES = {"detector": "ONNX detectors", "anomaly": "ONNX anomaly experts"}
NAMES_SHOWN = 4  # of experts, in one row
COLUMNS = (
    Column("experts", "name"),
    Column("files", "files", "d"),
    Column("MB", "file_bytes", ".1f", 1e-6),
    Column("shared MB", "shared_bytes", ".1f", 1e-6),
    Column("program kB", "program_bytes", ".0f", 1e-3),
    Column("raw ms", "raw_s", ".1f", 1e3),
    Column("load ms", "load_s", ".1f", 1e3),
    Column("MB/s", "bytes_per_s", ".0f", 1e-6),
    Column("first ms", "first_load_s", ".1f", 1e3),
    Column("bind ms", "bind_s", ".2f", 1e3),
    Column("load / raw", "ratio", ".3f"),
)


@dataclass(frozen=True, slots=True)
class LoadingTimes:
    """Experts of one layout: medians over files and repeats, in seconds; ``file_bytes``: read by one load.

    ``shared_bytes``: part in files that several experts share. ``program_bytes``: size of their one program, 0 without.
    ``first_load_s``: with the file's sha256.
    """

    name: str
    architecture: str
    precision: str
    files: int
    file_bytes: int
    shared_bytes: int
    program_bytes: int
    raw_s: float
    load_s: float
    first_load_s: float
    bind_s: float

    @property
    def ratio(self) -> float:
        return self.load_s / self.raw_s

    @property
    def bytes_per_s(self) -> float:
        return self.file_bytes / self.load_s

    @property
    def target(self) -> Target:
        most = GRAPH_TARGET_RATIO if _is_graph(self.architecture) else TARGET_RATIO
        of = "" if self.name.startswith(self.architecture) else f", {self.name}"
        return Target(
            f"SSD to runnable over a raw direct read{of}", f"at most {most}", f"{self.ratio:.3f}", self.ratio <= most
        )


@dataclass(frozen=True, slots=True)
class _Form:
    expert: Expert
    packed: PackedExpert


def measure_loading(
    directory: Path, architecture: str = "resnet101", files: int = 8, repeats: int = 3, form: Precision = Precision.FP32
) -> Measured:
    """Pack ``files`` random experts of an architecture under ``directory``, load each ``repeats`` times.

    Needs about twice the experts' bytes of disk; everything is removed afterwards, also after Ctrl-C and SIGTERM.
    Raises ConfigError for an architecture that is neither a torchvision classifier nor an ultralytics YAML, or without
    room; OSError.
    """
    name = architecture if form is Precision.FP32 else f"{architecture} in {form}"
    return _measured(
        directory, repeats, lambda folder: write_experts(folder, architecture, files), lambda _: {form}, name
    )


def measure_graph_loading(directory: Path, kind: GraphKind, files: int = 8, repeats: int = 3) -> Measured:
    """Load ONNX graphs of one kind and program. Raises as ``measure_loading`` for disk and room."""
    made, forms = partial(write_graph_experts, kind=kind, count=files), {Precision.FP32}
    return _measured(directory, repeats, made, lambda _: forms, GRAPH_NAMES[kind])


def measure_line_loading(directory: Path, config: LineConfig, names: Sequence[str] = (), repeats: int = 3) -> Measured:
    """Load experts of a line, all of them where none is named, in each form that its agent would run.

    Experts are packed again under ``directory``. Raises ConfigError for an unknown name, an outdated profile, or
    without room; CoServeError for an expert that cannot be packed; OSError.
    """
    for name in names:
        if name not in config.catalog.experts:
            raise ConfigError(f"no expert {name!r} - {suggestion(name, config.catalog.experts)}")
    chosen = [config.catalog.experts[name] for name in dict.fromkeys(names or config.catalog.experts)]
    columns = deployment_of(config, config.packed_folder, AS_SERVED).precisions.values()
    forms = {expert.id: {column[expert.id] for column in columns} for expert in chosen}
    needed_bytes = 0
    for expert in chosen:
        files = expert.weights.iterdir() if expert.weights.is_dir() else [expert.weights]
        needed_bytes += len(forms[expert.id]) * sum(file.stat().st_size for file in files if file.is_file())
    require_disk(directory, needed_bytes, f"{len(chosen)} experts, packed")
    return _measured(directory, repeats, lambda _: chosen, forms.__getitem__)


def _is_graph(architecture: str) -> bool:
    return family(architecture) == "onnx"


def _measured(
    directory: Path,
    repeats: int,
    experts_in: Callable[[Path], Sequence[Expert]],
    precisions: Callable[[str], Collection[Precision]],
    name: str | None = None,
) -> Measured:
    """Pack experts in a folder that is removed afterwards, and measure them layout by layout. ``name``: the row's."""
    with removed_afterwards(directory, "loading-") as folder, closing(SegmentStore(folder / "packed")) as store:
        experts = experts_in(folder)
        report = pack_line(experts, precisions, store)
        for error in report.failed.values():
            raise error
        layouts: defaultdict[str, list[_Form]] = defaultdict(list)
        for expert in experts:
            for packed in report.packed[expert.id].values():
                layouts[packed.layout].append(_Form(expert, packed))
        rows = []
        for forms in layouts.values():
            shown = ", ".join(form.expert.id for form in forms[:NAMES_SHOWN])
            more = f" and {len(forms) - NAMES_SHOWN} more" if len(forms) > NAMES_SHOWN else ""
            rows.append(_measure(forms, store, repeats, name or shown + more))
    note = f"{repeats} repeats; a program is one for all experts of its row: a switch constructs nothing"
    return Measured(this_machine(), COLUMNS, tuple(rows), tuple(row.target for row in rows), (note,))


def _measure(forms: Sequence[_Form], store: SegmentStore, repeats: int, name: str) -> LoadingTimes:
    sizes = [max(each) for each in zip(*([s.slot_bytes for s in form.packed.segments] for form in forms), strict=True)]
    with ExitStack() as stack:
        reader = stack.enter_context(closing(DirectReader()))
        slot, beside = ([stack.enter_context(closing(AlignedBuffer(each))) for each in sizes] for _ in range(2))
        switching = _Switching(forms[0], store, slot)
        for buffer in (*slot, *beside):
            buffer.tensor.zero_()  # the first access to untouched memory would count its page faults
        first = [switching.load_s(form) for form in forms]
        raw, load = [], []
        for turn, form in enumerate(form for _ in range(repeats) for form in forms):
            if turn % 2:  # the second read of a file finds the drive's cache warm
                load.append(switching.load_s(form))
                raw.append(_raw_s(reader, store, form, beside))
            else:
                raw.append(_raw_s(reader, store, form, beside))
                load.append(switching.load_s(form))
    packed = forms[0].packed
    return LoadingTimes(
        name=name,
        architecture=packed.architecture,
        precision=packed.precision,
        files=len(forms),
        file_bytes=sum(segment.size_bytes for segment in packed.segments),
        shared_bytes=sum(segment.size_bytes for segment in packed.shared),
        program_bytes=len(store.program(packed)),
        raw_s=statistics.median(raw),
        load_s=statistics.median(load),
        first_load_s=statistics.median(first),
        bind_s=statistics.median(switching.binds_s),
    )


class _Switching:
    """One slot, and the skeleton that is bound to it. ``binds_s``: seconds of each binding."""

    def __init__(self, first: _Form, store: SegmentStore, slot: Sequence[AlignedBuffer]) -> None:
        self._store = store
        self._slot = slot
        self._hand_over: Callable[[], object] | None = None
        self.binds_s: list[float] = []
        expert, packed = first.expert, first.packed
        backend = backend_for(expert.architecture)
        self._skeleton = backend.skeleton(expert, Precision(packed.precision), store.program(packed), "cpu")
        self._bind(packed)
        if _is_graph(expert.architecture):
            from experts.backends.onnx.backend import OnnxSkeleton

            skeleton = self._skeleton
            assert isinstance(skeleton, OnnxSkeleton), "another backend's"
            black = np.zeros((expert.pixels.height, expert.pixels.width, 3), np.uint8)
            images = backend.prepare(expert, black).tensor[None]
            self._hand_over = lambda: skeleton.fed(images)

    def load_s(self, form: _Form) -> float:
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


def _raw_s(reader: DirectReader, store: SegmentStore, form: _Form, buffers: Sequence[AlignedBuffer]) -> float:
    paths = [store.segment_path(segment.sha256) for segment in form.packed.segments]
    targets = [buffer.view[: segment.size_bytes] for segment, buffer in zip(form.packed.segments, buffers, strict=True)]
    started = time.perf_counter()
    for path, target in zip(paths, targets, strict=True):
        if target:
            reader.read(path, target, form.expert.id)
    return time.perf_counter() - started
