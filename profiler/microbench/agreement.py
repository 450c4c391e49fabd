"""Does an expert say the same in another precision? Outputs side by side on the same samples, and what to choose.

Two outputs agree where their labels are the same, and their scores differ by no more than TOLERANCE, 0.02: of a
detector's boxes the labels count, as often as each occurs, and their scores in order. All experts of a kind that have
samples are asked on all of them, over the agent's own path. What fp32 itself cannot judge is left out; what only the
other precision cannot judge, or cannot load, differs.

The choice: of the precisions whose agreement is proven on at least one image, and of fp32, the one with the least
predicted time per image at its own maximum batch, or at COMPARED_BATCH where that is smaller. Without real samples
nothing is proven, and it is fp32.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agent.core.events import BatchFailed
from agent.core.request import Rejected
from agent.device_profile.records import Agreement
from agent.runtime.image_sources import ImageFile
from agent.runtime.machine.box import torch_device
from experts.backends import backend_for
from experts.errors import ExpertError
from experts.expert import Precision

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from agent.device_profile.records import KindProfile
    from agent.runtime.expert_copy import ExpertCopy
    from agent.runtime.measuring.rig import MeasuringRig
    from experts.expert import Prediction
    from profiler.microbench.kinds import Bench
    from profiler.workload.samples import Sample

logger = logging.getLogger(__name__)

COMPARED_BATCH = 16  # arbitrary: seldom do more requests of one expert wait together
COMPARED_TOKENS = 64  # arbitrary, too
TOLERANCE = 0.02  # between two scores; they lie from 0 to 1
BATCH = 4  # images at a time; how many does not matter to what is compared


@dataclass(frozen=True, slots=True)
class Difference:
    """How far two outputs on one image are apart. ``score``: the most that two scores of the same labels differ."""

    same_labels: bool
    score: float


def candidate_precisions(architecture: str, processor: str) -> tuple[Precision, ...]:
    """The precisions to try for an architecture, fp32 first: those that its backend packs and the processor runs.

    int8 is not tried: language models run in it where the line says so. Raises BackendUnavailable.
    """
    known, runs_on_cpu = backend_for(architecture).precisions, torch_device(processor) == "cpu"
    able = (each for each in Precision if each in known and (runs_on_cpu or not each.is_cpu_only))
    return tuple(each for each in able if each is not Precision.INT8)


def compare(
    bench: Bench, fp32: Sequence[ExpertCopy], other: Sequence[ExpertCopy], tolerance: float = TOLERANCE
) -> Agreement:
    """One kind's experts in fp32 and in another precision, on the samples of each; no samples, no images.

    An expert that is in ``fp32`` and not in ``other`` differs on all its samples. Raises ValueError without a copy in
    ``other``, as there is no precision then.
    """
    if not other:
        raise ValueError("no copy in another precision")
    others = {copy.expert.id: copy for copy in other}
    differences: list[Difference] = []
    with bench.rig([*fp32, *other]).opened() as rig:
        for copy in fp32:
            if images := bench.samples.of(copy.expert.id):
                expected, found = (judged(rig, each, images) for each in (copy, others.get(copy.expert.id)))
                differences += compared(expected, found)
    return Agreement(
        kind=other[0].kind,
        processor=bench.processor,
        precision=other[0].packed.precision,
        images=len(differences),
        labels_differ=sum(not each.same_labels for each in differences),
        largest_score_difference=max((each.score for each in differences), default=0.0),
        tolerance=tolerance,
        samples_sha256=bench.samples.sha256(copy.expert.id for copy in fp32),
    )


def choose_precision(kinds: Sequence[KindProfile], agreements: Iterable[Agreement]) -> str:
    """The fastest precision of one kind on one processor that is fp32, or agrees with it on real samples.

    ``kinds``: its profiles, one for each precision that runs; of equal ones the first. Raises ValueError for profiles
    of several kinds or processors, or when neither fp32 is among them nor one that agrees.
    """
    if len({(kind.kind, kind.processor) for kind in kinds}) != 1:
        raise ValueError("the precisions of one kind on one processor are compared, and of nothing else")
    proven = {
        (agreement.kind, agreement.processor, agreement.precision)
        for agreement in agreements
        if agreement.images and agreement.agrees
    }
    eligible = [
        kind
        for kind in kinds
        if kind.precision == Precision.FP32 or (kind.kind, kind.processor, kind.precision) in proven
    ]
    if not eligible:
        raise ValueError(f"{kinds[0].kind} on {kinds[0].processor}: no precision runs that agrees with fp32")
    return min(eligible, key=image_s).precision


def image_s(kind: KindProfile) -> float:
    """Predicted seconds per image in batches of the maximum size, COMPARED_BATCH at most. CoServe, section 4.2.

    Of language models: per text of COMPARED_TOKENS that are read, and as many that are written.
    """
    tokens_s = COMPARED_TOKENS * (kind.K_prompt_s + kind.K_output_s)
    return kind.K_s + kind.B_s / min(kind.max_batch, COMPARED_BATCH) + tokens_s


def difference(fp32: Prediction, other: Prediction) -> Difference:
    """Two outputs on one image."""
    if fp32.label != other.label or _box_labels(fp32) != _box_labels(other):
        return Difference(same_labels=False, score=0.0)
    scores = zip(_scores(fp32), _scores(other), strict=True)
    return Difference(same_labels=True, score=max(abs(one - another) for one, another in scores))


def compared(fp32: Sequence[Prediction | None], other: Sequence[Prediction | None]) -> Iterator[Difference]:
    """One for each image that fp32 judged."""
    for expected, found in zip(fp32, other, strict=True):
        if expected is not None:
            yield Difference(same_labels=False, score=0.0) if found is None else difference(expected, found)


def judged(rig: MeasuringRig, copy: ExpertCopy | None, samples: Sequence[Sample]) -> list[Prediction | None]:
    """A copy's word on each image; None where it has none, and everywhere when it cannot be loaded."""
    if copy is None:
        return [None] * len(samples)
    try:
        rig.bring(copy)
        found: list[Prediction | None] = []
        for start in range(0, len(samples), BATCH):
            found += _judged_batch(rig, copy, samples[start : start + BATCH])
        return found
    except ExpertError as error:
        logger.warning("cannot_compare copy=%s reason=%s", copy.name, error.message)
        return [None] * len(samples)
    finally:
        rig.clear()


def _judged_batch(rig: MeasuringRig, copy: ExpertCopy, samples: Sequence[Sample]) -> list[Prediction | None]:
    answer = rig.attempt(copy, [ImageFile(sample.path, sample.max_pixels) for sample in samples])
    if isinstance(answer, BatchFailed):
        return [None] * len(samples)
    return [None if isinstance(result, Rejected) else result for result in answer.results]


def _box_labels(prediction: Prediction) -> Counter[str]:
    return Counter(box.label for box in prediction.boxes)


def _scores(prediction: Prediction) -> list[float]:
    """The deciding score, then those of the boxes: by label, the highest first."""
    boxes = sorted((box.label, -box.score) for box in prediction.boxes)
    return [prediction.score, *(-negative for _, negative in boxes)]
