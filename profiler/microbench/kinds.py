"""Microbenchmarks: what one kind of experts costs on one processor in one precision (CoServe, section 4.5).

Guarantees: everything is measured over the agent's own path (its rig): batches on prepared images, loads with direct
I/O past the page cache. A workspace is the most that was held during a batch above what was held before the expert's
first batch; where it cannot be measured it is the backend's estimate, and ``KindProfile.samples`` says so. A kind is
best measured before anything else runs it in the process: what a runtime keeps is then seen as it is taken.
"""

from __future__ import annotations

import logging
import math
from statistics import median
from typing import TYPE_CHECKING

from agent.core.performance import HOST, ExecutorSpec
from agent.device_profile.records import KindProfile
from agent.runtime.machine.box import threads_per_executor
from agent.runtime.machine.detection import host_memory
from agent.runtime.measuring.loads import alike, measure_loads
from agent.runtime.measuring.rig import MeasuringRig
from experts.errors import ExpertError
from profiler.microbench.batches import BatchRuns, ImageCycle
from profiler.microbench.fits import fit_latency, fit_workspace, plateau
from profiler.microbench.texts import measure_texts
from profiler.workload.samples import described

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent.core.request import Rejected
    from agent.runtime.expert_copy import ExpertCopy
    from experts.backends.base import Prepared
    from profiler.microbench.bench import Bench

logger = logging.getLogger(__name__)

ROUNDS = 3  # of executors together
BATCHES_TOGETHER = 12  # at least, by all executors that are timed at once
ESTIMATED = "workspace estimated from shapes"


def measure_kind(bench: Bench, copies: Sequence[ExpertCopy]) -> KindProfile:
    """One kind on one processor: of ``copies``, its experts in one precision, the first that runs is measured.

    Those with samples come first. Raises ExpertError when none can be run, ValueError for no copy at all.
    """
    if not copies:
        raise ValueError("no copy to measure")
    reasons: list[ExpertError] = []
    for copy in sorted(copies, key=lambda copy: not bench.samples.of(copy.expert.id)):
        try:
            with bench.rig(copies).opened() as rig:
                return _measure(rig, bench, copy, copies)
        except ExpertError as error:
            logger.warning("cannot_measure copy=%s processor=%s reason=%s", copy.name, bench.processor, error.message)
            reasons.append(error)
    raise reasons[0]


def measure_speedups(bench: Bench, copies: Sequence[ExpertCopy], most: int) -> tuple[float, ...]:
    """Speedup of n executors of a processor together over one alone, for n from 1 to ``most``.

    Each number of executors runs about as many batches, the same number on each; every executor has the threads that
    ``threads_per_executor`` gives it among so many, and an expert of its own as far as there are copies. Medians of
    ROUNDS over all numbers in turn, of batches of one image. Source: section 5.3, Figure 17. Raises ExpertError,
    ValueError.
    """
    if most < 1 or not copies:
        raise ValueError(f"{most} executors of {len(copies)} experts cannot be measured")
    with bench.rig(copies[:1]).opened() as rig:
        images = ImageCycle(rig, copies[0], bench.samples.of(copies[0].expert.id))
    batch_s: dict[int, list[float]] = {count: [] for count in range(1, most + 1)}
    for _ in range(ROUNDS):
        for count, times in batch_s.items():
            works = [images.next(1) for _ in range(count * math.ceil(BATCHES_TOGETHER / count))]
            times.append(_together_s(bench, copies[:count], count, works) / len(works))
    alone_s = median(batch_s[1])
    return tuple(alone_s / median(times) for times in batch_s.values())


def _measure(rig: MeasuringRig, bench: Bench, copy: ExpertCopy, copies: Sequence[ExpertCopy]) -> KindProfile:
    if copy.expert.takes_texts:
        return measure_texts(rig, bench, copy, copies, bench.meter(bench.processor))
    load_s = measure_loads(rig, alike(copy, copies))
    rig.bring(copy)
    samples = bench.samples.of(copy.expert.id)
    images = ImageCycle(rig, copy, samples)
    meter = bench.meter(bench.processor)
    free_bytes = (host_memory() if rig.target == HOST else bench.box.size_of(rig.target)).available_bytes
    runs = BatchRuns(rig, copy, images, meter, free_bytes, bench.options)
    batches = runs.measure()
    max_batch = plateau(batches)
    line = fit_latency([batch for batch in batches if batch.batch_size <= max_batch])
    workspace = fit_workspace(batches)
    return KindProfile(
        kind=copy.kind,
        architecture=copy.expert.architecture,
        processor=bench.processor,
        precision=copy.packed.precision,
        threads=bench.threads,
        K_s=line.K_s,
        B_s=line.B_s,
        fit_error=line.error,
        max_batch=max_batch,
        weight_bytes=copy.footprint.total_bytes,
        workspace_base_bytes=workspace.base_bytes,
        workspace_bytes=workspace.per_image_bytes,
        load_s=load_s,
        batches=batches,
        samples=described(samples) if meter else f"{described(samples)}; {ESTIMATED}",
    )


def _together_s(
    bench: Bench, copies: Sequence[ExpertCopy], count: int, works: Sequence[Sequence[Prepared | Rejected]]
) -> float:
    """The seconds that so many executors take for these batches, after one each to warm up."""
    box, processor = bench.box, bench.processor
    specs = [ExecutorSpec(number, processor, box.pool_of(processor)) for number in range(count)]
    threads = threads_per_executor(box, specs)
    rig = MeasuringRig(box, processor, copies, bench.segments, threads, executors=count)
    with rig.opened():
        for copy in copies:
            rig.bring(copy)
        rig.all_s(copies, works[:count])
        return rig.all_s(copies, works)
