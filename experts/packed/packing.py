"""Packs .safetensors, .onnx and Hugging Face directories as weights ready to run, once per expert and precision.

Guarantees: experts that are up to date are left alone (a start with hundreds of them reads statuses, no bytes). One
broken expert does not stop the others. A file has its final name only when it is complete and on the disk, and is
never deleted while a manifest refers to it: a crash or a full disk leaves the earlier files usable. Two packings of one
store never run at once: the second waits for the first.
Assumes: ``experts`` is the whole line, and nothing runs from other files than those of ``in_use``.
Why this structure: sharing is known only after all tensors are, and they do not fit in memory together. So each new
expert is first written whole to a staging file, its tensors hashed on the way; then the plan is made from digests, of
old and new experts alike. Where nothing is shared, which is the rule, the staging file is renamed. An adapter's expert
stages its own tensors alone, if another expert of this run has the same ``weights``.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING

import torch

from experts.backends import backend_for
from experts.backends.forms import form_of
from experts.backends.onnx.layouts import require_names
from experts.backends.weight_files import read_labels
from experts.calibrations import CalibrationFolder, digest_of
from experts.errors import ExpertError, LoadError, WeightsCorrupt, WeightsMismatch
from experts.expert import Precision, Task
from experts.filesystem import take_name, whole_file
from experts.labels import folded, moved, renamed
from experts.packed.calibrated import why_not_calibrated
from experts.packed.image_facts import KeptImageFacts
from experts.packed.manifests import Manifest, ManifestFolder, PackedSource
from experts.packed.segments import SegmentWriter, Stacked, TensorKey, plan_sharing
from experts.packed.sources import sha256_of, stamp_of
from experts.packed.weights import PackedExpert, Segment

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from experts.backends.base import Packable
    from experts.expert import Expert
    from experts.packed.segments import Partition
    from experts.packed.weights import SegmentStore, TensorSpec

__all__ = ["PackingReport", "PackingStep", "forget_other_forms", "pack_line"]

log = logging.getLogger(__name__)

PACKING_FORMAT = 1  # raise it when packed bytes change their meaning: everything is packed again
COPY_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class PackingStep:
    """Progress: the current expert and form, number ``number`` (from 1) of ``total``."""

    expert: str
    precision: Precision
    number: int
    total: int


@dataclass(frozen=True, slots=True)
class PackingReport:
    """Experts that can be served, by precision, and failed ones; an expert that failed in one precision is in both."""

    packed: Mapping[str, Mapping[Precision, PackedExpert]]
    failed: Mapping[str, ExpertError]


def pack_line(
    experts: Iterable[Expert],
    precisions: Mapping[str, Collection[Precision]] | Callable[[str], Collection[Precision]],
    store: SegmentStore,
    progress: Callable[[PackingStep], None] | None = None,
    in_use: Iterable[PackedExpert] = (),
) -> PackingReport:
    """Bring the store up to date with the line. ``precisions``: wanted forms by expert id.

    Experts that left the line are forgotten. Files that no manifest refers to are removed, except those of ``in_use``.
    Raises BackendUnavailable where a configured runtime is not installed; errors of one expert are in the report.
    """
    experts = sorted(experts, key=lambda expert: expert.adapter is not None)
    wanted = precisions if callable(precisions) else precisions.__getitem__
    calibrations = CalibrationFolder.beside(store.directory)
    jobs = [
        _Job(replace(expert, calibration=calibrations.path(expert.id)), precision)
        for expert in experts
        for precision in sorted(wanted(expert.id))
    ]
    packing = _Packing(store)
    with store.locked():
        with packing.staging():
            for number, job in enumerate(jobs, start=1):
                if progress is not None:
                    progress(PackingStep(job.expert.id, job.precision, number, len(jobs)))
                packing.draft(job)
            packing.settle()
        packing.collect_garbage({expert.id for expert in experts}, in_use)
        KeptImageFacts(store.directory).keep(experts)
    return packing.report()


def forget_other_forms(precisions: Mapping[str, Collection[Precision]], store: SegmentStore) -> None:
    """Remove packed weights in other precisions than these, by expert id, once forms are chosen.

    ``precisions`` names all experts of the line; nothing may run from the removed forms.
    """
    packing = _Packing(store)
    with store.locked():
        packing.forget(precisions)
        packing.collect_garbage(precisions.keys())


@dataclass(frozen=True, slots=True)
class _Job:
    expert: Expert
    precision: Precision


@dataclass(frozen=True, slots=True)
class _Draft:
    """An expert before its tensors are divided. ``staged``: its whole own segment if it was packed just now.

    ``base``: expert that has its other tensors; their segments are the manifest's shared ones until it is placed.
    """

    manifest: Manifest
    staged: Path | None
    base: str | None = None

    @property
    def keys(self) -> tuple[TensorKey, ...]:
        specs = {spec.name: spec for segment in self.manifest.packed.segments[::-1] for spec in segment.tensors}
        return tuple(TensorKey.of(specs[name], sha256) for name, sha256 in self.manifest.tensor_sha256.items())

    def keys_of(self, segment: Segment) -> tuple[TensorKey, ...]:
        return tuple(TensorKey.of(spec, self.manifest.tensor_sha256[spec.name]) for spec in segment.tensors)


class _Packing:
    """One run: drafts first, then segments and manifests, then removal of unused files."""

    def __init__(self, store: SegmentStore) -> None:
        self._store = store
        self._manifests = ManifestFolder(store.directory / "manifests")
        self._staging = store.directory / "staging"
        self._drafts: defaultdict[Precision, dict[str, _Draft]] = defaultdict(dict)
        self._bases: dict[tuple[Precision, Path], _Job] = {}  # first language model of these weights
        self._packed: defaultdict[str, dict[Precision, PackedExpert]] = defaultdict(dict)
        self._sources: dict[str, PackedSource] = {}
        self._failed: dict[str, ExpertError] = {}
        self._reported: set[tuple[str, str]] = set()  # changes of runtime, each logged once for all experts

    @contextmanager
    def staging(self) -> Iterator[None]:
        """A folder for unfinished files; those of an earlier run are removed first."""
        shutil.rmtree(self._staging, ignore_errors=True)
        for name in ("staging", "segments", "programs", "manifests"):
            (self._store.directory / name).mkdir(parents=True, exist_ok=True)
        try:
            yield
        finally:
            shutil.rmtree(self._staging)

    def draft(self, job: _Job) -> None:
        """Keep the expert where it is up to date, else pack it into the staging folder; note an error."""
        try:
            draft = self._kept(job) or self._stage(job)
        except ExpertError as error:
            self._failed[job.expert.id] = error
        except OSError as error:
            self._failed[job.expert.id] = _unwritable(job.expert.id, error)
        except MemoryError as error:
            self._failed[job.expert.id] = LoadError(job.expert.id, f"no memory to pack it: {error}; free some, reload")
        else:
            self._drafts[job.precision][job.expert.id] = draft
            if job.expert.takes_texts and job.expert.parallel is None:
                self._bases.setdefault((job.precision, job.expert.weights), job)

    def settle(self) -> None:
        """Divide the tensors over segments, and give every segment and manifest its final name."""
        for precision, drafts in self._drafts.items():
            plan = plan_sharing({expert: draft.keys for expert, draft in drafts.items()})
            shared = {
                draft.keys_of(segment): segment
                for draft in drafts.values()
                for segment in draft.manifest.packed.shared
                if segment.blocks is None and draft.staged is None
            }  # on disk already, by content
            for expert, draft in drafts.items():
                try:
                    manifest = self._place(draft, plan[expert], shared)
                except (OSError, ExpertError) as error:
                    self._failed[expert] = error if isinstance(error, ExpertError) else _unwritable(expert, error)
                    if draft.staged is not None:
                        continue
                    manifest = draft.manifest  # the earlier one, still complete
                self._packed[expert][precision] = manifest.packed
                self._sources[expert] = manifest.source

    def forget(self, precisions: Mapping[str, Collection[Precision]]) -> None:
        for manifest in self._manifests.read_all():
            packed = manifest.packed
            if packed.precision not in precisions.get(packed.expert, ()):
                self._manifests.delete(packed.expert, packed.precision)

    def collect_garbage(self, line: Collection[str], in_use: Iterable[PackedExpert] = ()) -> None:
        """Forget experts that left the line or changed; remove files that no manifest names and nothing uses."""
        used: set[Path] = {path for packed in in_use for path in self._files(packed)}
        for manifest in self._manifests.read_all():
            packed = manifest.packed
            current = self._sources.get(packed.expert, manifest.source)
            if packed.expert not in line or current.sha256 != packed.source_sha256:
                self._manifests.delete(packed.expert, packed.precision)
                continue
            used.update(self._files(packed))
        for folder in ("segments", "programs"):
            for path in (self._store.directory / folder).iterdir():
                if path not in used:
                    path.unlink()

    def report(self) -> PackingReport:
        return PackingReport(dict(self._packed), dict(self._failed))

    def _kept(self, job: _Job) -> _Draft | None:
        """The expert as packed earlier, unless something that its bytes depend on has changed."""
        found = self._manifests.read(job.expert.id, job.precision)
        stamp = stamp_of(job.expert)
        if found is None or not self._is_complete(found.packed):
            return None
        if found.source.recipe != _recipe(job):
            self._report_change(job, _runtime_of(found.source.recipe), _runtime_of(_recipe(job)))
            return None
        if stamp != found.source.stamp or found.source.names is None:
            source = _source(job)
            if source.sha256 != found.source.sha256:
                _require_meaning(job.expert, found.source.names, source.names)
                return None
            found = replace(found, source=source)
            self._manifests.write(found)
        if found.source.names and len(found.source.names) == len(job.expert.labels):
            require_names(job.expert, found.source.names)  # packed by an earlier version, which asked less
        return _Draft(found, staged=None)

    def _report_change(self, job: _Job, before: str, now: str) -> None:
        """Log once for all experts that a form was packed for another runtime or CPU."""
        if before != now and (before, now) not in self._reported:
            self._reported.add((before, now))
            log.warning(
                "packed_again precision=%s first=%s reason=packed for %s, this box has %s",
                job.precision, job.expert.id, before, now,
            )  # fmt: skip

    def _stage(self, job: _Job) -> _Draft:
        source = _source(job)
        if form_of(job.precision).needs_calibration and (
            why := why_not_calibrated(job.expert, job.precision, self._store.directory)
        ):
            raise WeightsMismatch(job.expert.id, f"no form of eight bits: {why}")
        packable = backend_for(job.expert.architecture).pack(job.expert, job.precision)
        program_sha256 = self._write_program(packable)
        path = self._staging / f"{len(self._drafts[job.precision])}.{job.precision}.whole"
        digests: dict[str, str] = {}
        stacked = frozenset(name for stack in packable.stacks for name in stack)
        names = [name for name in packable.tensors if name not in stacked]
        base = self._base_of(job)
        if base is not None:
            digests |= {name: base.tensor_sha256[name] for name in names if name not in packable.added}
        with SegmentWriter(path) as writer:
            for name in (name for name in names if name not in digests):
                dense = _dense(packable.tensors[name])
                spec = (name, _dtype_name(dense), tuple(dense.shape), dense.stride())
                digests[name] = writer.append(*spec, _bytes_of(dense))
            own = writer.finish()
        if base is not None:
            shared = base.packed.segments
        else:
            shared = tuple(self._stage_stack(packable.tensors, stack) for stack in packable.stacks)
        packed = PackedExpert(
            job.expert.id, job.expert.architecture, job.precision, "", source.sha256, own, shared, program_sha256
        )  # the layout is digested once the tensors are placed
        return _Draft(Manifest(packed, source, digests), path, None if base is None else base.packed.expert)

    def _base_of(self, job: _Job) -> Manifest | None:
        """An expert of this run whose tensors an adapter's expert has, too; None where its files have changed since."""
        found = self._bases.get((job.precision, job.expert.weights))
        if job.expert.adapter is None or found is None:
            return None
        base = self._drafts[job.precision][found.expert.id].manifest
        return base if base.source.stamp == stamp_of(found.expert) else None

    def _stage_stack(self, tensors: Mapping[str, Tensor], names: Sequence[str]) -> Segment:
        """The blocks of one layer, in a file named by its content."""
        stack = {name: tensors[name].contiguous() for name in names}
        path = self._staging / "stack"
        with SegmentWriter(path) as writer:
            writer.append_blocks(
                [Stacked(name, _dtype_name(tensor), tuple(tensor.shape)) for name, tensor in stack.items()],
                lambda name, number: next(_bytes_of(stack[name][number])),
            )
            segment = writer.finish()
        path.replace(self._staging / f"{segment.sha256}.stack")
        return segment

    def _write_program(self, packable: Packable) -> str | None:
        if not packable.program:
            return None
        sha256 = hashlib.sha256(packable.program).hexdigest()
        with whole_file(self._store.program_path(sha256), has_rivals=True) as file:
            file.write(packable.program)
        return sha256

    def _place(self, draft: _Draft, partition: Partition, shared: dict[tuple[TensorKey, ...], Segment]) -> Manifest:
        """Write segments under their final names, then the manifest that refers to them."""
        for group in partition.shared:
            if group not in shared:
                shared[group] = self._segment_of(draft, group)
        packed = replace(
            draft.manifest.packed,
            own=self._segment_of(draft, partition.own),
            shared=(*(shared[group] for group in partition.shared), *self._finish_stacks(draft)),
        )
        manifest = replace(draft.manifest, packed=replace(packed, layout=layout_digest(packed)))
        if manifest != draft.manifest:
            self._manifests.write(manifest)
        if draft.staged is not None:
            draft.staged.unlink(missing_ok=True)
        return manifest

    def _segment_of(self, draft: _Draft, keys: tuple[TensorKey, ...]) -> Segment:
        """Segment of these tensors: the draft's own file where it has no others."""
        own = draft.manifest.packed.own
        if draft.keys_of(own) != keys:
            return self._write_segment(draft, keys)
        if draft.staged is not None:
            self._finish(draft.staged, own)
        return own

    def _finish_stacks(self, draft: _Draft) -> Iterator[Segment]:
        """Layers in blocks: never divided; equal layers of several experts are one file."""
        for segment in draft.manifest.packed.shared:
            if segment.blocks is not None:
                staged = self._staging / f"{segment.sha256}.stack"
                if draft.staged is not None and staged.exists():
                    self._finish(staged, segment)
                yield segment

    def _write_segment(self, draft: _Draft, keys: tuple[TensorKey, ...]) -> Segment:
        """Write a new segment of tensors from the draft's files."""
        places = self._places(draft)
        path = self._staging / "part"
        with SegmentWriter(path) as writer:
            for key in keys:
                source, spec = places[key.name]
                parts = _read_parts(source, spec)
                if writer.append(key.name, key.dtype, key.shape, key.stride, parts) != key.sha256:
                    source.unlink(missing_ok=True)  # a corrupt file must not count as packed the next time
                    expert = draft.manifest.packed.expert
                    raise WeightsCorrupt(expert, f"{source} was not what was packed and is gone: pack again")
            segment = writer.finish()
        self._finish(path, segment)
        return segment

    def _finish(self, path: Path, segment: Segment) -> None:
        take_name(path, self._store.segment_path(segment.sha256))

    def _places(self, draft: _Draft) -> dict[str, tuple[Path, TensorSpec]]:
        """File and place of each tensor's bytes."""
        packed, staged = draft.manifest.packed, draft.staged
        own = {} if staged is None else {spec.name: (staged, spec) for spec in packed.own.tensors}
        if draft.base is None:
            if own:
                return own
        else:
            if packed.precision not in (placed := self._packed[draft.base]):
                raise LoadError(packed.expert, f"{draft.base}, of the same `weights`, was not packed: see its error")
            packed = placed[Precision(packed.precision)]
        files = ((self._store.segment_path(segment.sha256), segment) for segment in packed.segments)
        return {spec.name: (file, spec) for file, segment in files for spec in segment.tensors} | own

    def _files(self, packed: PackedExpert) -> list[Path]:
        files = [self._store.segment_path(segment.sha256) for segment in packed.segments]
        return files if packed.program_sha256 is None else [*files, self._store.program_path(packed.program_sha256)]

    def _is_complete(self, packed: PackedExpert) -> bool:
        sizes = {self._store.segment_path(segment.sha256): segment.size_bytes for segment in packed.segments}
        files = self._files(packed)
        return all(path.is_file() and path.stat().st_size == sizes.get(path, path.stat().st_size) for path in files)


