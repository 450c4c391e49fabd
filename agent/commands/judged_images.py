"""Judged images as `coserve inspect` prints and draws them, judged by an agent or by this process."""

from __future__ import annotations

import hashlib
from collections import Counter
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from PIL import Image, ImageDraw, ImageFont

from agent.doors.desk import VerdictView
from agent.subject import CALLERS, Subject
from experts.errors import ConfigError, ImageError
from experts.expert import Anomaly, Orientation, Verdict
from experts.images import decode_image
from experts.thresholds.map_pictures import drawn_over, map_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from experts.expert import BoundingBox

COLOURS = {Verdict.OK: (86, 214, 126), Verdict.NG: (255, 72, 62), Verdict.UNKNOWN: (255, 184, 48)}
GROUND = (16, 18, 20)
LEAST_WIDTH_PX = 480  # smaller images are enlarged by a whole number, so that words are legible
STRIP_PX, LINE_PX, WORDS_PX = 34, 2, 18
WORDS_AT = (10, STRIP_PX / 2)


def unjudged(image: Path, reason: str, boxes: tuple[BoundingBox, ...] = ()) -> VerdictView:
    subject = Subject(str(image), CALLERS, str(image), datetime.now(UTC))
    return VerdictView(subject, Verdict.UNKNOWN, reason=reason, boxes=boxes)


def outputs_sha256(labels: Iterable[str | None]) -> str:
    """Digest over (request number, label): two policies that judge the same images must agree on it in fp32."""
    digest = hashlib.sha256()
    for number, label in enumerate(labels):
        digest.update(f"{number} {label}\n".encode())
    return digest.hexdigest()


def judged_rows(
    images: Sequence[Path], component: str, judged: Sequence[VerdictView], pictures: Path | None
) -> list[dict[str, Any]]:
    """One row per image, in order. ``pictures``: folder for a picture of each image, the row's ``picture``."""
    rows = [_row(image, component, each) for image, each in zip(images, judged, strict=True)]
    if pictures is None:
        return rows
    drawn = draw_judged(images, judged, pictures)
    return [row | {"picture": None if file is None else str(file)} for row, file in zip(rows, drawn, strict=True)]


def _row(image: Path, component: str, judged: VerdictView) -> dict[str, Any]:
    return {
        "image": str(image),
        "component": component,
        "verdict": str(judged.verdict),
        "label": judged.label,
        "score": judged.score,
        "experts": list(judged.experts),
        "seconds": round(judged.seconds, 6),
        "reason": judged.reason,
        **judged.findings(),
    }


def draw_judged(images: Sequence[Path], ends: Sequence[VerdictView], folder: Path) -> list[Path | None]:
    """PNGs in ``folder``, named as the images; None: unreadable. Raises ConfigError if the disk refuses."""
    times = Counter(image.name for image in images)
    targets = [
        folder / f"{'' if times[image.name] == 1 else f'{number}-'}{image.name}.judged.png"
        for number, image in enumerate(images, start=1)
    ]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [_saved(drawn(image, end), target) for image, end, target in zip(images, ends, targets, strict=True)]
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror or error} - name a folder that can be written") from error


def _saved(picture: Image.Image | None, target: Path) -> Path | None:
    if picture is None:
        return None
    picture.save(target)
    return target


def drawn(image: Path, shown: VerdictView) -> Image.Image | None:
    """An image with its boxes, maps and words; None: it is unreadable."""
    try:
        pixels = decode_image(image, str(image)).turned(Orientation.EXIF)
    except ImageError:
        return None  # its row has the reason
    times = max(1, -(-LEAST_WIDTH_PX // pixels.shape[1]))
    image_size = pixels.shape[1] * times, pixels.shape[0] * times
    picture = Image.fromarray(pixels).resize(image_size, Image.Resampling.NEAREST)
    for each in shown.anomalies:
        map_ = None if each.map_png is None else map_of(each.map_png)
        picture = drawn_over(picture, Anomaly(each.score, each.threshold, map_))
    return _with_words(picture, shown, times)


def _with_words(picture: Image.Image, shown: VerdictView, times: int) -> Image.Image:
    whole = Image.new("RGB", (picture.width, picture.height + STRIP_PX), GROUND)
    whole.paste(picture)
    draw = ImageDraw.Draw(whole)
    font = ImageFont.load_default(WORDS_PX)
    colour = COLOURS[shown.verdict]
    for box in shown.boxes:
        corners = [side * times for side in (box.left, box.top, box.right, box.bottom)]
        draw.rectangle(corners, outline=colour, width=LINE_PX)
        draw.text((corners[0] + LINE_PX, corners[1]), f"{box.label} {box.score:.2f}", colour, font, anchor="lb")
    draw.text((WORDS_AT[0], picture.height + WORDS_AT[1]), _words(shown), colour, font, anchor="lm")
    return whole


def _words(shown: VerdictView) -> str:
    if shown.label is None:
        return f"{shown.verdict}  {shown.reason}"
    scores = [f"({each.score:.4g}, threshold {each.threshold:.4g})" for each in shown.anomalies]
    scores += [f"({each.label} {each.score:.3f})" for each in shown.outputs if each.holds and each.label != shown.label]
    return "  ".join([f"{shown.verdict}  {shown.label} {shown.score:.3f}", *scores])
