"""Time of the cores that decoding takes beside computing, whether it limits a line, and what would help.

A batch takes K n + B once its images are there. An agent decodes ahead, on the cores that CPU executors compute on, and
so does the forecast (``profiler.simulation.decoders``). Decoding is the limit where the cores, decoding and computing
(``profiler.simulation.core_time``), allow less than REMOVED of the rate of executors whose images are always there.

Guarantees: pure functions of a profile's records. Experts without samples count with the others' mean image.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from agent.core.request import IMAGE
from profiler.simulation.core_time import core_time
from profiler.simulation.decoders import ImageTimes
from profiler.simulation.forecast import forecast, image_times

if TYPE_CHECKING:
    from agent.deployment.engine_setup import EngineSetup
    from agent.device_profile.records import StoredProfile
    from profiler.simulation.core_time import CoreTime
    from profiler.simulation.forecast import Scenario

REMOVED = 0.95  # of the best rate: a resource that allows more is not the limit
LEAST = 1.02  # times the present rate: a change that gains less is left out


@dataclass(frozen=True, slots=True)
class Help:
    """Rate that the cores would allow at most after one change alone."""

    change: str
    images_per_s: float


@dataclass(frozen=True, slots=True)
class DecodingLoad:
    """Decoding beside computing. Rates are of requests, texts among them.

    ``executors_images_per_s``: with all images there. ``images``: of the trace's requests. ``help``: the most first.
    """

    time: CoreTime
    images: int
    executors_images_per_s: float
    help: tuple[Help, ...] = ()

    @property
    def images_per_s(self) -> float:
        return self.time.images_per_s

    @property
    def alone_images_per_s(self) -> float:
        return self.images * self.time.cores / self.time.decoding_s

    @property
    def is_limit(self) -> bool:
        return self.images_per_s < REMOVED * self.executors_images_per_s

    @property
    def waiting_fraction(self) -> float:
        """Least part of their time that executors wait for images."""
        return max(1.0 - self.images_per_s / self.executors_images_per_s, 0.0)

    def figures(self) -> dict[str, float]:
        return {
            "images_per_s": self.images_per_s,
            "alone_images_per_s": self.alone_images_per_s,
            "decoding_share": self.time.decoding_share,
            "waiting_fraction": self.waiting_fraction,
        }

    def sentences(self) -> list[str]:
        time, images = self.time, self.images
        image_ms, compute_ms = time.decoding_s / images * 1e3, time.compute_s / images * 1e3
        cores = "1 core reaches" if time.cores == 1 else f"{time.cores} cores reach"
        limit = (
            f"Decoding is the limit: it takes {time.decoding_share:.0%} of the cores' time for an image "
            f"({image_ms:.0f} of {image_ms + compute_ms:.0f} ms of one core), so that {cores} "
            f"{time.images_per_s:.1f} images/s at most, and executors, which would run "
            f"{self.executors_images_per_s:.1f}, wait for images {self.waiting_fraction:.0%} of the time."
        )
        named = ", ".join(f"{each.change} {each.images_per_s:.1f}" for each in self.help)
        return [
            limit,
            f"In images/s, these would allow up to: {named}." if named else "No change would help by itself.",
        ]


@dataclass(frozen=True, slots=True)
class DecodingTimes:
    """Decoding times of a line's experts: ``images`` as served, ``smaller`` with every large JPEG decoded smaller.

    ``refusing``: experts that do not decide alike on smaller JPEGs.
    """

    images: ImageTimes
    smaller: ImageTimes
    refusing: tuple[str, ...]

    def time(self, scenario: Scenario, setup: EngineSetup) -> CoreTime:
        decoding_s = _of_all(self.images, scenario)
        return core_time(scenario.requests, scenario.resources(setup), self.images.cores, decoding_s)

    def is_limit(self, scenario: Scenario, setup: EngineSetup) -> bool:
        return self.time(scenario, setup).images_per_s < REMOVED * _alone(scenario, setup)

    def load(self, scenario: Scenario, setup: EngineSetup) -> DecodingLoad:
        """Raises ConfigError as ``forecast`` does."""
        time = self.time(scenario, setup)
        alone = _alone(scenario, setup)
        smaller, unlike = "JPEGs made smaller while they are decoded", len(self.refusing)
        if unlike:
            smaller += f" (of which {unlike} {'expert does' if unlike == 1 else 'experts do'} not say the same)"
        changes = {
            "images of half the pixels": replace(time, decoding_s=time.decoding_s / 2),
            smaller: replace(time, decoding_s=_of_all(self.smaller, scenario)),
        }
        found = [Help(change, min(each.images_per_s, alone)) for change, each in changes.items()]
        found.append(Help("a further core", replace(time, cores=time.cores + 1).images_per_s))
        worth = [each for each in found if each.images_per_s >= LEAST * time.images_per_s]
        return DecodingLoad(
            time, scenario.images_asked, alone, tuple(sorted(worth, key=lambda each: -each.images_per_s))
        )


def decoding_times(profile: StoredProfile, scenario: Scenario) -> DecodingTimes | None:
    """Decoding times of the line; None where none was measured, or the trace has no image."""
    images = image_times(profile)
    if images is None or not scenario.images_asked:
        return None
    return DecodingTimes(
        images=images,
        smaller=ImageTimes(images.cores, {each.expert: each.scaled_s / each.images for each in profile.decodings}),
        refusing=tuple(each.expert for each in profile.decodings if each.smaller and not each.agrees),
    )


def _alone(scenario: Scenario, setup: EngineSetup) -> float:
    return forecast(replace(scenario, images=None), setup).images_per_s


def _of_all(times: ImageTimes, scenario: Scenario) -> float:
    return sum(
        times.of(steps[0]) for steps, each in zip(scenario.steps, scenario.trace, strict=True) if each.work is IMAGE
    )
