"""What the skeletons of a line are copies of, made before any batch runs.

Constructing a module or a session takes from a tenth of a second to a second of Python, and runtimes have patched the
whole process meanwhile: beside running batches nothing is to be constructed. Whoever holds the answer holds all of it.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agent.runtime.device import torch_device
from agent.runtime.threads import use_threads
from experts.backends import backend_for
from experts.errors import BackendUnavailable, ExpertError
from experts.expert import Precision

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from agent.runtime.slots import ExpertCopy
    from experts.expert import InputSpec
    from experts.weights import SegmentStore

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Templates:
    """``held``: for as long as skeletons may be asked for. ``failed``: experts none of whose copies can be run; why."""

    held: tuple[object, ...]
    failed: Mapping[str, str]


def make_templates(
    copies: Mapping[str, Sequence[ExpertCopy]],
    segments: SegmentStore,
    threads: int,
    progress: Callable[[int, int], None],
) -> Templates:
    """Templates of all copies, by processor; ``threads``: what operators of the executors use.

    ``progress`` is told how many are done of how many. What is wrong with one expert is told, and stops no other.
    """
    wanted = {_Form.of(copy, processor): copy for processor, listed in copies.items() for copy in listed}
    held: list[object] = []
    reasons: dict[_Form, str] = {}
    with ThreadPoolExecutor(1, "templates", use_threads, (threads,)) as thread:
        for number, (form, copy) in enumerate(wanted.items(), start=1):
            try:
                held.append(thread.submit(_template, copy, segments, form.device).result())
            except (ExpertError, BackendUnavailable) as error:
                reasons[form] = error.message if isinstance(error, ExpertError) else str(error)
                logger.warning("template_failed copy=%s device=%s reason=%s", copy.name, form.device, reasons[form])
            progress(number, len(wanted))
    return Templates(tuple(held), _failed(copies, reasons))


@dataclass(frozen=True, slots=True)
class _Form:
    """What copies have in common that share a template."""

    layout: str
    input: InputSpec
    device: str

    @classmethod
    def of(cls, copy: ExpertCopy, processor: str) -> _Form:
        return cls(copy.packed.layout, copy.expert.input, torch_device(processor))


def _template(copy: ExpertCopy, segments: SegmentStore, device: str) -> object:
    packed = copy.packed
    backend = backend_for(packed.architecture)
    return backend.template(copy.expert, Precision(packed.precision), segments.program(packed), device)


def _failed(copies: Mapping[str, Sequence[ExpertCopy]], reasons: Mapping[_Form, str]) -> dict[str, str]:
    """The experts that have a template on no processor; the reason is that of the last."""
    found = {
        (copy.expert.id, processor): reasons.get(_Form.of(copy, processor))
        for processor, listed in copies.items()
        for copy in listed
    }
    able = {expert for (expert, _), reason in found.items() if reason is None}
    return {expert: reason for (expert, _), reason in found.items() if reason is not None and expert not in able}
