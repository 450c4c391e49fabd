"""`coserve review export`: reviewed images as labelled crops, YOLO data and anomaly maps, with a table of the reviews.

    crops/COMPONENT/LABEL/SEQ.png        parts as their last expert saw them: cut, turned by its rule; `ok` is good
    maps/COMPONENT/LABEL/SEQ-STEP.png    anomaly maps of these parts, over the image as viewers show it
    yolo/KIND/NAME/images|labels/SEQ.*   a detector's images, turned as viewers show them, and its boxes; data.yaml
    reviews.csv                          every review: who, when, finding, key, sha256 of the crop, or why it has none

Guarantees: the folder appears whole or not at all, and no file is overwritten. An image without a known label or box is
left out and counted, never guessed.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from io import BytesIO
from typing import TYPE_CHECKING, Any

import yaml
from PIL import Image

from agent.commands.rejudging.archive import GONE, archived_image, pixels_of
from agent.records.export import csv_head, write_rows
from agent.records.result_reader import ResultReader
from agent.records.truth.figures import verdict_by
from agent.records.truth.reviewed import reviewed_results, right_answer_of
from experts.errors import ConfigError, ImageError
from experts.expert import NOTHING_FOUND, Orientation, Verdict
from experts.filesystem import is_taken, whole_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from agent.config import LineConfig
    from agent.records.station.reviews import ReviewedResult, ReviewQuery
    from agent.records.verdict import Result, Step
    from agent.runtime.images.sources import Frame
    from experts.expert import BoundingBox
    from experts.graph import ExpertGraph
    from experts.images import Decoded

    Row = dict[str, Any]

OK_LABEL, DEFECT = "ok", "defect"
STRANGE = re.compile(r"[^\w. -]|^\.+|[. ]+$")
LONGEST_NAME = 60  # characters of four bytes, each written as %XX four times: below the 255 bytes of a filesystem
COLUMNS = (
    "number", "at", "who", "finding", "verdict", "label", "reason", "seq", "key", "component", "board", "board_type",
    "ref", "machine_verdict", "machine_label", "experts", "crop", "sha256", "left_out",
)  # fmt: skip


def crop_label(reviewed: ReviewedResult, graph: ExpertGraph) -> str:
    """Label of a part: ``ok`` for a good one, else the person's, else the one with which the machine found it NG."""
    review, result = reviewed.review, reviewed.result
    if review.verdict is Verdict.OK:
        return OK_LABEL
    found = result.label if result.verdict is Verdict.NG else None
    passing = passing_labels(graph, result.subject.component, result.experts[-1]) if result.experts else frozenset()
    label = review.label or (None if found in passing else found)
    return DEFECT if label is None or folder_name(label).lower() == OK_LABEL else label


def folder_name(text: str) -> str:
    """A name of one folder on every filesystem: what is strange in it as %XX, as in URLs."""
    cut = text if len(text) <= LONGEST_NAME else text[:LONGEST_NAME]
    return STRANGE.sub(lambda match: "".join(f"%{byte:02X}" for byte in match[0].encode()), cut) or DEFECT


def passing_labels(graph: ExpertGraph, component: str | None, expert: str) -> frozenset[str]:
    """Labels with which a component's route goes on behind an expert."""
    steps = graph.routes.get(component or "", ())
    return frozenset().union(*(step.going_on for step in steps if step.expert == expert))


def finds_boxes(step: Step) -> bool:
    """A detector's step."""
    is_other = step.anomaly or step.outputs
    return bool(step.boxes) or (step.label == NOTHING_FOUND and not is_other)


def true_boxes(config: LineConfig, reviewed: ReviewedResult, step: Step) -> Sequence[BoundingBox] | str:
    """Boxes that a detector should find; or why they are not known."""
    name, label, boxes = step.expert, reviewed.review.label, step.boxes
    if name not in config.catalog.experts:
        return f"the line has no expert {name} any more"
    if not {box.label for box in boxes} <= {*config.catalog.experts[name].labels}:
        return f"a box has a label that {name} has no more"
    result, right = reviewed.result, right_answer_of(config, reviewed, name)
    answer = verdict_by(name, result.experts, result.verdict)
    passing = passing_labels(config.catalog.graph, result.subject.component, name)
    failing = {box.label for box in boxes} - passing
    if right is None:
        return "its review says nothing of the detector"
    if answer is Verdict.UNKNOWN:
        return "the verdict was UNKNOWN: no box was confirmed"
    if right is Verdict.OK:
        return [box for box in boxes if box.label in passing]
    if answer is Verdict.OK:
        return "a missed defect has no boxes"
    if boxes and not failing:
        return "no box shows the defect"
    if boxes and label is not None and label not in failing:
        return "the person named another defect than the boxes"
    return boxes


def yolo_lines(boxes: Sequence[BoundingBox], labels: Sequence[str], size: tuple[int, int]) -> str:
    """Boxes as lines of a YOLO label file: class, middle and extent in shares of ``size``: (height, width)."""
    height, width = size
    lines = []
    for box in boxes:
        left, right = (min(max(side / width, 0.0), 1.0) for side in (box.left, box.right))
        top, bottom = (min(max(side / height, 0.0), 1.0) for side in (box.top, box.bottom))
        shares = (left + right) / 2, (top + bottom) / 2, right - left, bottom - top
        lines.append(" ".join([str(labels.index(box.label)), *(f"{share:.6f}" for share in shares)]))
    return "".join(f"{line}\n" for line in lines)


