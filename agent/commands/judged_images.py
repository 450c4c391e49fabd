"""Judged images as `coserve inspect` prints and draws them, whether an agent judged them or this process."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from experts.expert import Anomaly, BoundingBox, LabelScore, Verdict


@dataclass(frozen=True, slots=True)
class JudgedImage:
    """Verdict on one image. ``anomalies``: each with its expert."""

    verdict: Verdict
    label: str | None = None
    score: float | None = None
    reason: str | None = None
    experts: tuple[str, ...] = ()
    seconds: float = 0.0
    boxes: tuple[BoundingBox, ...] = ()
    anomalies: tuple[tuple[str, Anomaly], ...] = ()
    outputs: tuple[LabelScore, ...] = ()

    def row(self, image: Path, component: str) -> dict[str, Any]:
        return {
            "image": str(image),
            "component": component,
            "verdict": str(self.verdict),
            "label": self.label,
            "score": self.score,
            "experts": list(self.experts),
            "seconds": round(self.seconds, 6),
            "reason": self.reason,
            "boxes": [box.as_json() for box in self.boxes],
            "anomalies": [{"expert": expert, **anomaly.as_json()} for expert, anomaly in self.anomalies],
            "outputs": [output.as_json() for output in self.outputs],
        }


def outputs_sha256(labels: Iterable[str | None]) -> str:
    """A digest over (request number, label): two policies that judge the same images must agree on it in fp32."""
    digest = hashlib.sha256()
    for number, label in enumerate(labels):
        digest.update(f"{number} {label}\n".encode())
    return digest.hexdigest()
