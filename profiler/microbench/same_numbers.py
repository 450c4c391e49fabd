"""Proves forms that compute in the numbers of torch's fp32 (ONNX Runtime's and oneDNN's fp32) by the module's outputs.

Guarantees: no sample of the line is needed. Each expert runs noise, black, white, a ramp and some of its samples, if it
has any, in batches of one and of THREE; the first of a kind also runs the largest batch of the plan. Every output is
within MOST of torch's, in parts of the largest one of its channel, and at least of 1. So scores and boxes agree
whatever the confidence, the threshold and the route. NaN or infinity in either form is a difference: these forms turn
NaN into 0, where torch keeps it. Values that no trial image brings near the end of fp32 do not overflow on others, as
pixels are bounded.
"""

from __future__ import annotations

import hashlib
import logging
import math
import random
from typing import TYPE_CHECKING

import numpy as np
import torch

from agent.device_profile.records import Agreement
from agent.runtime.images.sources import ImageFile
from agent.runtime.measuring.rig import noise
from agent.runtime.measuring.text_times import on_executor_thread
from experts.backends.base import Prepared
from experts.errors import ExpertError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from agent.runtime.expert_copy import ExpertCopy
    from agent.runtime.measuring.rig import MeasuringRig
    from experts.expert import Expert
    from profiler.microbench.bench import Bench
    from profiler.workload.samples import LineSamples

    Outputs = list[tuple[Tensor, ...]]  # of each batch

logger = logging.getLogger(__name__)

MOST = 1e-4
MOST_SAMPLES = 8
THREE = 3
METHOD = "outputs 1"  # in the digest of a comparison


def compare_outputs(
    bench: Bench, fp32: Sequence[ExpertCopy], other: Sequence[ExpertCopy], largest_batch: int
) -> list[Agreement]:
    """Agreements of experts of one kind by their outputs. An expert without outputs to compare gets none."""
    others = {copy.expert.id: copy for copy in other}
    found = []
    with bench.rig([*fp32, *other]).opened() as rig:
        for number, copy in enumerate(copy for copy in fp32 if copy.expert.id in others):
            images = _images(rig, copy, bench.samples)
            batches = _batches(images, largest_batch if number == 0 else 1)
            expected, answered = (_outputs(rig, each, batches) for each in (copy, others[copy.expert.id]))
            if expected is None or answered is None:
                continue
            largest = largest_difference(expected, answered)
            found.append(
                Agreement(
                    expert=copy.expert.id,
                    kind=copy.kind,
                    processor=bench.processor,
                    precision=other[0].packed.precision,
                    images=len(images),
                    labels_differ=0 if math.isfinite(largest) else len(images),
                    largest_score_difference=largest if math.isfinite(largest) else 0.0,
                    tolerance=MOST,
                    of_sha256=trial_sha256(bench.samples, copy.expert),
                    least=1,
                )
            )
    return found


def trial_sha256(samples: LineSamples, expert: Expert) -> str:
    """Digest of a comparison's images, beside the weights."""
    return hashlib.sha256(f"{METHOD} {samples.sha256([expert.id])} {expert.pixels.text}".encode()).hexdigest()


def largest_difference(expected: Outputs, found: Outputs) -> float:
    """Largest difference of two outputs, in parts of the channel's largest or of 1; infinite for NaN or other shapes.

    Channels are the second dimension, as of logits, maps, and boxes with their scores.
    """
    worst = 0.0
    for one, other in ((a, b) for both in zip(expected, found, strict=True) for a, b in zip(*both, strict=True)):
        if one.shape != other.shape or not (one.isfinite().all() and other.isfinite().all()):
            return math.inf
        if one.numel():
            scale = one.abs().amax(dim=[each for each in range(one.dim()) if each != 1], keepdim=True).clamp(min=1.0)
            worst = max(worst, float(((one - other).abs() / scale).max()))
    return worst


def _images(rig: MeasuringRig, copy: ExpertCopy, samples: LineSamples) -> list[Tensor]:
    drawn = noise(copy)
    height, width = drawn.shape[:2]
    ramp = np.linspace(0, 255, height * width * 3).reshape(drawn.shape).astype(np.uint8)
    listed = list(samples.of(copy.expert.id))
    random.Random(copy.expert.id).shuffle(listed)
    files = [ImageFile(sample.path, sample.max_pixels) for sample in listed[:MOST_SAMPLES]]
    made = rig.prepared(copy, [drawn, np.zeros_like(drawn), np.full_like(drawn, 255), ramp, *files])
    return [each.tensor for each in made if isinstance(each, Prepared)]


def _batches(images: Sequence[Tensor], largest: int) -> list[list[Tensor]]:
    rows = [list(images[start : start + THREE]) for start in range(0, len(images), THREE)]
    whole = [images[number % len(images)] for number in range(largest)]
    return [[images[0]], *rows, *([whole] if largest > THREE else [])]


def _outputs(rig: MeasuringRig, copy: ExpertCopy, batches: Sequence[Sequence[Tensor]]) -> Outputs | None:
    """Outputs of each batch, before they are read as predictions; None where the copy cannot be run or has none."""
    try:
        rig.bring(copy)
        with rig.skeleton_of(copy) as skeleton:
            if (outputs := getattr(skeleton, "outputs", None)) is None:  # a graph's, or a fake's
                return None
            return on_executor_thread(lambda: [_answer(outputs, batch) for batch in batches], rig.device, rig.threads)
    except (ExpertError, ArithmeticError, RuntimeError, MemoryError) as error:
        logger.warning("cannot_compare copy=%s reason=%s", copy.name, error)
        return None
    finally:
        rig.clear()


def _answer(outputs: Callable[[Sequence[Tensor]], Sequence[Tensor]], batch: Sequence[Tensor]) -> tuple[Tensor, ...]:
    with torch.inference_mode():
        return tuple(each.float().clone() for each in outputs(batch))
