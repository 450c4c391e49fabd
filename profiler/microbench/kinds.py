"""Microbenchmarks: the cost of one kind of experts on one processor in one precision (CoServe, section 4.5).

Guarantees: all measurements take the agent's own path (its rig): batches on prepared images, loads with direct
I/O past the page cache. A workspace is the peak during a batch above the memory held before the expert's first batch;
if unmeasurable, it is the backend's estimate, as ``KindProfile.samples`` states. Measure a kind before the process runs
it otherwise, as a runtime keeps memory once allocated.
"""

from __future__ import annotations

import logging
import math
from statistics import median
from typing import TYPE_CHECKING

from agent.core.events import BatchFailed
from agent.core.performance import ExecutorSpec
from agent.runtime.images.sources import ImageFile
from agent.runtime.machine.box import threads_per_executor, torch_device
from agent.runtime.measuring.batches import BatchRuns, ImageCycle
from agent.runtime.measuring.fits import fit_curve
from agent.runtime.measuring.loads import alike, measure_loads
from agent.runtime.measuring.meter import meter_for
from agent.runtime.measuring.rig import MeasuringRig
from experts.errors import ExpertError
from experts.expert import Rejected
from profiler.microbench.texts import ESTIMATED, fails_at_texts, measure_texts
from profiler.workload.samples import described

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from agent.device_profile.records import KindProfile
    from agent.runtime.expert_copy import ExpertCopy
    from experts.backends.base import Prepared
    from profiler.microbench.bench import Bench
    from profiler.workload.samples import Sample

logger = logging.getLogger(__name__)

ROUNDS = 3  # of executors together
BATCHES_TOGETHER = 12  # at least, by all executors that are timed at once


def measure_kind(bench: Bench, copies: Sequence[ExpertCopy]) -> KindProfile:
    """Measure one kind on one processor. ``copies``: its experts in one precision, one at least.

    Measures the first expert that runs, trying experts with samples first. Raises ExpertError if none runs.
    """
    reasons: list[ExpertError] = []
    for copy in sorted(copies, key=lambda copy: not bench.samples.of(copy.expert.id)):
        try:
            with bench.rig(copies).opened() as rig:
                return _measure(rig, bench, copy, copies)
        except ExpertError as error:
            logger.warning("cannot_measure copy=%s processor=%s reason=%s", copy.name, bench.processor, error.message)
            reasons.append(error)
    raise reasons[0]


def measure_speedups(bench: Bench, copies: Sequence[ExpertCopy], most: int, max_batch: int) -> tuple[float, ...]:
    """Speedup of n executors of a processor together over one alone, for n from 1 to ``most``.

    Each number of executors runs about as many batches, equally many on each executor: of one image on a CPU, whose
    cores one image fills; on a device of one image up to ``max_batch`` in turns, as larger ones leave others less. The
    speedup is that of the times of all batches together. Executors have the threads of ``threads_per_executor``, and
    different experts while there are copies. Medians of ROUNDS; the numbers alternate. Source: section 5.3, Figure 17.
    Raises ExpertError.
    """
    with bench.rig(copies[:1]).opened() as rig:
        images = ImageCycle(rig, copies[0], _files(bench.samples.of(copies[0].expert.id)))
    sizes = [1] if torch_device(bench.processor) == "cpu" else sorted({1, math.isqrt(max_batch), max_batch})
    batch_s: dict[int, dict[int, list[float]]] = {count: {size: [] for size in sizes} for count in range(1, most + 1)}
    for _ in range(ROUNDS):
        for count, by_size in batch_s.items():
            for size, times in by_size.items():
                works = [images.next(size) for _ in range(count * math.ceil(BATCHES_TOGETHER / count))]
                times.append(_together_s(bench, copies[:count], count, works) / len(works))
    together_s = [sum(map(median, by_size.values())) for by_size in batch_s.values()]
    return tuple(together_s[0] / each for each in together_s)


def failing_experts(
    bench: Bench, copies: Sequence[ExpertCopy], progress: Callable[[int, int], None] = lambda *_: None
) -> dict[str, str]:
    """Experts of these copies that do not judge an image on the bench's processor, and why.

    An expert that packs may still fail when it is run, or answer with NaN. Each is loaded as by the agent and runs one
    of its samples, or noise; a language model continues a synthetic text.
    """
    if not copies:
        return {}
    failing: dict[str, str] = {}
    with bench.rig(copies).opened() as rig:
        for number, copy in enumerate(copies):
            progress(number, len(copies))
            reason = _failure(rig, copy, bench.samples.of(copy.expert.id))
            if reason is not None:
                logger.warning("cannot_run copy=%s processor=%s reason=%s", copy.name, bench.processor, reason)
                failing[copy.expert.id] = reason
    progress(len(copies), len(copies))
    return failing


def _failure(rig: MeasuringRig, copy: ExpertCopy, samples: Sequence[Sample]) -> str | None:
    try:
        rig.bring(copy)
        if copy.expert.takes_texts:
            return fails_at_texts(rig, copy)
        answer = rig.attempt(copy, ImageCycle(rig, copy, _files(samples[:1])).next(1))
    except ExpertError as error:
        return error.message
    finally:
        rig.clear()
    if isinstance(answer, BatchFailed):
        return answer.reason
    (result,) = answer.results
    return result.reason.removeprefix(f"expert {copy.expert.id}: ") if isinstance(result, Rejected) else None


def _files(samples: Sequence[Sample]) -> list[ImageFile]:
    return [ImageFile(sample.path, sample.max_pixels) for sample in samples]


def _measure(rig: MeasuringRig, bench: Bench, copy: ExpertCopy, copies: Sequence[ExpertCopy]) -> KindProfile:
    if copy.expert.takes_texts:
        return measure_texts(rig, bench, copy, copies, meter_for(bench.processor))
    load_s = measure_loads(rig, alike(copy, copies))
    rig.bring(copy)
    samples = bench.samples.of(copy.expert.id)
    images = ImageCycle(rig, copy, _files(samples))
    meter = meter_for(bench.processor)
    batches = BatchRuns(rig, copy, images, meter, rig.free_bytes, bench.options).measure()
    max_batch, line = fit_curve(batches)
    return bench.kind_profile(
        copy,
        load_s,
        batches,
        K_s=line.K_s,
        B_s=line.B_s,
        fit_error=line.error,
        max_batch=max_batch,
        weight_bytes=copy.footprint.total_bytes,
        samples=described(samples) if meter else f"{described(samples)}; {ESTIMATED}",
    )


def _together_s(
    bench: Bench, copies: Sequence[ExpertCopy], count: int, works: Sequence[Sequence[Prepared | Rejected]]
) -> float:
    box, processor = bench.box, bench.processor
    specs = [ExecutorSpec(number, processor, box.pool_of(processor)) for number in range(count)]
    threads = threads_per_executor(box, specs)
    rig = MeasuringRig(box, processor, copies, bench.segments, threads, executors=count)
    with rig.opened():
        for copy in copies:
            rig.bring(copy)
        rig.all_s(copies, works[:count])
        return rig.all_s(copies, works)