def layout_digest(packed: PackedExpert) -> str:
    """Digest of everything that a skeleton's bindings depend on."""
    tables = [[astuple(spec) for spec in segment.tensors] for segment in packed.segments]
    parts = [PACKING_FORMAT, packed.architecture, packed.precision, packed.program_sha256, tables]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _recipe(job: _Job) -> str:
    expert = job.expert
    size = [] if expert.input is None else [expert.input.height, expert.input.width]
    labels = expert.labels if expert.names is None else list(zip(expert.names, expert.labels, strict=True))
    parts = [PACKING_FORMAT, expert.architecture, expert.stem, labels, size]  # labels: for their order
    if form_of(job.precision).needs_calibration and expert.calibration is not None:
        parts.append(digest_of(expert.calibration))
    from_backend = backend_for(expert.architecture).recipe(expert, job.precision)
    parts += [] if expert.variant is None else [{"variant": expert.variant}]
    return json.dumps([*parts, from_backend] if from_backend else parts)


def _runtime_of(recipe: str) -> str:
    """The backend's part of a recipe; empty where it has none."""
    try:
        *_, last = json.loads(recipe)
    except ValueError:
        return ""
    return last if isinstance(last, str) else ""


def _source(job: _Job) -> PackedSource:
    stamp = stamp_of(job.expert)  # before the bytes are read: a write in between shows the next time
    expert = job.expert
    names = () if expert.takes_texts or expert.task is Task.ANOMALY else read_labels(expert.weights) or ()
    return PackedSource(sha256_of(expert), stamp, _recipe(job), names)


