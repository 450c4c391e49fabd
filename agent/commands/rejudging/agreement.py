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
FLIPS = {"ok_to_ng": "OK to NG", "ng_to_ok": "NG to OK", "to_unknown": "to UNKNOWN", "from_unknown": "from UNKNOWN"}
DIFFERING = {"other_label": "another label", **FLIPS}
KINDS = {"agreeing": "agreeing", **DIFFERING}
THUMBNAIL_PX = 200
PAGE = Template("""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" \
content="default-src 'none'; img-src data:; style-src 'unsafe-inline'"><title>$title</title><style>
body { font: 14px/1.4 system-ui, sans-serif; margin: 2em; background: #101214; color: #e4e6e8 }
td, th { padding: 0 1.5em .2em 0; text-align: left } td + td + td { text-align: right }
section { display: flex; flex-wrap: wrap; gap: 1.5em } figure { margin: 0; width: 200px; overflow-wrap: anywhere }
img, .gone { width: 200px; height: 200px; object-fit: contain; background: #000; image-rendering: pixelated }
.OK { color: #56d67e } .NG { color: #ff483e } .UNKNOWN { color: #ffb830 } small, .gone { color: #9aa0a6 }
</style>
<h1>$title</h1>
<p>$images images, $compared with an earlier answer; $agreeing have the same verdict and label.
Below are all flips, or the $shown most certain ones.</p>
<table>
$table</table>
$sections</html>
""")


def new_row(image: ArchivedImage, outcome: Outcome) -> Row:
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
    agreements: list[Row] = [
        {"component": component, "expert": expert, "images": counts.total(), **counts}
        for (component, expert), counts in sorted(places.items())
    ]
    agreements.sort(key=lambda place: place["agreeing"] - place["images"])
    return {"images": images, "compared": compared, "agreement": agreement, **total, "places": agreements}, most_certain


def write_page(file: Path, title: str, figures: Row, flips: list[Row]) -> Path | None:
    """Write the page: no script, nothing fetched, all text escaped. None without flips. Raises ConfigError."""
    if not flips:
        return None
    differing = [place for place in figures["places"] if place["agreeing"] < place["images"]]
    lines = [("component", "expert", "images", *KINDS.values())]
    lines += [(place["component"], place["expert"], place["images"], *map(place.get, KINDS)) for place in differing]
    table = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}' for cell in line)}\n" for line in lines)
    sections = "".join(_section(kind, figures[kind], flips) for kind in FLIPS if figures[kind])
    try:
        with whole_text_file(file) as out:
            out.write(PAGE.substitute(figures, title=escape(title), shown=MOST_FLIPS, table=table, sections=sections))
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


def _section(kind: str, count: int, flips: list[Row]) -> str:
    figures = [_figure(row) for row in flips if _kind_of(row) == kind]
    shown = "" if len(figures) == count else f", {len(figures)} shown"
    return f"<h2>{FLIPS[kind]}: {count}{shown}</h2>\n<section>\n{''.join(figures)}</section>\n"


def _figure(row: Row) -> str:
    part = escape(" ".join(row[name] for name in ("component", "ref", "board") if row[name]))
    before = _answer(row["stored_verdict"], row["stored_label"], row["stored_score"])
    now = _answer(row["verdict"], row["label"] or row["reason"], row["score"])
    path = escape(row["path"]).replace("/", "/<wbr>")
    caption = f"{part}<br>was {before}<br>now {now}<br><small>{path}</small>"
    return f"<figure>{_thumbnail(row)}<figcaption>{caption}</figcaption></figure>\n"


def _answer(verdict: str, label: str | None, score: float | None) -> str:
    return f'<b class="{verdict}">{verdict}</b> {escape(label or "")}' + ("" if score is None else f" {score:.3f}")


def _thumbnail(row: Row) -> str:
    try:
        pixels = decode_image(Path(row["path"]), row["path"], LARGEST_MAX_PIXELS).turned(Orientation.EXIF)
        picture = Image.fromarray(pixels).crop(row["box"]) if row["box"] else Image.fromarray(pixels)
        picture.thumbnail((THUMBNAIL_PX, THUMBNAIL_PX))
        jpeg = BytesIO()
        picture.save(jpeg, "JPEG", quality=95, subsampling=0)  # PNGs of 500 photos are 40 MB
    except (ImageError, OSError, ValueError):
        return '<div class="gone">no image any more</div>'
    return f'<img alt="" src="data:image/jpeg;base64,{base64.b64encode(jpeg.getvalue()).decode()}">'