def review_row(reviewed: ReviewedResult) -> Row:
    """A review and what the machine said, as one flat row."""
    review, result = reviewed.review, reviewed.result
    row: Row = {name: getattr(review, name) for name in COLUMNS[:7]} | {"at": review.at.astimezone().isoformat()}
    row |= result.flat(COLUMNS[7:13]) | {"component": result.subject.component or ""}
    return row | {
        "machine_verdict": result.verdict, "machine_label": result.label, "experts": " ".join(result.experts)
    }  # fmt: skip


def export_reviews(
    config: LineConfig, query: ReviewQuery, folder: Path, progress: Callable[[str, int, int], None]
) -> Row:
    """Write the folder, and return what `--json` tells. Raises ConfigError."""
    if is_taken(folder):
        raise ConfigError(f"{folder} holds files already - name a new folder; --since takes later reviews alone")
    reviewed = reviewed_results(config, query)
    if not reviewed:
        raise ConfigError("no review matches - review results on the station's page, or with `coserve review add`")
    reviewed.sort(key=lambda each: each.result.subject.key)  # parts of a frame in a row: it is decoded once
    try:
        with whole_folder(folder) as made:
            export = _Export(config, made)
            for number, each in enumerate(reviewed, start=1):
                export.add(each)
                progress("export reviews", number, len(reviewed))
            export.finish()
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror or error} - name a folder that can be written") from error
    return {
        "folder": str(folder), "reviews": len(reviewed), "crops": export.crops, "maps": export.maps,
        "yolo": dict(export.yolo), "left_out": dict(export.left_out), "left_out_of_yolo": dict(export.left_out_of_yolo),
    }  # fmt: skip


class _Export:
    def __init__(self, config: LineConfig, folder: Path) -> None:
        self._config = config
        self._experts = config.catalog.experts
        self._folder = folder
        self._reader = ResultReader(config.results_file)
        self._rows: list[Row] = []
        self._frames: dict[str, Frame] = {}
        self.crops: Counter[str] = Counter()
        self.maps = 0
        self.yolo: Counter[str] = Counter()
        self.left_out: Counter[str] = Counter()
        self.left_out_of_yolo: Counter[str] = Counter()

    def add(self, reviewed: ReviewedResult) -> None:
        row = review_row(reviewed)
        self._rows.append(row)
        image = self._image(reviewed.result)
        why = image if isinstance(image, str) else self._add_crop(reviewed, image, row)
        if isinstance(image, str) or why is not None:
            self.left_out[str(why)] += 1
            row["left_out"] = why
            return
        for step in reviewed.result.steps:
            if finds_boxes(step):
                self._add_boxes(reviewed, step, image)

    def finish(self) -> None:
        for name in self.yolo:
            data = {"train": "images", "val": "images", "names": dict(enumerate(self._experts[name].labels))}
            text = yaml.safe_dump(data, allow_unicode=True, sort_keys=False)
            self._write(f"yolo/{name}/data.yaml", text.encode())
        with (self._folder / "reviews.csv").open("w", encoding="utf-8", newline="") as file:
            file.write(csv_head(COLUMNS))
            write_rows(sorted(self._rows, key=lambda row: row["number"]), "csv", file, COLUMNS)

    def _image(self, result: Result) -> Decoded | str:
        """Pixels of a part or an image; or why there are none."""
        if not result.subject.component:
            return "its result names no component"
        image = archived_image(self._config, result)
        if image is None:
            return GONE
        try:
            return pixels_of(image, self._frames)
        except ImageError as error:
            return f"the image cannot be used: {error.message}"

    def _add_crop(self, reviewed: ReviewedResult, image: Decoded, row: Row) -> str | None:
        """Why there is none; None if there is."""
        result = reviewed.result
        last = self._experts.get(result.experts[-1]) if result.experts else None
        try:
            png = _png(image.turned(Orientation.EXIF) if last is None else image.seen_by(last))
        except ImageError as error:
            return f"the image cannot be used: {error.message}"
        component, label = str(result.subject.component), crop_label(reviewed, self._config.catalog.graph)
        place = f"{folder_name(component)}/{folder_name(label)}/{reviewed.result.seq:08}"
        self._write(f"crops/{place}.png", png)
        self.crops[f"{component}/{label}"] += 1
        row |= {"crop": f"crops/{place}.png", "sha256": hashlib.sha256(png).hexdigest()}
        for kept in self._reader.maps(reviewed.result.seq):
            self._write(f"maps/{place}-{kept.step}.png", kept.png)
            self.maps += 1
        return None

    def _add_boxes(self, reviewed: ReviewedResult, step: Step, image: Decoded) -> None:
        name, boxes = step.expert, true_boxes(self._config, reviewed, step)
        try:
            pixels = image.upright().seen_by(self._experts[name])
        except ImageError as error:
            boxes = f"the image cannot be used: {error.message}"
        if isinstance(boxes, str):
            self.left_out_of_yolo[boxes] += 1
            return
        self._write(f"yolo/{name}/images/{reviewed.result.seq:08}.png", _png(pixels))
        text = yolo_lines(boxes, self._experts[name].labels, pixels.shape[:2])
        self._write(f"yolo/{name}/labels/{reviewed.result.seq:08}.txt", text.encode())
        self.yolo[name] += 1

    def _write(self, place: str, content: bytes) -> None:
        target = self._folder / place
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)


def _png(pixels: NDArray[np.uint8]) -> bytes:
    buffer = BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()
