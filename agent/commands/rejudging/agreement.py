"""Answers as rows, new ones beside earlier ones: figures of their agreement, and the most certain flips on one page."""

from __future__ import annotations

import base64
import heapq
from collections import Counter, defaultdict
from html import escape
from io import BytesIO
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from PIL import Image

from experts.errors import ConfigError, ImageError
from experts.expert import Orientation, Verdict
from experts.filesystem import whole_text_file
from experts.images import LARGEST_MAX_PIXELS, decode_image

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from agent.commands.rejudging.archive import ArchivedImage
    from agent.core.request import Outcome

Row = dict[str, Any]
MOST_FLIPS = 500  # that a page shows
KINDS = ("agreeing", "other_label", "ok_to_ng", "ng_to_ok", "to_unknown", "from_unknown")
THUMBNAIL_PX = 160
PAGE = Template("""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" \
content="default-src 'none'; img-src data:; style-src 'unsafe-inline'"><title>$title</title><style>
body { font: 14px/1.4 system-ui, sans-serif; margin: 2em; background: #101214; color: #e4e6e8 }
section { display: flex; flex-wrap: wrap; gap: 1em } figure { margin: 0; width: 12em; overflow-wrap: anywhere }
img { width: 160px; height: 160px; object-fit: contain; background: #000; image-rendering: pixelated }
.OK { color: #56d67e } .NG { color: #ff483e } .UNKNOWN { color: #ffb830 } small { color: #9aa0a6 }
</style>
<h1>$title</h1>
<p>$images images, $compared with an earlier answer; $agreeing agree.</p>
<h2>Other verdicts: $flips</h2>
<p>The $shown most certain first.</p>
<section>
$figures</section>
</html>
""")


def new_row(image: ArchivedImage, outcome: Outcome) -> Row:
    """Row of an image with its new answer."""
    row = {name: getattr(image.subject, name) for name in ("key", "box", "component", "board", "ref")}
    row |= {name: getattr(outcome, name) for name in ("verdict", "label", "score", "reason")}
    experts, scores = [each.expert for each in outcome.steps], [each.prediction.score for each in outcome.steps]
    return row | {"path": image.path, "experts": experts, "scores": scores}


def beside(row: Row, earlier: Mapping[str, Any] | None) -> Row:
    """The row with an earlier answer."""
    row = row | {f"stored_{name}": (earlier or {}).get(name) for name in ("verdict", "label", "score", "at")}
    return row | {"agrees": _kind_of(row) == "agreeing" if earlier else None}


def compare_answers(rows: Iterable[Row], most: int = MOST_FLIPS) -> tuple[Row, list[Row]]:
    """Figures for `--json`, and the ``most`` certain of the rows with another verdict. Rows are read once, not held."""
    images, total = 0, Counter(dict.fromkeys(KINDS, 0))
    places: defaultdict[tuple[str, str], Counter[str]] = defaultdict(lambda: Counter(dict.fromkeys(KINDS, 0)))

    def flips() -> Iterator[Row]:
        nonlocal images
        for row in rows:
            images += 1
            if row["stored_verdict"] is not None:
                kind = _kind_of(row)
                total[kind] += 1
                places[row["component"] or "", row["experts"][-1] if row["experts"] else ""][kind] += 1
                if row["verdict"] != row["stored_verdict"]:
                    yield row

    # of the less certain of both answers; scores of anomalies are on no scale
    most_certain = heapq.nlargest(most, flips(), lambda row: min(1.0, row["score"] or 0.0, row["stored_score"] or 0.0))
    compared = total.total()
    agreement = total["agreeing"] / compared if compared else None
    told: list[Row] = [
        {"component": component, "expert": expert, "images": counts.total(), **counts}
        for (component, expert), counts in sorted(places.items())
    ]
    told.sort(key=lambda place: place["agreeing"] - place["images"])
    return {"images": images, "compared": compared, "agreement": agreement, **total, "places": told}, most_certain


def write_page(file: Path, title: str, figures: Row, flips: list[Row]) -> Path | None:
    """Write the page: no script, nothing fetched, all text escaped. None without flips. Raises ConfigError."""
    if not flips:
        return None
    other_verdicts = sum(figures[kind] for kind in KINDS[2:])
    shown = {"title": escape(title), "shown": len(flips), "figures": "".join(map(_figure, flips))}
    try:
        with whole_text_file(file) as out:
            out.write(PAGE.substitute(figures, flips=other_verdicts, **shown))
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error} - everything else is written") from error
    return file


def _kind_of(row: Row) -> str:
    now, before = row["verdict"], row["stored_verdict"]
    if now == before:
        return "agreeing" if row["label"] == row["stored_label"] else "other_label"
    if Verdict.UNKNOWN in (now, before):
        return "to_unknown" if now == Verdict.UNKNOWN else "from_unknown"
    return "ok_to_ng" if now == Verdict.NG else "ng_to_ok"


def _figure(row: Row) -> str:
    before = _answer(row["stored_verdict"], row["stored_label"], row["stored_score"])
    now = _answer(row["verdict"], row["label"] or row["reason"], row["score"])
    told = escape(" ".join(row[name] for name in ("component", "board", "ref") if row[name]))
    caption = f"{before} &rarr; {now}<br>{told}<br><small>{escape(row['path'])}</small>"
    return f"<figure>{_thumbnail(row)}<figcaption>{caption}</figcaption></figure>\n"


def _answer(verdict: str, label: str | None, score: float | None) -> str:
    return f'<b class="{verdict}">{verdict}</b> {escape(label or "")}' + ("" if score is None else f" {score:.3f}")


def _thumbnail(row: Row) -> str:
    try:
        pixels = decode_image(Path(row["path"]), row["path"], LARGEST_MAX_PIXELS).turned(Orientation.EXIF)
        picture = Image.fromarray(pixels).crop(row["box"]) if row["box"] else Image.fromarray(pixels)
        picture.thumbnail((THUMBNAIL_PX, THUMBNAIL_PX))
        png = BytesIO()
        picture.save(png, "PNG")
    except (ImageError, OSError, ValueError):
        return "<p>no image any more</p>"
    return f'<img alt="" src="data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}">'
