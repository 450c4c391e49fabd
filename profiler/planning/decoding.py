"""What decoding images takes of the cores beside computing, whether that is what limits a line, and what would help.

A batch's measured time is from its start to its answer: where real images were run, theirs was decoded in it, on all
cores, before anything was computed. An agent decodes ahead, so executors alone take what is left without that
(``DecodingTimes.executors_alone``), and both share the cores (``profiler.simulation.core_time``). Decoding is the limit
where the cores then allow less than REMOVED of what executors alone would run: they wait for images the rest of the
time.

Guarantees: pure functions of a profile's records. Experts without samples are taken to have images as the others do.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING

from agent.core.performance import PerformanceMatrix
from agent.core.request import IMAGE
from profiler.simulation.core_time import core_time
from profiler.simulation.forecast import forecast
from profiler.workload.samples import is_synthetic

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from agent.core.performance import ExpertProfile
    from agent.deployment.engine_setup import EngineSetup
    from agent.device_profile.records import ImageDecoding, KindProfile, StoredProfile
    from profiler.simulation.core_time import CoreTime
    from profiler.simulation.forecast import Scenario

MOST_OF_A_BATCH = 0.95  # arbitrary: that decoding took of a measured batch; less is noise of two measurements
LEAST = 1.02  # times what the cores allow now: what helps less is not told


@dataclass(frozen=True, slots=True)
class Help:
    """One change, alone, and what the cores would allow then at the most."""

    change: str
    images_per_s: float


@dataclass(frozen=True, slots=True)
class DecodingLoad:
    """What decoding takes beside computing. Rates are of requests, texts among them.

    ``executors_images_per_s``: what executors
    would run, were all images there. ``images``: of the trace's requests. ``help``: the most first.
    """

    time: CoreTime
    images: int
    executors_images_per_s: float
    help: tuple[Help, ...] = ()

    @property
    def images_per_s(self) -> float:
        """What the cores allow at the most, decoding and computing."""
        return self.time.images_per_s

    @property
    def alone_images_per_s(self) -> float:
        """Did all cores nothing but decode."""
        return self.images * self.time.cores / self.time.decoding_s

    @property
    def waiting_fraction(self) -> float:
        """Of their time, executors wait for images at the least."""
        return max(1.0 - self.images_per_s / self.executors_images_per_s, 0.0)

    def figures(self) -> dict[str, float]:
        """What follows from the rest, for scripts."""
        return {
            "images_per_s": self.images_per_s,
            "alone_images_per_s": self.alone_images_per_s,
            "decoding_share": self.time.decoding_share,
            "waiting_fraction": self.waiting_fraction,
        }

    def sentences(self) -> list[str]:
        """In words, where it is the limit."""
        time, images = self.time, self.images
        image_ms, compute_ms = time.decoding_s / images * 1e3, time.compute_s / images * 1e3
        limit = (
            f"Decoding is the limit: it takes {time.decoding_share:.0%} of the cores' time for an image "
            f"({image_ms:.0f} of {image_ms + compute_ms:.0f} ms of one core), so that {_cores(time.cores)} "
            f"{time.images_per_s:.1f} images/s at most, and executors, which would run "
            f"{self.executors_images_per_s:.1f}, wait for images {self.waiting_fraction:.0%} of the time."
        )
        told = ", ".join(f"{each.change} {each.images_per_s:.1f}" for each in self.help)
        return [limit, f"In images/s, these would allow up to: {told}." if told else "No change would help by itself."]


@dataclass(frozen=True, slots=True)
class DecodingTimes:
    """What a profile knows of decoding, for the experts of one line.

    ``image_s``, ``smaller_s``: seconds of one core for one image, by expert, as it is served, and were every JPEG made
    smaller that is large enough, of which ``refusing`` experts do not say the same. ``fractions``: of a batch's
    measured time, by kind, processor and form. ``kinds``: by expert.
    """

    cores: int
    image_s: Mapping[str, float]
    smaller_s: Mapping[str, float]
    refusing: tuple[str, ...]
    fractions: Mapping[tuple[str, str, str], float]
    kinds: Mapping[str, str]

    def time(self, scenario: Scenario, setup: EngineSetup) -> CoreTime:
        """What a trace takes of the cores with these executors and forms."""
        resources = scenario.resources(self.executors_alone(setup))
        return core_time(scenario.requests, resources, self.cores, _of_all(self.image_s, scenario))

    def executors_alone(self, setup: EngineSetup) -> EngineSetup:
        """The same with images that are there when their batches start."""
        experts = {
            processor: {name: self._computing(processor, name, row) for name, row in column.items()}
            for processor, column in setup.matrix.experts.items()
        }
        return replace(setup, matrix=PerformanceMatrix(experts, setup.matrix.usage))

    def load(self, scenario: Scenario, setup: EngineSetup) -> DecodingLoad:
        """All of it. Raises ConfigError as ``forecast`` does."""
        time = self.time(scenario, setup)
        alone = forecast(scenario, self.executors_alone(setup)).images_per_s
        images = sum(arrival.work is IMAGE for arrival in scenario.trace)
        changes = {
            "images of half the pixels": time.decoding_in(time.decoding_s / 2),
            _smaller_words(self.refusing): time.decoding_in(_of_all(self.smaller_s, scenario)),
        }
        found = [Help(change, min(each.images_per_s, alone)) for change, each in changes.items()]
        found.append(Help("a further core", time.on(time.cores + 1).images_per_s))
        worth = [each for each in found if each.images_per_s >= LEAST * time.images_per_s]
        return DecodingLoad(time, images, alone, tuple(sorted(worth, key=lambda each: -each.images_per_s)))

    def _computing(self, processor: str, expert: str, row: ExpertProfile) -> ExpertProfile:
        key = (self.kinds.get(expert, ""), processor, row.copy.rpartition("@")[2])
        rest, known = 1.0 - self.fractions.get(key, 0.0), row.performance
        return replace(row, performance=replace(known, K_s=known.K_s * rest, B_s=known.B_s * rest))


def decoding_times(
    profile: StoredProfile, scenario: Scenario, kinds: Callable[[], Mapping[str, str]]
) -> DecodingTimes | None:
    """What the profile knows; None where no decoding was measured, or the trace has no image. ``kinds``: by expert."""
    if not profile.decodings or all(arrival.work is not IMAGE for arrival in scenario.trace):
        return None
    by_expert = kinds()
    known = {each.expert: each for each in profile.decodings}
    return DecodingTimes(
        cores=profile.box.cores,
        image_s={name: each.image_s for name, each in known.items()},
        smaller_s={name: each.scaled_s / each.images for name, each in known.items()},
        refusing=tuple(name for name, each in known.items() if each.smaller and not each.agrees),
        fractions=_fractions(profile, by_expert, known),
        kinds=by_expert,
    )


def _fractions(
    profile: StoredProfile, kinds: Mapping[str, str], decodings: Mapping[str, ImageDecoding]
) -> dict[tuple[str, str, str], float]:
    """Of the kinds that were run on real images, at full size, as they were measured."""
    full_s: defaultdict[str, list[float]] = defaultdict(list)
    for expert, each in decodings.items():
        if expert in kinds:
            full_s[kinds[expert]].append(each.full_s / each.images)
    return {
        (kind.kind, kind.processor, kind.precision): _fraction(kind, fmean(full_s[kind.kind]) / profile.box.cores)
        for kind in profile.kinds
        if kind.kind in full_s and not is_synthetic(kind.samples)
    }


def _fraction(kind: KindProfile, decoding_s: float) -> float:
    """``decoding_s``: of one image, on all cores."""
    image_s = kind.K_s + kind.B_s / kind.max_batch
    return min(decoding_s / image_s, MOST_OF_A_BATCH) if image_s > 0.0 else 0.0


def _of_all(image_s: Mapping[str, float], scenario: Scenario) -> float:
    """Each image of a trace once, as its first expert's samples take; of experts without: as the others' on average."""
    others_s = fmean(image_s.values())
    return sum(
        image_s.get(steps[0], others_s)
        for steps, each in zip(scenario.steps, scenario.trace, strict=True)
        if each.work is IMAGE
    )


def _smaller_words(refusing: tuple[str, ...]) -> str:
    change = "JPEGs made smaller while they are decoded"
    if not refusing:
        return change
    return (
        f"{change} (of which {len(refusing)} {'expert does' if len(refusing) == 1 else 'experts do'} not say the same)"
    )


def _cores(count: int) -> str:
    return "1 core reaches" if count == 1 else f"{count} cores reach"
