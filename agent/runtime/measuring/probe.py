"""Probe: a rough performance matrix within seconds, at start, until a full device profile exists.

One expert of each kind is loaded and measured on each processor as the offline phase does, with less time and on fewer
sizes. Footprints are exact, workspaces estimated from shapes, load times computed from link speeds.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from agent.core.performance import DEVICE, HOST, SSD, ExpertProfile, Performance, PerformanceMatrix
from agent.runtime.expert_copy import by_kind, prepared_form
from agent.runtime.machine.box import torch_device
from agent.runtime.measuring.batches import BatchOptions, BatchRuns, ImageCycle
from agent.runtime.measuring.fits import LEAST_S, fit_curve
from agent.runtime.measuring.loads import measure_links
from agent.runtime.measuring.rig import MeasuringRig
from agent.runtime.measuring.text_times import TextTimer, on_executor_thread
from experts import errors
from experts.backends import backend_for
from experts.expert import Precision
from experts.llm.quant import DEVICE_BLOCK_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agent.runtime.expert_copy import ExpertCopy
    from agent.runtime.machine.box import Box
    from experts.packed.weights import SegmentStore

logger = logging.getLogger(__name__)

TEXT_REPEATS = 2
SHORT = BatchOptions(sizes=(1, 4, 8), repeats=0, limit_s=0.6, peak_runs=1)  # for one kind on one processor
LEAST_MAX_BATCH = 4  # images of one batch are decoded concurrently
QUANTISED = {Precision.INT8, Precision.INT4}
COPIED_BYTES = 3 * DEVICE_BLOCK_BYTES  # matrices of a model that a device copies: bytes, levels of int4, numbers
UNMEASURED = {SSD: 500e6, HOST: 500e6}  # bytes/s, arbitrary: a SATA drive


@dataclass(frozen=True, slots=True)
class Probed:
    """``failed``: experts of kinds that could not be run, with the reason."""

    matrix: PerformanceMatrix
    failed: Mapping[str, str]


def probe(
    box: Box,
    copies: Mapping[str, Sequence[ExpertCopy]],
    segments: SegmentStore,
    usage: Mapping[str, float],
    threads: int,
) -> Probed:
    """Measure a line. ``copies`` by processor; ``threads``: an executor's. Raises BackendUnavailable.

    Takes about the limit of SHORT for each kind and processor, plus loading one expert of it.
    """
    served = [(processor, copies[processor]) for processor in box.processors if copies.get(processor)]
    measured = (measure_links(box, listed, segments, loads=1, processor=processor) for processor, listed in served)
    links = UNMEASURED | next(filter(None, measured), {})
    refused: dict[str, str] = {}
    experts: dict[str, dict[str, ExpertProfile]] = {}
    for processor, listed in copies.items():
        experts[processor] = {}
        for kind_copies in by_kind(listed).values():
            broken: dict[str, str] = {}
            performance = _measure_first(box, processor, kind_copies, segments, threads, broken)
            if performance is None:
                refused.update(broken)
                reasons = "; ".join(sorted(set(broken.values())))
                logger.warning(
                    "kind_cannot_run processor=%s experts=%s reasons=%s", processor, ",".join(broken), reasons
                )
                continue
            for copy in kind_copies:
                experts[processor][copy.expert.id] = matrix_row(copy, performance, links, box.pool_of(processor))
    able = {expert for column in experts.values() for expert in column}
    failed = {expert: reason for expert, reason in refused.items() if expert not in able}
    return Probed(PerformanceMatrix(experts, dict(usage)), failed)


def estimated_matrix(
    box: Box, copies: Mapping[str, Sequence[ExpertCopy]], usage: Mapping[str, float]
) -> PerformanceMatrix:
    """Matrix before any load, to check what fits: all times are one second, batches of one image."""
    experts = {
        processor: {
            copy.expert.id: matrix_row(
                copy, performance_of(copy, 1.0, 1.0, 1, torch_device(processor)), UNMEASURED, box.pool_of(processor)
            )
            for copy in listed
        }
        for processor, listed in copies.items()
    }
    return PerformanceMatrix(experts, dict(usage))


def matrix_row(copy: ExpertCopy, performance: Performance, links: Mapping[str, float], pool: str) -> ExpertProfile:
    """Row of an expert. Load times count its own bytes: shared ones are usually resident."""
    sources = (SSD, HOST) if pool == DEVICE else (SSD,)
    load_s = {source: copy.loaded_bytes / links[source] for source in sources}
    return ExpertProfile(copy.name, performance, copy.footprint, load_s, prepared=prepared_form(copy.expert))


def _measure_first(
    box: Box, processor: str, copies: Sequence[ExpertCopy], segments: SegmentStore, threads: int, broken: dict[str, str]
) -> Performance | None:
    """Measure the first expert that runs, else None; ``broken`` collects the experts before it."""
    try:
        with MeasuringRig(box, processor, copies, segments, threads).opened() as rig:
            for copy in copies:
                try:
                    rig.bring(copy)
                    return _measure(rig, copy)
                except errors.ExpertError as error:
                    broken[copy.expert.id] = error.message
                finally:
                    rig.clear()
    except errors.ExpertError as error:  # there is no memory for the largest of them
        broken.update(dict.fromkeys((copy.expert.id for copy in copies), error.message))
    return None


def _measure(rig: MeasuringRig, copy: ExpertCopy) -> Performance:
    if copy.expert.takes_texts:
        with rig.model_of(copy) as model:
            timer = TextTimer(copy.expert.id, model, SHORT.limit_s)
            times = on_executor_thread(lambda: timer.times(TEXT_REPEATS), rig.device, rig.threads)
        performance = performance_of(copy, LEAST_S, max(times.fixed_s, LEAST_S), times.max_batch, rig.device)
        return replace(performance, K_prompt_s=times.per_prompt_token_s, K_output_s=times.per_output_token_s)
    batches = BatchRuns(rig, copy, ImageCycle(rig, copy), None, rig.free_bytes, SHORT).measure()
    largest, line = fit_curve(batches)
    return performance_of(copy, line.K_s, line.B_s, max(largest, LEAST_MAX_BATCH), rig.device)


def performance_of(
    copy: ExpertCopy, per_image_s: float, fixed_s: float, max_batch: int, device: str = "cpu"
) -> Performance:
    """Performance from these times, and from bytes that the backend computes by shapes."""
    backend, precision = backend_for(copy.expert.architecture), Precision(copy.packed.precision)
    workspace_of_one = backend.workspace_bytes(copy.expert, precision, 1)
    per_image_bytes = backend.workspace_bytes(copy.expert, precision, 2) - workspace_of_one
    if not device.startswith("cpu") and (copy.block_bytes or precision in QUANTISED):
        workspace_of_one += COPIED_BYTES
    return Performance(
        K_s=per_image_s,
        B_s=fixed_s,
        max_batch=max_batch,
        workspace_bytes=per_image_bytes,
        workspace_base_bytes=max(workspace_of_one - per_image_bytes, 0),
        lease_bytes=backend.token_bytes(copy.expert, precision),
    )
