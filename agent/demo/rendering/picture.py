"""A rendered board with its verdicts and anomaly maps drawn in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from PIL import Image, ImageDraw

from agent.demo.rendering.canvas import font
from experts.expert import Verdict
from experts.thresholds.map_pictures import drawn_over

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agent.demo.rendering.components import Colour
    from agent.demo.rendering.render import Placement, RenderedBoard
    from experts.expert import Anomaly

COLOURS: dict[Verdict, Colour] = {
    Verdict.OK: (86, 214, 126),
    Verdict.NG: (255, 72, 62),
    Verdict.UNKNOWN: (255, 184, 48),
}
TAG_PX = 19
STRIP_PX = 56


@dataclass(frozen=True, slots=True)
class PartVerdict:
    """Verdict on one part. ``anomaly``: an anomaly expert's measurement, with its map where NG."""

    verdict: Verdict
    label: str
    anomaly: Anomaly | None = None


def draw_verdicts(board: RenderedBoard, verdicts: Mapping[str, PartVerdict]) -> Image.Image:
    """The board with a box around each part by its ref: OK thin green, NG red with its label, UNKNOWN amber.

    An anomalous part has its map drawn over it. A part without a verdict is UNKNOWN. Below the board are the counts.
    """
    width, height = board.image.size
    picture = Image.new("RGB", (width, height + STRIP_PX), (16, 18, 20))
    picture.paste(board.image)
    draw = ImageDraw.Draw(picture, "RGBA")
    nothing = PartVerdict(Verdict.UNKNOWN, "no verdict")
    judged = [(placement, verdicts.get(placement.ref, nothing)) for placement in board.placements]
    for placement, part in judged:
        if part.anomaly is not None and part.anomaly.map is not None:  # the map is of the upright crop
            upright = board.image.crop(placement.window).rotate(90 * placement.quarter_turns)
            picture.paste(drawn_over(upright, part.anomaly).rotate(-90 * placement.quarter_turns), placement.window[:2])
    for placement, part in sorted(judged, key=lambda pair: pair[1].verdict is not Verdict.OK):
        draw_part_verdict(draw, placement, part, width)
    draw_strip(draw, board.name, [part.verdict for _, part in judged], height)
    return picture


def draw_part_verdict(draw: ImageDraw.ImageDraw, placement: Placement, part: PartVerdict, picture_width: int) -> None:
    colour = COLOURS[part.verdict]
    if part.verdict is Verdict.OK:
        draw.rounded_rectangle(placement.window, radius=5, outline=(*colour, 150), width=1)
        return
    draw.rounded_rectangle(placement.window, radius=7, outline=colour, fill=(*colour, 26), width=4)
    words = f"{placement.ref} {part.label}"
    left, top = placement.window[0], placement.window[1] - TAG_PX - 7
    tag_width = draw.textlength(words, font=font(TAG_PX)) + 14
    left = max(4, min(left, round(picture_width - tag_width) - 4))
    top = top if top > 4 else placement.window[3] + 3
    draw.rounded_rectangle((left, top, left + tag_width, top + TAG_PX + 6), radius=5, fill=colour)
    draw.text((left + 7, top + (TAG_PX + 6) / 2), words, font=font(TAG_PX), fill=(20, 12, 12), anchor="lm")


def draw_strip(draw: ImageDraw.ImageDraw, name: str, verdicts: list[Verdict], top: int) -> None:
    """The board's name, its own verdict and the counts."""
    overall = next((v for v in (Verdict.NG, Verdict.UNKNOWN) if v in verdicts), Verdict.OK)
    middle = top + STRIP_PX / 2
    draw.rounded_rectangle((24, top + 10, 24 + 130, top + STRIP_PX - 10), radius=7, fill=COLOURS[overall])
    draw.text((24 + 65, middle), overall.value, font=font(24), fill=(20, 12, 12), anchor="mm")
    draw.text((180, middle), name, font=font(24), fill=(232, 234, 232), anchor="lm")
    x = 560.0
    for verdict in Verdict:
        draw.ellipse((x, middle - 8, x + 16, middle + 8), fill=COLOURS[verdict])
        words = f"{verdicts.count(verdict)} {verdict.value}"
        draw.text((x + 28, middle), words, font=font(22), fill=(206, 210, 208), anchor="lm")
        x += 28 + draw.textlength(words, font=font(22)) + 46
