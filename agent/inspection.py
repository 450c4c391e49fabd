"""One-off work on a line without its agent: judging given images, hashing packed weights."""

from __future__ import annotations

import hashlib
import time
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from agent.assembly import build_agent, pack, packed_folder, precision_of
from experts.errors import ConfigError, ExpertError
from experts.weights import SegmentStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from agent.config import LineConfig
    from agent.core.request import Outcome
    from experts.expert import Box


def inspect_images(
    config: LineConfig, images: Sequence[Path], component: str, progress: Callable[[str, int, int], None]
) -> list[dict[str, Any]]:
    """One row per image, in order: image, component, verdict, label, score, experts, seconds, reason, boxes.

    Raises ConfigError for a component without a route; what is wrong with an image is its row's reason.
    """
    if component not in config.catalog.graph.routes:
        known = ", ".join(sorted(config.catalog.graph.routes))
        raise ConfigError(f"no route for component {component!r} - this line knows {known}")
    ended: SimpleQueue[tuple[int, Outcome, float]] = SimpleQueue()
    agent = build_agent(config, lambda number, outcome: ended.put((number, outcome, time.monotonic())), progress)
    agent.start()
    try:
        started = {agent.loop.submit(image, component=component): (image, time.monotonic()) for image in images}
        rows: dict[int, dict[str, Any]] = {}
        while len(rows) < len(started):
            number, outcome, at_s = ended.get()
            image, since_s = started[number]
            rows[number] = _row(image, component, outcome, at_s - since_s)
            progress("inspect", len(rows), len(started))
    finally:
        agent.stop()
    return [rows[number] for number in started]


def outputs_sha256(labels: Iterable[str | None]) -> str:
    """A digest over (request number, label): two policies that judge the same images must agree on it in fp32."""
    digest = hashlib.sha256()
    for number, label in enumerate(labels):
        digest.update(f"{number} {label}\n".encode())
    return digest.hexdigest()


def verify_line(config: LineConfig, progress: Callable[[str, int, int], None]) -> list[dict[str, Any]]:
    """Hash all that is packed, after bringing it up to date: expert, ok, reason, size_bytes, sha256 of its source."""
    segments = SegmentStore(packed_folder(config))
    try:
        precisions = {"all": {name: precision_of(config, name) for name in config.catalog.experts}}
        report = pack(config, segments, precisions, progress)
        rows = []
        for number, name in enumerate(config.catalog.experts, start=1):
            progress("verify", number, len(config.catalog.experts))
            packed = report.packed.get(name, {})
            reason = report.failed[name].message if name in report.failed else None
            try:
                for each in packed.values():
                    for segment in each.segments:
                        segments.verify(segment, name)
            except ExpertError as error:
                reason = error.message
            size_bytes = sum(segment.size_bytes for each in packed.values() for segment in each.segments)
            source = next((each.source_sha256 for each in packed.values()), None)
            rows.append(
                {
                    "expert": name,
                    "ok": reason is None,
                    "reason": reason,
                    "size_bytes": size_bytes,
                    "source_sha256": source,
                }
            )
        return rows
    finally:
        segments.close()


def _row(image: Path, component: str, outcome: Outcome, seconds: float) -> dict[str, Any]:
    return {
        "image": str(image),
        "component": component,
        "verdict": str(outcome.verdict),
        "label": outcome.label,
        "score": outcome.score,
        "experts": [step.expert for step in outcome.steps],
        "seconds": round(seconds, 6),
        "reason": outcome.reason,
        "boxes": [box_json(box) for step in outcome.steps for box in step.prediction.boxes],
    }


def box_json(box: Box) -> dict[str, Any]:
    """A box as JSON: corners in pixels of the image as it came."""
    sides = (("left", box.left), ("top", box.top), ("right", box.right), ("bottom", box.bottom))
    corners = {side: round(value, 2) for side, value in sides}
    return {"label": box.label, "score": round(box.score, 6), **corners}