def _require_meaning(expert: Expert, before: tuple[str, ...] | None, now: tuple[str, ...] | None) -> None:
    """WeightsMismatch for other weights whose labels, which the line calls otherwise, are not those of before."""
    if not before or not now or expert.names or folded(before) == folded(now) or len(now) != len(expert.labels):
        return
    if renamed(expert.labels, now) and not moved(expert.labels, now):  # moved ones: packing refuses them
        listed = ", ".join(now)
        raise WeightsMismatch(
            expert.id,
            f"{expert.weights} has the labels {listed}, and those served before had {', '.join(before)}: write which "
            f"is which, `labels: {{{now[0]}: ..., {now[-1]}: ...}}`, of {', '.join(expert.labels)}",
        )


def _dense(tensor: Tensor) -> Tensor:
    """The tensor if it has no gaps in one of the two memory formats, else a contiguous copy."""
    is_dense = tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))
    return tensor if is_dense else tensor.contiguous()


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _bytes_of(dense: Tensor) -> Iterator[memoryview]:
    flat = dense.detach().as_strided((dense.numel(),), (1,)).view(torch.uint8)
    yield memoryview(flat.numpy())


def _read_parts(path: Path, spec: TensorSpec) -> Iterator[memoryview]:
    with path.open("rb") as file:
        file.seek(spec.offset_bytes)
        left = spec.size_bytes
        while left and (part := file.read(min(left, COPY_BYTES))):
            left -= len(part)
            yield memoryview(part)


def _unwritable(expert: str, error: OSError) -> LoadError:
    return LoadError(
        expert, f"its packed weights cannot be written: {error.strerror or error}; make room and pack again"
    )
