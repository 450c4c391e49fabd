"""Skeletons that run an expert's bytes, and the templates that they are copied from, made before any batch runs.

Constructing a module or a session takes up to a second of Python, and some runtimes patch the whole process during it.
"""

from __future__ import annotations

import logging
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING

from agent.runtime.machine.box import torch_device
from agent.runtime.machine.threads import use_threads
from experts.backends import backend_for
from experts.errors import BackendUnavailable, ExpertError, WeightsMismatch
from experts.expert import Precision

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

    from agent.runtime.expert_copy import ExpertCopy
    from experts.backends.base import Skeleton
    from experts.expert import InputSpec
    from experts.packed.weights import PackedExpert, SegmentStore

logger = logging.getLogger(__name__)

SPARE_SKELETONS = 32  # 0.05 to 1.3 MiB of Python each (ResNet-18, DenseNet-121); constructing one takes 10 to 80 ms
OWN_PROGRAM_BYTES = 1024 * 1024  # ten times a graph without weights


class SkeletonShelf:
    """At most SPARE_SKELETONS unbound skeletons, oldest dropped first; only this class constructs skeletons."""

    def __init__(self, segments: SegmentStore) -> None:
        self._segments = segments
        self._spares: list[tuple[tuple[str, str], Skeleton]] = []  # by layout and device, oldest first
        self._lock = Lock()
        self.constructed = 0

    def take(self, copy: ExpertCopy, device: str) -> Skeleton:
        """Spare skeleton of the copy's layout, or a new one. Raises BackendUnavailable, WeightsError."""
        packed = copy.packed
        with self._lock:
            for place, spare in enumerate(self._spares):
                if spare[0] == (packed.layout, device):
                    return self._spares.pop(place)[1]
            self.constructed += 1
        backend = backend_for(packed.architecture)
        return backend.skeleton(copy.expert, Precision(packed.precision), self._segments.program(packed), device)

    def put(self, packed: PackedExpert, device: str, skeleton: Skeleton) -> None:
        with self._lock:
            self._spares.append(((packed.layout, device), skeleton))
            del self._spares[:-SPARE_SKELETONS]

    def clear(self) -> None:
        with self._lock:
            self._spares.clear()


@dataclass(frozen=True, slots=True)
class Templates:
    """``held`` while skeletons may be made. ``failed``: expert -> reason why no copy of it can run."""

    held: Mapping[Hashable, object]
    failed: Mapping[str, str]

    def after(self, new: Templates, copies: Mapping[str, Iterable[ExpertCopy]]) -> Templates:
        """Templates of these copies, by processor: kept ones and ``new`` ones, with the failures of ``new``."""
        forms = {_Form.of(copy, processor) for processor, listed in copies.items() for copy in listed}
        held = {**self.held, **new.held}
        return Templates({form: template for form, template in held.items() if form in forms}, new.failed)


def make_templates(
    copies: Mapping[str, Sequence[ExpertCopy]],
    segments: SegmentStore,
    threads: int,
    progress: Callable[[int, int], None],
) -> Templates:
    """Templates of all copies, by processor; ``threads``: for operators. ``progress``: (number done, number of all).

    A failing expert does not affect others. The load handles unreadable packed files, and large programs of a single
    copy such as quantised graphs with weights: hundreds of templates would exceed the budgets.
    """
    formed = [(copy, _Form.of(copy, processor)) for processor, listed in copies.items() for copy in listed]
    count = Counter(form for _, form in formed)
    wanted = {form: copy for copy, form in formed if count[form] > 1 or not _is_large(copy, segments)}
    held: dict[Hashable, object] = {}
    reasons: dict[_Form, str] = {}
    with ThreadPoolExecutor(1, "templates", use_threads, (threads,)) as thread:
        for number, (form, copy) in enumerate(wanted.items(), start=1):
            try:
                held[form] = thread.submit(_template, copy, segments, form.device).result()
            except (WeightsMismatch, BackendUnavailable) as error:
                reasons[form] = error.message if isinstance(error, ExpertError) else str(error)
                logger.warning("template_failed copy=%s device=%s reason=%s", copy.name, form.device, reasons[form])
            except (ExpertError, OSError) as error:
                logger.warning("template_left_to_load copy=%s device=%s reason=%s", copy.name, form.device, error)
            progress(number, len(wanted))
    able = {copy.expert.id for copy, form in formed if form not in reasons}
    failed = {copy.expert.id: reasons[form] for copy, form in formed if copy.expert.id not in able}
    return Templates(held, failed)


@dataclass(frozen=True, slots=True)
class _Form:
    layout: str
    input: InputSpec | None
    device: str

    @classmethod
    def of(cls, copy: ExpertCopy, processor: str) -> _Form:
        return cls(copy.packed.layout, copy.expert.input, torch_device(processor))


def _is_large(copy: ExpertCopy, segments: SegmentStore) -> bool:
    sha256 = copy.packed.program_sha256
    try:
        return sha256 is not None and segments.program_path(sha256).stat().st_size > OWN_PROGRAM_BYTES
    except OSError:  # the load reports it
        return False


def _template(copy: ExpertCopy, segments: SegmentStore, device: str) -> object:
    packed = copy.packed
    backend = backend_for(packed.architecture)
    return backend.template(copy.expert, Precision(packed.precision), segments.program(packed), device)
