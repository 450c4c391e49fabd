"""Times decoding and preparation, and proves for which experts JPEGs may be decoded to fewer pixels.

MOST_TIMED of each expert's samples are read, decoded and prepared as by the agent, on one thread. All JPEGs that can be
decoded smaller (``experts.images.reduction``) are judged both ways. An expert gets smaller ones only if its decisions
are equal on each, with scores within the tolerance, on as many as prove a form (``agreement``). The proof is bound to
its input, thresholds, routes, form and weights.
"""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING

from agent.device_profile.identity import decoding_sha256, packed_sha256
from agent.device_profile.records import ImageDecoding
from agent.runtime.images.preparation import least_pixels
from experts.backends import prepare
from experts.images import decode_image, reduction
from profiler.microbench import agreement
from profiler.microbench.agreement import compared, failing_of, judged, terms_sha256

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from agent.runtime.expert_copy import ExpertCopy
    from experts.expert import Expert
    from experts.graph import ExpertGraph
    from profiler.microbench.bench import Bench
    from profiler.workload.samples import Sample

MOST_TIMED = 8  # samples of one expert: a photograph takes a quarter of a second, and lines have hundreds of experts


class DecodingBench:
    """Measures the experts of one bench; experts with equal images and preparation share times."""

    def __init__(self, bench: Bench, graph: ExpertGraph, tolerance: float) -> None:
        self._bench = bench
        self._graph = graph
        self._tolerance = tolerance
        self._times: dict[tuple[Path, str], tuple[_Timed, _Timed | None]] = {}

    def of_sha256(self, copy: ExpertCopy) -> str:
        terms = f"{packed_sha256(copy.packed)} {terms_sha256(self._bench.samples, self._graph, copy.expert)}"
        return hashlib.sha256(terms.encode()).hexdigest()

    def measure(self, copy: ExpertCopy) -> ImageDecoding | None:
        """Measure an expert; None without sample images. Raises ImageError for a missing or broken sample."""
        samples = self._bench.samples.of(copy.expert.id)
        if not samples or copy.expert.takes_texts:
            return None
        timed = [self._timed(sample, copy.expert) for sample in samples[:MOST_TIMED]]
        smaller = [sample for sample, (_, scaled) in zip(samples, timed, strict=False) if scaled is not None]
        if smaller and len(samples) >= agreement.LEAST_IMAGES:
            further = (sample for sample in samples[MOST_TIMED:] if self._timed(sample, copy.expert)[1] is not None)
            smaller.extend(further)
        is_enough = len(smaller) >= agreement.LEAST_IMAGES
        labels_differ, largest, failing = self._difference(copy, smaller) if is_enough else (0, 0.0, 0)
        return ImageDecoding(
            expert=copy.expert.id,
            images=len(timed),
            megapixels=sum(full.megapixels for full, _ in timed),
            full_s=sum(full.seconds for full, _ in timed),
            scaled_s=sum((scaled or full).seconds for full, scaled in timed),
            smaller=len(smaller),
            labels_differ=labels_differ,
            largest_score_difference=largest,
            tolerance=self._tolerance,
            of_sha256=self.of_sha256(copy),
            failing=failing,
            least=agreement.LEAST_IMAGES,
            least_each=agreement.LEAST_EACH,
            bound_sha256=decoding_sha256(self._graph, copy.expert, copy.packed.precision),
        )

    def _timed(self, sample: Sample, expert: Expert) -> tuple[_Timed, _Timed | None]:
        key = (sample.path, f"{expert.architecture} {expert.pixels}")
        if key not in self._times:
            full, least = _Timed(sample, expert, None), least_pixels(expert)
            can_be_smaller = full.is_jpeg and reduction(full.height, full.width, least) > 1
            self._times[key] = full, _Timed(sample, expert, least) if can_be_smaller else None
        return self._times[key]

    def _difference(self, copy: ExpertCopy, samples: Sequence[Sample]) -> tuple[int, float, int]:
        """Images that are decided otherwise, the largest difference of scores, and images that fail in full size."""
        with self._bench.rig([copy]).opened() as rig:
            expected = judged(rig, copy, samples)
            rig.scale_images(copy)
            found = judged(rig, copy, samples)
        apart = list(compared(self._graph, copy.expert.id, samples, expected, found))
        if not apart:
            return len(samples), 0.0, 0  # no sample was judged: nothing is proven
        failing = failing_of(self._graph, copy.expert, samples, expected)
        return sum(not each.is_same for each in apart), max(each.score for each in apart), failing


class _Timed:
    def __init__(self, sample: Sample, expert: Expert, least: tuple[int, int] | None) -> None:
        started = time.perf_counter()
        image = decode_image(sample.path, str(sample.path), sample.max_pixels, least=least)
        prepare(expert, image)
        self.seconds = time.perf_counter() - started
        self.height, self.width, self.is_jpeg = image.height, image.width, image.is_jpeg
        self.megapixels = image.height * image.width / 1e6
