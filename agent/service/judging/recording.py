"""How a line writes down what became of an image: as a row of its results, and as what its board sees."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import zip_longest
from typing import TYPE_CHECKING

from agent.records.boards import Inspection
from agent.records.results import KeptMap, Result
from experts.expert import Verdict
from experts.map_pictures import map_png

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent.config import LineConfig
    from agent.core.request import Outcome
    from agent.intake.arrivals import Arrival, Refusal
    from agent.records.journal import Entry
    from agent.records.results import Content
    from experts.expert import Prediction


def arrival_result(
    config: LineConfig, arrival: Arrival, outcome: Outcome, models: Sequence[str] = (), content: Content | None = None
) -> Result:
    """Row of a folder's image. ``content``: known bytes, to detect duplicates."""
    result = _judged(config, arrival, arrival.relpath, arrival.arrived_at, outcome, models)
    if content is None:
        return result
    detail = {**result.detail, "image_sha256": content.sha256}
    return replace(result, config_sha256=content.config_sha256, detail=detail)


def duplicate_result(config: LineConfig, arrival: Arrival, first: Result) -> Result:
    """The row of an image judged before under another key. No board type: it opens no new run of its board."""
    now = datetime.now(UTC).astimezone()
    return Result(
        key=arrival.key,
        line=config.line,
        component=arrival.component or "",
        image=arrival.relpath,
        verdict=first.verdict,
        arrived_at=arrival.arrived_at,
        finished_at=now,
        seconds=(now - arrival.arrived_at).total_seconds(),
        config_sha256=first.config_sha256,
        board=arrival.board,
        ref=arrival.ref,
        label=first.label,
        score=first.score,
        reason=f"the same bytes as {first.key}, which was {first.verdict}: not judged again",
        detail={"steps": [], "duplicate_of": first.key},
    )


def entry_result(config: LineConfig, entry: Entry, outcome: Outcome, models: Sequence[str] = ()) -> Result:
    result = _judged(config, entry, entry.name, entry.accepted_at, outcome, models)
    detail = result.detail if entry.box is None else {**result.detail, "box": list(entry.box)}
    return replace(result, asked_sha256=entry.asked_sha256, detail=detail)


@dataclass(frozen=True, slots=True)
class PartOfBoard:
    """One part of an image of a whole board. ``parts``: how many of that image are judged."""

    key: str
    image: str
    board: str
    board_type: str
    ref: str
    component: str
    box: tuple[int, int, int, int]
    parts: int
    arrived_at: datetime


def part_result(config: LineConfig, part: PartOfBoard, outcome: Outcome, models: Sequence[str] = ()) -> Result:
    result = _judged(config, part, part.image, part.arrived_at, outcome, models)
    return replace(result, detail={**result.detail, "box": list(part.box), "parts": part.parts})


def refused_result(config: LineConfig, refusal: Refusal) -> Result:
    """Row of a file that no request can be made of: UNKNOWN."""
    name = refusal.name
    return Result(
        key=refusal.key,
        line=config.line,
        component=(name.component if name else None) or "",
        image=refusal.relpath,
        verdict=Verdict.UNKNOWN,
        arrived_at=refusal.at,
        finished_at=refusal.at,
        seconds=0.0,
        config_sha256=config.catalog.sha256,
        board=name.board if name else None,
        board_type=name.board_type if name else None,
        ref=name.ref if name else None,
        reason=refusal.reason,
    )


def inspection_of(result: Result) -> Inspection | None:
    if result.board is None or result.board_type is None or result.ref is None:
        return None
    return Inspection(result.board, result.board_type, result.component, result.ref, result.verdict, result.finished_at)


def _judged(
    config: LineConfig,
    about: Arrival | Entry | PartOfBoard,
    image: str,
    arrived_at: datetime,
    outcome: Outcome,
    models: Sequence[str],
) -> Result:
    now = datetime.now(UTC).astimezone()
    steps = [
        {
            "expert": step.expert,
            "label": step.prediction.label,
            "score": step.prediction.score,
            "boxes": [box.as_json() for box in step.prediction.boxes],
            "model_sha256": model,
        }
        | _of_its_task(step.prediction)
        for step, model in zip_longest(outcome.steps, models)
    ]
    return Result(
        key=about.key,
        line=config.line,
        component=about.component or "",
        image=image,
        verdict=outcome.verdict,
        arrived_at=arrived_at,
        finished_at=now,
        seconds=(now - arrived_at).total_seconds(),
        config_sha256=config.catalog.sha256,
        board=about.board,
        board_type=about.board_type,
        ref=about.ref,
        label=outcome.label,
        score=outcome.score,
        reason=outcome.reason,
        experts=tuple(step.expert for step in outcome.steps),
        detail={"steps": steps},
        maps=_maps(config, outcome),
    )


def _of_its_task(prediction: Prediction) -> dict[str, object]:
    if prediction.outputs:
        return {"outputs": [output.as_json() for output in prediction.outputs]}
    return {} if prediction.anomaly is None else {"anomaly": prediction.anomaly.as_json()}


def _maps(config: LineConfig, outcome: Outcome) -> tuple[KeptMap, ...]:
    """Anomaly maps of an NG image, where the line keeps images."""
    if outcome.verdict is not Verdict.NG or config.records.images == "none":
        return ()
    measured = ((number, step, step.prediction.anomaly) for number, step in enumerate(outcome.steps))
    return tuple(
        KeptMap(number, step.expert, map_png(anomaly.map))
        for number, step, anomaly in measured
        if anomaly is not None and anomaly.map is not None
    )
