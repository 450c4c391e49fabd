"""What was found in an image, drawn over it: anomaly maps, boxes, and the verdict below."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from PIL import Image, ImageDraw, ImageFont

from experts.errors import ConfigError, ImageError
from experts.expert import Verdict
from experts.images import read_image
from experts.map_pictures import drawn_over

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from agent.core.request import Outcome

COLOURS = {Verdict.OK: (86, 214, 126), Verdict.NG: (255, 72, 62), Verdict.UNKNOWN: (255, 184, 48)}
GROUND = (16, 18, 20)
LEAST_WIDTH_PX = 480  # smaller images are enlarged, by whole numbers: below that nobody reads the words
STRIP_PX, LINE_PX, WORDS_PX = 34, 2, 18
WORDS_AT = (10, STRIP_PX / 2)


def draw_outcomes(images: Sequence[Path], outcomes: Sequence[Outcome], folder: Path) -> list[Path | None]:
    """The pictures, PNGs in ``folder`` that are called as the images; None of an image that cannot be read.

    Raises ConfigError for what the disk refuses.
    """
    times = Counter(image.name for image in images)
    targets = [
        folder / f"{'' if times[image.name] == 1 else f'{number}-'}{image.name}.judged.png"
        for number, image in enumerate(images, start=1)
    ]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [_drawn(*each) for each in zip(images, outcomes, targets, strict=True)]
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror or error} - name a folder that can be written") from error


def _drawn(image: Path, outcome: Outcome, target: Path) -> Path | None:
    try:
        pixels = read_image(image, str(image))
    except ImageError:
        return None  # its row says why
    times = max(1, -(-LEAST_WIDTH_PX // pixels.shape[1]))
    image_size = pixels.shape[1] * times, pixels.shape[0] * times
    picture = Image.fromarray(pixels).resize(image_size, Image.Resampling.NEAREST)
    for step in outcome.steps:
        if step.prediction.anomaly is not None:
            picture = drawn_over(picture, step.prediction.anomaly)
    _with_words(picture, outcome, times).save(target)
    return target


def _with_words(picture: Image.Image, outcome: Outcome, times: int) -> Image.Image:
    """Boxes, of the image before it was enlarged so many times, and a strip below it."""
    whole = Image.new("RGB", (picture.width, picture.height + STRIP_PX), GROUND)
    whole.paste(picture)
    draw = ImageDraw.Draw(whole)
    font = ImageFont.load_default(WORDS_PX)
    colour = COLOURS[outcome.verdict]
    for box in (box for step in outcome.steps for box in step.prediction.boxes):
        corners = [side * times for side in (box.left, box.top, box.right, box.bottom)]
        draw.rectangle(corners, outline=colour, width=LINE_PX)
        draw.text((corners[0] + LINE_PX, corners[1]), f"{box.label} {box.score:.2f}", colour, font, anchor="lb")
    draw.text((WORDS_AT[0], picture.height + WORDS_AT[1]), _words(outcome), colour, font, anchor="lm")
    return whole


def _words(outcome: Outcome) -> str:
    if outcome.label is None:
        return f"{outcome.verdict}  {outcome.reason}"
    measured = (step.prediction.anomaly for step in outcome.steps)
    scores = [f"({each.score:.4g}, threshold {each.threshold:.4g})" for each in measured if each is not None]
    return "  ".join([f"{outcome.verdict}  {outcome.label} {outcome.score:.3f}", *scores])
