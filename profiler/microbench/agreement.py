"""Compares an expert's verdicts in two precisions on the same samples.

Two outputs agree if each route step of the expert gives equal label, next expert and verdict (experts.graph judges).
Also, equal labels hold, boxes match in label and place, and scores differ by at most TOLERANCE. An image that only
one precision can judge differs. LEAST_IMAGES of an expert's own images, all in agreement, are a proof if LEAST_EACH of
them pass by fp32 and as many fail: with n of a class fewer than 3/n of such images are decided otherwise, at 95 % (the
rule of three).
"""

from __future__ import annotations

import hashlib
import logging
import sys
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from agent.core.events import BatchFailed
from agent.device_profile.identity import verdict_sha256
from agent.device_profile.records import Agreement
from agent.runtime.images.sources import ImageFile
from agent.runtime.machine.box import torch_device
from experts.backends import backend_for
from experts.backends.forms import FORMS
from experts.errors import ExpertError
from experts.expert import Rejected, Verdict
from experts.proving.comparing import overlap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from agent.device_profile.records import KindProfile
    from agent.runtime.expert_copy import ExpertCopy
    from agent.runtime.measuring.rig import MeasuringRig
    from experts.expert import BoundingBox, Expert, Precision, Prediction
    from experts.graph import ExpertGraph
    from profiler.microbench.bench import Bench
    from profiler.workload.samples import LineSamples, Sample

logger = logging.getLogger(__name__)

