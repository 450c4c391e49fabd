"""A verdict and its steps: the one shape in rows, exports, messages, pages and commands.

Guarantees: the JSON of a row's ``detail`` is written and read here alone, with its keys in one order. An export repeats
what is stored, also what an earlier version stored. Keys that are not known are ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping  # noqa: TC003  # pydantic reads it
from dataclasses import dataclass, field
from datetime import datetime  # noqa: TC003  # pydantic reads it
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import PlainSerializer, PlainValidator, TypeAdapter

from agent.records.database import Rows, as_column
from agent.subject import Subject
from experts.expert import BoundingBox, LabelScore, Verdict  # pydantic reads them

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable

    from experts.expert import Prediction

OF_KEPT = re.compile(r"~([0-9a-f]{32})\.\w+$")  # a kept image's name has the first digits of its digest
OF_SUBJECT = frozenset(Subject.__slots__)
COLUMNS = (
    "key", "image", "board", "board_type", "ref", "asked_sha256", "component", "arrived_at", "line", "seconds",
    "config_sha256", "label", "score", "reason", "kept_as", "verdict", "experts", "detail", "finished_at",
)  # fmt: skip
IF_ANY = ("outputs", "anomaly", "unproven")  # in the JSON of a step
CORNERS = BoundingBox.__slots__
CORNERS_OF = attrgetter(*CORNERS)
Boxes = Annotated[  # a corner on the image's edge is a whole number, and is written as one
    tuple[BoundingBox, ...],
    PlainValidator(lambda boxes: tuple(BoundingBox(**box) for box in boxes)),
    PlainSerializer(lambda boxes: [dict(zip(CORNERS, CORNERS_OF(box), strict=True)) for box in boxes]),
]


@dataclass(frozen=True, slots=True)
class AnomalyScore:
    """Measurement of an anomaly expert; its map is stored in another table."""

    score: float
    threshold: float


@dataclass(frozen=True, slots=True)
class Step:
    """Answer of one expert. ``model_sha256``: digest of its weights; ``unproven``: it had no proof when it answered."""

    expert: str
    label: str = ""
    score: float = 0.0
    boxes: Boxes = ()
    model_sha256: str | None = None
    outputs: tuple[LabelScore, ...] = ()
    anomaly: AnomalyScore | None = None
    unproven: bool = False

    @classmethod
    def answered(
        cls, expert: str, prediction: Prediction, model_sha256: str | None = None, *, unproven: bool = False
    ) -> Step:
        """Scores to six places and corners to a hundredth of a pixel, as they are stored."""
        anomaly = prediction.anomaly
        return cls(
            expert,
            prediction.label,
            prediction.score,
            tuple(box.rounded() for box in prediction.boxes),
            model_sha256,
            tuple(output.rounded() for output in prediction.outputs),
            None if anomaly is None or prediction.outputs else AnomalyScore(anomaly.score, anomaly.threshold),
            unproven,
        )


STEPS = TypeAdapter(tuple[Step, ...])


@dataclass(frozen=True, slots=True)
class KeptMap:
    """Anomaly map of an image: a small grey PNG over the whole image. ``step``: index in the route, from 0."""

    step: int
    expert: str
    png: bytes


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one request. ``seq``: number of its row; 0 until it is stored.

    ``course``: waits of each step, for an image that is NG or slow. ``duplicate_of``: key of the image with the
    same bytes, which was judged. ``parts``: how many were judged of the image that a part is of. ``place``: path of a
    judged file below its watched folder, once it was put away. ``kept_as``: path of the image below the archive's
    folder; None if not kept. ``maps`` are read by ``ResultReader.maps`` only.
    """

    subject: Subject
    line: str
    verdict: Verdict
    finished_at: datetime
    seconds: float
    config_sha256: str
    label: str | None = None
    score: float | None = None
    reason: str | None = None
    experts: tuple[str, ...] = ()
    steps: tuple[Step, ...] = ()
    course: Mapping[str, Any] | None = None
    duplicate_of: str | None = None
    image_sha256: str | None = None
    parts: int | None = None
    place: str | None = None
    kept_as: str | None = None
    maps: tuple[KeptMap, ...] = ()
    seq: int = field(default=0, compare=False)

    @property
    def detail(self) -> dict[str, Any]:
        """Fields that have no column of a row, as JSON."""
        box = self.subject.box
        optional = {
            "box": None if box is None else list(box),
            "course": self.course,
            "duplicate_of": self.duplicate_of,
            "image_sha256": self.image_sha256,
            "parts": self.parts,
            "place": self.place,
        }
        steps: list[dict[str, Any]] = list(STEPS.dump_python(self.steps))
        for step in steps:
            for name in IF_ANY:
                if not step[name]:
                    del step[name]
        return {"steps": steps} | {name: value for name, value in optional.items() if value is not None}

    @property
    def unproven(self) -> bool:
        return any(step.unproven for step in self.steps)

    @property
    def seen_sha256(self) -> str:
        """Digest of the judged image file, or its first digits; empty if a row of before does not tell it."""
        named = OF_KEPT.search(self.kept_as or "")
        return self.image_sha256 or (named[1] if named else "")

    def flat(self, names: Iterable[str]) -> dict[str, Any]:
        """Fields of the result and of its subject, by name."""
        return {name: getattr(self.subject if name in OF_SUBJECT else self, name) for name in names}

    def columns(self) -> dict[str, object]:
        """Values of a row. Raises TypeError or ValueError for what no row can hold."""
        detail = json.dumps(self.detail)  # in its own order
        row = self.flat(COLUMNS) | {"component": self.subject.component or "", "detail": detail}
        return {name: as_column(value) for name, value in row.items()}


RESULTS = Rows(Result)


def result_row(row: sqlite3.Row) -> Result:
    """Result of a row, perhaps with columns of other tables."""
    columns, detail = dict(row), json.loads(row["detail"])
    source, slash, _ = columns["key"].partition("/")
    place = {"source": source if slash else "", "component": columns["component"] or None, "box": detail.get("box")}
    return RESULTS.record(detail | columns, subject=columns | place)


def steps_of(detail: str) -> tuple[Step, ...]:
    """Steps of a row's ``detail``."""
    return STEPS.validate_python(json.loads(detail).get("steps", ()))


@dataclass(frozen=True, slots=True)
class AlarmRow:
    """``number``: None until it is stored. ``cleared_at``: None while the alarm is there."""

    number: int | None
    name: str
    message: str
    raised_at: datetime
    cleared_at: datetime | None = None
