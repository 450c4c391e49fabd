"""Rules of retention: choice of images to remove, by age, total size and free space. Pure.

Guarantees: an image that changed within YOUNG_S stays; so does an unexported one if the export is required. Images
beyond the age limit are removed first, then OK before UNKNOWN before NG, oldest first. So an NG image is removed for
space only if no OK image on its disk is removable.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from experts.expert import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from agent.line_file.records import KeepSection

DAY_S = 86_400.0
STEADY_S = 3600.0
STEADY_WITHIN_S = 60.0  # difference caused by slewing of the clock
YOUNG_S = 3600.0  # a person or a receiver may still need the image
LAST_TO_GO = {Verdict.OK: 0, Verdict.UNKNOWN: 1, Verdict.NG: 2}


class KeepingLimit(StrEnum):
    """Limit that an image exceeds."""

    AGE = "age"
    SIZE = "size"
    FREE = "free"


@dataclass(frozen=True, slots=True)
class KeptImage:
    """File of an image. ``at_s``: arrival; ``changed_s``: last change of any kind; both by the wall clock.
    ``mtime_ns``: detects a replaced file; ``device``: its disk; ``is_exported``: all its results are exported."""

    path: str
    verdict: Verdict
    at_s: float
    changed_s: float
    size_bytes: int
    mtime_ns: int
    device: int
    is_exported: bool = True


@dataclass(frozen=True, slots=True)
class Going:
    image: KeptImage
    reason: KeepingLimit


@dataclass(slots=True)
class Steadiness:
    """Trust in the wall clock, after an hour at a constant ``offset_s`` to the monotonic clock, since ``since_s``."""

    offset_s: float
    since_s: float

    def look(self, wall_s: float, now_s: float) -> bool:
        if abs(wall_s - now_s - self.offset_s) > STEADY_WITHIN_S:
            self.offset_s, self.since_s = wall_s - now_s, now_s
        return now_s - self.since_s >= STEADY_S


def may_go(image: KeptImage, limits: KeepSection, now_s: float) -> bool:
    return image.changed_s <= now_s - YOUNG_S and (image.is_exported or not limits.export_required)


def going_order(image: KeptImage, limits: KeepSection, now_s: float) -> tuple[bool, int, float, str]:
    is_old = _is_too_old(image, limits, now_s)
    return not is_old, 0 if is_old else LAST_TO_GO[image.verdict], image.at_s, image.path


def what_goes(
    images: Iterable[KeptImage], limits: KeepSection, now_s: float, kept_bytes: int, free_bytes: Mapping[int, int]
) -> Iterator[Going]:
    """Images to remove, in order, until the limits hold or no image is removable. ``kept_bytes``: size of all images,
    given or not; ``free_bytes``: by disk."""
    free_bytes = dict(free_bytes)
    candidates = [image for image in images if may_go(image, limits, now_s)]
    for image in sorted(candidates, key=lambda each: going_order(each, limits, now_s)):
        free = free_bytes.get(image.device)
        if _is_too_old(image, limits, now_s):
            reason = KeepingLimit.AGE
        elif limits.size is not None and kept_bytes > limits.size:
            reason = KeepingLimit.SIZE
        elif limits.free is not None and free is not None and free < limits.free:
            reason = KeepingLimit.FREE
        else:
            continue
        kept_bytes -= image.size_bytes
        if free is not None:
            free_bytes[image.device] = free + image.size_bytes
        yield Going(image, reason)


def _is_too_old(image: KeptImage, limits: KeepSection, now_s: float) -> bool:
    return limits.days is not None and image.at_s < now_s - limits.days * DAY_S