LEAST_IMAGES = 30  # of one expert, to prove a form: fewer than 1 in 10 images are decided otherwise
LEAST_EACH = 10  # of them, that fp32 passes, and that it fails: fewer than 3 in 10 of either are decided otherwise
BY_CLASS = "by class"  # in the digest of a comparison that counts classes
OVERLAP_LEAST = 0.75  # intersection over union of two boxes at one place
SHARE_OF_ONE = 0.75  # share of images that are alone in their batch, as most are with many experts
LEAST_GAIN = 0.05  # of an image's time: a form that saves less is not run
COMPARED_BATCH = 16  # arbitrary: seldom do more requests of one expert wait together
COMPARED_TOKENS = 64  # arbitrary, too
TOLERANCE = 0.02  # between two scores from 0 to 1
BATCH = 4  # images at a time; the comparison does not depend on it


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference of two outputs on one image. ``score``: the largest difference of two scores of one label."""

    is_same: bool
    score: float


def candidate_precisions(architecture: str, processor: str) -> tuple[Precision, ...]:
    """Forms that ``auto`` may choose: the backend packs them and the processor runs them; fp32 first.

    Raises BackendUnavailable.
    """
    known, runs_on_cpu = backend_for(architecture).precisions, torch_device(processor) == "cpu"
    able = (form for form in FORMS.values() if form.name in known and (runs_on_cpu or not form.is_cpu_only))
    return tuple(form.name for form in able if form.is_automatic and not form.steps_aside)


def compare(
    bench: Bench,
    graph: ExpertGraph,
    fp32: Sequence[ExpertCopy],
    other: Sequence[ExpertCopy],
    tolerance: float = TOLERANCE,
) -> list[Agreement]:
    """Agreements of experts of one kind in fp32 and in another precision, each on its own samples.

    An expert without a copy in ``other``, which has one at least, differs on all its samples.
    """
    others = {copy.expert.id: copy for copy in other}
    with bench.rig([*fp32, *other]).opened() as rig:
        return [
            Agreement(
                expert=copy.expert.id,
                kind=copy.kind,
                processor=bench.processor,
                precision=other[0].packed.precision,
                images=len(apart),
                labels_differ=sum(not each.is_same for each in apart),
                largest_score_difference=max((each.score for each in apart), default=0.0),
                tolerance=tolerance,
                of_sha256=terms_sha256(bench.samples, graph, copy.expert),
                least=LEAST_IMAGES,
                failing=failing_of(graph, copy.expert, samples, both[0]),
                least_each=LEAST_EACH,
            )
            for copy in fp32
            for samples in [bench.samples.of(copy.expert.id)]
            for both in [[judged(rig, each, samples) for each in (copy, others.get(copy.expert.id))]]
            for apart in [list(compared(graph, copy.expert.id, samples, *both))]
        ]


def terms_sha256(samples: LineSamples, graph: ExpertGraph, expert: Expert) -> str:
    """Digest of the samples and of all inputs of a verdict except weights."""
    terms = f"{samples.sha256([expert.id])} {verdict_sha256(graph, expert)} {BY_CLASS}"
    return hashlib.sha256(terms.encode()).hexdigest()


def image_s(kind: KindProfile) -> float:
    """Seconds per image: SHARE_OF_ONE of them alone, the rest in batches of at most COMPARED_BATCH.

    Language models: plus COMPARED_TOKENS read and as many written.
    """
    tokens_s = COMPARED_TOKENS * (kind.K_prompt_s + kind.K_output_s)
    together = kind.B_s / min(kind.max_batch, COMPARED_BATCH)
    return kind.K_s + SHARE_OF_ONE * kind.B_s + (1 - SHARE_OF_ONE) * together + tokens_s


def is_clearly_faster(kind: KindProfile, reference: KindProfile) -> bool:
    """True for a gain above the noise (the span of the repeats' middle half, of both kinds) and above LEAST_GAIN."""
    return image_s(kind) < (1 - max(LEAST_GAIN, _spread(kind) + _spread(reference))) * image_s(reference)


def _spread(kind: KindProfile) -> float:
    spans = [0.0]
    for seconds in (sorted(batch.seconds) for batch in kind.batches):
        count = len(seconds)
        spans.append((seconds[3 * count // 4] - seconds[count // 4]) / max(seconds[count // 2], sys.float_info.min))
    return max(spans)


def difference(
    fp32: Prediction, other: Prediction, steps: Callable[[Prediction], object] = lambda prediction: prediction.label
) -> Difference:
    """``steps``: the outcome of an output on the expert's routes."""
    if steps(fp32) != steps(other) or _held(fp32) != _held(other) or not _are_boxes_same(fp32.boxes, other.boxes):
        return Difference(is_same=False, score=0.0)
    scores = zip(_scores(fp32), _scores(other), strict=True)
    return Difference(is_same=True, score=max(abs(one - another) for one, another in scores))


def compared(
    graph: ExpertGraph,
    expert: str,
    samples: Sequence[Sample],
    fp32: Sequence[Prediction | None],
    other: Sequence[Prediction | None],
) -> Iterator[Difference]:
    """One comparison per sample that is judged in at least one precision."""
    for sample, expected, found in zip(samples, fp32, other, strict=True):
        if expected is not None and found is not None:
            yield difference(expected, found, partial(_steps, graph, sample.component, expert))
        elif expected is not found:
            yield Difference(is_same=False, score=0.0)


def failing_of(graph: ExpertGraph, expert: Expert, samples: Sequence[Sample], fp32: Sequence[Prediction | None]) -> int:
    """Images that fp32 judges NG; of a router that can fail none: of another label than the most frequent one."""
    found = [(each.component, one) for each, one in zip(samples, fp32, strict=True) if one is not None]
    verdicts = [
        {graph.judge(component, step, one).verdict for step in graph.turns(component, expert.id)}
        for component, one in found
    ]
    steps = [step for route in graph.routes.values() for step in route if step.expert == expert.id]
    if any(step.min_score or not step.going_on.issuperset(expert.answers) for step in steps):
        return sum(Verdict.NG in each for each in verdicts)
    labels = Counter(one.label for _, one in found)
    return len(found) - max(labels.values(), default=0)


def _steps(graph: ExpertGraph, component: str, expert: str, prediction: Prediction) -> list[object]:
    ends = (graph.judge(component, step, prediction) for step in graph.turns(component, expert))
    return [prediction.label, *((end.label, end.next_expert, end.verdict) for end in ends)]


def judged(rig: MeasuringRig, copy: ExpertCopy | None, samples: Sequence[Sample]) -> list[Prediction | None]:
    """A copy's prediction for each image; None where an image fails, and for all when the copy cannot be loaded."""
    if copy is None or not samples:
        return [None] * len(samples)
    try:
        rig.bring(copy)
        found: list[Prediction | None] = []
        for start in range(0, len(samples), BATCH):
            batch = samples[start : start + BATCH]
            answer = rig.attempt(copy, [ImageFile(sample.path, sample.max_pixels) for sample in batch])
            results = [None] * len(batch) if isinstance(answer, BatchFailed) else answer.results
            found += [None if isinstance(result, Rejected) else result for result in results]
        return found
    except ExpertError as error:
        logger.warning("cannot_compare copy=%s reason=%s", copy.name, error.message)
        return [None] * len(samples)
    finally:
        rig.clear()


def _held(prediction: Prediction) -> list[str]:
    return [output.label for output in prediction.outputs if output.holds]


def _are_boxes_same(fp32: Sequence[BoundingBox], other: Sequence[BoundingBox]) -> bool:
    """Pairs each box with the unpaired one of its label that overlaps most; true where none is left over."""
    left = list(other)
    for box in fp32:
        near = max((each for each in left if each.label == box.label), key=partial(overlap, box), default=None)
        if near is None or overlap(box, near) < OVERLAP_LEAST:
            return False
        left.remove(near)
    return not left


def _scores(prediction: Prediction) -> list[float]:
    boxes = sorted((box.label, -box.score) for box in prediction.boxes)
    return [prediction.score, *(each.score for each in prediction.outputs), *(-negative for _, negative in boxes)]
