"""Flips as one HTML file: a thumbnail of each image, and both answers. No script, nothing fetched, all text escaped."""

from __future__ import annotations

import base64
from html import escape
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from agent.commands.rejudging.agreement import SAME
from experts.errors import ImageError
from experts.expert import Orientation
from experts.filesystem import whole_text_file
from experts.images import LARGEST_MAX_PIXELS, decode_image

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from agent.commands.rejudging.agreement import AnswersCompared

THUMBNAIL_PX = 160
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 2em; background: #101214; color: #e4e6e8 }
section { display: flex; flex-wrap: wrap; gap: 1em } figure { margin: 0; width: 12em; overflow-wrap: anywhere }
img { width: 160px; height: 160px; object-fit: contain; background: #000; image-rendering: pixelated }
.OK { color: #56d67e } .NG { color: #ff483e } .UNKNOWN { color: #ffb830 } small { color: #9aa0a6 }
"""


def write_page(file: Path, title: str, compared: AnswersCompared) -> None:
    """Write the page, whole or not at all. Raises OSError."""
    with whole_text_file(file) as out:
        out.writelines(_page(title, compared))


def _page(title: str, compared: AnswersCompared) -> Iterator[str]:
    yield '<!doctype html>\n<html lang="en"><meta charset="utf-8"><meta http-equiv="Content-Security-Policy"'
    yield f' content="{POLICY}"><title>{escape(title)}</title><style>{STYLE}</style>\n<h1>{escape(title)}</h1>\n'
    agreeing = compared.total[SAME]
    yield f"<p>{compared.images} images, {compared.compared} with an earlier answer; {agreeing} agree.</p>\n"
    yield f"<h2>Other verdicts: {compared.flips_in_all}</h2>\n<p>The {len(compared.flips)} most certain first.</p>\n"
    yield "<section>\n"
    for row in compared.flips:
        yield _figure(row)
    yield "</section>\n</html>\n"


def _figure(row: Mapping[str, Any]) -> str:
    before = _answer(row["stored_verdict"], row["stored_label"], row["stored_score"])
    now = _answer(row["verdict"], row["label"] or row["reason"], row["score"])
    told = " ".join(str(row[name]) for name in ("component", "board", "ref") if row[name])
    thumbnail = _thumbnail(row)
    shown = f'<img alt="" src="data:image/png;base64,{thumbnail}">' if thumbnail else "<p>no image any more</p>"
    caption = f"{before} &rarr; {now}<br>{escape(told)}<br><small>{escape(row['path'])}</small>"
    return f"<figure>{shown}<figcaption>{caption}</figcaption></figure>\n"


def _answer(verdict: str, label: str | None, score: float | None) -> str:
    told = "" if score is None else f" {score:.3f}"
    return f'<b class="{escape(verdict)}">{escape(verdict)}</b> {escape(label or "")}{told}'


def _thumbnail(row: Mapping[str, Any]) -> str | None:
    """PNG of the image or its part, in base64; None where it cannot be read."""
    try:
        pixels = decode_image(Path(row["path"]), row["path"], LARGEST_MAX_PIXELS).turned(Orientation.EXIF)
        picture = Image.fromarray(pixels).crop(row["box"]) if row["box"] else Image.fromarray(pixels)
        picture.thumbnail((THUMBNAIL_PX, THUMBNAIL_PX))
        png = BytesIO()
        picture.save(png, "PNG")
    except (ImageError, OSError, ValueError):
        return None
    return base64.b64encode(png.getvalue()).decode()
