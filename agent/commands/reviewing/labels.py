"""Labels of reviewed images: the folder of a crop, and the boxes of a detector's image."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from agent.records.truth.figures import said_by
from agent.records.truth.reviewed import right_answer_of
from experts.expert import NOTHING_FOUND, Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent.config import LineConfig
    from agent.records.station.reviews import ReviewedResult
    from agent.records.verdict import Step
    from experts.expert import BoundingBox
    from experts.graph import ExpertGraph

OK_LABEL, DEFECT = "ok", "defect"
STRANGE = re.compile(r"[^\w. -]|^\.+|[. ]+$")
LONGEST_NAME = 60  # characters of four bytes, each written as %XX four times: below the 255 bytes of a filesystem


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
    said = said_by(name, result.experts, result.verdict)
    passing = passing_labels(config.catalog.graph, result.subject.component, name)
    failing = {box.label for box in boxes} - passing
    if right is None:
        return "its review says nothing of the detector"
    if said is Verdict.UNKNOWN:
        return "the verdict was UNKNOWN: no box was confirmed"
    if right is Verdict.OK:
        return [box for box in boxes if box.label in passing]
    if said is Verdict.OK:
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
